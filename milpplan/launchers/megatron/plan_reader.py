"""Reader of a job and a plan from Megatron-LM's arguments."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.arguments import Arguments
from milpplan.launchers.megatron.plan import FSDP
from milpplan.launchers.megatron.recompute import selective_modules
from milpplan.launchers.megatron.rules import Sizes, sizes_of
from milpplan.launchers.megatron.stages import stage_sizes
from milpplan.problem.hardware import Accelerator, HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Job
from milpplan.problem.reading import validated


def job_of(given: Arguments, world: int) -> Job:
    """Read the training job.

    Raises:
        InvalidInputError: a number format or an optimizer is not priced.
    """
    sizes = sizes_of(given, world)
    if not given.given("--bf16"):
        raise InvalidInputError(
            f"The run is in {'fp16' if given.given('--fp16') else 'fp32'}, without --bf16.",
            "Expected bf16, with or without fp8: other formats are not priced.",
            "Add --bf16 to compare it as a run in bf16.",
        )
    if given.text("--optimizer") != "adam":
        raise InvalidInputError(
            f"--optimizer is {given.text('--optimizer')}.",
            "Expected adam, whose states and update are priced.",
            "Use --optimizer adam to compare it as such a run.",
        )
    given.given("--accumulate-allreduce-grads-in-fp32")
    backend = given.text("--attention-backend")
    local = given.text("--transformer-impl") == "local" and not given.given("--use-flash-attn")
    data = {
        "num_gpus": world,
        "global_batch_size": given.count("--global-batch-size", given.needed("--micro-batch-size") * sizes.dp),
        "sequence_length": given.needed("--seq-length"),
        "precision": "fp8" if given.given("--fp8-format") else "bf16",
        "attention_kernel": "unfused" if backend in ("unfused", "local") or local else "flash",
        "grad_dtype": "bf16" if given.given("--grad-reduce-in-bf16") else "fp32",
    }
    # It has no effect without --fp8-format; with it, recipe_note says which parts are priced.
    given.text("--fp8-recipe")
    return validated(Job, data, "the job that the arguments describe")


def plan_of(given: Arguments, world: int, model: ModelSpec, job: Job) -> Plan:
    """Read the plan.

    Raises:
        InvalidInputError: a plan cannot represent the stages or the recomputation.
    """
    sizes = sizes_of(given, world)
    layout = _layout(given, sizes, job)
    layers, wrong = stage_sizes(given, sizes.layers, sizes.pp)
    if wrong:
        raise InvalidInputError(
            f"Stages: {wrong}.", "Expected stages that hold every layer once.", "Correct them."
        )
    counts = _recomputes(given, model, job, layers)
    spans = pairwise(accumulate(layers, initial=0))
    stages = [
        {"layers": list(span), "recompute": recompute} for span, recompute in zip(spans, counts, strict=True)
    ]
    data = {"layout": layout.model_dump(), "virtual_stages": stages}
    return validated(Plan, data, "the plan that the arguments describe")


def _layout(given: Arguments, sizes: Sizes, job: Job) -> Layout:
    vpp, replicas = sizes.vpp, sizes.cp * sizes.dp > 1
    zero = _zero_stage(given) * replicas
    reduces, gathers = given.given("--overlap-grad-reduce"), given.given("--overlap-param-gather")
    # Megatron-LM switches sequence parallelism off where there is nothing to split (A:1433-1439).
    data: dict[str, Any] = {
        "tp": sizes.tp,
        "cp": sizes.cp,
        "ep": sizes.ep,
        "etp": sizes.etp,
        "pp": sizes.pp,
        "dp": sizes.dp,
        "vpp": vpp,
        "micro_batch_size": given.needed("--micro-batch-size"),
        "global_batch_size": job.global_batch_size,
        "sequence_parallel": given.given("--sequence-parallel") and sizes.tp > 1,
        "zero_stage": zero,
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "overlap_grad_reduce": (reduces and replicas) or zero >= 2,
        "overlap_param_gather": (gathers and zero > 0) or zero == 3,
        "tp_overlap": "ring" if given.given("--tp-comm-overlap") else "none",
        "rank_order": "tp-cp-pp-dp" if given.given("--use-tp-pp-dp-mapping") else "tp-cp-dp-pp",
    }
    if vpp == 1:
        # Without interleaving Megatron-LM never overlaps these transfers (A:1010-1018).
        given.given("--no-overlap-p2p-communication")
    if given.count("--microbatch-group-size-per-virtual-pipeline-stage", sizes.pp) != sizes.pp and vpp > 1:
        raise InvalidInputError(
            "--microbatch-group-size-per-virtual-pipeline-stage is not the pipeline size.",
            f"Expected groups of {sizes.pp} micro-batches: the order of work that is simulated.",
            "Leave the flag out to compare it with the usual groups.",
        )
    _check_ring(given, sizes)
    return validated(Layout, data, "the layout that the arguments describe")


def _check_ring(given: Arguments, sizes: Sizes) -> None:
    kinds = set(given.texts("--cp-comm-type"))
    if sizes.cp > 1 and kinds != {"p2p"}:
        raise InvalidInputError(
            f"--cp-comm-type is {' '.join(sorted(kinds))}.",
            "Expected p2p: context parallelism is priced as a ring.",
            "Use p2p to compare it as such a run.",
        )


def _zero_stage(given: Arguments) -> int:
    strategy = given.text("--data-parallel-sharding-strategy")
    sharded = given.given("--use-distributed-optimizer")
    given.given("--ckpt-format")
    if not given.given("--use-megatron-fsdp"):
        return int(sharded)
    names = {name: stage for stage, name in FSDP.items()} | {"no_shard": 0, "optim": 1}
    return names[strategy or "no_shard"]


def _recomputes(given: Arguments, model: ModelSpec, job: Job, layers: tuple[int, ...]) -> list[dict[str, int]]:
    granularity = given.text("--recompute-granularity")
    if granularity is None and given.given("--recompute-activations"):
        granularity = "selective"
    if granularity == "selective":
        _check_modules(given, model, job)
        return [{"selective": size} for size in layers]
    if granularity is None:
        return [{} for _ in layers]
    number = given.needed("--recompute-num-layers")
    if given.text("--recompute-method") == "block":
        return [{"full": min(number, size)} for size in layers]
    if number > 1:
        raise InvalidInputError(
            f"--recompute-method uniform keeps the input of every {number}th layer alone.",
            "Expected --recompute-num-layers 1: a plan keeps the input of every layer that is recomputed.",
            "Use 1 to compare it as such a run.",
        )
    return [{"full": size} for size in layers]


def _check_modules(given: Arguments, model: ModelSpec, job: Job) -> None:
    """Check that selective recomputation lists the modules that an export writes."""
    modules = set(given.texts("--recompute-modules")) or {"core_attn"}
    supported = selective_modules(model, job)
    if modules != set(supported):
        meant = f"--recompute-modules {' '.join(supported)}" if supported else "none for a model of this kind"
        raise InvalidInputError(
            f"Selective recomputation of {', '.join(sorted(modules))} is not priced for this model and kernel.",
            f"Expected {meant}: what selective recomputation means here.",
            "Change the modules, or import it without recomputation to see the difference that they make at most.",
        )


RECIPES = {
    "delayed": "scales of earlier steps, and one pass over each input, which is what is priced",
    "tensorwise": "priced as one pass over each input; the pass before it, which finds the largest value, is not "
    "counted",
    "blockwise": "priced with one scale a tensor; the scales of blocks of 128 values (3 % more bytes of fp8 "
    "tensors) and their slower products are not counted",
    "mxfp8": "priced with one scale a tensor; the scales of blocks of 32 values (3 % more bytes of fp8 tensors) "
    "are not counted",
}
"""Recipes of fp8, with the parts that are priced and those that are not. All of them are priced alike."""
_BLACKWELL = re.compile(r"\bG?B(?:100|10|200|300)\b|RTX PRO \d+|RTX 50\d\d")
_HOPPER = re.compile(r"\bG?H(?:20|100|200|800)\b")


def recipe_note(given: Arguments, accelerator: Accelerator) -> str:
    """Describe which parts of an fp8 recipe are priced.

    Raises:
        InvalidInputError: the accelerator has no such arithmetic, or the recipe is not priced.
    """
    recipe = given.text("--fp8-recipe") or ""
    blocks = {"mxfp8": (_BLACKWELL,), "blockwise": (_HOPPER, _BLACKWELL)}
    needs = {"mxfp8": "compute capability 10.0 (Blackwell) or later", "blockwise": "9.0 (Hopper) or later"}
    if accelerator.fp8 is None:
        raise InvalidInputError(
            f"--fp8-format is given, and {accelerator.name} has no fp8.",
            "Expected hardware with fp8.",
            "Choose another --hardware.",
        )
    if recipe not in RECIPES:
        raise InvalidInputError(
            f"--fp8-recipe is {recipe}.",
            f"Expected one of {', '.join(RECIPES)}: what another does is not known.",
            "Leave it out to compare it with delayed scaling.",
        )
    if recipe in blocks and not any(pattern.search(accelerator.name) for pattern in blocks[recipe]):
        raise InvalidInputError(
            f"--fp8-recipe is {recipe}, which {accelerator.name} does not have.",
            f"Expected a GPU of {needs[recipe]}: Transformer Engine has none below it (pytorch/quantization.py).",
            "Choose another --fp8-recipe (delayed, tensorwise), or another --hardware.",
        )
    return f"--fp8-recipe {recipe}: {RECIPES[recipe]}."


def software_of(
    given: Arguments, hardware: HardwareSpec, model: ModelSpec, ep: int
) -> tuple[HardwareSpec, list[str]]:
    """Set the software options of the hardware that the arguments give, with notes.

    Raises:
        InvalidInputError: the dispatcher is not priced.
    """
    changes: dict[str, bool] = {}
    dispatcher = given.text("--moe-token-dispatcher-type") if model.has_experts else None
    if dispatcher == "allgather" and ep > 1:
        raise InvalidInputError(
            "--moe-token-dispatcher-type is allgather (the default), with experts over several ranks.",
            "Expected alltoall or flex, which are priced.",
            "Name one of them to compare it as such a run.",
        )
    if dispatcher is not None and ep > 1:
        changes["deduplicated_dispatch"] = dispatcher == "flex"
    if given.given("--fp8-format"):
        changes["fp8_weights_only"] = given.given("--fp8-param-gather")
    different = {name: on for name, on in changes.items() if getattr(hardware.software, name) != on}
    notes = [f"software.{name} = {str(on).lower()}, as the arguments say." for name, on in different.items()]
    if model.has_experts and not given.given("--moe-grouped-gemm"):
        notes.append("Without --moe-grouped-gemm experts run one after another; they are priced as one launch.")
    if not given.given("--cross-entropy-loss-fusion"):
        notes.append("Without --cross-entropy-loss-fusion the loss may take more memory than is counted.")
    given.text("--cross-entropy-fusion-impl")
    software = hardware.software.model_copy(update=different)
    return hardware.model_copy(update={"software": software}), notes
