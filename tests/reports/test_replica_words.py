"""Replicas of different make in the words of a plan."""

from __future__ import annotations

from milpplan import load_hardware, load_model, solve
from milpplan.reports.plan_words import plan_sentences
from milpplan.specs.problem import Job, NodeGroup, Problem, Space


def test_words_say_what_each_type_does() -> None:
    """The sentences about a plan name the replicas of each type and their share, and a notebook shows them."""
    problem = Problem(
        model=load_model("llama3-8b"),
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=16, global_batch_size=64, sequence_length=4096),
        other_hardware=(NodeGroup(hardware=load_hardware("dgx-h100"), num_gpus=8),),
        space=Space(mixing=("replicas",), pp=(2,), vpp=(1,), tp=(2,), cp=(1,), micro_batch_size=(1,)),
    )
    result = solve(problem)
    assert result.plan is not None
    assert result.report is not None
    slow, fast = result.plan.layout.replica_micro_batches
    words = " ".join(plan_sentences(problem, result.plan, result.report))
    assert f"2 replicas on dgx-a100-80 with {slow} micro-batches each" in words
    assert f"2 replicas on dgx-h100 with {fast} micro-batches each" in words
    assert f"{slow} or {fast} micro-batches of 1 sequence" in words
    assert "different make" in result._repr_html_()
