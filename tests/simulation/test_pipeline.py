"""The fast step engine against the event simulation, closed forms and its own guarantees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.problem import PAIRED_SCHEDULES, SPLIT_SCHEDULES, Layout, rank_stages
from milpplan.simulation.pipeline import step_graph as critical
from milpplan.simulation.pipeline import step_graph as sut
from milpplan.simulation.pipeline.step_graph import StepGraph, Term
from tests.amounts import few_or_many
from tests.simulation import event_simulation as events
from tests.simulation.test_schedule import cases


@dataclass(frozen=True)
class Steps:
    """A batch of plans of one schedule with its switches and constants."""

    case: tuple[Any, int, int, int]
    durations: npt.NDArray[np.int64]
    transfer: int
    overlaps: tuple[bool, bool]
    barrier: int

    @property
    def graph(self) -> StepGraph:
        """The graph of the case."""
        return StepGraph(sut.structure(*self.case), self.transfer, *self.overlaps, self.barrier)

    def step_time(self, durations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Step times of some durations."""
        return sut.step_time_ns(self.graph, durations)


@st.composite
def steps(draw: st.DrawFn, num_plans: int = 2) -> Steps:
    """Random durations (small ones too, so that ties occur) for a random schedule and switches."""
    case = draw(cases())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Each term at its own scale, often zero, so that every kind of path is the longest now and then.
    scale = np.array(draw(st.lists(st.sampled_from([1, 3, 30, 1000]), min_size=len(Term), max_size=len(Term))))
    durations = random.integers(0, scale[:, None], (num_plans, len(Term), case[1] * case[3]))
    if case[0] in PAIRED_SCHEDULES:
        # Both arms of the V pass the same borders between ranks.
        durations[:, Term.CROSSING, case[1] : -1] = durations[:, Term.CROSSING, case[1] - 2 :: -1]
    transfer, barrier = draw(st.sampled_from([0, 1, 7, 400])), draw(st.integers(0, 5))
    return Steps(case, durations, transfer, (draw(st.booleans()), draw(st.booleans())), barrier)


def matrix(forward: list[int], backward: list[int]) -> npt.NDArray[np.int64]:
    """Durations with forwards and backwards only."""
    durations = np.zeros((len(Term), len(forward)), dtype=np.int64)
    durations[Term.FORWARD], durations[Term.BACKWARD] = forward, backward
    return durations


def work_time(case: tuple[Any, int, int, int], durations: npt.NDArray[np.int64], transfer: int = 0) -> int:
    """Step time without anything but work items and transfers."""
    return int(sut.step_time_ns(StepGraph(sut.structure(*case), transfer), durations))


@given(cases(), st.integers(0, 50), st.integers(0, 50))
def test_equal_stages_give_the_textbook_time(case: tuple[Any, int, int, int], f: int, b: int) -> None:
    """Equal stages without transfers take (m v + P - 1) (f + b), the closed form of all three schedules."""
    schedule, P, m, v = case
    if schedule == "interleaved" and m < P:
        m = P
    durations = matrix([f] * P * v, [b] * P * v)
    if schedule not in SPLIT_SCHEDULES:
        assert work_time((schedule, P, m, v), durations) == (m * v + P - 1) * (f + b)


def split_matrix(num_stages: int, f: int, b: int, w: int) -> npt.NDArray[np.int64]:
    """Equal stages with weight gradients apart."""
    durations = matrix([f] * num_stages, [b] * num_stages)
    durations[Term.WEIGHT] = w
    return durations


@given(st.integers(2, 9), st.integers(0, 20), st.tuples(*[st.integers(0, 30)] * 3))
def test_zb_h1_has_the_published_bubble(num_stages: int, more: int, times: tuple[int, int, int]) -> None:
    """With at least P micro-batches and w <= f, w <= b the bubble of ZB-H1 is (P - 1)(f + b - w): Qi et al. 2023,
    table 2; that of 1F1B is (P - 1)(f + b + w)."""
    w, f, b = sorted(times)
    m = num_stages + more
    one = work_time(("zb-h1", num_stages, m, 1), split_matrix(num_stages, f, b, w))
    assert one - m * (f + b + w) == (num_stages - 1) * (f + b - w)
    fused = work_time(("1f1b", num_stages, m, 1), matrix([f] * num_stages, [b + w] * num_stages))
    assert fused - m * (f + b + w) == (num_stages - 1) * (f + b + w)


@given(st.integers(2, 9), st.integers(0, 20), st.integers(1, 30))
def test_zb_v_has_no_bubble(num_stages: int, more: int, f: int) -> None:
    """With f = b = w and at least 2 P - 1 micro-batches no rank of ZB-V waits between its first and its last item
    (Qi et al. 2024, section 4); until all meet, the step takes the ramp of P - 1 forwards longer."""
    m = 2 * num_stages - 1 + more
    durations = split_matrix(2 * num_stages, f, f, f)
    timeline = sut.simulate_times(StepGraph(sut.structure("zb-v", num_stages, m, 2)), durations)
    for rank, held in enumerate(rank_stages("zb-v", num_stages, 2)):
        begin, end = timeline.forward_start_ns[held, 0].min(), timeline.weight_end_ns[held, -1].max()
        assert (begin, end - begin) == (rank * f, 6 * m * f)
    assert timeline.step_time_ns == (6 * m + num_stages - 1) * f


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """f, w <= f, and the two parts of a pair, each no more than f, that take no less than f together."""
    f = draw(st.integers(1, 30))
    forward = draw(st.integers(0, f))
    return f, draw(st.integers(0, f)), forward, draw(st.integers(f - forward, f))


@given(st.integers(2, 9), st.integers(0, 20), pairs())
def test_dualpipe_v_has_the_published_bubble(num_stages: int, more: int, times: tuple[int, int, int, int]) -> None:
    """The bubble of DualPipeV on P ranks, 2 P virtual stages, is (P - 1)(F&B + B - 3 W): deepseek-ai/DualPipe,
    README, for W the weight gradients, B = f + W the whole backward, and F&B a pair, with f forward and f input
    gradients, W <= f, and a pair that takes no less than a whole backward. It is the bubble of the last rank; the
    first ones have one pair more for one less, and wait less by what that one saves."""
    f, w, forward, backward = times
    m, B, FB = 2 * num_stages + more, f + w, forward + backward + w
    durations = split_matrix(2 * num_stages, f, f, w)
    durations[Term.PAIRED_FORWARD], durations[Term.PAIRED_BACKWARD] = forward, backward
    timeline = sut.simulate_times(StepGraph(sut.structure("dualpipe-v", num_stages, m, 2)), durations)
    bubble = timeline.step_time_ns - timeline.busy_ns
    assert bubble[-1] == bubble.max() == (num_stages - 1) * (FB + B - 3 * w)
    # Of pairs that save nothing, all ranks have the same bubble.
    if f + B == FB:
        assert np.all(bubble == bubble[-1])


def test_a_turn_needs_no_transfer() -> None:
    """ZB-V on two ranks, one micro-batch: forwards and backwards cross between the ranks twice each, not where the
    second rank passes from its first chunk to its second one."""
    durations = split_matrix(4, 1, 1, 0)
    assert work_time(("zb-v", 2, 1, 2), durations, transfer=10) == 8 + 4 * 10


def test_uneven_stages_are_faster_than_the_closed_form() -> None:
    """sum(f + b) + (m - 1) max(f + b) = 13 + 11 is too high for 1F1B here: a backward hides, it takes 23."""
    assert work_time(("1f1b", 2, 2, 1), matrix([10, 1], [1, 1])) == 23


def test_transfers_cost_more_than_one_round_trip() -> None:
    """The closed form with one round trip, 40 + 2 * 20 + 2 * 5 = 90, is too low for 1F1B: it takes 100."""
    assert work_time(("1f1b", 2, 3, 1), matrix([10, 10], [10, 10]), transfer=5) == 100


def test_one_rank_pays_no_transfer() -> None:
    """One rank adds up: gathers, work, reductions, barrier and optimizer, and no transfer."""
    durations = np.append(np.arange(1, 11, dtype=np.int64), [99, 99, 99])[:, None]
    graph = StepGraph(sut.structure("1f1b", 1, 4, 1), transfer_ns=1000, barrier_ns=9)
    assert int(sut.step_time_ns(graph, durations)) == 3 + 4 * (1 + 2) + 4 + 9 + 5
    # Overlapped: the first forward ends LAST 9 after the gather at 3, so at 12; the last backward starts at
    # 12 + 3 * 3 = 21, LEAD 6 and REDUCE 4 after it is 31; its end 23 + TRAIL 7 is 30.
    overlapped = replace(graph, overlap_grad_reduce=True, overlap_param_gather=True)
    assert int(sut.step_time_ns(overlapped, durations)) == 31 + 9 + 5


@few_or_many(60, 150, steps())
def test_engine_is_the_event_simulation(random: Steps) -> None:
    """Every time of the timeline and the step time equal those of the event simulation."""
    _, P, _, v = random.case
    for durations in random.durations:
        expected = events.simulate(
            random.case, durations.tolist(), random.transfer, *random.overlaps, random.barrier
        )
        timeline = sut.simulate_times(random.graph, durations)
        assert timeline.step_time_ns == expected.step_time == int(random.step_time(durations))
        for kind, starts, ends in (
            ("F", timeline.forward_start_ns, timeline.forward_end_ns),
            ("B", timeline.backward_start_ns, timeline.backward_end_ns),
            ("W", timeline.weight_start_ns, timeline.weight_end_ns),
        ):
            stage_items = [[(kind, j, i) for i in range(ends.shape[1])] for j in range(P * v)]
            assert starts.tolist() == [[expected.start[item] for item in row] for row in stage_items]
            assert ends.tolist() == [[expected.end[item] for item in row] for row in stage_items]
        assert timeline.gather_end_ns.tolist() == [expected.gather_end[j] for j in range(P * v)]
        assert timeline.reduce_end_ns.tolist() == [expected.reduce_end[j] for j in range(P * v)]
        assert timeline.gradients_ready_ns.tolist() == [expected.ready[rank] for rank in range(P)]
        assert timeline.finish_ns.tolist() == [expected.finish[rank] for rank in range(P)]
        assert timeline.optimizer_start_ns == max(expected.ready.values()) + random.barrier
        busy = [
            sum(expected.end[i] - expected.start[i] for i in expected.end if i[1] in held)
            for held in events.stages_of(random.case)
        ]
        assert timeline.busy_ns.tolist() == busy


@few_or_many(40, 100, steps(num_plans=6), st.sampled_from([1, 100, 2**22]))
def test_a_batch_is_its_plans_one_by_one(random: Steps, batch_nodes: int) -> None:
    """Step times and critical paths of a batch of any shape are those of its plans, whatever the parts."""
    single = [int(random.step_time(durations)) for durations in random.durations]
    paths = [critical.critical_path(random.graph, durations) for durations in random.durations]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sut, "_MAX_BATCH_NODES", batch_nodes)
        assert random.step_time(random.durations).tolist() == single
        together = critical.critical_paths(random.graph, random.durations)
    shaped = random.durations.reshape(2, 3, *random.durations.shape[1:])
    assert random.step_time(shaped).tolist() == np.reshape(single, (2, 3)).tolist()
    assert len(together) == len(paths)
    for one, other in zip(together, paths, strict=True):
        assert (one.counts == other.counts).all()
        assert one.num_transfers == other.num_transfers


def test_an_empty_batch_has_no_step_times() -> None:
    """No plans give no step times and no paths."""
    graph = StepGraph(sut.structure("1f1b", 2, 3, 1), transfer_ns=1, barrier_ns=1)
    nothing = np.zeros((0, len(Term), 2), dtype=np.int64)
    assert sut.step_time_ns(graph, nothing).shape == (0,)
    assert critical.critical_paths(graph, nothing) == ()


@few_or_many(60, 150, steps())
def test_critical_path_sums_to_the_step_time(random: Steps) -> None:
    """The counted durations, transfers and the barrier of a critical path sum exactly to its step time."""
    for durations in random.durations:
        path = critical.critical_path(random.graph, durations)
        total = int((path.counts * durations).sum()) + path.num_transfers * random.transfer
        assert total + path.barrier_count * random.barrier == int(random.step_time(durations))
        assert path.counts.shape == durations.shape
        assert path.counts.min() >= 0


@few_or_many(50, 1000, steps(num_plans=8), st.integers(0, 50), st.integers(0, 50))
def test_every_critical_path_bounds_every_other_plan(random: Steps, transfer: int, barrier: int) -> None:
    """The path of one plan never exceeds another plan's step time, whatever transfer and barrier it has."""
    other = replace(random.graph, transfer_ns=transfer, barrier_ns=barrier)
    step_times = sut.step_time_ns(other, random.durations)
    for path in critical.critical_paths(random.graph, random.durations):
        assert (path.length_ns(random.durations, transfer, barrier) <= step_times).all()


@given(steps(num_plans=1), st.integers(1, 100))
def test_longer_durations_never_shorten_a_step(random: Steps, more: int) -> None:
    """Increasing any one duration, the transfer or the barrier never lowers the step time."""
    (durations,) = random.durations
    before = int(random.step_time(durations))
    bumps = np.eye(durations.size, dtype=np.int64).reshape(-1, *durations.shape) * more
    assert (random.step_time(durations + bumps) >= before).all()
    slower = replace(random.graph, transfer_ns=random.transfer + more)
    assert int(sut.step_time_ns(slower, durations)) >= before
    later = replace(random.graph, barrier_ns=random.barrier + more)
    assert int(sut.step_time_ns(later, durations)) == before + more


@given(steps(num_plans=4))
def test_gathering_while_working_never_slows_a_step(random: Steps) -> None:
    """Overlap never takes longer than waiting, where buckets are parts of what they belong to."""
    durations = random.durations.copy()
    for part, whole in (
        (Term.FIRST, Term.GATHER),
        (Term.LAST, Term.FORWARD),
        (Term.LEAD, random.graph.structure.release_term),
        (Term.TRAIL, Term.REDUCE),
    ):
        durations[:, part] = np.minimum(durations[:, part], durations[:, whole])
    structure = random.graph.structure
    late = [
        sut.step_time_ns(StepGraph(structure, random.transfer, reduce, gather), durations)
        for reduce, gather in ((False, False), (True, False), (False, True), (True, True))
    ]
    assert (late[1] <= late[0]).all()
    assert (late[2] <= late[0]).all()
    assert (late[3] <= np.minimum(late[1], late[2])).all()


@pytest.mark.parametrize(
    ("durations", "transfer", "message"),
    [
        (np.zeros((len(Term), 3), dtype=np.int64), 0, "shape"),
        (np.zeros((6, 2), dtype=np.int64), 0, "shape"),
        (np.zeros((len(Term), 2)), 0, "integers"),
        (np.full((len(Term), 2), -1), 0, "negative"),
        (np.zeros((len(Term), 2), dtype=np.int64), -1, "negative"),
    ],
)
def test_durations_that_make_no_sense_are_refused(
    durations: npt.NDArray[np.int64], transfer: int, message: str
) -> None:
    """A wrong shape, fractions of a nanosecond or negative durations raise a ``ValueError``."""
    graph = StepGraph(sut.structure("1f1b", 2, 3, 1), transfer)
    with pytest.raises(ValueError, match=message):
        sut.step_time_ns(graph, durations)
    with pytest.raises(ValueError, match=message):
        critical.critical_path(graph, durations)


def test_a_timeline_is_of_one_plan() -> None:
    """Two plans at once have no single timeline and are refused."""
    graph = StepGraph(sut.structure("1f1b", 2, 3, 1))
    with pytest.raises(ValueError, match="one plan"):
        sut.simulate_times(graph, np.zeros((2, len(Term), 2), dtype=np.int64))


def test_the_graph_of_a_layout() -> None:
    """A layout's schedule, its two overlap switches, and its constants each in their own place."""
    layout = Layout(pp=2, dp=2, micro_batch_size=2, global_batch_size=12, zero_stage=1, overlap_grad_reduce=True)
    graph = StepGraph.of(layout, np.int64(5), np.int64(7))
    assert graph.structure is sut.structure("1f1b", 2, 3, 1)
    assert (graph.transfer_ns, graph.barrier_ns) == (5, 7)
    assert (graph.overlap_grad_reduce, graph.overlap_param_gather) == (True, False)
