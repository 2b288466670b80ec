"""Consequences of the order of work: live activations, and the structure of the step graph.

A schedule fixes the order of work on every pipeline rank. Notation: P pipeline ranks (``num_stages``), m
micro-batches, v virtual stages per rank (``vpp``), J = P * v virtual stages. ``rank_stages`` of
``milpplan.problem.plan`` lists a rank's virtual stages, its chunks. The work items of a rank are the forwards and
backwards of its v chunks on m micro-batches, n = m * v of each. Where the backward is split, "backward" stands for
the input gradients, and n items of weight gradients are added.

Most schedules run w warm-up forwards, then a forward and a backward in turn, then the remaining backwards; the
k-th forward and the k-th backward are the same on all ranks. ``zb-h1`` adds the weight gradients to 1F1B: rank s
runs the weight gradient of micro-batch k - s after the backward of micro-batch k, and the remaining weight
gradients after its last backward. So no rank keeps more activations than the first. ``zb-v`` and ``dualpipe-v``
have their own orders (``_zb_v_rank``, ``_dualpipe_v_rank``).

``dualpipe-v`` has groups of items that run together: a whole backward is a backward and its weight gradients, a
pair is a forward and a whole backward beside each other. A group starts when all its inputs are ready, and its
outputs are ready when the whole group is done.

Source: GPipe, Huang et al. 2019 (all forwards, then all backwards); 1F1B is PipeDream-Flush, Narayanan et
al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", figure 4;
interleaved order is Megatron-LM ``core/pipeline_parallel/schedules.py`` at d98e8a64 with a micro-batch group
of P; ZB-H1 is Qi et al. 2023, "Zero bubble pipeline parallelism", figure 3; ZB-V is Qi et al. 2024, "Pipeline
parallelism with controllable memory", in the order of PyTorch's ``ScheduleZBVZeroBubble``
(torch/distributed/pipelining/schedules.py); DualPipeV is DeepSeek-V3's DualPipe (DeepSeek-AI 2024, section 3.2)
cut in half (Qi et al. 2025, "DualPipe could be better without the Dual"), in the order of deepseek-ai/DualPipe,
dualpipe/dualpipev.py. The papers' post-validation of the optimizer step is not modelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from milpplan.problem import PAIRED_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, Schedule, rank_stages
from milpplan.simulation.layers import Term
from milpplan.simulation.layers.shard import PAIRED, WORK

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, npt.NDArray[np.float64])


class Kind(IntEnum):
    """Kind of a work item."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder:
    """Work items of a rank (arrays [T]) or of all ranks ([P, T]) in the order in which they run.

    T = 2 m v, or 3 m v with split backwards.
    """

    kind: Int32Array
    """``Kind`` of each item."""
    chunk: Int32Array
    micro_batch: Int32Array
    left: Int32Array
    """Number of following items in the group of each item. The output of the item is ready when the last item of
    the group is done."""

    @property
    def is_paired(self) -> npt.NDArray[np.bool_]:
        """True for the forward and the backward of a pair."""
        forward = np.asarray((self.kind == Kind.FORWARD) & (self.left > 0))
        paired = forward.copy()
        paired[..., 1:] |= forward[..., :-1]
        return paired


def check_schedule(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> None:
    """Check that the schedule exists for these numbers.

    Raises:
        ValueError: it does not.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown, expected one of {', '.join(SCHEDULES)}")
    if min(num_stages, num_micro_batches, vpp) < 1:
        raise ValueError(
            f"stages, micro-batches and virtual stages per rank must be at least 1, got {num_stages}, "
            f"{num_micro_batches} and {vpp}"
        )
    if schedule in V_SCHEDULES and vpp != 2:
        raise ValueError(f"schedule {schedule!r} has two virtual stages per rank, got {vpp}")
    if vpp > 1 and schedule != "interleaved" and schedule not in V_SCHEDULES:
        raise ValueError(f"schedule {schedule!r} has one virtual stage per rank, got {vpp}")
    if schedule in PAIRED_SCHEDULES and num_micro_batches < 2 * num_stages:
        raise ValueError(
            f"schedule {schedule!r} needs two micro-batches for every pipeline rank, got {num_micro_batches} for "
            f"{num_stages}"
        )
    if vpp > 1 and num_stages == 1:
        raise ValueError(f"{vpp} virtual stages per rank need at least 2 pipeline ranks, got 1")
    if schedule in SPLIT_SCHEDULES and num_stages == 1:
        raise ValueError(
            f"schedule {schedule!r} splits the backward, which needs at least 2 pipeline ranks, got 1"
        )
    if vpp > 1 and schedule == "interleaved" and num_micro_batches % num_stages:
        raise ValueError(
            f"the interleaved schedule needs micro-batches divisible by the pipeline ranks, got "
            f"{num_micro_batches} and {num_stages}"
        )


@lru_cache(maxsize=256)
def chunk_stages(schedule: Schedule, num_stages: int, vpp: int) -> Int64Array:
    """List the virtual stage of every chunk and rank, [v, P].

    Flattened, it is a permutation that is its own inverse.
    """
    stages = np.array(rank_stages(schedule, num_stages, vpp), dtype=np.int64).T
    stages.flags.writeable = False
    return stages


def num_warmup_forwards(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> Int64Array:
    """Count the forwards that each rank runs before its first forward-backward pair, shape [P].

    w = m (gpipe), min(m, P - 1 - r) (1f1b, zb-h1), min(m v, 2 (P - r - 1) + (v - 1) P) (interleaved). A single
    rank accumulates gradients without a pipeline, w = 0.
    """
    ranks = np.arange(num_stages, dtype=np.int64)
    if num_stages == 1:
        return np.zeros_like(ranks)
    if schedule == "gpipe":
        return np.full_like(ranks, num_micro_batches)
    if schedule in ("1f1b", "zb-h1"):
        return np.minimum(num_micro_batches, num_stages - 1 - ranks)
    return np.minimum(num_micro_batches * vpp, 2 * (num_stages - ranks - 1) + (vpp - 1) * num_stages)


def _sequence(num_stages: int, num_micro_batches: int, vpp: int) -> tuple[Int64Array, Int64Array]:
    """List (chunk, micro-batch) of the k-th forward, shapes [m * v]; the k-th backward is chunk v - 1 - chunk."""
    k = np.arange(num_micro_batches * vpp, dtype=np.int64)
    if vpp == 1:
        return np.zeros_like(k), k
    group, index = np.divmod(k, num_stages * vpp)
    return index // num_stages, group * num_stages + index % num_stages


def _positions(warmup: Int64Array, num_items: int) -> tuple[Int64Array, Int64Array]:
    """Find the positions in a rank's order of its k-th forward and k-th backward, shapes [len(warmup), n].

    Forward k: k, or w + 2 (k - w) after the warm-up; backward k: w + 2 k + 1, or n + k once forwards end.
    """
    k = np.arange(num_items, dtype=np.int64)
    w = warmup[:, None]
    forward = np.where(k < w, k, 2 * k - w)
    backward = np.where(k < num_items - w, w + 2 * k + 1, num_items + k)
    return forward, backward


def _with_weights(
    warmup: Int64Array, forward: Int64Array, backward: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Insert the weight gradients of ``zb-h1`` into the ``_positions`` [P, m].

    Rank s runs weight gradient k - s after backward k. So max(0, k - s) weight gradients precede backward k, and
    max(0, k - w - s) precede forward k, which follows k - w backwards.

    Returns:
        Positions of forwards, backwards and weight gradients, each [P, m].
    """
    num_items = forward.shape[1]
    k, rank = np.arange(num_items, dtype=np.int64), np.arange(len(warmup), dtype=np.int64)[:, None]
    forward = forward + np.maximum(0, k - warmup[:, None] - rank)
    backward = backward + np.maximum(0, k - rank)
    after = np.take_along_axis(backward, np.minimum(k + rank, num_items - 1), axis=1) + 1
    return forward, backward, np.where(k + rank < num_items, after, 2 * num_items + k)


def _zb_v_rank(num_stages: int, num_micro_batches: int, rank: int) -> list[tuple[int, int, int, int]]:
    """List the items (kind, chunk, micro-batch, left) of rank s under ``zb-v``.

    The order is that for M = max(m, 2 P - 1) micro-batches, without the items of micro-batches beyond m:

    - 2 (P - s) - 1 forwards of chunk 0,
    - s times a forward of chunk 1 and a forward of chunk 0,
    - P - s times forward, backward and weight gradient of chunk 1,
    - in turn forward, backward and weight gradient of chunk 0 and of chunk 1, while forwards are left,
    - s times a backward of chunk 0 and a backward of chunk 1,
    - P - s times backward and weight gradient of chunk 0,
    - the remaining weight gradients of chunk 1, then those of chunk 0.

    The items of a kind and chunk are in the order of the micro-batches.
    """
    P, F, B, W = num_stages, Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
    total = max(num_micro_batches, 2 * P - 1)
    done = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
    order: list[tuple[int, int, int]] = []

    def run(times: int, *items: tuple[Kind, int]) -> None:
        for _ in range(times):
            for item in items:
                order.append((*item, done[item]))
                done[item] += 1

    run(2 * (P - rank) - 1, (F, 0))
    run(rank, (F, 1), (F, 0))
    run(P - rank, (F, 1), (B, 1), (W, 1))
    run(total - done[F, 0], (F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    run(total - done[F, 1], (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    run(rank, (B, 0), (B, 1))
    run(P - rank, (B, 0), (W, 0))
    run(total - done[W, 1], (W, 1))
    run(total - done[W, 0], (W, 0))
    return [(*item, 0) for item in order if item[2] < num_micro_batches]


def _dualpipe_v_rank(num_stages: int, num_micro_batches: int, rank: int) -> list[tuple[int, int, int, int]]:
    """List the items (kind, chunk, micro-batch, left) of rank s under ``dualpipe-v``, m >= 2 P.

    - 2 (P - 1 - s) forwards of chunk 0,
    - s + 1 times a forward of chunk 0 and a forward of chunk 1,
    - P - 1 - s times backward and weight gradient of chunk 1 and a forward of chunk 1,
    - m - 2 P + s + 1 times a pair of chunk 0's forward and chunk 1's backward, and a pair of chunk 1's forward and
      chunk 0's backward (on the last rank the first pair runs as a forward and a whole backward),
    - P - 1 - s times a whole backward of chunk 1, and a pair of chunk 1's forward and chunk 0's backward,
    - s + 1 times a backward of chunk 1 and a backward of chunk 0; the first half of these backwards are whole, the
      others queue their weight gradients,
    - P - 1 - s times the first weight gradients of the queue and a backward of chunk 0, which queues its weight
      gradients,
    - the rest of the queue.
    """
    P, F, B, W = num_stages, Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
    done = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
    order: list[tuple[int, int, int, int]] = []
    queue: deque[int] = deque()

    def run(*items: tuple[Kind, int]) -> None:
        for left, item in zip(range(len(items) - 1, -1, -1), items, strict=True):
            order.append((*item, done[item], left))
            done[item] += 1

    def pair(forward: int) -> None:
        run((F, forward), (B, 1 - forward), (W, 1 - forward))

    def backward(chunk: int) -> None:
        run((B, chunk))
        queue.append(chunk)

    after = P - 1 - rank
    for _ in range(2 * after):
        run((F, 0))
    for _ in range(rank + 1):
        run((F, 0))
        run((F, 1))
    for _ in range(after):
        run((B, 1))
        run((W, 1))
        run((F, 1))
    for number in range(num_micro_batches - 2 * P + rank + 1):
        if number or after:
            pair(0)
        else:
            run((F, 0))
            run((B, 1), (W, 1))
        pair(1)
    for _ in range(after):
        run((B, 1), (W, 1))
        pair(1)
    for number in range(2 * (rank + 1)):
        chunk = 1 - number % 2
        if number <= rank:
            run((B, chunk), (W, chunk))
        else:
            backward(chunk)
    for _ in range(after):
        run((W, queue.popleft()))
        backward(0)
    while queue:
        run((W, queue.popleft()))
    return order


def num_pairs(num_stages: int, num_micro_batches: Numbers, rank: Numbers) -> tuple[Numbers, Numbers]:
    """Count the pairs of rank s under ``dualpipe-v``. Broadcasts.

    Returns:
        Pairs with the forward of chunk 0, m - 2 P + s + 1 (a pair less on the last rank), and pairs with the
        forward of chunk 1, m - P. The backward of a pair is of the other chunk.
    """
    is_last = rank == num_stages - 1
    return num_micro_batches - 2 * num_stages + rank + 1 - is_last, num_micro_batches - num_stages + 0 * rank


_BY_RANK = {"zb-v": _zb_v_rank, "dualpipe-v": _dualpipe_v_rank}
"""Functions that write out the order of a schedule rank by rank."""


@lru_cache(maxsize=16)
def work_orders(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> WorkOrder:
    """List the work items of all ranks in the order in which they run, arrays [P, T]."""
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    if schedule in _BY_RANK:
        ranks = [_BY_RANK[schedule](num_stages, num_micro_batches, rank) for rank in range(num_stages)]
        return WorkOrder(*np.moveaxis(np.array(ranks, dtype=np.int32), -1, 0))
    warmup = num_warmup_forwards(schedule, num_stages, num_micro_batches, vpp)
    chunk_of, micro_batch_of = _sequence(num_stages, num_micro_batches, vpp)
    positions: tuple[Int64Array, ...] = _positions(warmup, len(chunk_of))
    if schedule in SPLIT_SCHEDULES:
        positions = _with_weights(warmup, positions[0], positions[1])
    shape = (num_stages, len(positions) * len(chunk_of))
    left = np.broadcast_to(np.int32(0), shape)
    order = WorkOrder(np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.int32), left)
    for kind, position in zip(Kind, positions, strict=False):
        chunks = chunk_of if kind is Kind.FORWARD else vpp - 1 - chunk_of
        for values, column in ((kind, order.kind), (chunks, order.chunk), (micro_batch_of, order.micro_batch)):
            rows = np.broadcast_to(np.asarray(values, dtype=np.int32), position.shape)
            np.put_along_axis(column, position, rows, axis=1)
    return order


def work_order(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int, rank: int) -> WorkOrder:
    """List the work items of one rank in the order in which they run."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    return WorkOrder(orders.kind[rank], orders.chunk[rank], orders.micro_batch[rank], orders.left[rank])


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
