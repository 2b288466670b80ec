"""Layouts but for their sharding, as products: what is chosen in a block of them is listed once for many blocks.

Which switches a block may have depends on its degrees alone, but for the transfers between its stages, and which
virtual stages and schedules on its stages and micro-batches. So rules are applied to rows that stand for many, and
are counted for all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.optimize.crossing import Columns, cross
from milpplan.optimize.execution_rules import TRANSFER_DOMINANCE
from milpplan.optimize.layout_space import Choices, chosen_rows, within
from milpplan.optimize.sieve import Sieve


@dataclass(frozen=True, slots=True)
class Blocks:
    """``columns`` has one row a block; each family of it has one of its ``switches`` and one of its ``stages``."""

    columns: Columns
    switches: Choices
    stages: Choices

    @staticmethod
    def of_families(columns: Mapping[str, IntArray]) -> Blocks:
        """Every family by itself."""
        size = len(columns["tp"])
        return Blocks(dict(columns), Choices.none(size), Choices.none(size))

    @property
    def num_families(self) -> IntArray:
        """Families of each block, [b]."""
        return np.asarray(self.switches.counts * self.stages.counts)

    def families(self) -> Columns:
        """All families, block by block."""
        block, family = within(self.num_families)
        switch, stage = chosen_rows(self.switches, self.stages, block, family)
        found = {name: values[block] for name, values in self.columns.items()}
        found |= {name: values[switch] for name, values in self.switches.table.items()}
        return found | {name: values[stage] for name, values in self.stages.table.items()}


def without_slower_transfers(sieve: Sieve, blocks: Columns, switches: Choices) -> Choices:
    """The switches of every block without the transfers that a twin of it beats (``TRANSFER_DOMINANCE``)."""
    size, values = len(blocks["tp"]), np.arange(2)
    crossed = cross(cross(blocks, "sequence_parallel", values), "pp_scatter_gather", values)
    legal = np.ones((size, 4), dtype=np.bool_)
    for name, rule in TRANSFER_DOMINANCE.items():
        sieve.rejected.setdefault(name, 0)
        if name not in sieve.without:
            legal &= np.asarray(rule(sieve.problem, crossed)).reshape(size, 4)
    if legal.all():
        return switches
    rows, place, first, group = switches.lists(*legal.T)
    pair = 2 * switches.table["sequence_parallel"] + switches.table["pp_scatter_gather"]
    keep = legal[first[place], pair[rows]]
    table = {name: values[rows[keep]] for name, values in switches.table.items()}
    left = Choices.listed(table, place[keep], len(first), group)
    (name,) = TRANSFER_DOMINANCE
    sieve.rejected[name] += int(switches.counts.sum() - left.counts.sum())
    return left
