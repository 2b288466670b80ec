"""What the host takes to call collectives: a time of the call, and times for ranks near and far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from milpplan.costs.calls import call_s
from milpplan.specs.hardware import HardwareSpec
from tests.amounts import few_or_many
from tests.costs.cases import shipped_hardware

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
