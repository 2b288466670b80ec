"""Pipelines of unequal micro-batches: the sweep, the best real loads, and the cuts they prove."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.lengths.bounds import PipelineCuts, best_profile, last_stage_cut
from milpplan.lengths.tabled import (
    Kind,
    Pipeline,
    pipeline_times_ns,
)
from milpplan.simulation.layers import Term
from milpplan.simulation.pipeline.step_graph import StepGraph, step_time_ns
from milpplan.simulation.pipeline.work_orders import structure
from tests.lengths.tabled.brute_force import event_time_ns


def pipeline(stages: int, **changes: float) -> Pipeline:
    """A pipeline whose units are its tokens."""
    values = {"quadratic_ns": 0.0, "linear_ns": 3.0, "micro_batch_ns": 6.0, "micro_batch_tokens": 100} | changes
    return Pipeline("p", stages, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", range(1, 6))
def test_sweep_equals_event_simulation(stages: int) -> None:
    """Random loads, transfers and shares of the backward: the sweep's time is the event simulation's."""
    random = np.random.default_rng(stages)
    for number in range(1, 10):
        one = pipeline(stages, transfer_ns=int(random.integers(0, 9)), backward_parts=int(random.integers(0, 4)))
        tokens = random.integers(1, 60, number)
        expected = event_time_ns(one, tuple((int(length),) for length in tokens))
        assert pipeline_times_ns(one, one.units(tokens) + one.micro_batch_units) == expected


@pytest.mark.parametrize(("stages", "number"), [(1, 3), (2, 2), (3, 7), (4, 3), (4, 12)])
def test_equal_micro_batches_take_the_simulators_time(stages: int, number: int) -> None:
    """With equal micro-batches the step simulator of whole plans gives the same nanosecond."""
    one = pipeline(stages, transfer_ns=5)
    durations = np.zeros((len(Term), stages), np.int64)
    durations[Term.FORWARD], durations[Term.BACKWARD] = 17, 34
    graph = StepGraph(structure("1f1b", stages, number, 1), 5)
    assert pipeline_times_ns(one, np.full(number, 17)) == step_time_ns(graph, durations)


def test_empty_places_before_the_first_micro_batch_change_nothing() -> None:
    """What the exact program relies on: loads of zero in front, without transfers."""
    random = np.random.default_rng(5)
    for stages in range(1, 6):
        one = pipeline(stages)
        for empty in range(1, 6):
            loads = random.integers(1, 50, int(random.integers(1, 8)))
            padded = np.concatenate([np.zeros(empty, np.int64), loads])
            assert pipeline_times_ns(one, padded) == pipeline_times_ns(one, loads)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_packing_beats_its_cuts(stages: int) -> None:
    """Random loads within the cap: the exact time is at least every cut at their sum, whatever the sum."""
    random = np.random.default_rng(stages)
    lengths = np.arange(1, 61)
    for transfer in (0, 7):
        one = pipeline(stages, transfer_ns=transfer)
        kind = Kind(0, one, 1, lengths, np.full(60, 2))
        for number in (1, 2, 5, 9):
            profile = best_profile(one, number, 12 * number, 40)
            assert profile is not None
            loads = random.integers(0, 41, (400, number))
            times = pipeline_times_ns(one, loads + one.micro_batch_units)
            for cut in (profile.cut, last_stage_cut(kind, number)):
                scaled = [int(load) * cut.slope + cut.constant for load in loads.sum(axis=1)]
                assert all(int(time) << 40 >= bound for time, bound in zip(times, scaled, strict=True))


@pytest.mark.parametrize(("stages", "number"), [(2, 6), (4, 10), (4, 3)])
def test_best_real_loads_meet_their_cut(stages: int, number: int) -> None:
    """The linear program's loads take its time, the cut proves it, and equal loads are worse."""
    one = pipeline(stages, micro_batch_ns=300.0)
    units = 100_000 * number
    profile = best_profile(one, number, units, 10**9)
    assert profile is not None
    exact = pipeline_times_ns(one, np.rint(profile.units).astype(np.int64) + one.micro_batch_units)
    assert exact == pytest.approx(profile.time_ns, rel=1e-4)
    assert profile.cut.at(units) == pytest.approx(profile.time_ns, rel=1e-9)
    assert profile.time_ns < pipeline_times_ns(one, np.full(number, units // number + one.micro_batch_units))


def test_two_stages_by_hand() -> None:
    """Loads (x, y) on two stages with backward twice the forward: the time is 3x + 3y + max(x, y) + min path.

    Stage 0: F1 F2 . B1 B2, stage 1: F1 B1 F2 B2. With x = y = 1: 1 + (1+2) + (1+2) + 2 = 9.
    """
    one = pipeline(2)
    assert pipeline_times_ns(one, np.array([1, 1])) == 9
    # A short one first starts stage 1 sooner: 1 + 3 + 3 * 3 + 2 * 3 = 19 against 3 + 9 + 3 + 2 = 17 the other way.
    assert pipeline_times_ns(one, np.array([1, 3])) == 1 + 3 + 9 + 6
    assert pipeline_times_ns(one, np.array([3, 1])) == 3 + 3 * 3 + 2 * 3 + 2


def test_slowest_replica_bound_is_below_equal_sharing() -> None:
    """The bound of D replicas at a load never exceeds the best real loads of one replica at its share."""
    lengths = np.arange(1, 61)
    kind = Kind(0, pipeline(3, micro_batch_ns=90.0), 2, lengths, np.full(60, 2))
    cuts = PipelineCuts(kind)
    for share in (0.25, 0.5, 1.0):
        load = 2 * int(share * kind.total_units / 2)
        times = []
        for number in range(1, 40):
            profile = best_profile(kind.pipeline, number, load // 2, kind.cap_units)
            if profile is not None:
                times.append(profile.time_ns)
        # The program leaves its caps a millionth more room.
        assert cuts.at(load) <= min(times) * (1 + 1e-6)
        assert cuts.at(load) >= 0.98 * min(times)
