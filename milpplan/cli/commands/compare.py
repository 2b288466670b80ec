"""The command ``compare``: plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, emit, show_blocks
from milpplan.errors import InvalidInputError
from milpplan.reports.answers.compare import Side, comparison_blocks, comparison_document
from milpplan.reports.documents.claims import proved_bound_s
from milpplan.reports.documents.document import document_text, read_plan
from milpplan.simulation import simulate

EXAMPLES: Final = (("What differs between two plans, and what that costs", "old.json new.json"),)
MOST_PLANS = 6
"""Maximum of plans: a terminal shows no more columns."""


def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN.json ...", help="Plan files; the first is the base.")
    ],
    as_json: o.AsJson = False,
) -> ExitCode:
    """Compare plans: what differs, how long a step of each takes, and where the difference comes from."""
    if not 2 <= len(plans) <= MOST_PLANS:
        raise InvalidInputError(
            f"{len(plans)} plan file{'' if len(plans) == 1 else 's'} to compare.",
            f"Expected two to {MOST_PLANS}.",
            "Name the files of the plans, the one to compare with first.",
        )
    sides = []
    for path, name in zip(plans, short_names(plans), strict=True):
        problem, plan = read_plan(path)
        check_plan_of_file(problem, plan)
        with within_range():
            sides.append(Side(name, problem, plan, simulate(problem, plan), proved_bound_s(path)))
    if as_json:
        emit(document_text(comparison_document(sides)))
    else:
        show_blocks(comparison_blocks(sides))
    return ExitCode.OPTIMAL


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name the files without their endings, or by their paths where two names would be equal."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    whole = [str(path) for path in paths]
    if len(set(whole)) < len(whole):
        return [f"{number}: {path}" for number, path in enumerate(whole, 1)]
    return whole
