"""Minimum number of accelerators for a job: document and text of ``milpplan min-gpus``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from milpplan.explain.fewest import Fewest
from milpplan.problem.problem import MAX_GPUS
from milpplan.problem.records import Record
from milpplan.reports.documents.document import ResultDocument, result_document
from milpplan.reports.text.solve_text import solve_report
from milpplan.units import counted, printable
from milpplan.validation.evidence import Evidence
from milpplan.version import __version__


class FewestDocument(Record):
    """Minimum number of accelerators among the numbers tried.

    ``refused``: smaller numbers that provably have no plan; ``why``: what the largest of them lacks; ``open``:
    smaller numbers without such a proof; ``whole_nodes``: beyond one node only whole nodes were tried; ``result``:
    the best plan on the minimum number.
    """

    schema_version: Literal[1] = 1
    milpplan_version: str
    num_gpus: int | None
    whole_nodes: bool
    refused: tuple[int, ...]
    open: tuple[int, ...]
    why: str | None
    result: ResultDocument


def fewest_document(fewest: Fewest, tolerance: float) -> FewestDocument:
    """Make the document of an answer."""
    return FewestDocument(
        milpplan_version=__version__,
        num_gpus=fewest.num_gpus,
        whole_nodes=fewest.whole_nodes,
        refused=fewest.refused,
        open=fewest.open,
        why=fewest.why,
        result=result_document(fewest.result, tolerance),
    )


def fewest_report(
    found: Fewest,
    tolerance: float,
    evidence: Evidence | None = None,
    verbose: bool = False,
    next_steps: Sequence[str] = (),
) -> RenderableType:
    """Render the minimum number, the smaller numbers that are proved to have no plan, and the plan."""
    plan = solve_report(found.result, tolerance, evidence=evidence, verbose=verbose, next_steps=next_steps)
    return Group(_headline(found), Text(), plan)


def _headline(found: Fewest) -> Text:
    largest_refused = f"{found.refused[-1]:,}" if found.refused else ""
    tried = _tried(found)
    if found.num_gpus is None:
        proved = (
            f"; of {tried} up to {largest_refused} it is proved that they have none"
            if largest_refused and not found.open
            else ""
        )
        left = f"; {_spans(found)} open" if found.open else ""
        return Text(f"no number of GPUs with a plan was found{proved}{left}", "bold yellow")
    if found.open:
        text = Text(f"fits on {counted(found.num_gpus, 'GPU')}; {_spans(found)} open, of {tried}", "bold yellow")
        if largest_refused:
            text.append(
                f": proved that the other {len(found.refused):,} smaller ones have no plan.", "bold yellow"
            )
        if found.why is not None:
            text.append(printable(f"\nWith {largest_refused}: {found.why}"), "default")
        return text
    fewest = counted(found.num_gpus, "GPU is", "GPUs are")
    text = Text(f"{fewest} the fewest that have a plan, of {tried}", "bold green")
    if largest_refused:
        text.append(
            f": proved of all {len(found.refused):,} smaller ones, up to {largest_refused}.\n", "bold green"
        )
        if found.why is not None:
            text.append(printable(f"With {largest_refused}: {found.why}"), "default")
    return text


def _spans(fewest: Fewest) -> str:
    """Describe the open numbers, as ``72 to 160`` where all tried numbers in between are open."""
    words, run = [], list[int]()
    for count in sorted((*fewest.refused, *fewest.open, fewest.num_gpus or MAX_GPUS + 1)):
        if count in fewest.open:
            run.append(count)
        elif run:
            words.append(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}")
            run = []
    if run:
        words.append(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}")
    return ", ".join(words)


def _tried(fewest: Fewest) -> str:
    """Describe the candidate numbers."""
    node = fewest.result.problem.hardware.gpus_per_node
    if not fewest.whole_nodes:
        return "the numbers asked for"
    return f"1 to {node:,} and whole nodes of {node:,}" if node > 1 else "all numbers"
