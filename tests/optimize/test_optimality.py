"""The optimum of ``solve`` is that of brute force over the simulator, plan by plan, on every backend."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings

from milpplan import Plan, PlanResult, SolveOptions, fixed, simulate, solve
from milpplan.errors import InvalidInputError
from milpplan.optimize import DEFAULT_GAP, ClaimedResult, target_price
from milpplan.optimize.certify import certify
from milpplan.optimize.solve import without_margin
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Problem, Range
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import few_or_many, long_but
from tests.optimize.brute_force import (
    Best,
    brute_force,
    costed_plans,
    naive_layouts,
    time_and_peak,
    weight,
    with_more_overlap,
)
from tests.optimize.problems import (
    FAMILIES,
    batch_range,
    problems,
    random_plan,
    random_problem,
    with_margin,
    with_memory,
)
from tests.oracles.whole_program import solve_monolithic

BACKENDS = ("cpsat", "cbc", "highs", "scip")
EXACT = 0.0
PROVED = 1e-4
"""Programs are in units of about 1e-6 of a step, so that ``gap=0`` ends with the optimum and a bound this near."""


LONG_BLOCKS = [pytest.param(block, 10, marks=pytest.mark.long) for block in range(7)]


def assert_optimal(problem: Problem, result: PlanResult, best: Best | None) -> None:
    """Both say that nothing fits, or they agree to the nanosecond and the bound is not above the optimum."""
    if best is None:
        assert result.status == "infeasible"
        assert result.plan is None
        return
    assert result.plan is not None
    assert result.report is not None
    value = result.report.step_time_ns * weight(problem, result.plan.layout)
    assert value == pytest.approx(best.value, rel=1e-12)
    assert result.report == simulate(problem, result.plan)
    assert result.report.fits
    assert result.status in ("optimal", "feasible")
    assert result.gap is not None
    assert result.gap <= PROVED
    if result.lower_bound_s is not None:
        assert result.lower_bound_s * 1e9 <= best.step_time_ns * (1 + 1e-12)


@cache
def optimum(problem: Problem) -> Best | None:
    """The optimum by brute force, worked out once for all backends."""
    return brute_force(problem)


def check(problem: Problem, backend: str, **options: Any) -> None:
    """``solve`` against brute force."""
    assert_optimal(problem, solve(problem, backend=backend, gap=EXACT, **options), optimum(problem))


@pytest.mark.parametrize("backend", long_but(("cpsat", "cbc", "highs"), BACKENDS))
@pytest.mark.parametrize(("block", "count"), [(0, 4), *LONG_BLOCKS])
def test_optimum_is_that_of_brute_force(backend: str, block: int, count: int) -> None:
    """On 70 random problems a backend (280 in all, 12 without the long tests), all families of models, ``solve``
    finds the optimum or proves that no plan fits."""
    first = 1000 * BACKENDS.index(backend) + 10 * block
    for seed in range(first, first + count):
        check(random_problem(seed, family=FAMILIES[seed % len(FAMILIES)]), backend)


@pytest.mark.parametrize("backend", long_but(("cpsat",), BACKENDS))
@pytest.mark.parametrize("count", long_but((2,), (2, 20)))
def test_optimum_of_sparse_attention_is_that_of_brute_force(backend: str, count: int) -> None:
    """Of models whose queries attend to selected or compressed keys, ``solve`` finds the optimum of brute force,
    and so does the program of the whole space."""
    for seed in range(31_000, 31_000 + 2 * count):
        problem = random_problem(seed, kind="free", family=("sparse", "compressed")[seed % 2])
        assert problem.model.has_indexers
        best = optimum(problem)
        assert_optimal(problem, solve(problem, backend=backend, gap=EXACT), best)
        if len(layout_space(problem)) <= 6:
            found = solve_monolithic(problem, backend, gap=0.0).step_time_ns
            assert found == (None if best is None else best.value)


@pytest.mark.parametrize("backend", long_but(("cpsat",), BACKENDS))
@pytest.mark.parametrize("count", long_but((6,), (6, 40)))
def test_optimum_of_shared_selections_is_that_of_brute_force(backend: str, count: int) -> None:
    """Where layers take the keys of the layer before, ``solve`` finds the best plan whose stages all start with
    layers that need none, among all layouts, those included that the rules drop; so does the whole program."""
    num_cut = 0
    for seed in range(52_000, 52_000 + count):
        problem = random_problem(seed, kind=("free", "free", "uniform")[seed % 3], family="shared")
        best = brute_force(problem, naive_layouts(problem)) if seed % 2 else optimum(problem)
        assert_optimal(problem, solve(problem, backend=backend, gap=EXACT), best)
        num_cut += best is not None and best.plan.layout.pp > 1
        if problem.space.kind == "free" and len(layout_space(problem)) <= 6:
            found = solve_monolithic(problem, backend, gap=0.0).step_time_ns
            assert found == (None if best is None else best.value)
    assert num_cut > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", long_but((1,), (1, 20)))
def test_optimum_of_a_hybrid_is_that_of_brute_force(backend: str, count: int) -> None:
    """Models whose layers are linear recurrences, gated attention and single blocks, in the free space."""
    for seed in range(7000, 7000 + count):
        check(random_problem(seed, family="hybrid"), backend)


@pytest.mark.parametrize("backend", long_but(("cbc",), BACKENDS))
@pytest.mark.parametrize("share", long_but((0.25,), (0.05, 0.25, 0.5)))
def test_optimum_with_a_margin_is_that_of_brute_force(backend: str, share: float) -> None:
    """Where plans leave a share of the memory, ``solve`` and the program of the whole space find the best of
    devices that are smaller by that share, with and without ZeRO 2 and 3 in pipelines, the report still speaks of
    the memory that is there, and the price of the margin is that of brute force."""
    kind = ("uniform", "free")
    for seed in range(6000, 6004):
        problem = random_problem(seed, kind=kind[seed % 2])
        space = problem.space.model_copy(update={"zero_pipeline": seed % 4 == 1})
        problem = problem.model_copy(update={"space": space})
        asked = with_margin(problem, share, of_space=seed % 4 < 2)
        installed = asked.hardware.accelerator.memory_bytes
        best = optimum(with_memory(problem, installed - int(share * installed)))
        result = solve(asked, backend=backend, gap=EXACT)
        assert_optimal(asked, result, best)
        if problem.space.kind == "free" and len(layout_space(asked)) <= 6:
            assert solve_monolithic(asked, backend, gap=0.0).step_time_ns == (None if best is None else best.value)
        if result.report is not None:
            assert result.report.usable_memory_bytes == installed
            assert result.report.peak_memory_bytes <= installed - int(share * installed)
            assert result.report.fits_with_margin
            whole, without = without_margin(asked), optimum(with_memory(problem, installed))
            assert whole is not None
            assert best is not None
            assert without is not None
            price = target_price(result, whole, SolveOptions(backend=backend, gap=EXACT), None)
            assert price is not None
            longer = pytest.approx(best.value / without.value - 1.0, abs=2 * PROVED)
            assert (price.least_fraction, price.most_fraction) == (longer, longer)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_result_that_leaves_too_little_is_not_certified(share: float) -> None:
    """``certify`` refuses a plan that fits but leaves less than the space asks for."""
    problem = random_problem(6001)
    result = solve(problem)
    assert result.report is not None
    size = int(result.report.peak_memory_bytes / (1 - share * 0.9))
    tight = with_memory(problem, size)
    space = tight.space.model_copy(update={"memory_margin_fraction": share})
    tight = tight.model_copy(update={"space": space})
    claim = ClaimedResult.of(result, SolveOptions())
    checks = certify(tight, claim, SolveOptions()).checks
    (check,) = [check for check in checks if check.name == "plan simulated again"]
    assert check.passed == (not share)
    assert claim.plan is not None
    assert simulate(tight, claim.plan).fits
    assert ("less memory than the space asks for" in check.seen) == bool(share)


@pytest.mark.long
@pytest.mark.parametrize("count", long_but((3,), (3, 8)))
def test_default_gap_is_proved(count: int) -> None:
    """With the default gap the status is optimal, and the plan is within it of brute force."""
    for seed in range(3000, 3000 + count):
        problem = random_problem(seed)
        best, result = brute_force(problem), solve(problem)
        assert result.status == ("infeasible" if best is None else "optimal")
        if best is not None:
            assert result.gap is not None
            assert result.gap <= DEFAULT_GAP
            assert result.report is not None
            assert best.step_time_ns <= result.report.step_time_ns <= best.step_time_ns / (1 - DEFAULT_GAP)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", range(20))
def test_optimum_is_that_of_brute_force_often(backend: str, block: int) -> None:
    """The same on 400 more random problems, each on every backend."""
    for seed in range(10_000 + 20 * block, 10_020 + 20 * block):
        check(random_problem(seed), backend)


@pytest.mark.parametrize("count", long_but((4,), (4, 12)))
def test_uniform_optimum_is_that_of_brute_force(count: int) -> None:
    """In the uniform space ``solve`` finds the best of the equal splits with one recompute setting."""
    for seed in range(count):
        check(random_problem(seed, kind="uniform"), "auto")


@pytest.mark.parametrize("backend", long_but(("cbc",), BACKENDS))
def test_best_batch_of_a_range(backend: str) -> None:
    """Where the batch may vary, the least step time per token of brute force is found."""
    for seed in range(5000, 5002):
        rng = random.Random(seed)
        check(random_problem(seed, global_batch_size=batch_range(rng)), backend)


def with_deadline(problem: Problem, objective: str, slack: float) -> Problem | None:
    """A run that must be ``slack`` times as fast as the largest cluster's best plan allows."""
    largest = problem.job.num_gpus_values[-1]
    alone = problem.model_copy(update={"job": problem.job.model_copy(update={"num_gpus": largest})})
    best = brute_force(alone)
    if best is None:
        return None
    tokens = best.plan.layout.global_batch_size * problem.job.sequence_length
    changes = {
        "objective": objective,
        "training_tokens": 1e6 * tokens,
        "deadline_s": 1e6 * best.step_time_ns / 1e9 * slack,
    }
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


def fewest_gpus(problem: Problem) -> int | None:
    """Least number of GPUs with a plan that meets the deadline."""
    for gpus in problem.job.num_gpus_values:
        job = problem.job.model_copy(update={"num_gpus": gpus, "objective": "step_time_per_token"})
        if brute_force(problem.model_copy(update={"job": job})) is not None:
            return gpus
    return None


def cluster_problems(objective: str, slack: float, seeds: range) -> list[Problem]:
    """Problems with 2 to 8 GPUs and a deadline."""
    found = []
    for seed in seeds:
        free = random_problem(seed, num_gpus=Range(minimum=2, maximum=8, step=2))
        problem = with_deadline(free, objective, slack)
        if problem is not None:
            found.append(problem)
    return found


@pytest.mark.parametrize("count", long_but((3,), (3, 5)))
@pytest.mark.parametrize("slack", long_but((3.0,), (0.5, 1.0, 3.0)))
def test_fewest_gpus_is_that_of_brute_force(count: int, slack: float) -> None:
    """The fewest GPUs that meet a deadline are found; an impossible deadline is proved impossible."""
    for problem in cluster_problems("num_gpus", slack, range(6000, 6000 + count)):
        expected = fewest_gpus(problem)
        result = solve(problem, gap=EXACT)
        assert result.status == ("infeasible" if expected is None else "optimal")
        assert result.objective == expected


@pytest.mark.long
@pytest.mark.parametrize("count", long_but((3,), (3, 5)))
@pytest.mark.parametrize("slack", [1.0, pytest.param(4.0, marks=pytest.mark.long)])
def test_gpu_hours_are_those_of_brute_force(count: int, slack: float) -> None:
    """The least GPU-hours of a run that meets its deadline are found."""
    for problem in cluster_problems("gpu_hours", slack, range(6100, 6100 + count)):
        best = brute_force(problem)
        result = solve(problem, gap=EXACT)
        if best is None:
            assert result.status == "infeasible"
        else:
            assert result.status in ("optimal", "feasible")
            assert result.objective == pytest.approx(best.value, rel=1e-12)


def feasible_problems(seeds: range) -> list[tuple[Problem, Best]]:
    """Problems that have a plan, with their optimum."""
    pairs = [(problem, brute_force(problem)) for problem in (random_problem(seed) for seed in seeds)]
    return [(problem, best) for problem, best in pairs if best is not None]


@pytest.mark.long
@pytest.mark.parametrize("count", long_but((2,), (2, 5)))
def test_warm_start_changes_nothing_but_the_way(count: int) -> None:
    """Starting from the optimum, from a random plan or from one that does not fit gives the same optimum."""
    for problem, best in feasible_problems(range(7000, 7000 + count)):
        rng = random.Random(7)
        starts: list[Plan] = [best.plan, random_plan(rng, problem, best.plan.layout)]
        for start in starts:
            assert_optimal(problem, solve(problem, SolveOptions(gap=EXACT, warm_start=start)), best)


@pytest.mark.long
@pytest.mark.parametrize("count", long_but((2,), (2, 7)))
def test_forbidden_layouts_are_left_out(count: int) -> None:
    """With the best layout forbidden, the optimum is that of brute force over the others."""
    for problem, best in feasible_problems(range(7100, 7100 + count)):
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(len(columns))]
        others = [layout for layout in layouts if layout != best.plan.layout]
        forbid = (best.plan.layout.model_dump(),)
        result = solve(problem, gap=EXACT, forbid=forbid)
        assert_optimal(problem, result, brute_force(problem, others))


@pytest.mark.parametrize(
    "partial",
    [
        *({"tp": "8"}, {"tp": True}, {"tp": 8.5}, {"tp": [1]}, {"sequence_parallel": 1}, {"schedule": "1f1c"}),
        *({"node_order": 3}, {"replica_micro_batches": (1,)}, {"tpp": 1}, {}, {"global_batch_size": None}),
    ],
)
def test_forbidden_values_that_no_layout_has_are_refused(partial: dict[str, Any]) -> None:
    """A proof names what was left out, so that is what a layout can have: not the text of a number."""
    with pytest.raises(InvalidInputError, match="forbid"):
        solve(random_problem(14), forbid=(partial,))


@pytest.mark.parametrize("count", long_but((2,), (2, 7)))
def test_fixed_fields_are_kept(count: int) -> None:
    """With a field fixed, the optimum is that of brute force over the layouts that have it."""
    for problem, _ in feasible_problems(range(7200, 7200 + count)):
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(len(columns))]
        name = random.Random(len(layouts)).choice(("tp", "pp", "dp", "micro_batch_size", "zero_stage"))
        value = getattr(layouts[0], name)
        kept = [layout for layout in layouts if getattr(layout, name) == value]
        result = solve(fixed(problem, {name: value}), gap=EXACT)
        assert_optimal(problem, result, brute_force(problem, kept))


@few_or_many(10, 30, problems())
def test_layout_space_is_that_of_trying_everything(problem: Problem) -> None:
    """The layouts are those that break no rule, found by trying all combinations, without those that a twin
    with more overlap dominates."""
    columns = layout_space(problem).columns
    found = {columns.at(row) for row in range(len(columns))}
    every = naive_layouts(problem)
    legal = {layout for layout in every if layout.pp > 1 or layout.schedule != unused(problem)}
    assert found <= legal
    for layout in legal - found:
        twins = with_more_overlap(layout)
        assert any(twin in found for twin in twins)


def unused(problem: Problem) -> str | None:
    """Without a pipeline gpipe is 1f1b, and is left out where 1f1b is allowed."""
    return "gpipe" if "1f1b" in problem.space.schedule else None


@pytest.mark.long
def test_splits_of_any_kind_start_from_the_best_even_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the time, the wider space gives no worse plan than half of it gives the even one; its bound is
    not the even one's."""
    monkeypatch.setattr("milpplan.optimize.solve.ANY_SPLIT_LAYERS", 0)
    better = 0
    for seed in range(200):
        problem = random_problem(seed)
        layouts = layout_space(problem).columns
        if not (layouts.vpp > 1).any():
            continue
        spaces = [problem.space.model_copy(update={"interleaved_layers": kind}) for kind in ("even", "any")]
        even, wide = (solve(problem.model_copy(update={"space": space}), gap=1e-4) for space in spaces)
        if even.plan is None or even.objective is None:
            continue
        assert wide.objective is not None
        assert wide.objective <= even.objective * (1 + 1e-4)
        if wide.objective < even.objective * (1 - 1e-4):
            better += 1
            # The caller's plan counts too: with this gap nothing looks for a better one than those known.
            known = SolveOptions(warm_start=wide.plan, gap=0.5, simplest=False)
            again = solve(problem.model_copy(update={"space": spaces[1]}), known)
            assert again.objective == wide.objective
        if better >= 1:
            break
    assert better >= 1


@few_or_many(4, 40, problems())
def test_dominated_layouts_are_not_better(problem: Problem) -> None:
    """Brute force over all legal layouts finds nothing better than over the layout space."""
    best, whole = brute_force(problem), brute_force(problem, naive_layouts(problem))
    assert (best is None) == (whole is None)
    if best is not None and whole is not None:
        assert best.value == whole.value


@given(problems())
@settings(max_examples=8, deadline=None)
@pytest.mark.long
def test_batches_of_plans_are_simulated_exactly(problem: Problem) -> None:
    """Brute force is the simulator: step time and peak memory of single plans are those of ``simulate``."""
    columns = layout_space(problem).columns
    rng, costs = random.Random(len(columns)), layout_costs(problem, columns)
    for row in rng.sample(range(len(columns)), min(3, len(columns))):
        plans = costed_plans(problem, columns.at(row), costs.at(row))
        size = len(plans.step_time_ns)
        for number in rng.sample(range(size), min(5, size)):
            report = simulate(problem, plans.plan(number))
            found = (report.step_time_ns, report.peak_memory_bytes)
            assert found == (plans.step_time_ns[number], plans.peak_bytes[number])
            assert found == time_and_peak(problem, costs.at(row), plans.plan(number))
