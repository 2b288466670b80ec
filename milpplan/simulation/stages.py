"""Costs of a virtual stage: sums of a layout's constants over the layers of the stage.

Every duration is affine in the number of layers of each kind and in the recompute counts. Therefore a critical
path is a valid row of the integer program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from milpplan.problem import Layout, Plan
from milpplan.simulation.layers import Phase
from milpplan.simulation.layout_columns import BoolArray, IntArray, ascending
from milpplan.simulation.layout_costs import LayoutCosts
from milpplan.simulation.mixed_costs import RankCosts
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.pipeline.work_orders import Kind

EMBEDDING, HEAD = -2, -1
"""Indices of embedding and head in the arrays that stack layer kinds, embedding and head."""
EDGES = (Term.LEAD, Term.TRAIL, Term.FIRST, Term.LAST)
"""Terms of the first and the last bucket of a stage. A bucket holds a single layer, however many layers the stage
has; in a stage without layers it holds the embedding or the head."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Costs of one virtual stage under several recompute choices (o options).

    If the constants are those of n layouts, every array has their axis last, and scalars are arrays [n].
    """

    full: IntArray
    """[o] layers that are recomputed wholly."""
    selective: IntArray
    """[o] layers that are recomputed selectively."""
    terms: IntArray
    """[Term, o] durations in nanoseconds."""
    state_bytes: IntArray
    """[3] (weights, gradients, optimizer states)."""
    kept_bytes: IntArray
    """[o] activations per live micro-batch."""
    deferred_bytes: IntArray
    """Bytes per micro-batch that waits for its weight gradients; they do not depend on recomputation."""
    transient_bytes: IntArray
    """[o] temporary bytes while a backward of this stage runs."""
    host_state_bytes: IntArray
    """States on the host."""
    host_kept_bytes: IntArray
    """[o] activations on the host per live micro-batch."""

    def take(self, rows: IntArray) -> StageOptions:
        """Select options."""
        return StageOptions(
            self.full[rows],
            self.selective[rows],
            self.terms[:, rows],
            self.state_bytes,
            self.kept_bytes[rows],
            self.deferred_bytes,
            self.transient_bytes[rows],
            self.host_state_bytes,
            self.host_kept_bytes[rows],
        )


def stage_options(
    costs: LayoutCosts,
    kinds: Sequence[int],
    full: IntArray,
    selective: IntArray,
    *,
    is_first: bool,
    is_last: bool,
    crossing_ns: int = 0,
) -> StageOptions:
    """Sum the costs of a virtual stage that holds layers of the given kinds, in order.

    Args:
        costs: constants of the stage's rank (``RankCosts.of_rank``), or of many layouts of one schedule.
        kinds: index of the kind of each layer of the stage; may be empty.
        full, selective: [o] recompute counts. The first ``full`` layers are recomputed wholly, the next
            ``selective`` layers selectively.
        is_first, is_last: True if the stage also holds the embedding, the head.
        crossing_ns: time of a transfer to the next stage beyond the shortest (``RankCosts.crossing_ns``).

    Returns:
        Nanoseconds and bytes of each of the o options.
    """
    layers = np.asarray(kinds, dtype=np.int64)
    duration = costs.duration_ns
    num_recomputed = full + selective
    # Layers of each kind among the first 0, 1, ... of the stage.
    counts = np.zeros((len(layers) + 1, len(duration)), dtype=np.int64)
    np.cumsum(layers[:, None] == np.arange(len(duration)), axis=0, out=counts[1:])
    wholly, selectively = counts[full], counts[num_recomputed] - counts[full]

    extra = wholly @ duration[:, Phase.FULL] + selectively @ duration[:, Phase.SELECTIVE]
    replayed = wholly @ costs.replayed_forward_ns[1] + selectively @ costs.replayed_forward_ns[0]
    dropped = wholly @ costs.dropped_full_bytes + selectively @ costs.dropped_selective_bytes
    first, last = layers[[0, -1]] if len(layers) else np.zeros(2, dtype=np.int64)
    held = HeldLayers(counts[-1], first, last, np.asarray(is_first), np.asarray(is_last))
    terms = recomputed_terms(costs, held, replayed, extra, crossing_ns)
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    ends_kept = costs.embedding_kept_bytes * is_first + costs.head_kept_bytes * is_last
    kept = counts[-1] @ costs.kept_bytes + ends_kept - dropped
    states = np.einsum("k,pk...->p...", counts[-1], costs.state_bytes[:, : len(duration)])
    return StageOptions(
        full,
        selective,
        terms,
        states + costs.state_bytes[:, ends].sum(axis=1),
        kept,
        counts[-1] @ costs.deferred_bytes + costs.head_deferred_bytes * is_last,
        _transient(costs, layers, full, num_recomputed, ends),
        counts[-1] @ costs.host_state_bytes[: len(duration)] + costs.host_state_bytes[ends].sum(axis=0),
        _host_kept(costs, layers, full, num_recomputed).sum(axis=1),
    )


def _host_kept(costs: LayoutCosts, layers: IntArray, full: IntArray, num_recomputed: IntArray) -> IntArray:
    """Size the activations of every layer on the host, in bytes [o, layers, ...]."""
    if not costs.host_kept_bytes.any():
        return np.zeros((len(full), 0, *costs.transfer_ns.shape), dtype=np.int64)
    index = np.arange(len(layers))
    mode = np.where(index < full[:, None], 2, np.where(index < num_recomputed[:, None], 1, 0))
    return np.asarray(costs.host_kept_bytes[mode, layers])


def _neighbours(pieces: IntArray) -> IntArray:
    """Find the maximum sum of two consecutive pieces [layers, ...]."""
    if len(pieces) < 2:
        return np.asarray(pieces.sum(axis=0))
    return np.asarray((pieces[1:] + pieces[:-1]).max(axis=0))


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """Layers of virtual stages, in arrays of any shape.

    ``counts`` [..., K]: layers of each kind. ``first``, ``last``: kinds of the first and the last layer; any kinds
    of a stage without layers. ``is_first``, ``is_last``: true where a stage also holds the embedding, the head.
    """

    counts: IntArray
    first: IntArray
    last: IntArray
    is_first: BoolArray
    is_last: BoolArray

    @staticmethod
    def of_splits(kinds: IntArray, splits: IntArray) -> HeldLayers:
        """Gather the layers of every virtual stage of splits [S, J]; ``kinds``: of the model's layers."""
        ends = splits.cumsum(axis=1)
        starts, stage = ends - splits, np.broadcast_to(np.arange(splits.shape[1]), splits.shape)
        before = np.zeros((len(kinds) + 1, int(kinds.max()) + 1), dtype=np.int64)
        np.cumsum(kinds[:, None] == np.arange(before.shape[1]), axis=0, out=before[1:])
        edges = kinds[np.minimum(starts, len(kinds) - 1)], kinds[np.maximum(ends - 1, 0)]
        return HeldLayers(before[ends] - before[starts], *edges, stage == 0, stage == splits.shape[1] - 1)


def recomputed_terms(
    costs: LayoutCosts, held: HeldLayers, forward_ns: IntArray, backward_ns: IntArray, crossing_ns: IntArray | int
) -> IntArray:
    """Sum the durations of virtual stages, [Term, ...].

    Args:
        costs: constants of their rank.
        held: their layers.
        forward_ns, backward_ns: [...] time that recomputation adds to a forward and a backward.
        crossing_ns: as for ``stage_options``.
    """
    fixed = _fixed_terms(costs, held)
    # Recompute choices of one stage are an axis of their own.
    fixed = fixed.reshape(len(Term), *(1,) * (backward_ns.ndim + 1 - fixed.ndim), *fixed.shape[1:])
    terms = np.broadcast_to(fixed, (len(Term), *backward_ns.shape)).copy()
    terms[Term.BACKWARD] += backward_ns
    if costs.runs_pairs:
        terms[Term.PAIRED_BACKWARD] += backward_ns
    terms[Term.FORWARD] += forward_ns
    # Communication that the compute beside an edge cannot hide lengthens the edge. With h the hidden fraction, R
    # the reduction, B the item that releases it, and LEAD and TRAIL as with h = 1: TRAIL' = h TRAIL + (1 - h) R
    # and LEAD' = h LEAD + (1 - h) B, so that max(TRAIL', R - B + LEAD') = R - h min(R - TRAIL, B - LEAD) of the
    # reduction is exposed. FIRST and LAST likewise for the gather and the first forward.
    for edge, whole, part in exposed_edges(costs):
        exposed = costs.exposed_fractions[part]
        if exposed.any():
            rest = np.maximum(terms[whole] - terms[edge], 0)
            terms[edge] += np.ceil(exposed * rest).astype(np.int64)
    terms[Term.CROSSING] = crossing_ns
    return terms


def _fixed_terms(costs: LayoutCosts, held: HeldLayers) -> IntArray:
    """Sum the durations of virtual stages without recomputation, [Term, ...]."""
    counts, duration, any_layer = held.counts, costs.duration_ns, held.counts.any(axis=-1)
    embedding = [ns * held.is_first for ns in costs.embedding_ns]
    head = [ns * held.is_last for ns in costs.head_ns]
    shape = np.broadcast_shapes(np.shape(held.first), costs.transfer_ns.shape)
    terms = np.zeros((len(Term), *shape), dtype=np.int64)
    terms[Term.FORWARD] = counts @ duration[:, Phase.FORWARD] + embedding[0] + head[0]
    terms[Term.BACKWARD] = counts @ duration[:, Phase.BACKWARD] + embedding[1] + head[1]
    terms[Term.WEIGHT] = counts @ duration[:, Phase.WEIGHT] + embedding[Kind.WEIGHT] + head[Kind.WEIGHT]
    if costs.runs_pairs:
        terms[Term.PAIRED_FORWARD] = counts @ costs.paired_ns[:, 0] + embedding[0] + head[0]
        terms[Term.PAIRED_BACKWARD] = counts @ costs.paired_ns[:, 1] + embedding[1] + head[1]
    for term, values in (
        (Term.GATHER, costs.gather_ns),
        (Term.REDUCE, costs.reduce_ns),
        (Term.OPTIMIZER, costs.optimizer_ns),
    ):
        ends = values[EMBEDDING] * held.is_first + values[HEAD] * held.is_last
        terms[term] = counts @ values[: len(duration)] + ends
    # A bucket at the edge of a stage holds one layer, with the end of the model that is next to it.
    # Gradients come from the backward, or from the weight gradients where these are split off. Transfers of the
    # host do not count: a recomputed layer may have shorter transfers.
    gradient_kind = Kind.WEIGHT if costs.split_backward.all() else Kind.BACKWARD
    for term, kind in ((Term.LEAD, gradient_kind), (Term.LAST, Kind.FORWARD)):
        terms[term] = np.where(any_layer, costs.edge_ns[kind][held.last], embedding[kind]) + head[kind]
    for term, whole, values in (
        (Term.TRAIL, Term.REDUCE, costs.reduce_ns),
        (Term.FIRST, Term.GATHER, costs.gather_ns),
    ):
        first_bucket = values[held.first] + values[EMBEDDING] * held.is_first
        terms[term] = np.where(any_layer, first_bucket, terms[whole])
    return terms


def exposed_edges(costs: LayoutCosts) -> tuple[tuple[Term, Term, int], ...]:
    """List the terms of ``EDGES``, the term each of them is a part of, and its row of ``exposed_fractions``."""
    release = Term.WEIGHT if costs.split_backward.all() else Term.BACKWARD
    gather = ((Term.FIRST, Term.GATHER, 0), (Term.LAST, Term.FORWARD, 0))
    return *gather, (Term.LEAD, release, 1), (Term.TRAIL, Term.REDUCE, 1)


def least_edges(costs: LayoutCosts, is_first: bool, is_last: bool) -> dict[Term, int]:
    """Bound each term of ``EDGES`` from below for a virtual stage with at least one layer, of any kind, in ns.

    The bound is a constant; what each layer adds comes on top (``least_slope``).
    """
    edge, head = costs.edge_ns, costs.head_ns * is_last
    both_ends = costs.embedding_ns * is_first + head
    gradient_kind = Kind.WEIGHT if costs.split_backward else Kind.BACKWARD
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    edges = {
        Term.LEAD: (edge[gradient_kind].min() + head[gradient_kind], both_ends[gradient_kind]),
        Term.LAST: (edge[Kind.FORWARD].min() + head[Kind.FORWARD], both_ends[Kind.FORWARD]),
    }
    for term, values in ((Term.TRAIL, costs.reduce_ns), (Term.FIRST, costs.gather_ns)):
        edges[term] = values[:EMBEDDING].min() + values[EMBEDDING] * is_first, values[ends].sum()
    bounds = {}
    for term, _, part in exposed_edges(costs):
        exposed, (least, whole) = float(costs.exposed_fractions[part]), edges[term]
        bounds[term] = int(least) if not exposed else math.floor((1.0 - exposed) * least + exposed * whole)
    return bounds


def least_slope(costs: LayoutCosts, slope: IntArray) -> None:
    """Fill in what layers add at least to each term of ``EDGES``: ``slope`` [Term, ...] has the other terms."""
    for term, whole, part in exposed_edges(costs):
        slope[term] = np.floor(costs.exposed_fractions[part] * slope[whole]).astype(np.int64)


def _transient(
    costs: LayoutCosts, layers: IntArray, full: IntArray, num_recomputed: IntArray, ends: list[int]
) -> IntArray:
    """Size the temporary memory of a backward, in bytes [o, ...].

    It holds the gradients of the widest operator, the replay of one recomputed layer, and the data from the host
    that the layer at work and the next layer need; or those of an encoder of images, which runs alone. The update
    streams its states in the same way. It counts as if it ran at that time: an upper bound, because the
    activations are gone by then.
    """
    workspace = costs.workspace_bytes[layers].max(axis=0, initial=0)
    if HEAD in ends:
        workspace = np.maximum(workspace, costs.head_workspace_bytes)
    encoder = costs.embedding_workspace_bytes * (EMBEDDING in ends)
    replay = np.zeros((len(full), *costs.transfer_ns.shape), dtype=np.int64)
    # A replay restores the dropped tensors on the device, also where the kept tensors lie on the host.
    host = costs.host_kept_bytes
    dropped_selective = costs.dropped_selective_bytes + host[0] - host[1]
    dropped_full = costs.dropped_full_bytes + host[0] - host[2]
    for kind in ascending(layers):
        counts = np.concatenate([[0], np.cumsum(layers == kind)])
        in_full, in_selective = counts[full] > 0, counts[num_recomputed] > counts[full]
        replay = np.maximum(replay, np.multiply.outer(in_full, dropped_full[kind]))
        replay = np.maximum(replay, np.multiply.outer(in_selective, dropped_selective[kind]))
    if not costs.offloads:
        return np.asarray(np.maximum(workspace + replay, encoder))
    streamed = _neighbours(costs.streamed_bytes[layers])
    streamed = streamed + _neighbours(np.moveaxis(_host_kept(costs, layers, full, num_recomputed), 1, 0))
    pieces = costs.update_bytes[[*ends[:1], *layers, *ends[1:]] if EMBEDDING in ends else [*layers, *ends]]
    temporary = np.maximum(workspace + replay + streamed, encoder)
    return np.asarray(np.maximum(temporary, _neighbours(pieces)))


@dataclass(slots=True)
class StageMemo:
    """Cache of the single-option costs of one layout's virtual stages."""

    layout: Layout
    costs: RankCosts
    known: dict[tuple[object, ...], StageOptions] = field(default_factory=dict)

    def option(self, stage: int, kinds: Sequence[int], full: int, selective: int) -> StageOptions:
        """Return the ``stage_options`` of a virtual stage under one recompute choice."""
        rank, crossing_ns = self.layout.rank_of(stage), self.costs.crossing_ns(stage)
        is_first, is_last = stage == 0, stage == self.layout.num_virtual_stages - 1
        key = (tuple(kinds), full, selective, is_first, is_last, self.costs.type_of(rank), crossing_ns)
        if key not in self.known:
            self.known[key] = stage_options(
                self.costs.of_rank(rank),
                kinds,
                np.array([full]),
                np.array([selective]),
                is_first=is_first,
                is_last=is_last,
                crossing_ns=crossing_ns,
            )
        return self.known[key]


def plan_stages(costs: RankCosts, layer_kinds: Sequence[int], plan: Plan) -> list[StageOptions]:
    """Sum the costs of every virtual stage of a plan, with a single option each."""
    memo = StageMemo(plan.layout, costs)
    return [
        memo.option(
            number,
            layer_kinds[stage.layers[0] : stage.layers[1]],
            stage.recompute.full,
            stage.recompute.selective,
        )
        for number, stage in enumerate(plan.virtual_stages)
    ]


def durations(stages: Sequence[StageOptions]) -> IntArray:
    """Stack the durations of single-option stages into a matrix [Term, J], as ``step_graph`` expects it."""
    return np.stack([stage.terms[:, 0] for stage in stages], axis=1)
