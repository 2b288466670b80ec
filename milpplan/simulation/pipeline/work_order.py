"""The fixed order of work on every pipeline rank.

Words: P pipeline ranks (``num_stages``), m micro-batches, v virtual stages per rank (``vpp``), J = P * v
virtual stages; ``rank_stages`` of ``milpplan.problem.plan`` says which are a rank's chunks. The work items of a
rank are the forwards and backwards of its v chunks on m micro-batches, n = m * v of each; where the backward is
split, "backward" is the input gradients, and n items of weight gradients are added.

Most schedules are a number w of warm-up forwards, then one forward and one backward in turn, then the remaining
backwards; the k-th forward and the k-th backward are the same on all ranks. ``zb-h1`` adds the weight gradients to
1F1B: rank s runs the one of micro-batch k - s after the backward of micro-batch k, and what is left after its last
backward, so no rank keeps more than the first one. ``zb-v`` and ``dualpipe-v`` have orders of their own
(``_zb_v_rank``, ``_dualpipe_v_rank``).

Some items of ``dualpipe-v`` run as one: a whole backward is a backward and its weight gradients, a pair is a
forward and a whole backward beside each other. Both start when all that they need is there, and what they put out
is there when all of it is done.

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

from milpplan.problem.plan import PAIRED_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, Schedule, rank_stages

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, npt.NDArray[np.float64])


class Kind(IntEnum):
    """What a work item is."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder:
    """Work items of one rank (arrays [T]) or of all ranks ([P, T]) in the order they run; ``kind`` is a ``Kind``.
    T = 2 m v, or 3 m v with split backwards. ``left`` items after an item run as one with it; its output is there
    when the last of them is done."""

    kind: Int32Array
    chunk: Int32Array
    micro_batch: Int32Array
    left: Int32Array

    @property
    def is_backward(self) -> npt.NDArray[np.bool_]:
        """Which items are backwards."""
        return np.asarray(self.kind == Kind.BACKWARD)

    @property
    def is_paired(self) -> npt.NDArray[np.bool_]:
        """Which items are the forward or the backward of a pair."""
        forward = np.asarray((self.kind == Kind.FORWARD) & (self.left > 0))
        paired = forward.copy()
        paired[..., 1:] |= forward[..., :-1]
        return paired


def check_schedule(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> None:
    """Raise ``ValueError`` where the schedule does not exist for these numbers."""
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
    if vpp > 1 and schedule == "interleaved" and num_micro_batches % num_stages:
        raise ValueError(
            f"the interleaved schedule needs micro-batches divisible by the pipeline ranks, got "
            f"{num_micro_batches} and {num_stages}"
        )


@lru_cache(maxsize=256)
def placement(schedule: Schedule, num_stages: int, vpp: int) -> Int64Array:
    """The virtual stage of every chunk and rank, [v, P]; flattened it is a permutation that is its own inverse."""
    stages = np.array(rank_stages(schedule, num_stages, vpp), dtype=np.int64).T
    stages.flags.writeable = False
    return stages


def num_warmup_forwards(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> Int64Array:
    """Forwards each rank runs before its first forward-backward pair, shape [P].

    w = m (gpipe), min(m, P - 1 - r) (1f1b, zb-h1), min(m v, 2 (P - r - 1) + (v - 1) P) (interleaved); one rank
    alone accumulates gradients, w = 0.
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


def _with_weights(
    warmup: Int64Array, forward: Int64Array, backward: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """``zb-h1``: the places of ``_positions`` [P, m] with those of the weight gradients among them.

    Rank s runs weight gradient k - s after backward k. So max(0, k - s) of them are before backward k, and
    max(0, k - w - s) before forward k, which follows k - w backwards.
    """
    num_items = forward.shape[1]
    k, rank = np.arange(num_items, dtype=np.int64), np.arange(len(warmup), dtype=np.int64)[:, None]
    forward = forward + np.maximum(0, k - warmup[:, None] - rank)
    backward = backward + np.maximum(0, k - rank)
    after = np.take_along_axis(backward, np.minimum(k + rank, num_items - 1), axis=1) + 1
    return forward, backward, np.where(k + rank < num_items, after, 2 * num_items + k)


def _zb_v_rank(num_stages: int, num_micro_batches: int, rank: int) -> list[tuple[int, int, int, int]]:
    """(kind, chunk, micro-batch, left) of rank s under ``zb-v``, as for M = max(m, 2 P - 1) micro-batches, without
    the items of those that there are not.

    2 (P - s) - 1 forwards of chunk 0; s times a forward of chunk 1 and one of chunk 0; P - s times forward,
    backward and weight gradient of chunk 1; then in turn forward, backward and weight gradient of chunk 0 and of
    chunk 1, as long as there are forwards; s times a backward of chunk 0 and one of chunk 1; P - s times backward
    and weight gradient of chunk 0; the weight gradients left of chunk 1, then those of chunk 0. The items of one
    kind and chunk are in the order of the micro-batches.
    """
    P, F, B, W = num_stages, Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
    most = max(num_micro_batches, 2 * P - 1)
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
    run(most - done[F, 0], (F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    run(most - done[F, 1], (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    run(rank, (B, 0), (B, 1))
    run(P - rank, (B, 0), (W, 0))
    run(most - done[W, 1], (W, 1))
    run(most - done[W, 0], (W, 0))
    return [(*item, 0) for item in order if item[2] < num_micro_batches]


def _dualpipe_v_rank(num_stages: int, num_micro_batches: int, rank: int) -> list[tuple[int, int, int, int]]:
    """(kind, chunk, micro-batch, left) of rank s under ``dualpipe-v``, m >= 2 P.

    2 (P - 1 - s) forwards of chunk 0; s + 1 times a forward of chunk 0 and one of chunk 1; P - 1 - s times
    backward and weight gradient of chunk 1 and a forward of chunk 1; m - 2 P + s + 1 times a pair of chunk 0's
    forward and chunk 1's backward and a pair the other way round (on the last rank the first pair runs as a
    forward and a whole backward); P - 1 - s times a whole backward of chunk 1 and a pair of chunk 1's forward and
    chunk 0's backward; s + 1 times a backward of chunk 1 and one of chunk 0, the first half of all these whole,
    the others without their weight gradients, which queue up; P - 1 - s times the weight gradients first in the
    queue and a backward of chunk 0, whose weight gradients queue up, too; the rest of the queue.
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
    """Pairs of a rank under ``dualpipe-v`` with the forward of chunk 0, m - 2 P + s + 1 but one less on the last
    rank, and with that of chunk 1, m - P: of each, the backward is of the other chunk. Broadcasts."""
    last = rank == num_stages - 1
    return num_micro_batches - 2 * num_stages + rank + 1 - last, num_micro_batches - num_stages + 0 * rank


_BY_RANK = {"zb-v": _zb_v_rank, "dualpipe-v": _dualpipe_v_rank}
"""Schedules whose order is written out rank by rank."""


@lru_cache(maxsize=16)
def work_orders(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int) -> WorkOrder:
    """Work items of all ranks, arrays [P, T] in the order they run."""
    check_schedule(schedule, num_stages, num_micro_batches, vpp)
    if schedule in _BY_RANK:
        ranks = [_BY_RANK[schedule](num_stages, num_micro_batches, rank) for rank in range(num_stages)]
        kind, chunk, micro_batch, left = np.moveaxis(np.array(ranks, dtype=np.int32), -1, 0)
        return WorkOrder(kind, chunk, micro_batch, left)
    warmup = num_warmup_forwards(schedule, num_stages, num_micro_batches, vpp)
    chunk_of, micro_batch_of = _sequence(num_stages, num_micro_batches, vpp)
    places: tuple[Int64Array, ...] = _positions(warmup, len(chunk_of))
    if schedule in SPLIT_SCHEDULES:
        places = _with_weights(warmup, places[0], places[1])
    shape = (num_stages, len(places) * len(chunk_of))
    left = np.broadcast_to(np.int32(0), shape)
    order = WorkOrder(np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.int32), left)
    for kind_of, at in zip(Kind, places, strict=False):
        chunks = chunk_of if kind_of is Kind.FORWARD else vpp - 1 - chunk_of
        for values, column in ((kind_of, order.kind), (chunks, order.chunk), (micro_batch_of, order.micro_batch)):
            np.put_along_axis(column, at, np.broadcast_to(np.asarray(values, dtype=np.int32), at.shape), axis=1)
    return order


def work_order(schedule: Schedule, num_stages: int, num_micro_batches: int, vpp: int, rank: int) -> WorkOrder:
    """Work items of one rank in the order they run."""
    orders = work_orders(schedule, num_stages, num_micro_batches, vpp)
    return WorkOrder(orders.kind[rank], orders.chunk[rank], orders.micro_batch[rank], orders.left[rank])
