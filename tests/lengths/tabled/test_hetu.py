"""Export for HotSPa's runtime: its files, its rules restated, and plans that it cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.lengths import Degrees
from milpplan.lengths.hotspa_export import SCRIPT, as_buckets, exported, parallel_config
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    GroupedProblem,
    KindTimes,
    Packing,
    Pipeline,
    Strategy,
    SwitchTimes,
    arranged,
    constructed,
)
from tests.oracles.hotspa_runtime import runtime_packs

GOLDEN = Path(__file__).parents[2] / "data" / "launchers" / "hotspa_dp2_tp2_pp2.json"
LAYOUTS = {"short": Degrees(dp=8), "middle": Degrees(dp=2, tp=2, pp=2), "long": Degrees(dp=1, tp=4, pp=2)}


def problem() -> GroupedProblem:
    """Three strategies on 8 GPUs; the first holds short sequences only."""
    strategies = (
        Strategy.of(Pipeline("tp1", 1, 1.0, 40_000, 1e6, 1024), 8, name="short"),
        Strategy.of(Pipeline("tp2 pp2", 2, 0.3, 12_000, 1e6, 4096), 2, name="middle"),
        Strategy.of(Pipeline("tp4 pp2", 2, 0.1, 8_000, 1e6, 16_384), 1, name="long"),
    )
    lengths = np.array([128, 512, 1024, 2048, 4096, 8192], np.int64)
    counts = np.array([40, 30, 20, 8, 4, 2], np.int64)
    return GroupedProblem(lengths, counts, strategies, SwitchTimes.free(3), 3)


def plan_of(table: list[list[int]]) -> GroupedPlan:
    """The plan with these sequences [strategy][K], arranged with all homes free."""
    step = problem()
    groups = []
    for strategy, row in enumerate(table):
        kind = step.kinds_of(strategy)[0]
        replicas = constructed(KindTimes(kind), kind.num_replicas, np.array(row, np.int64))
        assert replicas is not None
        groups.append(Group(strategy, (Packing(kind, tuple(replicas)),)))
    return arranged(step, groups)


BY_LENGTH = [[40, 30, 20, 0, 0, 0], [0, 0, 0, 8, 4, 0], [0, 0, 0, 0, 0, 2]]
MIXED = [[40, 25, 16, 0, 0, 0], [0, 5, 0, 8, 3, 0], [0, 0, 4, 0, 1, 2]]


def test_a_strategy_file_is_the_one_its_generator_writes() -> None:
    """Fields and values of dp2 tp2 pp2 with four layers, as HotSPa's generator writes them (941a18d)."""
    assert json.dumps(parallel_config(LAYOUTS["middle"], 4), indent=4) + "\n" == GOLDEN.read_text(encoding="utf-8")


def tensors(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All placements of a strategy's file, wherever in it."""
    if "split" in config:
        return [config]
    return [one for value in config.values() if isinstance(value, dict) for one in tensors(value)]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_splits_and_copies_fill_the_devices(dp: int, tp: int, pp: int) -> None:
    """Every tensor's splits times copies are its devices, stages share none, and blocks cover all layers."""
    config = parallel_config(Degrees(dp=dp, tp=tp, pp=pp), 16)
    for one in tensors(config):
        (devices,) = one["device_group_union"]
        assert int(np.prod([*one["dup"], *(way for ways in one["split"].values() for way in ways)])) == len(
            devices
        )
    blocks = config["llama"]["blocks"].values()
    assert [layer for one in blocks for layer in range(one["range"][0], one["range"][1] + 1)] == list(range(16))
    used = [device for one in blocks for device in one["layernorm1"]["device_group_union"][0]]
    assert sorted(used) == config["devices"] == list(range(dp * tp * pp))
    assert config["zero"] == (dp > 1)


def test_strategies_stand_as_the_runtime_runs_them() -> None:
    """Home first; strategy i runs bucket n - i, so the shortest sequences come second in the list."""
    plan = as_buckets(plan_of(BY_LENGTH))
    assert plan.names == ("short", "middle", "long")
    launch = exported(plan, LAYOUTS, 32)
    assert launch.strategies == ("long", "short", "middle")
    assert launch.bucket_sizes == (8192, 4096, 1024, 0)
    number = len(launch.strategies)
    packs = runtime_packs(np.repeat(plan.problem.lengths, plan.problem.counts).tolist(), launch.bucket_sizes)
    for group in plan.groups:
        name = plan.problem.strategies[group.strategy].name
        place = launch.strategies.index(name)
        bucket = packs[0 if place == 0 else number - place]
        held = np.repeat(plan.problem.lengths, group.counts).tolist()
        assert sorted(length for one in bucket for length in one) == held
    assert set(launch.files) == {
        SCRIPT,
        "ds_parallel_config/gpus8/dp1_tp4_pp2.json",
        "ds_parallel_config/gpus8/dp8_tp1_pp1.json",
        "ds_parallel_config/gpus8/dp2_tp2_pp2.json",
    }
    script = launch.files[SCRIPT]
    assert '--bucket_sizes "8192 4096 1024 0"' in script
    assert "--num_strategy=3" in script
    assert "mpirun -np 8 " in script
    assert script.index("dp1_tp4_pp2") < script.index("dp8_tp1_pp1") < script.index("dp2_tp2_pp2")


def test_a_plan_beyond_the_rules_is_refused_and_brought_near() -> None:
    """Lengths that run in two places are moved where the fewest tokens are, and the time is simulated."""
    mixed = plan_of(MIXED)
    with pytest.raises(IllegalPlanError, match="one bucket a strategy"):
        exported(mixed, LAYOUTS, 32)
    near = as_buckets(mixed)
    # Fewest tokens: 5 x 512 to short, 4 x 1024 to short, 1 x 4096 to middle.
    assert [group.counts.tolist() for group in near.groups] == BY_LENGTH
    assert near.home == near.order[-1] == 2
    exported(near, LAYOUTS, 32)


def test_order_and_home_are_rules_too() -> None:
    """A plan whose home is elsewhere is refused; as_buckets puts it last."""
    plan = plan_of(BY_LENGTH)
    moved = GroupedPlan(plan.problem, 0, plan.groups, plan.time_ns)
    with pytest.raises(IllegalPlanError, match="the longest last and at home"):
        exported(moved, LAYOUTS, 32)
    assert exported(as_buckets(moved), LAYOUTS, 32).strategies[0] == "long"


def test_boundaries_move_the_fewest_tokens() -> None:
    """Of all ways to cut the lengths in three, the one that moves the fewest tokens and keeps all in memory."""
    step = problem()
    plan = plan_of([[0, 12, 2, 0, 0, 0], [9, 18, 10, 7, 4, 0], [31, 0, 8, 1, 0, 2]])
    held = np.array([group.counts for group in sorted(plan.groups, key=lambda group: group.strategy)])
    moved = {}
    for first in range(7):
        for second in range(first, 7):
            ways = np.repeat(np.arange(3), [first, second - first, 6 - second])
            if first <= 3 and second <= 5:
                stay = held[ways, np.arange(6)]
                moved[first, second] = int(((step.counts - stay) * step.lengths).sum())
    near = as_buckets(plan)
    kept = {group.strategy: group.counts for group in near.groups}
    stay = sum(np.minimum(kept[s], held[s]) @ step.lengths for s in kept)
    assert int(step.counts @ step.lengths - stay) == min(moved.values())


@pytest.mark.parametrize(
    ("layouts", "num_layers", "message"),
    [
        ({}, 32, "has no layout"),
        ({**LAYOUTS, "short": Degrees(dp=4)}, 32, "the layouts use"),
        ({**LAYOUTS, "long": Degrees(dp=1, tp=8, pp=2)}, 32, r"use \[8, 16\] GPUs"),
        (LAYOUTS, 33, "for 33 layers"),
    ],
)
def test_layouts_that_the_runtime_cannot_have(layouts: dict[str, Degrees], num_layers: int, message: str) -> None:
    """Missing ones, wrong numbers, other GPUs, uneven stages."""
    with pytest.raises(InvalidInputError, match=message):
        exported(as_buckets(plan_of(BY_LENGTH)), layouts, num_layers)


def test_the_runtime_packs_greedily() -> None:
    """Longest first, one token more for each sequence's last label, each pack up to its bucket's end plus one."""
    assert runtime_packs([10, 7, 6, 3, 3, 2, 40], (20, 10, 5, 0)) == [[[20]], [[10], [7], [6]], [[3], [3], [2]]]
    assert runtime_packs([4, 3, 3, 2, 1], (10, 0)) == [[[4, 3, 1], [3, 2]]]
