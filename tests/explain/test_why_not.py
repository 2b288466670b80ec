"""Why not: the price of a wish is what trying every plan gives, and what forbids it is named."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import pytest

from milpplan import Layout, Problem, explain_plan, solve
from milpplan.errors import InvalidInputError
from milpplan.explain import WISHABLE, Optimum, WishAnswer, Yardstick
from milpplan.explain.why_not import WORDS, answer, neighbours, rule_effects, wished
from milpplan.optimize.bounds import compute_bounds
from milpplan.optimize.space import enumerate_layouts
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.optimize.space.rules import PAIR_RULES, SCHEDULE_RULES, SPLIT_BACKWARD_RULES, SPLIT_RULES
from milpplan.simulation import LayoutColumns, usable_memory_bytes
from tests.explain.cases import feasible, holds, truth_s
from tests.optimize.brute_force import brute_force
from tests.small import GIB, small_problem

VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3),
    "cp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2, 5),
    "vpp": (1, 2),
    "micro_batch_size": (1, 2),
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "recompute": ("none", "selective", "full"),
}


@pytest.mark.long
def test_every_price_holds_the_truth() -> None:
    """Of random wishes: the proved best and the price hold the truth, and impossible means that there is no
    plan."""
    rng = random.Random(3)
    outcomes = dict.fromkeys(("chosen", "priced", "forbidden", "does_not_fit"), 0)
    for problem, plan, best_s in feasible(range(108, 114)):
        yardstick = Yardstick.of(problem, plan, gap=1e-4)
        best = yardstick.optimum(problem, None, plan)
        for name in rng.sample(sorted(VALUES), 4):
            wish = {name: rng.choice(VALUES[name])}
            told = answer(yardstick, problem, wish, best, None)
            truth = truth_s(wished(problem, wish), plan.layout.global_batch_size)
            outcomes[told.outcome] += 1
            if told.outcome in ("forbidden", "does_not_fit"):
                assert math.isinf(truth)
                assert told.reason
                continue
            assert told.best is not None
            assert told.price is not None
            assert told.amount is not None
            assert holds(told.best.bounds, truth)
            assert holds(told.price, truth / best_s - 1)
            assert holds(told.amount, truth - best_s)
            assert told.price.low >= 0 or not told.in_space
    assert min(outcomes[name] for name in ("chosen", "priced", "forbidden")) > 1, outcomes


def test_a_wish_outside_the_space_may_be_better() -> None:
    """What a restriction of the space costs is a negative price, and is said to lie outside."""
    problem = small_problem(space={"kind": "free", "tp": (4,)})
    told = answered(problem, {"tp": 1})
    assert told.price is not None
    assert told.price.high < 0
    assert not told.in_space
    assert "outside" in told.reason


@cache
def measured(problem: Problem) -> tuple[Yardstick, Optimum]:
    """What the answers for a problem are measured by, found once."""
    plan = solve(problem).plan
    assert plan is not None
    yardstick = Yardstick.of(problem, plan, gap=1e-4)
    return yardstick, yardstick.optimum(problem, None, plan)


def answered(problem: Problem, wish: dict[str, Any]) -> WishAnswer:
    """The answer to one wish."""
    yardstick, best = measured(problem)
    return answer(yardstick, problem, wish, best, None)


@pytest.mark.long
def test_memory_that_forbids_is_named_with_its_amount() -> None:
    """A wish that does not fit says the least peak and the memory; the truth is not below it."""
    problem = small_problem(memory_gib=12, space={"kind": "free"})
    told = answered(problem, {"tp": 1, "dp": 4, "zero_stage": 0})
    assert told.outcome == "does_not_fit"
    assert f"of {usable_memory_bytes(problem) / GIB:.1f} GiB" in told.reason
    assert brute_force(wished(problem, {"tp": 1, "dp": 4, "zero_stage": 0})) is None


@pytest.mark.parametrize(
    ("wish", "rule"),
    [
        ({"micro_batch_size": 3}, "no degrees and micro-batches with micro_batch_size=3 give 4 GPUs"),
        ({"tp": 3}, "tp=3 does not divide 4 GPUs"),
        ({"vpp": 2, "schedule": "1f1b"}, "schedule_matches_vpp: interleaved needs vpp > 1"),
        ({"ep": 2}, "experts_need_moe: small has no experts"),
        ({"sequence_parallel": True, "tp": 1}, "sequence_parallel_needs_tp: sequence parallelism needs tp > 1"),
        ({"zero_stage": 3, "overlap_grad_reduce": False}, "sharded_gradients_are_overlapped"),
        ({"dp": 4, "tp": 2}, "dp=4,tp=2 does not divide 4 GPUs"),
        ({"dp": 2, "tp": 1, "cp": 1, "zero_stage": 2}, "ZeRO 2 and 3 with a pipeline need --allow zero-pipeline"),
    ],
)
def test_rules_that_forbid_are_named(wish: dict[str, Any], rule: str) -> None:
    """A forbidden wish names its rule, in words with the model's numbers."""
    told = answered(small_problem(space={"kind": "free"}), wish)
    assert told.outcome == "forbidden"
    assert rule in told.reason


def test_every_rule_has_words() -> None:
    """No rule of the space is without an explanation."""
    rules = {
        name
        for group in (
            enumerate_layouts.DEGREE_RULES,
            enumerate_layouts.EXPERT_RULES,
            enumerate_layouts.SEQUENCE_RULES,
            enumerate_layouts.MICRO_BATCH_RULES,
            SPLIT_RULES,
            SCHEDULE_RULES,
            SPLIT_BACKWARD_RULES,
            PAIR_RULES,
            enumerate_layouts.SHARDING_RULES,
            enumerate_layouts.PIPELINE_SHARDING_RULES,
        )
        for name in group
    }
    assert rules - set(WORDS) == {"one_schedule_without_pipeline"}


def test_neighbours_are_near_and_other() -> None:
    """Neighbours differ from the plan in one field, are halves, doubles or other choices, and none is left out."""
    problem = small_problem(space={"kind": "free"})
    plan = solve(problem).plan
    assert plan is not None
    found = [dict(wish) for wish in neighbours(problem, plan)]
    assert all(len(wish) == 1 for wish in found)
    for wish in found:
        ((name, value),) = wish.items()
        if name != "recompute":
            assert getattr(plan.layout, name) != value
    assert {name for wish in found for name in wish} >= {"tp", "cp", "pp", "micro_batch_size", "zero_stage"}
    assert {"sequence_parallel": not plan.layout.sequence_parallel} in found


def test_nonsense_is_refused_before_anything_is_solved() -> None:
    """Unknown fields and values are errors with what to do; all wishes are looked at first."""
    problem = small_problem()
    plan = solve(problem).plan
    assert plan is not None
    for wish in ({"foo": 1}, {"tp": 0}, {"recompute": "some"}, {}, {"num_gpus": 8}, {"schedule": "best"}):
        with pytest.raises(InvalidInputError) as refusal:
            explain_plan(problem, plan, [{"tp": 1}, wish])
        assert refusal.value.seen
    assert set(WISHABLE) <= {*Layout.model_fields, "recompute"}


def test_a_rule_of_divisibility_is_held_against_the_best() -> None:
    """What a rule alone refuses is bounded: it may bind if and only if the bound is below the best step."""
    problem = small_problem(num_gpus=6, global_batch_size=12, space={"kind": "free"})
    name = "sequence_divisible_by_twice_cp"
    without = layout_space(problem, without=(name,))
    refused = [without.at(row) for row in range(len(without)) if without.at(row).cp % 3 == 0]
    assert refused
    assert all(broken_rules(problem, layout)[0] == name for layout in refused)
    far, near = ({one.rule: one for one in rule_effects(problem, best)}[name] for best in (1e-6, 1e6))
    assert far.num_refused == layout_space(problem).rejected[name]
    assert (far.may_bind, near.may_bind) == (False, True)
    work = compute_bounds(problem, LayoutColumns.of(refused))
    assert far.least_bound_s == pytest.approx(work.min() / 1e9)
    assert near.least_bound_s >= far.least_bound_s
