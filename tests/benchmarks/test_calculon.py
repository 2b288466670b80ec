"""The benchmarks against Calculon, as far as they go without a checkout of it; nothing here looks at a time."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import calculon_full, calculon_side
from benchmarks.calculon_measured import NONE, SEQUENCE, TABLE_5, errors
from benchmarks.calculon_space import Task, random_executions
from milpplan import Space, simulate
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Problem
from milpplan.problem.calculon.translation import calculon_run

DATA = Path(__file__).parents[1] / "data" / "calculon"


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
        if mode == "full" and layout.sequence_parallel:
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


def test_what_lies_outside_the_space_is_counted_exactly() -> None:
    """Batch 12 on 2 stages of 2 chunks and tp = 2: of micro-batches of 1, 2, 3, 6 and 12 sequences, 12, 6, 4, 2
    and 1 of them, one breaks Megatron-LM's interleaving; of all-reduces two of three overlaps are tiles."""
    system = tree("system")
    task = Task(2, 2, 1, 2, 12, "none", False, "ar", (1, 2, 3, 6, 12))
    everything = task.others(system) * len(task.networks(system, taken=True))
    inside, batch, interleaving, tiles = calculon_full._sorts(task, system, 12)
    assert (batch, interleaving) == (0, everything // 5)
    assert tiles == 2 * inside
    assert inside + interleaving + tiles == everything
    assert calculon_full._sorts(task, system, 13) == [0, everything, 0, 0]
    drawn = islice(random_executions([task], system, 4, np.random.default_rng(1)), 200)
    assert {calculon_full.sort_of(one, 12) for one in drawn} == {0, 2, 3}


def test_networks_that_calculon_refuses() -> None:
    """On a full network of 8: tp = 2 alone or with pp = 2 or dp = 2 divides it, tp = 3 does not; of 65,535 outside
    everything fits."""
    system = tree("system")
    inner, outer = system["networks"]
    assert (inner["size"], inner["must_be_filled"], outer["must_be_filled"]) == (8, True, False)
    assert len(Task(2, 2, 2, 1, 8, "none", True, "ar", (1,)).networks(system, taken=True)) == 8
    assert len(Task(3, 1, 1, 1, 8, "none", True, "ar", (1,)).networks(system, taken=True)) == 1
    assert len(Task(4, 4, 1, 1, 8, "none", True, "ar", (1,)).networks(system, taken=False)) == 1


def test_calculons_executions_are_in_the_whole_space() -> None:
    """Random executions with every switch, outside the three sorts that are named, are found in the space; without
    a switch that they use they are not."""
    model, system = tree("model"), tree("system")
    problem = calculon_side.search_problem(model, system, 8, 8, calculon_full.whole_space())
    micro = (1, 2, 4)
    all_tasks = []
    for tp, pp, way in ((1, 1, "ar"), (2, 2, "p2p_rs_ag"), (2, 1, "rs_ag"), (4, 2, "rs_ag")):
        dp = 8 // tp // pp
        micro = tuple(size for size in (1, 2, 4, 8) if dp * size <= 8)
        all_tasks.append(Task(tp, pp, dp, 1, 8, "none", dp > 1, way, micro))
    assert calculon_full._checked(problem, all_tasks, system, 8, 8, 40, model) == 40
    space = problem.space.model_copy(update={"offload_optimizer": (False,)})
    plain = problem.model_copy(update={"space": space})
    with pytest.raises(SystemExit, match="not in the space"):
        calculon_full._checked(plain, all_tasks, system, 8, 8, 40, model)
