"""Consequences of the order of work: live activations, and the structure of the step graph.

Notation as in ``work_order``: P ranks, m micro-batches, v chunks per rank, J = P * v virtual stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from milpplan.problem import PAIRED_SCHEDULES, SPLIT_SCHEDULES, Schedule
from milpplan.simulation.layers import Term
from milpplan.simulation.layers.terms import PAIRED, WORK
from milpplan.simulation.pipeline.work_order import (
    Int32Array,
    Int64Array,
    Kind,
    WorkOrder,
    check_schedule,
    chunk_stages,
    work_order,
    work_orders,
)

__all__ = [
    "Int32Array",
    "Int64Array",
    "LiveProfile",
    "Structure",
    "WorkOrder",
    "held_bytes",
    "live_profiles",
    "rank_profile",
    "structure",
    "work_order",
]

LiveProfile = tuple[int, tuple[int, ...]]
"""(chunk in backward, counts by chunk). The counts are the live micro-batches of each chunk; where the backward is
split, the micro-batches of each chunk that wait for their weight gradients follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Work items of a step as a graph in topological levels, without durations.

    N = 2 * J * m nodes (3 * J * m with split backwards), numbered level by level. The level of a node is the
    maximum number of hops from a source, so the nodes of a level do not depend on each other. Two more sorts of
    nodes follow: N + r is the origin of rank r, where its first item waits, and N + P stands for "no predecessor
    on another rank".

    Attributes:
        level_offsets: nodes of level l are ``level_offsets[l]`` to ``level_offsets[l + 1] - 1``.
        rank_predecessor: [N] previous item of the same rank, or the origin of the rank.
        transfer_predecessor: [N] item of another rank whose output the node needs, or N + P. An item that needs an
            item of its own rank (the last virtual stage's backward, both chunks where a V turns, and weight
            gradients) follows it in the order of the rank. In a group of items that run together, the first item
            waits for all inputs of the group, and a node that needs an output of the group waits for its last
            item.
        duration_index: [N] row of ``durations.reshape(Term * J)`` with the duration of the node.
        forward_node: [J, m] node of each forward.
        backward_node: [J, m] node of each backward.
        weight_node: [J, m] node of each weight gradient, [J, 0] where the backwards hold them.
        last_node: [P] last item of each rank.
        chunk_stages: [v, P] virtual stage of every chunk and rank.
    """

    num_stages: int
    num_micro_batches: int
    vpp: int
    chunk_stages: Int64Array
    level_offsets: tuple[int, ...]
    rank_predecessor: Int32Array
    transfer_predecessor: Int32Array
    duration_index: Int32Array
    forward_node: Int32Array
    backward_node: Int32Array
    weight_node: Int32Array
    last_node: Int32Array

    def __post_init__(self) -> None:
        """Forbid writing into the arrays: structures are cached and shared."""
        for array in (self.rank_predecessor, self.transfer_predecessor, self.duration_index):
            array.flags.writeable = False
        for array in (self.forward_node, self.backward_node, self.weight_node, self.last_node):
            array.flags.writeable = False

    @property
    def num_nodes(self) -> int:
        """Number of work items of all kinds (N)."""
        return len(self.duration_index)

    @property
    def release_node(self) -> Int32Array:
        """Last item of each virtual stage that adds to its gradients, [v, P]."""
        last = self.weight_node if self.weight_node.size else self.backward_node
        return np.asarray(last[self.chunk_stages, -1])

    @property
    def release_term(self) -> Term:
        """Row of the durations of ``release_node``."""
        return Term.WEIGHT if self.weight_node.size else Term.BACKWARD

    def swapped(self, by_stage: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Reorder an array [..., J] from virtual stages to chunk by chunk and rank by rank, or back."""
        return by_stage if self.in_order else by_stage[..., self.chunk_stages.reshape(-1)]

    @property
    def in_order(self) -> bool:
        """True if all chunks run over the ranks in the same direction."""
        return self.vpp == 1 or int(self.chunk_stages[1, 0]) == self.num_stages

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages (J)."""
        return self.num_stages * self.vpp


def _pareto_maximal(counts: Int64Array) -> Int64Array:
    """Select the Pareto-maximal rows of ``counts`` [rows, v], whose rows are distinct."""
    dominated = np.ones((len(counts), len(counts)), dtype=np.bool_)
    for column in counts.T:
        dominated &= column[None, :] >= column[:, None]
    # A row dominates itself.
    return np.asarray(counts[dominated.sum(axis=1) == 1])


def _distinct_rows(rows: Int64Array) -> Int64Array:
    """Select the distinct rows, sorted with the first column as the first key."""
    rows = rows[np.lexsort(rows.T[::-1])]
    is_new = np.append(True, (rows[1:] != rows[:-1]).any(axis=1))
    return np.asarray(rows[is_new])


@lru_cache(maxsize=256)
def live_profiles(
    schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int
) -> tuple[tuple[LiveProfile, ...], ...]:
    """Count the micro-batches whose activations are alive while backwards run, for every rank.

    A forward adds a micro-batch to its chunk when it starts, and a backward releases it when it ends, so the
    micro-batch in backward counts. Where the backward is split, a micro-batch moves at the end of its backward to
    the micro-batches that wait for their weight gradients, and the weight gradient releases it; a backward then
    counts at its start and at its end.

    For each rank and running chunk only the Pareto-maximal vectors are kept. Any memory that grows with every
    count has its peak at such a vector: after a forward or before a weight gradient, the counts are at most those
    at some backward.

    Returns:
        Profiles [P][...]: the chunk in backward, and the counts by chunk.
    """
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    return tuple(rank_profile(schedule, num_stages, num_micro_batches, vpp, rank) for rank in range(num_stages))


@lru_cache(maxsize=4096)
def rank_profile(
    schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int, rank: int
) -> tuple[LiveProfile, ...]:
    """Count the live micro-batches of one rank (see ``live_profiles``)."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    rows = _distinct_rows(_moments(orders, rank, vpp, schedule in SPLIT_SCHEDULES))
    kept = [(c, _pareto_maximal(rows[rows[:, 0] == c, 1:])) for c in range(vpp)]
    return tuple((c, tuple(counts)) for c, maximal in kept for counts in maximal.tolist())


def _moments(orders: WorkOrder, rank: int, vpp: int, split: bool) -> Int64Array:
    """List the running chunk and the counts of every backward of a rank.

    Returns:
        [n, 1 + v], or with split backwards [2 n, 1 + 2 v] for the starts and the ends of the backwards.
    """
    kind, chunk = orders.kind[rank], orders.chunk[rank].astype(np.int64)
    backwards = np.flatnonzero(kind == Kind.BACKWARD)
    running = chunk[backwards]

    def done(which: Kind) -> Int64Array:
        """Count the items of a kind before each backward, by chunk."""
        chunks = chunk[kind == which]
        counts = np.zeros((len(chunks) + 1, vpp), dtype=np.int64)
        np.cumsum(chunks[:, None] == np.arange(vpp), axis=0, out=counts[1:])
        return np.asarray(counts[np.cumsum(kind == which)[backwards] - (which is Kind.BACKWARD)])

    live = done(Kind.FORWARD) - done(Kind.BACKWARD)
    if not split:
        return np.column_stack([running, live])
    waiting = done(Kind.BACKWARD) - done(Kind.WEIGHT)
    running_count = (running[:, None] == np.arange(vpp)).astype(np.int64)
    start, end = (
        np.column_stack([running, live - ended * running_count, waiting + ended * running_count])
        for ended in (0, 1)
    )
    return np.concatenate([start, end])


def held_bytes(kept: npt.NDArray[np.int64], deferred: npt.NDArray[np.int64], num_counts: int) -> Int64Array:
    """Stack the bytes of a rank's chunks in the order of the counts of a ``LiveProfile``.

    Args:
        kept: [v, ...] bytes per live micro-batch.
        deferred: [v, ...] bytes per micro-batch that waits for its weight gradients.
        num_counts: v, or 2 v with split backwards.

    Returns:
        Bytes [num_counts, ...].
    """
    stacked = kept if num_counts == len(kept) else np.concatenate([kept, deferred])
    return np.asarray(stacked, dtype=np.int64)


def _levels(transfer_source: Int64Array, num_stages: int) -> list[Int64Array]:
    """List the items of each topological level; all ranks whose next item is ready advance together.

    Items are numbered rank * (T + 1) + index, with T items per rank. A ghost item that is never ready follows the
    items of each rank. ``transfer_source`` [P * (T + 1)] is the item of another rank to wait for; -1 (the last
    flag) stands for no item. The source of a ghost is the ghost of rank 0.
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
    """Build the step graph of a schedule in topological levels (cached: about 16 bytes per work item)."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    stages, num_virtual = chunk_stages(schedule, num_stages, vpp), num_stages * vpp
    num_items = orders.kind.shape[1]
    stride = num_items + 1
    item_numbers = np.arange(num_stages, dtype=np.int64)[:, None] * stride + np.arange(num_items)
    on_rank = np.arange(num_stages)[:, None]
    kinds = num_items // (num_micro_batches * vpp)
    items = np.empty((kinds, num_virtual, num_micro_batches), dtype=np.int64)
    of_item = (orders.kind, stages[orders.chunk, on_rank], orders.micro_batch)
    items[of_item] = item_numbers
    outputs = items
    if schedule in PAIRED_SCHEDULES:
        outputs = np.empty_like(items)
        outputs[of_item] = item_numbers + orders.left

    transfer_source = _transfer_sources(items, outputs, stages, num_stages, stride)
    if schedule in PAIRED_SCHEDULES:
        _wait_as_one(transfer_source, item_numbers, orders)
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
        duration_index[node[item_numbers[paired]]] = np.array(PAIRED)[kind] * num_virtual + stage
    return Structure(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        vpp=vpp,
        chunk_stages=stages,
        level_offsets=(0, *np.cumsum([len(level) for level in levels]).tolist()),
        rank_predecessor=rank_predecessor,
        transfer_predecessor=node[transfer_source[order]],
        duration_index=duration_index,
        forward_node=nodes[Kind.FORWARD],
        backward_node=nodes[Kind.BACKWARD],
        weight_node=nodes[Kind.WEIGHT] if kinds == len(Kind) else nodes[0, :, :0],
        last_node=node[item_numbers[:, -1]],
    )


def _transfer_sources(
    items: Int64Array, outputs: Int64Array, stages: Int64Array, num_stages: int, stride: int
) -> Int64Array:
    """Find the item of another rank that each item waits for (see ``_levels``).

    Args:
        items: [kinds, J, m] numbers of the items, rank * stride + index.
        outputs: [kinds, J, m] number of the item at whose end the output of each item is ready.
        stages: [v, P] virtual stage of every chunk and rank.
    """
    rank_of = np.empty(items.shape[1], dtype=np.int64)
    rank_of[stages] = np.arange(num_stages)
    sent = np.flatnonzero(rank_of[1:] != rank_of[:-1])
    source = np.full(num_stages * stride, -1, dtype=np.int64)
    source[items[Kind.FORWARD, sent + 1]] = outputs[Kind.FORWARD, sent]
    source[items[Kind.BACKWARD, sent]] = outputs[Kind.BACKWARD, sent + 1]
    source[stride - 1 :: stride] = stride - 1
    return source


def _wait_as_one(source: Int64Array, item_numbers: Int64Array, orders: WorkOrder) -> None:
    """Make the forward of a pair, which is its first item, wait for the input of the pair's backward.

    The input of the forward is ready by then. In a rank's first pair, it comes from a forward of the neighbour
    that ran before the backward whose output the pair's backward needs. In every later pair, both inputs come from
    the same pair.
    """
    forward = item_numbers[orders.is_paired & (orders.kind == Kind.FORWARD)]
    source[forward] = source[forward + 1]
    source[forward + 1] = -1
