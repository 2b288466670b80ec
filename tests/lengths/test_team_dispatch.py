"""Batches on teams: every sequence once, the exact time of what is said, a bound below it, and plain data."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan import Job, Problem, load_hardware, load_model
from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.lengths import SequenceRules, TeamDispatchFile, workload_of
from milpplan.lengths.dispatch import TeamDispatcher
from milpplan.lengths.side_by_side import Family, Turn, families, shared_work, simulate_turns
from tests.lengths.cases import GRAIN, pool_of
from tests.small import small_problem

LONGEST = 32_768
PROBLEM = small_problem(memory_gib=40)


@cache
def dispatcher() -> TeamDispatcher:
    """For four seats of one GPU."""
    return TeamDispatcher(PROBLEM, 1, LONGEST, GRAIN)


def alone(lengths: list[int]) -> Family:
    """The family of a pool that is made for this batch only."""
    problem = PROBLEM.model_copy(update={"space": PROBLEM.space.model_copy(update={"pp": (1,), "tp": (1,)})})
    (only,) = families(pool_of(problem, workload_of(np.array(lengths), GRAIN)))
    return only


def test_batches_are_planned_exactly() -> None:
    """Random batches, simulated anew from the indices by a family made for each, take the time that is said; the
    bound is below it and that of that family; the same batch gets the same answer, from a copy of the dispatcher,
    too."""
    random = np.random.default_rng(4)
    for number in (1, 40):
        lengths = [int(one) for one in random.integers(50, 4_000, number - 1)] + [LONGEST - 1_000]
        found = dispatcher().dispatch(lengths)
        indices = [index for turn in found.turns for one in turn.micro_batches for index in one]
        assert sorted(indices) == list(range(number))
        family = alone(lengths)
        load, names = family.pool.load, {}
        for member in family.members:
            names[family.pool.members[member].candidate.name] = member
        turns = []
        for turn in found.turns:
            rows = np.zeros((len(turn.micro_batches), len(load.lengths)), dtype=np.int64)
            for row, held in zip(rows, turn.micro_batches, strict=True):
                for index in held:
                    row[np.searchsorted(load.lengths, lengths[index])] += 1
            turns.append(Turn(names[turn.strategy], turn.first_gpu // turn.num_gpus, rows))
        assert simulate_turns(family, turns).time_ns == pytest.approx(found.step_time_s * 1e9, abs=1.0)
        assert found.lower_bound_s <= found.step_time_s
        assert found.lower_bound_s * 1e9 == pytest.approx(shared_work(family).bound_ns, rel=0.02)
        file = TeamDispatchFile.model_validate_json(found.file().model_dump_json())
        assert [turn.micro_batches for turn in file.turns] == [turn.micro_batches for turn in found.turns]
        assert [one - GRAIN < given <= one for one, given in zip(file.lengths, lengths, strict=True)] == [
            True
        ] * number
        again = pickle.loads(pickle.dumps(dispatcher()))
        assert again.dispatch(lengths) == found
        assert 0.0 <= found.gap < 0.25


def test_short_batches_are_bounded_by_their_own_longest() -> None:
    """Few short sequences: the bound is not that of the longest which the dispatcher knows."""
    found = dispatcher().dispatch([300] * 16)
    assert found.lower_bound_s <= found.step_time_s
    assert found.step_time_s < 0.5 * dispatcher().dispatch([LONGEST]).lower_bound_s


def test_bad_batches_and_degrees_are_refused() -> None:
    """No sequences, empty or too long ones, and tensor parallelism that leaves no two degrees."""
    for lengths in ([], [0, 5], [LONGEST + 1]):
        with pytest.raises(InvalidInputError, match="batch"):
            dispatcher().dispatch(lengths)
    with pytest.raises(InvalidInputError, match="two degrees"):
        TeamDispatcher(PROBLEM, 4, 1024, GRAIN)
    with pytest.raises(InvalidInputError, match="at least 1"):
        TeamDispatcher(PROBLEM, 1, 0, GRAIN)
    with pytest.raises(InfeasibleError, match="fits under no strategy"):
        TeamDispatcher(PROBLEM, 1, 1_000_000, GRAIN)


def test_a_full_mask_takes_longer_and_padding_is_refused() -> None:
    """As ``solve_lengths`` does: twice the attention, in time and bound; rectangles have no teams."""
    lengths = [4_000, 900, 20_000]
    full = TeamDispatcher(PROBLEM, 1, LONGEST, GRAIN, SequenceRules("full", False)).dispatch(lengths)
    causal = dispatcher().dispatch(lengths)
    assert full.step_time_s > causal.step_time_s * 1.02
    assert full.lower_bound_s > causal.lower_bound_s * 1.02
    with pytest.raises(InvalidInputError, match="side by side"):
        TeamDispatcher(PROBLEM, 1, LONGEST, GRAIN, SequenceRules("causal", True))


@pytest.mark.parametrize(
    "lengths", [[12.0], [128.9], [float("nan")], None, ["a"], [10**30], 5, [[1], [1, 2]], [[3]]]
)
def test_what_is_no_row_of_whole_numbers_is_refused(lengths: Any) -> None:
    """Nothing is rounded, and no library's own error comes out."""
    with pytest.raises(InvalidInputError, match="of type"):
        dispatcher().dispatch(lengths)


def test_few_lengths_do_not_limit_micro_batches() -> None:
    """Of a dispatcher for short sequences a micro-batch holds as many of them as memory does: batches take what
    they take under one for longer ones, and no bound is above that."""
    for longest in (GRAIN, 4 * GRAIN):
        found = TeamDispatcher(PROBLEM, 1, longest, GRAIN).dispatch([longest] * 600)
        other = dispatcher().dispatch([longest] * 600)
        assert found.lower_bound_s <= other.step_time_s
        assert found.step_time_s == pytest.approx(other.step_time_s, rel=0.02)


def test_experts_of_several_degrees_have_to_be_named() -> None:
    """Parameters stay where they are, so a bound is of one tensor parallelism of the experts."""
    job = Job(num_gpus=16, global_batch_size=1, sequence_length=256)
    experts = Problem(model=load_model("qwen3-30b-a3b"), hardware=load_hardware("dgx-b200"), job=job)
    experts = experts.model_copy(update={"space": experts.space.model_copy(update={"cp": (1, 2)})})
    with pytest.raises(InvalidInputError, match="experts of tensor parallelism 2, 4"):
        TeamDispatcher(experts, 4, 2_048, 256)
    with pytest.raises(InvalidInputError, match="etp=8 has no two degrees"):
        TeamDispatcher(experts, 4, 2_048, 256, etp=8)
    times = [TeamDispatcher(experts, 4, 2_048, 256, etp=one).dispatch([300] * 64).step_time_s for one in (2, 4)]
    assert times[0] != pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize(
    "given",
    [{"tp": "1"}, {"tp": None}, {"longest": 2.5}, {"alignment": 0}, {"etp": 0}, {"longest": 1 << 40}],
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any]) -> None:
    """Nothing is rounded, and nothing is tabled for ever."""
    words: dict[str, Any] = {"tp": 1, "longest": 1_024, "alignment": GRAIN} | given
    with pytest.raises(InvalidInputError):
        TeamDispatcher(PROBLEM, **words)


def test_sequences_beyond_learned_positions_are_refused() -> None:
    """As ``solve_lengths`` does."""
    model = PROBLEM.model.model_copy(update={"learned_positions": True, "max_position_embeddings": 2_048})
    problem = PROBLEM.model_copy(update={"model": model})
    with pytest.raises(InvalidInputError, match="learned positions"):
        TeamDispatcher(problem, 1, 2_304, GRAIN)
    assert TeamDispatcher(problem, 1, 2_048, GRAIN).dispatch([2_048]).step_time_s > 0.0
