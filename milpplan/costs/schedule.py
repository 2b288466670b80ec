"""The fixed order of work on every pipeline rank, and what it fixes: live activations and the step graph.

Words: P pipeline ranks (``num_stages``), m micro-batches, v virtual stages per rank (``vpp``), J = P * v
virtual stages; virtual stage j runs on rank ``j % P`` as chunk ``j // P``. The work items of a rank are the
forwards and backwards of its v chunks on m micro-batches, n = m * v of each. Every schedule is a number w of
warm-up forwards, then one forward and one backward in turn, then the remaining backwards; the k-th forward
and the k-th backward are the same on all ranks. So a schedule is fixed by w and one sequence.

Source: GPipe, Huang et al. 2019 (all forwards, then all backwards); 1F1B is PipeDream-Flush, Narayanan et
al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", figure 4;
interleaved order is Megatron-LM ``core/pipeline_parallel/schedules.py`` at d98e8a64 with a micro-batch group
of P.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from milpplan.specs.plan import SCHEDULES, Schedule

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
LiveProfile = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder:
    """Work items of one rank in the order they run; arrays of shape [2 * m * v]."""

    is_backward: npt.NDArray[np.bool_]
    chunk: Int32Array
    micro_batch: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The work items of a step as a graph in topological levels; it knows no durations.

    N = 2 * J * m nodes, numbered level by level (a level is the longest number of hops from a source, so
    the nodes of a level do not depend on each other). After them: N + r is the origin of rank r (where its
    first item waits) and N + P stands for "no predecessor on another rank".

    Attributes:
        level_offsets: nodes of level l are ``level_offsets[l]`` to ``level_offsets[l + 1] - 1``.
        rank_predecessor: [N] the item before on the same rank, or the origin of the rank.
        transfer_predecessor: [N] the item of another rank whose output is needed, or N + P. The last
            virtual stage's backward needs its own forward, which the order of the rank implies.
        duration_index: [N] row of ``durations.reshape(7 * J)`` that the node takes its duration from.
        forward_node: [J, m] node of each forward.
        backward_node: [J, m] node of each backward.
        last_node: [P] the last item of each rank.
    """

    num_stages: int
    num_micro_batches: int
    vpp: int
    level_offsets: tuple[int, ...]
    rank_predecessor: Int32Array
    transfer_predecessor: Int32Array
    duration_index: Int32Array
    forward_node: Int32Array
    backward_node: Int32Array
    last_node: Int32Array

    def __post_init__(self) -> None:
        """Structures are cached and shared, so nobody may write into them."""
        for array in (self.rank_predecessor, self.transfer_predecessor, self.duration_index):
            array.flags.writeable = False
        for array in (self.forward_node, self.backward_node, self.last_node):
            array.flags.writeable = False

    @property
    def num_nodes(self) -> int:
        """Work items, forwards and backwards (N)."""
        return len(self.duration_index)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages (J)."""
        return self.num_stages * self.vpp


def check_schedule(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> None:
    """Raise ``ValueError`` where the schedule does not exist for these numbers."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown, expected one of {', '.join(SCHEDULES)}")
    if min(num_stages, num_micro_batches, vpp) < 1:
        raise ValueError(
            f"stages, micro-batches and virtual stages per rank must be at least 1, got {num_stages}, "
            f"{num_micro_batches} and {vpp}"
        )
    if vpp > 1 and schedule != "interleaved":
        raise ValueError(f"schedule {schedule!r} has one virtual stage per rank, got {vpp}")
    if vpp > 1 and num_stages == 1:
        raise ValueError(f"{vpp} virtual stages per rank need at least 2 pipeline ranks, got 1")
    if vpp > 1 and num_micro_batches % num_stages:
        raise ValueError(
            f"the interleaved schedule needs micro-batches divisible by the pipeline ranks, got "
            f"{num_micro_batches} and {num_stages}"
        )


def num_warmup_forwards(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> Int64Array:
    """Forwards each rank runs before its first forward-backward pair, shape [P].

    w = m (gpipe), min(m, P - 1 - r) (1f1b), min(m v, 2 (P - r - 1) + (v - 1) P) (interleaved); one rank
    alone accumulates gradients, w = 0.
    """
    ranks = np.arange(num_stages, dtype=np.int64)
    if num_stages == 1:
        return np.zeros_like(ranks)
    if schedule == "gpipe":
        return np.full_like(ranks, num_micro_batches)
    if schedule == "1f1b":
        return np.minimum(num_micro_batches, num_stages - 1 - ranks)
    return np.minimum(num_micro_batches * vpp, 2 * (num_stages - ranks - 1) + (vpp - 1) * num_stages)


def _sequence(num_stages: int, num_micro_batches: int, vpp: int) -> tuple[Int64Array, Int64Array]:
    """(chunk, micro-batch) of the k-th forward, shapes [m * v]; the k-th backward is chunk v - 1 - chunk."""
    k = np.arange(num_micro_batches * vpp, dtype=np.int64)
    if vpp == 1:
        return np.zeros_like(k), k
    group, place = np.divmod(k, num_stages * vpp)
    return place // num_stages, group * num_stages + place % num_stages


def _positions(warmup: Int64Array, num_items: int) -> tuple[Int64Array, Int64Array]:
    """Place in the rank's order of its k-th forward and of its k-th backward, shapes [len(warmup), n].

    Forward k: k, or w + 2 (k - w) after the warm-up; backward k: w + 2 k + 1, or n + k once forwards end.
    """
    k = np.arange(num_items, dtype=np.int64)
    w = warmup[:, None]
    forward = np.where(k < w, k, 2 * k - w)
    backward = np.where(k < num_items - w, w + 2 * k + 1, num_items + k)
    return forward, backward


def work_order(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int, rank: int) -> WorkOrder:
    """Work items of one rank in the order they run."""
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    warmup = num_warmup_forwards(schedule, num_stages, num_micro_batches, vpp)[[rank]]
    chunk, micro_batch = _sequence(num_stages, num_micro_batches, vpp)
    forward, backward = (places[0] for places in _positions(warmup, len(chunk)))
    is_backward = np.zeros(2 * len(chunk), dtype=np.bool_)
    chunk_in_order = np.empty(2 * len(chunk), dtype=np.int32)
    micro_batch_in_order = np.empty_like(chunk_in_order)
    is_backward[backward] = True
    chunk_in_order[forward], chunk_in_order[backward] = chunk, vpp - 1 - chunk
    micro_batch_in_order[forward] = micro_batch_in_order[backward] = micro_batch
    return WorkOrder(is_backward, chunk_in_order, micro_batch_in_order)


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

    A forward adds one to its chunk when it starts, a backward releases it when it ends, so the one being
    processed counts. At the k-th backward, with F and B the running counts per chunk,
    live = F(min(n, w + k + 1)) - B(k). Per rank and running chunk only the Pareto-maximal vectors of
    length v are kept: any memory that grows with every count has its peak at one of them.
    """
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    chunk, _ = _sequence(num_stages, num_micro_batches, vpp)
    num_items = len(chunk)
    forwards = np.zeros((num_items + 1, vpp), dtype=np.int64)
    np.cumsum(chunk[:, None] == np.arange(vpp), axis=0, out=forwards[1:])
    k = np.arange(num_items)
    running, backwards = vpp - 1 - chunk, forwards[:-1, ::-1]
    profiles: list[tuple[LiveProfile, ...]] = []
    for warmup in num_warmup_forwards(schedule, num_stages, num_micro_batches, vpp):
        live = forwards[np.minimum(num_items, warmup + k + 1)] - backwards
        rows = _distinct_rows(np.column_stack([running, live]))
        kept = [(c, _pareto_maximal(rows[rows[:, 0] == c, 1:])) for c in range(vpp)]
        profiles.append(tuple((c, tuple(counts)) for c, maximal in kept for counts in maximal.tolist()))
    return tuple(profiles)


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
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    chunk, micro_batch = _sequence(num_stages, num_micro_batches, vpp)
    warmup = num_warmup_forwards(schedule, num_stages, num_micro_batches, vpp)
    stride, num_virtual = 2 * len(chunk) + 1, num_stages * vpp
    rank_base = np.arange(num_stages, dtype=np.int64)[:, None] * stride
    forward_place, backward_place = (rank_base + places for places in _positions(warmup, len(chunk)))
    by_chunk = np.empty((2, vpp, num_stages, num_micro_batches), dtype=np.int64)
    by_chunk[0, chunk, :, micro_batch] = forward_place.T
    by_chunk[1, vpp - 1 - chunk, :, micro_batch] = backward_place.T
    items = by_chunk.reshape(2, num_virtual, num_micro_batches)

    transfer_source = np.full(num_stages * stride, -1, dtype=np.int64)
    if num_stages > 1:
        transfer_source[items[0, 1:]] = items[0, :-1]
        transfer_source[items[1, :-1]] = items[1, 1:]
    transfer_source[stride - 1 :: stride] = stride - 1
    levels = _levels(transfer_source, num_stages)
    order = np.concatenate(levels)
    num_nodes = len(order)
    node = np.full(num_stages * stride + 1, num_nodes + num_stages, dtype=np.int32)
    node[order] = np.arange(num_nodes, dtype=np.int32)
    is_first = order % stride == 0
    rank_predecessor = np.where(is_first, num_nodes + order // stride, node[order - 1]).astype(np.int32)
    duration_index = np.empty(num_nodes, dtype=np.int32)
    nodes = node[items]
    duration_index[nodes] = np.arange(2 * num_virtual, dtype=np.int32).reshape(2, num_virtual, 1)
    return Structure(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        vpp=vpp,
        level_offsets=(0, *np.cumsum([len(level) for level in levels]).tolist()),
        rank_predecessor=rank_predecessor,
        transfer_predecessor=node[transfer_source[order]],
        duration_index=duration_index,
        forward_node=nodes[0],
        backward_node=nodes[1],
        last_node=node[rank_base[:, 0] + stride - 2],
    )
