"""``milpplan explain``: words in, one report or one document out, and refusals in three parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import milpplan
from milpplan.cli.app import app
from milpplan.cli.commands.explain import wish
from milpplan.errors import MilpplanError
from milpplan.explain import WISHABLE
from milpplan.explain.why_not import wished
from milpplan.reports.answers import ExplanationDocument
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.small import small_problem


def run(*words: str) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of the small problem."""
    problem = small_problem()
    plan = milpplan.solve(problem).plan
    assert plan is not None
    path = tmp_path_factory.mktemp("explain") / "plan.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


@pytest.mark.long
def test_the_report_says_it_all(plan_path: Path) -> None:
    """Distance, limits, worth and neighbours, each in a line that a person can read, plain in a pipe."""
    result = run("explain", str(plan_path), "--time-limit", "600")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "the best plan known; at most" in text
    for words in (
        "evidence ",
        "What binds",
        "memory stage 0",
        "1 GiB more memory",
        "Why not its neighbours",
        "tp=2",
    ):
        assert words in text
    assert "\x1b" not in result.stdout
    assert not re.search(r"\b(inf|nan)\b", result.stdout)


def test_the_document_is_one_and_a_plan_file(plan_path: Path, tmp_path: Path) -> None:
    """``--json`` prints one valid document, from which ``simulate`` and ``explain`` start again."""
    result = run(
        "explain",
        str(plan_path),
        "--json",
        "--time-limit",
        "600",
        "--why-not",
        "tp=1",
        "--wish",
        "recompute=full,pp=2",
    )
    assert result.exit_code == 0, result.output
    document = ExplanationDocument.model_validate_json(result.stdout)
    assert document.evidence is not None
    assert document.evidence.generation == "Hopper"
    assert [one.words for one in document.wishes] == ["tp=1", "pp=2,recompute=full"]
    assert all(one.asked and one.outcome == "priced" for one in document.wishes)
    assert document.wishes[1].price is not None
    assert document.wishes[1].price.low is not None
    assert document.wishes[1].price.low > 0
    assert sum(document.breakdown.values()) == pytest.approx(document.step_time_s)
    again = tmp_path / "again.json"
    again.write_text(result.stdout)
    assert json.loads(run("simulate", str(again), "--json").stdout)["step_time_s"] == document.step_time_s


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--why-not", "foo=1"], "Expected one of tp, cp"),
        (["--why-not", "tpp=2"], "Did you mean tp?"),
        (["--why-not", "recompute=ful"], "Did you mean full?"),
        (["--why-not", "tp=0"], "makes no sense"),
        (["--why-not", "tp"], "has no value"),
        (["--why-not", ""], "has no value"),
        (["--wish", "schedule=gpip"], "Did you mean gpipe?"),
        (["--why-not", "recompute=full,recompute=none"], "twice"),
        (["--time-limit", "-1"], "positive number of seconds"),
        (["--gap", "2"], "0 <= gap < 1"),
    ],
)
def test_refusals_have_three_parts(plan_path: Path, words: list[str], message: str) -> None:
    """Wrong words end with what was seen, what was expected and what to do, and exit code 2."""
    result = run("explain", str(plan_path), *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 3


def test_a_plan_that_does_not_fit_is_not_called_the_best(tmp_path: Path) -> None:
    """However fast its step would be, the best is one that fits."""
    problem = small_problem(memory_gib=80)
    plan = milpplan.solve(problem).plan
    assert plan is not None
    path = tmp_path / "large.json"
    small = small_problem(memory_gib=12)
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=small)))
    assert not milpplan.simulate(small, plan).fits
    result = run("explain", str(path), "--time-limit", "60", "--why-not", "tp=2")
    text = " ".join(result.stdout.split())
    assert "does not fit in memory" in text
    assert "the proved best that fits takes" in text
    assert "the best plan known" not in text


def test_no_time_ends_with_open_questions(plan_path: Path) -> None:
    """Without time the report still comes, names what is open, and the exit code says so."""
    result = run("explain", str(plan_path), "--time-limit", "1e-9")
    assert result.exit_code == 4, result.output
    assert "no time left for" in result.stdout


WORDS = st.lists(
    st.tuples(
        st.sampled_from([*WISHABLE, "foo", "kind", "num_gpus", ""]),
        st.sampled_from(["1", "2", "0", "-1", "true", "no", "full", "1f1b", "x", "", "9" * 30, "=", "2.0"]),
    ).map("=".join),
    max_size=3,
).map(",".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS)
def test_any_wish_is_understood_or_refused(text: str) -> None:
    """Whatever is wished, it is a problem with these values or an error with all its parts; never a traceback."""
    try:
        values = wish(text)
        problem = wished(small_problem(), values)
    except MilpplanError as error:
        refusal = error
    else:
        for name, value in values.items():
            assert getattr(problem.space, name) == (value,)
        return
    assert all((refusal.seen, refusal.expected, refusal.do))


@pytest.mark.long
def test_the_proof_of_a_result_is_taken_over(tmp_path: Path) -> None:
    """Of a sealed result for the same space; not of one that forbids layouts. One that was changed is refused."""
    path, narrow = tmp_path / "result.json", tmp_path / "narrow.json"
    words = ["solve", "llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "32", "--space", "uniform"]
    assert run(*words, "--out", str(path)).exit_code == 0
    assert run(*words, "--forbid", "tp=8", "--out", str(narrow)).exit_code == 0
    asked = ("--why-not", "tp=2", "--time-limit", "3")
    assert "The file proves" in run("explain", str(path), *asked).stderr
    assert "The file proves" not in run("explain", str(narrow), *asked).stderr
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"lower_bound_s": 0.9 * document["lower_bound_s"]}))
    changed = run("explain", str(path), *asked)
    assert changed.exit_code == 2
    assert "not as it was written" in changed.stderr
