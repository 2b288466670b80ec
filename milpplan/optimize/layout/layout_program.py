"""Integer program of one layout: the layers of each virtual stage, and how many of them are recomputed.

Sets: J virtual stages on P ranks; items I_j of stage j's menu (``stage_options``); runs r of
equal layers, N_r long.
Variables: x_ji in {0, 1}: stage j takes item i;  z: step time above ``base``, in units of ``unit`` ns.

    minimise z
    one_item_per_stage      sum_i x_ji = 1                                                         for every j
    layers_are_placed_once  sum_ji runs_jir x_ji = N_r                                             for every r
    runs_in_order           sum_{j' <= j, i} runs_j'ir x_j'i >= N_r [i of stage j has layers after run r]
    larger_stages_first     sum_i layers_ji x_ji >= sum_i layers_(j+1)i x_(j+1)i      inner j, even interleaving
    rank_fits_in_memory     sum_{c,i} (state + live_c kept) x + transient x_running <= capacity    vpp > 1
    critical_path           z >= path_p(x): counts . durations of the chosen items                 for every p

Every path of the step graph bounds the step time of every plan of the layout from below
(``CriticalPath``), so the program is a relaxation of the exact problem, tight at the plans whose
critical path it contains. All coefficients are integers, rounded so that the program stays a relaxation:
durations down to whole units, memory down to whole units of capacity / 2**20 (a plan that breaks the exact
memory is cut off by ``forbid_rank_items``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from milpplan.optimize.layout.rounding import Choice
from milpplan.optimize.layout.stage_options import FLOOR_UNITS, LayoutContext, Menu
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.space.plan_space import even_splits
from milpplan.problem import Plan, Recompute, VirtualStage
from milpplan.simulation import BoolArray, FloatArray, IntArray, TimeScale, host_capacity_bytes
from milpplan.simulation.pipeline.step_graph import CriticalPath, Term
from milpplan.simulation.pipeline.work_orders import held_bytes
from milpplan.simulation.scenario_costs import SAME

RESOLUTION = 400_000
"""Units between the base and the cutoff: fine enough for 1e-5, small enough for every solver."""
FINEST = 4_000_000
"""Maximum number of units of an item in a path's row: above it the solvers' tolerances would exceed
``SLACK_UNITS``."""
SLACK_UNITS = 32
"""Units above the cutoff that z may take, so that a proof with this tolerance still passes the cutoff."""
MEMORY_UNITS = 2**20
"""Units of the memory rows between zero and the capacity."""
UNPLACED_PRICE = 64 * RESOLUTION
MAX_EXCHANGED_ITEMS = 1_000
"""Programs with more items have too many pairs of them for exchanges."""
MAX_EXCHANGES = 20


class ChoiceProgram(Protocol):
    """Program that chooses an item for every virtual stage: of one layout, or of all views of a layout
    (``view_solver``). The last variable is z."""

    cutoff_ns: int
    memory_units: int

    @property
    def offsets(self) -> IntArray:
        """First column of each choice's items, and the end."""

    @property
    def num_rows_found(self) -> int:
        """Number of paths and forbidden combinations so far."""

    def by_menu(self, row: FloatArray) -> list[FloatArray]:
        """Cut a row over all items into one part per menu."""

    def scaling(self, proved_ns: int = 0) -> tuple[int, int]:
        """Return (base_ns, unit_ns) of z."""

    def program(self, base: int, unit: int) -> Program:
        """Return the whole program with all rows known so far."""

    def overfull_rank(self, choice: Sequence[int]) -> int | None:
        """Return a rank whose exact peak exceeds the capacity, if any."""

    def forbid_rank_items(self, choice: Sequence[int], rank: int) -> None:
        """Exclude the combination of items that a rank cannot hold together."""


@dataclass(slots=True)
class LayoutProgram:
    """Integer program of one layout: menus, paths and scaling. The solver adds rows as it finds paths."""

    context: LayoutContext
    menus: list[Menu]
    cutoff_ns: int
    paths: list[CriticalPath] = field(default_factory=list)
    coefficients: list[IntArray] = field(default_factory=list)
    """Nanoseconds of every item of all menus, concatenated, per path."""
    forbidden: list[tuple[IntArray, int]] = field(default_factory=list)
    """(columns, maximum number of them that may be chosen together)."""
    memory_units: int = MEMORY_UNITS
    """Units of the memory rows between zero and the capacity."""
    scale: TimeScale = SAME
    """Scale of all times of paths, z and the cutoff."""

    @property
    def offsets(self) -> IntArray:
        """First column of each stage's items, and the end; [J + 1]."""
        return np.concatenate([[0], np.cumsum([len(menu) for menu in self.menus])]).astype(np.int64)

    def by_menu(self, row: FloatArray) -> list[FloatArray]:
        """Cut a row over all items into one part per stage's menu."""
        offsets = self.offsets
        return [row[start:end] for start, end in pairwise(offsets)]

    @property
    def num_rows_found(self) -> int:
        """Number of paths and forbidden combinations so far."""
        return len(self.paths) + len(self.forbidden)

    def fixed_ns(self, path: CriticalPath) -> int:
        """Return the time of transfers and barrier on a path."""
        costs = self.context.costs
        fixed_ns = path.num_transfers * int(costs.transfer_ns) + path.barrier_count * int(costs.barrier_ns)
        return int(self.scale.down(np.array(fixed_ns)))

    def add_path(self, path: CriticalPath) -> bool:
        """Add a path. Returns False if the program has it already."""
        for other in self.paths:
            if other.num_transfers == path.num_transfers and np.array_equal(other.counts, path.counts):
                return False
        self.paths.append(path)
        times_ns = np.concatenate([path.counts[:, menu.stage] @ menu.terms for menu in self.menus])
        self.coefficients.append(self.scale.down(times_ns))
        return True

    def bases(self) -> IntArray:
        """Return the minimum of every path over each menu separately, [paths]."""
        starts = self.offsets[:-1]
        return np.array(
            [
                int(np.minimum.reduceat(row, starts).sum()) + self.fixed_ns(path)
                for row, path in zip(self.coefficients, self.paths, strict=True)
            ],
            dtype=np.int64,
        )

    def drop_hopeless_items(self) -> bool:
        """Remove items that alone push a path beyond the cutoff. Returns False when a menu runs empty."""
        return self.keep_items(self.hopeful_items())

    def hopeful_items(self) -> BoolArray:
        """Mask the items that alone push no path beyond the cutoff."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        keep = np.ones(int(self.offsets[-1]), dtype=np.bool_)
        for row, base in zip(self.coefficients, self.bases(), strict=True):
            lows = np.repeat(np.minimum.reduceat(row, starts), ends - starts)
            keep &= base + row - lows <= self.cutoff_ns
        return keep

    def keep_items(self, keep: BoolArray) -> bool:
        """Remove all other items. Returns False, without a change, when a menu would run empty."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        if keep.all():
            return True
        if not np.logical_or.reduceat(keep, starts).all():
            return False
        self.menus = [
            menu.take(keep[start:end]) for menu, start, end in zip(self.menus, starts, ends, strict=True)
        ]
        self.coefficients = [row[keep] for row in self.coefficients]
        return True

    def scaling(self, proved_ns: int = 0) -> tuple[int, int]:
        """Return (base_ns, unit_ns) of z: step time >= base + unit * z.

        The base is the largest of the paths' minima, or a bound that is ``proved_ns`` already: the unit is finer
        then, but no finer than ``FINEST`` allows.
        """
        starts = self.offsets[:-1]
        spans = [np.maximum.reduceat(row, starts) - np.minimum.reduceat(row, starts) for row in self.coefficients]
        base = max(int(self.bases().max()), proved_ns)
        longest = max(int(span.max()) for span in spans)
        return base, max(1, -(-(self.cutoff_ns - base) // RESOLUTION), -(-longest // FINEST))

    def path_rows(self, first: int, base: int, unit: int) -> Rows:
        """Return the critical_path rows of the paths from index ``first`` on.

        z - sum q x >= floor((base_p - base) / unit), q = floor((coefficient - minimum of the stage) / unit).
        """
        starts, ends = self.offsets[:-1], self.offsets[1:]
        width = int(self.offsets[-1])
        names, matrix, lower = [], [], []
        for index in range(first, len(self.paths)):
            row = self.coefficients[index]
            lows = np.minimum.reduceat(row, starts)
            above = (row - np.repeat(lows, ends - starts)) // unit
            value = int(lows.sum()) + self.fixed_ns(self.paths[index])
            names.append(f"critical_path[{index}]")
            matrix.append(np.append(-above, 1))
            lower.append((value - base) // unit)
        return Rows.dense(names, np.array(matrix, dtype=np.int64).reshape(-1, width + 1), lower)

    def program(self, base: int, unit: int, elastic: bool = False) -> Program:
        """Return the whole program with all rows known so far.

        ``elastic``: layers may stay unplaced at a price above the cutoff, and z has no upper bound, so that the
        relaxation always has an optimum. An optimum above the cutoff proves that no plan is at or below the
        cutoff.
        """
        builder = ProgramBuilder(self.context.layout.schedule)
        names = [f"x[{menu.stage},{item}]" for menu in self.menus for item in range(len(menu))]
        builder.add_variables(names, 1)
        max_z = max(0, (self.cutoff_ns - base) // unit) + SLACK_UNITS
        z = builder.add_variable("z", 0, 2**40 if elastic else max_z)
        prices = [1]
        for run, (_, length) in enumerate(self.context.runs if elastic else ()):
            builder.add_variable(f"unplaced[{run}]", 0, length, integer=False)
            prices.append(UNPLACED_PRICE)
        builder.minimize(range(z, z + len(prices)), prices)
        for family in ROW_FAMILIES:
            family(self, builder)
        built = builder.build()
        return built.with_rows(self.path_rows(0, base, unit))

    def plan(self, choice: Sequence[int]) -> Plan:
        """Decode a choice of items."""
        stages, start = [], 0
        for menu, item in zip(self.menus, choice, strict=True):
            count = int(menu.runs[item].sum())
            recompute = Recompute(full=int(menu.full[item]), selective=int(menu.selective[item]))
            stages.append(VirtualStage(layers=(start, start + count), recompute=recompute))
            start += count
        return Plan(layout=self.context.layout, virtual_stages=tuple(stages))

    def durations(self, choice: Sequence[int]) -> IntArray:
        """Return the duration matrix [Term, J] of a choice."""
        return np.stack([menu.terms[:, item] for menu, item in zip(self.menus, choice, strict=True)], axis=1)

    def fractional_durations(self, values: FloatArray) -> IntArray:
        """Return the duration matrix of a fractional point: the mean of the items, rounded."""
        offsets = self.offsets
        columns = [
            menu.terms @ values[start:end]
            for menu, start, end in zip(self.menus, offsets[:-1], offsets[1:], strict=True)
        ]
        return np.rint(np.stack(columns, axis=1)).astype(np.int64)

    def overfull_rank(self, choice: Sequence[int]) -> int | None:
        """Return a rank whose exact peak exceeds the capacity, if any."""
        context = self.context
        for rank, rows in enumerate(context.profiles):
            items = [(self.menus[j], choice[j]) for j in context.layout.rank_stages[rank]]
            state_bytes = sum(int(menu.state_bytes[item]) for menu, item in items)
            kept = np.array([int(menu.kept_bytes[item]) for menu, item in items])
            deferred = np.array([int(menu.deferred_bytes[item]) for menu, item in items])
            buffers = int(context.costs.of_rank(rank).buffer_bytes)
            for running, counts in rows:
                menu, item = items[running]
                live = int(np.dot(counts, held_bytes(kept, deferred, len(counts))))
                total = state_bytes + live + int(menu.transient_bytes[item]) + buffers
                if total > context.capacity_of(rank):
                    return rank
                host = sum(int(part.host_state_bytes[index]) for part, index in items)
                on_host = [int(part.host_kept_bytes[index]) for part, index in items]
                host += int(np.dot(counts[: len(items)], on_host))
                if host > context.host_capacity_of(rank):
                    return rank
        return None

    def forbid_rank_items(self, choice: Sequence[int], rank: int) -> None:
        """Exclude the combination of items that a rank cannot hold together."""
        stages = self.context.layout.rank_stages[rank]
        columns = np.array([self.offsets[j] + choice[j] for j in stages], dtype=np.int64)
        self.forbidden.append((columns, len(columns) - 1))


def nearby_choice(program: ChoiceProgram, base: int, unit: int, choice: Choice) -> Choice | None:
    """Return a choice near a given one that all rows known so far allow, at or below the cutoff.

    Steepest descent: each step exchanges the items of two menus. Where a solver's answer turns out to be too slow,
    its neighbours are often the solver's next answers, and are found much faster.

    Args:
        program: menus, rows and cutoff.
        base, unit: scale of z, in nanoseconds (``ChoiceProgram.scaling``).
        choice: item of every menu to start from; it may break rows.

    Returns:
        The choice; None where the exchanges find none, which proves nothing.
    """
    offsets = program.offsets
    num_items = int(offsets[-1])
    if num_items > MAX_EXCHANGED_ITEMS:
        return None
    rows = program.program(base, unit).rows
    matrix = rows.matrix(num_items + 1)
    is_path = matrix[:, -1] != 0
    path, needed = -matrix[is_path, :-1], rows.lower[is_path]
    side, lower, upper = matrix[~is_path, :-1], rows.lower[~is_path, None], rows.upper[~is_path, None]
    menu_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    chosen = offsets[:-1] + np.array(choice)
    max_z = (program.cutoff_ns - base) // unit
    for _ in range(MAX_EXCHANGES):
        needed_z, sides = path[:, chosen].sum(axis=1) + needed, side[:, chosen].sum(axis=1)[:, None]
        z, pair = int(needed_z.max()), None
        if not ((sides >= lower) & (sides <= upper)).all():
            # The first step is to a choice that is allowed.
            z = int(INFINITY)
        if z <= max_z:
            return list(map(int, chosen - offsets[:-1]))
        for menu in range(len(chosen) - 1):
            others = np.arange(offsets[menu + 1], num_items)
            first = np.repeat(np.arange(offsets[menu], offsets[menu + 1]), len(others))
            second = np.tile(others, offsets[menu + 1] - offsets[menu])
            left_out = chosen[menu], chosen[menu_of[second]]
            total = sides + _exchanged(side, first, second, *left_out)
            allowed = ((total >= lower) & (total <= upper)).all(axis=0)
            if allowed.any():
                first, second, left_out = first[allowed], second[allowed], (left_out[0], left_out[1][allowed])
                values = (needed_z[:, None] + _exchanged(path, first, second, *left_out)).max(axis=0)
                best = int(values.argmin())
                if values[best] < z:
                    z, pair = int(values[best]), (int(first[best]), int(second[best]))
        if pair is None:
            return None
        chosen[menu_of[list(pair)]] = pair
    return None


def _exchanged(
    matrix: IntArray, first: IntArray, second: IntArray, old_first: np.int64, old_second: IntArray
) -> IntArray:
    """Return the change of every row's activity by each exchange of two items, [rows, exchanges]."""
    return matrix[:, first] - matrix[:, [old_first]] + matrix[:, second] - matrix[:, old_second]


def one_item_per_stage(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """sum_i x_ji = 1."""
    offsets = program.offsets
    for menu, start, end in zip(program.menus, offsets[:-1], offsets[1:], strict=True):
        columns = np.arange(start, end)
        builder.add_row(f"one_item_per_stage[{menu.stage}]", columns, np.ones_like(columns), 1, 1)


def layers_are_placed_once(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """sum_ji runs_jir x_ji = N_r."""
    z = int(program.offsets[-1])
    columns = np.arange(z)
    runs = np.concatenate([menu.runs for menu in program.menus])
    elastic = builder.num_variables > z + 1
    for run, (_, length) in enumerate(program.context.runs):
        row_columns, counts = columns, runs[:, run]
        if elastic:
            row_columns, counts = np.append(row_columns, z + 1 + run), np.append(counts, 1)
        builder.add_row(f"layers_are_placed_once[{run}]", row_columns, counts, length, length)


def runs_in_order(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """A stage with layers after run r needs all of run r on itself or before."""
    offsets = program.offsets
    for run, (_, length) in enumerate(program.context.runs[:-1]):
        before = np.zeros(offsets[-1], dtype=np.int64)
        for menu, start, end in zip(program.menus, offsets[:-1], offsets[1:], strict=True):
            before[start:end] = menu.runs[:, run]
            row = before.copy()
            row[start:end] -= length * (menu.runs[:, run + 1 :].sum(axis=1) > 0)
            builder.add_row(f"runs_in_order[{run},{menu.stage}]", np.arange(end), row[:end], 0)


def larger_stages_first(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """Even interleaving: an inner stage holds at most as many layers as the inner stage before it."""
    if even_splits(program.context.problem, program.context.layout) is None:
        return
    offsets = program.offsets
    for before, menu in pairwise(program.menus[1:-1]):
        columns = np.arange(offsets[before.stage], offsets[menu.stage + 1])
        layers = np.concatenate([before.layers, -menu.layers])
        builder.add_row(f"larger_stages_first[{menu.stage}]", columns, layers, 0)


def rank_fits_in_memory(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """Limit the peak memory of ranks with several virtual stages: a row for each running chunk and live vector."""
    context, offsets = program.context, program.offsets
    if context.layout.vpp == 1:
        return
    unit = max(1, context.capacity_bytes // program.memory_units)
    for rank, rows in enumerate(context.profiles):
        stages, v = context.layout.rank_stages[rank], context.layout.vpp
        columns = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in stages])
        for number, (running, counts) in enumerate(rows):
            parts = [
                program.menus[j].state_bytes
                + counts[chunk] * program.menus[j].kept_bytes
                + sum(counts[chunk + v : chunk + v + 1]) * program.menus[j].deferred_bytes
                + (program.menus[j].transient_bytes if chunk == running else 0)
                for chunk, j in enumerate(stages)
            ]
            capacity = context.capacity_of(rank) - int(context.costs.of_rank(rank).buffer_bytes)
            builder.add_row(
                f"rank_fits_in_memory[{rank},{number}]",
                columns,
                np.concatenate(parts) // unit,
                MINUS_INFINITY,
                capacity // unit,
            )


def rank_fits_on_host(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """Limit the host memory of ranks with several virtual stages: one row for each live vector."""
    context, offsets = program.context, program.offsets
    if context.layout.vpp == 1 or not context.costs.offloads:
        return
    unit = max(1, host_capacity_bytes(context.problem) // program.memory_units)
    for rank, rows in enumerate(context.profiles):
        stages = context.layout.rank_stages[rank]
        columns = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in stages])
        for number, counts in enumerate(dict.fromkeys(counts for _, counts in rows)):
            parts = [
                program.menus[j].host_state_bytes + counts[chunk] * program.menus[j].host_kept_bytes
                for chunk, j in enumerate(stages)
            ]
            name, coefficients = f"rank_fits_on_host[{rank},{number}]", np.concatenate(parts) // unit
            builder.add_row(name, columns, coefficients, MINUS_INFINITY, context.host_capacity_of(rank) // unit)


def rank_recomputes_enough(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """Fixed layers: sum_i backward_ji x_ji over a rank's chunks is at least the minimum that fits.

    The memory rows do not imply this for fractions. The row counts from the minimum of each stage, in units
    rounded for a relaxation.
    """
    context, offsets = program.context, program.offsets
    for rank, min_backward_ns in enumerate(context.min_backward_ns):
        stages = context.layout.rank_stages[rank]
        columns = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in stages])
        backwards = [program.menus[j].terms[Term.BACKWARD] for j in stages]
        above = np.concatenate([backward - backward.min() for backward in backwards])
        needed = min_backward_ns - sum(int(backward.min()) for backward in backwards)
        if needed > 0:
            unit = max(1, int(above.max()) // FLOOR_UNITS)
            builder.add_row(f"rank_recomputes_enough[{rank}]", columns, -(-above // unit), -(-needed // unit))


def forbidden_combinations(program: LayoutProgram, builder: ProgramBuilder) -> None:
    """Exclude combinations that the exact memory check refused."""
    for number, (columns, max_chosen) in enumerate(program.forbidden):
        builder.add_row(f"forbidden[{number}]", columns, np.ones_like(columns), MINUS_INFINITY, max_chosen)


ROW_FAMILIES = (
    one_item_per_stage,
    layers_are_placed_once,
    runs_in_order,
    larger_stages_first,
    rank_fits_in_memory,
    rank_fits_on_host,
    rank_recomputes_enough,
    forbidden_combinations,
)
"""Table of contents of the program. Rows of critical paths (``LayoutProgram.path_rows``) are added as they are
found."""

__all__ = ["INFINITY", "ROW_FAMILIES", "LayoutProgram"]
