"""What one virtual stage costs: sums of a layout's constants over the layers it holds.

Every duration is affine in the number of layers of each kind and in the recompute counts, which is what makes
critical paths into valid rows of the integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.costs.layers import Phase
from milpplan.costs.layout_costs import LayoutCosts
from milpplan.costs.mixed_costs import RankCosts
from milpplan.costs.pipeline import Term
from milpplan.costs.work_order import Kind
from milpplan.specs.plan import Layout, Plan

EMBEDDING, HEAD = -2, -1
"""Positions of the two ends in the arrays that stack kinds, embedding and head."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Costs of one virtual stage under several recompute choices (o options).

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
    deferred_bytes: int
    transient_bytes: IntArray
    host_state_bytes: int
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
        costs: constants of the stage's rank (``RankCosts.of_rank``).
        kinds: index of the kind of each layer held; may be empty.
        full, selective: [o] recompute counts: the first ``full`` layers wholly, the next ``selective`` ones
            selectively.
        is_first, is_last: whether the stage also holds the embedding, the head.
        crossing_ns: what a transfer to the next stage takes beyond the shortest (``RankCosts.crossing_ns``).
    """
    held = np.asarray(kinds, dtype=np.int64)
    duration = costs.duration_ns
    last_recomputed = full + selective

    def over_range(per_kind: IntArray, start: IntArray, stop: IntArray) -> IntArray:
        prefix = np.concatenate([[0], np.cumsum(per_kind[held])])
        return np.asarray(prefix[stop] - prefix[start])

    extra = over_range(duration[:, Phase.FULL], np.zeros_like(full), full)
    extra = extra + over_range(duration[:, Phase.SELECTIVE], full, last_recomputed)
    dropped = over_range(costs.dropped_full_bytes, np.zeros_like(full), full)
    dropped = dropped + over_range(costs.dropped_selective_bytes, full, last_recomputed)
    terms = np.repeat(_fixed_terms(costs, held, is_first, is_last)[:, None], len(full), axis=1)
    terms[Term.BACKWARD] += extra
    if costs.runs_pairs:
        terms[Term.PAIRED_BACKWARD] += extra
    terms[Term.FORWARD] += over_range(costs.replayed_forward_ns[1], np.zeros_like(full), full)
    terms[Term.FORWARD] += over_range(costs.replayed_forward_ns[0], full, last_recomputed)
    terms[Term.CROSSING] = crossing_ns
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    kept = int(costs.kept_bytes[held].sum()) + _end_kept(costs, is_first, is_last) - dropped
    return StageOptions(
        full,
        selective,
        terms,
        costs.state_bytes[:, held].sum(axis=1) + costs.state_bytes[:, ends].sum(axis=1),
        kept,
        int(costs.deferred_bytes[held].sum()) + int(costs.head_deferred_bytes) * is_last,
        _transient(costs, held, full, last_recomputed, ends),
        int(costs.host_state_bytes[held].sum() + costs.host_state_bytes[ends].sum()),
        _host_kept(costs, held, full, last_recomputed).sum(axis=1),
    )


def _host_kept(costs: LayoutCosts, held: IntArray, full: IntArray, last_recomputed: IntArray) -> IntArray:
    """Bytes of every layer's activations on the host, [o, layers]."""
    if not costs.host_kept_bytes.any():
        return np.zeros((len(full), 0), dtype=np.int64)
    layer = np.arange(len(held))
    mode = np.where(layer < full[:, None], 2, np.where(layer < last_recomputed[:, None], 1, 0))
    return np.asarray(costs.host_kept_bytes[mode, held])


def _neighbours(pieces: IntArray) -> IntArray:
    """The most that one piece and the next one take together, of pieces [..., layers] in order."""
    if pieces.shape[-1] < 2:
        return np.asarray(pieces.sum(axis=-1))
    return np.asarray((pieces[..., 1:] + pieces[..., :-1]).max(axis=-1))


def _end_kept(costs: LayoutCosts, is_first: bool, is_last: bool) -> int:
    return int(costs.embedding_kept_bytes) * is_first + int(costs.head_kept_bytes) * is_last


def _fixed_terms(costs: LayoutCosts, held: IntArray, is_first: bool, is_last: bool) -> IntArray:
    """Durations without recomputation: [Term]."""
    duration = costs.duration_ns
    embedding = costs.embedding_ns * is_first
    head = costs.head_ns * is_last
    ends = [EMBEDDING] * is_first + [HEAD] * is_last
    any_layer = len(held) > 0
    front = held[:1]
    back = held[-1:]
    terms = np.zeros(len(Term), dtype=np.int64)
    terms[Term.FORWARD] = duration[held, Phase.FORWARD].sum() + embedding[0] + head[0]
    terms[Term.BACKWARD] = duration[held, Phase.BACKWARD].sum() + embedding[1] + head[1]
    terms[Term.WEIGHT] = duration[held, Phase.WEIGHT].sum() + embedding[Kind.WEIGHT] + head[Kind.WEIGHT]
    if costs.runs_pairs:
        terms[Term.PAIRED_FORWARD] = costs.paired_ns[held, 0].sum() + embedding[0] + head[0]
        terms[Term.PAIRED_BACKWARD] = costs.paired_ns[held, 1].sum() + embedding[1] + head[1]
    for term, values in (
        (Term.GATHER, costs.gather_ns),
        (Term.REDUCE, costs.reduce_ns),
        (Term.OPTIMIZER, costs.optimizer_ns),
    ):
        terms[term] = values[held].sum() + values[ends].sum()
    # The first bucket that is ready, and the last one: one layer, with the end of the model beside it.
    # What adds to gradients: the backward, or where it is split the weight gradients. Transfers of the host are
    # left out of it: a recomputed layer may have shorter ones.
    edge, adds = costs.edge_ns, Kind.WEIGHT if costs.split_backward else Kind.BACKWARD
    terms[Term.LEAD] = edge[adds, back].sum() + head[adds] + (0 if any_layer else embedding[adds])
    terms[Term.TRAIL] = costs.reduce_ns[front].sum() + costs.reduce_ns[ends[:1] if is_first else ends[:0]].sum()
    terms[Term.FIRST] = costs.gather_ns[front].sum() + costs.gather_ns[ends[:1] if is_first else ends[:0]].sum()
    terms[Term.LAST] = edge[Kind.FORWARD, back].sum() + head[0] + (0 if any_layer else embedding[0])
    if not any_layer:
        terms[Term.TRAIL] = terms[Term.REDUCE]
        terms[Term.FIRST] = terms[Term.GATHER]
    return terms


def _transient(
    costs: LayoutCosts, held: IntArray, full: IntArray, last_recomputed: IntArray, ends: list[int]
) -> IntArray:
    """Temporary bytes of a backward: gradients of the widest operator, plus the replay of one recomputed
    layer; and of what is on the host the part of the layer at work and of the next one. The update, which streams
    its states in the same way, counts as if it ran then (upper: activations are gone by then)."""
    workspace = int(costs.workspace_bytes[held].max(initial=0))
    if HEAD in ends:
        workspace = max(workspace, int(costs.head_workspace_bytes))
    replay = np.zeros(len(full), dtype=np.int64)
    # A replay brings back what was dropped, wherever the rest is kept.
    host = costs.host_kept_bytes
    dropped_selective = costs.dropped_selective_bytes + host[0] - host[1]
    dropped_full = costs.dropped_full_bytes + host[0] - host[2]
    for kind in np.unique(held):
        seen = np.concatenate([[0], np.cumsum(held == kind)])
        in_full, in_selective = seen[full] > 0, seen[last_recomputed] > seen[full]
        replay = np.maximum(replay, in_full * dropped_full[kind])
        replay = np.maximum(replay, in_selective * dropped_selective[kind])
    if not costs.offloads:
        return workspace + replay
    streamed = _neighbours(costs.streamed_bytes[held])
    streamed = streamed + _neighbours(_host_kept(costs, held, full, last_recomputed))
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
