"""What the fixed order of work fixes: live activations, and the step graph.

Words as in ``work_order``: P ranks, m micro-batches, v chunks a rank, J = P * v virtual stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from milpplan.problem.plan import PAIRED_SCHEDULES, SPLIT_SCHEDULES, Schedule
from milpplan.simulation.layers.terms import PAIRED, WORK, Term
from milpplan.simulation.pipeline.work_order import (
    Int32Array,
    Int64Array,
    Kind,
    WorkOrder,
    check_schedule,
    placement,
    work_order,
    work_orders,
)

__all__ = [
    "Int32Array",
    "Int64Array",
    "LiveProfile",
    "Structure",
    "WorkOrder",
    "check_schedule",
    "held_bytes",
    "live_profiles",
    "placement",
    "rank_profile",
    "structure",
    "work_order",
]

LiveProfile = tuple[int, tuple[int, ...]]
"""(chunk in backward, micro-batches whose forward is kept by chunk, and where the backward is split those that
wait for their weight gradients by chunk)."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The work items of a step as a graph in topological levels; it knows no durations.

    N = 2 * J * m nodes (3 * J * m with split backwards), numbered level by level (a level is the longest number of
    hops from a source, so the nodes of a level do not depend on each other). After them: N + r is the origin of
    rank r (where its first item waits) and N + P stands for "no predecessor on another rank".

    Attributes:
        level_offsets: nodes of level l are ``level_offsets[l]`` to ``level_offsets[l + 1] - 1``.
        rank_predecessor: [N] the item before on the same rank, or the origin of the rank.
        transfer_predecessor: [N] the item of another rank whose output is needed, or N + P. What needs an
            item of its own rank (the last virtual stage's backward, both chunks where a V turns, and weight
            gradients) comes after it in the order of the rank. Of items that run as one the first waits for all of
            them, and what needs one of them waits for the last.
        duration_index: [N] row of ``durations.reshape(Term * J)`` that the node takes its duration from.
        forward_node: [J, m] node of each forward.
        backward_node: [J, m] node of each backward.
        weight_node: [J, m] node of each weight gradient, [J, 0] where the backwards hold them.
        last_node: [P] the last item of each rank.
        placement: [v, P] the virtual stage of every chunk and rank.
    """

    num_stages: int
    num_micro_batches: int
    vpp: int
    placement: Int64Array
    level_offsets: tuple[int, ...]
    rank_predecessor: Int32Array
    transfer_predecessor: Int32Array
    duration_index: Int32Array
    forward_node: Int32Array
    backward_node: Int32Array
    weight_node: Int32Array
    last_node: Int32Array

    def __post_init__(self) -> None:
        """Structures are cached and shared, so nobody may write into them."""
        for array in (self.rank_predecessor, self.transfer_predecessor, self.duration_index):
            array.flags.writeable = False
        for array in (self.forward_node, self.backward_node, self.weight_node, self.last_node):
            array.flags.writeable = False

    @property
    def num_nodes(self) -> int:
        """Work items of all kinds (N)."""
        return len(self.duration_index)

    @property
    def release_node(self) -> Int32Array:
        """The last item of each virtual stage that adds to its gradients, [v, P]."""
        last = self.weight_node if self.weight_node.size else self.backward_node
        return np.asarray(last[self.placement, -1])

    @property
    def release_term(self) -> Term:
        """What those items take their durations from."""
        return Term.WEIGHT if self.weight_node.size else Term.BACKWARD

    def swapped(self, by_stage: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """An array [..., J] of virtual stages in the order chunk by chunk, rank by rank; or the other way
        round."""
        return by_stage if self.in_order else by_stage[..., self.placement.reshape(-1)]

    @property
    def in_order(self) -> bool:
        """Whether chunk after chunk runs over the ranks in the same direction."""
        return self.vpp == 1 or int(self.placement[1, 0]) == self.num_stages

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages (J)."""
        return self.num_stages * self.vpp


def _pareto_maximal(counts: Int64Array) -> Int64Array:
    """Rows of ``counts`` [rows, v], all distinct, that no other row reaches in every column."""
    reached = np.ones((len(counts), len(counts)), dtype=np.bool_)
    for column in counts.T:
        reached &= column[None, :] >= column[:, None]
    return np.asarray(counts[reached.sum(axis=1) == 1])


def _distinct_rows(rows: Int64Array) -> Int64Array:
    """The distinct rows, sorted with the first column first."""
    rows = rows[np.lexsort(rows.T[::-1])]
    is_new = np.append(True, (rows[1:] != rows[:-1]).any(axis=1))
    return np.asarray(rows[is_new])


@lru_cache(maxsize=256)
def live_profiles(
    schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int
) -> tuple[tuple[LiveProfile, ...], ...]:
    """Activations held while backwards run: per rank, (chunk in backward, micro-batches live per chunk).

    A forward adds one to its chunk when it starts, a backward releases it when it ends, so the one being processed
    counts. Where the backward is split, the counts are those of all chunks, then those of the micro-batches of all
    chunks that wait for their weight gradients; a backward then counts at its start and at its end, when its
    micro-batch has passed from the first to the second, and a weight gradient releases it. Per rank and running
    chunk only the Pareto-maximal vectors are kept: any memory that grows with every count has its peak at one of
    them, because after a forward or before a weight gradient there is no more than at some backward.
    """
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    return tuple(rank_profile(schedule, num_stages, num_micro_batches, vpp, rank) for rank in range(num_stages))


@lru_cache(maxsize=4096)
def rank_profile(
    schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int, rank: int
) -> tuple[LiveProfile, ...]:
    """``live_profiles`` of one rank."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    rows = _distinct_rows(_moments(orders, rank, vpp, schedule in SPLIT_SCHEDULES))
    kept = [(c, _pareto_maximal(rows[rows[:, 0] == c, 1:])) for c in range(vpp)]
    return tuple((c, tuple(counts)) for c, maximal in kept for counts in maximal.tolist())


def _moments(orders: WorkOrder, rank: int, vpp: int, split: bool) -> Int64Array:
    """Running chunk and counts of every backward of a rank, [n, 1 + v], or with split backwards of its start and
    its end, [2 n, 1 + 2 v]."""
    kind, chunk = orders.kind[rank], orders.chunk[rank].astype(np.int64)
    place = np.flatnonzero(kind == Kind.BACKWARD)
    running = chunk[place]

    def done(which: Kind) -> Int64Array:
        """Items of a kind before each backward, by chunk."""
        chunks = chunk[kind == which]
        counts = np.zeros((len(chunks) + 1, vpp), dtype=np.int64)
        np.cumsum(chunks[:, None] == np.arange(vpp), axis=0, out=counts[1:])
        return np.asarray(counts[np.cumsum(kind == which)[place] - (which is Kind.BACKWARD)])

    live = done(Kind.FORWARD) - done(Kind.BACKWARD)
    if not split:
        return np.column_stack([running, live])
    waiting = done(Kind.BACKWARD) - done(Kind.WEIGHT)
    one = (running[:, None] == np.arange(vpp)).astype(np.int64)
    start, end = (np.column_stack([running, live - n * one, waiting + n * one]) for n in (0, 1))
    return np.concatenate([start, end])


def held_bytes(kept: npt.NDArray[np.int64], deferred: npt.NDArray[np.int64], num_counts: int) -> Int64Array:
    """Bytes that go with the counts of a ``LiveProfile``: ``kept`` and ``deferred`` [v, ...] of a rank's chunks
    give [counts, ...]."""
    held = kept if num_counts == len(kept) else np.concatenate([kept, deferred])
    return np.asarray(held, dtype=np.int64)


def _levels(transfer_source: Int64Array, num_stages: int) -> list[Int64Array]:
    """Items of each topological level; all ranks whose next item is ready advance together.

    Items are numbered rank * (T + 1) + place, T per rank, one ghost after them that is never ready.
    ``transfer_source`` [P * (T + 1)] is the item of another rank to wait for, -1 (the last flag) for none,
    and for a ghost the ghost of rank 0.
    """
    stride = len(transfer_source) // num_stages
    done = np.zeros(len(transfer_source) + 1, dtype=np.bool_)
    done[-1] = True
    position = np.arange(num_stages, dtype=np.int64) * stride
    levels: list[Int64Array] = []
    while True:
        ready = done[transfer_source[position]]
        items = position[ready]
        if not len(items):
            break
        levels.append(items)
        done[items] = True
        position += ready
    assert (position % stride == stride - 1).all(), "the schedule deadlocks"
    return levels


@lru_cache(maxsize=64)
def structure(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> Structure:
    """The step graph of a schedule, in topological levels (cached: about 16 bytes per work item)."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    stages, num_virtual = placement(schedule, num_stages, vpp), num_stages * vpp
    num_items = orders.kind.shape[1]
    stride = num_items + 1
    places = np.arange(num_stages, dtype=np.int64)[:, None] * stride + np.arange(num_items)
    on_rank = np.arange(num_stages)[:, None]
    kinds = num_items // (num_micro_batches * vpp)
    items = np.empty((kinds, num_virtual, num_micro_batches), dtype=np.int64)
    of_item = (orders.kind, stages[orders.chunk, on_rank], orders.micro_batch)
    items[of_item] = places
    outputs = items
    if schedule in PAIRED_SCHEDULES:
        outputs = np.empty_like(items)
        outputs[of_item] = places + orders.left

    transfer_source = _transfer_sources(items, outputs, stages, num_stages, stride)
    if schedule in PAIRED_SCHEDULES:
        _wait_as_one(transfer_source, places, orders)
    levels = _levels(transfer_source, num_stages)
    order = np.concatenate(levels)
    num_nodes = len(order)
    node = np.full(num_stages * stride + 1, num_nodes + num_stages, dtype=np.int32)
    node[order] = np.arange(num_nodes, dtype=np.int32)
    is_first = order % stride == 0
    rank_predecessor = np.where(is_first, num_nodes + order // stride, node[order - 1]).astype(np.int32)
    nodes = node[items]
    rows = np.array(WORK[:kinds], dtype=np.int32)[:, None] * num_virtual + np.arange(num_virtual, dtype=np.int32)
    duration_index = np.empty(num_nodes, dtype=np.int32)
    duration_index[nodes] = rows[..., None]
    if schedule in PAIRED_SCHEDULES:
        paired = orders.is_paired
        kind, stage, _ = (index[paired] for index in of_item)
        duration_index[node[places[paired]]] = np.array(PAIRED)[kind] * num_virtual + stage
    return Structure(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        vpp=vpp,
        placement=stages,
        level_offsets=(0, *np.cumsum([len(level) for level in levels]).tolist()),
        rank_predecessor=rank_predecessor,
        transfer_predecessor=node[transfer_source[order]],
        duration_index=duration_index,
        forward_node=nodes[Kind.FORWARD],
        backward_node=nodes[Kind.BACKWARD],
        weight_node=nodes[Kind.WEIGHT] if kinds == len(Kind) else nodes[0, :, :0],
        last_node=node[places[:, -1]],
    )


def _transfer_sources(
    items: Int64Array, outputs: Int64Array, stages: Int64Array, num_stages: int, stride: int
) -> Int64Array:
    """The item of another rank that each item waits for (see ``_levels``). ``items`` [kinds, J, m] are numbered
    rank * stride + place; ``outputs`` likewise the items at whose end their output is there; ``stages`` [v, P] are
    those of chunks and ranks."""
    rank_of = np.empty(items.shape[1], dtype=np.int64)
    rank_of[stages] = np.arange(num_stages)
    sent = np.flatnonzero(rank_of[1:] != rank_of[:-1])
    source = np.full(num_stages * stride, -1, dtype=np.int64)
    source[items[Kind.FORWARD, sent + 1]] = outputs[Kind.FORWARD, sent]
    source[items[Kind.BACKWARD, sent]] = outputs[Kind.BACKWARD, sent + 1]
    source[stride - 1 :: stride] = stride - 1
    return source


def _wait_as_one(source: Int64Array, places: Int64Array, orders: WorkOrder) -> None:
    """The forward of a pair, which is its first item, waits for what the backward needs, and the backward for
    nothing else.

    What the forward needs is there by then: in a rank's first pair it comes from a forward of the same neighbour
    that ran before the backward which the pair's backward needs; in every later pair both come from one pair.
    """
    forward = places[orders.is_paired & (orders.kind == Kind.FORWARD)]
    source[forward] = source[forward + 1]
    source[forward + 1] = -1
