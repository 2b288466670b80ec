"""Answer of ``doctor``: the checks of the installed solvers."""

from __future__ import annotations

from collections.abc import Sequence

from milpplan.optimize.milp.solver_self_test import SelfTestResult
from milpplan.reports.blocks import Block, Paragraph, Span, Table


def doctor_blocks(results: Sequence[SelfTestResult]) -> list[Block]:
    """Show a row for each check, with the consequence of every failure."""
    rows = []
    for result in results:
        verdict = Span("ok", "green") if result.passed else Span("FAILED", "bold red")
        if not result.answered:
            verdict = Span("not usable", "yellow")
        rows.append((result.name, verdict, result.seen))
    failures = [
        Paragraph(f"{result.name}: expected {result.expected}, got {result.seen}. {result.meaning}")
        for result in results
        if not result.passed
    ]
    return [Table("", ("check", "", "seen"), rows, words=(0, 1, 2)), *failures]
