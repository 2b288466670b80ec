"""``milpplan gap`` as a command: every kind of input, documents, pages, exit codes, and broken files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from milpplan import Layout, Plan, Problem, gap, simulate
from milpplan.cli.app import app
from milpplan.cli.outcome import ExitCode
from milpplan.errors import InvalidInputError
from milpplan.explain import optima
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.optimize.bounds import uniform_plan
from milpplan.reports.answers import Failed, GapDocument, Judged, gap_document, layout_fates
from milpplan.reports.documents import PlanFile, document_text, plan_document, read_plan
from milpplan.reports.html.charts import fates_chart
from tests.cli.test_calculon import FILES, PATHS
from tests.cli.test_fuzz import FUZZ, changed, ends_well, plan_tree
from tests.simulation.cases import problem_of
from tests.small import small_hardware, small_problem

FAST = ("--space", "uniform", "--time-limit", "20")


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, ["gap", *words])
    return result.exit_code, result.stdout, result.stderr


def slow_plan(problem: Problem) -> Plan:
    """Legal, and far from the best."""
    return uniform_plan(problem, Layout(pp=2, dp=2, global_batch_size=8), "full")


def written(path: Path, problem: Problem, plan: Plan) -> Path:
    """A plan file."""
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The file of a slow plan."""
    problem = small_problem()
    return written(tmp_path / "slow.json", problem, slow_plan(problem))


@pytest.fixture
def script(tmp_path: Path) -> tuple[Path, list[str]]:
    """The same plan as a script for Megatron-LM, and the options that its cluster needs."""
    problem = small_problem()
    path, hardware = tmp_path / "run.sh", tmp_path / "hardware.json"
    launch = Megatron().export(problem, slow_plan(problem), "d98e8a64")
    path.write_text(Megatron().files(launch, "test")["megatron.sh"])
    hardware.write_text(document_text(small_hardware()))
    return path, [str(path), "--from", "megatron", "--hardware", str(hardware), *FAST]


@pytest.mark.long
def test_a_command_line_comes_from_standard_input(script: tuple[Path, list[str]], tmp_path: Path) -> None:
    """``-`` is what is piped in, judged and imported as the file is; nothing piped in is refused."""
    path, (_, *words) = script
    text, given = path.read_text(), ["gap", "-", *words, "--json"]
    piped = CliRunner().invoke(app, given, input=text)
    file = CliRunner().invoke(app, ["gap", str(path), *words, "--json"])
    assert piped.exit_code == file.exit_code == 0, piped.stderr
    steps = [GapDocument.model_validate_json(one.stdout).plans[0].step_time_s for one in (piped, file)]
    assert steps[0] == steps[1] > 0
    imported = tmp_path / "imported.json"
    options = ["--from", "megatron", "--hardware", str(tmp_path / "hardware.json"), "-o", str(imported)]
    assert CliRunner().invoke(app, ["import", "-", *options], input=text).exit_code == 0
    assert simulate(*read_plan(imported)).step_time_s == steps[0]
    empty = CliRunner().invoke(app, given, input=" ")
    assert (empty.exit_code, "standard input is empty" in empty.stderr) == (2, True)


def test_a_plan_file_is_judged(slow: Path, tmp_path: Path) -> None:
    """One document: the simulator's step, a proved gap, changes, a cost; the best plan comes back as a file."""
    best = tmp_path / "best.json"
    code, out, err = run(
        str(slow), *FAST, "--tokens", "1e9", "--price-per-gpu-hour", "2", "--json", "--out", str(best)
    )
    assert code == 0, err
    (plan,) = GapDocument.model_validate_json(out).plans
    assert plan.step_time_s == simulate(*read_plan(slow)).step_time_s
    (whole,) = plan.spaces
    assert whole.best_s is not None
    assert whole.bound_s is not None
    assert whole.saved.low == 1 - whole.best_s / plan.step_time_s > 0.2
    assert whole.saved.high == 1 - whole.bound_s / plan.step_time_s
    assert whole.layouts is not None
    assert sum(whole.layouts.fates.values()) == whole.layouts.legal
    assert plan.spending.money == 2 * plan.spending.gpu_hours
    assert plan.changes[0].closed is not None
    assert simulate(*read_plan(best)).step_time_s == whole.best_s


@pytest.mark.long
def test_a_launchers_script_is_judged_by_what_it_can_run(script: tuple[Path, list[str]], slow: Path) -> None:
    """Two gaps, to the launcher's best and to the whole; the step is that of the plan file it was made from."""
    code, out, err = run(*script[1], "--json")
    assert code == 0, err
    (plan,) = GapDocument.model_validate_json(out).plans
    assert plan.launcher == "megatron"
    assert [space.name for space in plan.spaces] == ["what megatron can run", "the whole space"]
    inner, whole = plan.spaces
    assert inner.best_s is not None
    assert whole.best_s is not None
    assert inner.best_s >= whole.best_s
    assert plan.step_time_s == simulate(*read_plan(slow)).step_time_s
    code, out, err = run(str(slow), "--target", "megatron", *FAST, "--json")
    assert GapDocument.model_validate_json(out).plans[0].spaces[0].best_s == inner.best_s


def test_a_launchers_space_has_what_the_launcher_has(tmp_path: Path) -> None:
    """A plan's own switches join a launcher's space only where the launcher has them."""
    problem = small_problem()
    layout = Layout(tp=2, pp=2, schedule="zb-h1", tp_overlap="ring", sequence_parallel=True, global_batch_size=8)
    path = written(tmp_path / "plan.json", problem, uniform_plan(problem, layout, "none"))
    code, out, err = run(str(path), "--target", "megatron", *FAST, "--json")
    assert code == 0, err
    inner, whole = GapDocument.model_validate_json(out).plans[0].spaces
    assert inner.is_outside
    assert not whole.is_outside
    assert "zb-h1" in whole.space
    assert "zb-h1" not in inner.space
    assert "ring" in inner.space


def test_flags_are_told_or_refused(script: tuple[Path, list[str]]) -> None:
    """A flag that nobody knows and one that changes the cost are refused by name, unless they are ignored."""
    path, words = script
    text = path.read_text().replace("--bf16", "--bf16\n  --no-such-flag 3\n  --delay-wgrad-compute")
    path.write_text(text)
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert "--no-such-flag" in err
    code, out, err = run(*words, "--ignore", "no-such-flag")
    assert code == 2
    assert out == ""
    assert "--delay-wgrad-compute" in err
    code, out, err = run(*words, "--ignore", "delay-wgrad-compute", "--ignore", "no-such-flag", "--json")
    assert code == 0, err
    plan = GapDocument.model_validate_json(out).plans[0]
    assert plan.unknown_flags == ()
    assert set(plan.ignored_flags) == {"--no-such-flag 3", "--delay-wgrad-compute"}


def test_calculons_execution_is_judged() -> None:
    """The three files of Calculon, in the space with the execution's own switches; what other plans would have
    of its networks is told where the execution leaves some."""
    code, out, err = run(*FILES, *FAST, "--json")
    assert code == 0, err
    assert "Domains have" not in err
    (plan,) = GapDocument.model_validate_json(out).plans
    assert plan.name == "execution"
    assert not plan.spaces[0].is_outside
    assert "ZeRO stage 1" in err


def test_networks_that_an_execution_leaves_are_told(tmp_path: Path) -> None:
    """With two tensor-parallel processors on a network of eight, domains have two."""
    execution = json.loads(PATHS[1].read_text())
    execution |= {"tensor_par": 2, "data_par": 8}
    changed = tmp_path / "execution.json"
    changed.write_text(json.dumps(execution))
    files = ("--calculon", str(PATHS[0]), str(changed), str(PATHS[2]))
    code, out, err = run(*files, "--space", "uniform", "--time-limit", "0.05", "--json")
    assert code in (0, 3, 4), err
    assert "Domains have 2 processors" in err
    assert "Domains have 2" in " ".join(GapDocument.model_validate_json(out).plans[0].notes)


def test_pods_that_an_execution_leaves_are_told(tmp_path: Path) -> None:
    """With two replicas on a network of sixteen, between a full domain and a third network, pods have 2 * 8."""
    execution, system = (json.loads(path.read_text()) for path in PATHS[1:])
    inner, outer = system["networks"]
    system["networks"] = [inner, outer | {"size": 16}, outer]
    written = {"execution": execution | {"pipeline_par_net": 2}, "system": system}
    for name, tree in written.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    files = ("--calculon", str(PATHS[0]), *(str(tmp_path / f"{name}.json") for name in written))
    code, _, err = run(*files, "--space", "uniform", "--time-limit", "0.05", "--json")
    assert code in (0, 3, 4), err
    assert "Pods have 16 processors, as the execution uses networks for 128" in " ".join(err.split())
    assert "Domains have" not in err


def test_many_plans_are_a_table(slow: Path, tmp_path: Path) -> None:
    """A row each; a file that cannot be read costs the exit code, not the others' rows."""
    problem = small_problem()
    plan = uniform_plan(problem, Layout(dp=4, global_batch_size=8), "none")
    other = written(tmp_path / "other.json", problem, plan)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    code, out, err = run(str(slow), str(wrong), str(other), *FAST)
    assert code == 2
    assert [name in out for name in ("slow", "other", "not judged", "GPU-hours to save")] == [True] * 4
    assert "wrong.json" in err
    lost = gap_document([], [Failed("wrong", InvalidInputError("It is empty.", "Expected a plan.", "Give one."))])
    assert lost.failed[0].seen == "It is empty."


@pytest.mark.long
def test_the_time_limit_is_of_all_plans(slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that there was no time for are named, and the exit code says that not all is proved; a longer limit
    judges all of them."""
    other = tmp_path / "other.json"
    other.write_text(slow.read_text())
    monkeypatch.setattr(optima, "MIN_LIMIT_S", 1e-9)
    code, _, err = run(str(slow), str(other), "--space", "uniform", "--time-limit", "1e-9")
    assert code == 4, err
    assert "Not judged, for lack of time: other." in err
    code, _, err = run(str(slow), str(other), "--space", "uniform", "--time-limit", "1e6")
    assert code == 0, err
    assert "Not judged" not in err


def test_exit_codes_say_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 where the plan does not fit, judged all the same; 4 where the time ended before the proof."""
    problem = small_problem(memory_gib=14)
    large = written(
        tmp_path / "large.json", problem, uniform_plan(problem, Layout(dp=4, global_batch_size=8), "none")
    )
    code, out, err = run(str(large), *FAST)
    assert code == 3, err
    assert "does not fit" in out
    assert "if it fitted" in out
    assert "Single changes, each simulated" in out
    assert "GPU-hours" in out
    hard = small_problem(num_gpus=8, space={"kind": "free"})
    path = written(
        tmp_path / "hard.json", hard, uniform_plan(hard, Layout(pp=4, dp=2, global_batch_size=8), "full")
    )
    monkeypatch.setattr(optima, "MIN_LIMIT_S", 1e-9)
    code, out, _ = run(str(path), "--time-limit", "1e-9")
    assert code == 4
    assert "no time left for" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "No plan is given"),
        (["a.json", *FILES], "together with --calculon"),
        (["a.sh", "--from", "megatron"], "--hardware"),
        (["a.sh", "--from", "megatrom", "--hardware", "dgx-h100"], "Did you mean megatron"),
        (["a.json", "--model", "llama3-8b"], "without --from"),
        (["a.json", "--space", "fre"], "Did you mean free"),
        (["a.json", "--tokens", "-1"], "--tokens"),
        (["a.json", "--price-per-gpu-hour", "nan"], "--price-per-gpu-hour"),
        (["a.json", "b.json", "--out", "c.json"], "--out is given with 2 plans"),
        (["a.json"], "a.json does not exist"),
        (["a.json", "--report", "/no/such/place.html"], "cannot be written"),
    ],
)
def test_refusals(words: list[str], expected: str) -> None:
    """Exit code 2, nothing on standard output, and a message that names what is wrong."""
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert expected in err.replace("\n", " ")


class _Reader(HTMLParser):
    """What a page asks a network for, its open elements, and its embedded document."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.stack: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag in ("html", "body", "table", "tr", "div", "script", "ul", "h2", "h3"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("html", "body", "table", "tr", "div", "script", "ul", "h2", "h3"):
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] == ["script"] and data.startswith("{"):
            self.data = data


def test_the_page_is_complete_in_itself(slow: Path, tmp_path: Path) -> None:
    """Well-formed, asks for nothing, and holds the same document as --json; names cannot break out of it."""
    named = slow.with_name("<script>alert(1)</script>.json".replace("/", "_"))
    slow.rename(named)
    page = tmp_path / "gap.html"
    code, out, err = run(str(named), *FAST, "--json", "--report", str(page))
    assert code == 0, err
    reader = _Reader()
    text = page.read_text()
    reader.feed(text)
    assert reader.stack == []
    assert reader.asked == ["data:,"]  # no icon is fetched either
    assert len(text.encode()) < 1_000_000
    assert json.loads(reader.data) == json.loads(out)
    assert "<script>alert" not in text
    plan = GapDocument.model_validate_json(out).plans[0]
    assert f"{plan.changes[0].words}</td>" in text
    assert re.search(r"Certificate: cost model milpplan", text)


def test_layouts_are_counted_by_bound() -> None:
    """Every legal layout is in one class or does not fit."""
    from milpplan import solve

    result = solve(small_problem(memory_gib=20))
    found = layout_fates(result, result.step_time_s)
    assert found is not None
    counted = sum(sum(one.fates.values()) for one in found.bounds)
    assert counted + found.fates["does_not_fit"] == found.legal
    assert found.bounds[0].fates["open"] == 0
    assert gap_document([]).plans == ()


def test_the_picture_has_every_layout() -> None:
    """Refused, too large, and by bound: a row each, whose numbers are those of the document."""
    problem = small_problem(memory_gib=14)
    told = gap(problem, uniform_plan(problem, Layout(pp=2, dp=2, global_batch_size=8), "full"), changes=False)
    said = gap_document([Judged("plan", told)]).plans[0].spaces[-1]
    assert said.layouts is not None
    drawn = fates_chart(said.layouts.rejected, said.layouts.fates, said.layouts.bounds)
    rows = re.findall(r'<span>([^<]+)</span>(.*?)<span class="number">([\d,]+)</span>', drawn)
    totals = {name: int(number.replace(",", "")) for name, _, number in rows}
    assert totals["refused by a rule"] == sum(said.layouts.rejected.values()) > 0
    assert totals["too large for memory"] == said.layouts.fates["does_not_fit"] > 0
    assert sum(totals.values()) == sum(said.layouts.rejected.values()) + said.layouts.legal
    assert ["piece" in bar for _, bar, _ in rows] == [total > 0 for total in totals.values()]


def test_the_schema_is_printed() -> None:
    """``milpplan schema gap`` is that of the document."""
    result = CliRunner().invoke(app, ["schema", "gap"])
    assert json.loads(result.stdout)["title"] == "GapDocument"


@settings(FUZZ, max_examples=6)
@given(data=st.data())
def test_broken_plan_files(data: st.DataObject, tmp_path: Path) -> None:
    """A plan file with anything changed is judged or refused."""
    path = tmp_path / "plan.json"
    path.write_text(data.draw(st.composite(changed)(plan_tree())))
    ends_well("gap", str(path), "--space", "uniform", "--time-limit", "0.05")


@pytest.mark.long
@settings(FUZZ, max_examples=5)
@given(data=st.data())
def test_broken_scripts(data: st.DataObject, script: tuple[Path, list[str]]) -> None:
    """A launcher's script with words lost, doubled or changed is judged or refused."""
    path, options = script
    words = path.read_text().split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at : at + 1] = data.draw(
            st.sampled_from(
                [[], [words[at]] * 2, ["--no-such"], ["0"], ["-7"], ["$X"], ['"'], ["10" * 9], ["\x00"]]
            )
        )
    changed = path.with_name("changed.sh")
    changed.write_text(" ".join(words))
    ends_well(
        "gap",
        str(changed),
        *options[1:4],
        *("--hardware", options[4])[1:],
        "--space",
        "uniform",
        "--time-limit",
        "0.5",
    )


def test_a_launchers_program_may_keep_more_than_a_plan_counts(tmp_path: Path) -> None:
    """Weights sharded by ZeRO 3 and no recomputation fit where operators are fused, and not in the layers that
    Accelerate's program runs: the export says so, and the gap to its space judges the plan as such a run."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=64, sequence_length=8192)
    layout = Layout(dp=8, global_batch_size=64, zero_stage=3, overlap_grad_reduce=True, overlap_param_gather=True)
    plan = written(tmp_path / "plan.json", problem, uniform_plan(problem, layout, "none"))
    exported = CliRunner().invoke(app, ["export", str(plan), "--to", "accelerate", "-o", str(tmp_path / "launch")])
    assert exported.exit_code == 0
    assert "It does not fit" in exported.stderr
    assert "Solve with --target accelerate" in exported.stderr
    assert "fits" not in CliRunner().invoke(app, ["export", str(plan), "--to", "automodel"]).stderr
    code, _, _ = run(str(plan), *FAST)
    assert code != ExitCode.INFEASIBLE
    code, text, _ = run(str(plan), "--target", "accelerate", *FAST)
    assert code == ExitCode.INFEASIBLE
    assert "85.5 GiB" in text
