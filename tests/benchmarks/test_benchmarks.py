"""The benchmarks run, on problems small enough for the default test run; nothing here looks at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import commands, growth, planning, rules_of_thumb, speed
from benchmarks.problems import CASES, Case
from benchmarks.tables import markdown_table
from milpplan import Layout, Problem, Space, load_model

TINY = Case("tiny", "llama3-8b", "dgx-h100", 8, 8, 2048)


def problem_of(model: str, num_gpus: int, batch: int, sequence_length: int = 2048) -> Problem:
    """A problem on DGX H100."""
    return Case("test", model, "dgx-h100", num_gpus, batch, sequence_length).problem("uniform")


@pytest.mark.parametrize("name", CASES)
def test_rule_of_thumb_stays_in_its_row_and_fits(name: str) -> None:
    """For every published problem the table's own ranges hold a plan that fits."""
    problem = CASES[name].problem("uniform")
    found = rules_of_thumb.rule_of_thumb(problem)
    assert found is not None
    assert found.report.fits
    assert found.within_table
    row, layout = rules_of_thumb.row_of(problem), found.plan.layout
    assert layout.tp in row.tp
    assert layout.pp in row.pp
    assert layout.cp in row.cp
    assert layout.num_gpus == CASES[name].num_gpus


@pytest.mark.parametrize(
    ("model", "tp", "pp", "ep"),
    [
        ("llama3-8b", (2, 4), (1,), (1,)),  # 8.03B: "1-10B: TP=2-4 + DP"
        ("gpt3-175b", (8,), (4, 8), (1,)),  # 174.6B: "70-175B: TP=8 + PP=4-8 + DP"
        ("megatron-1t", (8,), (8, 16), (1,)),  # beyond the table: its last row
        ("mixtral-8x22b", (2, 4), (8, 16), (8, 16, 32)),  # 140.6B: "100-500B: TP=2-4 + PP=8-16 + EP=8-32"
        ("deepseek-v3", (2,), (16,), (32, 64)),  # 671B: "500B+: TP=2 + PP=16 + EP=32-64"
    ],
)
def test_row_of_the_table(model: str, tp: tuple[int, ...], pp: tuple[int, ...], ep: tuple[int, ...]) -> None:
    """A model's size selects the row that the published table has for it."""
    row = rules_of_thumb.row_of(problem_of(model, 1024, 1024))
    assert (row.tp, row.pp, row.ep) == (tp, pp, ep)


def test_experts_cap_expert_parallelism() -> None:
    """Mixtral has 8 experts, so ep is 8 although the table starts there and goes to 32."""
    found = rules_of_thumb.rule_of_thumb(problem_of("mixtral-8x22b", 512, 1024))
    assert found is not None
    assert found.plan.layout.ep == 8


def test_long_sequences_get_context_parallelism() -> None:
    """32K tokens ask for cp = 2 by the table's "8K-32K: add CP=2"."""
    found = rules_of_thumb.rule_of_thumb(problem_of("llama3-8b", 64, 64, 32768))
    assert found is not None
    assert found.plan.layout.cp == 2


def test_too_few_gpus_have_no_rule() -> None:
    """Llama-3 405B does not fit on 32 GPUs by any row."""
    assert rules_of_thumb.rule_of_thumb(problem_of("llama3-405b", 32, 32)) is None


@pytest.mark.parametrize(
    ("layers", "pp", "micro_batches", "expected"),
    [
        (96, 8, 64, [2] * 48),  # 12 a rank in six chunks of two
        (126, 8, 64, [1, *[2] * 62, 1]),  # 128 with embedding and loss, in chunks of two
        (56, 8, 64, [1] * 56),  # 7 a rank: only chunks of one divide
        (96, 8, 60, [12] * 8),  # 60 micro-batches are no multiple of 8: not interleaved
        (61, 16, 64, [*[4] * 15, 1]),  # nothing divides: the last stage is short
        (80, 1, 64, [80]),
    ],
)
def test_split_of_layers(layers: int, pp: int, micro_batches: int, expected: list[int]) -> None:
    """The layers of the virtual stages, worked out by hand."""
    split = rules_of_thumb.split_of_layers(layers, pp, micro_batches)
    assert split is not None
    assert list(split) == expected


def test_planning_prints_its_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables come out with a row for each space, the solve having run in another process."""
    monkeypatch.setitem(CASES, "gpt3-1k", TINY)
    planning.main(["--only", "gpt3-1k", "--space", "uniform", "--sample", "2"])
    out = capsys.readouterr().out
    assert out.count("llama3-8b, 8 GPUs (dgx-h100)") == 2
    assert "optimal" in out
    assert "extrapolated from 2" in out


@pytest.mark.long
def test_planning_json_is_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json prints one document, and the best uniform plan is no slower than its bound says."""
    monkeypatch.setitem(CASES, "gpt3-1k", TINY)
    planning.main(["--only", "gpt3-1k", "--space", "uniform", "--sample", "0", "--json"])
    (one,) = json.loads(capsys.readouterr().out)["cases"]
    solve = one["solves"]["uniform"]
    assert solve["status"] == "optimal"
    assert solve["step_time_s"] >= solve["lower_bound_s"] * (1 - 1e-12)
    assert sum(solve["fates"].values()) == solve["legal"]
    assert solve["peak_bytes"] > 30e6  # an interpreter with NumPy
    assert one["enumeration"] is None


def test_planning_reports_a_solve_that_overruns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that does not end is killed, and its row says so."""
    monkeypatch.setitem(CASES, "gpt3-1k", TINY)
    monkeypatch.setattr(planning, "PATIENCE", 1e-6)
    planning.main(["--only", "gpt3-1k", "--sample", "0"])
    assert capsys.readouterr().out.count("overran") == 3


def test_enumeration_of_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sample holds every plan, nothing is extrapolated."""
    space = Space(kind="uniform", tp=(2,), cp=(1,), pp=(2,), vpp=(1,), zero_stage=(1,), micro_batch_size=(1,))
    narrow = TINY.problem("uniform").model_copy(update={"space": space})
    monkeypatch.setattr(Case, "problem", lambda self, kind: narrow)
    found = planning.enumerated(TINY, 1000)
    assert found.measured
    assert found.plans == found.sampled > 0


def test_layout_speed_counts_the_whole_space() -> None:
    """The free space has at least the layouts of the uniform one, and all are bounded."""
    uniform = speed.layout_speed(TINY, "uniform", 1)
    free = speed.layout_speed(TINY, "free", 1)
    assert free.layouts >= uniform.layouts > 0
    assert "llama3-8b" in speed.layout_table([uniform, free])


def test_simulator_speed_compares_two_simulators() -> None:
    """A small plan gives the same step time in both, and the sizes are those the tables promise."""
    (problem, layout), (deep, large) = speed.simulator_cases()
    assert (layout.pp, layout.num_micro_batches, layout.vpp) == (16, 128, 1)
    assert (large.pp, large.num_micro_batches, large.vpp) == (64, 512, 4)
    assert deep.model.num_layers == 256
    small = Layout(tp=8, pp=4, dp=16, micro_batch_size=8, global_batch_size=512, sequence_parallel=True)
    measured = speed.simulator_speed(problem, small)
    assert measured.work_items == 2 * 4 * 4
    assert "gpt3-175b" in speed.simulator_table([measured])


@pytest.mark.long
def test_commands_of_two_versions_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both versions solve the command, and a second call takes the runs from the file."""
    tiny = commands.Command("tiny", "llama3-8b dgx-h100 --gpus 8 --global-batch 8 --space uniform")
    monkeypatch.setitem(commands.COMMANDS, "readme", tiny)
    monkeypatch.setattr(commands, "ROUNDS", 1)
    saved = tmp_path / "runs.json"
    call = ["--only", "readme", "--before", sys.executable, "--save", str(saved)]
    commands.main(call)
    first = capsys.readouterr().out
    assert "CPU before | CPU now | ratio | gap before | gap now" in first
    runs = commands.read_runs(saved)["readme"]
    assert [run.status for run in (*runs["before"], *runs["now"])] == ["optimal", "optimal"]
    assert runs["now"][0].peak_bytes > 30e6
    assert runs["now"][0].cpu_s > 0
    commands.main(call)
    assert capsys.readouterr().out == first


def test_commands_that_take_too_much_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process beyond the limit of memory ends, and the table says why there is no gap."""
    monkeypatch.setattr(commands, "MEMORY_LIMIT_BYTES", 1)
    tiny = commands.Command("tiny", "llama3-8b dgx-h100 --gpus 8 --global-batch 8")
    run = commands.run_command(sys.executable, tiny, tmp_path)
    assert (run.status, run.gap) == ("out of memory", None)
    assert commands.outcome_text([run]) == "out of memory"


def test_growth_solves_a_deeper_model(tmp_path: Path) -> None:
    """The model's file has the layers of its point, and the command names the file."""
    command = growth.commands("layers", tmp_path)[48]
    assert load_model(command.arguments.split()[0]).num_layers == 48


def test_growth_draws_every_series() -> None:
    """The figure is well-formed, with a circle a solve; one that was stopped is hollow."""
    run = commands.Run("optimal", 1e-4, 1.0, 10_000, 2.0, 3.0, 10**8)
    stopped = commands.Run("feasible", 1e-2, 1.0, 20_000, 60.0, 60.0, 10**8)
    points = [growth.Point(64, run.cpu_s, run), growth.Point(128, stopped.cpu_s, stopped)]
    picture = ElementTree.fromstring(growth.growth_figure(dict.fromkeys(growth.AXES, points)))
    circles = [shape.get("fill") for shape in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 2 * len(growth.AXES)
    assert circles.count("white") == len(growth.AXES)


def test_markdown_table() -> None:
    """A header, a rule and a line a row."""
    table = markdown_table(("name", "value"), [("a", 1)])
    assert table == "| name | value |\n| --- | ---: |\n| a | 1 |"
