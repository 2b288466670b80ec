"""Tuners turn the knobs of the space that the proof is about, and see the cost that the proof is about."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tuners
from benchmarks.problems import CASES, Case, Kind
from benchmarks.tuner_encoding import ILLEGAL, UNFIT, Ask, Encoding, Knob, encode, tuned_problem
from benchmarks.tuner_figure import figure, quartiles
from benchmarks.tuner_search import Budget, TunerRun, tune
from milpplan import Layout, Plan, PlanResult, Problem, VirtualStage, simulate, solve
from milpplan.optimize.space import even_splits
from milpplan.optimize.space.enumerate_layouts import layout_space
from tests.amounts import first, long_but

DENSE = Case("tiny", "llama3-8b", "dgx-h100", 16, 16, 2048)
EXPERTS = Case("tiny-moe", "mixtral-8x7b", "dgx-h100", 16, 16, 2048)
KINDS: tuple[Kind, ...] = ("uniform", "free")


def randomly(seed: int) -> Ask:
    """Every knob drawn evenly."""
    generator = np.random.default_rng(seed)
    return lambda knob: knob.values[generator.integers(len(knob.values))] if knob.values else generator.random()


def is_legal(problem: Problem, layout: Layout) -> bool:
    """Whether the space with only this layout's values has a layout."""
    fixed = {name: (getattr(layout, name),) for name in type(problem.space).model_fields if hasattr(layout, name)}
    only = problem.model_copy(update={"space": problem.space.model_copy(update=fixed)})
    return len(layout_space(only)) == 1


def layout_of(setting: dict[str, object], case: Case) -> Layout | None:
    """The layout of a plain setting by the definition, with no sharding where that was not asked for (always
    legal); None where the GPUs are not divided wholly."""
    degrees = {name: int(str(setting[name])) for name in ("tp", "cp", "pp")}
    dp, rest = divmod(case.num_gpus, math.prod(degrees.values()))
    values = {name: setting[name] for name in Layout.model_fields if name in setting}
    schedule = "interleaved" if setting["vpp"] != 1 else "1f1b"
    if rest or not dp:
        return None
    return Layout.model_validate(
        {**values, "dp": dp, "global_batch_size": case.global_batch_size, "schedule": schedule}
    )


@pytest.mark.parametrize("case", first(1, (EXPERTS, DENSE)), ids=["experts", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_settings_are_legal_exactly_where_the_space_says_so(case: Case, kind: Kind) -> None:
    """A setting gives a plan if and only if the rules of the space admit its layout."""
    problem = tuned_problem(case, kind)
    encoding, illegal_at = Encoding(problem), {"family": 0, "sharding": 0}
    legal = 0
    for seed in range(600):
        ask, setting = randomly(seed), dict[str, object]()

        def asked(knob: Knob, ask: Ask = ask, setting: dict[str, object] = setting) -> object:
            return setting.setdefault(knob.name, ask(knob))

        plan = encoding.decode(asked)
        layout = layout_of(setting, case)
        if plan is not None:
            legal += 1
            assert plan.layout == layout
        else:
            illegal_at["sharding" if "zero_stage" in setting else "family"] += 1
        assert (plan is not None) == (layout is not None and is_legal(problem, layout))
    assert legal > 0
    assert min(illegal_at.values()) > 0


@pytest.mark.parametrize("count", long_but((8,), (8, 20)))
@pytest.mark.parametrize("case", first(1, (EXPERTS, DENSE)), ids=["experts", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_guided_settings_are_legal_plans_of_the_space_at_its_cost(count: int, case: Case, kind: Kind) -> None:
    """Every guided setting is a plan of the space, and its cost is that of the simulator."""
    problem = tuned_problem(case, kind)
    encoding = Encoding(problem, is_guided=True)
    for seed in range(count):
        plan = encoding.decode(randomly(seed))
        assert plan is not None
        assert is_legal(problem, plan.layout)
        assert kind == "uniform" or splits_like_the_space(problem, plan)
        found, report = encoding.cost(plan), simulate(problem, plan)
        assert found.is_legal
        assert found.step_time_s == (report.step_time_s if report.fits else None)
        assert found.cost < ILLEGAL
        assert (found.cost <= UNFIT) == report.fits


def splits_like_the_space(problem: Problem, plan: Plan) -> bool:
    """Whether the free space has the plan's split."""
    held = tuple(stage.num_layers for stage in plan.virtual_stages)
    even = even_splits(problem, plan.layout)
    return min(held[1:-1], default=1) >= 1 if even is None else held in even


@pytest.mark.parametrize(("case", "kind"), first(2, [(DENSE, "uniform"), (EXPERTS, "uniform"), (DENSE, "free")]))
def test_the_proved_optimum_can_be_said(case: Case, kind: Kind) -> None:
    """In both encodings the optimum has a setting, and its cost is what the proof says."""
    problem = tuned_problem(case, kind)
    result = solve(problem)
    for is_guided in (False, True):
        says_the_optimum(Encoding(problem, is_guided=is_guided), result)


def says_the_optimum(encoding: Encoding, result: PlanResult) -> None:
    """A setting decodes to the best plan, and takes only knobs and values that were announced."""
    assert result.plan is not None
    setting, announced = encode(result.plan, encoding), {knob.name for knob in encoding.knobs()}
    asked: set[str] = set()

    def ask(knob: Knob) -> object:
        asked.add(knob.name)
        assert not knob.values or setting[knob.name] in knob.values
        return setting[knob.name]

    assert encoding.decode(ask) == result.plan
    assert encoding.evaluate(ask).step_time_s == result.step_time_s
    assert asked <= announced


@pytest.mark.parametrize("split", [(0, 15, 17, 0), (8, 8, 8, 8), (5, 1, 25, 1), (0, 1, 1, 30)])
def test_any_split_without_interleaving_can_be_said(split: tuple[int, ...]) -> None:
    """Splits of 32 layers, from even ones to the most uneven."""
    encoding = Encoding(tuned_problem(DENSE, "free"))
    layout = Layout(pp=4, tp=4, global_batch_size=16, sequence_parallel=True)
    edges = np.concatenate([[0], np.cumsum(split)]).tolist()
    stages = tuple(VirtualStage(layers=pair) for pair in pairwise(edges))
    plan = Plan(layout=layout, virtual_stages=stages)
    setting = encode(plan, encoding)
    assert encoding.decode(lambda knob: setting[knob.name]) == plan


def test_a_run_ends_at_its_budget_and_at_its_target() -> None:
    """The budget of evaluations is met exactly; a target that every plan meets ends a run at its first."""
    encoding = Encoding(tuned_problem(DENSE, "uniform"), is_guided=True)
    spent = tune("random", encoding, 1, Budget(40, 100.0))
    assert spent.evaluations == spent.legal == 40
    assert 0 < spent.fitting <= 40
    times = [step_s for _, _, step_s in spent.improvements]
    assert times == sorted(times, reverse=True)
    assert spent.best_s() == times[-1]
    first = tune("random", encoding, 1, Budget(40, 100.0, target_s=1e9))
    assert first.improvements[0][2] == times[0]
    assert first.evaluations == first.improvements[0][0] == spent.improvements[0][0]
    assert tune("random", encoding, 1, Budget(40, 0.0)).evaluations == 0


def test_quartiles_of_runs() -> None:
    """Of ten runs with the target at 1 .. 10 evaluations, worked out by hand: the third, fifth and eighth."""
    runs = [TunerRun("t", n, 10, 10, 10, 1.0, ((n, n / 10, 1.0),)) for n in range(1, 11)]
    assert tuners._reached(runs, 1.0) == "5 [3, 8], 500 ms (10 of 10)"
    half = runs[:4] + [TunerRun("t", n, 10, 0, 0, 1.0, ()) for n in range(6)]
    assert tuners._reached(half, 1.0) == "not reached (4 of 10)"
    low, middle, high = quartiles(runs, 0.5, np.array([4.0, 5.0]))
    assert low.tolist() == [1.0, 1.0]
    assert middle.tolist() == [math.inf, 1.0]
    assert high.tolist() == [math.inf, math.inf]


def test_tiny_benchmark_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Random search on a tiny problem: measured, written, read again, printed and drawn."""
    monkeypatch.setitem(CASES, "gpt3-1k", DENSE)
    words = ("--only", "gpt3-1k", "--space", "uniform", "--tuners", "random")
    tuners.main([*words, "--seeds", "2", "--evaluations", "30", "--json"])
    text = capsys.readouterr().out
    (one,) = json.loads(text)["cases"]
    assert [run["tuner"] for run in one["runs"]] == ["random"] * 2 + ["random, guided"] * 2
    assert all(run["evaluations"] <= 30 for run in one["runs"])
    measured, drawn = tmp_path / "tuners.json", tmp_path / "tuners.svg"
    measured.write_text(text)
    tuners.main(["--from", str(measured), "--figure", str(drawn)])
    table = capsys.readouterr().out
    assert "| random, guided |" in table
    assert "to the proof" in table
    assert drawn.read_text().count("<path") > 4
    (both,) = tuners.merged([one, one])
    assert len(both["runs"]) == 2 * len(one["runs"])
    other = one | {"proof": one["proof"] | {"step_time_s": 0.0}}
    with pytest.raises(SystemExit, match="different problems or versions"):
        tuners.merged([one, other])


def test_a_plan_below_the_bound_stops_the_run() -> None:
    """A tuner that beats the proof is an error, not a result."""
    result = solve(tuned_problem(DENSE, "uniform"))
    assert result.step_time_s is not None
    run = TunerRun("t", 1, 1, 1, 1, 0.1, ((1, 0.1, 0.9 * result.step_time_s),))
    with pytest.raises(tuners.BoundBrokenError, match="below the bound"):
        tuners._checked(run, result)


def test_a_missing_tuner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setattr(tuners.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"optuna and smac not installed: pip install"):
        tuners.main([])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tuner", "package", "is_guided"),
    [("Optuna TPE", "optuna", False), ("Optuna TPE", "optuna", True), ("SMAC3", "smac", True)],
)
def test_tuners_from_elsewhere(tuner: str, package: str, is_guided: bool) -> None:
    """They turn the same knobs; a run is the same with the same seed."""
    pytest.importorskip(package)
    kind: Kind = "free" if tuner in tuners.IN_FREE_SPACE else "uniform"
    encoding = Encoding(tuned_problem(DENSE, kind), is_guided=is_guided)
    run = tune(tuner, encoding, 3, Budget(8, 100.0))
    assert run.evaluations == 8
    assert run.legal == 8 or not is_guided
    again = tune(tuner, encoding, 3, Budget(8, 100.0))
    assert [(count, best) for count, _, best in again.improvements] == [
        (count, best) for count, _, best in run.improvements
    ]


def test_figure_draws_every_tuner() -> None:
    """A band and a line a tuner, and its name in the legend."""
    run = TunerRun("one & two", 1, 10, 10, 10, 1.0, ((3, 0.1, 1.2), (5, 0.2, 1.05)))
    text = figure([("panel", 1.0, {"one & two": [run], "other": [run]})])
    assert text.count("<svg") == text.count("</svg>") == 1
    assert "one &amp; two" in text
    assert text.count('opacity="0.15"') == 2
