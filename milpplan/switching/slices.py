"""What a switch has to move: slices of tensors by who holds them before and who lacks them for afterwards.

The boxes of both plans cut every tensor into cells (their common refinement). Cells with the same holders and the
same receivers are one lot, whatever tensor they are of: senders are chosen for lots, and a lot is long enough to
be divided among senders anywhere between two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import BoolArray, IntArray
from milpplan.errors import InvalidInputError
from milpplan.specs.model import ModelSpec
from milpplan.specs.plan import Plan
from milpplan.switching.ownership import EQUAL_ROWS, Ownership, ShardRules, What, element_bytes, ownership
from milpplan.switching.tensors import Shape, Tensor, model_tensors

MAX_GPUS = 4096
"""Largest switch that is written out."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Everything that some rank lacks, and what every rank holds.

    ``holders`` and ``receivers`` [lots, ranks]; ``num_bytes`` [lots]; ``slices`` of each lot [slices, 5]: number
    of the tensor in ``tensors`` and its box. ``old_bytes``, ``new_bytes`` and ``kept_bytes`` [ranks]: held before,
    held afterwards, and in both.
    """

    what: What
    element_bytes: int
    tensors: tuple[Tensor, ...]
    holders: BoolArray
    receivers: BoolArray
    num_bytes: IntArray
    slices: tuple[IntArray, ...]
    old_bytes: IntArray
    new_bytes: IntArray
    kept_bytes: IntArray

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def num_gpus(self) -> int:
        """Ranks."""
        return len(self.old_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the ranks lack together: what any plan that sends nothing twice moves."""
        return int((self.new_bytes - self.kept_bytes).sum())


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one tensor: boxes [cells, 4], who holds them and who needs them [cells, ranks]."""

    boxes: IntArray
    holders: BoolArray
    needers: BoolArray

    @property
    def sizes(self) -> IntArray:
        """Elements of each cell."""
        return np.asarray((self.boxes[:, 1] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 2]))


def refine(source: IntArray, target: IntArray, num_gpus: int) -> Cells:
    """The common refinement of two sets of boxes [boxes, 5] (rank, box) of one tensor."""
    both = np.concatenate([source, target])
    row_cuts, column_cuts = np.unique(both[:, 1:3]), np.unique(both[:, 3:5])
    shape = (num_gpus, len(row_cuts) - 1, len(column_cuts) - 1)
    marks = []
    for boxes in (source, target):
        mark = np.zeros(shape, dtype=np.bool_)
        rows, columns = np.searchsorted(row_cuts, boxes[:, 1:3]), np.searchsorted(column_cuts, boxes[:, 3:5])
        for rank, (top, bottom), (left, right) in zip(boxes[:, 0], rows, columns, strict=True):
            mark[rank, top:bottom, left:right] = True
        marks.append(mark.reshape(num_gpus, -1).T)
    top, left = (axis.ravel() for axis in np.meshgrid(row_cuts[:-1], column_cuts[:-1], indexing="ij"))
    bottom, right = (axis.ravel() for axis in np.meshgrid(row_cuts[1:], column_cuts[1:], indexing="ij"))
    return Cells(np.stack([top, bottom, left, right], axis=1), marks[0], marks[1])


def lots(
    model: ModelSpec,
    source: Plan,
    target: Plan,
    what: What,
    grad_bytes: int = 4,
    rules: ShardRules = EQUAL_ROWS,
) -> Lots:
    """What a switch from one plan to another has to move of ``what``.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs, or too many.
        IllegalPlanError: a plan is not one of the model.
    """
    if source.layout.num_gpus != target.layout.num_gpus:
        raise InvalidInputError(
            f"The plans use {source.layout.num_gpus:,} and {target.layout.num_gpus:,} GPUs.",
            "Expected two plans on the same GPUs.",
            "Give plans of one job.",
        )
    tensors, num_gpus = model_tensors(model), source.layout.num_gpus
    if num_gpus > MAX_GPUS:
        raise InvalidInputError(
            f"A switch of {num_gpus:,} GPUs.",
            f"Expected at most {MAX_GPUS:,}: it is written out rank by rank.",
            "Plan it for fewer replicas, which all do the same.",
        )
    before, after = (ownership(model, plan, what, rules) for plan in (source, target))
    held = np.zeros((3, num_gpus), dtype=np.int64)
    found: dict[tuple[bytes, bytes], list[tuple[IntArray, IntArray]]] = defaultdict(list)
    for numbers, boxes in _alike(tensors, before, after):
        cells = refine(*boxes, num_gpus)
        sizes, count = cells.sizes, len(numbers)
        for row, mark in enumerate((cells.holders, cells.needers, cells.holders & cells.needers)):
            held[row] += count * (sizes @ mark)
        lacking = cells.needers & ~cells.holders
        for key, chosen in _by_marks(cells.holders, lacking):
            found[key].append((numbers, cells.boxes[chosen]))
    held *= element_bytes(what, grad_bytes)
    return _stacked(what, element_bytes(what, grad_bytes), tensors, found, held)


def _alike(
    tensors: Sequence[Tensor], before: Ownership, after: Ownership
) -> Iterator[tuple[IntArray, tuple[IntArray, IntArray]]]:
    """Numbers of tensors that are divided alike under both plans, with the boxes of both."""
    groups: dict[tuple[Shape, object, object], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        groups[tensor.shape, before.key(tensor), after.key(tensor)].append(number)
    for numbers in groups.values():
        first = tensors[numbers[0]]
        yield np.array(numbers, dtype=np.int64), (before.boxes(first), after.boxes(first))


def _by_marks(holders: BoolArray, lacking: BoolArray) -> Iterator[tuple[tuple[bytes, bytes], IntArray]]:
    """Cells that somebody lacks, by (holders, receivers) as packed bits."""
    some = np.flatnonzero(lacking.any(axis=1))
    packed = np.packbits(np.concatenate([holders[some], lacking[some]], axis=1), axis=1)
    distinct, inverse = np.unique(packed, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.ravel(), minlength=len(distinct)))[:-1])
    for chosen in parts:
        if len(chosen):
            cell = some[chosen[0]]
            yield (np.packbits(holders[cell]).tobytes(), np.packbits(lacking[cell]).tobytes()), some[chosen]


def _stacked(
    what: What,
    each: int,
    tensors: tuple[Tensor, ...],
    found: dict[tuple[bytes, bytes], list[tuple[IntArray, IntArray]]],
    held: IntArray,
) -> Lots:
    """Lots of the collected cells; slices in the order of the model."""
    num_gpus = held.shape[1]
    slices = []
    for parts in found.values():
        rows = [
            np.column_stack([np.repeat(numbers, len(boxes)), np.tile(boxes, (len(numbers), 1))])
            for numbers, boxes in parts
        ]
        joined = np.concatenate(rows)
        slices.append(joined[np.argsort(joined[:, 0], kind="stable")])
    marks = [
        np.array([np.unpackbits(np.frombuffer(key[side], np.uint8))[:num_gpus] for key in found], dtype=np.bool_)
        for side in (0, 1)
    ]
    holders, receivers = (mark.reshape(-1, num_gpus) for mark in marks)
    assert holders.any(axis=1).all(), "a slice that nobody holds"
    num_bytes = [each * int(((part[:, 2] - part[:, 1]) * (part[:, 4] - part[:, 3])).sum()) for part in slices]
    return Lots(what, each, tensors, holders, receivers, np.array(num_bytes, dtype=np.int64), tuple(slices), *held)
