"""The candidate strategies of a step of several lengths, and how many tokens a micro-batch of each may hold.

A strategy is a layout with one recompute setting and equal stages. The space: tp, cp, pp, dp (and ep, etp) by the
rules of the frameworks; ZeRO 1 wherever there are replicas; sequence parallelism wherever tp > 1; 1F1B; pp divides
the layers; gradients are reduced after a group's last backward and parameters gathered after the update, beside
nothing. What is fixed in the problem's space stays fixed.

Memory: the exact peak of the simulator with P micro-batches of equal tokens in flight (``costs.simulator``), so a
micro-batch may hold as many tokens as fit P times. In a step of several strategies a GPU holds, in place of its
own, the most optimizer states that any candidate's GPU has (they stay in the home's layout), and two shares of
reduced gradients: those summed so far, and those that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.layout_table import layout_space
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem, Space
from milpplan.simulation.layers.cost_models import has_own_times
from milpplan.simulation.layout_columns import IntArray, LayoutColumns
from milpplan.simulation.layout_costs import LayoutCosts, layout_costs
from milpplan.simulation.report import StageMemory
from milpplan.simulation.simulator import rank_memory
from milpplan.simulation.stages import StageOptions, plan_stages
from milpplan.simulation.states import ADAM_STATE_BYTES, grad_bytes
from milpplan.units import gib_text

FIXED: dict[str, tuple[object, ...]] = {
    "vpp": (1,),
    "schedule": ("1f1b",),
    "overlap_grad_reduce": (False,),
    "overlap_param_gather": (False,),
    "zero_stage": (0, 1),
    # Streams to and from the host are not in the times of packed micro-batches.
    "offload_weights": (False,),
    "offload_activations": (False,),
    "offload_optimizer": (False,),
}
"""Values of the layout's fields in this space."""


_USUAL = {
    name: getattr(Space(), name)[0] for name in ("tp_overlap", "pp_scatter_gather", "gather_again", "rank_order")
}
Place = tuple[int | str, ...]


@dataclass(frozen=True)
class Candidate:
    """A layout (with micro-batches of one grain) and one recompute setting."""

    layout: Layout
    recompute: str
    plan: Plan

    @property
    def name(self) -> str:
        """Degrees above one, the recompute setting, and what is not as it is unless a space says so: no two
        candidates have one name."""
        degrees = [f"{name}{getattr(self.layout, name)}" for name in ("dp", "tp", "cp", "pp", "ep", "etp")]
        shown = [word for word in degrees if not word.endswith("p1") or word[-2].isdigit()]
        others = [
            f"{name}={value}" for name, usual in _USUAL.items() if (value := getattr(self.layout, name)) != usual
        ]
        return " ".join([*(shown or ["dp1"]), *([self.recompute] if self.recompute != "none" else []), *others])

    @cached_property
    def layout_key(self) -> Place:
        """What decides where states are: candidates with the same need no switch."""
        one = self.layout
        return (one.tp, one.cp, one.pp, one.dp, one.ep, one.etp, one.zero_stage, one.rank_order)


def grain_problem(problem: Problem, grain: int) -> Problem:
    """The problem whose sequences are one grain of tokens, one of them a micro-batch in this room's space.

    Raises:
        InvalidInputError: the job or the space is one that groups of lengths do not know.
    """
    job, space = problem.job, problem.space
    foreign = {
        "several node types": bool(problem.other_hardware),
        "inference": problem.inference,
        f"{job.attention_kernel} attention": job.attention_kernel != "flash",
    }
    if any(foreign.values()):
        raise InvalidInputError(
            f"Lengths are given with {' and '.join(name for name, is_so in foreign.items() if is_so)}.",
            "Expected training on one node type with flash attention: memory is then linear in tokens.",
            "Leave that out, or plan for one length.",
        )
    if not has_own_times(problem):
        raise InvalidInputError(
            f"Lengths are given, and {problem.hardware.name} names another cost model for its layers.",
            "Expected our own: others know no micro-batches of several lengths.",
            "Take cost_model out of the hardware description.",
        )
    if job.objective != "step_time_per_token" or job.deadline_s is not None or len(job.num_gpus_values) > 1:
        raise InvalidInputError(
            f"Lengths are given with objective {job.objective} and {len(job.num_gpus_values)} numbers of GPUs.",
            "Expected the shortest step on one number of GPUs, without a deadline.",
            "Give one number of GPUs and no deadline.",
        )
    if space.micro_batch_size not in (None, (1,)):
        raise InvalidInputError(
            f"Lengths are given, and micro-batches of {list(space.micro_batch_size or ())} sequences.",
            "Expected none: a micro-batch holds as many sequences of its lengths as memory does.",
            "Leave --fix micro_batch_size out.",
        )
    changes: dict[str, object] = {"kind": "uniform", "micro_batch_size": (1,)}
    for name, values in FIXED.items():
        declared = getattr(space, name)
        kept = values if declared is None else tuple(value for value in values if value in declared)
        if not kept:
            raise InvalidInputError(
                f"With lengths {name} is one of {list(values)}; the space has {list(declared)}.",
                "Groups run 1F1B without chunks and with ZeRO 0 or 1; nothing is overlapped with reductions, nor "
                "offloaded.",
                f"Leave --fix {name} out.",
            )
        changes[name] = kept
    gpus = job.num_gpus_values[0]
    one = job.model_copy(update={"sequence_length": grain, "global_batch_size": gpus})
    return problem.model_copy(update={"job": one, "space": space.model_copy(update=changes)})


def candidates(problem: Problem) -> list[Candidate]:
    """All strategies of ``grain_problem``.

    Raises:
        InfeasibleError: there is none.
    """
    space = layout_space(problem)
    columns = space.take(np.arange(len(space)))
    replicated = columns.cp * columns.dp > 1
    sharded = max(problem.space.zero_stage)
    parallel = max(problem.space.sequence_parallel)
    keep = problem.model.num_layers % columns.pp == 0
    keep &= columns.zero_stage == np.where(replicated, sharded, 0)
    keep &= columns.sequence_parallel == ((columns.tp > 1) & parallel)
    rows = np.flatnonzero(keep)
    found = [
        Candidate(layout, mode, uniform_plan(problem, layout, mode))
        for layout in map(columns.at, rows.tolist())
        for mode in problem.recompute_modes
    ]
    if not found:
        raise InfeasibleError(
            f"No layout of {problem.job.num_gpus} GPUs with equal stages keeps the rules of the frameworks.",
            "Expected one at least.",
            "Fix fewer fields, or change the number of GPUs.",
        )
    return found


@dataclass(frozen=True, slots=True)
class SizedCandidate:
    """A candidate with its constants and the most grains of a micro-batch: alone in its step, and beside others
    (0: not even one)."""

    candidate: Candidate
    costs: LayoutCosts
    stages: tuple[StageOptions, ...]
    own_memory_quanta: int
    shared_memory_quanta: int


def sized(problem: Problem, found: Sequence[Candidate], most_grains: int) -> list[SizedCandidate]:
    """Capacities of all candidates, without those that hold nothing; no micro-batch is above ``most_grains``."""
    peaks = _Peaks(problem, tuple(found))
    usable = problem.hardware.usable_bytes
    alone = _most_grains(peaks, np.zeros(len(found), dtype=np.int64), usable, most_grains)
    some = np.flatnonzero(alone)
    if not len(some):
        least = min(max(rank.peak_bytes for rank in ranks) for ranks in peaks.at(np.ones(len(found), np.int64)))
        raise InfeasibleError(
            f"No strategy holds {problem.job.sequence_length} tokens: the smallest peak over {len(found)} of them "
            f"is {gib_text(least)}; a GPU has {gib_text(usable)}.",
            "Expected one that fits.",
            "Use more GPUs.",
        )
    peaks = _Peaks(problem, tuple(found[row] for row in some.tolist()))
    first = peaks.at(np.ones(len(some), dtype=np.int64))
    states = max(rank.optimizer_bytes for ranks in first for rank in ranks)
    shares = -(-2 * states * grad_bytes(problem) // ADAM_STATE_BYTES)
    beside = _most_grains(peaks, np.full(len(some), states + shares), usable, most_grains)
    return [
        SizedCandidate(one, costs, stages, int(alone[row]), int(beside[place]))
        for place, (row, one, (costs, stages)) in enumerate(zip(some, peaks.found, peaks.constants(), strict=True))
    ]


@dataclass(frozen=True)
class _Peaks:
    """Exact memory of every candidate for any number of grains."""

    problem: Problem
    found: tuple[Candidate, ...]

    def constants(self) -> list[tuple[LayoutCosts, tuple[StageOptions, ...]]]:
        """Constants and stages with micro-batches of one grain."""
        return [(costs, stages) for _, costs, stages in self._stages(np.ones(len(self.found), dtype=np.int64))]

    def _stages(self, grains: IntArray) -> list[tuple[Layout, LayoutCosts, tuple[StageOptions, ...]]]:
        layouts = [
            one.layout.model_copy(
                update={"micro_batch_size": g, "global_batch_size": one.layout.dp * one.layout.pp * g}
            )
            for one, g in zip(self.found, grains.tolist(), strict=True)
        ]
        columns = LayoutColumns.of([one.layout for one in self.found])
        table = layout_costs(self.problem, replace(columns, micro_batch_size=grains))
        kinds = self.problem.model.layer_kinds
        return [
            (layout, costs, tuple(plan_stages(costs, kinds, one.plan)))
            for row, (one, layout) in enumerate(zip(self.found, layouts, strict=True))
            for costs in [table.at(row)]
        ]

    def at(self, grains: IntArray) -> list[list[StageMemory]]:
        """Memory of every rank with P micro-batches of so many grains in flight."""
        return [rank_memory(layout, costs, stages) for layout, costs, stages in self._stages(grains)]

    def over(self, grains: IntArray, states: IntArray) -> IntArray:
        """Peak of the fullest rank, [n]; where ``states`` are given these take the place of its optimizer's."""
        return np.array(
            [
                max(rank.peak_bytes + (max(0, own - rank.optimizer_bytes) if own else 0) for rank in ranks)
                for ranks, own in zip(self.at(grains), states.tolist(), strict=True)
            ],
            dtype=np.int64,
        )


def _most_grains(peaks: _Peaks, states: IntArray, usable: int, most: int) -> IntArray:
    """Largest number of grains up to ``most`` that fits, [n]; 0 where one does not. The peak never falls with the
    tokens and is nearly straight, so a secant finds it in a few evaluations."""
    size = len(peaks.found)
    low, high = np.zeros(size, dtype=np.int64), np.full(size, most + 1)
    at_low, guess = np.zeros(size, dtype=np.int64), np.ones(size, dtype=np.int64)
    at_high = np.full(size, np.iinfo(np.int64).max)
    for _ in range(64):
        open_ = np.flatnonzero(high - low > 1)
        if not len(open_):
            break
        part = _Peaks(peaks.problem, tuple(peaks.found[row] for row in open_))
        peak = part.over(guess[open_], states[open_])
        fits = peak <= usable
        low[open_[fits]], at_low[open_[fits]] = guess[open_[fits]], peak[fits]
        high[open_[~fits]], at_high[open_[~fits]] = guess[open_[~fits]], peak[~fits]
        known = at_high < np.iinfo(np.int64).max
        slope = np.maximum(1, (at_high - at_low) // np.maximum(1, high - low))
        secant = low + np.maximum(1, (usable - at_low) // slope)
        between = np.where(low == 1, most, (low + high) // 2)
        guess = np.clip(np.where(known & (low > 0), secant, between), low + 1, high - 1)
    return low
