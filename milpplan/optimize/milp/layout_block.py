"""Block of one layout inside the whole program: its menus, paths and forbidden plans; rows under a literal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor

import numpy as np

from milpplan.optimize.layout.layout_program import LayoutProgram
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, stage_menu
from milpplan.optimize.layout.warm_start import Choice, analytic_paths
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Rows
from milpplan.simulation.layers.terms import WORK
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath, critical_path
from milpplan.simulation.pipeline.step_graph import StepGraph, Term

ROW_MAGNITUDE = 4_000_000
"""Maximum sum of a row's coefficients: below the magnitude at which every solver is reliable."""

Item = tuple[int, tuple[int, ...], int, int]
"""(stage, layers of each run, full, selective): identifies an item when a menu shrinks."""


@dataclass(slots=True)
class LayoutBlock:
    """Block of one layout. ``weight``: objective per nanosecond of its step. ``program`` is None once no plan of
    the layout can be at or below the cutoff."""

    number: int
    context: LayoutContext
    weight: Fraction
    program: LayoutProgram | None
    forbidden: list[frozenset[Item]] = field(default_factory=list)

    @staticmethod
    def of(number: int, context: LayoutContext, weight: Fraction) -> LayoutBlock:
        """Make the menus and analytic paths of a layout."""
        menus = [stage_menu(context, j, context.max_layers(j)) for j in range(context.num_stages)]
        if not all(len(menu) for menu in menus):
            return LayoutBlock(number, context, weight, None)
        program = LayoutProgram(context, menus, 0)
        for path in analytic_paths(context.layout):
            program.add_path(path)
        return LayoutBlock(number, context, weight, program)

    @property
    def num_items(self) -> int:
        """Number of items of all menus."""
        return 0 if self.program is None else int(self.program.offsets[-1])

    def objective_lower_bound(self) -> Fraction:
        """Return a lower bound of the objective of the menus' plans."""
        assert self.program is not None
        return int(self.program.bases().max()) * self.weight

    def objective_upper_bound(self) -> Fraction:
        """Return an upper bound of the objective: all work, transfers and communication one after another."""
        if self.program is None:
            return Fraction(0)
        layout, costs = self.context.layout, self.context.costs
        work = once = 0
        for menu in self.program.menus:
            work += int(menu.terms[list(WORK)].sum(axis=0).max())
            once += int(menu.terms[[Term.GATHER, Term.REDUCE, Term.OPTIMIZER]].sum(axis=0).max())
        crossings = sum(costs.crossing_ns(stage) for stage in range(layout.num_virtual_stages))
        transfers = 2 * (layout.num_virtual_stages * int(costs.transfer_ns) + crossings)
        return (layout.num_micro_batches * (work + transfers) + once + int(costs.barrier_ns)) * self.weight

    def simulate(self, choice: Choice) -> tuple[CriticalPath, int]:
        """Return critical path and step time of a choice of items."""
        assert self.program is not None
        costs = self.context.costs
        graph = StepGraph.of(self.context.layout, costs.transfer_ns, costs.barrier_ns)
        durations = self.program.durations(choice)
        path = critical_path(graph, durations)
        return path, int(path.length_ns(durations, graph.transfer_ns, graph.barrier_ns))

    def cut(self, cutoff: Fraction) -> None:
        """Drop items that cannot be in a plan at or below an objective."""
        if self.program is None:
            return
        self.program.cutoff_ns = floor(cutoff / self.weight)
        hopeless = int(self.program.bases().max()) > self.program.cutoff_ns
        if hopeless or not self.program.drop_hopeless_items():
            self.program = None

    def forbid(self, choice: Choice, stages: Sequence[int]) -> None:
        """Exclude a combination of items."""
        assert self.program is not None
        self.forbidden.append(frozenset(_item(self.program.menus[j], choice[j]) for j in stages))

    def forbidden_columns(self) -> list[IntArray]:
        """Return the columns of the forbidden combinations that the menus still contain."""
        if self.program is None or not self.forbidden:
            return []
        column: dict[Item, int] = {}
        for menu, start in zip(self.program.menus, self.program.offsets[:-1].tolist(), strict=True):
            column |= {_item(menu, item): start + item for item in range(len(menu))}
        rows = [[column.get(item, -1) for item in items] for items in self.forbidden]
        return [np.array(sorted(row), dtype=np.int64) for row in rows if min(row) >= 0]


def _item(menu: Menu, item: int) -> Item:
    return menu.stage, tuple(menu.runs[item].tolist()), int(menu.full[item]), int(menu.selective[item])


def coarsened(rows: Rows) -> Rows:
    """Return rows of bytes, ``sum a x <= b`` with a >= 0, divided until their magnitude is at most ROW_MAGNITUDE.

    Both sides are rounded down, which for integers x >= 0 only relaxes the row.
    """
    entry = rows.entry_rows()
    size = np.bincount(entry, np.abs(rows.coefficients).astype(np.float64), len(rows))
    min_coefficients = np.zeros(len(rows), dtype=np.int64)
    np.minimum.at(min_coefficients, entry, rows.coefficients)
    of_bytes = (min_coefficients >= 0) & (rows.lower <= MINUS_INFINITY) & (rows.upper < INFINITY)
    factor = np.where(of_bytes, np.maximum(1, np.ceil(size / ROW_MAGNITUDE)), 1).astype(np.int64)
    upper = np.where(rows.upper < INFINITY, rows.upper // factor, INFINITY)
    return replace(rows, coefficients=rows.coefficients // factor[entry], upper=upper)


def under_literal(rows: Rows, to_whole: IntArray, literal: int, suffix: str) -> Rows:
    """Return the rows of one layout in the whole program's columns, their sides as coefficients of the literal."""
    is_lower, is_upper = rows.lower > MINUS_INFINITY, rows.upper < INFINITY
    assert ((rows.lower == rows.upper) | (is_lower != is_upper)).all(), "a row has two different sides"
    side = np.where(is_lower, rows.lower, rows.upper)
    sized = np.flatnonzero(side)
    columns = np.concatenate([to_whole[rows.columns], np.full(len(sized), literal)])
    order = np.lexsort((columns, np.concatenate([rows.entry_rows(), sized])))
    starts = rows.starts + np.concatenate([[0], np.cumsum(side != 0)])
    return replace(
        rows,
        names=tuple(name + suffix for name in rows.names),
        starts=starts.astype(np.int64),
        columns=columns[order],
        coefficients=np.concatenate([rows.coefficients, -side[sized]])[order],
        lower=np.where(is_lower, 0, MINUS_INFINITY).astype(np.int64),
        upper=np.where(is_upper, 0, INFINITY).astype(np.int64),
    )
