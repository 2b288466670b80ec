"""Peak memory of many uniform plans at a time: that of the fullest rank, equal to ``simulator.rank_memory``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce

import numpy as np

from milpplan.problem import Schedule
from milpplan.simulation import IntArray, StageOptions, ascending
from milpplan.simulation.bulk.lockstep import repeats
from milpplan.simulation.pipeline.work_orders import LiveProfile, chunk_stages, rank_profile

Moment = tuple[int, tuple[int, ...]]
"""(class of the virtual stage in backward, counts by class). The counts are the live micro-batches; with split
backwards, the micro-batches that wait for their weight gradients follow."""
_STEADY_GROUPS = 3
"""Interleaved schedule: number of groups of P micro-batches after which all live counts have occurred. A rank
warms up with fewer than (v + 1) P forwards, less than two groups, so the third group is steady and later groups
repeat it."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Memory of a class of virtual stages, in bytes, for o recompute options of n plans."""

    states: IntArray
    """[n]."""
    kept: IntArray
    """[o, n] per live micro-batch."""
    deferred: IntArray
    """[n] per micro-batch that waits for its weight gradients."""
    transient: IntArray
    """[o, n] while its backward runs."""
    host_states: IntArray
    """[n] on the host."""
    host_kept: IntArray
    """[o, n] on the host, per live micro-batch."""

    @staticmethod
    def of(stage: StageOptions) -> _Bytes:
        """Collect the bytes of a virtual stage."""
        return _Bytes(
            stage.state_bytes.sum(axis=0),
            stage.kept_bytes,
            stage.deferred_bytes,
            stage.transient_bytes,
            stage.host_state_bytes,
            stage.host_kept_bytes,
        )

    def take(self, rows: IntArray) -> _Bytes:
        """Select plans."""
        return _Bytes(*(getattr(self, part.name)[..., rows] for part in fields(self)))


def peak_bytes(
    schedule: Schedule,
    stages: Sequence[StageOptions],
    class_of: IntArray,
    buffers: IntArray,
    micro_batches: IntArray,
) -> tuple[IntArray, IntArray]:
    """Find the peak memory of the fullest rank.

    Args:
        stages: costs of each class of virtual stages, o options of n plans.
        class_of: [v, P] class of the virtual stage of every chunk and rank.
        buffers, micro_batches: [n].

    Returns:
        Bytes on the device and on the host, each [o, n].
    """
    device = np.zeros(stages[0].kept_bytes.shape, dtype=np.int64)
    host, all_plans = np.zeros_like(device), [_Bytes.of(stage) for stage in stages]
    offloads = any(part.host_states.any() or part.host_kept.any() for part in all_plans)
    if schedule == "1f1b":
        _fill_1f1b(all_plans, class_of[0], buffers, micro_batches, device, host)
        return device, host
    for rows, number in _alike(schedule, class_of.shape, micro_batches):
        classes = all_plans if len(rows) == len(buffers) else [part.take(rows) for part in all_plans]
        for rank in _ranks(schedule, class_of):
            chunks = tuple(class_of[:, rank].tolist())
            moments = _moments(schedule, class_of.shape[1], number, rank, chunks, len(stages))
            states = sum(count * classes[index].states for index, count in Counter(chunks).items())
            peaks = [_kept_bytes(classes, moment) + classes[moment[0]].transient for moment in moments]
            device[:, rows] = np.maximum(device[:, rows], states + buffers[rows] + reduce(np.maximum, peaks))
            if offloads:
                host_states = sum(count * classes[index].host_states for index, count in Counter(chunks).items())
                live = reduce(np.maximum, [_host_kept_bytes(classes, moment) for moment in moments])
                host[:, rows] = np.maximum(host[:, rows], host_states + live)
    return device, host


def _fill_1f1b(
    classes: Sequence[_Bytes],
    class_of: IntArray,
    buffers: IntArray,
    micro_batches: IntArray,
    device: IntArray,
    host: IntArray,
) -> None:
    """Fill the bytes of plans with 1F1B.

    Rank r of P holds min(m, P - r) micro-batches when its first backward starts, and never more. Among ranks with
    stages of the same class the first rank is the fullest.
    """
    for index, rank in zip(*np.unique(class_of, return_index=True), strict=True):
        stage, live = classes[int(index)], np.minimum(micro_batches, len(class_of) - rank)
        np.maximum(device, stage.states + buffers + live * stage.kept + stage.transient, out=device)
        np.maximum(host, stage.host_states + live * stage.host_kept, out=host)


def _alike(schedule: Schedule, shape: tuple[int, ...], micro_batches: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Group the plans with equal live counts; yield their rows and a number of micro-batches with these counts."""
    vpp, ranks = shape
    effective = micro_batches
    if ranks == 1:
        effective = np.minimum(micro_batches, ranks)
    elif schedule == "interleaved" and vpp > 1:
        effective = np.minimum(micro_batches, _STEADY_GROUPS * ranks)
    for number in ascending(effective):
        yield np.flatnonzero(effective == number), int(number)


def _ranks(schedule: Schedule, class_of: IntArray) -> list[int]:
    """List the ranks that may be the fullest.

    If all ranks have the same forwards and backwards in the same order, the first rank of those with the same
    classes is the fullest, because it runs the most forwards ahead.
    """
    if not repeats(schedule, len(class_of)):
        return list(range(class_of.shape[1]))
    return sorted(np.unique(class_of, axis=1, return_index=True)[1].tolist())


@lru_cache(maxsize=4096)
def _moments(
    schedule: Schedule, num_ranks: int, micro_batches: int, rank: int, chunks: tuple[int, ...], classes: int
) -> frozenset[Moment]:
    """List the moments at which the memory of a rank may be at its peak; ``chunks`` are the classes of its chunks.

    The counts of chunks of the same class are added.
    """
    live: tuple[LiveProfile, ...]
    if schedule == "gpipe":
        # All forwards come first, so the peak is at the first backward.
        live = ((0, (micro_batches if num_ranks > 1 else 1,)),)
    else:
        live = rank_profile(schedule, num_ranks, micro_batches, len(chunks), rank)
    counts = np.array([counts for _, counts in live], dtype=np.int64).reshape(len(live), -1, len(chunks))
    by_class = counts @ (np.array(chunks)[:, None] == np.arange(classes))
    rows = map(tuple, by_class.reshape(len(live), -1).tolist())
    return frozenset((chunks[chunk], row) for (chunk, _), row in zip(live, rows, strict=True))


def _kept_bytes(stages: Sequence[_Bytes], moment: Moment) -> IntArray:
    """Sum the bytes of live micro-batches and of micro-batches that wait for weight gradients, [o, n]."""
    counts = moment[1]
    live, waiting = counts[: len(stages)], counts[len(stages) :]
    parts = [count * stage.kept for stage, count in zip(stages, live, strict=True) if count]
    parts += [count * stage.deferred for stage, count in zip(stages, waiting, strict=False) if count]
    return reduce(np.add, parts)


def _host_kept_bytes(stages: Sequence[_Bytes], moment: Moment) -> IntArray:
    """Sum the bytes of live micro-batches on the host, [o, n]."""
    live = zip(stages, moment[1], strict=False)
    return reduce(np.add, [count * stage.host_kept for stage, count in live if count])


def chunk_classes(schedule: Schedule, num_ranks: int, vpp: int, class_of: IntArray) -> IntArray:
    """Arrange the classes of virtual stages [J] by chunk and rank, [v, P]."""
    return np.asarray(class_of[chunk_stages(schedule, num_ranks, vpp)])
