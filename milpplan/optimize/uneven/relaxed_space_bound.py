"""What a proof over even interleaved chunks says about chunks of any size.

The search for uneven chunks (``--space any``) takes minutes, closed-form bounds of all layouts take less than a
second. They prove how much uneven chunks can gain at most: no answer leaves open what its space leaves out.
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
    """A proved lower bound of the objective, in the unit of ``even.bounds``, over interleaved chunks of any size.

    ``even``: what is proved over even chunks, ``best`` the plan found there. Layouts without interleaving keep
    their bounds; the others have closed-form ones. After the deadline (``time.monotonic``) what is left is bounded
    by its compute alone.
    """
    space = problem.space.model_copy(update={"interleaved_layers": "any"})
    # Its progress is none of the solve, whose result is there.
    context = SolveContext(replace(options, callback=None), backend(options.backend), [], deadline)
    search = Search(problem.model_copy(update={"space": space}), even.space, context, time.monotonic(), (best,))
    # What layers compute alone says nothing of chunks.
    search.frontier = even.frontier.closed_again()
    search.bound()
    return min(search.result().least(interleaved=True), even.least(interleaved=False), search.best_value)
