"""Lots of a switch: slices of tensors, grouped by their holders before and their receivers.

The boxes of both plans cut every tensor into cells (their common refinement). Cells with the same holders and the
same receivers form a lot, whatever their tensors. Senders are chosen for lots, and a lot may be divided among
senders between any two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem import ModelSpec, Plan
from milpplan.simulation import BoolArray, IntArray
from milpplan.switching.ownership import (
    EQUAL_ROWS,
    Ownership,
    Shape,
    ShardRules,
    Tensor,
    What,
    element_bytes,
    ownership,
)

MAX_GPUS = 4096
"""Maximum number of GPUs of a switch, which lists every rank."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Lots that some rank lacks, and the bytes of every rank."""

    what: What
    element_bytes: int
    tensors: tuple[Tensor, ...]
    holders: BoolArray
    """[lots, ranks] ranks that hold a lot before the switch."""
    receivers: BoolArray
    """[lots, ranks] ranks that lack a lot."""
    num_bytes: IntArray
    """[lots]."""
    groups: tuple[IntArray, ...]
    """Numbers of the tensors of each group of tensors that are cut alike."""
    cells: IntArray
    """[cells, 5] group of tensors, and box; in the order of their lots."""
    ends: IntArray
    """[lots] last cell + 1 of each lot."""
    old_bytes: IntArray
    """[ranks] before the switch."""
    new_bytes: IntArray
    """[ranks] after the switch."""
    kept_bytes: IntArray
    """[ranks] both before and after the switch."""

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return len(self.old_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks lack; a plan without duplicate messages moves exactly these bytes."""
        return int((self.new_bytes - self.kept_bytes).sum())

    def slices(self, lot: int) -> IntArray:
        """List number of the tensor and box of every slice of a lot, in the order of the model, [slices, 5]."""
        cells = self.cells[self.ends[lot - 1] if lot else 0 : self.ends[lot]]
        numbers = [self.groups[group] for group in cells[:, 0]]
        boxes = np.repeat(cells[:, 1:], [len(part) for part in numbers], axis=0)
        rows = np.column_stack([np.concatenate(numbers), boxes])
        return np.asarray(rows[np.lexsort((rows[:, 3], rows[:, 1], rows[:, 0]))])


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a tensor."""

    boxes: IntArray
    """[cells, 4]."""
    holders: BoolArray
    """[cells, ranks] ranks that hold a cell before the switch."""
    needers: BoolArray
    """[cells, ranks] ranks that hold a cell after the switch."""

    @property
    def sizes(self) -> IntArray:
        """Number of elements of each cell."""
        return np.asarray((self.boxes[:, 1] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 2]))


def refine(source: IntArray, target: IntArray, num_gpus: int) -> Cells:
    """Compute the common refinement of two sets of boxes [boxes, 5] (rank, box) of a tensor.

    Boxes of the same rank in the same set do not overlap.
    """
    both = np.concatenate([source, target])
    row_cuts, column_cuts = np.unique(both[:, 1:3]), np.unique(both[:, 3:5])
    marks = []
    for boxes in (source, target):
        # Each box adds 1 at its first corner and subtracts it behind its edges; sums over both axes fill the box.
        corners = np.zeros((num_gpus, len(row_cuts), len(column_cuts)), dtype=np.int32)
        rows, columns = np.searchsorted(row_cuts, boxes[:, 1:3]), np.searchsorted(column_cuts, boxes[:, 3:5])
        for row, column, sign in ((0, 0, 1), (1, 0, -1), (0, 1, -1), (1, 1, 1)):
            np.add.at(corners, (boxes[:, 0], rows[:, row], columns[:, column]), sign)
        mark = corners.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1] > 0
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
    """Find the lots that a switch of a state from one plan to another has to move.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs, or too many GPUs.
        IllegalPlanError: a plan does not suit the model.
    """
    check_gpus([source, target])
    before, after = (ownership(model, plan, what, rules) for plan in (source, target))
    return lots_between(before, after, element_bytes(what, grad_bytes))


def check_gpus(plans: list[Plan]) -> None:
    """Check that all plans are on the same GPUs, and not on too many.

    Raises:
        InvalidInputError: they are not.
    """
    numbers = sorted({plan.layout.num_gpus for plan in plans})
    if len(numbers) > 1:
        raise InvalidInputError(
            f"The plans use {' and '.join(f'{number:,}' for number in numbers)} GPUs.",
            "Expected plans on the same GPUs.",
            "Give plans of one job.",
        )
    if numbers and numbers[0] > MAX_GPUS:
        raise InvalidInputError(
            f"A switch of {numbers[0]:,} GPUs.",
            f"Expected at most {MAX_GPUS:,}: it is written out rank by rank.",
            "Plan it for fewer replicas, which all do the same.",
        )


def lots_between(before: Ownership, after: Ownership, element_size: int) -> Lots:
    """Find the lots between two ownerships of the same state, with ``element_size`` bytes per element."""
    num_gpus = before.plan.layout.num_gpus
    rank_elements = np.zeros((3, num_gpus), dtype=np.int64)
    groups, boxes, sizes, marks = list[IntArray](), list[IntArray](), list[IntArray](), list[BoolArray]()
    for numbers, pair in _alike(before, after):
        cells = refine(*pair, num_gpus)
        elements = cells.sizes * len(numbers)
        for row, mark in enumerate((cells.holders, cells.needers, cells.holders & cells.needers)):
            rank_elements[row] += elements @ mark
        lacking = cells.needers & ~cells.holders
        moved = np.flatnonzero(lacking.any(axis=1))
        boxes.append(np.insert(cells.boxes[moved], 0, len(groups), axis=1))
        sizes.append(elements[moved])
        marks.append(np.concatenate([cells.holders[moved], lacking[moved]], axis=1))
        groups.append(numbers)
    distinct, inverse = np.unique(np.packbits(np.concatenate(marks), axis=1), axis=0, return_inverse=True)
    lot = inverse.ravel()
    flags = np.unpackbits(distinct, axis=1)[:, : 2 * num_gpus] > 0
    assert flags[:, :num_gpus].any(axis=1).all(), "a slice that nobody holds"
    elements = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(elements, lot, np.concatenate(sizes))
    return Lots(
        before.what,
        element_size,
        before.tensors,
        flags[:, :num_gpus],
        flags[:, num_gpus:],
        elements * element_size,
        tuple(groups),
        np.concatenate(boxes)[np.argsort(lot, kind="stable")],
        np.cumsum(np.bincount(lot, minlength=len(distinct))),
        *rank_elements * element_size,
    )


def _alike(before: Ownership, after: Ownership) -> Iterator[tuple[IntArray, tuple[IntArray, IntArray]]]:
    """Group the tensors that are divided alike under both plans; yield their numbers and both sets of boxes."""
    groups: dict[tuple[Shape, object, object], list[int]] = defaultdict(list)
    for number, (tensor, *keys) in enumerate(zip(before.tensors, before.keys, after.keys, strict=True)):
        groups[tensor.shape, keys[0], keys[1]].append(number)
    for numbers in groups.values():
        first = before.tensors[numbers[0]]
        yield np.array(numbers, dtype=np.int64), (before.boxes(first), after.boxes(first))
