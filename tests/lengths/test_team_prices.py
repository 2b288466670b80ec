"""Prices of sequences: no micro-batch is worth more than they say, and what they prove is below every step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from milpplan.lengths import StrategyTables, micro_batch_times, replicas_ns, workload_of
from milpplan.lengths.bounds import master
from milpplan.lengths.bounds.master import Contents, single_strategy_bound_ns
from milpplan.lengths.deadline import NEVER, PASSED
from milpplan.lengths.side_by_side import Family, families, priced, shared_work, simulate_turns
from milpplan.lengths.side_by_side.team_quick import Packer
from milpplan.lengths.side_by_side.team_search import Effort, TeamSearch, dealt, improve_turns
from tests.lengths.all_steps import FLAT, AllSteps, few, random_turns
from tests.lengths.cases import GRAIN, pool_of, random_micro_batches, random_packings, workload
from tests.small import small_problem


def family_of(found: StrategyTables) -> Family:
    """Its only family."""
    (only,) = families(found)
    return only


@cache
def family() -> Family:
    """One sequence that only half the cluster holds, and sixty short ones, on four seats."""
    return family_of(pool_of(small_problem(memory_gib=40, space=FLAT), workload(long=1, short=60, longest=49_152)))


@cache
def alone_pool() -> StrategyTables:
    """Strategies of one stage that hold all of many sequences."""
    return pool_of(small_problem(memory_gib=60), workload(long=3, short=60, longest=12_288))


def contents_of(found: Family, limit_ns: float = math.inf) -> list[Contents]:
    """Those of every member."""
    return [Contents.of(found.pool, member, limit_ns) for member in found.members]


def test_costs_are_the_seats_time_at_most() -> None:
    """Random micro-batches: never above their exact time, and within a hundredth of it where they are full."""
    found, random = family(), np.random.default_rng(3)
    pool = found.pool
    for contents, degree in zip(contents_of(found), found.degrees, strict=True):
        rows = random_micro_batches(pool, found.max_quanta(contents.member), random, 40)
        candidate = pool.members[contents.member].candidate
        times = micro_batch_times(pool.problem, candidate, pool.load.lengths, rows)
        exact = (times.forward[0] + times.backward[0]) * degree / found.num_slots
        costs = contents.costs(rows)
        assert (costs <= exact).all()
        full = int((rows @ pool.load.lengths).argmax())
        assert costs[full] >= 0.99 * exact[full]


def test_no_micro_batch_is_worth_more_than_the_factor() -> None:
    """Random prices against all micro-batches of a few sequences, some of them equal: the factor is no less than
    the largest ratio of worth and time, and near it; what is found fits, is there, and is worth more than its
    time; nothing longer than the limit is asked for."""
    random = np.random.default_rng(8)
    lengths = [256, 256, 256, 640, 640, 1500, 4000, 4000, 16_000, 30_000]
    found = family_of(pool_of(small_problem(memory_gib=40, space=FLAT), workload_of(np.array(lengths), GRAIN)))
    load = found.pool.load
    rows = np.array(list(itertools.product(*(range(count + 1) for count in load.counts))))[1:]
    sizes = load.lengths // load.token_quantum
    for contents in contents_of(found):
        fitting = rows[rows @ sizes <= found.max_quanta(contents.member)]
        costs = contents.costs(fitting)
        for _ in range(3):
            prices = random.uniform(0.5, 1.5, len(sizes)) * sizes
            most = float(random.uniform(0.95, 1.1))
            prices *= most / (fitting @ prices / costs).max()
            factor, worst = contents.price_columns(prices)
            assert max(1.0, most) * (1 - 1e-9) <= factor <= 1.05 * max(1.0, most)
            assert bool(worst) or most <= 1.0
            for held in worst:
                assert (held <= load.counts).all()
                assert held @ sizes <= found.max_quanta(contents.member)
        limit_ns = float(np.median(costs)) / contents.share
        short = contents_of(found, limit_ns)[found.members.index(contents.member)]
        below = fitting[costs < np.median(costs)]
        assert (below[:, ~short.items.fits] == 0).all()
        assert short.short[below @ sizes - 1].all()
        assert short.price_columns(prices)[0] >= (below @ prices / contents.costs(below)).max() * (1 - 1e-9)


def test_what_prices_prove_is_between_the_linear_bound_and_all_steps() -> None:
    """Random steps, and the one that is made from the program; with and without a limit. The program's
    micro-batches hold every sequence."""
    found, random = family(), np.random.default_rng(6)
    shared = shared_work(found)
    proved = priced(found, shared, math.inf, NEVER)
    assert shared.bound_ns < proved.bound_ns
    assert (proved.shares @ proved.rows >= found.pool.load.counts * (1 - 1e-9)).all()
    packer = Packer(found, shared)
    step = improve_turns(packer, dealt(packer, proved, math.inf), Effort(0, 1000, 10), 0.0, NEVER)
    below = priced(found, shared, step.time_ns, NEVER)
    assert proved.bound_ns * (1 - 1e-3) <= below.bound_ns <= step.time_ns
    for _ in range(3):
        assert simulate_turns(found, random_turns(found, random)).time_ns >= below.bound_ns
    assert step.time_ns <= 1.02 * below.bound_ns
    # Nothing is below half the bound; it is not known what there is above.
    assert priced(found, shared, 0.5 * shared.bound_ns, NEVER).bound_ns == shared.bound_ns


@pytest.mark.long
def test_no_packing_of_equal_replicas_is_below_what_prices_prove_of_one_strategy() -> None:
    """Of every strategy of one stage: random packings and a good one take no less; the bound is no less than the
    linear one, higher for some, and near the good packing."""
    found, random, raised, near = alone_pool(), np.random.default_rng(9), 0, 0.0
    longest = found.load.lengths[-1]
    for member, one in enumerate(found.members):
        grains = found.max_quanta(member, shared_memory=False)
        if found.num_stages(member) > 1 or min(grains, one.shared_memory_quanta) * GRAIN < longest:
            continue
        once_ns = found.reduce_ns(member) + found.finish_ns(member)
        best = found.pack(member, found.load.counts, grains)
        assert best is not None
        proved = single_strategy_bound_ns(found, member, math.inf, NEVER)
        least_ns = found.step_bound_ns(member)
        assert proved <= best.time_ns + once_ns
        near = max(near, proved / (best.time_ns + once_ns))
        raised += proved > least_ns * (1 + 1e-3)
        for _ in range(4):
            packings = random_packings(found, member, found.load.counts, random)
            exact = replicas_ns(found.problem, one.candidate, found.load.lengths, tuple(packings))
            assert proved <= int(exact.max()) + once_ns
        # A limit is proved at most, and nothing where there is no time.
        assert single_strategy_bound_ns(found, member, 0.9 * proved, NEVER) <= proved
        assert single_strategy_bound_ns(found, member, math.inf, PASSED) <= proved
    assert raised > 1
    assert near > 0.97, near


def test_what_is_left_out_proves_less_and_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that keep few micro-batches, tables that would be too large, few rounds and no time: at most what
    is proved with all of them, at least the linear bound."""
    found = family()
    shared = shared_work(found)
    proved = priced(found, shared, math.inf, NEVER).bound_ns
    with monkeypatch.context() as patch:
        patch.setattr(master, "PARAMETERS", replace(master.PARAMETERS, max_columns=150, kept_columns=100))
        kept = priced(found, shared, math.inf, NEVER)
        assert shared.bound_ns < kept.bound_ns <= proved * (1 + 1e-3)
        assert (kept.shares @ kept.rows >= found.pool.load.counts * (1 - 1e-9)).all()
    assert shared.bound_ns <= priced(found, shared, math.inf, PASSED).bound_ns <= proved
    for fewer in (
        replace(master.PARAMETERS, max_pricing_entries=10.0),
        replace(master.PARAMETERS, max_master_entries=10.0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(master, "PARAMETERS", fewer)
            assert priced(found, shared, math.inf, NEVER).bound_ns == shared.bound_ns


@pytest.mark.long
@pytest.mark.parametrize("number", [3, pytest.param(80, marks=pytest.mark.long)])
def test_no_step_of_few_sequences_is_below_what_prices_prove(number: int) -> None:
    """Random sequences on four seats against all steps: whatever the limit, what is proved is at most the best of
    them or the limit; and at the best step itself it is well above the linear bound in some cases."""
    random, above = np.random.default_rng(21), 0
    for _ in range(number):
        one = family_of(pool_of(small_problem(memory_gib=40, space=FLAT), few(random)))
        shared, best = shared_work(one), AllSteps(one).least_ns()
        for limit in (math.inf, 1.3 * best, best + 1, 0.9 * best):
            proved = priced(one, shared, limit, NEVER).bound_ns
            assert shared.bound_ns <= proved <= max(shared.bound_ns, min(best, limit)), limit
        found = TeamSearch(one.pool, 0.03).run(math.inf, NEVER)
        assert found.step is not None
        assert found.bound_ns <= best <= found.step.time_ns
        above += found.bound_ns > 1.02 * shared.bound_ns
    assert above >= number / 4
