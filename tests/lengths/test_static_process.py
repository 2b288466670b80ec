"""Another process proves and packs the steps of one strategy; if it dies, this one goes on."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from milpplan.lengths import LengthsResult, StrategyTables, workload_of
from milpplan.lengths import solve_lengths as solving
from milpplan.lengths.bounds import ConfigurationBound
from milpplan.lengths.single import SingleStrategySearch
from milpplan.lengths.single import single_strategy_process as static_process
from milpplan.lengths.single.single_strategy_process import (
    SingleProcessRequest,
    SingleStrategyProcess,
    SingleStrategyWorker,
)
from tests.amounts import long_but
from tests.lengths.cases import GRAIN, deep_pool, pool, pool_of, workload
from tests.small import small_problem

LONG_S = 600.0
"""Never reached: what is tested ends before, on any machine."""


def statics() -> SingleStrategySearch:
    """At the beginning, with a gap that leaves something to do, and nothing known of pipelines."""
    return SingleStrategySearch(replace(pool(), work_bound_cache={}), 0.004, "highs", time.perf_counter() + 10.0)


def sliced(seconds: float, left_s: float, below_ns: float = float("inf")) -> SingleProcessRequest:
    """Of so many seconds, and until the end."""
    return SingleProcessRequest(below_ns, seconds, time.time() + left_s)


@pytest.mark.usefixtures("real_clock")
def test_another_process_learns_what_this_one_would() -> None:
    """Its best step and bounds come back: no less is proved than at the beginning, of no step that is there."""
    here, there = statics(), statics()
    assert here.best is not None
    before_ns, first_ns = here.bound_ns, here.best.time_ns
    other = SingleStrategyProcess(here, first_ns, time.perf_counter() + LONG_S)
    try:
        while here.bound_ns <= before_ns and other.poll(first_ns):
            time.sleep(0.05)
        assert other.process is not None
        assert other.cpu_s > 0
    finally:
        other.close()
    there.run(float("inf"), time.perf_counter() + LONG_S)
    assert there.best is not None
    assert before_ns < here.bound_ns <= min(here.best.time_ns, there.best.time_ns)
    assert there.bound_ns <= here.best.time_ns <= first_ns
    assert not other.poll(first_ns)


def test_what_was_proved_elsewhere_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that this process has yet to solve may say less of pipelines than the other one has proved: they
    lower nothing."""
    here = SingleStrategySearch(
        replace(deep_pool(), work_bound_cache={}), 0.0, "highs", time.perf_counter() + 10.0
    )
    assert here.best is not None
    told_ns = (1.0 - 1e-6) * here.best.time_ns
    told = {member: told_ns for member in here.next_step if here.bounds_ns[member] < told_ns}
    assert told
    here.raise_bounds(told)
    monkeypatch.setattr(StrategyTables, "step_bound_ns", lambda *_, **__: 0.0)
    here.run(float("inf"), time.perf_counter() + 1.0)
    assert all(here.bounds_ns[member] >= told_ns for member in told)
    assert any(here.next_step.get(member) != 0 for member in told)


def test_slices_end_and_tell_whether_anything_is_left() -> None:
    """One of no time leaves something; what is to beat closes everything."""
    worker = SingleStrategyWorker(statics())
    known = worker.reply(sliced(0.0, 3.0))
    assert not known.idle
    assert known.best is not None
    assert worker.reply(sliced(60.0, 60.0, below_ns=1.0)).idle


def test_packing_goes_on_until_it_gains_nothing() -> None:
    """While the other process proves: no step gets longer, the last try gains nothing, and none begins that would
    not end in time; every strategy that may be shorter was packed, with more care if that may make it so."""
    here = SingleStrategySearch(replace(pool(), work_bound_cache={}), 0.0, "highs", time.perf_counter() + 10.0)
    here.run(float("inf"), time.perf_counter() + 0.5)
    here.bounds_ns = dict.fromkeys(here.bounds_ns, 0.0)
    assert here.best is not None
    found, deadline = [here.best.time_ns], time.perf_counter() + 120.0
    here.incumbents.pack_time_s = 1e6
    here.incumbents.polished[here.best.home] = 0
    assert not here.pack(deadline)
    assert not here.polish(deadline)
    here.incumbents.pack_time_s = 0.0
    while here.pack(deadline) or here.polish(deadline):
        found.append(here.best.time_ns)
    assert len(found) > 1
    assert found == sorted(found, reverse=True)
    assert found[-1] == here.incumbents.polished[here.best.home]
    assert here.bound_ns <= found[-1]
    packed = here.incumbents.packed
    assert {*packed, *here.pack_attempts} == set(here.bounds_ns)
    assert not any(here.incumbents.is_rough(one) for one in packed)


def test_proving_here_leaves_the_worst_strategy_to_the_other_process() -> None:
    """Bounds of all open pipelines but the least one rise, stay below every packed step, and the other process
    learns them; it ends where nothing is left."""
    here = SingleStrategySearch(
        replace(deep_pool(), work_bound_cache={}), 0.0, "highs", time.perf_counter() + 10.0
    )
    deadline, before = time.perf_counter() + 60.0, dict(here.bounds_ns)
    while here.pack(deadline):
        pass
    while True:
        least = dict(here.bounds_ns)
        worst = min(least, key=least.__getitem__)
        if not here.prove(deadline):
            break
        assert here.bounds_ns[worst] == least[worst]
        assert all(least[member] <= known for member, known in here.bounds_ns.items())
    assert time.perf_counter() < deadline
    assert here.bounds_ns != before
    assert all(here.bounds_ns[member] <= here.incumbents.step(member).time_ns for member in here.incumbents.packed)
    there = SingleStrategySearch(
        replace(deep_pool(), work_bound_cache={}), 0.0, "highs", time.perf_counter() + 10.0
    )
    worker = SingleStrategyWorker(there)
    known = worker.reply(replace(sliced(0.0, 0.0, below_ns=1.0), bounds_ns=here.bounds_ns))
    assert all(here.bounds_ns[member] <= known.bounds_ns[member] for member in here.bounds_ns)


def test_a_slice_that_waited_ends_in_time() -> None:
    """What is over does no more work, whatever its slice."""
    worker = SingleStrategyWorker(statics())
    begin = time.perf_counter()
    assert not worker.reply(sliced(20.0, -5.0)).idle
    assert time.perf_counter() - begin < 5.0


def test_what_is_packed_here_is_not_packed_there() -> None:
    """In a slice without packing no pipeline is packed, but bounds rise; a step that is told is packed there, and
    not with more care again."""
    there, here = statics(), statics()
    worker, before_ns = SingleStrategyWorker(there), there.bound_ns
    worker.reply(replace(sliced(1.0, 3.0), packs=False))
    assert all(there.pool.num_stages(member) == 1 for member in there.incumbents.packed)
    assert there.bound_ns > before_ns
    longest = int(here.pool.load.lengths[-1])
    pipelined = next(
        one
        for one in range(len(here.pool.members))
        if here.pool.num_stages(one) > 1 and here.pool.max_quanta(one, shared_memory=False) * GRAIN >= longest
    )
    packed = here.pool.pack(pipelined, here.pool.load.counts, here.pool.max_quanta(pipelined, shared_memory=False))
    assert packed is not None
    step = here.incumbents.single_step(pipelined, packed)
    worker.reply(replace(sliced(0.0, 0.0, below_ns=1.0), best=step, took_s=2.5))
    assert there.incumbents.pack_time_s == 2.5
    assert there.incumbents.packed[pipelined] is packed
    assert pipelined in there.incumbents.polished
    assert there.best is not None
    assert there.best.time_ns <= step.time_ns


def test_what_is_heard_of_a_pipeline_alone_changes_nothing_beside_others() -> None:
    """Also where it has as much memory: intervals of its load beside others keep their measure."""
    problem = small_problem(num_gpus=8, memory_gib=100)
    short, other = (pool_of(problem, workload_of([256] * 6 + [3_840, 7_680], GRAIN)) for _ in range(2))
    same = [
        member
        for member, one in enumerate(short.members)
        if short.num_stages(member) > 1 and one.shared_memory_quanta == one.own_memory_quanta
    ]
    assert same
    for member in same:
        beside = short.work_bound(member, shared_memory=True)
        other.work_bound(member, shared_memory=False)
        other.work_bound_with_longest(member, float("inf"))
        short.merge_bounds(other.work_bound_cache)
        assert short.work_bound(member, shared_memory=True) is beside
        assert short.best_own_memory_bound(member) is other.best_own_memory_bound(member) is not beside


def test_what_is_proved_of_pipelines_is_told_once() -> None:
    """What configuration programs raise of a pipeline is told if it is more, and known here once it is heard."""
    there, here = statics(), statics()
    worker, found = SingleStrategyWorker(there), there.pool
    longest = int(found.load.lengths[-1])
    member = next(
        one
        for one in range(len(found.members))
        if found.num_stages(one) > 1 and found.max_quanta(one, shared_memory=False) * GRAIN >= longest
    )
    nothing = sliced(1.0, 90.0, below_ns=1.0)
    assert worker.reply(nothing).raised_bounds == {}
    loads = found.work_bound_with_longest(member, float("inf"))
    known = worker.reply(nothing)
    assert loads in known.work_bound_cache.values()
    assert worker.reply(nothing).work_bound_cache == {}
    here.pool.merge_bounds(known.work_bound_cache)
    assert here.pool.best_own_memory_bound(member) is loads
    assert here.pool.work_bound_with_longest(member, float("inf")) is loads
    there.configuration_bounds[member] = ConfigurationBound(loads, found.micro_batch_pricing(member))
    there.configuration_bounds[member].run(1.02 * loads.workload_bound_ns, time.perf_counter() + 1.0)
    found.store_bound(member, there.configuration_bounds[member].loads)
    known = worker.reply(nothing)
    assert list(known.raised_bounds) == [member]
    assert worker.reply(nothing).raised_bounds == {}
    before = here.pool.best_own_memory_bound(member).workload_bound_ns
    here.learn(known.best, known.bounds_ns, known.raised_bounds)
    assert here.pool.best_own_memory_bound(member) is known.raised_bounds[member]
    assert here.pool.best_own_memory_bound(member).workload_bound_ns > before


@pytest.mark.usefixtures("real_clock")
def test_a_process_that_dies_leaves_what_is_known() -> None:
    """It is seen, and nothing is awaited any more."""
    here = statics()
    assert here.best is not None
    bound_ns = here.bound_ns
    other = SingleStrategyProcess(here, here.best.time_ns, time.perf_counter() + LONG_S)
    assert other.process is not None
    other.process.process.kill()
    while other.poll(here.best.time_ns):
        time.sleep(0.05)
    assert other.process is None
    assert here.bound_ns == bound_ns


@pytest.mark.usefixtures("real_clock")
@pytest.mark.parametrize("dies", long_but((True,), (False, True)))
def test_a_step_with_two_processes_is_proved_as_with_one(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """The same space: no bound is above any step; also where the other process dies at once."""
    started = []

    class Counted(SingleStrategyProcess):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            started.append(self)
            if dies:
                assert self.process is not None
                self.process.process.kill()

    monkeypatch.setattr(solving, "SingleStrategyProcess", Counted)
    monkeypatch.setattr(solving, "PARAMETERS", replace(solving.PARAMETERS, process_limit_s=0.0))
    monkeypatch.setattr(SingleStrategySearch, "open_pipelines", True)
    monkeypatch.setattr(static_process, "usable_cpus", lambda: 2)
    found = solved(2)
    assert len(started) == 1
    assert started[0].process is None
    alone = solved(1)
    assert max(found.lower_bound_s, alone.lower_bound_s) <= min(found.step_time_s, alone.step_time_s)
    assert abs(found.step_time_s / alone.step_time_s - 1.0) < 0.02


def solved(workers: int) -> LengthsResult:
    """A small problem's step by so many processes."""
    problem = small_problem(memory_gib=40)
    return solving.solve_lengths(problem, workload(), GRAIN, 2, 0.02, LONG_S, "highs", workers=workers)
