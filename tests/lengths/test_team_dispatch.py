"""Batches on teams: every sequence once, the exact time of what is said, a bound below it, and plain data."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan import Job, Problem, load_hardware, load_model
from milpplan.errors import InvalidInputError
from milpplan.lengths import DispatchFile, SequenceRules, quantum_problem, workload_of
from milpplan.lengths.candidates import candidates
from milpplan.lengths.dispatch import Dispatcher
from milpplan.lengths.records import PACKED, RanGroup, RanStep
from milpplan.lengths.side_by_side import Family, Turn, families, shared_work, simulate_turns
from tests.amounts import first
from tests.lengths.cases import GRAIN, pool_of
from tests.small import small_problem

LONG = 32_768
PROBLEM = small_problem(memory_gib=40)


def step_of(
    problem: Problem, tp: int, rules: SequenceRules = PACKED, etp: int | None = None, grain: int = GRAIN
) -> RanStep:
    """A step side by side on some strategy of a tensor parallelism."""
    name = next(
        one.name
        for one in candidates(quantum_problem(problem, grain))
        if (one.layout.tp, one.layout.pp, one.layout.ep) == (tp, 1, 1) and etp in (None, one.layout.etp)
    )
    return RanStep(grain, rules, name, (RanGroup(name, (), ()),), "degrees side by side")


@cache
def dispatcher() -> Dispatcher:
    """For four seats of one GPU."""
    return Dispatcher(step_of(PROBLEM, 1), PROBLEM)


def alone(lengths: list[int]) -> Family:
    """The family of a pool that is made for this batch only."""
    problem = PROBLEM.model_copy(update={"space": PROBLEM.space.model_copy(update={"pp": (1,), "tp": (1,)})})
    (only,) = families(pool_of(problem, workload_of(np.array(lengths), GRAIN)))
    return only


@pytest.mark.parametrize("thorough", first(1, (False, True)))
def test_batches_are_planned_exactly(thorough: bool) -> None:
    """Random batches, simulated anew from the indices by a family made for each, take the time that is said; the
    bound is below it and that of that family, or more; the same batch gets the same answer, from a copy of the
    dispatcher, too."""
    random = np.random.default_rng(4)
    for number in (1, 40):
        lengths = [int(one) for one in random.integers(50, 4_000, number - 1)] + [LONG - 1_000]
        found = dispatcher().dispatch(lengths, thorough=thorough)
        held = [index for teams in found.micro_batches for team in teams for one in team for index in one]
        assert sorted(held) == list(range(number))
        family = alone(lengths)
        load, names = family.pool.load, {}
        for member in family.members:
            names[family.pool.members[member].candidate.name] = member
        turns = []
        for name, teams in zip(found.order, found.micro_batches, strict=True):
            for team, micro_batches in enumerate(teams):
                rows = np.zeros((len(micro_batches), len(load.lengths)), dtype=np.int64)
                for row, indices in zip(rows, micro_batches, strict=True):
                    for index in indices:
                        row[np.searchsorted(load.lengths, lengths[index])] += 1
                turns += [Turn(names[name], team, rows)] if len(rows) else []
        assert simulate_turns(family, turns).time_ns == found.time_ns
        assert found.bound_ns <= found.time_ns
        shared_ns = shared_work(family).bound_ns
        assert found.bound_ns == pytest.approx(shared_ns, rel=0.02) or (thorough and found.bound_ns > shared_ns)
        file = found.file()
        assert DispatchFile.model_validate_json(file.model_dump_json()) == file
        assert file.side_by_side
        assert all(one - GRAIN < given <= one for one, given in zip(file.lengths, lengths, strict=True))
        again = pickle.loads(pickle.dumps(dispatcher()))
        assert again.dispatch(lengths, thorough=thorough) == found
        assert 0.0 <= found.gap < 0.25


def test_short_batches_are_bounded_by_their_own_longest() -> None:
    """Few short sequences: the bound is not that of the longest which the dispatcher knows."""
    found = dispatcher().dispatch([300] * 16)
    assert found.lower_bound_s <= found.step_time_s
    assert found.step_time_s < 0.5 * dispatcher().dispatch([LONG]).lower_bound_s


def test_bad_batches_and_degrees_are_refused() -> None:
    """No sequences, empty or too long ones, and tensor parallelism that leaves no two degrees."""
    for lengths in ([], [0, 5], [dispatcher().longest + 1]):
        with pytest.raises(InvalidInputError, match="batch"):
            dispatcher().dispatch(lengths)
    with pytest.raises(InvalidInputError, match="0 families"):
        Dispatcher(step_of(PROBLEM, 4), PROBLEM)


@pytest.mark.long
def test_a_full_mask_takes_longer() -> None:
    """As ``solve_lengths`` does: twice the attention, in time and bound."""
    lengths = [4_000, 900, 20_000]
    full = Dispatcher(step_of(PROBLEM, 1, SequenceRules("full", False)), PROBLEM).dispatch(lengths)
    causal = dispatcher().dispatch(lengths)
    assert full.step_time_s > causal.step_time_s * 1.02
    assert full.lower_bound_s > causal.lower_bound_s * 1.02


@pytest.mark.parametrize(
    "lengths", [[12.0], [128.9], [float("nan")], None, ["a"], [10**30], 5, [[1], [1, 2]], [[3]]]
)
def test_what_is_no_row_of_whole_numbers_is_refused(lengths: Any) -> None:
    """Nothing is rounded, and no library's own error comes out."""
    with pytest.raises(InvalidInputError, match="of type"):
        dispatcher().dispatch(lengths)


@pytest.mark.long
def test_experts_stay_where_the_step_has_them() -> None:
    """A bound is of one tensor parallelism of the experts: that of the step."""
    job = Job(num_gpus=16, global_batch_size=1, sequence_length=256)
    experts = Problem(model=load_model("qwen3-30b-a3b"), hardware=load_hardware("dgx-b200"), job=job)
    experts = experts.model_copy(update={"space": experts.space.model_copy(update={"cp": (1, 2)})})
    steps = [step_of(experts, 4, etp=one, grain=256) for one in (2, 4)]
    times = [Dispatcher(step, experts).dispatch([300] * 64).step_time_s for step in steps]
    assert times[0] != pytest.approx(times[1], rel=0.01)


@pytest.mark.long
def test_sequences_beyond_learned_positions_are_refused() -> None:
    """As ``solve_lengths`` does."""
    model = PROBLEM.model.model_copy(update={"learned_positions": True, "max_position_embeddings": 2_048})
    problem = PROBLEM.model_copy(update={"model": model})
    found = Dispatcher(step_of(problem, 1), problem)
    with pytest.raises(InvalidInputError, match="batch"):
        found.dispatch([2_304])
    assert found.dispatch([2_048]).step_time_s > 0.0
