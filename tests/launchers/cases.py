"""Plans that Megatron-LM can express, drawn at random or named, and what comes back from their files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.families import configurations
from milpplan import Layout, Plan, Problem, Recompute, VirtualStage
from milpplan.launchers import TARGETS, ImportRequest, Launch
from milpplan.launchers.megatron.launcher import Imported, Megatron, imported, torchrun_script
from milpplan.launchers.megatron.rules import selective_modules
from milpplan.problem import NO_MODULES
from milpplan.problem.huggingface import model_from_config
from tests.simulation.cases import even_plan, problem_of, random_layout, random_plan, random_problem

VERSION = "d98e8a64"


def with_recompute(plan: Plan, recomputes: list[Recompute]) -> Plan:
    """The plan with other recompute counts."""
    stages = tuple(
        VirtualStage(layers=stage.layers, recompute=recompute)
        for stage, recompute in zip(plan.virtual_stages, recomputes, strict=True)
    )
    return Plan(layout=plan.layout, virtual_stages=stages)


def legal_layout(random: np.random.Generator, problem: Problem) -> Layout:
    """A random layout that keeps two rules of the space: nothing overlaps without replicas, and interleaving has
    several chunks a rank."""
    layout = random_layout(random, problem)
    changes: dict[str, Any] = {}
    if layout.cp * layout.dp == 1:
        changes = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    if layout.schedule == "interleaved" and layout.vpp == 1:
        changes["schedule"] = "1f1b"
    return Layout.model_validate(layout.model_dump() | changes)


def random_layout_of_megatron(random: np.random.Generator, problem: Problem) -> Layout:
    """A layout with a schedule and an order of ranks that Megatron-LM has."""
    layout = legal_layout(random, problem)
    changes: dict[str, Any] = {}
    if layout.schedule not in ("1f1b", "interleaved"):
        changes = {"schedule": "1f1b", "vpp": 1}
    experts = problem.model.kinds[-1].mlp.type == "moe"
    if not experts and min(layout.pp, layout.dp) > 1 and random.integers(2):
        changes["rank_order"] = "tp-cp-pp-dp"
    mixers = [kind.attention for kind in problem.model.kinds]
    if any(getattr(mixer, "sliding_window", None) or getattr(mixer, "sinks", False) for mixer in mixers):
        # Transformer Engine passes no keys around a ring there.
        batch = layout.global_batch_size * layout.cp
        changes |= {"cp": 1, "ulysses": 1, "dp": layout.dp * layout.cp, "global_batch_size": batch}
    return Layout.model_validate(layout.model_dump() | changes)


def problem_of_megatron(random: np.random.Generator) -> Problem:
    """A random problem whose model Megatron-LM's arguments can build: no indexers, recurrences or bare blocks."""
    while True:
        model = (problem := random_problem(random)).model
        if not model.has_indexers and all(kind.has_known_adapters for kind in model.kinds):
            return problem


def random_case(seed: int) -> tuple[Problem, Plan]:
    """A plan with any split of the layers, and a recomputation in Megatron-LM's words."""
    random = np.random.default_rng(seed)
    problem = problem_of_megatron(random)
    layout = random_layout_of_megatron(random, problem)
    plan = random_plan(random, problem, layout)
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    modes = ["none", "block", "full"] + ["selective"] * bool(selective_modules(problem.model, problem.job))
    mode = str(random.choice(modes))
    number = {"none": 0, "block": int(random.integers(1, max(sizes) + 1)), "full": max(sizes)}.get(mode)
    if number is None:
        return problem, with_recompute(plan, [Recompute(selective=size) for size in sizes])
    return problem, with_recompute(plan, [Recompute(full=min(number, size)) for size in sizes])


def round_trip(problem: Problem, plan: Plan, **more: Any) -> tuple[Launch, Imported]:
    """The launch of a plan and what is read back from its script."""
    launch = Megatron().export(problem, plan, VERSION)
    script = torchrun_script(launch, "0")
    return launch, imported(ImportRequest(script, "megatron.sh", problem.hardware, **more))


def llama_uneven() -> tuple[Problem, Plan]:
    """Interleaved with small ends, partly recomputed."""
    problem = problem_of("llama3-70b", "dgx-h100", num_gpus=64, global_batch_size=128)
    layout = Layout(
        tp=4, cp=2, pp=4, dp=2, vpp=2, global_batch_size=128, sequence_parallel=True, zero_stage=1,
        schedule="interleaved", overlap_grad_reduce=True, overlap_param_gather=True, tp_overlap="ring",
    )  # fmt: skip
    sizes, first, stages = (9, 11, 10, 10, 10, 10, 10, 10), 0, []
    for size in sizes:
        stages.append(VirtualStage(layers=(first, first + size), recompute=Recompute(full=min(4, size))))
        first += size
    return problem, Plan(layout=layout, virtual_stages=tuple(stages))


def gpt_unfused() -> tuple[Problem, Plan]:
    """Unfused attention whose scores are recomputed; tied embeddings, biases, learned positions, dropout."""
    problem = problem_of(
        "gpt3-175b", "dgx-a100-80", num_gpus=512, global_batch_size=512, attention_kernel="unfused"
    )
    layout = Layout(
        tp=8, pp=8, dp=8, vpp=3, global_batch_size=512, sequence_parallel=True, schedule="interleaved",
        rank_order="tp-cp-pp-dp",
    )  # fmt: skip
    return problem, even_plan(problem, layout, selective=4)


def deepseek() -> tuple[Problem, Plan]:
    """Latent attention, experts in all layers but three, 61 layers over 16 virtual stages, fp8."""
    problem = problem_of(
        "deepseek-v3", "dgx-h100", num_gpus=256, global_batch_size=1024, precision="fp8-tensorwise"
    )
    layout = Layout(
        ep=32, pp=8, dp=32, vpp=2, global_batch_size=1024, zero_stage=1, schedule="interleaved",
        overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    sizes = (4,) * 13 + (3,) * 3
    ends = np.cumsum((0, *sizes)).tolist()
    stages = tuple(
        VirtualStage(layers=(ends[j], ends[j + 1]), recompute=Recompute(selective=size))
        for j, size in enumerate(sizes)
    )
    return problem, Plan(layout=layout, virtual_stages=stages)


def glm_that_shares() -> tuple[Problem, Plan]:
    """GLM-5.2, most of whose layers take the keys of another, in the stages of Megatron-Bridge's recipe (067f987d,
    recipes/glm), with a layer of further tokens."""
    model = model_from_config(configurations()["zai-org--GLM-5.2"], "glm-5.2")
    problem = problem_of(
        model, "dgx-b200", num_gpus=192, global_batch_size=192, sequence_length=8192, mtp_layers=1
    )
    layout = Layout(pp=6, ep=32, dp=32, zero_stage=1, global_batch_size=192, rank_order="tp-cp-dp-pp")
    stages = tuple(
        VirtualStage(layers=span, recompute=Recompute(full=span[1] - span[0]))
        for span in pairwise((0, 14, 26, 38, 50, 62, 78))
    )
    return problem, Plan(layout=layout, virtual_stages=stages)


def mixtral_sharded() -> tuple[Problem, Plan]:
    """ZeRO 3 through Megatron-FSDP, one pipeline rank, all layers recomputed."""
    problem = problem_of("mixtral-8x7b", "dgx-h100", num_gpus=32, global_batch_size=256)
    layout = Layout(
        tp=2, ep=8, dp=16, micro_batch_size=2, global_batch_size=256, sequence_parallel=True, zero_stage=3,
        overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    return problem, even_plan(problem, layout, full=32)


NAMED = {
    "llama3-70b-uneven": llama_uneven,
    "gpt3-175b-unfused": gpt_unfused,
    "deepseek-v3-experts": deepseek,
    "mixtral-8x7b-sharded": mixtral_sharded,
}
"""Plans whose files are kept in tests/data/launchers."""


BY_MEGATRON = ("megatron", "megatron-bridge", "slime", "ms-swift", "verl")


def as_run(problem: Problem, plan: Plan, target: str = "megatron") -> Plan:
    """The plan as a file names it: with the modules that a target recomputes selectively, and the dispatcher of
    Megatron-LM's, its own where the plan names none."""
    modules = plan.layout.recompute_modules
    if modules == NO_MODULES:
        modules = TARGETS[target].capability.own_modules(problem)
    changes = {"recompute_modules": modules if plan.selects else NO_MODULES}
    if plan.layout.ep > 1 and plan.layout.expert_dispatch == "default" and target in BY_MEGATRON:
        once = problem.hardware.software.deduplicated_dispatch
        changes["expert_dispatch"] = "deepep" if once else "alltoall"
    layout = plan.layout.model_copy(update=changes)
    return plan.model_copy(update={"layout": layout})
