"""The candidate strategies of a step for sequences of several lengths, and the capacity of their micro-batches.

A strategy is a layout with one recompute setting and equal stages. The space: tp, cp, pp, dp (and ep, etp) by the
rules of the frameworks; ZeRO 1 if there are replicas; sequence parallelism if tp > 1; 1F1B; pp divides the layers.
Gradients are reduced after a group's last backward and parameters gathered after the update, without overlap. What
the problem's space fixes stays fixed.

Memory: the exact peak of the simulator with P micro-batches of equal tokens in flight (``simulation.simulator``),
so a micro-batch may hold as many tokens as fit P times. In a step of several strategies the optimizer states stay
in the home's layout: instead of its own states a GPU holds the largest states of any candidate's GPU, and two
shares of reduced gradients, those summed so far and those that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.lengths.deadline import spend
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Layout, Plan, Problem, Space
from milpplan.simulation import (
    IntArray,
    LayoutColumns,
    LayoutCosts,
    StageOptions,
    plan_stages,
    rank_memory,
    usable_memory_bytes,
)
from milpplan.simulation.layers.layer_time import has_own_times
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.states import grad_bytes
from milpplan.simulation.step_report import StageMemory
from milpplan.units import gib_text

FIXED: dict[str, tuple[object, ...]] = {
    "vpp": (1,),
    "schedule": ("1f1b",),
    "overlap_grad_reduce": (False,),
    "overlap_param_gather": (False,),
    "zero_stage": (0, 1),
    "ulysses": (1,),
    "recompute_modules": ("default",),
    # The times of packed micro-batches do not include streams to and from the host.
    "offload_weights": (False,),
    "offload_activations": (False,),
    "offload_modules": ("default",),
    "offload_optimizer": (False,),
    "dp_replicate": (1,),
    "keep_weights": (False,),
    "expert_dispatch": ("default",),
}
"""Allowed values of the layout's fields in this space."""

_DEFAULTS = {
    name: getattr(Space(), name)[0] for name in ("tp_overlap", "pp_scatter_gather", "gather_again", "rank_order")
}
LayoutKey = tuple[int | str, ...]
"""Fields of a layout that decide where states are."""


@dataclass(frozen=True)
class Candidate:
    """A layout with micro-batches of one token quantum, and one recompute setting."""

    layout: Layout
    recompute: str
    plan: Plan

    @property
    def name(self) -> str:
        """Unique name: degrees above one, the recompute setting, and every field that differs from its default."""
        degrees = [f"{name}{getattr(self.layout, name)}" for name in ("dp", "tp", "cp", "pp", "ep", "etp")]
        shown = [word for word in degrees if not word.endswith("p1") or word[-2].isdigit()]
        changed = [
            f"{name}={value}"
            for name, default in _DEFAULTS.items()
            if (value := getattr(self.layout, name)) != default
        ]
        return " ".join([*(shown or ["dp1"]), *([self.recompute] if self.recompute != "none" else []), *changed])

    @cached_property
    def layout_key(self) -> LayoutKey:
        """Fields that decide where states are: candidates with equal keys need no switch."""
        layout = self.layout
        return (
            layout.tp,
            layout.cp,
            layout.pp,
            layout.dp,
            layout.ep,
            layout.etp,
            layout.zero_stage,
            layout.rank_order,
        )


def quantum_problem(problem: Problem, token_quantum: int) -> Problem:
    """Return the problem whose sequences have one token quantum, one sequence a micro-batch, in the space of this
    package.

    Raises:
        InvalidInputError: the job or the space has something that steps of several lengths do not support.
    """
    job, space = problem.job, problem.space
    unsupported = {
        "several node types": bool(problem.other_hardware),
        "inference": problem.inference,
        problem.job.frozen_text: bool(problem.job.frozen_text),
        "layers of multi-token prediction": bool(job.mtp_layers),
        "an imbalance of experts": job.expert_imbalance > 1,
        job.alignment_text: bool(job.alignment_text),
        f"the optimizer {job.optimizer}": job.optimizer != "adam",
        problem.job.vision_text: bool(problem.job.vision_text),
        f"{job.attention_kernel} attention": job.attention_kernel != "flash",
    }
    if any(unsupported.values()):
        raise InvalidInputError(
            f"Lengths are given with {' and '.join(name for name, is_so in unsupported.items() if is_so)}.",
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
        allowed = values if declared is None else tuple(value for value in values if value in declared)
        if not allowed:
            raise InvalidInputError(
                f"With lengths {name} is one of {list(values)}; the space has {list(declared)}.",
                "Groups run 1F1B without chunks and with ZeRO 0 or 1; nothing is overlapped with reductions, nor "
                "offloaded; states are sharded over all replicas.",
                f"Leave --fix {name} out.",
            )
        changes[name] = allowed
    gpus = job.num_gpus_values[0]
    quantum_job = job.model_copy(update={"sequence_length": token_quantum, "global_batch_size": gpus})
    return problem.model_copy(update={"job": quantum_job, "space": space.model_copy(update=changes)})


def candidates(problem: Problem) -> list[Candidate]:
    """Return all strategies of ``quantum_problem``.

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
    strategies = [
        Candidate(layout, mode, uniform_plan(problem, layout, mode))
        for layout in map(columns.at, rows.tolist())
        for mode in problem.recompute_modes
    ]
    if not strategies:
        raise InfeasibleError(
            f"No layout of {problem.job.num_gpus} GPUs with equal stages keeps the rules of the frameworks.",
            "Expected one at least.",
            "Fix fewer fields, or change the number of GPUs.",
        )
    return strategies


@dataclass(frozen=True, slots=True)
class SizedCandidate:
    """A candidate with its constants and the capacity of its micro-batches in token quanta."""

    candidate: Candidate
    costs: LayoutCosts
    stages: tuple[StageOptions, ...]
    own_memory_quanta: int
    """Capacity if the strategy has the memory to itself."""
    shared_memory_quanta: int
    """Capacity if other strategies share the memory; 0: not even one quantum."""


def sized(problem: Problem, strategies: Sequence[Candidate], max_quanta: int) -> list[SizedCandidate]:
    """Return all candidates that hold something, with capacities of at most ``max_quanta`` quanta.

    Raises:
        InfeasibleError: no candidate holds anything.
    """
    spend(3e-3 * len(strategies))
    peaks = _Peaks(problem, tuple(strategies))
    usable = usable_memory_bytes(problem)
    own_memory = _max_quanta(peaks, np.zeros(len(strategies), dtype=np.int64), usable, max_quanta)
    usable_rows = np.flatnonzero(own_memory)
    if not len(usable_rows):
        min_peak = min(
            max(rank.peak_bytes for rank in ranks) for ranks in peaks.at(np.ones(len(strategies), np.int64))
        )
        raise InfeasibleError(
            f"No strategy holds {problem.job.sequence_length} tokens: the smallest peak over {len(strategies)} "
            f"of them is {gib_text(min_peak)}; a GPU has {gib_text(usable)}.",
            "Expected one that fits.",
            "Use more GPUs.",
        )
    peaks = _Peaks(problem, tuple(strategies[row] for row in usable_rows.tolist()))
    first = peaks.at(np.ones(len(usable_rows), dtype=np.int64))
    states = max(rank.optimizer_bytes for ranks in first for rank in ranks)
    shares = int(-(-2 * states * grad_bytes(problem) // problem.hardware.software.optimizer_state_bytes))
    shared_memory = _max_quanta(peaks, np.full(len(usable_rows), states + shares), usable, max_quanta)
    return [
        SizedCandidate(candidate, costs, stages, int(own_memory[row]), int(shared_memory[index]))
        for index, (row, candidate, (costs, stages)) in enumerate(
            zip(usable_rows, peaks.candidates, peaks.constants(), strict=True)
        )
    ]


@dataclass(frozen=True)
class _Peaks:
    """Exact memory of every candidate for any number of quanta."""

    problem: Problem
    candidates: tuple[Candidate, ...]

    def constants(self) -> list[tuple[LayoutCosts, tuple[StageOptions, ...]]]:
        """Return constants and stages with micro-batches of one quantum."""
        return [
            (costs, stages) for _, costs, stages in self._stages(np.ones(len(self.candidates), dtype=np.int64))
        ]

    def _stages(self, num_quanta: IntArray) -> list[tuple[Layout, LayoutCosts, tuple[StageOptions, ...]]]:
        layouts = [
            candidate.layout.model_copy(
                update={
                    "micro_batch_size": quanta,
                    "global_batch_size": candidate.layout.dp * candidate.layout.pp * quanta,
                }
            )
            for candidate, quanta in zip(self.candidates, num_quanta.tolist(), strict=True)
        ]
        columns = LayoutColumns.of([candidate.layout for candidate in self.candidates])
        table = layout_costs(self.problem, replace(columns, micro_batch_size=num_quanta))
        kinds = self.problem.model.layer_kinds
        return [
            (layout, costs, tuple(plan_stages(costs, kinds, candidate.plan)))
            for row, (candidate, layout) in enumerate(zip(self.candidates, layouts, strict=True))
            for costs in [table.at(row)]
        ]

    def at(self, num_quanta: IntArray) -> list[list[StageMemory]]:
        """Return the memory of every rank with P micro-batches of so many quanta in flight."""
        return [rank_memory(layout, costs, stages) for layout, costs, stages in self._stages(num_quanta)]

    def over(self, num_quanta: IntArray, states: IntArray) -> IntArray:
        """Return the peak of the fullest rank, [n]; positive ``states`` replace its optimizer states."""
        return np.array(
            [
                max(
                    rank.peak_bytes + (max(0, replacement - rank.optimizer_bytes) if replacement else 0)
                    for rank in ranks
                )
                for ranks, replacement in zip(self.at(num_quanta), states.tolist(), strict=True)
            ],
            dtype=np.int64,
        )


def _max_quanta(peaks: _Peaks, states: IntArray, usable: int, limit: int) -> IntArray:
    """Return the maximum number of quanta up to ``limit`` that fits, [n]; 0 if a single quantum does not.

    The peak never falls with the tokens and is nearly straight, so a secant finds it in a few evaluations.
    """
    size = len(peaks.candidates)
    low, high = np.zeros(size, dtype=np.int64), np.full(size, limit + 1)
    at_low, guess = np.zeros(size, dtype=np.int64), np.ones(size, dtype=np.int64)
    at_high = np.full(size, np.iinfo(np.int64).max)
    for _ in range(64):
        open_ = np.flatnonzero(high - low > 1)
        if not len(open_):
            break
        part = _Peaks(peaks.problem, tuple(peaks.candidates[row] for row in open_))
        peak = part.over(guess[open_], states[open_])
        fits = peak <= usable
        low[open_[fits]], at_low[open_[fits]] = guess[open_[fits]], peak[fits]
        high[open_[~fits]], at_high[open_[~fits]] = guess[open_[~fits]], peak[~fits]
        has_upper = at_high < np.iinfo(np.int64).max
        slope = np.maximum(1, (at_high - at_low) // np.maximum(1, high - low))
        secant = low + np.maximum(1, (usable - at_low) // slope)
        between = np.where(low == 1, limit, (low + high) // 2)
        guess = np.clip(np.where(has_upper & (low > 0), secant, between), low + 1, high - 1)
    return low
