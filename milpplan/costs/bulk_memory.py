"""Peak memory of many uniform plans at once: what ``simulator.rank_memory`` says of the fullest rank of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.costs.repeating import repeats
from milpplan.costs.schedule import placement, rank_profile
from milpplan.costs.stages import StageOptions
from milpplan.specs.plan import Schedule

Moment = tuple[int, tuple[int, ...]]
"""(class of the virtual stage in backward, live micro-batches by class, then those that wait for weight gradients
where the backward is split)."""
_STEADY_GROUPS = 3
"""Interleaved: after so many groups of P micro-batches all live counts have occurred. A rank warms up with fewer
than (v + 1) P forwards, less than two groups, so the third one is steady; later ones repeat it."""


def peak_bytes(
    schedule: Schedule,
    stages: Sequence[StageOptions],
    class_of: IntArray,
    buffers: IntArray,
    micro_batches: IntArray,
) -> tuple[IntArray, IntArray]:
    """Bytes of the fullest rank on the device and on the host, [o, n].

    Args:
        stages: costs of each class of virtual stages, o options of n plans; ``class_of`` [v, P] by chunk and rank.
        buffers, micro_batches: [n].
    """
    device = np.zeros(stages[0].kept_bytes.shape, dtype=np.int64)
    host = np.zeros_like(device)
    for rows, number in _alike(schedule, class_of.shape, micro_batches):
        part = list(stages) if len(rows) == len(buffers) else [stage.take_layouts(rows) for stage in stages]
        for rank in _ranks(schedule, class_of):
            own = class_of[:, rank]
            parts = sum(part[number].state_bytes.sum(axis=0) for number in own) + buffers[rows]
            on_host = sum(part[number].host_state_bytes for number in own)
            moments = _moments(schedule, class_of.shape[1], number, rank, tuple(own.tolist()), len(stages))
            peaks = [_held(part, moment) + part[moment[0]].transient_bytes for moment in moments]
            kept = [_host_held(part, moment) for moment in moments]
            device[:, rows] = np.maximum(device[:, rows], parts + np.max(peaks, axis=0))
            host[:, rows] = np.maximum(host[:, rows], on_host + np.max(kept, axis=0))
    return device, host


def _alike(schedule: Schedule, shape: tuple[int, ...], micro_batches: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Plans with the same live counts, and a number of micro-batches that has them."""
    vpp, ranks = shape
    effective = micro_batches
    if schedule == "1f1b" or ranks == 1:
        effective = np.minimum(micro_batches, ranks)
    elif schedule == "interleaved" and vpp > 1:
        effective = np.minimum(micro_batches, _STEADY_GROUPS * ranks)
    for number in np.unique(effective):
        yield np.flatnonzero(effective == number), int(number)


def _ranks(schedule: Schedule, class_of: IntArray) -> list[int]:
    """Ranks that may be the fullest. Of those with the same classes that is the first one, where all ranks have
    the same forwards and backwards in the same order: it runs most forwards ahead."""
    if not repeats(schedule, len(class_of)):
        return list(range(class_of.shape[1]))
    return sorted(np.unique(class_of, axis=1, return_index=True)[1].tolist())


@lru_cache(maxsize=4096)
def _moments(
    schedule: Schedule, num_ranks: int, micro_batches: int, rank: int, own: tuple[int, ...], classes: int
) -> frozenset[Moment]:
    """The moments of a rank with chunks of the classes ``own`` at which its memory may be at its peak, chunks of a
    class together."""
    if schedule == "gpipe":
        return frozenset({(own[0], (micro_batches if num_ranks > 1 else 1,) + (0,) * (classes - 1))})
    live = rank_profile(schedule, num_ranks, micro_batches, len(own), rank)
    counts = np.array([counts for _, counts in live], dtype=np.int64).reshape(len(live), -1, len(own))
    by_class = counts @ (np.array(own)[:, None] == np.arange(classes))
    rows = map(tuple, by_class.reshape(len(live), -1).tolist())
    return frozenset((own[chunk], row) for (chunk, _), row in zip(live, rows, strict=True))


def _held(stages: Sequence[StageOptions], moment: Moment) -> IntArray:
    """Bytes of live micro-batches and of those that wait, [o, n]."""
    counts, total = moment[1], np.zeros((), dtype=np.int64)
    for stage, count in zip(stages, counts, strict=False):
        total = total + count * stage.kept_bytes if count else total
    for stage, count in zip(stages, counts[len(stages) :], strict=False):
        total = total + count * stage.deferred_bytes if count else total
    return np.asarray(total)


def _host_held(stages: Sequence[StageOptions], moment: Moment) -> IntArray:
    """Bytes of live micro-batches on the host, [o, n]."""
    return np.asarray(sum(count * stage.host_kept_bytes for stage, count in zip(stages, moment[1], strict=False)))


def chunk_classes(schedule: Schedule, num_ranks: int, vpp: int, class_of: IntArray) -> IntArray:
    """Classes of virtual stages [J] by chunk and rank, [v, P]."""
    return np.asarray(class_of[placement(schedule, num_ranks, vpp)])
