"""Masks, padding and buckets: twice the attention, rectangles of one length, and the same bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from milpplan import load_model, solve_lengths
from milpplan.errors import InvalidInputError
from milpplan.lengths import (
    Load,
    SequenceRules,
    StrategyTables,
    Workload,
    bucketed,
    check_rules,
    least_padding,
    micro_batch_times,
    pack_padded,
    quantum_problem,
    workload_of,
)
from milpplan.lengths.bounds.master import Contents
from milpplan.lengths.dispatch import Dispatcher
from milpplan.lengths.tabled import (
    Kind,
    Pipeline,
)
from milpplan.problem import Problem
from milpplan.simulation import sequence_cores
from milpplan.simulation.layers import average_keys, model_flops_per_token
from tests.lengths.cases import GRAIN, random_micro_batches, workload
from tests.small import small_problem

FULL = SequenceRules(mask="full")


def test_a_full_mask_doubles_attention_and_nothing_else() -> None:
    """Keys by hand; the seconds of a sequence's attention twice, what a kernel takes once the same; and a
    micro-batch longer by just the attention of its layers."""
    assert average_keys(4096, None) == 2048
    assert average_keys(4096, None, "full") == 4096
    problem = quantum_problem(small_problem(memory_gib=40, space={"pp": (1,), "cp": (1, 2)}), GRAIN)
    steps = workload()
    causal, full = (
        StrategyTables.of(problem, Load(steps.lengths, steps.counts, GRAIN, rules))
        for rules in (SequenceRules(), FULL)
    )
    one = next(
        held.candidate
        for held in causal.members
        if held.candidate.name.startswith("dp2 tp2") and held.own_memory_quanta
    )
    (kind,) = problem.model.kinds
    cores = [sequence_cores(problem, kind, one.layout, steps.lengths, mask) for mask in ("causal", "full")]
    assert cores[1].sequence_s == pytest.approx(2 * cores[0].sequence_s)
    assert (cores[1].once_s == cores[0].once_s).all()
    single = np.eye(len(steps.lengths), dtype=np.int64)
    times = [micro_batch_times(problem, one, steps.lengths, single, mask) for mask in ("causal", "full")]
    added = (times[1].forward - times[0].forward)[0]
    assert added == pytest.approx(
        problem.model.num_layers * cores[0].sequence_s[0] * 1e9, abs=problem.model.num_layers
    )
    assert [held.own_memory_quanta for held in full.members] == [held.own_memory_quanta for held in causal.members]


def test_tables_stay_below_exact_times_under_a_full_mask() -> None:
    """Random micro-batches of every strategy without stages, context parallelism and recomputation included."""
    steps, random, checked = workload(), np.random.default_rng(4), 0
    problem = quantum_problem(small_problem(memory_gib=40, space={"pp": (1,)}), GRAIN)
    found = StrategyTables.of(problem, Load(steps.lengths, steps.counts, GRAIN, FULL))
    for number, one in enumerate(found.members):
        pipeline = found.strategy(number, shared_memory=False).pipelines[0][0]
        rows = random_micro_batches(found, one.own_memory_quanta, random, 6)
        if pipeline.num_stages > 1 or one.candidate.layout.pp > 1 or not len(rows):
            continue
        times = micro_batch_times(found.problem, one.candidate, found.load.lengths, rows, "full")
        least = (rows @ pipeline.units(found.load.lengths) + pipeline.micro_batch_units) * pipeline.parts
        assert (least <= times.forward[0] + times.backward[0]).all(), one.candidate.name
        checked += 1
    assert checked > 5


def windowed() -> Problem:
    """Where every other layer attends to 1,024 tokens."""
    problem = small_problem(memory_gib=40, space={"pp": (1,)})
    (run,) = problem.model.layers
    near = run.attention.model_copy(update={"sliding_window": 1024})
    layers = (run.model_copy(update={"count": 1}), run.model_copy(update={"count": 1, "attention": near})) * 3
    return problem.model_copy(update={"model": problem.model.model_copy(update={"layers": layers})})


def test_beside_windows_times_do_not_hang_on_other_lengths_and_tables_stay_below() -> None:
    """A micro-batch takes the same whatever other lengths there are, although the last tiles of longer sequences
    may take less; contents are never above it."""
    steps, random, checked = workload(), np.random.default_rng(4), 0
    found = StrategyTables.of(quantum_problem(windowed(), GRAIN), Load(steps.lengths, steps.counts, GRAIN))
    (once, *_) = (
        sequence_cores(found.problem, kind, one.candidate.layout, steps.lengths).once_s
        for one in found.members
        if one.candidate.layout.cp == 4
        for kind in found.problem.model.kinds[1:]
    )
    assert (np.diff(once) < 0).any()
    for member, one in enumerate(found.members):
        rows = random_micro_batches(found, one.own_memory_quanta, random, 6)
        if not len(rows):
            continue
        times = micro_batch_times(found.problem, one.candidate, found.load.lengths, rows)
        for row, whole_ns in zip(rows, (times.forward + times.backward)[0], strict=True):
            held = row > 0
            alone = micro_batch_times(found.problem, one.candidate, found.load.lengths[held], row[None, held])
            assert alone.forward[0, 0] + alone.backward[0, 0] == whole_ns
        contents = Contents.of(found, member)
        assert (contents.costs(rows) / contents.share <= (times.forward + times.backward)[0]).all()
        checked += 1
    assert checked > 5


def test_a_step_beside_windows_is_proved() -> None:
    """Its bound, whichever way it comes from, is not above it, and the dispatcher agrees."""
    problem, steps = windowed(), workload()
    result = solve_lengths(problem, steps, GRAIN, 2, 0.02, 10.0, "highs", side_by_side=False)
    assert result.lower_bound_s <= result.step_time_s
    assert result.status == "optimal"
    batch = Dispatcher(result).dispatch(np.repeat(steps.lengths, steps.counts))
    assert result.lower_bound_s <= batch.step_time_s
    assert batch.lower_bound_s <= result.step_time_s


@pytest.mark.parametrize("seed", range(6))
def test_rectangles_hold_every_sequence_in_one_length_each(seed: int) -> None:
    """Random kinds: each way has all sequences once, one length a micro-batch, within its tokens."""
    random = np.random.default_rng(seed)
    lengths = np.sort(random.choice(np.arange(1, 60), 4, replace=False)).astype(np.int64)
    counts = random.integers(1, 30, 4)
    pipeline = Pipeline("p", int(random.integers(1, 4)), 0.5, 3.0, 90.0, int(random.integers(60, 200)))
    replicas = int(random.integers(1, 5))
    for way in pack_padded(Kind(0, pipeline, replicas, lengths, counts), counts):
        assert len(way) == replicas
        assert (sum(one.sum(axis=0) for one in way) == counts).all()
        for row in np.concatenate(way):
            assert (row > 0).sum() == 1
            assert row @ lengths <= pipeline.micro_batch_tokens


def test_rectangles_level_replicas_by_hand() -> None:
    """Ten of 4 and four of 10 tokens, 20 tokens a micro-batch, two replicas, a unit a token and a micro-batch: the
    best way has five and two on each, 42 units."""
    kind = Kind(0, Pipeline("p", 1, 0.0, 3.0, 3.0, 20), 2, np.array([4, 10]), np.array([10, 4]))
    ways = pack_padded(kind, kind.counts)
    units = [[int((one @ kind.units + 1).sum()) for one in way] for way in ways]
    best = ways[min(range(len(ways)), key=lambda place: max(units[place]))]
    assert [one.tolist() for one in best] == [[[0, 2], [5, 0]]] * 2
    assert min(max(one) for one in units) == 20 + 1 + 20 + 1


@pytest.mark.long
def test_a_padded_step_is_no_shorter_than_the_packed_bound() -> None:
    """Buckets of one length a micro-batch, every sequence once, and the bound of all packings below."""
    problem = small_problem(memory_gib=40, space={"pp": (1, 2), "recompute": ("none",)})
    steps = bucketed(workload(), least_padding(problem.model, workload(), 4), GRAIN)
    packed = solve_lengths(problem, steps, GRAIN, 1, 0.1, 4.0, "highs")
    padded = solve_lengths(problem, steps, GRAIN, 1, 0.1, 4.0, "highs", rules=SequenceRules(padded=True))
    assert packed.static.lower_bound_s <= padded.step_time_s
    assert padded.lower_bound_s <= padded.step_time_s
    held = Counter[int]()
    for group in padded.groups:
        for replica in group.micro_batches:
            for one in replica:
                assert len(set(one)) == 1
                held.update(one)
    assert held == dict(zip(steps.lengths.tolist(), steps.counts.tolist(), strict=True))
    assert (padded.to_dict()["padding"], padded.to_dict()["mask"]) == (True, "causal")


@pytest.mark.long
def test_a_full_mask_takes_longer() -> None:
    """The same step, its bound above the causal one's."""
    problem = small_problem(memory_gib=40, space={"pp": (1,), "recompute": ("none",), "cp": (1,)})
    causal, full = (
        solve_lengths(problem, workload(), GRAIN, 1, 0.05, 1.0, "highs", rules=rules)
        for rules in (SequenceRules(), FULL)
    )
    assert full.lower_bound_s > causal.step_time_s


def test_buckets_by_hand() -> None:
    """Lengths 1 to 4 (thousand) at FLOPs of Llama-2 7B: padded to given ends; the best two ends against all."""
    model = load_model("llama2-7b")
    steps = Workload(np.array([1024, 2048, 3072, 4096]), np.array([9, 1, 4, 2]))
    found = bucketed(steps, [2048, 4096], 1024)
    assert (found.lengths.tolist(), found.counts.tolist()) == ([2048, 4096], [10, 6])
    flops = [length * model_flops_per_token(model, length) for length in steps.lengths.tolist()]
    costs = {
        end: float(steps.counts[: place + 1].sum() * flops[place] + steps.counts[place + 1 :].sum() * flops[3])
        for place, end in enumerate(steps.lengths[:3].tolist())
    }
    assert least_padding(model, steps, 2).tolist() == [min(costs, key=lambda end: costs[end]), 4096]


def test_bad_buckets_and_masks_are_refused() -> None:
    """Ends that fall, are not aligned or too short; windows without causality; padding under rules that pack."""
    steps = workload_of([500, 900], 128)
    for ends in ([], [1024, 512], [1000], [512]):
        with pytest.raises(InvalidInputError):
            bucketed(steps, ends, 128)
    windows = small_problem().model_copy(update={"model": load_model("gpt-oss-120b")})
    with pytest.raises(InvalidInputError, match="window"):
        check_rules(windows, FULL, False)
    with pytest.raises(InvalidInputError, match="'Full'"):
        check_rules(small_problem(), SequenceRules(mask="Full"), False)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="Baselines"):
        check_rules(small_problem(), SequenceRules(padded=True), True)
