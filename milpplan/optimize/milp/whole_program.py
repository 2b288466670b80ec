"""Whole program: degrees, layers and recomputation of a small problem in one integer program.

Variables: the degrees and one literal layout_l a legal layout, and for every layout the items x_lji of
its stage menus (``layout_program``); z, the objective above ``base``, in units of ``unit`` nanoseconds.

    minimise z
    <rows of ``degrees``>
    <row of layout_program.py with side b, for every layout l>     row(x_l, z) - b layout_l  >= 0, = 0 or <= 0
    nothing_below_the_cutoff     layout_l <= 0      layouts whose menus or paths rule them out
    forbidden_plan               sum of some items <= their number - 1

Multiplying the side of every row by the layout's literal puts it under that literal without any big M: where
layout_l = 0 all x_l are 0 (their one_item_per_stage rows have side layout_l), and the row says 0 >= 0 or z >= 0.
Every path of a layout bounds its plans, so the program is a relaxation, and more critical paths tighten it. Items
that the exact memory check refuses together, and a plan that only rounding lets through, are forbidden by name.

Every legal layout has its own rows, so nothing but the program is trusted: it is the oracle of ``block_program``,
whose blocks make it short, and of ``solve``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, lcm

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.layout import LayoutContext, LayoutProgram, analytic_paths, stage_menu
from milpplan.optimize.layout.layout_program import RESOLUTION, SLACK_UNITS
from milpplan.optimize.layout.rounding import Choice, best_choice, rank_costs
from milpplan.optimize.layout.stage_options import Menu
from milpplan.optimize.milp.degrees import Degrees
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Plan, Problem
from milpplan.simulation import IntArray, LayoutColumns, cluster_costs, usable_memory_bytes
from milpplan.simulation.layers.shard import WORK
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, Term, critical_path

ROW_MAGNITUDE = 4_000_000
"""Maximum sum of a row's coefficients: below the magnitude at which every solver is reliable."""

Item = tuple[int, tuple[int, ...], int, int]
"""(stage, layers of each run, full, selective): identifies an item when a menu shrinks."""
MAX_LAYOUTS = 400
MAX_ITEMS = 60_000


@dataclass(slots=True)
class LayoutBlock:
    """Block of one layout. ``weight``: objective per nanosecond of its step. ``program`` is None once no plan of
    the layout can be at or below the cutoff."""

    number: int
    context: LayoutContext
    weight: Fraction
    program: LayoutProgram | None
    forbidden: list[frozenset[Item]] = field(default_factory=list)
    label: str = ""
    """Name in the names of its rows and items; empty: the number."""
    start: int = 0
    """First column of its items in the whole program."""
    moments: set[int] | None = None
    """Indices of the memory rows that are in the program; None: all."""
    own_rows: tuple[int, Rows] | None = None
    """Number of items, and the rows that are not of paths."""

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

    def add_rows(self, builder: ProgramBuilder, literal: int, z: int, base: int, unit: int) -> Rows:
        """Add the items of a layout. Returns its rows, with sides multiplied by its literal.

        Where the objective is weighted, a unit of it is unit / weight nanoseconds of the layout's step; both this
        and the base are rounded up, so that z never exceeds the value of a plan.
        """
        assert self.program is not None
        label, weight = self.label or str(self.number), self.weight
        names = [f"x[{menu.stage},{item}]@{label}" for menu in self.program.menus for item in range(len(menu))]
        columns = builder.add_variables(names, 1)
        self.start = columns.start
        for number, inside in enumerate(self.forbidden_columns()):
            name = f"forbidden_plan[{number}]@{label}"
            builder.add_row(name, inside + columns.start, np.ones_like(inside), upper=len(inside) - 1)
        paths = self.program.path_rows(0, ceil(base / weight), ceil(unit / weight))
        own = Rows.concatenate((self._rows_without_paths(), paths))
        return under_literal(own, np.array([*columns, z], dtype=np.int64), literal, f"@{label}")

    def path_magnitude(self, base: int, unit: int) -> int:
        """Return the largest sum of a path row's coefficients, without that of z."""
        assert self.program is not None
        rows = self.program.path_rows(0, ceil(base / self.weight), ceil(unit / self.weight))
        sums = np.bincount(rows.entry_rows(), np.abs(rows.coefficients), len(rows)) + np.abs(rows.lower)
        return int(sums.max(initial=0))

    def _rows_without_paths(self) -> Rows:
        """Return the rows that some choice of one item a stage breaks; of memory only those of ``moments``."""
        assert self.program is not None
        if self.own_rows is None or self.own_rows[0] != self.num_items:
            rows = coarsened(replace(self.program, paths=[], coefficients=[]).program(0, 1).rows)
            matrix = np.zeros((len(rows), self.num_items), dtype=np.int64)
            matrix[rows.entry_rows(), rows.columns] = rows.coefficients
            starts = self.program.offsets[:-1]
            low = np.minimum.reduceat(matrix, starts, axis=1).sum(axis=1)
            high = np.maximum.reduceat(matrix, starts, axis=1).sum(axis=1)
            breakable = (low < rows.lower) | (high > rows.upper)
            breakable |= [name.startswith("one_item_per_stage") for name in rows.names]
            self.own_rows = self.num_items, rows.chosen(np.flatnonzero(breakable))
            if self.moments is not None:
                self._limit_shortest_choices()
        rows = self.own_rows[1]
        if self.moments is None:
            return rows
        wanted = [index in self.moments or not _of_memory(name) for index, name in enumerate(rows.names)]
        return rows.chosen(np.flatnonzero(wanted))

    def _limit_shortest_choices(self) -> None:
        """Add the memory rows that the shortest items of a path break, one a rank."""
        assert self.program is not None
        for row in self.program.coefficients:
            self.limit([int(np.argmin(part)) for part in self.program.by_menu(row.astype(np.float64))])

    def limit(self, choice: Choice) -> bool:
        """Add the memory rows that a choice breaks most, one a rank. Returns False if there is no further one."""
        if self.moments is None or self.own_rows is None or self.program is None:
            return False
        rows, values = self.own_rows[1], np.zeros(self.num_items, dtype=np.int64)
        values[self.program.offsets[:-1] + np.array(choice)] = 1
        excess = rows.activities(values) - rows.upper.astype(np.float64)
        broken: dict[str, tuple[float, int]] = {}
        for index in np.flatnonzero(excess > 0).tolist():
            rank = rows.names[index].split(",")[0]
            if _of_memory(rank) and index not in self.moments:
                broken[rank] = max(broken.get(rank, (0.0, index)), (float(excess[index]), index))
        self.moments |= {index for _, index in broken.values()}
        return bool(broken)

    def choice(self, values: IntArray) -> Choice:
        """Return the items that a solution of the whole program chooses."""
        assert self.program is not None
        own = values[self.start : self.start + self.num_items]
        return [int(np.argmax(own[low:high])) for low, high in pairwise(self.program.offsets)]

    def forbidden_columns(self) -> list[IntArray]:
        """Return the columns of the forbidden combinations that the menus still contain."""
        if self.program is None or not self.forbidden:
            return []
        column: dict[Item, int] = {}
        for menu, start in zip(self.program.menus, self.program.offsets[:-1].tolist(), strict=True):
            column |= {_item(menu, item): start + item for item in range(len(menu))}
        rows = [[column.get(item, -1) for item in items] for items in self.forbidden]
        return [np.array(sorted(row), dtype=np.int64) for row in rows if min(row) >= 0]


def _of_memory(name: str) -> bool:
    return name.startswith(("rank_fits_in_memory", "rank_fits_on_host"))


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
    # The side becomes a coefficient of the literal.
    size += np.where(of_bytes, rows.upper, 0)
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


def monolithic_program(problem: Problem, max_layouts: int = MAX_LAYOUTS) -> Program:
    """Return the program with the analytic paths and those of balanced plans, for export.

    Its name states how a bound follows from the optimum z: objective >= base + unit * z.

    Raises:
        InvalidInputError: the problem is too large, or the program does not cover it.
    """
    monolith = WholeProgram.of(problem, max_layouts)
    if monolith.value is not None:
        monolith.cutoff = monolith.value
    return monolith.program()


@dataclass(slots=True)
class WholeProgram:
    """The program's layouts, and the incumbent ``plan`` with the objective ``value``; different objectives are at
    least ``grain`` apart."""

    problem: Problem
    columns: LayoutColumns
    blocks: list[LayoutBlock]
    grain: Fraction
    cutoff: Fraction
    """Only plans at or below it are searched."""
    value: Fraction | None = None
    plan: Plan | None = None
    base: int = 0
    unit: int = 1

    @staticmethod
    def of(problem: Problem, max_layouts: int) -> WholeProgram:
        """Make the menus and first paths of every layout, and a first incumbent."""
        columns = layout_space(problem).columns
        _require_small(problem, len(columns), max_layouts)
        blocks = _blocks(problem, columns)
        grain = Fraction(1, lcm(*(block.weight.denominator for block in blocks)))
        cutoff = max((block.objective_upper_bound() for block in blocks), default=Fraction(0))
        monolith = WholeProgram(problem, columns, blocks, grain, cutoff)
        for block in blocks:
            monolith._balanced(block)
        return monolith

    def program(self) -> Program:
        """Build the whole program, in units as fine as the row magnitudes allow."""
        for block in self.blocks:
            block.cut(self.cutoff)
        self.base = floor(
            min((block.objective_lower_bound() for block in self.blocks if block.program), default=0)
        )
        self.unit = max(1, ceil((self.cutoff - self.base) / RESOLUTION))
        built = self._assembled()
        magnitude = built.max_row_magnitude()
        if magnitude > ROW_MAGNITUDE:
            self.unit *= ceil(magnitude / ROW_MAGNITUDE)
            built = self._assembled()
        return built

    def _assembled(self) -> Program:
        builder = ProgramBuilder(f"monolith, objective >= {self.base} + {self.unit} z")
        max_z = max(0, floor((self.cutoff - self.base) / self.unit)) + SLACK_UNITS
        z = builder.add_variable("z", 0, max_z)
        builder.minimize([z], [1])
        layouts = Degrees.add(self.problem, builder).add_layouts(builder, self.columns)
        parts = []
        for block in self.blocks:
            literal = layouts[block.number]
            if block.program is None:
                builder.add_row(f"nothing_below_the_cutoff[{block.number}]", [literal], [1], upper=0)
            else:
                parts.append(block.add_rows(builder, literal, z, self.base, self.unit))
        built = builder.build()
        return built.with_rows(Rows.concatenate(parts)) if parts else built

    def offer(self, block: LayoutBlock, choice: Choice, step_time_ns: int) -> bool:
        """Make a plan that fits the incumbent if it is better. Returns True if so."""
        value = step_time_ns * block.weight
        if block.program is None or (self.value is not None and value >= self.value):
            return False
        self.value, self.plan, self.cutoff = value, block.program.plan(choice), value - self.grain
        return True

    def _balanced(self, block: LayoutBlock) -> None:
        """Simulate a balanced plan of a layout: an incumbent, and its critical path."""
        if block.program is None:
            return
        menus, layout = block.program.menus, block.context.layout
        costs = rank_costs(menus, analytic_paths(layout), layout)
        choice = best_choice(block.context, menus, costs, True)
        if choice is None:
            return
        path, step = block.simulate(choice)
        block.program.add_path(path)
        if block.program.overfull_rank(choice) is None:
            self.offer(block, choice, step)


def _require_small(problem: Problem, num_layouts: int, max_layouts: int) -> None:
    job, space = problem.job, problem.space
    if space.kind != "free" or job.objective != "step_time_per_token" or job.deadline_s is not None:
        raise InvalidInputError(
            f"The problem has space={space.kind}, objective={job.objective}, deadline_s={job.deadline_s}.",
            "The monolithic program states the free space, step_time_per_token and no deadline.",
            "Use solve() for the others.",
        )
    if problem.other_hardware and "replicas" in space.mixing:
        raise InvalidInputError(
            f"The problem has mixing={', '.join(space.mixing)}.",
            "The monolithic program states node types that differ between stages alone.",
            "Fix mixing=stages, or use solve().",
        )
    if num_layouts > max_layouts:
        raise _too_large(f"it has {num_layouts:,} legal layouts", f"{max_layouts:,}")


def _too_large(what: str, maximum: str) -> InvalidInputError:
    return InvalidInputError(
        f"The problem is too large for one program: {what}.",
        f"At most {maximum}.",
        "Fix some degrees, or use solve(), which takes any number.",
    )


def _blocks(problem: Problem, columns: LayoutColumns) -> list[LayoutBlock]:
    """Return every layout with its menus and analytic paths."""
    costs, capacity = cluster_costs(problem, columns), usable_memory_bytes(problem)
    largest = max(problem.job.global_batch_values)
    blocks: list[LayoutBlock] = []
    items = 0
    for number in range(len(columns)):
        layout = columns.at(number)
        layout_costs = costs.at(number)
        assert not isinstance(layout_costs, ReplicaCosts), "refused before"
        context = LayoutContext.of(problem, layout, layout_costs, capacity)
        blocks.append(LayoutBlock.of(number, context, Fraction(largest, layout.global_batch_size)))
        items += blocks[-1].num_items
        if items > MAX_ITEMS:
            raise _too_large(f"the menus of {number + 1} layouts have {items:,} items", f"{MAX_ITEMS:,}")
    return blocks
