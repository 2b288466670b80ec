"""Packings that follow best real loads: every sequence once, and shorter to begin with where it counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.length_jobs import Case, LogNormalLaw, Wikipedia
from milpplan.lengths import Load, StrategyTables, quantum_problem
from milpplan.lengths.single import packings_by_shape


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("llama-33b", "dgx-a100-80", 32, 16_384, Wikipedia(128)), "dp2 tp2 cp2 pp4 selective"),
        pytest.param(
            Case("llama2-7b", "dgx-h100", 16, 16_384, LogNormalLaw(0.8)), "dp8 pp2", marks=pytest.mark.long
        ),
    ],
)
def test_shapes_hold_every_sequence_and_are_short(case: Case, name: str) -> None:
    """Two replicas of four stages, and eight of two of which one holds a sequence four times as long as the next:
    at most two hundredths longer before any improvement than the packing that knows no shapes and is improved."""
    steps = case.workload
    load = Load(steps.lengths, steps.counts, 128)
    found = StrategyTables.of(quantum_problem(case.problem, 128), load)
    (member,) = (place for place, one in enumerate(found.members) if one.candidate.name == name)
    grains = found.max_quanta(member, shared_memory=False)
    ways = packings_by_shape(found.work_bound(member, shared_memory=False, exact=True), load, grains)
    for replicas in ways:
        assert len(replicas) == found.members[member].candidate.layout.dp
        assert (sum(one.sum(axis=0) for one in replicas) == steps.counts).all()
        assert all((one @ steps.lengths <= grains * 128).all() for one in replicas)
    plain = found.pack(member, load.counts, grains)
    assert plain is not None
    assert min(found.time_packing(member, replicas, grains).time_ns for replicas in ways) <= 1.02 * plain.time_ns


def test_sequences_that_fit_nowhere_have_no_shape() -> None:
    """A micro-batch of fewer tokens than the longest sequence."""
    case = Case("llama2-7b", "dgx-h100", 16, 16_384, Wikipedia(64))
    steps = case.workload
    load = Load(steps.lengths, steps.counts, 128)
    found = StrategyTables.of(quantum_problem(case.problem, 128), load)
    member = next(place for place in range(len(found.members)) if found.num_stages(place) > 1)
    most = int(np.max(steps.lengths)) // 128 - 1
    assert packings_by_shape(found.work_bound(member, shared_memory=False, exact=True), load, most) == []
