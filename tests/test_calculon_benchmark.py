"""The benchmarks against Calculon, as far as they go without a checkout of it; nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import calculon_side
from benchmarks.calculon_measured import NONE, SEQUENCE, TABLE_5, errors
from benchmarks.calculon_space import Task
from milpplan import Layout, Space, simulate
from milpplan.optimize.layouts import layout_space
from milpplan.optimize.uniform import uniform_plan
from milpplan.presets.calculon import SWITCHES, calculon_run, has_field
from milpplan.specs.problem import Problem

DATA = Path(__file__).parent / "data" / "calculon"


def tree(name: str) -> dict[str, Any]:
    """One of the three files."""
    data: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return data


@pytest.fixture(scope="module")
def problem() -> Problem:
    """32 processors in the space that both have."""
    space = Space(kind="uniform", cp=(1,), zero_stage=(0, 1))
    return calculon_side.search_problem(tree("model"), tree("system"), 32, 64, space)


def test_layouts_survive_calculons_words(problem: Problem) -> None:
    """A plan of the uniform space, said as an execution and read back, is the same plan."""
    space = layout_space(problem)
    columns = space.columns
    rows = np.flatnonzero(problem.model.num_layers % (columns.pp * columns.vpp) == 0)
    for row in np.random.default_rng(1).choice(rows, size=60, replace=False):
        layout, mode = columns.at(int(row)), problem.space.recompute[int(row) % 3]
        execution = calculon_side.execution_of(problem, layout, mode, tree("system"))
        again = calculon_run(calculon_side.files_of(tree("model"), execution, tree("system")))[1]
        if mode == "full" and layout.sequence_parallel and has_field(Layout, "gather_again"):
            # Calculon's full recomputation gathers the inputs once.
            layout = layout.model_copy(update={"gather_again": False})
        assert again == uniform_plan(problem, layout, mode)
        assert calculon_side.mode_of(again) == mode


def test_terms_add_up_to_the_step(problem: Problem) -> None:
    """The terms, the model's ends included, are the simulated step; those of blocks alone have almost no ends."""
    layout = layout_space(problem).columns.at(0)
    plan = uniform_plan(problem, layout, "full")
    whole, _ = calculon_side.our_terms(problem, plan)
    assert sum(whole.values()) == pytest.approx(simulate(problem, plan).step_time_s)
    blocks, _ = calculon_side.our_terms(calculon_side.without_ends(problem, layout), plan)
    assert blocks["ends"] < 0.2 * whole["ends"]
    assert blocks["forward"] == whole["forward"] > 0


def test_networks_are_filled_from_the_inside() -> None:
    """Of 8 processors on network 0, tp = 4 and dp = 2 fill all; what comes after them goes outside."""
    execution = tree("execution") | {"tensor_par": 4, "data_par": 2, "pipeline_par": 2}
    nets = calculon_side.placed(execution, tree("system"))
    assert [nets[f"{name}_par_net"] for name in ("tensor", "data", "pipeline")] == [0, 0, 1]
    nets = calculon_side.placed(execution | {"tensor_par": 16}, tree("system"))
    assert [nets[f"{name}_par_net"] for name in ("tensor", "data", "pipeline")] == [1, 1, 1]


def test_what_cannot_be_said_is_set_plain() -> None:
    """An execution with every switch on becomes one that is taken, and the changes are named."""
    everything = tree("execution") | {
        "tensor_par_overlap": "pipe",
        "weight_offload": True,
        "activations_offload": True,
        "optimizer_offload": True,
        "tensor_par_net": 1,
        "data_par_net": 0,
    }
    said, changed = calculon_side.spoken(everything, tree("system"))
    calculon_run(calculon_side.files_of(tree("model"), said, tree("system")))
    for switch in SWITCHES:
        off = switch.values[everything[switch.theirs]] == next(iter(switch.values.values()))
        if not off:
            assert (switch.theirs in changed) == (not has_field(switch.record, switch.ours))
    assert ("networks" in changed) == (not has_field(Layout, "rank_order"))
    unchanged, none = calculon_side.spoken(tree("execution"), tree("system"))
    assert (unchanged, none) == (tree("execution"), [])


def test_executions_of_a_task() -> None:
    """Redo 2, overlaps 2 and 3, offloads 2 each, three micro-batches, two networks for three parallelisms."""
    task = Task(2, 2, 2, 1, 8, "none", True, "rs_ag", (1, 2, 4))
    assert task.count(2, True) == 2 * 2 * 3 * 2 * 2 * 2 * 3 * 2**3
    assert task.count(1, False) == 2 * 2 * 3 * 3
    full = Task(1, 1, 8, 1, 8, "full", False, "ar", (1,))
    assert full.count(2, True) == 2 * 2 * 2 * 2


def test_published_runs_are_executions() -> None:
    """Korthikanti et al.'s runs can be read with every setting of table 4."""
    for run in TABLE_5:
        for mode in (NONE, SEQUENCE):
            files = calculon_side.files_of(tree("model"), run.execution(mode), tree("system"))
            assert files.execution.num_procs == run.procs


def test_errors() -> None:
    """+10 % and -5 %: mean 2.5, mean absolute 7.5, worst 10."""
    assert errors((1.1, 0.95), (1.0, 1.0)) == "2.5 % / 7.5 % / 10.0 %"
