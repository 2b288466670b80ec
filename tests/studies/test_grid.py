"""The cells of a study: every combination once, whatever the axes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.studies.grid import MAX_CELLS, axes, cells, num_cells, study_of
from tests.refusals import in_three_parts
from tests.studies.cases import study, sweep, tree

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("llama2-7b", "llama3-8b"),
    "hardware": ("dgx-h100", "dgx-a100-80"),
    "num_gpus": (1, 2, 3),
    "global_batch_size": (8, 16),
    "sequence_length": (1024, 2048),
    "precision": ("bf16", "fp8"),
    "grad_dtype": ("fp32", "bf16"),
    "space": ("uniform", "free"),
    "fixed": ({}, {"tp": 1}),
}


@st.composite
def studies(draw: st.DrawFn) -> dict[str, Any]:
    """A study with some values of every axis and up to three what-ifs."""
    grid = {
        name: draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique_by=str))
        for name, known in AXES.items()
    }
    paths = ("accelerator.memory_bytes", "scale_out.bandwidth_bytes_per_s", "scale_up.*.bus_bandwidth_bytes_per_s")
    factors = st.lists(st.sampled_from((0.5, 1.0, 1.5, 2.0)), min_size=1, max_size=3, unique=True)
    what_if = [{"name": f"w{i}", "path": path, "multiply": draw(factors)} for i, path in enumerate(paths)]
    data = tree(
        what_if=what_if[: draw(st.integers(0, 3))], combine=draw(st.sampled_from(("grid", "one_at_a_time")))
    )
    return data | {"grid": grid, "prices": {}}


@settings(max_examples=15, deadline=None)
@given(studies())
def test_every_combination_is_one_cell(data: dict[str, Any]) -> None:
    """The cells are the product of the grid and the combinations of what-ifs: numbered, all different, each the
    problem that its words say; one at a time, at most one what-if leaves its first case."""
    wanted = study_of(data, "study")
    found = cells(wanted, Path())
    cases = [len(axis.all_cases) for axis in wanted.what_if]
    alone = wanted.combine == "one_at_a_time"
    expected = prod(map(len, data["grid"].values())) * (1 + sum(n - 1 for n in cases) if alone else prod(cases))
    assert len(found) == expected == num_cells(wanted)
    assert [cell.number for cell in found] == list(range(1, expected + 1))
    assert len({tuple(cell.words.items()) for cell in found}) == expected
    first = {axis.name: axis.all_cases[0].name for axis in wanted.what_if}
    for cell in found:
        assert all(cell.words[name] in values for name, values in axes(wanted).items())
        assert not alone or sum(cell.words[name] != case for name, case in first.items()) <= 1
        if cell.problem is None:
            assert (cell.words["hardware"], cell.words["precision"]) == ("dgx-a100-80", "fp8")
            assert "has no fp8" in cell.impossible
            continue
        job = cell.problem.job
        assert (job.num_gpus, job.global_batch_size) == (cell.words["num_gpus"], cell.words["global_batch_size"])
        assert (job.sequence_length, job.precision) == (cell.words["sequence_length"], cell.words["precision"])
        assert cell.problem.model.name == cell.words["model"]
        assert cell.problem.space.tp == ((1,) if cell.words["fixed"] == "tp=1" else None)


def test_equal_problems_have_equal_keys_and_others_do_not() -> None:
    """A factor of one is the hardware as it is; another number, gap or seed is another task."""
    plain = sweep(study(what_if=[]))
    with_case = sweep(study())
    keys = {task.key for task in with_case.tasks.values()}
    assert {task.key for task in plain.tasks.values()} < keys
    assert len(keys) == 12
    for settings_ in ({"gap": 1e-2}, {"seed": 2}, {"time_limit_s": 10}):
        assert not keys & {task.key for task in sweep(study(solve=settings_)).tasks.values()}


def test_files_are_found_beside_the_study(tmp_path: Path) -> None:
    """A model's path is relative to the study file; the name stays as the study has it."""
    text = Path("models/llama2-7b.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace('"llama2-7b"', '"mine"', 1), encoding="utf-8")
    (cell, *_) = cells(study(grid__model=["mine.toml"]), tmp_path)
    assert cell.problem is not None
    assert (cell.words["model"], cell.problem.model.name) == ("mine.toml", "mine")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"grid__model": ["llama2-7"]}, UnknownNameError, "Did you mean llama2-7b"),
        ({"grid__hardware": ["dgx-h10"]}, UnknownNameError, "Did you mean dgx-h100"),
        ({"grid__space": ["unifrom"]}, UnknownNameError, "Did you mean uniform?"),
        ({"grid__fixed": [{"tpp": 8}]}, UnknownNameError, "Did you mean tp?"),
        ({"grid__fixed": [{"tp": 0}]}, InvalidInputError, "grid.fixed tp = 0 makes no sense"),
        ({"grid__fixed": [{"schedule": "2f2b"}]}, InvalidInputError, "grid.fixed schedule = '2f2b'"),
        ({"prices": {"dgx-h200": 4.0}}, UnknownNameError, "Did you mean dgx-h100?"),
        ({"solve": {"backend": "cpsa"}}, UnknownNameError, "Did you mean cpsat?"),
        (
            {"grid__num_gpus": [*range(1, 9001)], "grid__global_batch_size": [*range(1, 100)]},
            InvalidInputError,
            f"at most {MAX_CELLS:,}",
        ),
        (
            {
                "what_if": [
                    {"name": f"w{i}", "path": "scale_up.num_gpus", "set": [*range(1, 99)]} for i in range(9)
                ]
            },
            InvalidInputError,
            "cells or more",
        ),
    ],
)
def test_names_and_sizes_are_checked_before_anything_is_solved(
    changes: dict[str, Any], kind: type[MilpplanError], words: str
) -> None:
    """Each mistake is refused in three parts that name what was meant."""
    with pytest.raises(kind) as caught:
        cells(study(**changes), Path())
    assert words in f"{caught.value.seen} {caught.value.expected} {caught.value.do}"
    in_three_parts(caught.value)
