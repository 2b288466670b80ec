"""Sentences on a plan for newcomers, the meanings of the names on its page, and sentences on its proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from milpplan.plugins import plugin_title
from milpplan.problem import NO_MODULES, RANK_ORDERS, Layout, Plan, Problem, Rollout, Schedule, Space
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.problem.problem import NOT_LISTS
from milpplan.simulation import StepReport
from milpplan.simulation.layers import mtp_parameters, trained_parameters
from milpplan.units import (
    count_text,
    counted,
    gib_text,
    percent_text,
    rate_text,
    seconds_text,
    signed_percent_text,
)
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.explain.records import Interval


def cluster_text(problem: Problem, num_gpus: int) -> str:
    """Write ``64 x NAME``, or for several node types ``64 x NAME + 64 x NAME``."""
    counts = problem.node_gpus if problem.other_hardware else (num_gpus,)
    parts = zip(counts, problem.node_types, strict=True)
    return " + ".join(f"{count:,} x {hardware.name}" for count, hardware in parts)


def node_types_text(report: StepReport) -> str:
    """Write the nodes of the stages, in pipeline order: ``stages 0-7: NAME; 8-15: NAME``."""
    blocks, first = [], 0
    for name, same in groupby(stage.node_type for stage in report.stages):
        last = first + len(list(same)) - 1
        blocks.append(f"{first}: {name}" if first == last else f"{first}-{last}: {name}")
        first = last + 1
    return f"stages {'; '.join(blocks)}"


def replicas_text(problem: Problem, plan: Plan, report: StepReport) -> str:
    """Write the replicas by node type with their micro-batches: ``4 replicas on NAME with 20 micro-batches each;
    ...``.

    Empty where all replicas are alike.
    """
    layout = plan.layout
    block = layout.num_gpus // layout.dp
    parts = []
    for node_type, share in enumerate(layout.replica_micro_batches):
        number = problem.node_gpus[node_type] // block
        name = report.stages[layout.pp * node_type].node_type
        batches = counted(share, "micro-batch", "micro-batches")
        parts.append(f"{counted(number, 'replica')} on {name} with {batches} each")
    return "; ".join(parts)


TIME_PARTS: Final = {
    "compute": ("compute", "forward and backward work of the layers"),
    "recompute": ("recompute", "activations that were dropped to save memory, worked out again"),
    "tp_exposed": ("tensor parallel", "GPUs that share a layer wait for each other's parts"),
    "cp_exposed": (
        "context parallel",
        "GPUs that share a sequence wait for each other's keys, values or heads",
    ),
    "ep_exposed": ("expert parallel", "tokens travel to the GPUs with their experts, and back"),
    "zero_exposed": (
        "sharding",
        "gradients are reduced in every micro-batch (ZeRO 2, 3), weights gathered layer by layer (ZeRO 3)",
    ),
    "offload_exposed": ("host memory", "waits for what is kept in the memory of the host"),
    "launch": ("kernel launch", "time to start work on the GPU that no work covers"),
    "param_gather_exposed": ("parameter gather", "the first forward waits for updated parameters"),
    "grad_reduce_exposed": ("gradient reduction", "gradients still being added up after the last backward"),
    "bubble": ("bubble", "idle: the pipeline fills and drains, or a stage waits for a slower one"),
    "grad_norm": ("gradient norm", "all GPUs agree on the size of the gradients"),
    "step_overhead": ("fixed overhead", "what every step costs beside"),
    "optimizer": ("optimizer", "the update of the weights"),
}
"""Label and meaning of every part of ``StepReport.breakdown_s``."""
HIDDEN_PARTS: Final = {
    "tp_hidden": "tensor parallel",
    "cp_hidden": "context parallel",
    "ep_hidden": "expert parallel",
    "zero_hidden": "sharding",
    "offload_hidden": "host memory",
    "param_gather_hidden": "parameter gather",
    "grad_reduce_hidden": "gradient reduction",
}
MEMORY_PARTS: Final = {
    "weights_bytes": ("weights", "the model's numbers on this GPU"),
    "gradients_bytes": ("gradients", "one sum for every weight"),
    "optimizer_bytes": ("optimizer", "states of the optimizer, and weights in full precision"),
    "activations_bytes": ("activations", "kept by forwards for the backwards to come"),
    "transient_bytes": ("temporary", "workspace of the running backward"),
    "buffers_bytes": ("buffers", "of communication"),
}
"""Label and meaning of every part of ``StageMemory``."""
SCHEDULES: Final[dict[Schedule, str]] = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward and one backward in turn (1F1B)",
    "interleaved": "one forward and one backward in turn over all the pieces (interleaved 1F1B)",
    "zb-h1": "one forward and one backward in turn, weight gradients where a stage would wait (ZB-H1)",
    "zb-v": "a V: each stage holds a piece from each end of the model (ZB-V)",
    "dualpipe-v": "a V in which forwards run beside the backwards of other micro-batches (DualPipeV)",
}
ZERO: Final = (
    "each holds all weights, gradients and optimizer states",
    "each holds only its share of the optimizer states (ZeRO 1)",
    "each holds only its share of gradients and optimizer states (ZeRO 2)",
    "each holds only its share of weights, gradients and optimizer states (ZeRO 3)",
)


def plan_sentences(problem: Problem, plan: Plan, report: StepReport) -> list[str]:
    """Describe the plan, from the whole job to the single GPU."""
    return [
        _job(problem, plan.layout, report),
        *_splits(problem, plan),
        *_nodes(problem, plan, report),
        *_recompute(problem, plan),
        *_trained_parts(problem, plan.layout),
        *([f"Each step has {rollout_text(problem.job.rollout)}."] if problem.job.rollout is not None else []),
        *_optimizer(problem),
        *_switches(plan.layout),
        _memory(report),
    ]


def _job(problem: Problem, layout: Layout, report: StepReport) -> str:
    job = problem.job
    what = "reads" if problem.inference else "trains on"
    frozen = ""
    if job.frozen_text:
        frozen = f" with {job.frozen_text} ({count_text(trained_parameters(problem))} trained parameters)"
    aligned = f" by {job.alignment_text}" if job.alignment_text else ""
    return (
        f"{problem.model.name}{frozen}{aligned} on {counted(layout.num_gpus, 'GPU')} "
        f"({cluster_text(problem, layout.num_gpus)}), in "
        f"{job.precision}. One step "
        f"{what} {counted(layout.global_batch_size, 'sequence')} of {counted(job.sequence_length, 'token')}"
        f"{images_text(problem)} and takes "
        f"{seconds_text(report.step_time_s)}: {rate_text(report.tokens_per_s)} tokens a second, "
        f"{percent_text(report.mfu)} of the GPUs' peak (MFU)."
    )


def mtp_text(problem: Problem) -> str:
    """Say which layers of multi-token prediction the job trains or leaves out; empty if there are none."""
    trained, published = problem.job.mtp_layers, problem.model.num_nextn_predict_layers
    if trained:
        layers, size = counted(trained, "layer"), count_text(trained * mtp_parameters(problem.model))
        return f"with {layers} of multi-token prediction ({size} parameters) on the last stage"
    return "" if problem.inference or not published else "without multi-token prediction (--mtp-layers)"


def rollout_text(rollout: Rollout) -> str:
    """Say how long a step's generation takes, where, and how much memory it holds."""
    time = seconds_text(rollout.seconds)
    if rollout.apart:
        return (
            f"rollouts on other GPUs meanwhile: with them a step takes at least {time}; only the run's totals wait"
        )
    held = f", {gib_text(rollout.held_bytes)} held while training" if rollout.held_bytes else ""
    return f"rollouts of {time} before it on these GPUs (in the step as fixed overhead){held}"


def _trained_parts(problem: Problem, layout: Layout) -> Iterator[str]:
    if mtp := mtp_text(problem):
        yield f"The model is trained {mtp}."
    if problem.job.expert_imbalance > 1:
        factor = problem.job.expert_imbalance
        yield f"The fullest expert rank receives {factor:g} times its share of the tokens, at most all of them."
    if problem.job.images is not None:
        largest = counted(layout.micro_batch_size * problem.job.images.maximum, "image")
        yield f"The step waits for the replica with the most images; memory holds micro-batches of {largest}."


def _optimizer(problem: Problem) -> Iterator[str]:
    if problem.job.optimizer != "adam":
        yield f"{problem.job.optimizer_text} updates the matrices between embedding and head, Adam the rest."


def images_text(problem: Problem) -> str:
    """Describe the images of a sequence in parentheses; empty for a model without an encoder."""
    if problem.model.vision is None:
        return ""
    return f" ({problem.job.vision_text or 'no images: the vision encoder is idle'})"


def _splits(problem: Problem, plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.tp > 1:
        also = "; what is between the matrices is shared as well (sequence parallel)"
        yield (
            f"Every layer is shared by {layout.tp} GPUs, each with 1/{layout.tp} of its matrices (tensor "
            f"parallel, tp={layout.tp}){also if layout.sequence_parallel else ''}."
        )
    if layout.cp > 1:
        yield f"Every sequence is cut into {layout.cp} pieces, one a GPU (context parallel, cp={layout.cp})."
    if layout.ulysses > 1:
        yield (
            f"For attention, {layout.ulysses} GPUs exchange their pieces for heads (all-to-alls, "
            f"ulysses={layout.ulysses})."
        )
    if layout.ep > 1 or layout.etp > 1:
        cut = f", each cut over {layout.etp} GPUs" if layout.etp > 1 else ""
        yield f"The experts are spread over {layout.ep} groups{cut} (ep={layout.ep}, etp={layout.etp})."
    layers = problem.model.num_layers
    if layout.pp > 1:
        pieces = f"each in {layout.vpp} pieces spread over the model, " if layout.vpp > 1 else ""
        yield (
            f"The {layers} layers are cut into {layout.pp} stages, {pieces}that work one after another on "
            f"micro-batches (pipeline, pp={layout.pp}" + (f", vpp={layout.vpp}" if layout.vpp > 1 else "") + "). "
            f"Order of work: {SCHEDULES[layout.schedule]}."
        )
    number = " or ".join(f"{each:,}" for each in layout.replica_micro_batches or (layout.num_micro_batches,))
    share = f"{counted(number, 'micro-batch', 'micro-batches')} of {counted(layout.micro_batch_size, 'sequence')}"
    if layout.dp > 1:
        holds = "" if problem.inference else f"; {ZERO[layout.zero_stage]}{hybrid_text(layout)}"
        yield (
            f"There are {layout.dp} replicas of all this, each with its own part of the batch: {share} "
            f"(data parallel, dp={layout.dp}){holds}."
        )
    else:
        yield f"There is one replica; it works on {share} a step."


def _nodes(problem: Problem, plan: Plan, report: StepReport) -> Iterator[str]:
    """Describe the nodes of the stages or replicas, in a cluster of several types."""
    if plan.layout.replica_micro_batches:
        yield f"The replicas are heterogeneous: {replicas_text(problem, plan, report)}."
    elif problem.other_hardware:
        yield f"Every stage is on nodes of one type: {node_types_text(report)}."


def _recompute(problem: Problem, plan: Plan) -> Iterator[str]:
    full = sum(stage.recompute.full for stage in plan.virtual_stages)
    selective = sum(stage.recompute.selective for stage in plan.virtual_stages)
    layers = problem.model.num_layers
    if problem.inference:
        return
    if not full and not selective:
        yield "Nothing is recomputed: all activations are kept until their backward."
        return
    modules, cheap = plan.layout.recompute_modules, "activations that are cheap to compute"
    replayed = cheap if modules == NO_MODULES else modules.replace("+", ", ")
    meanings = {
        "selective": (selective, f"{replayed} are computed twice"),
        "full": (full, "only inputs are kept, and forwards run twice"),
    }
    for mode, (number, meaning) in meanings.items():
        if number:
            who = f"All {layers}" if number == layers else f"{number} of {layers}"
            yield f"{who} layers use {mode} recomputation to save memory: {meaning}."


def _switches(layout: Layout) -> Iterator[str]:
    covered = []
    if layout.overlap_grad_reduce:
        covered.append("gradients are added up")
    if layout.overlap_param_gather:
        covered.append("parameters are gathered")
    if covered:
        yield f"While layers compute, {' and '.join(covered)} (overlap)."
    if layout.tp_overlap != "none":
        yield f"Tensor-parallel messages travel in tiles beside the products ({layout.tp_overlap})."
    host = [name for name in ("weights", "activations", "optimizer") if getattr(layout, f"offload_{name}")]
    if layout.offload_modules != NO_MODULES:
        host.append(f"inputs of {layout.offload_modules.replace('+', ', ')}")
    if host:
        yield f"In the memory of the host: {', '.join(host)}."


def _memory(report: StepReport) -> str:
    peak, usable = gib_text(report.peak_memory_bytes), gib_text(report.usable_memory_bytes)
    start = f"The fullest GPU holds {peak} at its peak, of {usable} that can be used: "
    margin = gib_text(abs(report.memory_margin_bytes))
    if report.memory_margin_bytes < 0:
        return f"{start}it does not fit, {margin} are missing."
    if not report.fits:
        return f"{start}it fits there, but not in the memory of the host."
    if report.memory_verdict == "tight":
        return f"{start}it fits tightly, with {margin} left; try it before you rely on it."
    return f"{start}it fits safely, with {margin} left."


def layout_text(plan: Plan) -> str:
    """Write the degrees on a line, without those of one: ``tp 4, pp 4, vpp 7, dp 4, micro-batch 1, ZeRO 1``."""
    layout = plan.layout
    names = ("tp", "cp", "ulysses", "ep", "etp", "pp", "vpp", "dp")
    degrees = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    degrees.append(f"micro-batch {layout.micro_batch_size}")
    degrees.append(f"ZeRO {layout.zero_stage}{hybrid_text(layout)}")
    return ", ".join(degrees)


def hybrid_text(layout: Layout) -> str:
    """Name the groups of hybrid sharding, with a space before; empty where there is one group."""
    if layout.dp_replicate == 1:
        return ""
    return f" within {layout.dp_replicate} groups of {layout.num_shards} (hybrid sharding)"


DEGREES: Final = (
    *("num_gpus", "global_batch_size", "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size"),
    *("zero_stage", "schedule", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather"),
    *("tp_overlap", "pp_scatter_gather", "gather_again", "recompute_vision", "recompute_modules", "ulysses"),
    "vision_data_parallel",
    *("offload_weights", "offload_activations", "offload_modules", "offload_optimizer", "dp_replicate"),
    "keep_weights",
    *("expert_dispatch", "rank_order", "node_order"),
)


def difference_text(plan: Plan, base: Plan) -> str:
    """Describe the difference between two plans' layouts, or between their stages where the layouts are equal."""
    parts = []
    for name in DEGREES:
        own, other = getattr(plan.layout, name), getattr(base.layout, name)
        counts = name != "recompute_modules" or plan.selects or base.selects
        if own != other and counts:
            parts.append(f"{name.replace('_', ' ')} {_value(own)} instead of {_value(other)}")
    return "; ".join(parts) or "the same layout, other stages or recomputation"


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def cost_model_text(problem: Problem) -> str:
    """Name the cost model of a proof, e.g. ``milpplan 0.1.0``, and the plug-in that times the layers, if there is
    one."""
    names = {hardware.software.cost_model for hardware in problem.node_types} - {OWN_COST_MODEL}
    others = [plugin_title("cost_models", name) for name in sorted(names)]
    return f"milpplan {__version__}" + "".join(f" with layers timed by {other}" for other in others)


def scope_text(problem: Problem, forbid: Sequence[Mapping[str, object]] = ()) -> str:
    """Describe the cost model and the declared space of a proof, without the forbidden layouts."""
    left_out = [
        " and ".join(f"{name} {_value_text(value)}" for name, value in forbidden.items()) for forbidden in forbid
    ]
    without = f" without {', or '.join(left_out)}" if left_out else ""
    return f"cost model {cost_model_text(problem)}, {space_text(problem)}{without}"


def _value_text(value: object) -> str:
    """Write a value as the command line takes it."""
    return "-".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


CHUNKS: Final = {"even": "inner chunks nearly equal", "any": "chunks of any size"}
"""Words for the sizes of interleaved chunks that a space has."""


def space_text(problem: Problem) -> str:
    """Describe the kind of the space and its narrowings, e.g. ``space free (inner chunks nearly equal; tp 8)``."""
    space, default = problem.space, Space()
    narrowed = []
    if space.target is not None:
        narrowed.append(f"what {space.target} {space.target_version or ''}".rstrip() + " can run")
    if space.kind == "free" and space.recompute_counts != "any":
        narrowed.append(f"recompute counts {space.recompute_counts}")
    if space.kind == "free":
        narrowed.append(CHUNKS[problem.interleaved_layers])
    if space.vpp is None and space.vpp_values != default.vpp_values:
        narrowed.append(f"vpp {space.vpp_values}")
    narrowed += narrowings(space)
    if space.zero_pipeline:
        narrowed.append("ZeRO 2 and 3 with pipelines")
    if space.memory_margin_fraction is not None:
        narrowed.append(f"{percent_text(space.memory_margin_fraction)} of the memory free")
    return f"space {space.kind} ({'; '.join(narrowed)})" if narrowed else f"space {space.kind}"


def narrowings(space: Space) -> list[str]:
    """List the values that a space fixes, e.g. ``tp 8``."""
    default, narrowed = Space(), []
    for name in Space.model_fields:
        if name in NOT_LISTS:
            continue
        value = getattr(space, name)
        is_free = value is None and getattr(default, name) is not None
        if name in ("recompute_modules", "offload_modules") and is_free:
            narrowed.append(f"a chain of {name}")
        elif is_free or (name == "rank_order" and set(value) == set(RANK_ORDERS)):
            narrowed.append(f"any {name}")
        elif value is not None and value != getattr(default, name):
            narrowed.append(f"{name} {', '.join(str(item) for item in value)}")
    return narrowed


def range_text(interval: Interval, signed: bool = False) -> str:
    """Write an interval of shares in per cent, with the digits that it supports."""
    low, high = interval.low, interval.high
    width = high - low
    digits = 2 if math.isinf(width) or width < 0.01 else 1
    text = signed_percent_text if signed else percent_text
    if math.isinf(low) and math.isinf(high):
        return "unknown"
    if math.isinf(high):
        return f"at least {text(low, digits)}"
    if math.isinf(low):
        return f"at most {text(high, digits)}"
    # Rounded outwards, so that the printed interval is proved.
    unit = 10.0 ** -(digits + 2)
    ends = text(math.floor(low / unit) * unit, digits), text(math.ceil(high / unit) * unit, digits)
    return joined(*ends)


def joined(low: str, high: str) -> str:
    """Write two amounts as a range, with a common unit once: ``1.2 to 1.3 %``."""
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if unit == high.rpartition(" ")[2] else f"{low} to {high}"
