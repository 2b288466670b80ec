"""Deliveries of a switch, slice by slice: routes rounded to whole rows of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.switching.routes import Routes
from milpplan.switching.slices import Lots


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Slices that move between ranks: arrays [deliveries], ordered by round and message."""

    boxes: IntArray
    """[deliveries, 5] number of the tensor, and box of the slice."""
    sender: IntArray
    receiver: IntArray
    relay: BoolArray
    """True for relays, which start when the sender has received the slice."""
    num_bytes: IntArray

    def __len__(self) -> int:
        return len(self.sender)

    def message_starts(self) -> IntArray:
        """Find the first delivery of every fused message, which has all slices of a sender, receiver and round."""
        keys = np.stack([self.relay, self.sender, self.receiver])
        return np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-1) != 0, axis=0))

    @property
    def num_messages(self) -> int:
        """Number of fused messages."""
        return len(self.message_starts())

    def packed_bytes(self, num_gpus: int) -> IntArray:
        """Size the send buffers of each rank, in bytes [ranks].

        Messages with the same slices share a buffer, as in Hetu 9e47240 (hetu/graph/switch_exec_graph.cc).
        """
        starts, seen = self.message_starts(), set[tuple[int, bytes]]()
        packed = np.zeros(num_gpus, dtype=np.int64)
        for start, stop in pairwise([*starts.tolist(), len(self)]):
            key = (int(self.sender[start]), self.boxes[start:stop].tobytes())
            if key not in seen:
                seen.add(key)
                packed[key[0]] += self.num_bytes[start:stop].sum()
        return packed


def deliveries_of(lots: Lots, routes: Routes) -> Deliveries:
    """Round every route to whole rows: its ends move to the nearest row, by at most half a row of its last slice.

    Ends that two routes share move together, so no row is lost or sent twice.
    """
    all_boxes, columns = list[IntArray](), list[IntArray]()
    lot, slices = -1, np.zeros((0, 5), np.int64)
    for number in np.argsort(routes.lot, kind="stable").tolist():
        if routes.lot[number] != lot:
            lot = int(routes.lot[number])
            slices = lots.slices(lot)
        boxes = _rows_between(slices, float(routes.start[number]), float(routes.stop[number]), lots.element_bytes)
        all_boxes.append(boxes)
        ends = routes.sender[number], routes.receiver[number], int(routes.relay[number])
        columns.append(np.tile(np.array(ends, dtype=np.int64), (len(boxes), 1)))
    boxes = np.concatenate([np.zeros((0, 5), np.int64), *all_boxes])
    sender, receiver, relay = np.concatenate([np.zeros((0, 3), np.int64), *columns]).T
    order = np.lexsort((boxes[:, 3], boxes[:, 1], boxes[:, 0], receiver, sender, relay))
    size = (boxes[:, 2] - boxes[:, 1]) * (boxes[:, 4] - boxes[:, 3]) * lots.element_bytes
    return Deliveries(boxes[order], sender[order], receiver[order], relay[order] > 0, size[order])


def _rows_between(slices: IntArray, start: float, stop: float, element_bytes: int) -> IntArray:
    """Cut the slices of the bytes from ``start`` to ``stop`` of a lot whose slices are consecutive."""
    rows = slices[:, 2] - slices[:, 1]
    row_bytes = (slices[:, 4] - slices[:, 3]) * element_bytes
    ends, row_ends = np.cumsum(rows * row_bytes), np.cumsum(rows)
    low, high = (_row_at(position, ends, row_ends, rows, row_bytes) for position in (start, stop))
    touched = (row_ends > low) & (row_ends - rows < high)
    first = row_ends[touched] - rows[touched]
    boxes = slices[touched].copy()
    boxes[:, 2] = boxes[:, 1] + np.minimum(high - first, rows[touched])
    boxes[:, 1] += np.maximum(low - first, 0)
    # Both ends may have moved to the same row.
    return np.asarray(boxes[boxes[:, 2] > boxes[:, 1]])


def _row_at(position: float, ends: IntArray, row_ends: IntArray, rows: IntArray, row_bytes: IntArray) -> int:
    """Count the rows of a lot before a position in bytes, rounded."""
    index = min(int(np.searchsorted(ends, position, side="right")), len(ends) - 1)
    offset = position - float(ends[index] - rows[index] * row_bytes[index])
    rows_before = int(row_ends[index] - rows[index])
    return rows_before + min(round(offset / float(row_bytes[index])), int(rows[index]))


def layer_mask(boxes: IntArray, places: IntArray, wanted: IntArray) -> BoolArray:
    """Select the deliveries of tensors at the wanted places (layers or ends); ``places`` [tensors]."""
    return np.isin(places[boxes[:, 0]], wanted)
