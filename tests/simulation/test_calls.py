"""What the host takes to call collectives: a time of the call, and times for ranks near and far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from milpplan.problem import HardwareSpec, Layout
from milpplan.simulation import simulate
from milpplan.simulation.network import call_s, far_s
from tests.amounts import few_or_many
from tests.simulation.cases import even_plan, problem_of, shipped_hardware

CALL_S, RANK_S, FAR_S = 1.0, 0.01, 0.0001


def hardware(**software: float) -> HardwareSpec:
    """A DGX H100, 8 GPUs a domain, with a library's host times."""
    plain = shipped_hardware("dgx-h100")
    return plain.model_copy(update={"software": plain.software.model_copy(update=software)})


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (1, 1, 0.0),
        (2, 1, CALL_S + RANK_S),
        (8, 1, CALL_S + 7 * RANK_S),
        (16, 1, CALL_S + 15 * RANK_S + 8 * FAR_S),
        (16, 4, CALL_S + 15 * RANK_S + 14 * FAR_S),
        (4, 8, CALL_S + 3 * RANK_S + 3 * FAR_S),
    ],
)
def test_a_call_by_hand(size: int, stride: int, expected: float) -> None:
    """A call, every other rank, and beside that every rank outside the caller's domain; alone nobody is called."""
    slow = hardware(collective_call_s=CALL_S, collective_rank_s=RANK_S, collective_far_rank_s=FAR_S)
    assert float(call_s(slow, size, stride)) == pytest.approx(expected, rel=1e-12)


def test_rows_of_ranks_are_one_group() -> None:
    """Two rows of 4 GPUs, a domain apart: 7 other ranks, 4 of them far."""
    slow = hardware(collective_rank_s=RANK_S, collective_far_rank_s=FAR_S)
    assert float(call_s(slow, 4, 1, 2, 8)) == pytest.approx(7 * RANK_S + 4 * FAR_S)


@few_or_many(
    15,
    50,
    st.lists(st.integers(1, 64), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8, 16]),
    *(st.floats(0.0, 1e-2) for _ in range(3)),
)
def test_calls_are_free_by_default_and_grow(
    sizes: list[int], stride: int, call: float, rank: float, far: float
) -> None:
    """Without a library's checks calls cost nothing; with them one more rank never costs less."""
    slow = hardware(collective_call_s=call, collective_rank_s=rank, collective_far_rank_s=far)
    size = np.array(sizes)
    assert (call_s(hardware(), size, stride) == np.zeros(len(sizes))).all()
    assert (call_s(slow, 2 * size, stride) >= call_s(slow, size, stride) - 1e-12).all()


@pytest.mark.parametrize(
    ("size", "stride", "pairs"),
    [(1, 1, 0), (8, 1, 0), (2, 4, 0), (16, 1, 1), (2, 8, 1), (32, 1, 6), (16, 4, 28), (64, 1, 28)],
)
def test_pairs_of_nodes_by_hand(size: int, stride: int, pairs: int) -> None:
    """A group in d nodes of 8 GPUs takes its constant d (d - 1) / 2 times: 0, 1, 6 and 28 in 1, 2, 4 and 8."""
    assert float(far_s(hardware(), 0.5, size, stride)) == 0.5 * pairs
    assert far_s(hardware(), 0.0, np.array([size, 64]), stride).tolist() == [0.0, 0.0]


def step_s(tp: int, dp: int, zero_stage: int, pp: int = 1, **software: float) -> float:
    """A step of 6 micro-batches of Llama-3 8B a replica, one node of 8 GPUs after another."""
    problem = problem_of("llama3-8b", hardware(**software), sequence_length=2048)
    layout = Layout(tp=tp, dp=dp, pp=pp, global_batch_size=6 * dp, sequence_parallel=True, zero_stage=zero_stage)
    return simulate(problem, even_plan(problem, layout)).step_time_s


@pytest.mark.parametrize(("tp", "pairs"), [(8, 0), (16, 1), (32, 6)])
@pytest.mark.parametrize(("dp", "zero_stage", "reduced"), [(1, 0, 0), (2, 0, 1), (2, 1, 0)])
def test_a_step_has_them_in_micro_batches_once_and_without_zero(
    tp: int, pairs: int, dp: int, zero_stage: int, reduced: int
) -> None:
    """6 micro-batches, one step, and one reduction where replicas do not shard: each for every pair of nodes."""
    slow = {"far_micro_batch_s": 0.01, "far_step_s": 0.3, "far_reduce_s": 5.0}
    added = step_s(tp, dp, zero_stage, **slow) - step_s(tp, dp, zero_stage)
    assert added == pytest.approx(pairs * (6 * 0.01 + 0.3 + reduced * 5.0), abs=1e-8)


def test_a_pipeline_waits_for_them_on_its_last_stage() -> None:
    """Where the head's stage is the slowest, six micro-batches wait there for the loss, whatever is before."""
    slow, plain = step_s(16, 1, 0, pp=2, far_micro_batch_s=10.0), step_s(16, 1, 0, pp=2)
    assert 60.0 <= slow <= plain + 60.0 + 1e-8
