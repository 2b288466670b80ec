"""Steps of few different lengths: windows that nothing fits, classes of one length, times of nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import Job, Problem, load_hardware, load_model, solve_lengths, workload_of
from milpplan.lengths import Load, StrategyTables, cutoff_ns
from milpplan.lengths.bounds import NOTHING, PinnedItem
from tests.amounts import long_but
from tests.lengths.cases import GRAIN, deep_pool

STEPS: dict[str, tuple[str, str, int, list[int], int, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "equal ones": ("llama2-7b", "dgx-a100-80", 16, [4_096] * 64, 128, {"pp": (2,), "cp": (1,)}, {}),
    "two lengths": ("llama-33b", "dgx-a100-80", 64, [1_024] * 3 + [513] * 2, 128, {}, {}),
    "equal long ones": ("llama3-8b", "dgx-h100", 64, [65_536] * 16, 100, {"pp": (4,), "cp": (1,)}, {"gap": 0.0}),
    "four sequences": ("gemma-7b", "dgx-h100", 32, [256, 128, 128, 128], 128, {"tp": (4,)}, {"gap": 0.0}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(("four sequences",), STEPS))
def test_steps_of_few_lengths_are_solved(name: str) -> None:
    """Every sequence once, and a bound below the step; warnings of numbers are errors."""
    model, hardware, num_gpus, lengths, grain, fixed, asked = STEPS[name]
    job = Job(num_gpus=num_gpus, global_batch_size=1, sequence_length=grain)
    problem = Problem(model=load_model(model), hardware=load_hardware(hardware), job=job)
    problem = problem.model_copy(update={"space": problem.space.model_copy(update=fixed)})
    workload = workload_of(np.array(lengths), grain)
    with np.errstate(invalid="raise", divide="raise", over="raise"):
        found = solve_lengths(problem, workload, grain, 1, time_limit_s=1.0, side_by_side=False, **asked)
    held = [one for group in found.groups for replica in group.micro_batches for some in replica for one in some]
    assert sorted(held) == np.repeat(workload.lengths, workload.counts).tolist()
    assert 0.0 < found.lower_bound_s <= found.step_time_s


def test_contents_of_micro_batches_that_can_hold_nothing() -> None:
    """A micro-batch that must have more grains than memory has holds nothing, at the cost of all there is; with
    one length that fits, one that must hold it is one that may."""
    pool = deep_pool()
    member = next(one for one in range(len(pool.members)) if pool.num_stages(one) > 1)
    contents = pool.micro_batch_pricing(member)
    room, only = contents.base.shape[-1], int(np.flatnonzero(contents.items.fits)[0])
    must, core = np.array([False, True]), PinnedItem(only)
    one = contents.with_max_quanta(int(contents.items.sizes[only]))
    weights, prices = np.ones((6, 2)), np.zeros(len(contents.items.sizes))
    values, rows = one.best_contents(weights, prices, must, core)
    assert values[0] == values[1] == one.best_contents(weights[:, :1], prices, must[:1], core)[0][0]
    assert rows[0, only] == rows[1, only] == 1
    values, rows = contents.best_contents(weights[:, :1], prices, must[1:], PinnedItem(0, quanta=room + 1))
    assert values[0] == -NOTHING
    assert not rows.any()


def test_a_gap_is_reached_where_it_says_so() -> None:
    """The least bound that is enough is within the gap as the result counts it, and less is not."""
    random = np.random.default_rng(8)
    for time_ns in random.integers(1, 10**12, 300).tolist():
        for gap in (0.0, 0.01, 0.05, 1e-4):
            bound_ns = cutoff_ns(time_ns, gap)
            assert time_ns - bound_ns <= gap * time_ns + 1e-6
            assert time_ns - (bound_ns - 1.0) > gap * time_ns - 1e-3


def test_candidates_are_left_out_in_their_own_layout_only() -> None:
    """None that is kept recomputes more than another one of its layout that holds as much."""
    pool = deep_pool()
    loads = Load(pool.load.lengths, pool.load.counts, GRAIN)
    again = StrategyTables.of(pool.problem, loads)
    assert [one.candidate.name for one in again.members] == [one.candidate.name for one in pool.members]
    order = ("none", "selective", "full")
    for one in pool.members:
        for other in pool.members:
            less = order.index(other.candidate.recompute) < order.index(one.candidate.recompute)
            if other.candidate.layout == one.candidate.layout and less:
                assert (
                    other.own_memory_quanta < one.own_memory_quanta
                    or other.shared_memory_quanta < one.shared_memory_quanta
                )
