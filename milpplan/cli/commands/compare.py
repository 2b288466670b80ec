"""The command ``compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("What differs between two plans, and what that costs", "old.json new.json"),)


def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN.json ...", help="Plan files; the first is the base.")
    ],
    as_json: o.AsJson = False,
) -> None:
    """Compare plans: what differs, how long a step of each takes, and where the difference comes from."""
    from milpplan.cli import compare as comparing

    raise typer.Exit(int(comparing.run(plans, as_json)))
