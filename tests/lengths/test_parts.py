"""Parts of pipelines in sets: what whole sequences add near a load holds for all groups of that load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from milpplan.lengths import Step, StrategyTables
from milpplan.lengths.bounds import ConfigurationBound
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.single import SingleStrategySearch
from milpplan.lengths.turns import TurnSearch
from milpplan.lengths.turns.lagrangian_mixtures import _NARROW, IntervalBounds, Kind
from tests.amounts import long_but
from tests.lengths.cases import deep_pool, pool


@pytest.mark.long
@pytest.mark.parametrize("number", long_but((1,), (1, 3)))
def test_a_set_says_which_intervals_its_bound_rests_on(number: int) -> None:
    """Of its pipelines, narrow ones, and no step of it is shorter."""
    found = pool()
    statics = SingleStrategySearch(found, 0.01)
    assert statics.best is not None
    # Longer than it is, so that sets are open.
    beaten = replace(statics.best, time_ns=2 * statics.best.time_ns)
    search, looked_at = TurnSearch(found, beaten, 0.0), 0
    search.deadline = Deadline.after(60.0)
    for place, one in enumerate(search.screen(2).sets):
        if looked_at == number:
            break
        if not any(found.num_stages(search.members[place]) > 1 for place in one.strategies):
            continue
        left = search.node(one, place)
        for learn in left.bounding_steps[: left.bounding_steps.index(search._pack)]:
            learn(left)
        if not left.worst_intervals:
            continue
        assert set(left.worst_intervals) <= set(one.strategies)
        assert all(0 <= interval < len(_NARROW) - 1 for interval in left.worst_intervals.values())
        looked_at += 1
        held = [search.members[place] for place in one.strategies]
        half = found.load.counts // 2
        step = search.orders.arranged(held, {held[0]: half, held[1]: found.load.counts - half})
        assert step is None or left.bound_ns <= step.time_ns
    assert looked_at > 0


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
    search.members = [*chosen, *(member for member in search.members if found.num_stages(member) == 1)][:5]
    sets = [search.node(one, number) for number, one in enumerate(search.screen(2).sets)]
    for left in sets:
        search._own_memory(left)
        assert not search._has_stronger_bounds(left)
    before = [left.bound_ns for left in sets]
    for member in chosen:
        # That takes the longest beside others only if it holds it.
        if np.isfinite(found.latency_bound_ns(member, shared_memory=False)):
            loads = found.work_bound_with_longest(member, np.inf)
            filled = ConfigurationBound(loads, found.micro_batch_pricing(member))
            filled.run(loads.workload_bound_ns * 1.02, Deadline.after(0.7))
            found.store_bound(member, filled.loads)
    for left, before_ns in zip(sets, before, strict=True):
        if search._has_stronger_bounds(left):
            search._own_memory(left)
            assert not search._has_stronger_bounds(left)
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


@pytest.mark.parametrize("found", [pool, deep_pool], ids=["shallow", "deep"])
def test_intervals_have_their_ends(found: Callable[[], StrategyTables]) -> None:
    """Also the first time that a pipeline is asked for that has as much memory alone as beside others: what is
    learned of it beside others is known of it alone then."""
    known = replace(found(), work_bound_cache={}, fine_work_bounds={})
    pipelines = [m for m, one in enumerate(known.members) if one.shared_memory_quanta and known.num_stages(m) > 1]
    same = [m for m in pipelines if known.members[m].shared_memory_quanta == known.members[m].own_memory_quanta]
    members = [*same[:4], *pipelines[:2]]
    parts = IntervalBounds(known, members, [known.linear_bounds(member, shared_memory=True) for member in members])
    for place in range(len(members)):
        kinds: tuple[Kind, ...] = ("alone", "coarse", "none", "alone")
        for kind in kinds:
            intervals = parts.of(place, kind)
            each, ends = parts.ends(place, kind)
            assert len(ends) == len(intervals) + 1
            assert ends[-1] == pytest.approx(float(each @ known.load.counts))
