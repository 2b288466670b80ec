"""What a person reads, on terminals of any width."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from milpplan import solve
from milpplan.reports import terminal_text
from milpplan.reports.answers import simulation_blocks, solve_blocks
from milpplan.reports.documents import result_document
from milpplan.reports.html.plan_page import search_section
from tests.optimize.problems import random_problem
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


def test_the_fastest_plan_is_named_beside_a_simpler_one() -> None:
    """Terminal, document and page name the share that the fastest plan saves and its other choices; where the
    answer is the fastest plan, nothing is said."""
    problem = random_problem(0, kind="uniform")
    result = solve(problem, gap=0.05)
    assert result.plan is not None
    assert result.fastest is not None
    console = Console(file=StringIO(), width=400)
    console.print(terminal_text(solve_blocks(result, 0.05)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    line = next(line for line in text.splitlines() if line.startswith("fastest"))
    assert f"{100 * result.fastest.saved_fraction:.2f} % faster" in line
    own, other = result.plan.layout, result.fastest.plan.layout
    assert own.vpp == other.vpp or f"vpp={other.vpp}" in line
    document = result_document(result, 0.05)
    assert document.fastest is not None
    assert document.fastest.plan.restored("result") == result.fastest.plan
    assert search_section(document)["fastest"] in line
    without = solve(problem, gap=0.05, simplest=False)
    assert result_document(without, 0.05).fastest is None
    assert search_section(result_document(without, 0.05))["fastest"] is None
    assert without.step_time_s == result.fastest.step_time_s
