"""Keys of tasks: equal for equal problems, and for no others."""

from __future__ import annotations

from milpplan import load_hardware, load_model
from milpplan.problem import Job, NodeGroup, Problem
from milpplan.studies.grid import SolveSettings
from milpplan.studies.outcomes import settings_options, task_of
from tests.small import small_problem


def test_every_node_type_is_in_the_key() -> None:
    """Problems that differ in what the other nodes are, or in how many there are, have keys of their own."""
    a100, h100 = load_hardware("dgx-a100-80"), load_hardware("dgx-h100")
    problem = Problem(
        model=load_model("llama3-8b"),
        hardware=a100,
        job=Job(num_gpus=32, global_batch_size=16, sequence_length=2048),
    )
    groups = ((h100, 8), (h100, 16), (a100, 8), (load_hardware("l40s"), 8))
    clusters = [
        problem,
        *(
            problem.model_copy(update={"other_hardware": (NodeGroup(hardware=kind, num_gpus=count),)})
            for kind, count in groups
        ),
    ]
    keys = [task_of(cluster, SolveSettings()).key for cluster in clusters]
    assert len(set(keys)) == len(clusters)
    assert [task_of(cluster, SolveSettings()).key for cluster in clusters] == keys


def test_a_study_may_ask_for_the_fastest_plans() -> None:
    """Its cells have keys of their own then, and options that keep the fastest plan."""
    problem, fastest = small_problem(), SolveSettings(simplest=False)
    assert task_of(problem, fastest).key != task_of(problem, SolveSettings()).key
    assert not settings_options(fastest).simplest
    assert settings_options(SolveSettings()).simplest
