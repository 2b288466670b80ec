"""Text of ``milpplan doctor``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.optimize.milp.solver_self_test import SelfTestResult


def canary_table(results: Sequence[SelfTestResult]) -> RenderableType:
    """Show a row for each check, with the consequence of every failure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "", "seen"):
        table.add_column(column)
    for result in results:
        verdict = Text("ok", "green") if result.passed else Text("FAILED", "bold red")
        if not result.answered:
            verdict = Text("not usable", "yellow")
        table.add_row(Text(result.name), verdict, Text(result.seen))
    failures = [
        Text(f"{result.name}: expected {result.expected}, got {result.seen}. {result.meaning}")
        for result in results
        if not result.passed
    ]
    return Group(table, *failures)
