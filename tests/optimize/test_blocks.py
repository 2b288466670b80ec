"""Products of choices, and rules that cut them: what is left is what the rule allows of the listed product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from milpplan.optimize.space import Blocks, apply_rules, boxes
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import Choices, Rule, RuleFilter, within
from milpplan.optimize.space.rules import offloads
from milpplan.problem import SCHEDULES, SPLIT_SCHEDULES, Problem, Space
from milpplan.simulation import IntArray
from tests.amounts import long_but
from tests.optimize.test_layouts import small

FACTORS = (("sequence_parallel", "offload_weights"), ("vpp", "schedule"), ("zero_stage",))


def random_choices(rng: np.random.Generator, names: tuple[str, ...], blocks: int) -> Choices:
    """Lists of distinct rows, some of them shared by several blocks and some empty."""
    counts = rng.integers(0, 5, size=3)
    table: dict[str, IntArray] = {
        name: np.concatenate([np.sort(rng.permutation(6)[:count]) for count in counts]).astype(np.int64)
        for name in names
    }
    place = np.repeat(np.arange(3), counts)
    return Choices.listed(table, place, 3, rng.integers(0, 3, size=blocks)).shared()


def random_blocks(rng: np.random.Generator) -> Blocks:
    """A few blocks with columns of few values."""
    size = int(rng.integers(1, 8))
    columns = {name: rng.integers(1, 3, size=size) for name in ("tp", "pp")} | {"number": np.arange(size)}
    return Blocks(columns, *(random_choices(rng, names, size) for names in FACTORS))


def listed(blocks: Blocks) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Every layout of the product as a row, in order."""
    counts = [factor.counts for factor in blocks.factors]
    block, place = within(np.prod(counts, axis=0))
    found = [values[block] for values in blocks.columns.values()]
    for factor, count in zip(reversed(blocks.factors), reversed(counts), strict=True):
        rows = factor.starts[block] + place % count[block]
        place = place // count[block]
        found += [factor.table[name][rows] for name in sorted(factor.table)]
    return np.stack(found, axis=1)


def random_rule(rng: np.random.Generator) -> Rule:
    """Forbid a random half, or a few, of the combinations of some columns."""
    names = rng.permutation(["tp", "pp", *(name for names in FACTORS for name in names)])[: rng.integers(1, 5)]
    share, salt = rng.choice([0.1, 0.5, 0.9]), int(rng.integers(1, 2**31))

    def rule(problem: Problem, c: Mapping[str, IntArray]) -> Any:
        mixed = np.full(len(c[str(names[0])]), salt)
        for name in names:
            mixed = (mixed * 1_000_003 + c[str(name)] * 7919) % 2_147_483_647
        return mixed % 1000 >= share * 1000

    return rule


@pytest.mark.parametrize("seeds", long_but((300,), (300, 5000)))
def test_a_rule_leaves_what_it_allows_of_the_product(seeds: int) -> None:
    """Whatever columns a rule reads: every allowed layout is left once, no other is, and the rest is counted."""
    lost = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        blocks, rule, sieve = random_blocks(rng), random_rule(rng), RuleFilter(small())
        before = listed(blocks)
        names = [*blocks.columns, *(name for factor in reversed(blocks.factors) for name in sorted(factor.table))]
        legal = rule(small(), dict(zip(names, before.T, strict=True))) if len(before) else np.zeros(0, np.bool_)
        left = listed(apply_rules(sieve, blocks, {"rule": rule}))
        assert np.array_equal(left[np.lexsort(left.T)], before[legal][np.lexsort(before[legal].T)])
        assert sieve.rejected["rule"] == int((~legal).sum())
        lost += sieve.rejected["rule"]
    assert lost > 10 * seeds


def test_boxes_cover_what_is_legal_once() -> None:
    """Any set of combinations is cut into products that have each of them once, and nothing else."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        legal = rng.random(rng.integers(1, 5, size=rng.integers(0, 4))) < rng.choice([0.2, 0.5, 0.9])
        covered = np.zeros(legal.shape, dtype=np.int64)
        for box in boxes(np.asarray(legal)):
            covered[np.ix_(*box)] += 1
        assert np.array_equal(covered, np.asarray(legal).astype(np.int64))


def test_offloads_with_split_backwards_are_left_out() -> None:
    """With all schedules and offloads in one space the layouts are those of the space without the rule that the
    rule allows, and as many families are counted as it lost."""
    offload: Any = dict.fromkeys(("offload_weights", "offload_activations", "offload_optimizer"), (False, True))
    problem = small(num_gpus=4, space=Space(schedule=SCHEDULES, tp=(1, 2), zero_stage=(0, 3), **offload))
    name = "offload_needs_whole_backward"
    every, space = layout_space(problem, without=(name,)), layout_space(problem)
    split = np.isin(every.columns.schedule, [SCHEDULES.index(schedule) for schedule in SPLIT_SCHEDULES])
    away = offloads({name: np.asarray(getattr(every.columns, name)).astype(np.int64) for name in offload})
    wanted = {every.at(row) for row in np.flatnonzero(~(split & away)).tolist()}
    assert {space.at(row) for row in range(len(space))} == wanted
    assert len(space) == len(wanted) < len(every)
    families = int(every.num_families.sum()) - int(space.num_families.sum())
    assert space.rejected[name] == families > 0
