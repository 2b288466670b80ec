"""Best-first search over layouts: each is proved worse than the incumbent, or improves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milpplan.costs.columns import FloatArray, LayoutColumns
from milpplan.costs.layout_costs import LayoutCosts, layout_costs, usable_memory_bytes
from milpplan.costs.simulator import rank_memory, step_times_ns
from milpplan.costs.stages import durations, plan_stages
from milpplan.optimize.bounds import layout_bounds
from milpplan.optimize.layout_solver import LayoutSolver, longest_step_ns
from milpplan.optimize.layouts import LayoutSpace
from milpplan.optimize.menus import Setting, even_splits, layer_bounds
from milpplan.optimize.result import FATES, Fate, LayoutFates, Progress
from milpplan.optimize.uniform import uniform_bounds, uniform_plan
from milpplan.specs.plan import Plan
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S

CHUNK = 65_536
BLOCK = 2048
PROMISING = 5000
"""Layouts of the free space whose uniform plans are looked at for a first incumbent."""
FIRST_PLANS = 12
"""Uniform plans simulated for a first incumbent of the free space."""


@dataclass(slots=True)
class Search:
    """One run over a layout space. Objective = step time (ns) * weight of the layout."""

    problem: Problem
    space: LayoutSpace
    solver: LayoutSolver
    started: float
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    bounds_ns: FloatArray = field(init=False)
    memory: FloatArray = field(init=False)
    fates: np.ndarray[tuple[int], np.dtype[np.int8]] = field(init=False)
    best: tuple[float, Plan] | None = None
    log: list[Progress] = field(default_factory=list)
    last_log: float = 0.0
    uniform_ns: FloatArray = field(init=False)
    block: dict[int, tuple[LayoutCosts, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = self.space.columns
        size = len(columns)
        self.weights, self.limits_ns = objective_weights(self.problem, columns)
        self.bounds_ns, self.memory = np.zeros(size), np.zeros(size)
        self.fates = np.zeros(size, dtype=np.int8)
        modes = len(self.problem.space.recompute)
        self.uniform_ns = np.full((size, modes), np.inf)
        capacity = usable_memory_bytes(self.problem)
        for start in range(0, size, CHUNK):
            rows = np.arange(start, min(size, start + CHUNK))
            part = columns.take(rows)
            costs = layout_costs(self.problem, part)
            if self.problem.space.kind == "uniform":
                self._bound_uniform(rows, part, costs)
            else:
                bounds = layout_bounds(self.problem, part, costs)
                self.bounds_ns[rows], self.memory[rows] = bounds.step_time_ns, bounds.memory_bytes
        if self.problem.space.kind == "free":
            self.fates[self.memory > capacity] = FATES.index("does_not_fit")
            rows = np.argsort(self.values(), kind="stable")[:PROMISING]
            part = columns.take(rows)
            self._bound_uniform(rows, part, layout_costs(self.problem, part))
        self.fates[self.memory > capacity] = FATES.index("does_not_fit")

    def _bound_uniform(self, rows: npt.NDArray[np.int64], part: LayoutColumns, costs: LayoutCosts) -> None:
        """Bounds of the uniform plans of some layouts; in the uniform space they are the layouts' bounds."""
        uniform = uniform_bounds(self.problem, part, costs)
        fits = uniform.memory_bytes <= usable_memory_bytes(self.problem)
        self.uniform_ns[rows] = np.where(fits, uniform.step_time_ns, np.inf)
        if self.problem.space.kind == "uniform":
            self.memory[rows] = uniform.memory_bytes.min(axis=1)
            self.bounds_ns[rows] = np.where(fits.any(axis=1), self.uniform_ns[rows].min(axis=1), np.inf)

    @property
    def scale(self) -> float:
        """From the search's objective to the log's: seconds of step time, or GPU-hours."""
        return 1.0 if self.problem.job.objective == "gpu_hours" else 1.0 / NS_PER_S

    def run(self) -> None:
        """Until every layout is decided, or the time limit."""
        if self.problem.space.kind == "uniform":
            self._uniform(len(self.space.columns) * len(self.problem.space.recompute))
        else:
            self._warm_start()
            self._uniform(FIRST_PLANS)
            self._free()
        self._note(force=True)

    @property
    def best_value(self) -> float:
        """Incumbent objective, infinite without one."""
        return self.best[0] if self.best else np.inf

    def values(self) -> FloatArray:
        """Proved lower bound of every layout's objective; infinite where no plan fits or meets the deadline."""
        value = self.bounds_ns * self.weights
        value = np.where(self.bounds_ns > self.limits_ns, np.inf, value)
        return np.where(self.fates == FATES.index("does_not_fit"), np.inf, value)

    def global_bound(self) -> float:
        """Proved lower bound over all layouts."""
        values = self.values()
        return float(values.min()) if len(values) else np.inf

    def least_memory(self) -> float | None:
        """Least peak (a proved lower bound, bytes) over all layouts; None without any."""
        return float(self.memory.min()) if len(self.memory) else None

    def result(self) -> LayoutFates:
        """The certificate."""
        fates = self.fates.copy()
        undecided = (fates == FATES.index("open")) & (self.values() >= self._threshold())
        fates[undecided] = FATES.index("bounded")
        return LayoutFates(self.space.columns, self.values(), fates)

    def _threshold(self) -> float:
        """Layouts with a bound from here on cannot improve the incumbent by more than the gap."""
        return self.best_value * (1.0 - self.solver.options.gap)

    def _cutoff_ns(self, row: int) -> int:
        limit = min(self._threshold() / float(self.weights[row]), float(self.limits_ns[row]))
        return int(min(limit, 2.0**53))

    def _offer(self, row: int, step_time_ns: int, plan: Plan) -> None:
        value = step_time_ns * float(self.weights[row])
        if value < self.best_value and step_time_ns <= self.limits_ns[row]:
            self.best = (value, plan)
            self._note(force=True)

    def _note(self, force: bool = False) -> None:
        now = time.monotonic() - self.started
        if not force and now - self.last_log < 0.5:
            return
        self.last_log = now
        bound = self.global_bound()
        open_layouts = int(((self.fates == 0) & (self.values() < self._threshold())).sum())
        incumbent = self.best_value * self.scale if self.best else None
        proved = bound * self.scale if np.isfinite(bound) else None
        progress = Progress(now, incumbent, proved, open_layouts)
        self.log.append(progress)
        if self.solver.options.callback is not None:
            self.solver.options.callback(progress)

    def _by_value(self, values: FloatArray) -> Iterator[int]:
        for row in np.argsort(values, kind="stable"):
            if not np.isfinite(values[row]):
                return
            yield int(row)

    def _uniform(self, most: int) -> None:
        """Simulate uniform plans in the order of their bounds. In the uniform space this decides every layout."""
        modes = self.problem.space.recompute
        deciding = self.problem.space.kind == "uniform"
        in_time = np.where(self.uniform_ns <= self.limits_ns[:, None], self.uniform_ns, np.inf)
        values = (in_time * self.weights[:, None]).ravel()
        exact = np.where(np.isfinite(self.uniform_ns), self.uniform_ns, np.inf)
        for simulated, index in enumerate(self._by_value(values)):
            if simulated >= most or values[index] >= self._threshold() or self.solver.out_of_time():
                break
            row, mode = divmod(index, len(modes))
            step = self._simulate(row, modes[mode])
            exact[row, mode] = np.inf if step is None else step
            if deciding:
                self.bounds_ns[row] = exact[row].min()
                self.fates[row] = FATES.index("solved" if np.isfinite(exact[row].min()) else "does_not_fit")
                if (exact[row] < self.bounds_ns[row]).any():
                    self.fates[row] = 0
            self._note()

    def _costs(self, row: int) -> LayoutCosts:
        """Constants of one layout, from a block computed together with its neighbours in the visiting order."""
        if row not in self.block:
            rows = self._next_rows(row)
            costs = layout_costs(self.problem, self.space.columns.take(rows))
            self.block = {int(number): (costs, place) for place, number in enumerate(rows)}
        costs, place = self.block[row]
        return costs.at(place)

    def _next_rows(self, row: int) -> npt.NDArray[np.int64]:
        order = np.argsort(self.values(), kind="stable")
        start = int(np.flatnonzero(order == row)[0])
        return order[start : start + BLOCK]

    def _simulate(self, row: int, mode: str) -> int | None:
        """Exact step time of a uniform plan, offered as incumbent; None if it does not fit."""
        layout = self.space.columns.at(row)
        stages = layout.num_virtual_stages
        layers = self.problem.model.num_layers
        if layers - -(-layers // stages) * (stages - 1) < 0:
            return None
        plan = uniform_plan(self.problem, layout, mode)
        return self.evaluate(row, plan)

    def evaluate(self, row: int, plan: Plan) -> int | None:
        """Exact step time of a plan of a layout, offered as incumbent; None if it does not fit."""
        costs = self._costs(row)
        stages = plan_stages(costs, self.problem.model.layer_kinds, plan)
        memory = rank_memory(plan.layout, costs, stages)
        if max(part.peak_bytes for part in memory) > usable_memory_bytes(self.problem):
            return None
        self.solver.counters.simulations += 1
        step = int(step_times_ns(plan.layout, costs, durations(stages)))
        self._offer(row, step, plan)
        return step

    def _warm_start(self) -> None:
        """The caller's plan, if its layout is in the space."""
        plan = self.solver.options.warm_start
        if plan is None:
            return
        wanted = LayoutColumns.of([plan.layout])
        same = np.ones(len(self.space.columns), dtype=np.bool_)
        for name in type(plan.layout).model_fields:
            same &= getattr(self.space.columns, name) == getattr(wanted, name)[0]
        if not _in_space(self.problem, plan):
            return
        for row in np.flatnonzero(same)[:1]:
            self.evaluate(int(row), plan)

    def _free(self) -> None:
        """Compact relaxations of all layouts first: they are cheap and improve the incumbent; then whatever is
        left in full."""
        for deep in (False, True):
            for row in self._by_value(self.values()):
                if self.bounds_ns[row] * self.weights[row] >= self._threshold():
                    continue
                if self.solver.out_of_time():
                    return
                self._resolve(row, deep)

    def _resolve(self, row: int, deep: bool) -> None:
        layout = self.space.columns.at(row)
        capacity = usable_memory_bytes(self.problem)
        setting = Setting.of(self.problem, layout, self._costs(row), capacity)
        cutoff, longest = self._cutoff_ns(row), longest_step_ns(setting)
        resolution = self.solver.resolve(setting, min(cutoff, longest), int(self.bounds_ns[row]), deep)
        self.bounds_ns[row] = max(self.bounds_ns[row], float(resolution.bound_ns))
        self.fates[row] = FATES.index(resolution.fate)
        if resolution.plan is None and resolution.fate != "open" and longest <= cutoff:
            # Not even the longest step that any plan takes: no plan fits.
            self.fates[row] = FATES.index("does_not_fit")
        if resolution.plan is not None and resolution.step_time_ns is not None:
            self._offer(row, resolution.step_time_ns, resolution.plan)
        self._note()


def _in_space(problem: Problem, plan: Plan) -> bool:
    """Whether a plan's stages are those of the free space (its layout is looked up)."""
    if plan.virtual_stages[-1].layers[1] != problem.model.num_layers:
        return False
    modes = problem.space.recompute
    bounds = layer_bounds(problem, plan.layout)
    splits = even_splits(problem, plan.layout)
    if splits is not None and tuple(stage.num_layers for stage in plan.virtual_stages) not in splits:
        return False
    for stage, (least, most) in zip(plan.virtual_stages, bounds, strict=True):
        full, selective = stage.recompute.full, stage.recompute.selective
        plain = stage.num_layers - full - selective
        used = {"none": plain, "selective": selective, "full": full}
        if not least <= stage.num_layers <= most or any(used[m] and m not in modes for m in used):
            return False
    return True


def objective_weights(problem: Problem, columns: LayoutColumns) -> tuple[FloatArray, FloatArray]:
    """(weight, limit in ns) of each layout's step time.

    step_time_per_token and num_gpus: weight 1 / sequences a step, relative to the largest batch, so that a fixed
    batch gives the step time itself. gpu_hours: GPU-hours of the whole run per nanosecond of step. The limit is
    the longest step that meets the deadline.
    """
    job = problem.job
    batch = columns.global_batch_size.astype(np.float64)
    limit = np.full(len(columns), np.inf)
    if job.deadline_s is not None and job.training_tokens is not None:
        steps = job.training_tokens / (batch * job.sequence_length)
        # Whole nanoseconds; a step that meets the deadline exactly must not be lost to rounding.
        limit = np.floor(job.deadline_s / steps * NS_PER_S * (1.0 + 1e-12))
    if job.objective == "gpu_hours":
        assert job.training_tokens is not None
        steps = job.training_tokens / (batch * job.sequence_length)
        return columns.num_gpus * steps / (3600 * NS_PER_S), limit
    largest = max(job.global_batch_values)
    return largest / batch, limit


def fate_counts(fates: LayoutFates) -> dict[Fate, int]:
    """Layouts by fate."""
    return {fate: fates.count(fate) for fate in FATES}
