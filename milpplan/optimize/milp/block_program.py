"""Program over blocks: the answer of a search as one integer program that any solver can prove again.

The full form (``whole_program``) has rows of its own for every legal layout. Here layouts whose closed-form bound
is at or above the incumbent are merged into blocks, and only the others, the open layouts, keep plans.

Sets: degrees d with values V_d; blocks b, the closed layouts with equal ``BLOCK_KEYS``, of which V_bd are the
values of degree d; open layouts l; cases c of an open layout, each with its own layers or recompute setting;
uniform plans p of an open layout. ``bound`` and ``step`` count units above ``base``, a lower bound of all plans;
they are rounded such that the optimum is that of the exact problem up to the units.
Variables: [d=v], block_b, layout_l, case_c, rest_l, plan_p in {0, 1}; of a case its z_c and items x_c
(``layout_program``).

    minimise base + sum_c z_c + sum_b bound_b block_b + sum_l bound_l rest_l + sum_p step_p plan_p
    <rows of the degrees>            ``degrees``
    one_layout                       sum_b block_b + sum_l layout_l = 1
    layout_has_degrees               sum_{l: d_l = v} layout_l + sum_{b: V_bd = {v}} block_b  <= [d=v]   all d, v
                                     (= where every block has one value of d)
    block_has_degrees                block_b <= sum_{v in V_bd} [d=v]                                    |V_bd| > 1
    layout_has_plan                  layout_l = sum_c case_c + rest_l     or     sum_p plan_p            every l
    <row of layout_program.py with side s, for every case c>     row(x_c, z_c) - s case_c  >= 0, = 0 or <= 0

A case is a split of the layers where the space lists all splits (even interleaving), a part of the layout where it
shares one recompute setting, and otherwise the whole layout. ``rest_l`` stands for the cases whose closed-form
bound (``SplitBounds`` with the analytic paths, counting) is above the incumbent. Bounds stand in the objective,
and every case has its own z: a common ``z >= sum_b bound_b block_b`` leaves a weak relaxation, in which halves of
two layouts take half the time of either.

The program is solved, its plan simulated, and the critical path added, until bound and simulator meet. Rows of
memory are added in the same way: those that the shortest items of a path break, then those that a plan breaks.
So beyond closed-form bounds the program rests on no search, with one exception: where splits are free, menus leave
out the items that the reduced costs of a relaxation exclude (``compact_relaxation``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Final

import numpy as np

from milpplan.errors import InvalidInputError, SolverError
from milpplan.optimize import Counters, PlanResult, SolveOptions
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_uniform_bounds
from milpplan.optimize.bounds.split_bounds import SplitBounds
from milpplan.optimize.layout import (
    LayoutContext,
    LayoutProgram,
    LayoutState,
    analytic_paths,
    fitted_plan,
    mixture_bound,
    stage_menu,
)
from milpplan.optimize.layout.cutting_planes import compact_rounds
from milpplan.optimize.layout.layout_program import RESOLUTION, SLACK_UNITS
from milpplan.optimize.layout.layout_solver import COARSE_GAP, QUICK_ROUNDS, max_layers_within
from milpplan.optimize.layout.stage_options import Menu, fitting_step_ns, part_settings
from milpplan.optimize.milp.backends import backend as backend_named
from milpplan.optimize.milp.degrees import Degrees, candidate_values
from milpplan.optimize.milp.program import MINUS_INFINITY, Program, ProgramBuilder, Rows
from milpplan.optimize.milp.solution import Backend, Limits
from milpplan.optimize.milp.whole_program import ROW_MAGNITUDE, LayoutBlock
from milpplan.optimize.records import ProgramAnswer
from milpplan.optimize.search.closed_layouts import PruneRecord
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.plan_space import even_splits, in_parts
from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import (
    FloatArray,
    IntArray,
    LayoutColumns,
    RankCosts,
    cluster_costs,
    column_value,
    simulate,
    unique_rows,
    usable_memory_bytes,
)
from milpplan.simulation.bulk import has_uniform_plan, uniform_plan
from milpplan.simulation.mixed_costs import AnyTable, ReplicaCosts
from milpplan.simulation.stages import StageMemo

BLOCK_KEYS: Final = ("tp", "cp", "pp", "dp", "num_gpus", "global_batch_size")
"""Degrees that the layouts of a block share."""
FINEST_UNITS: Final = 400_000
"""Maximum number of units of the incumbent's objective: a unit of the scaled objective exceeds the tolerances of
floating-point solvers, 1e-6."""
MAX_BOUND: Final = Fraction(3, 2)
"""Multiple of the incumbent at which larger bounds are cut: small coefficients, the same optimum."""
MAX_OPEN: Final = 5_000
"""Maximum number of open layouts."""
MAX_ROUNDS: Final = 200
"""Maximum number of programs."""
CASE_PATHS: Final = 6
"""Number of analytic paths of a case that become rows, longest first."""
MENU_PATHS: Final = 60
"""Number of paths that become rows where the layers are free."""


@dataclass(frozen=True, slots=True)
class ClosedBlock:
    """Closed layouts with equal ``BLOCK_KEYS``: the values of every degree, and a lower bound of the objective."""

    values: Mapping[str, tuple[int, ...]]
    bound: int

    @property
    def name(self) -> str:
        """Name of the literal."""
        names = [f"{key}={self.values[key][0]}" for key in BLOCK_KEYS if self.values[key][0] != 1]
        return f"block[{','.join(names)}]"


@dataclass(slots=True)
class OpenLayout:
    """Layout that closed-form bounds leave open.

    ``cases``: parts of the layout with rows of their own. ``rest``: lower bound of the objective over all other
    plans of the layout; None where there are none. ``plans``: in the uniform space, all plans that fit with their
    exact objectives.
    """

    number: int
    layout: Layout
    bound: int
    """Lower bound of the objective, in closed form."""
    cases: list[LayoutBlock] = field(default_factory=list)
    rest: int | None = None
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    best: tuple[int, Plan] | None = None
    """Shortest step found on the way, and its plan."""

    def offer(self, state: LayoutState) -> None:
        """Take the best plan of a state over if it is better."""
        if state.best is not None and (self.best is None or state.best[0] < self.best[0]):
            self.best = state.best

    @property
    def name(self) -> str:
        """Name of the literal: the layout's number and degrees."""
        names = ("tp", "cp", "ep", "etp", "pp", "dp", "vpp", "micro_batch_size", "zero_stage")
        values = [f"{name}={getattr(self.layout, name)}" for name in names if getattr(self.layout, name) != 1]
        return f"layout[{','.join([str(self.number), *values])}]"


def solve_block_program(
    result: PlanResult, options: SolveOptions | None = None, time_limit_s: float | None = None
) -> ProgramAnswer:
    """Write the answer of a search as one program, solve it, and compare both answers.

    Args:
        result: result of ``solve``, with a plan.
        options: backend, seed and cancellation.
        time_limit_s: the solves end then.

    Raises:
        InvalidInputError: the result has no plan, or the program does not cover its problem.
        SolverError: an answer fails its exact re-check.
    """
    started, options = time.monotonic(), options or SolveOptions()
    program = BlockProgram.of(result)
    deadline = None if time_limit_s is None else started + time_limit_s
    limits = Limits(seed=options.seed, cancelled=options.cancelled)
    return program.solve(result, backend_named(options.backend), started, deadline, limits)


def block_program(result: PlanResult) -> Program:
    """Return the program over blocks of a result, with the paths that are known before any solve.

    Raises:
        InvalidInputError: the result has no plan, or the program does not cover its problem.
    """
    return BlockProgram.of(result).program()


@dataclass(slots=True)
class BlockProgram:
    """State of the iteration; objectives are step times in nanoseconds times the layout's weight."""

    problem: Problem
    blocks: list[ClosedBlock]
    layouts: list[OpenLayout]
    cutoff: Fraction
    """Objective of the search's plan: only plans at or below it are in the cases."""
    value: Fraction
    """Objective of the incumbent."""
    plan: Plan
    base: int = 0
    unit: int = 1
    slack: int = 1
    """Maximum rounding of the optimum, in units: for every item on the path of the last plan, and for the base."""
    scales: dict[str, int] = field(default_factory=dict)
    """Units that the z of every case counts, by its label."""
    cases: dict[int, LayoutBlock] = field(default_factory=dict)
    """Columns of the literals of the cases, and the cases."""
    plans: dict[int, tuple[int, Plan]] = field(default_factory=dict)
    """Columns of the literals of uniform plans, and the plans."""

    @staticmethod
    def of(result: PlanResult) -> BlockProgram:
        """Bound all layouts again in closed form, and state those that the bounds leave open."""
        problem = result.problem
        record, plan = _stated(result)
        value = simulate(problem, plan).step_time_ns * _weight(problem, plan.layout)
        split = _Split.of(problem, record, float(value), plan)
        layouts: list[OpenLayout] = []
        for number in range(len(split.rows)):
            layout, costs = split.columns.at(number), split.costs.at(number)
            assert not isinstance(costs, ReplicaCosts), "refused before"
            opened = OpenLayout(number, layout, floor(split.values[number]))
            if problem.space.kind == "uniform":
                opened.plans = list(_uniform_plans(problem, layout, costs, _weight(problem, layout)))
            else:
                _add_cases(problem, opened, costs, value)
            if opened.cases or opened.plans:
                layouts.append(opened)
            else:
                split.close(record.space, number, float(value))
        program = BlockProgram(problem, split.blocks(problem, record.space), layouts, value, value, plan)
        for opened in layouts:
            if opened.best is not None:
                program._offer(opened.best[0] * _weight(problem, opened.layout), opened.best[1])
        for block in program._all_cases():
            program._add_critical_path(block)
        return program

    def _offer(self, value: Fraction, plan: Plan) -> None:
        """Make a plan the incumbent if it is better."""
        if value < self.value:
            self.value, self.plan = value, plan

    def _all_cases(self) -> list[LayoutBlock]:
        return [block for layout in self.layouts for block in layout.cases]

    def _add_critical_path(self, block: LayoutBlock) -> None:
        """Add the incumbent's critical path to the cases of its layout."""
        if block.context.layout != self.plan.layout or block.program is None:
            return
        state = _state(block.context, floor(self.cutoff / block.weight))
        path = state.try_plan(self.plan)
        if path is not None:
            block.program.add_path(path)

    def solve(
        self, result: PlanResult, solver: Backend, started: float, deadline: float | None, limits: Limits
    ) -> ProgramAnswer:
        """Solve programs until bound and simulator meet."""
        searched, solver_s, optimum, proved, rounds = self.value, 0.0, Fraction(0), False, 0
        gap = 0.0
        while rounds < MAX_ROUNDS and not proved:
            program = self.program()
            left_s = None if deadline is None else max(0.01, deadline - time.monotonic())
            asked = replace(limits, time_limit_s=left_s, relative_gap=gap)
            solution = solver.solve(program, asked)
            if solution.status == "infeasible":
                # The presolve of HiGHS loses all plans of some programs.
                solution = solver.solve(program, replace(asked, presolve=False))
            rounds, solver_s = rounds + 1, solver_s + solution.wall_time_s
            if solution.status == "infeasible":
                raise SolverError(f"{solution.backend} calls the program over blocks infeasible; it has a plan.")
            if solution.bound is not None:
                optimum = max(optimum, Fraction(self.unit * ceil(solution.bound - 1e-6)))
            if solution.status != "optimal" or solution.values is None:
                break
            learned = self._learn(np.asarray(solution.values, dtype=np.int64))
            # While answers teach paths they need not be optimal; the last one is.
            proved, gap = not learned and gap == 0.0, COARSE_GAP if learned else 0.0
        slack = self.unit * self.slack
        lower = _proved_ns(result)
        agrees = proved and lower - slack <= optimum <= searched and self.value - optimum <= slack
        return ProgramAnswer(
            program=program,
            backend=solution.backend,
            num_blocks=len(self.blocks),
            num_open=len(self.layouts),
            num_cases=len(self._all_cases()),
            plan=self.plan,
            optimum_ns=float(optimum),
            step_time_ns=float(self.value),
            searched_ns=float(searched),
            unit_ns=self.unit,
            slack_ns=slack,
            proved=proved,
            agrees=bool(agrees),
            rounds=rounds,
            solver_s=solver_s,
            wall_time_s=time.monotonic() - started,
        )

    def program(self) -> Program:
        """Build the program with all rows found so far."""
        base = min(floor(self.cutoff), *(layout.bound for layout in self.layouts))
        self.unit = max(1, ceil((self.cutoff - base) / RESOLUTION), ceil(self.cutoff / FINEST_UNITS))
        # Of every layout's step, too, a unit is a whole number of nanoseconds.
        grain = lcm(*(block.weight.numerator for block in self._all_cases()))
        self.unit = -(-self.unit // grain) * grain
        self.base = base // self.unit * self.unit
        return self._assembled()

    def _units(self, objective: int | Fraction, up: bool = False) -> int:
        """Return an objective in units above the base; bounds at or above the incumbent may be rounded up."""
        above = (objective - self.base) / Fraction(self.unit)
        limit = floor((MAX_BOUND * self.cutoff - self.base) / self.unit)
        return min(ceil(above) if up else floor(above), limit)

    def _assembled(self) -> Program:
        name = f"{self.problem.model.name}, objective in units of {self.unit} ns"
        builder = ProgramBuilder(name)
        costs: dict[int, int] = {}
        degrees = Degrees.add(self.problem, builder)
        layouts = builder.add_variables([layout.name for layout in self.layouts], 1)
        blocks = builder.add_variables([block.name for block in self.blocks], 1)
        builder.add_row("one_layout", [*layouts, *blocks], [1] * (len(layouts) + len(blocks)), 1, 1)
        costs |= {
            column: self._units(block.bound, up=True) for column, block in zip(blocks, self.blocks, strict=True)
        }
        self._add_degrees(builder, degrees, layouts, blocks)
        parts: list[Rows] = []
        self.cases, self.plans = {}, {}
        for layout, literal in zip(self.layouts, layouts, strict=True):
            parts += self._add_layout(builder, layout, literal, costs)
        builder.minimize(list(costs), list(costs.values()), self.base // self.unit)
        built = builder.build()
        return built.with_rows(Rows.concatenate(parts)) if parts else built

    def _add_degrees(self, builder: ProgramBuilder, degrees: Degrees, layouts: range, blocks: range) -> None:
        """Bind layouts and blocks to the literals of their degrees."""
        for name, values in degrees.values.items():
            single = all(len(block.values[name]) == 1 for block in self.blocks)
            of_layout = [column_value(name, getattr(layout.layout, name)) for layout in self.layouts]
            literal_of = dict(zip(values.tolist(), degrees.literals[name], strict=True))
            chosen: dict[int, list[int]] = {value: [] for value in literal_of}
            for column, value in zip(layouts, of_layout, strict=True):
                chosen[value].append(column)
            for column, block in zip(blocks, self.blocks, strict=True):
                own = block.values[name]
                if len(own) == 1:
                    chosen[own[0]].append(column)
                elif len(own) < len(literal_of):
                    literals = [literal_of[value] for value in own]
                    row_name = f"block_has_degrees[{name}]@{block.name}"
                    builder.add_row(row_name, [*literals, column], [*[1] * len(own), -1], 0)
            for value, columns in chosen.items():
                if columns or single:
                    builder.add_row(
                        f"layout_has_degrees[{name}={value}]",
                        [*columns, literal_of[value]],
                        [*[1] * len(columns), -1],
                        0 if single else MINUS_INFINITY,
                        0,
                    )

    def _add_layout(
        self, builder: ProgramBuilder, layout: OpenLayout, literal: int, costs: dict[int, int]
    ) -> Iterator[Rows]:
        """Add the plans or cases of an open layout. Yields the rows of its cases."""
        inside: list[int] = []
        for step, plan in layout.plans:
            recompute = plan.virtual_stages[0].recompute
            mode = "full" if recompute.full else "selective" if recompute.selective else "none"
            column = builder.add_variable(f"plan[{layout.number},{mode}]", 0, 1)
            costs[column] = self._units(step)
            self.plans[column] = step, plan
            inside.append(column)
        if len(layout.cases) == 1 and layout.rest is None:
            self.cases[literal] = layout.cases[0]
        else:
            for block in layout.cases:
                column = builder.add_variable(f"case[{block.label}]", 0, 1)
                self.cases[column] = block
                inside.append(column)
        if layout.rest is not None:
            rest = builder.add_variable(f"rest[{layout.number}]", 0, 1)
            costs[rest] = self._units(layout.rest, up=True)
            inside.append(rest)
        if inside:
            builder.add_row(
                f"layout_has_plan[{layout.number}]", [*inside, literal], [*[1] * len(inside), -1], 0, 0
            )
        for column, block in self.cases.items():
            if block in layout.cases:
                # z_c counts multiples of the unit, as fine as the magnitudes of its rows allow.
                magnitude = block.path_magnitude(self.base, self.unit) + floor(
                    (self.cutoff - self.base) / self.unit
                )
                scale = max(1, ceil(magnitude / ROW_MAGNITUDE))
                max_z = floor((self.cutoff - self.base) / (self.unit * scale)) + SLACK_UNITS
                z = builder.add_variable(f"z[{block.label}]", 0, max_z)
                costs[z] = self.scales[block.label] = scale
                yield block.add_rows(builder, column, z, self.base, self.unit * scale)

    def _learn(self, values: IntArray) -> bool:
        """Simulate the plan of an answer. Returns False if it teaches nothing: bound and simulator have met."""
        for column, (step, plan) in self.plans.items():
            if values[column]:
                self._offer(Fraction(step), plan)
                return False
        for column, block in self.cases.items():
            if values[column]:
                return self._learn_from(block, block.choice(values))
        # A block: no plan is below the search's.
        return False

    def _learn_from(self, block: LayoutBlock, choice: Sequence[int]) -> bool:
        """Add the critical path of a plan, or forbid items that do not fit. Returns True if this changed a row."""
        program = block.program
        assert program is not None
        rank = program.overfull_rank(choice)
        if rank is not None:
            if not block.limit(list(choice)):
                block.forbid(list(choice), block.context.layout.rank_stages[rank])
            return True
        path, step = block.simulate(list(choice))
        self.slack = self.scales[block.label] * (block.context.num_stages + 2)
        self._offer(step * block.weight, program.plan(choice))
        is_new = program.add_path(path)
        # It is a path of every layout with the same step graph.
        for other in self._all_cases() if is_new else ():
            if other.program is not None and _graph_of(other) == _graph_of(block):
                other.program.add_path(path)
        return is_new


def _graph_of(block: LayoutBlock) -> tuple[object, ...]:
    """Return the fields of a case's layout that its step graph depends on."""
    layout = block.context.layout
    shape = layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp
    return *shape, layout.overlap_grad_reduce, layout.overlap_param_gather


@dataclass(slots=True)
class _KeepingState(LayoutState):
    """State of a layout whose cutoff stays, whatever plans are found."""

    def keep(self, step: int, plan: Plan) -> None:
        """Store the best plan at or below the cutoff."""
        if step <= self.cutoff_ns and (self.best is None or step < self.best[0]):
            self.best = (step, plan)


def _state(context: LayoutContext, cutoff_ns: int) -> LayoutState:
    """Return a state that gathers paths and plans."""
    return _KeepingState(context, analytic_paths(context.layout), cutoff_ns, 0, 0.0, None, Counters())


@dataclass(slots=True)
class _Split:
    """Layouts of a space by their closed-form bounds.

    ``rows``: open layouts; ``values``, ``columns``, ``costs``: their bounds, fields and constants. ``keys`` [b]:
    class of every block of the space by ``BLOCK_KEYS``; ``bounds`` [classes]: minimum bound of the closed layouts.
    """

    rows: IntArray
    values: FloatArray
    columns: LayoutColumns
    costs: AnyTable
    keys: IntArray
    bounds: FloatArray

    @staticmethod
    def of(problem: Problem, record: PruneRecord, value: float, plan: Plan) -> _Split:
        """Bound all layouts: those below ``value``, and that of the plan, are open."""
        space, closed = record.space, record.closed.closed_again()
        while (closed.state.block_values < value).any():
            before = len(closed.state.values)
            # The bounds of the last blocks below the value may rise instead.
            closed.first(value, len(space) + 1, lambda: False)
            if len(closed.state.values) == before and (closed.state.block_values < value).any():
                raise _too_large("not all of its layouts can be bounded one by one")
        groups = closed.first(value, len(space) + 1, lambda: False)
        opened = closed.layouts(groups)
        columns = space.take(opened.rows)
        costs = cluster_costs(problem, columns)
        if problem.space.kind == "uniform":
            uniform = cluster_uniform_bounds(problem, columns, costs)
            fits = uniform.memory_bytes <= usable_memory_bytes(problem)
            bounds = np.where(fits, uniform.step_time_ns, np.inf).min(axis=1, initial=np.inf)
        else:
            free = cluster_bounds(problem, columns, costs)
            bounds = np.where(free.memory_bytes <= usable_memory_bytes(problem), free.step_time_ns, np.inf)
        values = np.maximum(bounds, opened.bounds_ns) * opened.weights
        is_open = (values < value) | (opened.rows == space.find(plan.layout))
        if is_open.sum() > MAX_OPEN:
            raise _too_large(f"closed-form bounds leave {is_open.sum():,} layouts open, at most {MAX_OPEN:,}")
        _, keys = unique_rows(*(np.asarray(getattr(space.blocks, name)) for name in BLOCK_KEYS))
        minima = np.full(int(keys.max(initial=-1)) + 1, np.inf)
        group_values = closed.state.values.copy()
        group_values[groups] = np.inf
        group_values[closed.state.groups.sizes(np.arange(len(group_values))) == 0] = np.inf
        np.minimum.at(minima, keys[closed.state.groups.block], group_values)
        np.minimum.at(minima, keys, closed.state.block_values)
        np.minimum.at(minima, keys[space.block_of(opened.rows[~is_open])], values[~is_open])
        chosen = np.flatnonzero(is_open)
        parts = opened.rows[chosen], values[chosen], columns.take(chosen), costs.take(chosen)
        return _Split(*parts, keys, minima)

    def close(self, space: LayoutSpace, number: int, bound: float) -> None:
        """Give an open layout back to its block, with a bound."""
        key = self.keys[space.block_of(self.rows[number : number + 1])]
        self.bounds[key] = np.minimum(self.bounds[key], bound)

    def blocks(self, problem: Problem, space: LayoutSpace) -> list[ClosedBlock]:
        """Return the blocks with layouts that may fit."""
        values: list[dict[str, set[int]]] = [{} for _ in self.bounds]
        for name in candidate_values(problem):
            choices = [part for part in (space.switches, space.stages, space.shardings) if name in part.table]
            if choices:
                rows, number, first, group = choices[0].lists()
                listed = [np.unique(choices[0].table[name][rows[number == each]]) for each in range(len(first))]
                pairs = set(zip(self.keys.tolist(), group.tolist(), strict=True))
                found = [(key, value) for key, each in pairs for value in listed[each].tolist()]
            else:
                own = np.asarray(getattr(space.blocks, name)).astype(np.int64)
                found = list(set(zip(self.keys.tolist(), own.tolist(), strict=True)))
            for key, value in found:
                values[key].setdefault(name, set()).add(int(value))
        return [
            ClosedBlock({name: tuple(sorted(part)) for name, part in values[key].items()}, floor(bound))
            for key, bound in enumerate(self.bounds.tolist())
            if np.isfinite(bound)
        ]


def _stated(result: PlanResult) -> tuple[PruneRecord, Plan]:
    """Return certificate and plan of a result whose problem the program states.

    Raises:
        InvalidInputError: no plan, or another objective.
    """
    problem, job = result.problem, result.problem.job
    if result.plan is None or result.layouts is None:
        raise InvalidInputError(
            f"The search ended as {result.status}, without a plan.",
            "The program over blocks needs an incumbent.",
            "Relax the problem, or give the search more time.",
        )
    if job.objective != "step_time_per_token" or job.deadline_s is not None:
        raise InvalidInputError(
            f"The problem has objective={job.objective}, deadline_s={job.deadline_s}.",
            "The program over blocks states step_time_per_token and no deadline.",
            "Use --method search for the others.",
        )
    if problem.other_hardware and "replicas" in problem.space.mixing:
        raise InvalidInputError(
            f"The problem has mixing={', '.join(problem.space.mixing)}.",
            "The program over blocks states node types that differ between stages alone.",
            "Fix mixing=stages, or use --method search.",
        )
    return result.layouts, result.plan if result.fastest is None else result.fastest.plan


def _proved_ns(result: PlanResult) -> float:
    """Return the bound of a search in the program's objective."""
    if result.report is None or result.plan is None or result.gap is None:
        return 0.0
    return (1.0 - result.gap) * float(result.report.step_time_ns * _weight(result.problem, result.plan.layout))


def _too_large(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"The problem is too large for one program: {what}.",
        "Expected fewer layouts below the incumbent.",
        "Use --method search, fix some degrees, or let the search find a better plan first.",
    )


def _weight(problem: Problem, layout: Layout) -> Fraction:
    """Return the objective per nanosecond of a layout's step."""
    return Fraction(max(problem.job.global_batch_values), layout.global_batch_size)


def _uniform_plans(problem: Problem, layout: Layout, costs: RankCosts, weight: Fraction) -> list[tuple[int, Plan]]:
    """Return objective and plan of every recompute mode that fits."""
    if not has_uniform_plan(problem.model, layout.num_virtual_stages):
        return []
    plans = [uniform_plan(problem, layout, mode) for mode in problem.recompute_modes]
    steps = [fitting_step_ns(problem, plan, costs) for plan in plans]
    return [(floor(step * weight), plan) for step, plan in zip(steps, plans, strict=True) if step is not None]


def _add_cases(problem: Problem, opened: OpenLayout, costs: RankCosts, value: Fraction) -> None:
    """State the parts and splits of a layout that closed-form bounds leave at or below an objective."""
    weight = _weight(problem, opened.layout)
    cutoff_ns = floor(value / weight)
    whole = LayoutContext.of(problem, opened.layout, costs, usable_memory_bytes(problem))
    for context in part_settings(whole, problem.model.num_layers) if in_parts(problem) else (whole,):
        max_layers = max_layers_within(context, cutoff_ns)
        splits = even_splits(context.problem, opened.layout)
        programs: list[LayoutProgram | None]
        if max_layers is None:
            programs = [None]
        elif splits is None:
            programs = [_free_program(context, max_layers, cutoff_ns, opened)]
        else:
            state = _state(context, cutoff_ns)
            bounds = SplitBounds(context, tuple(state.pool))
            memo = StageMemo(context.layout, context.costs)
            programs = [_split_program(state, bounds, split, memo) for split in splits]
            opened.offer(state)
        for program in programs:
            if program is None:
                opened.rest = floor((cutoff_ns + 1) * weight)
            else:
                label = f"{opened.number}.{len(opened.cases)}"
                parts = opened.number, program.context, weight, program
                opened.cases.append(LayoutBlock(*parts, label=label, moments=set()))


def _split_program(
    state: LayoutState, bounds: SplitBounds, split: tuple[int, ...], memo: StageMemo
) -> LayoutProgram | None:
    """Return menus and paths of one split of the layers; None where closed-form bounds exclude it."""
    if bounds.bounds_ns([split], state.cutoff_ns)[0] > state.cutoff_ns:
        return None
    context = state.context.with_split(split, bounds.min_backward_ns(split))
    menus = bounds.split_menus(split)
    if menus is None:
        return None
    program = LayoutProgram(context, menus, state.cutoff_ns)
    analytic = analytic_paths(context.layout)
    for path in analytic:
        program.add_path(path)
    if (program.bases() > state.cutoff_ns).any() or not program.drop_hopeless_items():
        return None
    _keep_paths(program, np.argsort(-program.bases(), kind="stable")[:CASE_PATHS])
    del state.pool[len(analytic) :]
    critical = state.try_plan(fitted_plan(context, np.array(split), memo))
    if critical is not None:
        program.add_path(critical)
    if int(program.bases().max()) <= state.cutoff_ns:
        mixture_bound(state, bounds, split)
        for other in state.pool[len(analytic) :]:
            program.add_path(other)
    return program


def _keep_paths(program: LayoutProgram, indices: IntArray) -> None:
    """Drop all paths but some."""
    program.paths = [program.paths[index] for index in indices.tolist()]
    program.coefficients = [program.coefficients[index] for index in indices.tolist()]


def _free_program(
    context: LayoutContext, max_layers: IntArray, cutoff_ns: int, opened: OpenLayout
) -> LayoutProgram | None:
    """Return menus and paths of a layout with free splits.

    A relaxation gathers paths, and leaves out items that no plan at or below the cutoff holds (section 6 of the
    formulation); where it leaves no item at all, the menus keep all of them.
    """
    state = _state(context, cutoff_ns)
    menus: list[Menu] | None = None
    if context.num_stages == 1:
        context = context.with_split((context.problem.model.num_layers,))
    else:
        menus = compact_rounds(state, max_layers, QUICK_ROUNDS)
    if menus is None:
        menus = [stage_menu(context, stage, int(max_layers[stage])) for stage in range(context.num_stages)]
    opened.offer(state)
    # The other stages hold at most their maxima.
    maxima = np.array([int(menu.layers.max(initial=0)) for menu in menus])
    low = context.problem.model.num_layers - maxima.sum() + maxima
    menus = [menu.take(menu.layers >= bound) for menu, bound in zip(menus, low.tolist(), strict=True)]
    if not all(len(menu) for menu in menus):
        return None
    program = LayoutProgram(context, menus, cutoff_ns)
    num_analytic = len(analytic_paths(context.layout))
    for path in [*state.pool[:num_analytic], *state.pool[num_analytic:][-MENU_PATHS:]]:
        program.add_path(path)
    return program
