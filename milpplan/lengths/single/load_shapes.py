"""First packings of pipelines that follow the best load shapes.

The first micro-batches of a pipeline should be short and grow, and the last ones shrink; the program of
``bounds.long_sequence`` says how for divisible loads. Around a long sequence, which cannot be divided, the shape
differs. So every replica gets its longest sequence, the best position for it and the best number of micro-batches.
Then the other sequences follow, the longest first, each where most load is missing. Alternatively only some
replicas get one of the longest sequences and also the other long ones; the rest have more and shorter
micro-batches, with shorter ramps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths import Load
from milpplan.lengths.bounds import StageLoads, Window
from milpplan.lengths.bounds.long_sequence import solved_window
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.simulation import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class _Shape:
    """Approximate time of a replica in ns, with micro-batches of ``loads`` [v] and its longest sequence at index
    ``place``."""

    time_ns: float
    loads: FloatArray
    longest_index: int


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of a pipeline's replicas with typical sequences."""

    stages: StageLoads
    num_stages: int
    deadline: Deadline

    @property
    def late(self) -> bool:
        """True if the deadline has passed, so that only missing shapes are computed."""
        return self.deadline.passed

    def of(self, number: int, place: int, load: float, least: float) -> _Shape | None:
        """Return the shape of ``number`` micro-batches with at least ``least`` at index ``place``; None if they do
        not hold the load."""
        if not 0 <= place < number:
            return None
        window = Window((place, place), (number - 1 - place, number - 1 - place))
        solution = solved_window(self.stages, self.num_stages, window, load, least)
        return None if solution is None else _Shape(*solution[:2], place)

    def best(self, load: float, least: float) -> _Shape | None:
        """Return the shape with the best number of micro-batches, then with the best position."""
        most = self.stages.most[:1].sum()
        numbers = [number for number in (2, 4, 7, 11, 16, 22, 30, 42) if number * most >= load]
        # The longest sequence stands about a third from the start while the number is sought.
        shape = self._least(lambda number: self.of(number, int(0.35 * number), load, least), numbers)
        if shape is None or least == 0.0:
            return shape
        number = len(shape.loads)
        return self._least(lambda place: self.of(number, place, load, least), [shape.longest_index])

    def _least(self, shape_at: Callable[[int], _Shape | None], tried: list[int]) -> _Shape | None:
        """Return the shortest shape by descent over integers, from the ones in ``tried``, until the deadline."""
        shapes: dict[int, _Shape | None] = {}

        def time_ns(number: int) -> float:
            shape = shapes[number]
            return np.inf if shape is None else shape.time_ns

        for number in tried:
            if not (self.late and any(shapes.values())):
                shapes[number] = shape_at(number)
        step = 2
        while step and shapes and not self.late:
            best_number = min(shapes, key=time_ns)
            for number in (best_number - step, best_number + step):
                if number not in shapes:
                    shapes[number] = shape_at(number) if number >= 0 else None
            step = step if min(shapes, key=time_ns) != best_number else step // 2
        return shapes[min(shapes, key=time_ns)] if shapes else None


def packings_by_shape(
    work_bound: PipelineWorkBound, load: Load, max_quanta: int, deadline: Deadline = NEVER
) -> list[tuple[IntArray, ...]]:
    """Return replicas [v, n] of all sequences, with the longest ones on one, two ... or all of them.

    Empty if the shapes do not hold the sequences. Shapes are computed until the
    ``deadline``.
    """
    shapes = _Shapes(_typical(work_bound.stages), work_bound.num_stages, deadline)
    items = np.repeat(np.arange(len(load.lengths)), load.counts)[::-1]
    num_replicas = work_bound.num_replicas
    free = shapes.best(work_bound.total_load, 0.0)
    if free is None:
        return []
    # Sequences shorter than the largest load leave the shape as it is.
    longest = [float(shapes.stages.last[item]) for item in items[:num_replicas]]
    longest = [min_load if min_load > free.loads.max() else 0.0 for min_load in longest]
    longest += [0.0] * (num_replicas - len(longest))
    shape_of = {min_load: shapes.best(work_bound.total_load, min_load) for min_load in {0.0, *longest}}
    divisions = {tuple(longest[:num_long] + [0.0] * (num_replicas - num_long)) for num_long in _held(num_replicas)}
    packings = []
    for division in sorted(divisions):
        first = [shape for shape in (shape_of[min_load] for min_load in division) if shape is not None]
        if len(first) == num_replicas:
            packings.append(
                _filled(
                    _balanced(shapes, first, division, work_bound.total_load),
                    shapes.stages.last,
                    load,
                    items,
                    max_quanta,
                )
            )
    return [packing for packing in packings if packing is not None]


def _held(num_replicas: int) -> list[int]:
    """Return how many replicas get one of the longest sequences: one, up to all in at most eight equal steps."""
    steps = min(num_replicas, 8)
    return [1, *(-(-num_replicas * (step + 1) // steps) for step in range(steps))]


def _balanced(
    shapes: _Shapes, first: list[_Shape], longest: tuple[float, ...], total_load: float
) -> list[FloatArray]:
    """Return loads of shapes with about equal times: a replica with a longer sequence gets less load."""
    times = np.array([shape.time_ns for shape in first])
    # The time grows slightly faster than the load.
    target_loads = (total_load - (times - times.mean()) / 1.03).clip(longest)
    loads_by_key: dict[tuple[float, float], FloatArray] = {}
    for shape, target_load, min_load in zip(first, target_loads.tolist(), longest, strict=True):
        if (target_load, min_load) not in loads_by_key:
            # A program of this size may take half a second.
            solved = (
                None if shapes.late else shapes.of(len(shape.loads), shape.longest_index, target_load, min_load)
            )
            loads_by_key[target_load, min_load] = (
                shape.loads * (target_load / total_load) if solved is None else solved.loads
            )
    return [loads_by_key[key] for key in zip(target_loads.tolist(), longest, strict=True)]


def _typical(stages: StageLoads) -> StageLoads:
    """Return the stages with the shares of a typical sequence for all."""
    if not len(stages.mixes):
        return stages
    forward, backward = stages.mixes.mean(axis=0).tolist()
    return replace(stages, shares=(forward, backward), mixes=np.zeros((0, 2)))


def _filled(
    shapes: list[FloatArray], sequence_loads: FloatArray, load: Load, items: IntArray, max_quanta: int
) -> tuple[IntArray, ...] | None:
    """Assign sequences, the longest first, where most load is missing and the tokens fit; None if one does not
    fit."""
    quanta = load.lengths // load.token_quantum
    missing = np.concatenate(shapes)
    capacity_left = np.full(len(missing), max_quanta)
    packed = np.zeros((len(missing), len(quanta)), dtype=np.int64)
    for k in items.tolist():
        fits = np.flatnonzero(capacity_left >= quanta[k])
        if not len(fits):
            return None
        index = int(fits[missing[fits].argmax()])
        packed[index, k] += 1
        missing[index] -= sequence_loads[k]
        capacity_left[index] -= quanta[k]
    return tuple(
        part[part.any(axis=1)] for part in np.split(packed, np.cumsum([len(shape) for shape in shapes])[:-1])
    )
