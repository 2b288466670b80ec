"""What one virtual stage costs: sums of a layout's constants over the layers it holds.

Every duration is affine in the number of layers of each kind and in the recompute counts, which is what makes
critical paths into valid rows of the integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from milpplan.problem.plan import Layout, Plan
from milpplan.simulation.layers.terms import Phase
from milpplan.simulation.layout_columns import IntArray, ascending
from milpplan.simulation.layout_costs import LayoutCosts
from milpplan.simulation.mixed_costs import RankCosts
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.simulation.pipeline.work_order import Kind

EMBEDDING, HEAD = -2, -1
"""Positions of the two ends in the arrays that stack kinds, embedding and head."""
EDGES = (Term.LEAD, Term.TRAIL, Term.FIRST, Term.LAST)
"""Terms of the buckets at a stage's edges: of one layer, whatever their number, or of an end without layers."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Costs of one virtual stage under several recompute choices (o options). Of n layouts together every array
    has their axis after its own, and what is a number here is [n].

    ``terms`` [Term, o] nanoseconds; ``state_bytes`` [3] (weights, gradients, optimizer); ``kept_bytes`` [o]
    per live micro-batch; ``deferred_bytes`` per micro-batch that waits for its weight gradients, whatever is
    recomputed; ``transient_bytes`` [o] while a backward of this stage runs; ``full`` and ``selective`` [o] the
    choices. On the host: ``host_state_bytes``, and ``host_kept_bytes`` [o] per live micro-batch.
    """

    full: IntArray
    selective: IntArray
    terms: IntArray
    state_bytes: IntArray
    kept_bytes: IntArray
    deferred_bytes: IntArray
    transient_bytes: IntArray
    host_state_bytes: IntArray
    host_kept_bytes: IntArray

    def take(self, rows: IntArray) -> StageOptions:
        """The chosen options."""
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
    """Costs of a virtual stage that holds layers of the given kinds, in order.

    Args:
        costs: constants of the stage's rank (``RankCosts.of_rank``), or those of many layouts of one schedule.
        kinds: index of the kind of each layer held; may be empty.
        full, selective: [o] recompute counts: the first ``full`` layers wholly, the next ``selective`` ones
            selectively.
        is_first, is_last: whether the stage also holds the embedding, the head.
        crossing_ns: what a transfer to the next stage takes beyond the shortest (``RankCosts.crossing_ns``).
    """
    held = np.asarray(kinds, dtype=np.int64)
    duration = costs.duration_ns
    last_recomputed = full + selective
    seen = _seen(held, len(duration))
    wholly, selectively = seen[full], seen[last_recomputed] - seen[full]

    extra = wholly @ duration[:, Phase.FULL] + selectively @ duration[:, Phase.SELECTIVE]
    dropped = wholly @ costs.dropped_full_bytes + selectively @ costs.dropped_selective_bytes
    terms = np.repeat(_fixed_terms(costs, held, seen[-1], is_first, is_last)[:, None], len(full), axis=1)
    terms[Term.BACKWARD] += extra
    if costs.runs_pairs:
        terms[Term.PAIRED_BACKWARD] += extra
    terms[Term.FORWARD] += wholly @ costs.replayed_forward_ns[1] + selectively @ costs.replayed_forward_ns[0]
    terms[Term.CROSSING] = crossing_ns
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    kept = seen[-1] @ costs.kept_bytes + _end_kept(costs, is_first, is_last) - dropped
    return StageOptions(
        full,
        selective,
        terms,
        _over_layers(costs.state_bytes, seen[-1]) + costs.state_bytes[:, ends].sum(axis=1),
        kept,
        seen[-1] @ costs.deferred_bytes + costs.head_deferred_bytes * is_last,
        _transient(costs, held, full, last_recomputed, ends),
        seen[-1] @ costs.host_state_bytes[: len(duration)] + costs.host_state_bytes[ends].sum(axis=0),
        _host_kept(costs, held, full, last_recomputed).sum(axis=1),
    )


def _seen(held: IntArray, num_kinds: int) -> IntArray:
    """Layers of each kind among the first 0, 1, ... held, [layers + 1, K]."""
    seen = np.zeros((len(held) + 1, num_kinds), dtype=np.int64)
    np.cumsum(held[:, None] == np.arange(num_kinds), axis=0, out=seen[1:])
    return seen


def _over_layers(values: IntArray, held: IntArray) -> IntArray:
    """Sums over layers of ``values`` [parts, K + 2, ...], ``held`` [K] of each kind: [parts, ...]."""
    return np.stack([held @ part[: len(held)] for part in values])


def _host_kept(costs: LayoutCosts, held: IntArray, full: IntArray, last_recomputed: IntArray) -> IntArray:
    """Bytes of every layer's activations on the host, [o, layers, ...]."""
    if not costs.host_kept_bytes.any():
        return np.zeros((len(full), 0, *costs.transfer_ns.shape), dtype=np.int64)
    layer = np.arange(len(held))
    mode = np.where(layer < full[:, None], 2, np.where(layer < last_recomputed[:, None], 1, 0))
    return np.asarray(costs.host_kept_bytes[mode, held])


def _neighbours(pieces: IntArray) -> IntArray:
    """The most that one piece and the next one take together, of pieces [layers, ...] in order."""
    if len(pieces) < 2:
        return np.asarray(pieces.sum(axis=0))
    return np.asarray((pieces[1:] + pieces[:-1]).max(axis=0))


def _end_kept(costs: LayoutCosts, is_first: bool, is_last: bool) -> IntArray:
    return np.asarray(costs.embedding_kept_bytes * is_first + costs.head_kept_bytes * is_last)


def _fixed_terms(costs: LayoutCosts, held: IntArray, layers: IntArray, is_first: bool, is_last: bool) -> IntArray:
    """Durations without recomputation, [Term, ...]; ``layers`` [K] of each kind are held."""
    duration = costs.duration_ns
    embedding = costs.embedding_ns * is_first
    head = costs.head_ns * is_last
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    any_layer = len(held) > 0
    front = held[:1]
    back = held[-1:]
    terms = np.zeros((len(Term), *costs.transfer_ns.shape), dtype=np.int64)
    terms[Term.FORWARD] = layers @ duration[:, Phase.FORWARD] + embedding[0] + head[0]
    terms[Term.BACKWARD] = layers @ duration[:, Phase.BACKWARD] + embedding[1] + head[1]
    terms[Term.WEIGHT] = layers @ duration[:, Phase.WEIGHT] + embedding[Kind.WEIGHT] + head[Kind.WEIGHT]
    if costs.runs_pairs:
        terms[Term.PAIRED_FORWARD] = layers @ costs.paired_ns[:, 0] + embedding[0] + head[0]
        terms[Term.PAIRED_BACKWARD] = layers @ costs.paired_ns[:, 1] + embedding[1] + head[1]
    for term, values in (
        (Term.GATHER, costs.gather_ns),
        (Term.REDUCE, costs.reduce_ns),
        (Term.OPTIMIZER, costs.optimizer_ns),
    ):
        terms[term] = layers @ values[: len(layers)] + values[ends].sum(axis=0)
    # The first bucket that is ready, and the last one: one layer, with the end of the model beside it.
    # What adds to gradients: the backward, or where it is split the weight gradients. Transfers of the host are
    # left out of it: a recomputed layer may have shorter ones.
    edge, adds = costs.edge_ns, Kind.WEIGHT if costs.split_backward.all() else Kind.BACKWARD
    terms[Term.LEAD] = edge[adds, back].sum(axis=0) + head[adds] + (0 if any_layer else embedding[adds])
    beside = [*front, *(ends[:1] if is_first else [])]
    terms[Term.TRAIL] = costs.reduce_ns[beside].sum(axis=0)
    terms[Term.FIRST] = costs.gather_ns[beside].sum(axis=0)
    terms[Term.LAST] = edge[Kind.FORWARD, back].sum(axis=0) + head[0] + (0 if any_layer else embedding[0])
    if not any_layer:
        terms[Term.TRAIL] = terms[Term.REDUCE]
        terms[Term.FIRST] = terms[Term.GATHER]
    return terms


def least_edges(costs: LayoutCosts, is_first: bool, is_last: bool) -> dict[Term, int]:
    """Least nanoseconds of each of ``EDGES`` for a virtual stage that holds a layer, of whatever kind."""
    edge, head = costs.edge_ns, costs.head_ns * is_last
    adds = Kind.WEIGHT if costs.split_backward else Kind.BACKWARD
    return {
        Term.LEAD: int(edge[adds].min() + head[adds]),
        Term.LAST: int(edge[Kind.FORWARD].min() + head[Kind.FORWARD]),
        Term.TRAIL: int(costs.reduce_ns[:EMBEDDING].min() + costs.reduce_ns[EMBEDDING] * is_first),
        Term.FIRST: int(costs.gather_ns[:EMBEDDING].min() + costs.gather_ns[EMBEDDING] * is_first),
    }


def _transient(
    costs: LayoutCosts, held: IntArray, full: IntArray, last_recomputed: IntArray, ends: list[int]
) -> IntArray:
    """Temporary bytes of a backward: gradients of the widest operator, plus the replay of one recomputed
    layer; and of what is on the host the part of the layer at work and of the next one. The update, which streams
    its states in the same way, counts as if it ran then (upper: activations are gone by then)."""
    workspace = costs.workspace_bytes[held].max(axis=0, initial=0)
    if HEAD in ends:
        workspace = np.maximum(workspace, costs.head_workspace_bytes)
    replay = np.zeros((len(full), *costs.transfer_ns.shape), dtype=np.int64)
    # A replay brings back what was dropped, wherever the rest is kept.
    host = costs.host_kept_bytes
    dropped_selective = costs.dropped_selective_bytes + host[0] - host[1]
    dropped_full = costs.dropped_full_bytes + host[0] - host[2]
    for kind in ascending(held):
        seen = np.concatenate([[0], np.cumsum(held == kind)])
        in_full, in_selective = seen[full] > 0, seen[last_recomputed] > seen[full]
        replay = np.maximum(replay, np.multiply.outer(in_full, dropped_full[kind]))
        replay = np.maximum(replay, np.multiply.outer(in_selective, dropped_selective[kind]))
    if not costs.offloads:
        return np.asarray(workspace + replay)
    streamed = _neighbours(costs.streamed_bytes[held])
    streamed = streamed + _neighbours(np.moveaxis(_host_kept(costs, held, full, last_recomputed), 1, 0))
    pieces = costs.update_bytes[[*ends[:1], *held, *ends[1:]] if EMBEDDING in ends else [*held, *ends]]
    return np.asarray(np.maximum(workspace + replay + streamed, _neighbours(pieces)))


@dataclass(slots=True)
class StageMemo:
    """Single options of one layout's virtual stages, each distinct one computed once."""

    layout: Layout
    costs: RankCosts
    known: dict[tuple[object, ...], StageOptions] = field(default_factory=dict)

    def option(self, stage: int, kinds: Sequence[int], full: int, selective: int) -> StageOptions:
        """``stage_options`` of a virtual stage with one choice."""
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
    """Costs of every virtual stage of a plan (one option each)."""
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
    """Duration matrix [Term, J] of single-option stages, as the pipeline graph takes it."""
    return np.stack([stage.terms[:, 0] for stage in stages], axis=1)
