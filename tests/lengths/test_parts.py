"""Parts of pipelines in sets: what whole sequences add near a load holds for all groups of that load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milpplan.lengths import Step
from milpplan.lengths.bounds import ConfigurationBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.turns import TurnSearch
from tests.lengths.cases import pool, restrict


@pytest.mark.long
def test_sets_know_what_is_known_of_their_strategies_alone() -> None:
    """When more is known of a pipeline alone, its sets take it over: bounds do not fall, some rise, and no random
    share of the sequences, packed and timed exactly, is below any."""
    found = replace(pool(), work_bound_cache={})
    random = np.random.default_rng(11)
    # A step that everything is shorter than closes nothing.
    search, rose, checked = TurnSearch(found, Step(0, (0,), {}, 10**15), 0.0), 0, 0
    search.deadline = Deadline.after(60.0)
    chosen = [member for member in search.members if 1 < found.num_stages(member) < 8][:3]
    restrict(search, [*chosen, *(member for member in search.members if found.num_stages(member) == 1)][:5])
    sets = [
        search.node(one, number)
        for number, one in enumerate(search.bounds.screen(2, search.target_ns, search.deadline).sets)
    ]
    for left in sets:
        search._branch(left)
        assert search.bounds.own_memory_ns(left.screened.strategies) == left.own_memory_ns
    before = [left.bound_ns for left in sets]
    for member in chosen:
        # That takes the longest beside others only if it holds it.
        if np.isfinite(found.latency_bound_ns(member, shared_memory=False)):
            loads = found.work_bound_with_longest(member, np.inf)
            filled = ConfigurationBound(loads, found.micro_batch_pricing(member))
            filled.run(loads.workload_bound_ns * 1.02, Deadline.after(0.7))
            found.store_bound(member, filled.loads)
    for left, before_ns in zip(sets, before, strict=True):
        if search.bounds.own_memory_ns(left.screened.strategies) > left.own_memory_ns:
            search._branch(left)
        assert left.bound_ns >= before_ns
        rose += left.bound_ns > before_ns
        held = [search.members[place] for place in left.screened.strategies]
        for _ in range(2):
            share = random.binomial(found.load.counts, random.choice([0.05, 0.5, 0.95]))
            split = {held[0]: share, held[1]: found.load.counts - share}
            step = search.orders.arranged(held, split) if all(counts.any() for counts in split.values()) else None
            if step is not None:
                checked += 1
                assert left.bound_ns <= step.time_ns
    assert checked > 12
    assert rose > 0
