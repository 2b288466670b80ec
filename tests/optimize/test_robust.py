"""The plan with the least worst-case regret: brute force, scaled steps, stops, and what the command says of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milpplan import Problem, parallel, solve, solve_robust
from milpplan.errors import InvalidInputError
from milpplan.optimize import PlanResult
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import (
    PRIOR_SIGMA,
    Constants,
    Scenario,
    Uncertainty,
    default_scenarios,
    in_scenario,
    load_hardware,
    load_model,
    load_scenarios,
    scenario_of,
)
from milpplan.reports.words.result_words import regret_sentence
from milpplan.simulation import TimeScale, usable_memory_bytes
from tests.amounts import first, long_but
from tests.cli.test_cli import refused, run
from tests.optimize.brute_force import costed_layouts, weight
from tests.optimize.mixed_problems import mixed_problem
from tests.optimize.problems import random_problem
from tests.small import small_problem

GAP = 1e-5


def random_scenarios(seed: int) -> list[Scenario]:
    """One to three scenarios that slow or speed up other parts of a step."""
    rng = random.Random(seed)
    drawn = {
        "scale_out_efficiency": lambda: rng.choice((0.1, 0.3, 0.6, 1.5)),
        "scale_up_efficiency": lambda: rng.choice((0.1, 0.5, 2.0)),
        "memory_efficiency": lambda: rng.choice((0.3, 0.7)),
        "gemm_efficiency": lambda: rng.choice((0.3, 0.6)),
        "layer_launch_s": lambda: rng.choice((1e-5, 1e-4)),
        "message_s": lambda: rng.choice((1e-5, 3e-4)),
    }
    scenarios = []
    for number in range(rng.randint(1, 3)):
        names = rng.sample(list(drawn), rng.randint(1, 2))
        constants = Constants.model_validate({name: {"value": drawn[name]()} for name in names})
        scenarios.append(Scenario(name=f"scenario {number}", constants=constants))
    return scenarios


def least_regret(problem: Problem, scenarios: list[Scenario]) -> tuple[float, list[float]] | None:
    """The least worst-case regret of all plans, and the least objectives of the scenarios; None without a plan."""
    problems = [problem, *(in_scenario(problem, scenario) for scenario in scenarios)]
    columns = layout_space(problem).columns
    layouts = [columns.at(row) for row in range(len(columns))]
    values = []
    for there in problems:
        steps = []
        for costed in costed_layouts(there, layouts):
            fits = costed.peak_bytes <= usable_memory_bytes(there)
            steps.append(np.where(fits, costed.step_time_ns * weight(there, costed.layout), np.inf))
        values.append(np.concatenate(steps))
    best = [float(value.min()) for value in values]
    if not np.isfinite(best[0]):
        return None
    ratios = np.max([value / least for value, least in zip(values, best, strict=True)], axis=0)
    return float(ratios.min()) - 1.0, best


SLOW = scenario_of("slow links", "a test", scale_out_efficiency=0.2, hidden_gather_fraction=0.0)
WORDS = ["llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "32", "--space", "uniform", "--robust"]
FILE = """
[[scenarios]]
name = "slow links"
[scenarios.constants]
scale_out_efficiency.value = 0.3
"""


def check(problem: Problem, seed: int, backend: str = "auto") -> None:
    """The answer equals brute force, and both bounds are bounds."""
    scenarios = random_scenarios(seed)
    answer = least_regret(problem, scenarios)
    result = solve_robust(problem, scenarios, gap=GAP, backend=backend, simplest=False)
    if answer is None:
        assert result.status == "infeasible"
        return
    least, _ = answer
    regret = result.regret
    assert result.status == "optimal"
    assert regret is not None
    assert regret.at_least is not None
    assert regret.at_most is not None
    assert regret.at_least <= least + 1e-9
    assert least <= regret.at_most + 1e-9
    # The best step of each scenario and the search over all of them are proved within the gap.
    assert regret.at_most - regret.at_least <= 3 * GAP * (1.0 + regret.at_most)


@pytest.mark.parametrize("seed", first(2, range(200)))
def test_the_least_regret_of_uniform_plans_equals_brute_force(seed: int) -> None:
    """On small problems plan and both bounds are those of all uniform plans."""
    check(random_problem(seed, "uniform"), seed)


@pytest.mark.parametrize("backend", ["cpsat", "cbc", "highs"])
@pytest.mark.parametrize("seed", first(1, range(200)))
def test_the_least_regret_of_free_plans_equals_brute_force(seed: int, backend: str) -> None:
    """On small problems plan and both bounds are those of all free plans, whatever solver is asked."""
    check(random_problem(seed), seed, backend)


@pytest.mark.parametrize("seed", long_but((1,), range(40)))
def test_the_least_regret_on_two_node_types_equals_brute_force(seed: int) -> None:
    """Scenarios change the constants of every node type."""
    check(mixed_problem(seed), seed)


@pytest.mark.parametrize("ratio", [1.0, 0.999999, 0.7, 0.31, 1e-6])
def test_scaled_steps_keep_their_order(ratio: float) -> None:
    """Scaling is exact: arrays as single steps, its inverse, and sums of times that are rounded down."""
    scale, rng = TimeScale.at_most(ratio), random.Random(7)
    assert scale.ratio <= ratio
    steps = np.array([rng.randrange(1, 10 ** rng.randint(1, 13)) for _ in range(200)])
    scaled = scale.up_array(steps.astype(np.float64))
    assert scaled.tolist() == [scale.up(int(step)) for step in steps]
    for step in steps.tolist():
        assert scale.longest_ns(scale.up(step)) >= step
        assert scale.up(scale.longest_ns(step)) <= step < scale.up(scale.longest_ns(step) + 1)
    assert int(scale.down(steps).sum()) <= scale.up(int(steps.sum()))


def robust(**changes: object) -> PlanResult:
    """Solve a small problem in two scenarios."""
    return solve_robust(small_problem(space={"kind": "free"}), [SLOW], **changes)


@pytest.mark.parametrize("apart", [0.0005, 0.001, 0.0031])
def test_the_sentence_says_how_far_the_proofs_are_apart(apart: float) -> None:
    """Not the tolerance of each of the two, where there is more between them."""
    result = solve_robust(small_problem(), [], gap=1e-4)
    assert result.regret is not None
    assert result.regret.at_most is not None
    regret = replace(result.regret, at_least=result.regret.at_most - apart)
    text = regret_sentence(replace(result, status="optimal", regret=regret), 0.001)
    found = re.search(r"within ([\d.e-]+):", text)
    assert found is not None
    assert max(apart, 0.001) <= float(found[1]) < max(apart, 0.001) + 2e-4


def test_a_scenario_that_is_best_for_the_nominal_plan_has_no_regret() -> None:
    """With no other scenario the robust plan is the nominal optimum within the tolerance."""
    problem = small_problem()
    result, best = solve_robust(problem, [], gap=1e-4), solve(problem, gap=1e-4)
    assert result.regret is not None
    assert result.regret.at_least == 0.0
    assert result.regret.at_most is not None
    assert result.regret.at_most <= 3e-4
    assert result.step_time_s == pytest.approx(best.step_time_s, rel=3e-4)


@pytest.mark.long
def test_a_plan_that_is_optimal_in_every_scenario_is_the_answer() -> None:
    """Proofs of the scenarios are enough where one plan is optimal in all: its loss is within their tolerance."""
    same = scenario_of("same", "a test", scale_out_efficiency=1.0)
    for seed in range(6):
        problem = random_problem(seed)
        result, best = solve_robust(problem, [same], gap=1e-4), solve(problem, gap=1e-4)
        assert result.status == best.status
        if best.objective is not None:
            assert result.regret is not None
            assert result.regret.at_least == 0.0
            assert result.regret.at_most == pytest.approx(0.0, abs=1.001e-4)
            assert result.objective == pytest.approx(best.objective, rel=1.001e-4)


def test_the_step_in_every_scenario_is_simulated() -> None:
    """Steps, best plans and bounds of scenarios are those of their own problems."""
    result, problem = robust(), small_problem(space={"kind": "free"})
    assert result.regret is not None
    assert result.plan is not None
    for entry in result.regret.scenarios:
        there = problem if entry.scenario is None else in_scenario(problem, entry.scenario)
        best = solve(there, warm_start=result.plan, gap=1e-6)
        assert entry.lower_bound_s is not None
        assert best.step_time_s is not None
        assert entry.lower_bound_s <= best.step_time_s <= entry.best_s * (1 + 1e-6)
        assert entry.best_s <= entry.step_time_s * (1 + 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("lost", long_but((("slow links",),), (("slow links",), (), ("slow links", "slow host"))))
def test_scenarios_solved_at_once_have_the_answers_of_one_process(
    lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes change nothing, and this process solves the scenarios of those that die."""
    host = scenario_of("slow host", "a test", layer_launch_s=1e-4)

    def run_tasks(tasks: Sequence[Any], *rest: Any) -> Iterator[Any]:
        """Yield no answer for some scenarios; of the others that of real processes."""
        yield from (None for task in tasks if task.name in lost)
        kept = [task for task in tasks if task.name not in lost]
        asked.extend(task.name for task in kept)
        yield from parallel.run_tasks(kept, *rest)

    asked: list[str] = []
    monkeypatch.setattr("milpplan.optimize.robust.run_tasks", run_tasks)
    programs: tuple[list[Any], list[Any]] = [], []
    results = []
    for alone_s, listed in zip((1e9, 0.0), programs, strict=True):
        monkeypatch.setattr("milpplan.optimize.robust.ALONE_S", alone_s)
        problem = small_problem(space={"kind": "free"})
        changes = {"workers": 2, "gap": 1e-6, "on_program": listed.append}
        results.append(solve_robust(problem, [SLOW, host], **changes))
    assert sorted(asked) == sorted({"slow links", "slow host"} - set(lost))
    assert results[0].regret == results[1].regret
    assert results[0].plan == results[1].plan
    assert len(programs[0]) == len(programs[1])


def test_scenarios_solved_at_once_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled solve keeps the nominal plan, and says that it was interrupted."""
    monkeypatch.setattr("milpplan.optimize.robust.ALONE_S", 0.0)
    begun: list[str] = []

    def run_tasks(*words: Any) -> Iterator[Any]:
        begun.append("workers")
        yield from parallel.run_tasks(*words)

    monkeypatch.setattr("milpplan.optimize.robust.run_tasks", run_tasks)
    problem, twice = small_problem(space={"kind": "free"}), SLOW.model_copy(update={"name": "as slow"})
    result = solve_robust(problem, [SLOW, twice], workers=2, cancelled=lambda: bool(begun))
    assert begun
    assert result.plan is not None
    assert result.message == "Interrupted."


@pytest.mark.parametrize("calls", long_but((60,), (1, 5, 20, 30, 40, 50, 60, 80, 100_000)))
def test_an_interrupted_solve_keeps_its_plan_and_what_is_proved(calls: int) -> None:
    """At every moment the plan so far fits, and what is said of its regret holds."""
    left = iter(range(calls))
    result = robust(cancelled=lambda: next(left, None) is None)
    finished = robust()
    assert result.plan is not None or result.status == "no_solution_found"
    if result.regret is not None:
        # A scenario that was not reached has no bound, and so has the worst case.
        assert [entry.name for entry in result.regret.scenarios] == ["nominal", "slow links"]
    if result.regret is None or finished.regret is None:
        return
    at_least, at_most = result.regret.at_least, finished.regret.at_most
    assert at_least is None or (at_most is not None and at_least <= at_most + 1e-9)
    assert result.regret.at_most is None or result.regret.at_most >= (finished.regret.at_least or 0.0) - 1e-9


def test_default_scenarios_are_worse_than_the_hardware_says() -> None:
    """No constant of a default scenario is better than the hardware's own; experts only where a model has them."""
    dense, experts = (
        small_problem().model_copy(update={"model": load_model(name)}) for name in ("llama3-8b", "mixtral-8x7b")
    )
    names = {entry.name for entry in default_scenarios(dense)}
    assert {entry.name for entry in default_scenarios(experts)} == names | {"unbalanced experts"}
    hardware = load_hardware("dgx-h100+nanotron")
    slow = small_problem().model_copy(update={"hardware": hardware})
    for scenario in default_scenarios(slow):
        software = in_scenario(slow, scenario).hardware.software
        assert software.layer_launch_s >= hardware.software.layer_launch_s
        assert software.hidden_gather_fraction <= hardware.software.hidden_gather_fraction


def test_default_scenarios_move_by_the_sigma_of_the_fit_or_of_the_prior() -> None:
    """NeMo's stack identifies the expert dispatch (its own sigma) and no congestion (the prior's); a description
    with exact constants has no default scenario."""
    model, hardware = load_model("mixtral-8x7b"), load_hardware("dgx-h100+nemo")
    problem = small_problem().model_copy(update={"model": model, "hardware": hardware})
    values = {entry.name: entry.constants for entry in default_scenarios(problem)}
    assert hardware.uncertainty is not None
    sigma = hardware.uncertainty.dispatch_efficiency
    assert 0 < sigma < PRIOR_SIGMA["dispatch_efficiency"]
    dispatch, congestion = (
        values["unbalanced experts"].dispatch_efficiency,
        values["congested network"].congestion_s_per_byte,
    )
    assert dispatch is not None
    assert dispatch.value == pytest.approx(exp(-sigma))
    assert congestion is not None
    expected = hardware.scale_out.congestion_s_per_byte * exp(PRIOR_SIGMA["congestion_s_per_byte"])
    assert congestion.value == pytest.approx(expected)
    exact = hardware.model_copy(update={"uncertainty": Uncertainty(overlay="exact")})
    assert default_scenarios(problem.model_copy(update={"hardware": exact})) == ()


@pytest.mark.parametrize("job", [{"objective": "num_gpus"}, {"deadline_s": 1e9, "training_tokens": 1e9}])
def test_a_problem_without_a_regret_is_refused(job: dict[str, object]) -> None:
    """Fewest GPUs and deadlines have no regret."""
    with pytest.raises(InvalidInputError, match="robust"):
        solve_robust(small_problem(**job))  # type: ignore[arg-type]


def test_the_command_prints_both_bounds_and_the_scenarios(tmp_path: Path) -> None:
    """The screen states both proofs; the file holds them and is no certificate of a nominal optimum."""
    path, scenarios = tmp_path / "plan.json", tmp_path / "scenarios.toml"
    scenarios.write_text(FILE)
    done = run("solve", *WORDS, "--scenarios", str(scenarios), "--out", str(path))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "to the best plan of any scenario; no plan can promise less than" in text
    assert "slow links" in text
    document = json.loads(path.read_text())
    regret = document["regret"]
    assert regret["at_least"] <= regret["at_most"]
    assert [entry["constants"] for entry in regret["scenarios"]] == [{}, {"scale_out_efficiency": 0.3}]
    assert document["certificate"] is None
    assert "robust plan" in refused(run("certify", str(path)))
    assert load_scenarios(scenarios)[0].name == "slow links"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "scenarios"),
        ("scenarios = []", "at least one"),
        (FILE + FILE, "differ"),
        (FILE.replace("slow links", "nominal"), "nominal"),
        (FILE.replace("scale_out", "scale_in"), "scale_in_efficiency"),
        (FILE.replace("scale_out_efficiency.value = 0.3", ""), "at least one"),
    ],
)
def test_a_wrong_file_of_scenarios_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The message names the mistake."""
    path = tmp_path / "scenarios.toml"
    path.write_text(text)
    assert reason in refused(run("solve", *WORDS, "--scenarios", str(path)))


@pytest.mark.parametrize("words", [["--method", "program"], ["--check-ends"]])
def test_options_without_a_meaning_for_a_robust_plan_are_refused(words: list[str]) -> None:
    """Each is named."""
    assert words[0] in refused(run("solve", *WORDS, *words))
    others = [word for word in WORDS if word != "--robust"]
    assert "--robust" in refused(run("solve", *others, "--scenarios", "a.toml"))
