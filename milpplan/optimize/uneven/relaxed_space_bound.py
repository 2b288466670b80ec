"""Bound of a relaxed space: how much interleaved chunks of any size could gain over even chunks.

The search for uneven chunks (``--space any``) takes minutes, while closed-form bounds of all layouts are quick.
They prove the largest possible gain, so an answer over even chunks always says how much its space may miss.
"""

from __future__ import annotations

import time
from dataclasses import replace

from milpplan.optimize.context import SolveContext
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.prune_reasons import PruneRecord
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


def bound_of_any_chunks(
    problem: Problem, even: PruneRecord, best: Plan, options: SolveOptions, deadline: float | None
) -> float:
    """Return a proved lower bound of the objective over interleaved chunks of any size, in the unit of
    ``even.bounds``.

    Args:
        problem: the problem with even chunks.
        even: bounds proved over even chunks. Layouts without interleaving keep them; the others get closed-form
            bounds.
        best: best plan found with even chunks.
        options: options of the solve.
        deadline: of ``time.monotonic``. After it the remaining layouts are bounded by their compute time only.
    """
    space = problem.space.model_copy(update={"interleaved_layers": "any"})
    # No callback: the solve has its result, and this is no progress of it.
    context = SolveContext(replace(options, callback=None), backend(options.backend), [], deadline)
    search = Search(problem.model_copy(update={"space": space}), even.space, context, time.monotonic(), (best,))
    # Bounds by compute do not depend on chunks, so they stay valid.
    search.explored.frontier = even.frontier.closed_again()
    search.bound()
    return min(search.result().least(interleaved=True), even.least(interleaved=False), search.best_value)
