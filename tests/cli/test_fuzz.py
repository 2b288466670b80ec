"""Files that someone broke: whatever was done to them, a command ends with a message, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import milpplan
from milpplan.cli import solving
from milpplan.cli.app import app
from milpplan.errors import InfeasibleError
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.amounts import long_but
from tests.fuzz_seeds import LABELS, keys_of, seeds
from tests.fuzzing import Case, broken, run, swaps
from tests.launchers.test_fuzz import TARGETS
from tests.small import small_hardware, small_model, small_problem

Tree = dict[str, Any]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([10**9, 10**15, 10**18, 10**30, -(10**30), 1e-30, 1e30, 1e308, float("nan"), float("inf")]),
    st.text(max_size=5),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[0, 1]]),
)
FUZZ = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def plan_tree() -> Tree:
    """A valid plan file as plain data."""
    problem = small_problem()
    plan = milpplan.solve(problem).plan
    assert plan is not None
    tree: Tree = json.loads(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return tree


def place(draw: st.DrawFn, tree: Tree) -> tuple[Any, Any]:
    """A container inside the tree and one of its keys, at any depth."""
    parent: Any = tree
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = draw(st.sampled_from(keys))
        if not parent[key] or not isinstance(parent[key], dict | list) or draw(st.integers(0, 3)) == 0:
            return parent, key
        parent = parent[key]


def changed(draw: st.DrawFn, tree: Tree) -> str:
    """The tree's text after one to three changes: values replaced, fields deleted or added, the text cut."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        parent, last = place(draw, tree)
        what = draw(st.sampled_from(["replace", "replace", "delete", "add"]))
        if what == "replace":
            parent[last] = draw(JUNK)
        elif what == "delete" and len(parent) > 1:
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=4))] = draw(JUNK)
    text = json.dumps(tree)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def ends_well(*words: str) -> int:
    """Run a command; it may refuse, but it may not fail."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code in (0, 2, 3, 4, 5), result.output
    assert "Traceback" not in result.output
    if result.exit_code == 2:
        assert len(result.stderr.splitlines()) == 3
        assert result.stdout == ""
    return result.exit_code


@pytest.mark.long
@FUZZ
@given(data=st.data())
def test_broken_plan_files(data: st.DataObject, tmp_path: Path) -> None:
    """A plan file with anything changed is simulated or refused."""
    path = tmp_path / "plan.json"
    path.write_text(data.draw(st.composite(changed)(plan_tree())))
    ends_well("simulate", str(path))


@settings(FUZZ, max_examples=15)
@given(content=st.binary(max_size=200))
def test_files_of_anything(content: bytes, tmp_path: Path) -> None:
    """Bytes that are no plan are refused."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert ends_well("simulate", str(path)) == 2


@pytest.mark.parametrize("examples", long_but((8,), (8, 60)))
@pytest.mark.parametrize("which", long_but(("hardware",), ("model", "hardware")))
def test_broken_models_and_hardware(
    which: str, examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model or hardware file with anything changed is solved, proved infeasible, or refused."""
    monkeypatch.setattr(solving, "explain", lambda *_: InfeasibleError("proved", "some plan", "more memory"))
    record = small_model() if which == "model" else small_hardware()
    tree: Tree = json.loads(document_text(record))
    path = tmp_path / "file.json"
    pair = [str(path), "dgx-h100"] if which == "model" else ["llama3-8b", str(path)]

    @settings(FUZZ, max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        path.write_text(data.draw(st.composite(changed)(tree)))
        words = ["--gpus", "4", "--global-batch", "8", "--space", "uniform", "--time-limit", "2"]
        ends_well("solve", *pair, *words)

    check()


def all_end_well(cases: list[Case], directory: Path) -> None:
    """Run cases one after another; all that end wrongly are told, each kind once."""
    wrong = {
        ended.wrong[-80:]: ended.told()
        for ended in (run(case, directory / "run") for case in cases)
        if ended.wrong
    }
    assert not wrong, "\n\n".join(wrong.values())


@pytest.mark.parametrize("number", long_but((3,), (3, 300)))
@pytest.mark.parametrize("label", long_but(("compare", "certify", "job", "import trl"), LABELS))
def test_every_command_ends_well_whatever_is_in_its_file(
    label: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of any type and size, fields lost or added, texts cut, repeated and nested: an exit code that
    is promised, no traceback, ten seconds of processor time and 1 GiB at most."""
    monkeypatch.chdir(tmp_path)
    whole = seeds()[label]
    cases = [broken(whole[draw % len(whole)], random.Random(draw)) for draw in range(number)]
    all_end_well(cases, tmp_path)


@pytest.mark.parametrize("most", long_but((2,), (2, 10_000)))
@pytest.mark.parametrize("name", long_but(("megatron", "deepspeed"), TARGETS))
def test_every_key_of_every_launcher_with_other_types(
    name: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting of a file, and each that the launcher knows, with values of other types: read or refused."""
    monkeypatch.chdir(tmp_path)
    draw, known = random.Random(name), keys_of(name)
    cases = [case for seed in seeds()[f"import {name}"] for case in swaps(seed, known, draw, each=3)]
    all_end_well(draw.sample(cases, min(most, len(cases))), tmp_path)


@pytest.mark.long
def test_every_label_has_seeds_that_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken above is whole here: every file is read, and every command has one."""
    monkeypatch.chdir(tmp_path)
    assert set(seeds()) == set(LABELS)
    for whole in seeds().values():
        for seed in whole:
            ended = run(seed.case(seed.text), tmp_path / "run")
            assert not ended.wrong, ended.told()
            assert ended.code in (0, 3, 4), ended.told()
