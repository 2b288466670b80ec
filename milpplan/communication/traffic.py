"""The traffic of a step: bytes between pairs of GPUs, by network tier and over time.

The matrix is the sum of the edges of every collective (``wires``) on every group of ranks; its total equals the
collectives' wire bytes in closed form. Over time each message is spread evenly over the work item that it belongs
to. In a cluster of several node types every rank sends the messages of its own type, and a domain holds a single
type.

If weight gradients are work items of their own, their messages are spread over the item of the input gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from milpplan.communication.records import (
    ALL_TYPES,
    Bandwidth,
    Links,
    NodeBlock,
    Pairs,
    Places,
    Tier,
    TrafficReport,
    TrafficTimeline,
    Utilisation,
    pairs_of,
    places_of,
    rank_lists,
)
from milpplan.communication.wires import (
    ALGORITHMS,
    PARALLELISMS,
    Algorithm,
    Groups,
    Message,
    Parallelism,
    Transport,
    Wires,
    Wiring,
    end_messages,
    gathered_bytes,
    layer_messages,
    replayed_messages,
    state_messages,
    tied_bytes,
    transfer_bytes,
)
from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec, Layout, Plan, Problem, VirtualStage
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    IntArray,
    LayoutColumns,
    LocalParameters,
    simulate,
    states,
    step_overhead_ns,
)
from milpplan.simulation.layers import copied_embedding, embedding_endpoint, head_endpoint
from milpplan.simulation.mixed_costs import across
from milpplan.simulation.network import collectives
from milpplan.simulation.network.collectives import Operation
from milpplan.simulation.pipeline.lanes import PipelineRun, pipeline_runs
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.units import NS_PER_S


class When(IntEnum):
    """Phase of a step in which a message is sent."""

    FORWARD = 0
    """In the forward of every micro-batch."""
    BACKWARD = 1
    """In the backward of every micro-batch."""
    GATHER = 2
    """Once a step, with the parameter gathers."""
    REDUCE = 3
    """Once a step, with the gradient reductions."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Calls of a collective on a family of groups."""

    parallelism: Parallelism
    operation: Transport
    group: Groups
    copies: float | None
    """As in ``Message``."""
    message_bytes: FloatArray
    """[J, When] bytes of message that every group of a virtual stage moves."""


_Key = tuple[Parallelism, Transport, Groups, float | None]


def flows(problem: Problem, plan: Plan) -> list[Flow]:
    """Collect the messages of every virtual stage of a plan, without the transfers between stages."""
    columns = LayoutColumns.of([plan.layout])
    kinds, forwards = problem.model.kinds, 1 + problem.job.further_forwards
    layers = [layer_messages(problem, kind, columns) for kind in kinds]
    replays = [replayed_messages(problem, kind, columns) for kind in kinds]
    of_states = [
        state_messages(problem, columns, states.local_layer_parameters(problem, kind, columns)) for kind in kinds
    ]
    total: dict[_Key, FloatArray] = defaultdict(lambda: np.zeros((plan.layout.num_virtual_stages, 4)))
    for number, stage in enumerate(plan.virtual_stages):
        counts = zip(*_counts(problem, stage), strict=True)
        for kind, (count, wholly, selectively) in enumerate(counts):
            _add(total, number, layers[kind], (forwards * count, count, 0, 0))
            # A full recomputation repeats the forward's messages within the backward.
            _add(
                total,
                number,
                [message._replace(backward=message.forward) for message in layers[kind]],
                (0, wholly, 0, 0),
            )
            _add(total, number, replays[kind], (0, selectively, 0, 0))
            per_micro_batch, per_step = of_states[kind]
            _add(total, number, per_micro_batch, (forwards * count, count, 0, 0))
            _add(total, number, per_step, (0, 0, count, count))
    for number, is_head in ((0, False), (plan.layout.num_virtual_stages - 1, True)):
        _add(total, number, end_messages(problem, is_head, columns), (forwards, 1, 0, 0))
        _add(total, number, _end_states(problem, columns, is_head), (0, 0, 1, 1))
    return [Flow(*key, value) for key, value in total.items() if value.any()]


def _counts(problem: Problem, stage: VirtualStage) -> tuple[list[int], list[int], list[int]]:
    """Count the layers of each kind of a virtual stage: all, recomputed wholly, and recomputed selectively."""
    layers = np.array(problem.model.layer_kinds[stage.layers[0] : stage.layers[1]], dtype=np.int64)
    size, full = len(problem.model.kinds), stage.recompute.full
    parts = layers, layers[:full], layers[full : full + stage.recompute.selective]
    every, wholly, selectively = (np.bincount(part, minlength=size).tolist() for part in parts)
    return every, wholly, selectively


def _add(total: dict[_Key, FloatArray], stage: int, sent: list[Message], times: tuple[int, ...]) -> None:
    """Add messages of a virtual stage.

    ``times`` multiplies the forward and backward counts of each message, first per micro-batch, then per step.
    """
    for message in sent:
        calls = np.array([message.forward[0], message.backward[0]] * 2) * np.array(times)
        key = message.parallelism, message.operation, message.group, message.copies
        total[key][stage] += calls * message.num_bytes[0]


def _end_states(problem: Problem, columns: LayoutColumns, is_head: bool) -> list[Message]:
    """List the messages of the states of the embedding, or of the head, once a step."""
    end = (head_endpoint if is_head else embedding_endpoint)(problem, columns)
    copied: FloatArray | float = 0.0
    if is_head:
        copied = copied_embedding(problem, columns)
    local = LocalParameters.end(problem, end, columns.tp, copied)
    _, per_step = state_messages(problem, columns, local, is_end=True)
    if is_head and problem.job.mtp_layers:
        mtp = states.local_mtp_parameters(problem, columns)
        per_step = per_step + state_messages(problem, columns, mtp, is_end=True)[1] * problem.job.mtp_layers
    return per_step


DEFAULT_BINS = 200


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Bytes of the messages of a pipeline; the last axis is the tier (inside, between)."""

    items: FloatArray
    """[J, When, 2] messages of a virtual stage, per micro-batch or per step."""
    hops: FloatArray
    """[2, J - 1, 2] a transfer between a virtual stage and the next: activations, gradients."""
    norm: FloatArray
    """[2] the norm of the gradients."""

    @staticmethod
    def nothing(num_stages: int) -> StageTraffic:
        """Start with no bytes."""
        return StageTraffic(np.zeros((num_stages, 4, 2)), np.zeros((2, max(num_stages - 1, 0), 2)), np.zeros(2))


def timeline_of(
    problem: Problem, sent: Sequence[tuple[PipelineRun, StageTraffic]], num_bins: int
) -> TrafficTimeline:
    """Count the bytes of all pipelines in bins of equal length from the start of the step to its end."""
    intervals = [part for run, traffic in sent for part in _intervals(problem, run, traffic)]
    starts = np.concatenate([start.ravel() for start, _, _ in intervals])
    ends = np.concatenate([end.ravel() for _, end, _ in intervals])
    sizes = np.concatenate(
        [np.broadcast_to(size, (*start.shape, 2)).reshape(-1, 2) for start, _, size in intervals]
    )
    edges = np.linspace(0, sent[0][0].timeline.step_time_ns, num_bins + 1)
    inside, between = (spread(starts, ends, sizes[:, tier], edges) for tier in range(2))
    return TrafficTimeline(edges / NS_PER_S, inside, between)


def _intervals(
    problem: Problem, run: PipelineRun, sent: StageTraffic
) -> list[tuple[IntArray, IntArray, FloatArray]]:
    """List (start, end, bytes by tier) of all messages of a pipeline."""
    timeline, terms = run.timeline, run.terms
    overhead = step_overhead_ns(problem)
    norm_end = np.array([timeline.optimizer_start_ns - overhead])
    borders = np.array([run.costs.crossing_ns(stage) for stage in range(sent.hops.shape[1])], dtype=np.int64)
    transfer = (int(run.costs.transfer_ns) + borders)[:, None]
    return [
        (timeline.forward_start_ns, timeline.forward_end_ns, sent.items[:, None, When.FORWARD]),
        (timeline.backward_start_ns, timeline.backward_end_ns, sent.items[:, None, When.BACKWARD]),
        (timeline.gather_end_ns - terms[Term.GATHER], timeline.gather_end_ns, sent.items[:, When.GATHER]),
        (timeline.reduce_end_ns - terms[Term.REDUCE], timeline.reduce_end_ns, sent.items[:, When.REDUCE]),
        (timeline.forward_end_ns[:-1], timeline.forward_end_ns[:-1] + transfer, sent.hops[0, :, None]),
        (timeline.backward_end_ns[1:], timeline.backward_end_ns[1:] + transfer, sent.hops[1, :, None]),
        (norm_end - (int(run.costs.barrier_ns) - overhead), norm_end, sent.norm[None]),
    ]


def spread(starts: IntArray, ends: IntArray, num_bytes: FloatArray, edges: FloatArray) -> FloatArray:
    """Count the bytes in each bin between ``edges``; every interval carries its bytes evenly.

    Bytes outside the edges belong to the first or the last bin. An interval of length 0 belongs to the bin of its
    start.
    """
    last = len(edges) - 2
    bins = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, last)
    is_instant = ends <= starts
    binned = np.bincount(bins[is_instant], num_bytes[is_instant], minlength=last + 1).astype(np.float64)
    starts, ends, num_bytes = starts[~is_instant], ends[~is_instant], num_bytes[~is_instant]
    if not len(starts):
        return binned
    times = np.concatenate([starts, ends]).astype(np.float64)
    rates = num_bytes / (ends - starts)
    order = np.argsort(times, kind="stable")
    times, changes = times[order], np.concatenate([rates, -rates])[order]
    passed = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(times))])
    at_edges = np.interp(edges, times, passed)
    at_edges[0], at_edges[-1] = 0.0, num_bytes.sum()
    return np.asarray(binned + np.maximum(np.diff(at_edges), 0.0))


MESSAGE_BYTES = tuple(float(2**power) for power in range(14, 33, 2))
"""16 KiB to 4 GiB."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def cluster_bandwidths(problem: Problem, layout: Layout, blocks: tuple[NodeBlock, ...]) -> tuple[Bandwidth, ...]:
    """Tabulate the bandwidths of every node type among its own GPUs.

    With heterogeneous replicas also among the GPUs of all types, at the speed of the slowest type.
    """
    bandwidths: list[Bandwidth] = []
    for block in blocks:
        bandwidths += effective_bandwidths([problem.node_types[block.node_type]], block.num_gpus, block.name)
    if layout.replica_micro_batches:
        types = [across(problem, block.node_type) for block in blocks]
        bandwidths += effective_bandwidths(types, layout.num_gpus, ALL_TYPES)
    return tuple(bandwidths)


def effective_bandwidths(hardware: Sequence[HardwareSpec], num_gpus: int, nodes: str) -> list[Bandwidth]:
    """Tabulate the bandwidths of all operations among 2, 4, 8, ... GPUs.

    The GPUs are neighbours, or there is one in each domain (each pod). With several types of hardware the slowest
    type counts.
    """
    sizes = [2**power for power in range(1, num_gpus.bit_length()) if 2**power <= num_gpus]
    domain = max(spec.scale_up.num_gpus for spec in hardware)
    strides = [1, domain, *(spec.pods.num_gpus for spec in hardware if spec.pods is not None)]
    shapes = [(size, stride) for stride in strides for size in sizes if size * stride <= max(num_gpus, domain)]
    shapes = list(dict.fromkeys(shapes))
    bandwidths = []
    for operation in OPERATIONS:
        for size, stride in shapes:
            message = np.array(MESSAGE_BYTES)
            seconds = np.maximum.reduce(
                [collective_s(spec, operation, message, size, stride) for spec in hardware]
            )
            moved = collectives.wire_factor(operation, np.array(size)) * message
            members = min(int(collectives.members_per_domain(spec, size, stride)) for spec in hardware)
            tier: Tier = "inside" if members == size else "between"
            apart = "one a pod" if stride > domain else "one a domain"
            where = tier if stride == 1 else apart
            bandwidths += [
                Bandwidth(operation, size, stride, tier, float(m), float(s), float(b / s), nodes, where)
                for m, s, b in zip(message, seconds, moved, strict=True)
            ]
    return bandwidths


def collective_s(
    hardware: HardwareSpec, operation: Operation, num_bytes: FloatArray, size: int, stride: int
) -> FloatArray:
    """Time a collective by its name, in seconds."""
    if operation == "all_to_all":
        return collectives.all_to_all_s(hardware, num_bytes, size, stride)
    by_name = {
        "all_reduce": collectives.all_reduce_s,
        "all_gather": collectives.all_gather_s,
        "reduce_scatter": collectives.reduce_scatter_s,
    }
    return by_name[operation](hardware, num_bytes, size, stride)


OVER_REPLICAS = frozenset(
    ("replicas", "expert_replicas", "replica_shards", "expert_shards", "replica_copies", "expert_copies")
)
"""Groups with ranks in several replicas."""


@dataclass(frozen=True, slots=True, eq=False)
class _SendingPart:
    """Part of the cluster that sends the same messages."""

    run: PipelineRun
    """Pipeline of these GPUs."""
    node_type: int | None
    """Node type of these GPUs; None: all types."""
    problem: Problem
    """Problem as these GPUs see it."""
    whole: StageTraffic
    """Bytes of the messages of the whole pipeline, on all its node types."""


def traffic(
    problem: Problem, plan: Plan, algorithm: Algorithm = "ring", num_bins: int = DEFAULT_BINS
) -> TrafficReport:
    """Compute the traffic of a step of a plan.

    Args:
        problem: model, cluster and job.
        plan: layout and virtual stages.
        algorithm: algorithm of the collectives. ``tree`` applies to all-reduces (two binary trees over the
        domains,
            a chain inside), ``hierarchical`` to groups with equally many ranks in each of their domains; all other
            collectives are rings. Reductions in the network are not in the matrix: their other end is a switch.
        num_bins: bins of the timeline.

    Raises:
        IllegalPlanError: the plan cannot run.
        InvalidInputError: the plan's messages are not supported, the algorithm is unknown, there is no bin, or
        there
            are more pairs than memory holds.
    """
    if algorithm not in ALGORITHMS or num_bins < 1:
        raise InvalidInputError(
            f"algorithm={algorithm!r}, num_bins={num_bins}.",
            f"Expected one of {', '.join(ALGORITHMS)}, and at least one bin.",
            "Correct the argument.",
        )
    report = simulate(problem, plan)
    num_gpus = plan.layout.num_gpus
    places = places_of(problem, plan.layout)
    senders = _sending_parts(problem, plan)
    wires = Wires(places, algorithm, tuple(_groups(part.problem, plan) for part in senders))
    for part in senders:
        _within_stages(wires, part)
    _between_stages(wires, problem, plan, senders)
    pairs = wires.pairs()
    everything = pairs_of(
        np.concatenate([wires.key(part.sender, part.receiver) for part in pairs.values()]),
        np.concatenate([part.num_bytes for part in pairs.values()]),
        num_gpus,
    )
    comm = {name: value for name, value in report.breakdown_s.items() if name.endswith("_exposed")}
    sent = {id(part.run): (part.run, part.whole) for part in senders}
    return TrafficReport(
        algorithm=algorithm,
        num_gpus=num_gpus,
        gpus_per_domain=max(block.gpus_per_domain for block in places.blocks),
        gpus_per_node=max(block.gpus_per_node for block in places.blocks),
        blocks=places.blocks,
        step_time_s=report.step_time_s,
        pairs=pairs,
        wire_bytes={name: float(wires.closed[name]) for name in PARALLELISMS},
        tier_bytes={name: _tier_bytes(part, places) for name, part in pairs.items()},
        rail_change_bytes=_rail_change_bytes(everything, places),
        pod_change_bytes=_pod_change_bytes(problem, everything),
        type_bytes=everything.matrix(len(problem.node_types), places.node_type),
        gpu_links=links_of(everything, places, np.arange(num_gpus)),
        node_links=links_of(everything, places, places.node),
        timeline=timeline_of(problem, list(sent.values()), num_bins),
        utilisation=_utilisation(report.step_time_s, [stage.breakdown_s for stage in report.stages], comm),
        exposed_s=comm | {"gradient_norm": report.breakdown_s["grad_norm"]},
        hidden_s=dict(report.hidden_s),
        bandwidths=cluster_bandwidths(problem, plan.layout, places.blocks),
    )


def _sending_parts(problem: Problem, plan: Plan) -> list[_SendingPart]:
    """List the parts of the cluster that send different messages, by node type."""
    runs = pipeline_runs(problem, plan)
    whole = [StageTraffic.nothing(plan.layout.num_virtual_stages) for _ in runs]
    if plan.layout.replica_micro_batches:
        return [
            _SendingPart(run, run.node_type, run.problem, traffic)
            for run, traffic in zip(runs, whole, strict=True)
        ]
    if not problem.other_hardware:
        return [_SendingPart(runs[0], None, problem, whole[0])]
    types = range(len(problem.node_types))
    return [_SendingPart(runs[0], number, problem.on_type(number), whole[0]) for number in types]


def _groups(problem: Problem, plan: Plan) -> dict[str, IntArray]:
    """List the ranks of every group of a plan, with states sharded as its layout says."""
    layout = plan.layout
    columns = LayoutColumns.of([layout])
    shards, expert_shards = (
        int(states.num_shards(columns, count)[0]) for count in (columns.cp * columns.dp, columns.expert_dp)
    )
    groups = rank_lists(layout, shards, expert_shards)
    stages = groups["stage"]
    groups["pair"] = np.sort(np.stack([stages[0, 0], stages[-1, 0]], axis=-1), axis=-1)[None]
    groups["everyone"] = np.arange(layout.num_gpus)[None, None]
    return groups


def _within_stages(wires: Wires, part: _SendingPart) -> None:
    """Send the messages of the virtual stages, and add their bytes by tier and phase to those of the pipeline.

    Heterogeneous replicas send their common messages once, with the first node type.
    """
    layout = part.run.plan.layout
    rank_of = np.array(layout.stage_ranks)
    calls = np.array([layout.num_micro_batches, layout.num_micro_batches, 1, 1])
    different = part.run.node_type is not None
    for flow in flows(part.problem, part.run.plan):
        shared = different and flow.group in OVER_REPLICAS
        if shared and part.run.node_type:
            continue
        wiring = wires.wiring(flow.operation, flow.group, flow.copies, None if shared else part.node_type)
        step = np.bincount(rank_of, flow.message_bytes @ calls, minlength=layout.pp)
        wires.send(flow.parallelism, wiring, step.astype(np.float64))
        part.whole.items[:] += flow.message_bytes[:, :, None] * wires.tiers(wiring)[rank_of][:, None, :]


def _between_stages(wires: Wires, problem: Problem, plan: Plan, senders: list[_SendingPart]) -> None:
    """Send the messages between stages.

    They are activations, and in training also their gradients, the gradient of a tied embedding, and the norm of
    the gradients.
    """
    columns = LayoutColumns.of([plan.layout])
    if plan.layout.pp > 1:
        for part in {id(part.run): part for part in senders}.values():
            _transfers(wires, part)
    first = senders[0].whole
    if problem.inference:
        return
    tied = tied_bytes(problem, columns)
    if tied[0] > 0:
        wiring = wires.wiring("all_reduce", "pair")
        wires.send("tied_embedding", wiring, tied)
        # Both ends wait for it; half of its bytes is in the reduction of each end.
        first.items[[0, -1], 3] += wires.tiers(wiring)[0] * tied[0] / 2
    norm = wires.wiring("all_reduce", "everyone")
    wires.send("gradient_norm", norm, np.array([4.0]))
    first.norm[:] = wires.tiers(norm)[0] * 4.0


def _transfers(wires: Wires, part: _SendingPart) -> None:
    """Send the transfers between the stages of a pipeline, in all its replicas."""
    layout, job = part.run.plan.layout, part.problem.job
    message = float(transfer_bytes(part.problem, LayoutColumns.of([layout]))[0])
    rank_of, stage = np.array(layout.stage_ranks), wires.groups[0]["stage"][:, 0]
    if part.run.node_type is not None:
        stage = stage[wires.places.node_type[stage] == part.run.node_type].reshape(layout.pp, -1)
    # Where a V turns, both virtual stages are on the same rank and there is no transfer.
    moves = np.flatnonzero(rank_of[:-1] != rank_of[1:])
    hops = np.stack([rank_of[moves], rank_of[moves + 1]], axis=1)
    distinct, hop, counts = np.unique(hops, axis=0, return_inverse=True, return_counts=True)
    sender, receiver = (stage[distinct[:, end]] for end in range(2))
    number = np.repeat(np.arange(len(distinct)), sender.shape[1])
    each, ones = np.full(len(distinct), float(sender.shape[1])), np.ones(sender.size)
    step_bytes = np.asarray(counts * (message * layout.num_micro_batches))
    for direction in range(1 if part.problem.inference else 2):
        ends = (receiver, sender) if direction else (sender, receiver)
        wiring = Wiring(wires.key(*ends).ravel(), ones, number, each)
        # Activations of further forwards, unless they are part of the message.
        times = 1 if direction else (1 + job.further_forwards) // (1 + job.joined_forwards)
        wires.send("pp", wiring, times * step_bytes)
        part.whole.hops[direction, moves] = times * message * wires.tiers(wiring)[hop.reshape(-1)]
        for _ in range(times):
            _gathers(wires, part, rank_of[moves + (1 - direction)], part.whole.hops[direction], moves)


def _gathers(wires: Wires, part: _SendingPart, receivers: IntArray, hops: FloatArray, moves: IntArray) -> None:
    """Send the gathers that follow transfers in parts; add their bytes to ``hops`` [J - 1, 2]."""
    layout = part.run.plan.layout
    whole = float(gathered_bytes(part.problem, LayoutColumns.of([layout]))[0])
    if not whole:
        return
    wiring = wires.wiring("all_gather", "tensor", None, part.run.node_type)
    times = np.bincount(receivers, minlength=layout.pp) * (whole * layout.num_micro_batches)
    wires.send("pp", wiring, times.astype(np.float64))
    hops[moves] += whole * wires.tiers(wiring)[receivers]


def _tier_bytes(pairs: Pairs, places: Places) -> dict[Tier, float]:
    """Sum the bytes by tier."""
    inside, between = np.bincount(places.between(pairs.sender, pairs.receiver), pairs.num_bytes, minlength=2)
    return {"inside": float(inside), "between": float(between)}


def _rail_change_bytes(pairs: Pairs, places: Places) -> float:
    """Sum the bytes between domains whose GPUs have different positions in their domains."""
    between = places.between(pairs.sender, pairs.receiver)
    changes = places.place[pairs.sender] != places.place[pairs.receiver]
    return float((pairs.num_bytes * between * changes).sum())


def _pod_change_bytes(problem: Problem, pairs: Pairs) -> float:
    """Sum the bytes between pods; clusters of several node types have no pods."""
    pods = problem.hardware.pods
    if pods is None:
        return 0.0
    return float(pairs.num_bytes[pairs.sender // pods.num_gpus != pairs.receiver // pods.num_gpus].sum())


def links_of(pairs: Pairs, places: Places, place_of: IntArray) -> Links:
    """Sum the bytes over the links and over the network of every place (GPU or node).

    ``place_of`` [GPUs] numbers the places. Pairs inside a place do not use its links to other places.
    """
    count = int(place_of.max()) + 1
    sender, receiver = place_of[pairs.sender], place_of[pairs.receiver]
    between = places.between(pairs.sender, pairs.receiver).astype(np.bool_)
    inside = ~between & (sender != receiver)

    def summed(where: IntArray, chosen: BoolArray) -> FloatArray:
        return np.asarray(np.bincount(where[chosen], pairs.num_bytes[chosen], minlength=count), dtype=np.float64)

    return Links(
        summed(sender, inside), summed(receiver, inside), summed(sender, between), summed(receiver, between)
    )


def _utilisation(
    step_s: float, breakdowns: list[dict[str, float]], comm: dict[str, float]
) -> tuple[Utilisation, ...]:
    """Compute the utilisation of every pipeline rank from the breakdown of its step."""
    utilisations = []
    for parts in breakdowns:
        computing = parts["compute"] + parts["recompute"]
        inside = [name for name in comm if name not in ("param_gather_exposed", "grad_reduce_exposed")]
        busy = computing + parts["launch"] + sum(parts[name] for name in inside)
        utilisations.append(Utilisation(busy / step_s, computing / step_s))
    return tuple(utilisations)
