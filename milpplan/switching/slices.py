"""What a switch has to move: slices of tensors by who holds them before and who lacks them for afterwards.

The boxes of both plans cut every tensor into cells (their common refinement). Cells with the same holders and the
same receivers are one lot, whatever tensor they are of: senders are chosen for lots, and a lot is long enough to
be divided among senders anywhere between two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Plan
from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.switching.ownership import EQUAL_ROWS, Ownership, ShardRules, What, element_bytes, ownership
from milpplan.switching.tensors import Shape, Tensor

MAX_GPUS = 4096
"""Largest switch that is written out."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Everything that some rank lacks, and what every rank holds.

    ``holders`` and ``receivers`` [lots, ranks]; ``num_bytes`` [lots]. ``cells`` [cells, 5], in the order of their
    lots: the group of tensors that are cut alike, and the box; ``ends`` [lots]: the last cell + 1 of each lot.
    ``old_bytes``, ``new_bytes`` and ``kept_bytes`` [ranks]: held before, held afterwards, and in both.
    """

    what: What
    element_bytes: int
    tensors: tuple[Tensor, ...]
    holders: BoolArray
    receivers: BoolArray
    num_bytes: IntArray
    groups: tuple[IntArray, ...]
    cells: IntArray
    ends: IntArray
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

    def slices(self, lot: int) -> IntArray:
        """Number of the tensor and box of every slice of a lot, in the order of the model, [slices, 5]."""
        own = self.cells[self.ends[lot - 1] if lot else 0 : self.ends[lot]]
        numbers = [self.groups[group] for group in own[:, 0]]
        boxes = np.repeat(own[:, 1:], [len(part) for part in numbers], axis=0)
        found = np.column_stack([np.concatenate(numbers), boxes])
        return np.asarray(found[np.lexsort((found[:, 3], found[:, 1], found[:, 0]))])


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
    """The common refinement of two sets of boxes [boxes, 5] (rank, box) of one tensor; boxes of one rank in one
    set do not overlap."""
    both = np.concatenate([source, target])
    row_cuts, column_cuts = np.unique(both[:, 1:3]), np.unique(both[:, 3:5])
    marks = []
    for boxes in (source, target):
        # Each box adds one at its first corner and takes it away behind its edges; sums over both axes fill it.
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
    """What a switch from one plan to another has to move of ``what``.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs, or too many.
        IllegalPlanError: a plan is not one of the model.
    """
    check_gpus([source, target])
    before, after = (ownership(model, plan, what, rules) for plan in (source, target))
    return lots_between(before, after, element_bytes(what, grad_bytes))


def check_gpus(plans: list[Plan]) -> None:
    """Refuse plans that are not all on the same GPUs, or on too many.

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


def lots_between(before: Ownership, after: Ownership, each: int) -> Lots:
    """What has to move between two ownerships of one model's states of one kind, ``each`` bytes an element."""
    num_gpus = before.plan.layout.num_gpus
    held = np.zeros((3, num_gpus), dtype=np.int64)
    groups, boxes, sizes, marks = list[IntArray](), list[IntArray](), list[IntArray](), list[BoolArray]()
    for numbers, pair in _alike(before, after):
        cells = refine(*pair, num_gpus)
        elements = cells.sizes * len(numbers)
        for row, mark in enumerate((cells.holders, cells.needers, cells.holders & cells.needers)):
            held[row] += elements @ mark
        lacking = cells.needers & ~cells.holders
        some = np.flatnonzero(lacking.any(axis=1))
        boxes.append(np.insert(cells.boxes[some], 0, len(groups), axis=1))
        sizes.append(elements[some])
        marks.append(np.concatenate([cells.holders[some], lacking[some]], axis=1))
        groups.append(numbers)
    distinct, inverse = np.unique(np.packbits(np.concatenate(marks), axis=1), axis=0, return_inverse=True)
    lot = inverse.ravel()
    flags = np.unpackbits(distinct, axis=1)[:, : 2 * num_gpus] > 0
    assert flags[:, :num_gpus].any(axis=1).all(), "a slice that nobody holds"
    elements = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(elements, lot, np.concatenate(sizes))
    return Lots(
        before.what,
        each,
        before.tensors,
        flags[:, :num_gpus],
        flags[:, num_gpus:],
        elements * each,
        tuple(groups),
        np.concatenate(boxes)[np.argsort(lot, kind="stable")],
        np.cumsum(np.bincount(lot, minlength=len(distinct))),
        *held * each,
    )


def _alike(before: Ownership, after: Ownership) -> Iterator[tuple[IntArray, tuple[IntArray, IntArray]]]:
    """Numbers of tensors that are divided alike under both plans, with the boxes of both."""
    found: dict[tuple[Shape, object, object], list[int]] = defaultdict(list)
    for number, (tensor, *keys) in enumerate(zip(before.tensors, before.keys, after.keys, strict=True)):
        found[tensor.shape, keys[0], keys[1]].append(number)
    for numbers in found.values():
        first = before.tensors[numbers[0]]
        yield np.array(numbers, dtype=np.int64), (before.boxes(first), after.boxes(first))
