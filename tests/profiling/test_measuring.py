"""The books of measuring: order, time limit, Ctrl-C, samples."""

from __future__ import annotations

import math
from itertools import count

import pytest

from milpplan import load_hardware
from milpplan.profiling.measurement_order import CPU, GPU, Extent, measure, sweep
from milpplan.profiling.records import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    TARGET_S,
    Attention,
    Exchange,
    Layers,
    Product,
    Traffic,
    num_samples,
    timing_of,
)
from tests.profiling.cases import BASE, synthetic


@pytest.mark.parametrize("extent", [GPU, CPU])
def test_the_coarse_part_comes_first(extent: Extent) -> None:
    """The quick sweep is the beginning of the whole one, has a task of every kind, and none is twice."""
    hardware = load_hardware(BASE)
    quick, whole = (sweep(hardware, extent, 4, quick) for quick in (True, False))
    assert whole[: len(quick)] == quick
    assert len(set(whole)) == len(whole) > len(quick)
    assert {type(one) for one in quick} >= {Product, Attention, Traffic, Layers, Exchange}


def test_groups_of_ranks() -> None:
    """Powers of two and all; none on a single device."""
    ranks = {one.num_ranks for one in sweep(load_hardware(BASE), GPU, 6, quick=True) if isinstance(one, Exchange)}
    assert ranks == {2, 4, 6}
    alone = sweep(load_hardware(BASE), GPU, 1, quick=True)
    assert not any(isinstance(one, Exchange) for one in alone)


def test_a_hardware_without_fp8_is_not_asked_for_it() -> None:
    """Only number formats of the description."""
    asked = [one for one in sweep(load_hardware("dgx-a100-80"), GPU, 1, False) if isinstance(one, Product)]
    assert {one.precision for one in asked} == {"bf16"}


def test_the_time_limit_keeps_what_is_done() -> None:
    """A clock that goes on by a second at each look."""
    seconds = count()
    tasks = sweep(load_hardware(BASE), GPU, 8, quick=True)
    found = measure(synthetic(), tasks, 5.0, clock=lambda: float(next(seconds)))
    assert found.stopped == "time limit"
    assert 0 < found.num_rows < 10


def test_the_time_limit_ends_collectives() -> None:
    """Between two messages, with the ranks ended."""
    seconds = count()
    exchange = Exchange(num_ranks=4, message_bytes=GPU.messages)
    found = measure(synthetic(), [exchange], 5.0, clock=lambda: float(next(seconds)))
    assert found.stopped == "time limit"
    assert 0 < len(found.collectives) < 10


def test_an_interrupt_keeps_what_is_done() -> None:
    """Ctrl-C in the fourth measurement leaves three."""
    machine, calls = synthetic(), count(1)

    def pressed(shape: object) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt

    machine.before = pressed
    found = measure(machine, sweep(load_hardware(BASE), GPU, 8, quick=True), 1e9)
    assert found.stopped == "interrupted"
    assert found.num_rows == 3


def test_samples() -> None:
    """The median and 1.4826 times the median deviation over it; as many samples as the time allows."""
    timing = timing_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median_s == 3.0
    assert timing.spread == pytest.approx(1.4826 * 1.0 / 3.0)
    assert timing.num_samples == 5
    assert num_samples(1e-9) == MAX_SAMPLES
    assert num_samples(100.0) == MIN_SAMPLES
    assert num_samples(TARGET_S / 10) == math.floor(TARGET_S / (TARGET_S / 10))
