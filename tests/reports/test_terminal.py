"""What a person reads, on terminals of any width."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from milpplan import solve
from milpplan.reports.answers.solve import solve_blocks
from milpplan.reports.answers.step import simulation_blocks
from milpplan.reports.terminal import terminal_text
from tests.small import small_problem


def printed(width: int) -> str:
    """Both reports of the small problem on a terminal of that many columns."""
    result = solve(small_problem(num_gpus=8, global_batch_size=64))
    assert result.plan is not None
    assert result.report is not None
    console = Console(file=StringIO(), width=width)
    console.print(terminal_text(solve_blocks(result, 1e-3, verbose=True)))
    console.print(terminal_text(simulation_blocks(result.problem, result.plan, result.report)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= width
    return text


@pytest.mark.parametrize("width", [60, 72, 100, 200])
def test_nothing_is_left_out_on_a_narrow_terminal(width: int) -> None:
    """No name or number ends in dots, and the parts of time and memory are whole words, beside each other or
    one table below the other."""
    text = printed(width)
    assert "…" not in text
    for part in ("compute", "optimizer", "gradients", "activations", "installed", "grad reduce exposed"):
        assert f" {part} " in text
    assert ("\nMemory (stage" in text) == (width < 79)
