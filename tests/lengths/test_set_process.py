"""Another process looks at half of the sets; whatever becomes of it, none is lost, and nothing is proved that is
not so."""

from __future__ import annotations

import heapq
import pickle
import time
from dataclasses import replace

import pytest

from milpplan.lengths import Step
from milpplan.lengths.turns.screening import Node
from milpplan.lengths.turns.turn_search import (
    SetProcess,
    SetProcessInit,
    SetProcessReply,
    SetProcessRequest,
    SetsWorker,
    TurnSearch,
)
from tests.amounts import long_but
from tests.lengths.cases import deep_pool

NEVER = 10**15
LONG_S = 600.0
"""Never reached: what is tested ends before, on any machine."""


def search(seconds: float) -> TurnSearch:
    """Many open sets of a few strategies, with and without pipelines, and a long time to beat."""
    found = TurnSearch(
        replace(deep_pool(), work_bound_cache={}, fine_work_bounds={}), Step(0, (0,), {}, NEVER), 0.0, "highs"
    )
    found.deadline = time.perf_counter() + seconds
    pool = found.pool
    pipelines = [member for member in found.members if 1 < pool.num_stages(member) < 4][:3]
    found.members = [*pipelines, *(member for member in found.members if pool.num_stages(member) == 1)][:6]
    found.nodes = [found.node(one, number) for number, one in enumerate(found.screen(2).sets)]
    # As far as it is a matter of milliseconds.
    for one in found.nodes:
        one.bounding_steps = [
            way for way in one.bounding_steps[: one.bounding_steps.index(found._price)] if way != found._open_small
        ]
    assert len(found.nodes) > 6
    return found


def bounds_of(sets: list[Node]) -> dict[int, float]:
    return {one.number: one.bound_ns for one in sets}


@pytest.mark.long
def test_slices_raise_the_bounds_that_ways_do_here() -> None:
    """Of a copy of what is known: the bounds of the sets that were asked for are those that looking at all of them
    here gives, of which more is known the more slices; others are not looked at."""
    here = search(60.0)
    worker: SetsWorker = pickle.loads(pickle.dumps(SetProcessInit(here))).worker(None)
    before, numbers = bounds_of(here.nodes), frozenset(one.number for one in here.nodes[::2])
    ended: frozenset[int] = frozenset()
    for _ in range(60):
        known = worker.reply(SetProcessRequest(numbers, float(NEVER), time.time() + 60.0))
        assert set(known.bounds) == numbers
        assert all(known.bounds[number][0] >= before[number] for number in numbers)
        ended = known.ended
        if ended == numbers:
            break
    assert ended == numbers
    untouched = [one for one in worker.search.nodes if one.number not in numbers]
    assert bounds_of(untouched) == {number: before[number] for number in before if number not in numbers}
    here.polished = True
    here.tighten()
    after = bounds_of(here.nodes)
    assert all(known.bounds[number][0] == pytest.approx(after[number], rel=1e-3) for number in numbers)
    assert any(after[number] > before[number] for number in numbers)
    # What takes longer than what is to beat is closed.
    assert not worker.reply(SetProcessRequest(numbers, 1.0, time.time() + 60.0)).best


def test_no_time_is_no_work() -> None:
    """A slice whose end has passed leaves sets as they are."""
    here = search(60.0)
    before = bounds_of(here.nodes)
    numbers = frozenset(before)
    known = SetsWorker(here).reply(SetProcessRequest(numbers, float(NEVER), time.time() - 1.0))
    assert {number: bound for number, (bound, _) in known.bounds.items()} == before


@pytest.mark.usefixtures("real_clock")
@pytest.mark.parametrize("dies", long_but((True,), (False, True)))
def test_sets_are_shared_and_none_is_lost(dies: bool) -> None:
    """Both look at sets until none is open or to be learned of; every set is left once, with a bound that is at
    least the one before, and as high as one process finds; also where the other process dies."""
    alone = search(LONG_S)
    alone.polished = True
    alone.tighten()
    here = search(LONG_S)
    here.polished = True
    before, other = bounds_of(here.nodes), SetProcess.of(here)
    assert other is not None
    assert other.process is not None
    most = 0
    if dies:
        other.process.process.kill()

    def heard() -> None:
        nonlocal most
        most = max(most, len(other.assigned))
        # So that this process is not done before the other one has begun.
        if not dies and not other.cpu_s and other.process is not None:
            time.sleep(0.05)

    try:
        here.tighten(heard, get_helper=lambda: other)
    finally:
        other.close()
    assert most > 1
    assert (other.cpu_s > 0.0) is not dies
    assert not other.assigned
    assert sorted(one.number for one in here.nodes) == sorted(before)
    after, single = bounds_of(here.nodes), bounds_of(alone.nodes)
    assert all(after[number] >= before[number] for number in before)
    # What is learned of a strategy for one set tells something of others, of the same process.
    close = [after[number] == pytest.approx(single[number], rel=1e-2) for number in before]
    assert sum(close) > 0.8 * len(close), [(after[number], single[number]) for number in before]
    assert sum(after[number] > before[number] for number in before) > 0.5 * len(before)


def test_there_is_no_other_process_for_one_set_or_no_time() -> None:
    """It would not pay."""
    here = search(60.0)
    short = search(1.0)
    assert SetProcess.of(short) is None
    here.nodes = here.nodes[:1]
    assert SetProcess.of(here) is None


def test_the_order_of_a_set_that_comes_back_is_counted_once() -> None:
    """What the other process priced of a set is in the bound that it tells: ways that are left here do not add it
    again. (They did: sets were above their best steps.)"""
    here = search(60.0)
    given = {one.number: one for one in here.nodes if len(here._pipelines_of(one)) == 1}
    worker: SetsWorker = pickle.loads(pickle.dumps(SetProcessInit(here))).worker(None)
    several = worker.search
    for one in several.nodes:
        one.bounding_steps = [several._price_roughly, several._price] if one.number in given else []
    for _ in range(60):
        known = worker.reply(SetProcessRequest(frozenset(given), float(NEVER), time.time() + 60.0))
        if known.ended == frozenset(given):
            break
    other = SetProcess(here, None, dict(given))
    other._take(known, [])
    assert any(order_ns > 0.0 for _, order_ns in known.bounds.values())
    for number, one in given.items():
        here._price_roughly(one)
        here._price(one)
        assert (one.bound_ns, one.order_ns) == known.bounds[number]


def test_sets_of_one_kind_go_to_one_process() -> None:
    """Every other kind of open sets is given, by the strategy that runs the longest sequences, never that of the
    next one here; what is closed comes back, and others are given; where nothing is open here, half comes back."""
    here = search(60.0)

    class Silent:
        """Of a process only what it is asked and says."""

        answered = False

        def __init__(self) -> None:
            self.sent: list[SetProcessRequest] = []
            self.known = SetProcessReply({}, frozenset(), None, 1.0)

        def send(self, asked: SetProcessRequest) -> None:
            self.sent.append(asked)

        def answer(self, until: None, cancelled: None) -> SetProcessReply:
            return self.known

        def close(self, *, at_once: bool) -> None:
            pass

    silent = Silent()
    other = SetProcess(here, silent)  # type: ignore[arg-type]
    left = list(here.nodes)
    heapq.heapify(left)
    first, kind = left[0], other._holds_longest
    other.share(left)
    given = dict(other.assigned)
    assert {*given} | {one.number for one in left} == {one.number for one in here.nodes}
    assert {kind(one) for one in given.values()}.isdisjoint(kind(one) for one in left)
    assert first in left
    assert len(given) > 1
    assert silent.sent[0].numbers == frozenset(given)
    assert other.busy
    # Until it answers nothing changes.
    other.share(left)
    assert len(silent.sent) == 1
    silent.answered, silent.known = (
        True,
        SetProcessReply(dict.fromkeys(given, (NEVER, 0.0)), frozenset(), None, 1.0),
    )
    other.share(left)
    assert {*given} <= {one.number for one in left}
    assert all(one.bound_ns == NEVER for one in left if one.number in given)
    assert other.assigned
    assert {*other.assigned}.isdisjoint(given)
    assert other.cpu_s == 1.0
    # All that is open here is closed: half of what it has is taken back.
    silent.known = SetProcessReply({}, frozenset(), None, 2.0)
    for one in left:
        one.raise_to(NEVER)
    there = len(other.assigned)
    other.share(left)
    assert 0 < len(other.assigned) < there or there == 1
    other.close()
    assert not other.busy
