"""The order of work on every rank, and the activations that it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.problem import PAIRED_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, rank_stages
from milpplan.simulation.pipeline import work_orders as sut
from milpplan.simulation.pipeline.work_orders import Kind, num_pairs
from tests.simulation import event_simulation as events


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, int, int, int]:
    """A schedule and sizes for which it exists."""
    schedule = draw(st.sampled_from(SCHEDULES))
    num_stages = draw(st.integers(2 if schedule in SPLIT_SCHEDULES else 1, 6))
    if schedule in V_SCHEDULES:
        if schedule in PAIRED_SCHEDULES:
            return schedule, num_stages, 2 * num_stages + draw(st.integers(0, 4)), 2
        return schedule, num_stages, draw(st.integers(1, 16)), 2
    vpp = draw(st.integers(1, 4)) if schedule == "interleaved" and num_stages > 1 else 1
    if vpp > 1:
        return schedule, num_stages, num_stages * draw(st.integers(1, 4)), vpp
    return schedule, num_stages, draw(st.integers(1, 12)), vpp


def items(case: tuple[Any, int, int, int], rank: int) -> list[events.Item]:
    """The order under test, in the words of the event simulation."""
    order = sut.work_order(*case, rank)
    rows = zip(order.kind.tolist(), order.chunk.tolist(), order.micro_batch.tolist(), strict=True)
    held = rank_stages(case[0], case[1], case[3])[rank]
    return [("FBW"[kind], held[chunk], i) for kind, chunk, i in rows]


@given(cases())
def test_order_is_that_of_the_definition(case: tuple[Any, int, int, int]) -> None:
    """Every rank runs its items in the order written out item by item from the schedule's definition."""
    for rank in range(case[1]):
        assert items(case, rank) == events.rank_order(*case, rank)


def kinds(case: tuple[Any, int, int, int]) -> str:
    """Kinds of work items."""
    return "FBW" if case[0] in SPLIT_SCHEDULES else "FB"


@given(cases())
def test_what_needs_no_transfer_comes_later_on_its_rank(case: tuple[Any, int, int, int]) -> None:
    """Where an item needs one of its own rank, the order of the rank has that one before it."""
    for rank in range(case[1]):
        place = {item: number for number, item in enumerate(items(case, rank))}
        for item, number in place.items():
            needed, over_network = events.needs(item, case)
            if needed is not None and not over_network and case[1] > 1:
                assert place[needed] < number


@given(st.integers(2, 7), st.integers(0, 9))
def test_items_that_run_as_one_are_those_of_the_definition(num_stages: int, more: int) -> None:
    """Of every block of DualPipeV the items left are counted down, and pairs are those of three kinds of items, as
    many as the closed form says."""
    m = 2 * num_stages + more
    for rank in range(num_stages):
        order = sut.work_order("dualpipe-v", num_stages, m, 2, rank)
        blocks = events.rank_blocks(("dualpipe-v", num_stages, m, 2), rank)
        assert order.left.tolist() == [left for block in blocks for left in range(len(block) - 1, -1, -1)]
        paired = [len(block) == 3 and kind != "W" for block in blocks for kind, _, _ in block]
        assert order.is_paired.tolist() == paired
        forwards = order.chunk[order.is_paired & (order.kind == Kind.FORWARD)]
        assert np.bincount(forwards, minlength=2).tolist() == [int(n) for n in num_pairs(num_stages, m, rank)]


@given(cases())
def test_order_is_a_permutation_of_all_work(case: tuple[Any, int, int, int]) -> None:
    """All ranks together run every forward, every backward and, if it is apart, every weight gradient once."""
    _, P, m, v = case
    ran = [item for rank in range(P) for item in items(case, rank)]
    assert sorted(ran) == sorted((kind, j, i) for kind in kinds(case) for j in range(P * v) for i in range(m))


@given(cases())
def test_order_does_not_deadlock(case: tuple[Any, int, int, int]) -> None:
    """Some rank can always run its next item, so every item is in some level and after what it needs."""
    _, P, m, v = case
    graph = sut.structure(*case)
    nodes = np.concatenate([part.ravel() for part in (graph.forward_node, graph.backward_node, graph.weight_node)])
    assert sorted(nodes.tolist()) == list(range(len(kinds(case)) * m * P * v)) == list(range(graph.num_nodes))
    level = np.repeat(np.arange(len(graph.level_offsets) - 1), np.diff(graph.level_offsets))
    for predecessor in (graph.rank_predecessor, graph.transfer_predecessor):
        inner = predecessor < graph.num_nodes
        assert (level[predecessor[inner]] < level[inner]).all()
    assert (graph.backward_node[-1] > graph.forward_node[-1]).all()


@given(cases())
def test_last_backward_of_a_chunk_is_of_the_last_micro_batch(case: tuple[Any, int, int, int]) -> None:
    """On every rank the last item of each chunk that adds to gradients is of micro-batch m - 1, chunk v - 1 first,
    0 last."""
    _, P, m, v = case
    for rank in range(P):
        last = [item for item in items(case, rank) if item[0] == kinds(case)[-1] and item[2] == m - 1]
        assert [stage // P for _, stage, _ in last] == list(range(v - 1, -1, -1))
        for backward in last:
            of_chunk = [item for item in items(case, rank) if item[:2] == backward[:2]]
            assert of_chunk[-1] == backward


def test_interleaved_order_of_a_small_case_by_hand() -> None:
    """Two ranks, two chunks, four micro-batches: the last rank warms up P = 2 forwards of chunk 0."""
    ran = items(("interleaved", 2, 4, 2), 1)
    forwards = [("F", 1, 0), ("F", 1, 1), ("F", 3, 0), ("F", 3, 1)]
    forwards += [("F", 1, 2), ("F", 1, 3), ("F", 3, 2), ("F", 3, 3)]
    backwards = [("B", 3, 0), ("B", 3, 1), ("B", 1, 0), ("B", 1, 1)]
    backwards += [("B", 3, 2), ("B", 3, 3), ("B", 1, 2), ("B", 1, 3)]
    pairs = [item for pair in zip(forwards[2:], backwards[:6], strict=True) for item in pair]
    assert ran == forwards[:2] + pairs + backwards[6:]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_one_rank_accumulates_gradients(schedule: Any) -> None:
    """One pipeline rank runs forward and backward in turn whatever the schedule is called."""
    expected = [(kind, 0, i) for i in range(3) for kind in "FB"]
    assert items((schedule, 1, 3, 1), 0) == expected
    assert sut.live_profiles(schedule, 1, 3, 1) == (((0, (1,)),),)


@given(cases())
def test_live_profiles_are_those_counted_item_by_item(case: tuple[Any, int, int, int]) -> None:
    """Live profiles are the Pareto-maximal counts seen while walking the order, each once."""
    profiles = sut.live_profiles(*case)
    for rank, counted in enumerate(events.live_profiles(case)):
        assert len(profiles[rank]) == len(counted)
        assert set(profiles[rank]) == counted


@given(st.integers(2, 9), st.integers(1, 20))
def test_1f1b_holds_one_micro_batch_per_rank_from_here_to_the_end(num_stages: int, m: int) -> None:
    """Under 1F1B rank r has the single profile min(m, P - r); under GPipe every rank holds all m."""
    assert sut.live_profiles("1f1b", num_stages, m, 1) == tuple(
        ((0, (min(m, num_stages - rank),)),) for rank in range(num_stages)
    )
    assert sut.live_profiles("gpipe", num_stages, m, 1) == (((0, (m,)),),) * num_stages


@given(st.integers(2, 9), st.integers(0, 9))
def test_dualpipe_v_holds_the_published_activations(num_stages: int, more: int) -> None:
    """Every rank of DualPipeV holds those of 2 P + 1 virtual stages at most, one more than their number
    (deepseek-ai/DualPipe, README), and no more micro-batches ever wait for weight gradients."""
    for rows in sut.live_profiles("dualpipe-v", num_stages, 2 * num_stages + more, 2):
        assert max(sum(counts[:2]) for _, counts in rows) == 2 * num_stages + 1
        assert max(sum(counts) for _, counts in rows) == 2 * num_stages + 1


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches", "vpp", "message"),
    [
        ("interleaved", 1, 4, 2, "at least 2 pipeline ranks"),
        ("interleaved", 4, 6, 2, "divisible"),
        ("1f1b", 4, 4, 2, "one virtual stage per rank"),
        ("gpipe", 4, 4, 2, "one virtual stage per rank"),
        ("1f1b", 0, 4, 1, "at least 1"),
        ("zb-h1", 4, 4, 2, "one virtual stage per rank"),
        ("zb-h1", 1, 4, 1, "at least 2 pipeline ranks"),
        ("zb-v", 4, 4, 1, "two virtual stages per rank"),
        ("zb-v", 4, 4, 3, "two virtual stages per rank"),
        ("zb-v", 1, 4, 2, "at least 2 pipeline ranks"),
        ("dualpipe-v", 4, 8, 1, "two virtual stages per rank"),
        ("dualpipe-v", 1, 4, 2, "at least 2 pipeline ranks"),
        ("dualpipe-v", 4, 7, 2, "two micro-batches for every pipeline rank"),
        ("dualpipe", 4, 4, 1, "unknown"),
    ],
)
def test_schedules_that_do_not_exist_are_refused(
    schedule: Any, num_stages: int, num_micro_batches: int, vpp: int, message: str
) -> None:
    """Sizes for which a schedule is not defined raise a ``ValueError`` that names the rule."""
    for function in (sut.structure, sut.live_profiles):
        with pytest.raises(ValueError, match=message):
            function(schedule, num_stages, num_micro_batches, vpp)
    with pytest.raises(ValueError, match=message):
        sut.work_order(schedule, num_stages, num_micro_batches, vpp, 0)
