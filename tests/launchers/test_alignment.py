"""Training on preferences or rewards: what exports write of it, what imports read back, and who refuses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import simulate
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import TARGETS, ImportRequest, restrict
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Alignment, Job, Layout, Plan, Problem
from tests.launchers.cases import as_run
from tests.launchers.test_targets import asked, drawn_plan

NAMES = {target: launcher.capability.name for target, launcher in TARGETS.items()}
JOBS = {
    "dpo": {"method": "dpo"},
    "outputs before": {"method": "dpo", "reference": "none"},
    "grpo": {"method": "grpo"},
    "no penalty": {"method": "grpo", "reference": "none"},
}
WRITTEN = {
    "dpo": ("llama-factory", "ms-swift"),
    "outputs before": ("trl",),
    "grpo": ("verl",),
    "no penalty": ("verl",),
}


def aligned(job: str, model: str = "llama3-8b", **more: Any) -> Problem:
    """The problem of a model that trains so."""
    problem = asked(model)
    changed = Job.model_validate(problem.job.model_dump() | {"alignment": JOBS[job]} | more)
    return problem.model_copy(update={"job": changed})


def exported(target: str, problem: Problem, plan: Plan) -> tuple[str, str]:
    """Name and text of the file that starts a plan."""
    known = TARGETS[target]
    launch = known.export(problem, plan, known.capability.versions[0])
    return next(iter(known.files(launch, "0").items()))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("job", JOBS)
def test_a_launcher_writes_it_or_names_those_that_do(job: str, target: str) -> None:
    """The table of methods decides; a refusal names every launcher whose export trains so."""
    if target in WRITTEN[job]:
        assert restrict(aligned(job), target).space.target == target
        return
    with pytest.raises(IllegalPlanError) as refused:
        restrict(aligned(job), target)
    for other in WRITTEN[job]:
        assert NAMES[other] in str(refused.value)


@pytest.mark.parametrize(
    ("target", "job"), [("llama-factory", "dpo"), ("ms-swift", "dpo"), ("trl", "outputs before")]
)
def test_plans_on_pairs_come_back(target: str, job: str) -> None:
    """Plans of the restricted space: equal field by field, with the same training, at the same step."""
    random = np.random.default_rng(7)
    problem = restrict(aligned(job), target)
    space = layout_space(problem)
    for row in random.choice(len(space), 4, replace=False).tolist():
        plan = drawn_plan(random, problem, space.at(row))
        name, text = exported(target, problem, plan)
        found = TARGETS[target].read(ImportRequest(text, name, problem.hardware, model=problem.model))
        order = {"rank_order": plan.layout.rank_order}
        assert found.plan.layout.model_copy(update=order) == as_run(problem, plan, target).layout
        assert found.problem.job.alignment == problem.job.alignment
        assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("llama-factory", ("--stage dpo", "--per_device_train_batch_size 2", "--gradient_accumulation_steps 2")),
        ("ms-swift", ("megatron rlhf", "--rlhf_type dpo", "--micro_batch_size 2", "--global_batch_size 32")),
        ("trl", ("trl.scripts.dpo", "--per_device_train_batch_size 2", "--precompute_ref_log_probs true")),
    ],
)
def test_batches_of_launchers_count_pairs(target: str, words: tuple[str, ...]) -> None:
    """Four sequences a micro-batch are two pairs, 64 of a step are 32; nothing is packed."""
    problem = aligned("outputs before" if target == "trl" else "dpo", global_batch_size=64)
    sharding = {"zero_stage": 1} if target == "ms-swift" else {"zero_stage": 3, "overlap_param_gather": True}
    layout = Layout(dp=8, micro_batch_size=4, global_batch_size=64, overlap_grad_reduce=True, **sharding)
    if target == "ms-swift":
        layout = layout.model_copy(update={"tp": 2})
    else:
        problem = problem.model_copy(update={"job": problem.job.model_copy(update={"num_gpus": 8})})
    _, text = exported(target, problem, uniform_plan(problem, layout, "full"))
    for said in words:
        assert said in text
    assert "packing true" not in text


@pytest.mark.parametrize(("job", "penalty"), [("grpo", "True"), ("no penalty", "False")])
def test_grpo_runs_its_forwards_at_the_size_of_the_update(job: str, penalty: str) -> None:
    """verl computes log-probabilities of policy and reference at the plan's micro-batch; the plan comes back."""
    problem = aligned(job)
    layout = Layout(tp=2, dp=8, micro_batch_size=2, global_batch_size=32, zero_stage=1)
    plan = uniform_plan(problem, layout, "full")
    name, text = exported("verl", problem, plan)
    reference, rollout = (
        f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu=2" for part in ("ref", "rollout")
    )
    assert f"actor_rollout_ref.actor.use_kl_loss={penalty}" in text
    assert reference in text
    assert rollout in text
    found = TARGETS["verl"].read(ImportRequest(text, name, problem.hardware, model=problem.model))
    assert found.plan == plan


@pytest.mark.parametrize(
    ("target", "problem", "layout", "why"),
    [
        ("ms-swift", aligned("dpo"), {"dp": 16, "zero_stage": 3}, "whole on every replica"),
        ("trl", aligned("outputs before"), {"cp": 2, "dp": 8, "zero_stage": 3}, "a rank's own tokens"),
        (
            "verl",
            aligned("grpo", rollout={"seconds": 9.0, "apart": True}),
            {"dp": 16, "zero_stage": 1},
            "the same",
        ),
    ],
)
def test_plans_that_would_run_otherwise_are_refused(
    target: str, problem: Problem, layout: dict[str, Any], why: str
) -> None:
    """A reference that is not sharded, log-probabilities of a part of the tokens, rollouts elsewhere."""
    plan = uniform_plan(problem, Layout(**layout, micro_batch_size=2, global_batch_size=32), "full")
    with pytest.raises(IllegalPlanError, match=why):
        exported(target, problem, plan)


@pytest.mark.parametrize(
    ("target", "job", "old", "new", "named"),
    [
        ("ms-swift", "dpo", "--rlhf_type dpo", "--rlhf_type kto", "kto"),
        ("ms-swift", "dpo", "--rlhf_type dpo", "--use_megatron_fsdp true", "whole reference"),
        ("ms-swift", "dpo", "--rlhf_type dpo", "--reference_free true", "reference-free"),
        ("llama-factory", "dpo", "--pref_loss sigmoid", "--pref_loss simpo", "pref_loss"),
        ("llama-factory", "dpo", "--stage dpo", "--stage kto", "stage"),
        ("trl", "outputs before", "--precompute_ref_log_probs true", "", "precompute_ref_log_probs"),
        ("trl", "outputs before", "--precompute_ref_log_probs true", "--sync_ref_model true", "sync_ref_model"),
    ],
)
def test_other_training_is_refused_by_name(target: str, job: str, old: str, new: str, named: str) -> None:
    """Other losses, a reference that is gathered whole or moves, none at all."""
    problem = aligned(job)
    sharding = {"zero_stage": 1} if target == "ms-swift" else {"zero_stage": 3, "overlap_param_gather": True}
    layout = Layout(dp=16, micro_batch_size=2, global_batch_size=32, overlap_grad_reduce=True, **sharding)
    name, text = exported(target, problem, uniform_plan(problem, layout, "full"))
    changed = text.replace(old, new)
    assert changed != text
    with pytest.raises(InvalidInputError, match=named):
        TARGETS[target].read(ImportRequest(changed, name, problem.hardware, model=problem.model))


def test_adapters_are_beside_no_copy() -> None:
    """A reference without its adapters is the policy, so TRL gathers nothing else; pairs are read as such."""
    problem = aligned("outputs before")
    layout = Layout(dp=16, micro_batch_size=2, global_batch_size=32, zero_stage=3)
    layout = layout.model_copy(update={"overlap_grad_reduce": True, "overlap_param_gather": True})
    name, text = exported("trl", problem, uniform_plan(problem, layout, "full"))
    adapters = "--use_peft true --lora_r 8 --lora_target_modules all-linear --lora_dropout 0 --dtype bfloat16"
    text = text.replace("--dtype float32", adapters).replace("--precompute_ref_log_probs true", "")
    text = text.replace("distributed_type: FSDP", "distributed_type: MULTI_GPU").replace("FSDP", "NO")
    text = "\n".join(line for line in text.splitlines() if "parallelism_config" not in line)
    found = TARGETS["trl"].read(ImportRequest(text, name, problem.hardware, model=problem.model))
    assert found.problem.job.alignment == Alignment(method="dpo")
    assert found.problem.job.reference_copies == 0
    assert found.plan.layout.micro_batch_size == 2
