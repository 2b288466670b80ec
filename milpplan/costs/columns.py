"""Layouts as columns: one NumPy array a field, one row a layout, so that one formula costs all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.specs.plan import SCHEDULES, Layout

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayoutColumns:
    """Struct of arrays with the fields of ``Layout``; every array has shape [num_layouts].

    ``schedule`` holds indices into ``SCHEDULES``.
    """

    tp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray
    pp: IntArray
    dp: IntArray
    vpp: IntArray
    micro_batch_size: IntArray
    global_batch_size: IntArray
    sequence_parallel: BoolArray
    zero_stage: IntArray
    schedule: IntArray
    overlap_grad_reduce: BoolArray
    overlap_param_gather: BoolArray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_gpus(self) -> IntArray:
        """Accelerators of each layout."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_micro_batches(self) -> IntArray:
        """Micro-batches a pipeline runs in a step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def num_virtual_stages(self) -> IntArray:
        """Virtual stages of one pipeline."""
        return self.pp * self.vpp

    @property
    def expert_dp(self) -> IntArray:
        """Replicas of every expert shard."""
        return (self.tp * self.cp * self.dp) // (self.ep * self.etp)

    def take(self, rows: npt.NDArray[np.integer] | BoolArray) -> LayoutColumns:
        """The chosen rows (indices or mask)."""
        return LayoutColumns(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def at(self, row: int) -> Layout:
        """One row as a record."""
        values = {field.name: getattr(self, field.name)[row].item() for field in fields(self)}
        values["schedule"] = SCHEDULES[values["schedule"]]
        return Layout(**values)

    @staticmethod
    def of(layouts: Iterable[Layout]) -> LayoutColumns:
        """Columns of the given records."""
        rows = [layout.model_dump() | {"schedule": SCHEDULES.index(layout.schedule)} for layout in layouts]
        return LayoutColumns.from_mapping(
            {name: np.array([row[name] for row in rows]) for name in Layout.model_fields}
        )

    @staticmethod
    def from_mapping(columns: Mapping[str, npt.NDArray[np.generic]]) -> LayoutColumns:
        """Columns from a mapping of equal-length arrays, cast to the declared types."""
        switches = {"sequence_parallel", "overlap_grad_reduce", "overlap_param_gather"}
        cast: dict[str, Any] = {
            field.name: np.ascontiguousarray(
                columns[field.name], dtype=np.bool_ if field.name in switches else np.int64
            )
            for field in fields(LayoutColumns)
        }
        return LayoutColumns(**cast)

    @staticmethod
    def concatenate(parts: list[LayoutColumns]) -> LayoutColumns:
        """The rows of all parts, in order."""
        return LayoutColumns(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts])
                for field in fields(LayoutColumns)
            }
        )


def unique_rows(*keys: npt.NDArray[np.generic]) -> tuple[IntArray, IntArray]:
    """Representatives and inverse of the distinct rows of small integer columns.

    Args:
        keys: non-negative integer or boolean columns of equal length n.

    Returns:
        ``(first, inverse)``: row numbers of one representative of each distinct combination, and for each of
        the n rows the position of its representative.
    """
    code = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        values = np.asarray(key, dtype=np.int64)
        span = int(values.max(initial=0)) + 1
        if code.size and int(code.max(initial=0)) > (2**62) // span:
            _, code = np.unique(code, return_inverse=True)
            code = code.astype(np.int64)
        code = code * span + values
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
