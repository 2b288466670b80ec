"""The command ``certify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("Prove a result again with another solver", "plan.json"),)


def certify(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What `solve --out` or `--json` wrote.")],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="auto|cpsat|cbc|highs", help="Solver.", show_default="not the result's own"
        ),
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option(
            "--programs", metavar="DIR", help="Also write the integer programs as MPS, for any other solver."
        ),
    ] = None,
    time_limit: o.TimeLimit = None,
    seed: o.Seed = 1,
    as_json: o.AsJson = False,
) -> None:
    """Prove a result again with another solver, without trusting the run that made it. Exits with 0 if it is
    certified, 2 if it is refuted or was changed, 4 if the second proof does not reach the bound."""
    from milpplan.cli import certify as certifying

    raise typer.Exit(int(certifying.run(result, backend, programs, time_limit, seed, as_json)))
