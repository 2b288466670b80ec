"""A switch carried out on arrays: every rank's tensors, step by step.

It works on NumPy arrays and on other arrays with the same indexing, shapes and assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from milpplan.simulation.layout_columns import IntArray
from milpplan.switching.ownership import Box, Ownership
from milpplan.switching.records import SwitchPlan
from milpplan.switching.tensors import Tensor

Piece = tuple[Box, Any]
"""A box of a tensor and its array."""
Held = dict[int, list[Piece]]
"""Arrays of a rank: the pieces of each tensor, by the tensor's number."""
Boxes = list[tuple[int, Box]]
"""Boxes of a rank, each with the number of its tensor."""


def boxes_of_ranks(owner: Ownership, tensors: tuple[Tensor, ...], num_gpus: int) -> list[Boxes]:
    """List the boxes that every rank holds."""
    boxes: list[Boxes] = [[] for _ in range(num_gpus)]
    for number, tensor in enumerate(tensors):
        for rank, top, bottom, left, right in owner.boxes(tensor).tolist():
            boxes[rank].append((number, (top, bottom, left, right)))
    return boxes


def held_of(boxes: Boxes, array: Callable[[int, Box], Any]) -> Held:
    """Make the pieces of a rank; ``array`` makes a piece from the number of its tensor and its box."""
    held: Held = {}
    for number, box in boxes:
        held.setdefault(number, []).append((box, array(number, box)))
    return held


def view(held: Held, piece: IntArray) -> Any:
    """Return the part of a rank's arrays that a slice (number of the tensor, box) names.

    Raises:
        KeyError: the rank does not hold it.
    """
    number, top, bottom, left, right = piece.tolist()
    for box, array in held.get(number, []):
        if box[0] <= top and bottom <= box[1] and box[2] <= left and right <= box[3]:
            return array[top - box[0] : bottom - box[0], left - box[2] : right - box[2]]
    raise KeyError(f"tensor {number}, rows {top} to {bottom}, columns {left} to {right}")


def keep(old: Held, new: Held) -> None:
    """Copy the data that a rank holds before and after the switch from its old arrays to its new arrays."""
    pairs = ((before, after) for number in new for before in old.get(number, []) for after in new[number])
    for (before, source), (after, array) in pairs:
        top, bottom = max(after[0], before[0]), min(after[1], before[1])
        left, right = max(after[2], before[2]), min(after[3], before[3])
        if top < bottom and left < right:
            part = source[top - before[0] : bottom - before[0], left - before[2] : right - before[2]]
            array[top - after[0] : bottom - after[0], left - after[2] : right - after[2]] = part


def move(switch: SwitchPlan, old: list[Held], new: list[Held]) -> None:
    """Carry out a switch in one process.

    The new arrays of a rank are filled only from its own old arrays and from the deliveries. Relays read the new
    arrays of their senders.
    """
    for before, after in zip(old, new, strict=True):
        keep(before, after)
    deliveries = switch.deliveries
    for number in np.argsort(deliveries.relay, kind="stable").tolist():
        piece, sender = deliveries.boxes[number], int(deliveries.sender[number])
        source = new[sender] if deliveries.relay[number] else old[sender]
        view(new[int(deliveries.receiver[number])], piece)[...] = view(source, piece)
