"""Terms of the cost model by name: the plans that use them, and the step time without or with doubled terms.

Most of a plan's step is products and attention, which every measured run has. The terms here depend on the layout,
so measured runs may exercise them or not (``milpplan.validation.evidence``).

Scaling a term changes the layout's constants, from which the step is simulated as usual. Exposed time is
multiplied. Doubled communication beside compute is hidden only as far as before, so a doubled step is an upper
bound there. Offloaded data move beside the remaining work of a layer, so less work hides less of the transfer. A
pipeline's bubble is scaled as its present share of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from milpplan.problem import (
    NO_MODULES,
    PAIRED_SCHEDULES,
    SPLIT_SCHEDULES,
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    Layout,
    LinearRecurrence,
    MixtureOfExperts,
    Plan,
    Precision,
    Problem,
)
from milpplan.simulation import (
    IntArray,
    LayoutColumns,
    LayoutCosts,
    plan_step_ns,
    simulate,
)
from milpplan.simulation.layers import Part, Phase, layer_seconds
from milpplan.simulation.layout_columns import OFFLOADS
from milpplan.simulation.layout_costs import layout_costs, offloaded
from milpplan.simulation.network import members_per_domain
from milpplan.units import NS_PER_S

Scale = Callable[[Problem, Layout, LayoutCosts, int], LayoutCosts]
BEYOND_ANY_RATE: Final = 1e6
HOST_TRAFFIC: Final = "host_traffic"
"""Name of the term that scales the transfers themselves, and not the work beside them."""


@dataclass(frozen=True, slots=True)
class Term:
    """Term of the cost model. ``used``: test whether a plan has it; ``scaled``: constants with the term
    multiplied, None for the bubble, which is not a constant."""

    name: str
    words: str
    used: Callable[[Problem, Plan], bool]
    scaled: Scale | None = None


def used_terms(problem: Problem, plan: Plan) -> tuple[Term, ...]:
    """List the terms that a plan has, in the order of ``TERMS``."""
    return tuple(term for term in TERMS if term.used(problem, plan))


def step_without_s(problem: Problem, plan: Plan, terms: Iterable[Term]) -> float:
    """Compute the seconds of a step with terms at zero."""
    return _step_s(problem, plan, terms, 0)


def step_doubled_s(problem: Problem, plan: Plan, terms: Iterable[Term]) -> float:
    """Compute the seconds of a step with terms doubled."""
    return _step_s(problem, plan, terms, 2)


def _step_s(problem: Problem, plan: Plan, terms: Iterable[Term], times: int) -> float:
    layout, used = plan.layout, [term for term in terms if term.used(problem, plan)]
    # Work is scaled before the transfers of the host are added beside it. With them, a replay that waits less than
    # the layer without a replay is a negative number, and its double exceeds the layer.
    on_device = layout.model_copy(update=dict.fromkeys(OFFLOADS, False) | {"offload_modules": NO_MODULES})
    costs = layout_costs(problem, LayoutColumns.of([on_device])).at(0)
    bubble_fraction = 0.0
    for term in used:
        if term.scaled is None:
            report = simulate(problem, plan)
            # In seconds it could exceed the step that the other terms leave.
            bubble_fraction = report.breakdown_s["bubble"] / report.step_time_s
        else:
            costs = term.scaled(problem, layout, costs, times)
    if layout.offloads:
        moved = _with_slower_host(problem, times) if BY_NAME[HOST_TRAFFIC] in used else problem
        costs = offloaded(moved, LayoutColumns.of([layout]), costs)
    step_s = plan_step_ns(problem, plan, costs) / NS_PER_S
    return step_s * (1 + (times - 1) * bubble_fraction)


def _communication(exposed: Part, hidden: Part | None = None) -> Scale:
    """Scale communication of layers and ends: exposed time is multiplied; of doubled time no further part is
    hidden."""

    def change(parts: IntArray, times: int) -> IntArray:
        """Compute the change of [..., Part, Phase]."""
        added = (times - 1) * parts[..., exposed, :]
        return added + parts[..., hidden, :] if hidden is not None and times > 1 else added

    def scaled(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
        parts, duration = costs.parts, np.maximum(costs.duration_ns + change(costs.parts.layer, times), 0)
        # Pairs hide only what they hide now: added time is exposed there, too, and removed time was hidden, unless
        # a pair is then longer than the layer.
        return replace(
            costs,
            duration_ns=duration,
            paired_ns=_paired(costs, duration, np.maximum(_added(costs, duration), 0)),
            embedding_ns=np.maximum(costs.embedding_ns + change(parts.embedding, times), 0),
            head_ns=np.maximum(costs.head_ns + change(parts.head, times), 0),
        )

    return scaled


def _added(costs: LayoutCosts, duration: IntArray) -> IntArray:
    """Compute the change of a layer's forward and backward, [K, 2], for other durations [K, Phase]."""
    return np.asarray(duration[:, : Phase.BACKWARD + 1] - costs.duration_ns[:, : Phase.BACKWARD + 1])


def _paired(costs: LayoutCosts, duration: IntArray, added: IntArray) -> IntArray:
    """Add to ``LayoutCosts.paired_ns``, clipped between zero and the durations of layers alone."""
    if not costs.runs_pairs:
        return costs.paired_ns
    return np.asarray(np.clip(costs.paired_ns + added, 0, duration[:, : Phase.BACKWARD + 1]))


def _compute(without: Callable[[Problem, LayerRun], tuple[Problem, LayerRun]]) -> Scale:
    """Scale compute of layers: the difference from the problem and layer that ``without`` returns."""

    def scaled(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
        columns = LayoutColumns.of([layout])
        own = np.zeros_like(costs.duration_ns)
        for row, kind in enumerate(problem.model.kinds):
            whole = layer_seconds(problem, kind, columns)[Part.COMPUTE, :, 0]
            rest = layer_seconds(*without(problem, kind), columns)[Part.COMPUTE, :, 0]
            own[row] = np.rint((whole - rest) * NS_PER_S).astype(np.int64)
        duration = np.maximum(costs.duration_ns + (times - 1) * own, 0)
        return replace(costs, duration_ns=duration, paired_ns=_paired(costs, duration, _added(costs, duration)))

    return scaled


def _without_experts(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Reduce the layer to its shared experts, or to an MLP with one neuron, the smallest MLP."""
    if not isinstance(kind.mlp, MixtureOfExperts):
        return problem, kind
    width, gated = kind.mlp.shared_intermediate_size or 1, kind.mlp.gated
    return problem, kind.model_copy(update={"mlp": DenseMlp(intermediate_size=width, gated=gated)})


def _windows(problem: Problem, plan: Plan) -> bool:
    """Test whether queries of some layers attend to a part of the sequence."""
    sizes = (getattr(kind.attention, "sliding_window", None) for kind in problem.model.kinds)
    return any(size is not None and size < problem.job.sequence_length for size in sizes)


def _without_windows(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Reduce the windows of a layer to a single key."""
    if getattr(kind.attention, "sliding_window", None) is None:
        return problem, kind
    other = {"chunked": False} if isinstance(kind.attention, GroupedQueryAttention) else {}
    attention = kind.attention.model_copy(update={"sliding_window": 1, **other})
    return problem, kind.model_copy(update={"attention": attention})


def _without_indexer(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Reduce an indexer to a single score a key, and its selection, or all compressed keys, to a single key."""
    attention = kind.attention
    if isinstance(attention, CompressedAttention) and attention.compress_rate is not None:
        few: dict[str, object] = {"compress_rate": problem.job.sequence_length}
        if attention.indexer is not None:
            few["indexer"] = Indexer(index_n_heads=1, index_head_dim=1, index_topk=1)
        return problem, kind.model_copy(update={"attention": attention.model_copy(update=few)})
    if isinstance(attention, GroupedQueryAttention) and attention.blocks is not None:
        least = dict.fromkeys(type(attention.blocks).model_fields, 1)
        one = attention.model_copy(update={"blocks": type(attention.blocks)(**least)})
        return problem, kind.model_copy(update={"attention": one})
    if not isinstance(attention, LatentAttention) or attention.indexer is None:
        return problem, kind
    smallest = Indexer(index_n_heads=1, index_head_dim=1, index_topk=1, sharing=attention.indexer.sharing)
    return problem, kind.model_copy(update={"attention": attention.model_copy(update={"indexer": smallest})})


def _without_streams(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Reduce the residual to a single stream."""
    model = problem.model.model_copy(update={"residual_streams": 1})
    return problem.model_copy(update={"model": model}), kind


def _vision(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    """Multiply the time of the encoder of images beyond that of the embedding."""
    text = problem.job.model_copy(update={"vision_tokens": 0, "image_tokens": None, "images": None})
    alone = layout_costs(problem.model_copy(update={"job": text}), LayoutColumns.of([layout])).at(0)
    encoder = costs.embedding_ns - alone.embedding_ns
    return replace(costs, embedding_ns=costs.embedding_ns + (times - 1) * encoder)


def _head(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    """Multiply the time of the head."""
    return replace(costs, head_ns=times * costs.head_ns)


def _recurs(problem: Problem, plan: Plan) -> bool:
    """Test whether some layers have a linear recurrence."""
    return any(isinstance(kind.attention, LinearRecurrence) for kind in problem.model.kinds)


def _without_recurrence(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Reduce a linear recurrence to the smallest."""
    if not isinstance(kind.attention, LinearRecurrence):
        return problem, kind
    small = dict.fromkeys(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), 1)
    return problem, kind.model_copy(update={"attention": kind.attention.model_copy(update=small)})


def _without_fp8(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Make quantized products take only as long as their memory traffic."""
    gpu, name = problem.hardware.accelerator, problem.job.quantization.engine
    engine: Precision = getattr(gpu, name)
    fast = engine.model_copy(update={"peak_flops_per_s": engine.peak_flops_per_s * BEYOND_ANY_RATE})
    hardware = problem.hardware.model_copy(update={"accelerator": gpu.model_copy(update={name: fast})})
    return problem.model_copy(update={"hardware": hardware}), kind


def _without_adapters(problem: Problem, kind: LayerRun) -> tuple[Problem, LayerRun]:
    """Leave the adapters of frozen layers out."""
    lora = problem.job.lora
    if lora is None:
        return problem, kind
    job = problem.job.model_copy(update={"lora": lora.model_copy(update={"modules": ()})})
    return problem.model_copy(update={"job": job}), kind


def _mtp_layers(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    """Scale layers of multi-token prediction: the difference of the head with and without them."""
    job = problem.job.model_copy(update={"mtp_layers": 0})
    bare = layout_costs(problem.model_copy(update={"job": job}), LayoutColumns.of([layout])).at(0)
    return replace(costs, head_ns=costs.head_ns + (times - 1) * (costs.head_ns - bare.head_ns))


def _beside(**changes: object) -> Scale:
    """Scale what fields of a job add to layers and ends: the difference from the job with ``changes``."""

    def scaled(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
        job = problem.job.model_copy(update=changes)
        bare = layout_costs(problem.model_copy(update={"job": job}), LayoutColumns.of([layout])).at(0)
        names = ("duration_ns", "edge_ns", "paired_ns", "embedding_ns", "head_ns")
        pairs = {name: (getattr(costs, name), getattr(bare, name)) for name in names}
        return replace(costs, **{name: own + (times - 1) * (own - other) for name, (own, other) in pairs.items()})

    return scaled


def _muon(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    """Scale Muon's update: its difference from that of Adam."""
    job = problem.job.model_copy(update={"optimizer": "adam"})
    bare = layout_costs(problem.model_copy(update={"job": job}), LayoutColumns.of([layout])).at(0)
    added = (times - 1) * (costs.optimizer_ns - bare.optimizer_ns)
    barrier = costs.barrier_ns + (times - 1) * costs.whole_matrix_ns
    return replace(costs, optimizer_ns=costs.optimizer_ns + added, barrier_ns=barrier)


def _recomputation(phase: Phase) -> Scale:
    def scaled(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
        duration = costs.duration_ns.copy()
        duration[:, phase] *= times
        return replace(costs, duration_ns=duration)

    return scaled


def _with_slower_host(problem: Problem, times: int) -> Problem:
    """Multiply the time of transfers from and to the host."""
    host = problem.hardware.host_memory
    assert host is not None
    rate = host.bandwidth_bytes_per_s * (BEYOND_ANY_RATE if times == 0 else 1 / times)
    other = host.model_copy(update={"bandwidth_bytes_per_s": rate})
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"host_memory": other})})


def _pairs(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    """Scale communication that pairs leave exposed: at zero they hide all of it, doubled they hide nothing."""
    if times:
        return replace(costs, paired_ns=costs.duration_ns[:, : Phase.BACKWARD + 1])
    compute = costs.parts.layer[:, Part.COMPUTE, : Phase.BACKWARD + 1]
    return replace(costs, paired_ns=np.minimum(compute, costs.paired_ns))


def _as_it_is(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    return costs


def _reductions(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    return replace(costs, reduce_ns=times * costs.reduce_ns)


def _gathers(problem: Problem, layout: Layout, costs: LayoutCosts, times: int) -> LayoutCosts:
    return replace(costs, gather_ns=times * costs.gather_ns)


def _across(problem: Problem, size: int, stride: int) -> bool:
    """Test whether a group of ranks leaves its scale-up domain."""
    return size > 1 and int(members_per_domain(problem.hardware, size, stride)) < size


def _tp_across(problem: Problem, plan: Plan) -> bool:
    return _across(problem, plan.layout.tp, 1)


def _ep_across(problem: Problem, plan: Plan) -> bool:
    layout = plan.layout
    return _across(problem, layout.ep, layout.etp) or _across(problem, layout.etp, 1)


def _replicas_across(problem: Problem, plan: Plan) -> bool:
    layout = plan.layout
    return _across(problem, layout.cp * layout.dp, layout.tp)


def _reduces_once(plan: Plan) -> bool:
    return plan.layout.cp * plan.layout.dp > 1 and plan.layout.zero_stage <= 1


def _splits(plan: Plan) -> bool:
    return plan.layout.schedule in SPLIT_SCHEDULES


def _sharded(plan: Plan, *stages: int) -> bool:
    return plan.layout.cp * plan.layout.dp > 1 and plan.layout.zero_stage in stages


TERMS: Final = (
    Term(
        "tensor_parallel_inside",
        "tensor parallelism inside a domain",
        lambda problem, plan: plan.layout.tp > 1 and not _tp_across(problem, plan),
        _communication(Part.TP, Part.TP_HIDDEN),
    ),
    Term(
        "tensor_parallel_across",
        "tensor parallelism across domains",
        _tp_across,
        _communication(Part.TP, Part.TP_HIDDEN),
    ),
    Term(
        "context_parallel",
        "the ring of context parallelism",
        lambda problem, plan: plan.layout.cp > plan.layout.ulysses,
        _communication(Part.CP, Part.CP_HIDDEN),
    ),
    Term(
        "ulysses",
        "all-to-alls of heads in context parallelism",
        lambda problem, plan: plan.layout.ulysses > 1,
        _communication(Part.CP, Part.CP_HIDDEN),
    ),
    Term(
        "expert_dispatch_inside",
        "expert dispatch inside a domain",
        lambda problem, plan: plan.layout.ep * plan.layout.etp > 1 and not _ep_across(problem, plan),
        _communication(Part.EP),
    ),
    Term("expert_dispatch_across", "expert dispatch across domains", _ep_across, _communication(Part.EP)),
    Term(
        "experts",
        "routing and products of experts",
        lambda problem, plan: problem.model.has_experts,
        _compute(_without_experts),
    ),
    Term(
        "attention_windows",
        "attention in windows or chunks of the sequence",
        _windows,
        _compute(_without_windows),
    ),
    Term(
        "sparse_attention",
        "attention to keys that an indexer selects, or to compressed keys",
        lambda problem, plan: problem.model.has_indexers,
        _compute(_without_indexer),
    ),
    Term(
        "residual_streams",
        "hyper-connections of several residual streams",
        lambda problem, plan: problem.model.residual_streams > 1,
        _compute(_without_streams),
    ),
    Term(
        "linear_recurrences",
        "linear recurrences (gated delta net, KDA, Mamba-2, lightning attention)",
        _recurs,
        _compute(_without_recurrence),
    ),
    Term(
        "head_of_scores",
        "a head of scores instead of the vocabulary (classes, reward, value)",
        lambda problem, plan: problem.model.num_labels is not None,
        _head,
    ),
    Term(
        "vision_encoder",
        "a vision encoder on the first stage",
        lambda problem, plan: problem.job.has_images,
        _vision,
    ),
    Term(
        "fp8_products",
        "8-bit products",
        lambda problem, plan: problem.job.quantization.engine == "fp8",
        _compute(_without_fp8),
    ),
    Term(
        "block_scales",
        "products with a scale a block of values, in 8 or 4 bits",
        lambda problem, plan: problem.job.precision in ("fp8-blockwise", "mxfp8", "nvfp4"),
        _compute(_without_fp8),
    ),
    Term(
        "frozen_weights",
        "LoRA adapters or frozen parts",
        lambda problem, plan: bool(problem.job.frozen_text),
        _compute(_without_adapters),
    ),
    Term(
        "mtp_layers",
        "layers of multi-token prediction",
        lambda problem, plan: problem.job.mtp_layers > 0,
        _mtp_layers,
    ),
    Term(
        "reference_forwards",
        "forwards of a frozen reference or of the policy before its update",
        lambda problem, plan: problem.job.further_forwards > 0,
        _beside(alignment=None),
    ),
    Term(
        "expert_imbalance",
        "an imbalance of experts",
        lambda problem, plan: min(problem.job.expert_imbalance, plan.layout.ep) > 1,
        _beside(expert_imbalance=1.0),
    ),
    Term(
        "muon",
        "the update of Muon",
        lambda problem, plan: problem.job.optimizer == "muon",
        _muon,
    ),
    Term(
        "zero_2",
        "ZeRO 2 in every micro-batch",
        lambda problem, plan: _sharded(plan, 2),
        _communication(Part.ZERO, Part.ZERO_HIDDEN),
    ),
    Term(
        "zero_3",
        "ZeRO 3 in every micro-batch",
        lambda problem, plan: _sharded(plan, 3),
        _communication(Part.ZERO, Part.ZERO_HIDDEN),
    ),
    Term(
        "selective_recompute",
        "selective recomputation",
        lambda problem, plan: plan.selects and plan.layout.recompute_modules == NO_MODULES,
        _recomputation(Phase.SELECTIVE),
    ),
    Term(
        "recompute_modules",
        "recomputation of named modules",
        lambda problem, plan: plan.selects and plan.layout.recompute_modules != NO_MODULES,
        _recomputation(Phase.SELECTIVE),
    ),
    Term(
        "full_recompute",
        "full recomputation",
        lambda problem, plan: any(stage.recompute.full for stage in plan.virtual_stages),
        _recomputation(Phase.FULL),
    ),
    Term(
        "gradient_reduction_inside",
        "gradient reduction inside a domain",
        lambda problem, plan: _reduces_once(plan) and not _replicas_across(problem, plan),
        _reductions,
    ),
    Term(
        "gradient_reduction_across",
        "gradient reduction across domains",
        lambda problem, plan: _reduces_once(plan) and _replicas_across(problem, plan),
        _reductions,
    ),
    Term(
        "parameter_gather",
        "parameter gather once a step (ZeRO 1 or 2)",
        lambda problem, plan: _sharded(plan, 1, 2),
        _gathers,
    ),
    Term(
        "hybrid_sharding",
        "states sharded within groups of replicas (hybrid sharding)",
        lambda problem, plan: plan.layout.dp_replicate > 1,
        _as_it_is,
    ),
    Term("kept_weights", "weights kept until the backward", lambda p, plan: plan.layout.keep_weights, _as_it_is),
    Term(
        "pipeline",
        "pipeline bubble and transfers",
        lambda problem, plan: plan.layout.pp > 1 and plan.layout.vpp == 1 and not _splits(plan),
    ),
    Term(
        "interleaved_pipeline",
        "bubble and transfers of an interleaved pipeline",
        lambda problem, plan: plan.layout.vpp > 1 and not _splits(plan),
    ),
    Term(
        "zero_bubble_pipeline",
        "bubble and transfers of a pipeline with weight gradients apart",
        lambda problem, plan: _splits(plan),
    ),
    Term(
        "paired_layers",
        "communication that pairs of a forward and a backward do not hide",
        lambda problem, plan: plan.layout.schedule in PAIRED_SCHEDULES,
        _pairs,
    ),
    Term(
        HOST_TRAFFIC,
        "transfers of what is offloaded to the host",
        lambda problem, plan: plan.layout.offloads,
        _as_it_is,
    ),
    Term(
        "several_node_types",
        "stages or replicas on several types of accelerators",
        lambda problem, plan: bool(problem.other_hardware),
        _as_it_is,
    ),
)
"""Terms of the cost model. Recomputation follows the work that it replays, so that both together scale in order.
Plans on several node types are not ablated (``milpplan.validation.evidence``)."""
BY_NAME: Final = {term.name: term for term in TERMS}
