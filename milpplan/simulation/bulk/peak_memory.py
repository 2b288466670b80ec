"""Peak memory of many uniform plans at once: what ``simulator.rank_memory`` says of the fullest rank of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce

import numpy as np

from milpplan.problem.plan import Schedule
from milpplan.simulation.bulk.periodic import repeats
from milpplan.simulation.layout_columns import IntArray, ascending
from milpplan.simulation.pipeline.schedule import LiveProfile, placement, rank_profile
from milpplan.simulation.stages import StageOptions

Moment = tuple[int, tuple[int, ...]]
"""(class of the virtual stage in backward, live micro-batches by class, then those that wait for weight gradients
where the backward is split)."""
_STEADY_GROUPS = 3
"""Interleaved: after so many groups of P micro-batches all live counts have occurred. A rank warms up with fewer
than (v + 1) P forwards, less than two groups, so the third one is steady; later ones repeat it."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What one class of virtual stages holds: states [n], of a live micro-batch [o, n], of one that waits [n],
    while its backward runs [o, n]; on the host states and of a live micro-batch."""

    states: IntArray
    kept: IntArray
    deferred: IntArray
    transient: IntArray
    host_states: IntArray
    host_kept: IntArray

    @staticmethod
    def of(stage: StageOptions) -> _Bytes:
        """Of a virtual stage."""
        return _Bytes(
            stage.state_bytes.sum(axis=0),
            stage.kept_bytes,
            stage.deferred_bytes,
            stage.transient_bytes,
            stage.host_state_bytes,
            stage.host_kept_bytes,
        )

    def take(self, rows: IntArray) -> _Bytes:
        """The chosen plans."""
        return _Bytes(*(getattr(self, part.name)[..., rows] for part in fields(self)))


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
    host, whole = np.zeros_like(device), [_Bytes.of(stage) for stage in stages]
    offloads = any(part.host_states.any() or part.host_kept.any() for part in whole)
    if schedule == "1f1b":
        _fill_1f1b(whole, class_of[0], buffers, micro_batches, device, host)
        return device, host
    for rows, number in _alike(schedule, class_of.shape, micro_batches):
        held = whole if len(rows) == len(buffers) else [part.take(rows) for part in whole]
        for rank in _ranks(schedule, class_of):
            own = tuple(class_of[:, rank].tolist())
            moments = _moments(schedule, class_of.shape[1], number, rank, own, len(stages))
            states = sum(count * held[index].states for index, count in Counter(own).items())
            peaks = [_held(held, moment) + held[moment[0]].transient for moment in moments]
            device[:, rows] = np.maximum(device[:, rows], states + buffers[rows] + reduce(np.maximum, peaks))
            if offloads:
                on_host = sum(count * held[index].host_states for index, count in Counter(own).items())
                live = reduce(np.maximum, [_host_held(held, moment) for moment in moments])
                host[:, rows] = np.maximum(host[:, rows], on_host + live)
    return device, host


def _fill_1f1b(
    held: Sequence[_Bytes],
    class_of: IntArray,
    buffers: IntArray,
    micro_batches: IntArray,
    device: IntArray,
    host: IntArray,
) -> None:
    """Bytes of plans with 1F1B: rank r of P holds P - r micro-batches when its first backward starts, or all that
    there are, and never more. Of ranks with stages of a class the first one holds most."""
    for index, rank in zip(*np.unique(class_of, return_index=True), strict=True):
        own, live = held[int(index)], np.minimum(micro_batches, len(class_of) - rank)
        np.maximum(device, own.states + buffers + live * own.kept + own.transient, out=device)
        np.maximum(host, own.host_states + live * own.host_kept, out=host)


def _alike(schedule: Schedule, shape: tuple[int, ...], micro_batches: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Plans with the same live counts, and a number of micro-batches that has them."""
    vpp, ranks = shape
    effective = micro_batches
    if ranks == 1:
        effective = np.minimum(micro_batches, ranks)
    elif schedule == "interleaved" and vpp > 1:
        effective = np.minimum(micro_batches, _STEADY_GROUPS * ranks)
    for number in ascending(effective):
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
    live: tuple[LiveProfile, ...]
    if schedule == "gpipe":
        # All forwards come first: no need to go through them.
        live = ((0, (micro_batches if num_ranks > 1 else 1,)),)
    else:
        live = rank_profile(schedule, num_ranks, micro_batches, len(own), rank)
    counts = np.array([counts for _, counts in live], dtype=np.int64).reshape(len(live), -1, len(own))
    by_class = counts @ (np.array(own)[:, None] == np.arange(classes))
    rows = map(tuple, by_class.reshape(len(live), -1).tolist())
    return frozenset((own[chunk], row) for (chunk, _), row in zip(live, rows, strict=True))


def _held(stages: Sequence[_Bytes], moment: Moment) -> IntArray:
    """Bytes of live micro-batches and of those that wait, [o, n]."""
    counts = moment[1]
    live, waiting = counts[: len(stages)], counts[len(stages) :]
    parts = [count * stage.kept for stage, count in zip(stages, live, strict=True) if count]
    parts += [count * stage.deferred for stage, count in zip(stages, waiting, strict=False) if count]
    return reduce(np.add, parts)


def _host_held(stages: Sequence[_Bytes], moment: Moment) -> IntArray:
    """Bytes of live micro-batches on the host, [o, n]."""
    live = zip(stages, moment[1], strict=False)
    return reduce(np.add, [count * stage.host_kept for stage, count in live if count])


def chunk_classes(schedule: Schedule, num_ranks: int, vpp: int, class_of: IntArray) -> IntArray:
    """Classes of virtual stages [J] by chunk and rank, [v, P]."""
    return np.asarray(class_of[placement(schedule, num_ranks, vpp)])
