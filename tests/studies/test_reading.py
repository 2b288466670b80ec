"""Study files: what is written is what is read, and whatever is wrong gets a message."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.studies.grid import Study, cells, num_cells, read_study, study_of
from tests.amounts import few_or_many
from tests.cli.test_fuzz import JUNK, place
from tests.studies.cases import QUICK, study, tree


def test_toml_and_record_are_the_same() -> None:
    """The text of a study file gives the record, and the record its own JSON again."""
    assert study_of(tomllib.loads(QUICK), "text") == study()
    assert Study.model_validate_json(study().model_dump_json()) == study()


@pytest.mark.parametrize("path", sorted(Path("examples/studies").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_studies(path: Path) -> None:
    """Every example is read, and has the number of cells that its comment says."""
    wanted = read_study(path)
    assert len(cells(wanted, path.parent)) == num_cells(wanted)
    assert f"# {num_cells(wanted)} " in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gird": {}}, "Did you mean grid instead of 'gird'?"),
        ({"grid__gpus": [8]}, "Did you mean num_gpus instead of 'gpus'?"),
        ({"what_if": [{"name": "a", "path": "scale_up.num_gpus", "mutliply": [2]}]}, "mean multiply instead of"),
        ({"hardware": ["dgx-h100"]}, "Did you mean grid.hardware?"),
        ({"grid__num_gpus": []}, "grid.num_gpus"),
        ({"grid__num_gpus": [8, 8]}, "8 stands there twice"),
        ({"grid__num_gpus": "8"}, "grid.num_gpus"),
        ({"grid__num_gpus": [True]}, "grid.num_gpus[0]"),
        ({"grid__global_batch_size": [10**9]}, "less than or equal to"),
        ({"grid__precision": ["fp4"]}, "'mxfp8' or 'nvfp4'"),
        ({"what_if": [{"name": "a"}]}, "either path with a list of values, or cases"),
        ({"what_if": [{"name": "a", "path": "x", "set": [1], "add": [1]}]}, "exactly one of"),
        ({"what_if": [{"name": "a", "cases": [{"name": "x"}, {"name": "x"}]}]}, "the case 'x' stands there twice"),
        ({"what_if": [{"name": "a", "cases": [{"name": "x"}]}] * 2}, "'a' stands there twice"),
        ({"what_if": [{"name": "num_gpus", "cases": [{"name": "x"}]}]}, "the name of an axis of the grid"),
        ({"prices": {"dgx-h100": 0}}, "prices.dgx-h100"),
        ({"solve": {"gap": 1.0}}, "solve.gap"),
        ({"combine": "all"}, "'grid' or 'one_at_a_time'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    """The message says which field is wrong and, for a misspelt one, which was meant."""
    with pytest.raises(InvalidInputError) as caught:
        study(**changes)
    assert words in str(caught.value)
    assert caught.value.expected
    assert caught.value.do


WHOLE = tree(
    what_if=[
        {"name": "short", "path": ["accelerator.memory_bytes"], "add": [0, 1e9]},
        {
            "name": "long",
            "cases": [
                {"name": "a"},
                {"name": "b", "set": {"scale_up": {"num_gpus": 1}}, "add": {"scale_out.efficiency": -0.1}},
            ],
        },
        {"name": "other", "path": "scale_up", "replace_from": ["dgx-h100", "l40s"]},
    ],
    combine="one_at_a_time",
    solve={"gap": 1e-3, "time_limit_s": 5, "backend": "auto"},
    grid__sequence_length=[2048],
)


@few_or_many(20, 200, st.data())
def test_whatever_was_done_to_a_study_it_is_refused_or_understood(data: st.DataObject) -> None:
    """Values replaced, fields deleted or added: cells, or a message in three parts; never another exception."""
    broken = copy.deepcopy(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        parent, key = data.draw(st.composite(place)(broken))
        how = data.draw(st.sampled_from(("replace", "delete", "add")))
        if how == "delete" and isinstance(parent, dict):
            del parent[key]
        elif how == "add" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=5))] = data.draw(JUNK)
        else:
            parent[key] = data.draw(JUNK)
        if not broken:
            break
    error = None
    try:
        assert cells(study_of(broken, "broken"), Path())
    except MilpplanError as refusal:
        error = refusal
    assert error is None or all((error.seen, error.expected, error.do))
