"""A plan comes back from its own launch files, or the export says why it cannot be told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from milpplan import Layout, Plan, Problem, simulate
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import ImportRequest
from milpplan.launchers.megatron.launcher import Megatron, imported, torchrun_script
from milpplan.launchers.megatron.rules import MEGATRON
from milpplan.problem import EXPERT_DISPATCHES, ExpertDispatch, ModelSpec, NodeGroup
from tests.launchers.cases import (
    NAMED,
    VERSION,
    as_run,
    legal_layout,
    problem_of_megatron,
    random_case,
    round_trip,
)
from tests.simulation.cases import even_plan, problem_of, random_plan, shipped_hardware

DATA = Path(__file__).parents[1] / "data" / "launchers"


def layers_of(model: ModelSpec) -> list[object]:
    """Every layer's kind: how runs are cut does not matter."""
    return [model.kinds[index] for index in model.layer_kinds]


def assert_same(problem: Problem, plan: Plan, back: Problem, back_plan: Plan) -> None:
    """Plan, job, hardware and model are what they were; a file has no name of the model."""
    assert back_plan == as_run(problem, plan)
    gpus, batch = plan.layout.num_gpus, plan.layout.global_batch_size
    assert back.job == problem.job.model_copy(update={"num_gpus": gpus, "global_batch_size": batch})
    assert back.hardware == problem.hardware
    assert layers_of(back.model) == layers_of(problem.model)
    for name in ("hidden_size", "vocab_size", "tie_word_embeddings", "learned_positions", "norm", "dropout"):
        assert getattr(back.model, name) == getattr(problem.model, name)


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_come_back(seed: int) -> None:
    """Whatever the model, split, recomputation and switches: the script gives the plan back, to the field."""
    problem, plan = random_case(seed)
    if problem.model.name == "gpt-oss-120b" and plan.layout.etp > 1:
        # Experts with biases over etp ranks are the only thing drawn that Megatron-LM refuses.
        with pytest.raises(IllegalPlanError, match="biased_experts_are_not_split"):
            round_trip(problem, plan)
        return
    launch, found = round_trip(problem, plan)
    assert launch.num_gpus == plan.layout.num_gpus
    assert found.unknown_flags == ()
    assert_same(problem, plan, found.problem, found.plan)


def test_any_plan_comes_back_or_is_refused_with_the_way_out() -> None:
    """Plans of the whole space, most of them with counts that no method gives: never another plan, and every
    refusal says what to fix."""
    random = np.random.default_rng(8)
    refusals = []
    for _ in range(40):
        problem = problem_of_megatron(random)
        plan = random_plan(random, problem, legal_layout(random, problem))
        try:
            _, found = round_trip(problem, plan)
        except IllegalPlanError as error:
            refusals.append(error)
        else:
            assert_same(problem, plan, found.problem, found.plan)
    assert 15 < len(refusals) < 40
    assert all(error.expected and "--fix" in error.do for error in refusals)


@pytest.mark.parametrize("name", NAMED)
def test_golden_files(name: str) -> None:
    """The named plans give the files that were looked at by a person, and come back; their simulated step is the
    same to the nanosecond."""
    problem, plan = NAMED[name]()
    files = Megatron().files(Megatron().export(problem, plan, VERSION), "0")
    for file, text in files.items():
        assert text == (DATA / f"{name}.{file.rpartition('.')[2]}").read_text()
    _, found = round_trip(problem, plan, model=problem.model)
    assert_same(problem, plan, found.problem, found.plan)
    step_ns = simulate(problem, as_run(problem, plan)).step_time_ns
    assert simulate(found.problem, found.plan).step_time_ns == step_ns


def test_orders_of_ranks_that_place_alike_are_one() -> None:
    """With one pipeline rank the order of pp and dp does not matter, so every such order is expressible."""
    problem = problem_of("llama3-8b", "dgx-h100")
    layout = Layout(tp=2, dp=4, global_batch_size=8, rank_order="pp-tp-cp-dp")
    plan = random_plan(np.random.default_rng(0), problem, layout)
    plan = plan.model_copy(
        update={
            "virtual_stages": tuple(
                stage.model_copy(update={"recompute": type(stage.recompute)()}) for stage in plan.virtual_stages
            )
        }
    )
    launch, _ = round_trip(problem, plan)
    assert not launch.arguments.given("--use-tp-pp-dp-mapping")
    spread = Layout(tp=2, pp=2, dp=4, global_batch_size=8, rank_order="dp-tp-cp-pp")
    with pytest.raises(IllegalPlanError, match="rank_order"):
        Megatron().export(problem, random_plan(np.random.default_rng(0), problem, spread), VERSION)


@pytest.mark.parametrize("version", MEGATRON.versions)
def test_versions(version: str) -> None:
    """Every version takes the experts' plan, and the script gives it back; the two that must be told to use DeepEP
    are, and only they."""
    problem, plan = NAMED["deepseek-v3-experts"]()
    launch = Megatron().export(problem, plan, version)
    assert imported(ImportRequest(torchrun_script(launch, "0"), "x.sh", problem.hardware)).plan == as_run(
        problem, plan
    )
    assert launch.arguments.given("--moe-enable-deepep") == (version in ("core_v0.15.0", "core_v0.14.0"))


@pytest.mark.parametrize("name", EXPERT_DISPATCHES[1:])
def test_named_dispatch_comes_back(name: ExpertDispatch) -> None:
    """A named dispatcher is its flag, which gives the plan and its step back; split experts beside
    all-gather are refused."""
    problem = problem_of("qwen3-30b-a3b", "dgx-h100")
    layout = Layout(ep=16, dp=16, global_batch_size=16, expert_dispatch=name)
    plan = as_run(problem, even_plan(problem, layout))
    launch, found = round_trip(problem, plan)
    assert launch.arguments.text("--moe-token-dispatcher-type") == {"deepep": "flex"}.get(name, name)
    assert found.plan == plan
    assert found.problem.hardware.software.deduplicated_dispatch == (name != "alltoall")
    assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns
    script = torchrun_script(launch, "0")
    tensor = script.replace("--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2 --sequence-parallel")
    split = tensor.replace("--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2")
    split = split.replace("--expert-model-parallel-size 16", "--expert-model-parallel-size 8")
    if name == "allgather":
        with pytest.raises(InvalidInputError, match="is allgather"):
            imported(ImportRequest(split, "x.sh", problem.hardware))


def test_a_version_that_lacks_an_argument_is_refused() -> None:
    """Learned sinks came with core 0.15, which has no gate of the shared expert."""
    problem = problem_of("gpt-oss-120b", "dgx-h100")
    plan = even_plan(problem, Layout(ep=8, dp=8, global_batch_size=8))
    assert Megatron().export(problem, plan, "core_v0.15.0").arguments.given("--softmax-type")
    with pytest.raises(IllegalPlanError, match="softmax-type"):
        Megatron().export(problem, plan, "core_v0.14.0")


def test_other_jobs_are_refused() -> None:
    """Forwards alone, and nodes of several types."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=16)
    plan = even_plan(problem, Layout(dp=8, pp=2, global_batch_size=8))
    inference = problem.model_copy(update={"job": problem.job.model_copy(update={"kind": "inference"})})
    group = NodeGroup(hardware=shipped_hardware("dgx-a100-80"), num_gpus=8)
    mixed = problem.model_copy(update={"other_hardware": (group,)})
    for other, word in ((inference, "inference"), (mixed, "several node types")):
        with pytest.raises(IllegalPlanError, match=word):
            Megatron().export(other, plan, VERSION)
