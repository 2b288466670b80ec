"""Grouped plans and dispatched batches as JSON: written, read, and refused where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.lengths import (
    Degrees,
    GroupedPlanFile,
    plan_file,
    read_dispatch,
    read_plan,
    restored_plan,
)
from milpplan.lengths.dispatch import Dispatcher
from milpplan.lengths.tabled import (
    GroupedPlan,
    solve_groups,
)
from milpplan.problem import validated
from tests.amounts import long_but
from tests.lengths.tabled.brute_force import random_problem


@pytest.fixture(scope="module")
def plan() -> GroupedPlan:
    """Two strategies, one of them with replicas of two kinds."""
    return solve_groups(random_problem(13), "highs").plan


@pytest.mark.parametrize("seed", long_but((0, 3), range(6)))
def test_a_plan_survives_its_file(seed: int, tmp_path: Path) -> None:
    """plan -> file -> plan -> file is the same file, and the plan passes the simulation."""
    solved = solve_groups(random_problem(seed), "highs")
    file = plan_file(solved.plan, solved.bound_ns)
    path = tmp_path / "plan.json"
    path.write_text(file.model_dump_json(indent=1), encoding="utf-8")
    read = read_plan(path)
    assert plan_file(read, solved.bound_ns) == file
    assert (read.time_ns, read.order, read.home) == (solved.plan.time_ns, solved.plan.order, solved.plan.home)


def test_the_timeline_adds_up(plan: GroupedPlan) -> None:
    """Its last event ends the step, and each strategy with sequences has one group in it."""
    file = plan_file(plan)
    assert file.timeline[-1].end_ns == file.time_ns
    assert [one.strategy for one in file.timeline if one.kind == "group"] == [one.strategy for one in file.groups]
    held = sum(number for group in file.groups for one in group.replicas for micro in one for _, number in micro)
    assert held == plan.problem.num_sequences


def test_a_batch_survives_its_file(plan: GroupedPlan, tmp_path: Path) -> None:
    """A dispatched batch comes back sequence by sequence."""
    lengths = np.repeat(plan.problem.lengths, plan.problem.counts)
    path, found = tmp_path / "batch.json", Dispatcher(plan).dispatch(lengths)
    path.write_text(found.file().model_dump_json(), encoding="utf-8")
    read = read_dispatch(path, plan.problem)
    assert (read.names, read.time_ns) == (found.order, found.time_ns)
    for group, replicas in zip(read.groups, found.micro_batches, strict=True):
        rows = [row for packing in group.packings for replica in packing.replicas for row in replica]
        held = [one for replica in replicas for one in replica]
        for row, indices in zip(rows, held, strict=True):
            assert np.repeat(read.problem.lengths, row).tolist() == sorted(found.lengths[i] for i in indices)


def test_the_schema_describes_every_field() -> None:
    """The schema names what the file holds, and refuses the rest."""
    schema = GroupedPlanFile.model_json_schema()
    assert set(schema["required"]) >= {"lengths", "strategies", "groups", "home", "time_ns"}
    assert schema["additionalProperties"] is False


def changed(plan: GroupedPlan, path: list[str | int], value: Any) -> GroupedPlanFile:
    """The plan's document with one value changed."""
    document = json.loads(plan_file(plan).model_dump_json())
    at = document
    for key in path[:-1]:
        # The first replica with a micro-batch.
        at = at[next(i for i, one in enumerate(at) if one) if key == "busy" else key]
    at[path[-1]] = value
    return validated(GroupedPlanFile, document, "plan.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["home"], "nowhere", "names the strategy 'nowhere'"),
        (["groups", 0, "strategy"], "nowhere", "names the strategy 'nowhere'"),
        (["groups", 0, "replicas"], [], "has 0 replicas"),
        (["groups", 0, "replicas", "busy", 0, 0, 0], 999, "holds a sequence of 999 tokens"),
        (["parameters_ns"], [[0]], "Switch times have shapes"),
        (["parameters_ns"], [[0, 0]], "switch times have 1 rows"),
        (["strategies", 1, "name"], "s0", "Two strategies are called 's0'"),
        (["timeline", 0, "end_ns"], 10**9, "the timeline is not that of the plan"),
        (["lengths", 0, 0], 10**9, "Lengths"),
    ],
)
def test_documents_that_do_not_go_together_are_refused(
    plan: GroupedPlan, path: list[str | int], value: Any, message: str
) -> None:
    """What is wrong is named."""
    with pytest.raises(InvalidInputError, match=message):
        restored_plan(changed(plan, path, value), "plan.json")


def test_plans_that_break_the_step_are_refused(plan: GroupedPlan) -> None:
    """A wrong time and a dropped sequence."""
    for path, value in ((["time_ns"], 1), (["lengths", 0, 1], 99)):
        with pytest.raises(IllegalPlanError):
            restored_plan(changed(plan, list(path), value), "plan.json")


def test_unknown_fields_and_texts_are_refused(plan: GroupedPlan, tmp_path: Path) -> None:
    """A typo does not pass."""
    document = json.loads(plan_file(plan).model_dump_json())
    path = tmp_path / "plan.json"
    for wrong in ({**document, "hom": "s0"}, {**document, "time_ns": "1"}, {"schema_version": 2}):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(InvalidInputError):
            read_plan(path)


def test_batches_that_do_not_go_together_are_refused(plan: GroupedPlan, tmp_path: Path) -> None:
    """A sequence that is missing, twice, or none of the batch; a replica that does not exist."""
    found = Dispatcher(plan).dispatch(np.repeat(plan.problem.lengths, plan.problem.counts))
    document = json.loads(found.file().model_dump_json())
    replicas = document["groups"][0]["replicas"]
    busy = next(i for i, one in enumerate(replicas) if one)
    path = tmp_path / "batch.json"
    changes: list[tuple[Any, str]] = [
        (
            [one if i != busy else [[*one[0], one[0][0]], *one[1:]] for i, one in enumerate(replicas)],
            "is on replica",
        ),
        ([one if i != busy else [[99], *one[1:]] for i, one in enumerate(replicas)], "sequence 99 of"),
        ([one if i != busy else one[1:] for i, one in enumerate(replicas)], "is in no micro-batch"),
        ([*[[] for _ in replicas], *replicas], "is on replica"),
    ]
    for value, message in changes:
        document["groups"][0]["replicas"] = value
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(InvalidInputError, match=message):
            read_dispatch(path, plan.problem)


def test_layouts_must_be_those_of_the_strategies() -> None:
    """A name that is none, and another number of replicas."""
    solved = solve_groups(random_problem(2), "highs").plan
    name = solved.names[0]
    replicas = len(solved.problem.strategies[solved.order[0]].replicas)
    for layouts in ({"nowhere": Degrees(dp=1)}, {name: Degrees(dp=replicas + 1)}):
        with pytest.raises(InvalidInputError):
            plan_file(solved, layouts=layouts)
