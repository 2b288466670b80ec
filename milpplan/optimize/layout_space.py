"""All legal layouts of a problem, in rows that are made when they are taken."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from milpplan.costs.columns import IntArray, LayoutColumns
from milpplan.optimize.crossing import Columns
from milpplan.specs.plan import Layout

T = TypeVar("T", bound=np.generic)
SHARDING = ("zero_stage", "overlap_grad_reduce", "overlap_param_gather")
"""Fields whose choices are crossed with every family of layouts that agree in the others."""


@dataclass(frozen=True)
class LayoutSpace:
    """All legal layouts of a problem, and how many partial layouts each named rule rejected.

    The layouts are the families, each with every choice of sharding: first the families with replicas, whose
    choices come first, then those without. There may be millions, so rows are made when they are taken.
    """

    families: LayoutColumns
    """One row a family; its sharding fields mean nothing."""
    num_replicated: int
    choices: Columns
    num_choices: tuple[int, int]
    """Choices of a family with replicas, and of one without."""
    kept: IntArray | None
    """The crossed rows that are left; None: all."""
    rejected: dict[str, int]
    enumerated: int

    def __len__(self) -> int:
        return self._num_crossed if self.kept is None else len(self.kept)

    @property
    def _num_crossed(self) -> int:
        with_replicas, without = self.num_choices
        return self.num_replicated * with_replicas + (len(self.families) - self.num_replicated) * without

    def take(self, rows: npt.NDArray[np.integer]) -> LayoutColumns:
        """The chosen layouts."""
        crossed = np.asarray(rows, dtype=np.int64) if self.kept is None else self.kept[rows]
        with_replicas, without = (max(1, number) for number in self.num_choices)
        split = self.num_replicated * self.num_choices[0]
        replicated = crossed < split
        alone = crossed - split
        family = np.where(replicated, crossed // with_replicas, self.num_replicated + alone // without)
        choice = np.where(replicated, crossed % with_replicas, self.num_choices[0] + alone % without)
        sharding = LayoutColumns.from_mapping(
            {field.name: np.zeros(0, np.int64) for field in fields(LayoutColumns)}
            | {name: self.choices[name][choice] for name in SHARDING}
        )
        return replace(self.families.take(family), **{name: getattr(sharding, name) for name in SHARDING})

    def at(self, row: int) -> Layout:
        """One layout."""
        return self.take(np.array([row])).at(0)

    def spread(self, of_families: npt.NDArray[T]) -> npt.NDArray[T]:
        """Every layout's value [n] of an array that has one for each family."""
        parts = np.split(of_families, [self.num_replicated])
        crossed = np.concatenate(
            [np.repeat(part, number) for part, number in zip(parts, self.num_choices, strict=True)]
        )
        return crossed if self.kept is None else crossed[self.kept]

    @property
    def interleaved(self) -> npt.NDArray[np.bool_]:
        """Whether each layout has several virtual stages a rank, [n]; no row is made for it."""
        return self.spread(self.families.vpp > 1)

    def find(self, layout: Layout) -> int | None:
        """The row of a layout, None where the space does not hold it."""
        wanted = LayoutColumns.of([layout])
        same = np.ones(len(self.families), dtype=np.bool_)
        for name in Layout.model_fields.keys() - set(SHARDING):
            same &= getattr(self.families, name) == getattr(wanted, name)[0]
        rows = np.flatnonzero(self.spread(same))
        part = self.take(rows)
        for name in SHARDING:
            keep = getattr(part, name) == getattr(wanted, name)[0]
            rows, part = rows[keep], part.take(keep)
        return int(rows[0]) if len(rows) else None

    @cached_property
    def columns(self) -> LayoutColumns:
        """All layouts at once."""
        return self.take(np.arange(len(self)))

    def sha256(self) -> str:
        """A digest of all layouts in their order, from the families and choices that they are made of."""
        parts = {field.name: getattr(self.families, field.name) for field in fields(LayoutColumns)}
        if not self.families.any_of("replica_micro_batches"):
            # Spaces without replicas of different make keep the digest that certificates of before have.
            del parts["replica_micro_batches"]
        parts |= {f"choices.{name}": self.choices[name] for name in sorted(self.choices)}
        parts["sizes"] = np.array([self.num_replicated, *self.num_choices, len(self)])
        if self.kept is not None:
            parts["kept"] = self.kept
        digest = hashlib.sha256()
        for name, values in parts.items():
            digest.update(name.encode() + np.ascontiguousarray(values, dtype=np.int64).tobytes())
        return digest.hexdigest()
