"""``--calculon`` on the command line: both commands, what it refuses, and files that someone broke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from milpplan import Plan, Problem, simulate
from milpplan.cli.app import app
from milpplan.errors import MilpplanError
from milpplan.problem.calculon.translation import calculon_run, notes, read_calculon
from milpplan.reports.documents import ResultDocument, SimulationDocument
from tests.cli.test_fuzz import FUZZ, changed, ends_well
from tests.launchers.test_fuzz import JUNK, WORD
from tests.refusals import in_three_parts

DATA = Path(__file__).parents[1] / "data" / "calculon"
PATHS = tuple(DATA / f"{name}.json" for name in ("model", "execution", "system"))
FILES = ["--calculon", *map(str, PATHS)]


def test_simulate_takes_the_three_files() -> None:
    """One document, with the same step as the library's; what differs is told on stderr."""
    result = CliRunner().invoke(app, ["simulate", *FILES, "--json"])
    assert result.exit_code == 0, result.stderr
    document = SimulationDocument.model_validate_json(result.stdout)
    assert document.step_time_s == simulate(*calculon_run(read_calculon(*PATHS))).step_time_s
    assert "ZeRO stage 1" in result.stderr


def test_solve_proves_the_best_plan_of_the_files_system() -> None:
    """Processors and batch are the execution's; the proved plan is no slower than the execution itself."""
    words = ["solve", *FILES, "--space", "uniform", "--gap", "1e-3", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    document = ResultDocument.model_validate_json(result.stdout)
    assert document.problem.job.num_gpus == 32
    assert document.problem.job.global_batch_size == 64
    assert document.step_time_s is not None
    assert document.step_time_s <= simulate(*calculon_run(read_calculon(*PATHS))).step_time_s


def test_processors_and_batch_can_be_given() -> None:
    """--gpus and --global-batch take the place of the file's; --schedule and --fix narrow the space as ever."""
    words = ["solve", *FILES, "--space", "uniform", "--gpus", "8", "--global-batch", "16", "--json"]
    words += ["--schedule", "zb-h1,1f1b"]
    document = ResultDocument.model_validate_json(CliRunner().invoke(app, [*words, "--fix", "tp=8"]).stdout)
    assert (document.problem.job.num_gpus, document.problem.job.global_batch_size) == (8, 16)
    assert document.problem.space.schedule == ("1f1b", "zb-h1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["simulate"], "PLAN.json is missing"),
        (["simulate", "plan.json", *FILES], "together with a plan file"),
        (["solve", "llama3-8b", *FILES], "together with MODEL"),
        (["solve", *FILES, "--seq-len", "8"], "together with --seq-len"),
        (["solve", *FILES, "--precision", "fp8"], "together with --precision"),
        (["solve", "llama3-8b", "dgx-h100"], "--gpus and --global-batch are missing"),
        (["simulate", "--calculon", "a.json", "b.json", "c.json"], "a.json does not exist"),
        (["simulate", "--calculon", *map(str, reversed(PATHS))], "system.json"),
    ],
)
def test_refusals(words: list[str], expected: str) -> None:
    """Exit code 2, and a message that names what is wrong."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert expected in result.stderr.replace("\n", " ")


@pytest.mark.long
@settings(FUZZ, max_examples=40)
@given(st.data())
def test_broken_files_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is done to one of the files, the command ends with a message."""
    which = data.draw(st.integers(0, 2))
    path = tmp_path_factory.mktemp("fuzz") / "broken.json"
    path.write_text(data.draw(st.composite(changed)(json.loads(PATHS[which].read_text()))))
    words = [str(path if index == which else good) for index, good in enumerate(PATHS)]
    ends_well("simulate", "--calculon", *words)


OTHERS = {
    "datatype": "bfloat16",
    "attention_type": "multiquery",
    "activation_recompute": "full",
    "tensor_par_comm_type": "ar",
    "tensor_par_overlap": "ring",
}
"""Another value of every field of words."""
TEXTS = tuple(path.read_text() for path in PATHS)
WORDS = (
    "64",
    "3",
    "2",
    "0.5",
    "1e-9",
    "-0.0",
    "1e300",
    "[]",
    "{}",
    '"full"',
    '"rs_ag"',
    '"float8"',
    "true",
    *JUNK,
)
"""What stands in the place of a word: values that a field may have, and junk."""


def read(folder: Path, texts: Sequence[str]) -> tuple[Problem, Plan, object] | MilpplanError:
    """The run of three texts with what is told of it, or why there is none, said in three parts."""
    paths = [folder / f"{number}.json" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    try:
        files = read_calculon(*paths)
        return *calculon_run(files), notes(files)
    except MilpplanError as refusal:
        error = refusal
    in_three_parts(error)
    return error


def changed_text(which: int, changes: dict[str, Any]) -> str:
    """The text of one of the files with other values."""
    return json.dumps(json.loads(TEXTS[which]) | changes)


@pytest.mark.parametrize("which", range(2), ids=["model", "execution"])
def test_no_field_is_lost(which: int, tmp_path: Path) -> None:
    """Another value of any field is another problem or plan, is told, or is refused: nothing is read past. What
    of a system is priced in another way stands in docs/launchers.md."""
    tree, plain = json.loads(TEXTS[which]), read(tmp_path, TEXTS)
    assert not isinstance(plain, MilpplanError)
    changed = 0
    for name, value in tree.items():
        other = not value if isinstance(value, bool) else OTHERS.get(name) or 2 * value or 1
        found = read(tmp_path, [changed_text(n, {name: other} if n == which else {}) for n in range(3)])
        assert found != plain, name
        changed += not isinstance(found, MilpplanError)
    assert changed > 2


@pytest.mark.parametrize("which", range(3), ids=["model", "execution", "system"])
def test_an_unknown_field_is_named(which: int, tmp_path: Path) -> None:
    """A field that Calculon does not have is refused by its name."""
    lost = read(tmp_path, [changed_text(n, {"no_such_thing": 3} if n == which else {}) for n in range(3)])
    assert isinstance(lost, MilpplanError)
    assert "no_such_thing" in str(lost)


@settings(FUZZ, max_examples=30)
@given(st.data())
def test_broken_texts_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Words replaced, lines left out, the end cut off: a plan that can be simulated, or a message."""
    which = data.draw(st.integers(0, 2))
    text = TEXTS[which]
    places = [found.span() for found in WORD.finditer(text)]
    change = st.tuples(st.sampled_from(places), st.sampled_from(WORDS), st.sampled_from(["word", "word", "line"]))
    for (first, last), word, what in sorted(data.draw(st.lists(change, min_size=1, max_size=2)), reverse=True):
        if what == "line":
            first, last = text.rfind("\n", 0, first) + 1, text.find("\n", last)
            text = text[:first] + text[max(first, last) :]
        else:
            text = text[:first] + word + text[last:]
    end = data.draw(st.none() | st.integers(0, len(text)))
    texts = [text[:end] if number == which else good for number, good in enumerate(TEXTS)]
    found = read(tmp_path_factory.mktemp("words"), texts)
    if not isinstance(found, MilpplanError):
        assert simulate(*found[:2]).step_time_s > 0
