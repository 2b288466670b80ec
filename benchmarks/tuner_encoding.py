"""A planning problem as the knobs that a black-box tuner turns, and what each setting costs.

A knob is what a practitioner would write for a tuner: every degree, every switch, the ZeRO stage, the recompute
mode. ``dp`` follows from the others, and the schedule from ``vpp``. There are two encodings of the layout:

- plain: every knob by itself has the values that occur in some legal layout; a combination may be illegal.
- guided: knobs are turned in order, and each offers only the values that some legal layout has, given those
  before; no layout is illegal. It takes the planner's own enumeration, which a tuner by itself does not have.

In the free space recomputation and splits are knobs too:

- ``detail = line``: the shares of a virtual stage's layers that are recomputed wholly and selectively lie on a
  straight line from the first virtual stage to the last, so four numbers say all.
- ``detail = stages``: both shares are a knob in every virtual stage. Every plan of the space can be said so.
- Interleaved layers: ``split`` picks one of the even splits of the layout. Without interleaving the stages hold
  layers in proportion to weights, those of the ends and (``detail = stages``) of every stage in between.

A knob is asked for only where it matters. All that plans share is done beforehand, in the tuner's favour: the
constants of every layout, and which layouts are legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from benchmarks.problems import Case, Kind
from milpplan import Layout, Plan, Problem, Recompute, VirtualStage
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.enumerate_layouts import SHARDING_RULES, layout_space
from milpplan.optimize.space.layout_space import SHARDING
from milpplan.optimize.space.plan_space import even_splits
from milpplan.simulation.layers.parameter_counts import mfu
from milpplan.simulation.layout_columns import COST_KEYS, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import CostTable, layout_costs, usable_memory_bytes
from milpplan.simulation.simulator import rank_memory, step_times_ns
from milpplan.simulation.stages import durations, plan_stages
from milpplan.units import NS_PER_S

Picking = Literal["choice", "order", "share"]

FAMILY = ("tp", "cp", "pp", "ep", "etp", "micro_batch_size", "vpp", "sequence_parallel")
"""Knobs of a layout in the order in which they are turned; after them those of ``SHARDING``."""
SWITCHES = ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather")
DETAILS = ("line", "stages")
LARGEST_WEIGHT = 2.0
UNFIT, ILLEGAL = 12.0, 24.0
"""Costs: below the first, log2 of step time over the time at full FLOP/s; from it on, plus log2 of the memory
needed over what there is; the second for what no framework would start."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One decision: one of ``values``, without order (choice) or in order; or, where they depend on the knobs
    before, by a share in [0, 1] of their list; or (no values) a number in [0, 1] itself."""

    name: str
    values: tuple[Any, ...] = ()
    picking: Picking = "share"


Ask = Callable[[Knob], Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a tuner is told of a setting: ``cost`` (smaller is better), and for the tables whether the plan was
    legal and fitted, with its step time in seconds if it did."""

    cost: float
    is_legal: bool = False
    step_time_s: float | None = None


def tuned_problem(case: Case, kind: Kind) -> Problem:
    """The problem of a case with ZeRO in pipelines allowed: tuners choose the stage whatever the degrees."""
    problem = case.problem(kind)
    return problem.model_copy(update={"space": problem.space.model_copy(update={"zero_pipeline": True})})


class Encoding:
    """The knobs of a problem with one batch and one number of GPUs, and the cost of every setting."""

    def __init__(self, problem: Problem, *, is_guided: bool = False) -> None:
        """Enumerate the legal layouts and cost them once, for all seeds and tuners."""
        (self._gpus,), (self._batch,) = problem.job.num_gpus_values, problem.job.global_batch_values
        self.problem = problem
        self.is_guided = is_guided
        space = layout_space(problem)
        columns = space.columns
        self._families = _Choices.of({name: getattr(space.families, name) for name in FAMILY})
        self._shardings = {replicas: _shardings(problem, replicas) for replicas in (False, True)}
        self._cost_row = {key: row for row, key in enumerate(_keys(columns, COST_KEYS))}
        self._costs: CostTable = layout_costs(problem, columns)
        self._usable_bytes = usable_memory_bytes(problem)
        # mfu is the ideal time over the real one, so of a second it is the ideal time in seconds.
        tokens = self._batch * problem.job.sequence_length
        self.ideal_s = float(mfu(problem, tokens, self._gpus))
        values = {name: self._families.values(name) for name in FAMILY}
        values |= {name: self._shardings[True].values(name) for name in SHARDING}
        self.layout_knobs = {name: Knob(name, values[name], _picking(name, is_guided)) for name in values}

    def knobs(self) -> Iterator[Knob]:
        """All knobs that any setting may need, for tuners that want them beforehand."""
        yield from self.layout_knobs.values()
        if self.problem.space.kind == "uniform":
            yield Knob("recompute", self.problem.space.recompute, "choice")
            return
        yield Knob("detail", DETAILS, "choice")
        yield from (Knob(f"{name}_{end}") for name in ("full", "selective") for end in ("first", "last"))
        yield from (Knob("split"), Knob("first_weight"), Knob("last_weight"))
        for j in range(self.problem.model.num_layers + 2):
            yield from (Knob(f"{name}_{j}") for name in ("full", "selective", "weight"))

    def evaluate(self, ask: Ask) -> Evaluation:
        """Ask for a setting and cost its plan."""
        plan = self.decode(ask)
        return Evaluation(ILLEGAL) if plan is None else self.cost(plan)

    def decode(self, ask: Ask) -> Plan | None:
        """The plan of a setting; None where its layout, or its split, is not legal."""
        layout = self._layout(ask)
        if layout is None:
            return None
        if self.problem.space.kind == "uniform":
            return uniform_plan(
                self.problem, layout, ask(Knob("recompute", self.problem.space.recompute, "choice"))
            )
        detail = ask(Knob("detail", DETAILS, "choice"))
        split = self._split(ask, layout, detail)
        return None if split is None else self._free_plan(ask, layout, detail, split)

    def cost(self, plan: Plan) -> Evaluation:
        """The cost of a legal plan, its memory checked first: a plan that does not fit needs no longest path."""
        layout = plan.layout
        row = self._cost_row[next(iter(_keys(LayoutColumns.of([layout]), COST_KEYS)))]
        costs = self._costs.at(row)
        stages = plan_stages(costs, self.problem.model.layer_kinds, plan)
        peak = max(rank.peak_bytes for rank in rank_memory(layout, costs, stages))
        if peak > self._usable_bytes:
            excess = float(np.log2(peak / self._usable_bytes))
            return Evaluation(min(UNFIT + excess, ILLEGAL - 1.0), is_legal=True)
        step_s = int(step_times_ns(layout, costs, durations(stages))) / NS_PER_S
        relative = float(np.log2(step_s / self.ideal_s))
        return Evaluation(min(relative, UNFIT), is_legal=True, step_time_s=step_s)

    def _layout(self, ask: Ask) -> Layout | None:
        """Layouts without an overlap switch, which the enumeration leaves out as no better than their twins, are
        legal here: a tuner does not know."""
        family = self._pick(ask, self._families)
        if family is None:
            return None
        dp = self._gpus // (family["tp"] * family["cp"] * family["pp"])
        sharding = self._pick(ask, self._shardings[family["cp"] * dp > 1])
        if sharding is None:
            return None
        schedule = "interleaved" if family["vpp"] > 1 else "1f1b"
        return Layout(**family, **sharding, dp=dp, global_batch_size=self._batch, schedule=schedule)

    def _pick(self, ask: Ask, choices: _Choices) -> dict[str, Any] | None:
        """A row of a table, knob by knob; None where there is none with all that was picked."""
        if self.is_guided:
            return choices.narrowed(lambda name, values: ask(Knob(name, values, "share")))
        picked = {name: ask(self.layout_knobs[name]) for name in choices.names}
        return picked if tuple(picked.values()) in choices.rows else None

    def _split(self, ask: Ask, layout: Layout, detail: str) -> tuple[int, ...] | None:
        """Layers of every virtual stage."""
        splits = even_splits(self.problem, layout)
        if splits is not None:
            return splits[picked(ask(Knob("split")), len(splits) - 1)] if splits else None
        stages = layout.num_virtual_stages
        weights = np.full(stages, LARGEST_WEIGHT / 2)
        for j in range(stages):
            name = "first_weight" if j == 0 else "last_weight" if j == stages - 1 else f"weight_{j}"
            if j in (0, stages - 1) or detail == "stages":
                weights[j] = LARGEST_WEIGHT * ask(Knob(name))
        fewest = _fewest(stages)
        return tuple((fewest + _proportional(self.problem.model.num_layers - fewest.sum(), weights)).tolist())

    def _free_plan(self, ask: Ask, layout: Layout, detail: str, split: tuple[int, ...]) -> Plan:
        shares = self._line(ask, len(split)) if detail == "line" else None
        stages, first = [], 0
        for j, held in enumerate(split):
            if shares is None:
                wholly, partly = ask(Knob(f"full_{j}")), ask(Knob(f"selective_{j}"))
            else:
                wholly, partly = shares[:, j]
            full = picked(wholly, held)
            recompute = Recompute(full=full, selective=picked(partly, held - full))
            stages.append(VirtualStage(layers=(first, first + held), recompute=recompute))
            first += held
        return Plan(layout=layout, virtual_stages=tuple(stages))

    @staticmethod
    def _line(ask: Ask, stages: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Shares (full, selective) of every virtual stage, [2, J]."""
        ends = [[ask(Knob(f"{name}_{end}")) for end in ("first", "last")] for name in ("full", "selective")]
        return np.array([np.linspace(*pair, stages) for pair in ends])


class _Choices:
    """Rows of a table, sorted, to be narrowed down column by column."""

    def __init__(self, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Named columns of distinct rows."""
        self.names = tuple(names)
        self.rows = dict.fromkeys(sorted(rows))
        self._next: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for depth in range(len(self.names), 0, -1):
            heads: dict[tuple[Any, ...], dict[Any, None]] = {}
            for row in self.rows:
                heads.setdefault(row[: depth - 1], {})[row[depth - 1]] = None
            self._next |= {head: tuple(values) for head, values in heads.items()}

    @staticmethod
    def of(columns: Mapping[str, IntArray]) -> _Choices:
        """From one array a column."""
        return _Choices(tuple(columns), list(zip(*(column.tolist() for column in columns.values()), strict=True)))

    def values(self, name: str) -> tuple[Any, ...]:
        """All values of a column, ascending."""
        place = self.names.index(name)
        return tuple(sorted({row[place] for row in self.rows}))

    def narrowed(self, pick: Callable[[str, tuple[Any, ...]], Any]) -> dict[str, Any]:
        """The row that is left when ``pick`` has chosen a value of each column among those still possible."""
        row: tuple[Any, ...] = ()
        for name in self.names:
            values = self._next[row]
            row += (pick(name, values) if len(values) > 1 else values[0],)
        return dict(zip(self.names, row, strict=True))


def _shardings(problem: Problem, has_replicas: bool) -> _Choices:
    """Legal ZeRO stages and overlap switches of layouts with or without replicas."""
    rows = list(product(*(sorted(set(getattr(problem.space, name))) for name in SHARDING)))
    table = {name: np.array([row[place] for row in rows]) for place, name in enumerate(SHARDING)}
    table |= {"cp": np.ones(len(rows), dtype=np.int64), "dp": np.full(len(rows), 1 + has_replicas)}
    legal = np.all([rule(problem, table) for rule in SHARDING_RULES.values()], axis=0)
    return _Choices(SHARDING, [row for row, keep in zip(rows, legal, strict=True) if keep])


def _picking(name: str, is_guided: bool) -> Picking:
    if is_guided:
        return "share"
    return "choice" if name in SWITCHES else "order"


def encode(plan: Plan, encoding: Encoding) -> Mapping[str, Any]:
    """A setting that decodes to a plan of the space, stage by stage in the free space."""
    layout, problem = plan.layout, encoding.problem
    setting = {name: getattr(layout, name) for name in (*FAMILY, *SHARDING)}
    if problem.space.kind == "uniform":
        return {**setting, "recompute": _mode(plan)}
    split = tuple(stage.num_layers for stage in plan.virtual_stages)
    setting["detail"] = "stages"
    splits = even_splits(problem, layout)
    if splits is not None:
        setting["split"] = (splits.index(split) + 0.5) / len(splits)
    else:
        above = np.array(split) - _fewest(len(split))
        weights = above / max(1, above.max())
        setting |= {f"weight_{j}": weight for j, weight in enumerate(weights)}
        setting |= {"last_weight": weights[-1], "first_weight": weights[0]}
    for j, stage in enumerate(plan.virtual_stages):
        full, selective = stage.recompute.full, stage.recompute.selective
        setting[f"full_{j}"] = (full + 0.5) / (stage.num_layers + 1)
        setting[f"selective_{j}"] = (selective + 0.5) / (stage.num_layers - full + 1)
    return setting


def _mode(plan: Plan) -> str:
    """The recompute mode of a uniform plan."""
    recompute = plan.virtual_stages[0].recompute
    return "full" if recompute.full else "selective" if recompute.selective else "none"


def _keys(columns: LayoutColumns, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The named fields of every layout, in a form that hashes."""
    return zip(*(np.asarray(getattr(columns, name)).tolist() for name in names), strict=True)


def picked(share: float, most: int) -> int:
    """A number in [0, 1] as a count 0 .. most, every count as likely."""
    return min(most, int(share * (most + 1)))


def _fewest(stages: int) -> IntArray:
    """Fewest layers of every stage without interleaving: one, none in the first and the last."""
    fewest = np.ones(stages, dtype=np.int64)
    fewest[[0, -1]] = 0
    return fewest


def _proportional(total: int, weights: np.ndarray[Any, np.dtype[np.float64]]) -> IntArray:
    """``total`` things by weight, in whole numbers: what is left by rounding down goes to the largest rests."""
    whole = weights.sum()
    exact = total * (weights / whole if whole > 0 else np.full(len(weights), 1 / len(weights)))
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts
