"""Layouts as columns, a NumPy array per field and a row per layout, so that a formula covers all layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from milpplan.problem import (
    EXPERT_DISPATCHES,
    INSIDE_MOE,
    MODULE_SETS,
    OFFLOAD_MODULES,
    OFFLOAD_SETS,
    PAIRED_SCHEDULES,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    TP_OVERLAPS,
    V_SCHEDULES,
    Layout,
    OffloadModule,
    RecomputeModule,
    order_code,
    order_of,
    shares_code,
    shares_of,
)
from milpplan.problem.plan import expert_replicas

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
T = TypeVar("T", bound=np.generic)

WORDS: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "tp_overlap": TP_OVERLAPS,
    "expert_dispatch": EXPERT_DISPATCHES,
    "rank_order": RANK_ORDERS,
    "recompute_modules": MODULE_SETS,
    "offload_modules": OFFLOAD_SETS,
}
"""Fields of a layout that are words; a column holds the index of the word."""
DEFAULTS = {name: field.default for name, field in Layout.model_fields.items() if not field.is_required()}
SWITCHES = frozenset(name for name, default in DEFAULTS.items() if isinstance(default, bool))
LAYER_KEYS = (
    *("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "tp_overlap", "gather_again"),
    *("ulysses", "expert_dispatch", "split_backward", "recompute_vision", "recompute_modules"),
    "vision_data_parallel",
)
STATE_KEYS = ("tp", "cp", "ep", "etp", "dp", "zero_stage", "dp_replicate", "keep_weights")
OFFLOADS = ("offload_weights", "offload_activations", "offload_optimizer")
HOSTED = (*OFFLOADS, "offload_modules")
COST_KEYS = (
    *(*STATE_KEYS, "pp", "micro_batch_size", "sequence_parallel"),
    *("tp_overlap", "pp_scatter_gather", "gather_again", "recompute_vision", "recompute_modules", "ulysses"),
    *("vision_data_parallel", "expert_dispatch"),
    *HOSTED,
    *("backward_form", "ends_meet"),
)
"""Fields of a layout that its constants depend on; the other fields only combine the constants. If some layouts
have another order of ranks than the first order, ``distinct`` adds the fields that the strides depend on."""
_SPLITS = np.array([schedule in SPLIT_SCHEDULES for schedule in SCHEDULES])
_PAIRS = np.array([schedule in PAIRED_SCHEDULES for schedule in SCHEDULES])
_TURNS = np.array([schedule in V_SCHEDULES for schedule in SCHEDULES])


_MOE = 1 << RECOMPUTE_MODULES.index("moe")
_IN_EXPERTS = sum(1 << OFFLOAD_MODULES.index(name) for name in INSIDE_MOE)


def hosts_apart(c: Mapping[str, npt.NDArray[Any]]) -> BoolArray:
    """Mask the layouts whose modules on the host, if any, are neither recomputed inside ``moe`` nor beside all
    activations."""
    inside = ((c["offload_modules"] & _IN_EXPERTS) > 0) & ((c["recompute_modules"] & _MOE) > 0)
    return np.asarray((c["offload_modules"] == 0) | ~(inside | (c["offload_activations"] > 0)))


def priced_sets(chosen: IntArray, sets: Sequence[str], prices: Callable[[str], bool]) -> BoolArray:
    """Mask the rows whose sets of modules are priced."""
    priced = np.zeros(len(sets), dtype=bool)
    for number in np.flatnonzero(np.bincount(chosen)).tolist():
        priced[number] = prices(sets[number])
    return np.asarray(priced[chosen])


def column_value(field: str, value: Any) -> int:
    """Encode a field's value as its column holds it."""
    if field == "node_order":
        return order_code(value)
    if field == "replica_micro_batches":
        return shares_code(value)
    return WORDS[field].index(str(value)) if field in WORDS else int(value)


@dataclass(frozen=True, slots=True)
class LayoutColumns:
    """Struct of arrays with the fields of ``Layout``; every array has shape [num_layouts].

    Fields in ``WORDS`` hold indices of words; ``node_order`` and ``replica_micro_batches`` hold
    codes (``milpplan.problem.plan``). A column with a single value may be a broadcast number (``constant``), from
    which rows are taken at no cost.
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
    dp_replicate: IntArray
    keep_weights: BoolArray
    schedule: IntArray
    overlap_grad_reduce: BoolArray
    overlap_param_gather: BoolArray
    tp_overlap: IntArray
    pp_scatter_gather: BoolArray
    gather_again: BoolArray
    recompute_vision: BoolArray
    vision_data_parallel: BoolArray
    recompute_modules: IntArray
    ulysses: IntArray
    expert_dispatch: IntArray
    offload_weights: BoolArray
    offload_activations: BoolArray
    offload_modules: IntArray
    offload_optimizer: BoolArray
    rank_order: IntArray
    node_order: IntArray
    replica_micro_batches: IntArray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_gpus(self) -> IntArray:
        """Accelerators of each layout."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_micro_batches(self) -> IntArray:
        """Micro-batches of a pipeline in a step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def num_virtual_stages(self) -> IntArray:
        """Virtual stages of a pipeline."""
        return self.pp * self.vpp

    @property
    def split_backward(self) -> BoolArray:
        """True if the schedule runs weight gradients apart from input gradients."""
        return _SPLITS[self.schedule]

    @property
    def runs_pairs(self) -> BoolArray:
        """True if the schedule runs forwards beside whole backwards."""
        return _PAIRS[self.schedule]

    @property
    def backward_form(self) -> IntArray:
        """0 if backwards are whole, 1 if they are split, 2 if some are split and others run in pairs."""
        return np.asarray((_SPLITS.astype(np.int64) + _PAIRS)[self.schedule])

    @property
    def ends_meet(self) -> BoolArray:
        """True if the first and the last virtual stage share a rank of the pipeline."""
        return _TURNS[self.schedule]

    def recomputes(self, module: RecomputeModule) -> BoolArray:
        """Find the layouts whose selective recomputation replays the named module."""
        return np.asarray(self.recompute_modules >> RECOMPUTE_MODULES.index(module) & 1 > 0)

    def offloads(self, module: OffloadModule) -> BoolArray:
        """Find the layouts that keep inputs of the named module on the host."""
        return np.asarray(self.offload_modules >> OFFLOAD_MODULES.index(module) & 1 > 0)

    @property
    def ring(self) -> IntArray:
        """Ranks that pass keys and values around a ring."""
        return self.cp // np.maximum(self.ulysses, 1)

    @property
    def expert_dp(self) -> IntArray:
        """Replicas of every expert shard."""
        return expert_replicas(self.tp, self.cp, self.dp, self.ep, self.etp)

    @property
    def mapping(self) -> dict[str, npt.NDArray[Any]]:
        """Columns by the names of their fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def take(self, rows: npt.NDArray[np.integer] | BoolArray, but: Collection[str] = ()) -> LayoutColumns:
        """Select rows by indices or a mask; fields named in ``but`` have no meaning there and become 0."""
        length = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
        if len(self) == length == 1 and not but:
            return self
        chosen: dict[str, Any] = {
            field.name: constant(0, length) if field.name in but else taken(getattr(self, field.name), rows)
            for field in fields(self)
        }
        return LayoutColumns(**chosen)

    def any_of(self, *names: str) -> bool:
        """Check that some row uses an option: a switch is on, or a word is not the first word."""
        for name in names:
            values = getattr(self, name)
            if (values[:1] if is_constant(values) else values).any():
                return True
        return False

    def at(self, row: int) -> Layout:
        """Return a row as a record."""
        values = {field.name: getattr(self, field.name)[row].item() for field in fields(self)}
        values["node_order"] = order_of(values["node_order"])
        values["replica_micro_batches"] = shares_of(values["replica_micro_batches"])
        return Layout(**values | {name: words[values[name]] for name, words in WORDS.items()})

    @staticmethod
    def of(layouts: Iterable[Layout]) -> LayoutColumns:
        """Build columns from records."""
        rows = [layout.model_dump() for layout in layouts]
        return LayoutColumns.from_mapping(
            {name: np.array([column_value(name, row[name]) for row in rows]) for name in Layout.model_fields}
        )

    @staticmethod
    def from_mapping(columns: Mapping[str, npt.NDArray[np.generic]]) -> LayoutColumns:
        """Build columns from a mapping of equal-length arrays, cast to the declared types."""
        cast: dict[str, Any] = {}
        for field in fields(LayoutColumns):
            values, kind = columns[field.name], np.bool_ if field.name in SWITCHES else np.int64
            if is_constant(values):
                cast[field.name] = constant(values[0].item(), len(values), kind)
            else:
                cast[field.name] = np.ascontiguousarray(values, dtype=kind)
        return LayoutColumns(**cast)

    @staticmethod
    def concatenate(parts: list[LayoutColumns]) -> LayoutColumns:
        """Concatenate the rows of all parts, in order."""
        return LayoutColumns(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts])
                for field in fields(LayoutColumns)
            }
        )


def constant(value: int, length: int, kind: type[np.generic] = np.int64) -> npt.NDArray[np.generic]:
    """Make a column that holds the same value in every row."""
    return np.broadcast_to(np.array(value, dtype=kind), length)


def is_constant(values: npt.NDArray[np.generic]) -> bool:
    """Check that a column is ``constant`` and has at least one row."""
    return values.strides == (0,) and len(values) > 0


def taken(values: npt.NDArray[Any], rows: npt.NDArray[np.generic]) -> npt.NDArray[Any]:
    """Select rows of a column by indices or a mask; a ``constant`` column stays constant."""
    if not is_constant(values):
        return np.asarray(values[rows])
    length = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
    return np.broadcast_to(values[0], length)


def ascending(values: npt.NDArray[T]) -> npt.NDArray[T]:
    """Return the distinct values of a column, ascending.

    It replaces ``np.unique``, which imports masked arrays.
    """
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]])


def unique_rows(*keys: npt.NDArray[np.generic]) -> tuple[IntArray, IntArray]:
    """Find representatives and inverse of the distinct rows of small integer columns.

    Args:
        keys: non-negative integer or boolean columns of equal length n.

    Returns:
        ``(first, inverse)``: row numbers of a representative of each distinct combination, and for each of the n
        rows the position of its representative.
    """
    code = np.zeros(len(keys[0]), dtype=np.int64)
    if len(code) == 1:
        return code, code
    for key in keys:
        if is_constant(key):
            continue
        values = np.asarray(key, dtype=np.int64)
        span = int(values.max(initial=0)) + 1
        if span == 1:
            continue
        if code.size and int(code.max(initial=0)) > (2**62) // span:
            _, code = np.unique(code, return_inverse=True)
            code = code.astype(np.int64)
        code = code * span + values
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)


def distinct(columns: LayoutColumns, names: tuple[str, ...], placed: tuple[str, ...]) -> tuple[IntArray, IntArray]:
    """Find representatives and inverse (``unique_rows``) of the layouts that differ in some fields.

    Args:
        columns: layouts.
        names: fields that count in every case.
        placed: fields that only the strides depend on; they count if some layout has an unusual order of ranks.
    """
    keys = (*names, *placed) if columns.rank_order.any() else names
    return unique_rows(*(getattr(columns, name) for name in keys))
