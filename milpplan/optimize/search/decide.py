"""Decide all layouts of a space: bounds first, then simulation or branching."""

from __future__ import annotations

from milpplan.optimize.search.best_first import Search


def decide_layouts(search: Search) -> None:
    """Decide every layout, or stop at the time limit or when no further plan is wanted.

    The uniform space is decided by simulating its plans in the order of their bounds; every other space by
    relaxations, then branching on the layouts that remain.

    Args:
        search: A search that has not begun; its incumbent, bounds and log are the result.
    """
    search.bound()
    if search.problem.space.kind == "uniform":
        search.simulate_uniform_plans(search.explored.uniform_ns.size)
    else:
        # The modules of the second phase take half of all import time.
        from milpplan.optimize.search.branch_phase import BranchPhase

        BranchPhase.of(search).run()
    search.note(force=True)
