"""Plug-ins of an installed package: found, used everywhere, refused by name where they break their promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from milpplan import Problem, load_hardware, plugins, simulate, solve
from milpplan.errors import SolverError, UnknownNameError
from milpplan.launchers import target_named, target_names
from milpplan.optimize.milp import Limits, Program, Solution
from milpplan.optimize.milp.backends import backend, backend_names
from milpplan.optimize.milp.solver_self_test import random_program
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.plugins import PluginError
from milpplan.problem import TP_OVERLAPS, LayerRun, hardware_names
from milpplan.simulation import FloatArray, LayoutColumns
from milpplan.simulation.layers import layer_seconds
from tests.amounts import long_but
from tests.cli.test_cli import refused, run
from tests.optimize.brute_force import brute_force, naive_layouts, weight
from tests.optimize.problems import random_problem

Offer = Callable[[str, str, str], None]
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("plugins")
    # Outside the tree, because building leaves files behind.
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([sys.executable, *words, str(EXAMPLE)], check=True, capture_output=True)
    return folder


MODEL = "llama2-7b"
JOB = ("--gpus", "16", "--global-batch", "32", "--fix", "tp=4", "--space", "uniform")


def milpplan_command(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process that sees the installed package."""
    paths = os.pathsep.join((str(installed), str(EXAMPLE.parents[1])))
    code = "import milpplan.cli; milpplan.cli.main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


ONE_AFTER_ANOTHER = """
import json, sys
from typer.testing import CliRunner
from milpplan.cli.app import app
ended = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.exit_code, one.stdout, one.stderr) for one in ended]))
"""


def milpplan_commands(installed: Path, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of command lines, all in one process that sees the installed package: to
    start one takes longer than what it is asked to do."""
    paths = os.pathsep.join((str(installed), str(EXAMPLE.parents[1])))
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


@pytest.mark.long
def test_an_installed_package_is_used_by_every_command(installed: Path, tmp_path: Path) -> None:
    """Its hardware, its cost model and its solver in one solve; the plan file needs them again, and says so."""
    result = tmp_path / "result.json"
    words = ("solve", MODEL, "dgx-h100-half-peak", *JOB, "--backend", "scipy", "--out", str(result), "--json")
    done, other, again, listed = milpplan_commands(
        installed,
        words,
        ("certify", str(result), "--json"),
        ("simulate", str(result), "--json"),
        ("list", "hardware"),
    )
    assert done[0] == 0, done[2]
    solved = json.loads(done[1])
    assert solved["status"] == "optimal"
    assert solved["solver"]["backend"] == "scipy"
    assert solved["certificate"]["cost_model"].endswith("with layers timed by half-peak (milpplan-examples 1.0)")
    assert "half-peak" in solved["proof"]
    assert (other[0], json.loads(other[1])["verdict"]) == (0, "certified")
    assert json.loads(again[1])["step_time_s"] == solved["step_time_s"]
    assert "dgx-h100-half-peak" in listed[1]
    # This process does not see the package.
    assert "half-peak" in refused(run("simulate", str(result)))


@pytest.mark.long
def test_an_installed_solver_meets_the_canaries(installed: Path) -> None:
    """The doctor lets it solve the programs that solvers have got wrong."""
    checked = milpplan_command(installed, "doctor")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "scipy: random programs" in checked.stdout


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Offers an entry point of this process, as an installed package would."""
    entries: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.get(group, []))

    def offer(kind: str, name: str, value: str) -> None:
        group = f"milpplan.{kind}"
        entries.setdefault(group, []).append(EntryPoint(name, value, group))
        plugins._entries.cache_clear()

    yield offer
    plugins._entries.cache_clear()


def lying_solver(program: Program, limits: Limits) -> Solution:
    """Says optimal, and proves a bound that its answer does not have."""
    values = program.lower.copy()
    return Solution("optimal", values, None, 10.0**9, "OPTIMAL", "liar", 0.0)


def broken_solver(program: Program, limits: Limits) -> object:
    """Not a solution."""
    return "optimal"


def twice(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Layers of twice our time."""
    return 2 * seconds


def weighted(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Another balance of phases, and tiles that a ring runs slower than a pipeline."""
    factors = np.array([1.0, 0.7, 1.9, 1.3, 0.4])[:, None]
    return seconds * factors * np.where(columns.tp_overlap == TP_OVERLAPS.index("ring"), 3.0, 1.0)


def negative(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """No times."""
    return -seconds


def flat(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Another shape."""
    return seconds.sum(axis=0)


def with_cost_model(problem: Problem, name: str) -> Problem:
    """The problem on hardware that names a cost model."""
    software = problem.hardware.software.model_copy(update={"cost_model": name})
    hardware = problem.hardware.model_copy(update={"software": software})
    return problem.model_copy(update={"hardware": hardware})


@pytest.mark.parametrize(("count", "least"), [(3, 1), pytest.param(5, 2, marks=pytest.mark.long)])
def test_another_cost_model_is_proved_like_ours(count: int, least: int, offered: Offer) -> None:
    """The optimum is that of trying every plan under the plug-in's times, switches included."""
    offered("cost_models", "weighted", f"{__name__}:weighted")
    changed = 0
    for seed in range(count):
        ours = random_problem(seed)
        space = ours.space.model_copy(update={"tp_overlap": ("none", "ring", "pipelined")})
        problem = with_cost_model(ours.model_copy(update={"space": space}), "weighted")
        best, result = brute_force(problem, naive_layouts(problem)), solve(problem, gap=0.0)
        assert (best is None) == (result.plan is None)
        if best is not None and result.plan is not None:
            assert result.report is not None
            assert result.report.step_time_ns * weight(problem, result.plan.layout) == pytest.approx(
                best.value, rel=1e-12
            )
            changed += simulate(ours, result.plan).step_time_ns != simulate(problem, result.plan).step_time_ns
    assert changed > least


def test_the_times_of_layers_are_those_of_the_cost_model(offered: Offer) -> None:
    """Twice the layer, twice the compute of it."""
    offered("cost_models", "twice", f"{__name__}:twice")
    problem = random_problem(3)
    columns = layout_space(problem).columns
    kind = problem.model.kinds[0]
    ours, theirs = (layer_seconds(one, kind, columns) for one in (problem, with_cost_model(problem, "twice")))
    np.testing.assert_array_equal(theirs, 2 * ours)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("negative", "negative"),
        ("flat", "shape"),
        ("nowhere", "cannot be loaded"),
        ("random_problem", "fails"),
    ],
)
def test_cost_models_that_break_their_promise_are_named(offered: Offer, value: str, words: str) -> None:
    """Each error names the plug-in and what is wrong."""
    offered("cost_models", "bad", f"{__name__}:{value}")
    with pytest.raises(PluginError, match="bad") as caught:
        solve(with_cost_model(random_problem(3), "bad"))
    assert words in str(caught.value)
    with pytest.raises(UnknownNameError, match="absent"):
        solve(with_cost_model(random_problem(3), "absent"))


def test_solvers_that_break_their_promise_are_named(offered: Offer) -> None:
    """A lie is found by the exact check, an answer of another type by its type."""
    offered("solvers", "liar", f"{__name__}:lying_solver")
    offered("solvers", "broken", f"{__name__}:broken_solver")
    assert backend_names()[-2:] == ("broken", "liar")
    for name in ("liar", "broken"):
        with pytest.raises(SolverError, match=name):
            backend(name).solve(random_program(1), Limits())
    # A plug-in of a name that we have does not replace ours.
    offered("solvers", "cbc", f"{__name__}:lying_solver")
    assert backend_names().count("cbc") == 1
    assert "CBC" in backend("cbc").version()


FOREVER = threading.Event()
"""Ends what ignores its limits once its test is over."""


def leaving_solver(program: Program, limits: Limits) -> object:
    """Ends the program, as if all were done, after it has said so by every means."""
    print("leaving")
    os.write(1, b"and gone\n")
    sys.exit(0)


def failing_solver(program: Program, limits: Limits) -> object:
    """No memory."""
    raise MemoryError


def deaf_solver(program: Program, limits: Limits) -> object:
    """Looks at no limit."""
    FOREVER.wait()
    return None


@pytest.mark.parametrize("seeds", long_but(((1, 4),), ((1, 4), (0, 1, 2, 3, 4))))
@pytest.mark.parametrize("name", ["leaving_solver", "failing_solver"])
def test_a_solver_that_fails_is_gone_on_without(
    name: str, seeds: tuple[int, ...], offered: Offer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ours take its place: the best plan and its proof come all the same, with the cause; nothing that it prints
    is on stdout."""
    offered("solvers", "bad", f"{__name__}:{name}")
    asked = 0
    for seed in seeds:
        problem = random_problem(seed)
        best, result = brute_force(problem, naive_layouts(problem)), solve(problem, backend="bad", gap=0.0)
        assert (best is None) == (result.plan is None)
        if best is not None:
            assert result.report is not None
            assert result.plan is not None
            assert result.report.step_time_ns * weight(problem, result.plan.layout) == pytest.approx(best.value)
        if result.details["unavailable"]:
            asked += 1
            assert "bad" in result.details["unavailable"][0]
            assert result.gap is None or result.gap <= 1e-4
    assert asked > 0
    assert capfd.readouterr().out == ""


@pytest.mark.long
def test_a_solver_that_ignores_its_limits_is_left_at_the_deadline(offered: Offer) -> None:
    """The best plan so far comes, as by Ctrl-C, and the cause with it."""
    offered("solvers", "deaf", f"{__name__}:deaf_solver")
    try:
        # On a busy machine a short limit ends before the solver is asked.
        for limit_s, seed in product((0.5, 4.0, 32.0), range(30)):
            result = solve(random_problem(seed), backend="deaf", gap=0.0, time_limit_s=limit_s)
            if result.details["unavailable"]:
                assert "not back" in result.details["unavailable"][0]
                assert result.status in ("feasible", "no_solution_found", "optimal", "infeasible")
                return
        raise AssertionError("no seed asks for it")
    finally:
        FOREVER.set()


def test_a_solver_is_interrupted_whatever_it_does(offered: Offer) -> None:
    """By whoever cancels the solve."""
    offered("solvers", "deaf", f"{__name__}:deaf_solver")
    FOREVER.clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            backend("deaf").solve(random_program(1), Limits(cancelled=lambda: True))
    finally:
        FOREVER.set()


def test_an_installed_exporter_writes_and_reads(
    offered: Offer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plan goes out and comes back at the same step time; what the trainer cannot run is refused by reason."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    offered("exporters", "own-trainer", "milpplan_examples.exporter:LAUNCHER")
    plan, other, back, launch = (tmp_path / name for name in ("plan.json", "other.json", "back.json", "launch"))
    words = (
        "solve",
        MODEL,
        "dgx-h100",
        *JOB,
        "--fix",
        "schedule=1f1b",
        "--fix",
        "cp=1",
        "--fix",
        "recompute=none",
    )
    assert run(*words, "--fix", "zero_stage=1", "--out", str(plan)).exit_code == 0
    done = run("export", str(plan), "--to", "own-trainer", "--out", str(launch))
    assert done.exit_code == 0, done.stderr
    read = ("import", str(launch / "own-trainer.json"), "--from", "own-trainer", "--hardware", "dgx-h100")
    assert run(*read, "--model", MODEL, "--out", str(back)).exit_code == 0
    steps = [json.loads(run("simulate", str(one), "--json").stdout) for one in (plan, back)]
    assert steps[0]["step_time_s"] == steps[1]["step_time_s"]
    assert run(*words, "--fix", "zero_stage=3", "--out", str(other)).exit_code == 0
    assert "it shards optimizer states only" in refused(run("export", str(other), "--to", "own-trainer"))


def test_an_exporter_that_is_none_is_named(offered: Offer) -> None:
    """It must be a target; one of our names stays ours."""
    offered("exporters", "odd", f"{__name__}:twice")
    offered("exporters", "megatron", f"{__name__}:twice")
    with pytest.raises(PluginError, match="odd"):
        target_named("odd", "--to")
    assert target_named("megatron", "--to").capability.name != "odd"
    assert target_names().count("megatron") == 1


def test_a_hardware_package_that_fails_takes_nothing_with_it(
    offered: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with a warning; a name that we ship stays ours."""
    offered("hardware", "gone", "no_such_package")
    assert "dgx-h100" in hardware_names()
    assert "gone" in caplog.text
    assert load_hardware("dgx-h100").name == "dgx-h100"
