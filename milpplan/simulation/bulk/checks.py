"""Whether many uniform plans are plans for a problem: the rules of ``simulator.check_plan``, all rows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem.model import MixtureOfExperts
from milpplan.problem.plan import SCHEDULES, V_SCHEDULES
from milpplan.problem.problem import Problem, Range
from milpplan.simulation.bulk.uniform_stages import uniform_plan
from milpplan.simulation.layout_columns import BoolArray, IntArray, LayoutColumns
from milpplan.simulation.network import placement
from milpplan.simulation.simulator import check_plan

MODES = ("none", "selective", "full")
_IS_V = np.array([name in V_SCHEDULES for name in SCHEDULES])
_GPIPE, _INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")


def check_columns(problem: Problem, columns: LayoutColumns, modes: Sequence[str]) -> None:
    """Raise the error of ``check_plan`` for the first row that breaks a rule.

    Raises:
        InvalidInputError: a recompute mode is unknown.
        IllegalPlanError: a layout is none for the problem, or cannot run.
    """
    for mode in modes:
        if mode not in MODES:
            raise InvalidInputError(
                f"The recompute mode is {mode!r}.",
                f"Expected one of {', '.join(MODES)}.",
                "Change the modes.",
            )
    if problem.inference and len(columns) and set(modes) - {"none"}:
        check_plan(problem, uniform_plan(problem, columns.at(0), next(mode for mode in modes if mode != "none")))
    legal = np.ones(len(columns), dtype=np.bool_)
    for rule in _rules(problem, columns):
        legal &= rule
    if not legal.all():
        check_plan(problem, uniform_plan(problem, columns.at(int(np.argmin(legal))), "none"))
        raise AssertionError("a layout breaks a rule in bulk only")


def _rules(problem: Problem, c: LayoutColumns) -> Iterator[BoolArray]:
    """The rules, each a mask [n] of the rows that keep it."""
    job, replicas, m = problem.job, c.dp * c.micro_batch_size, c.num_micro_batches
    yield _admitted(c.num_gpus, job.num_gpus)
    yield _admitted(c.global_batch_size, job.global_batch_size)
    yield c.global_batch_size % replicas == 0
    for kind in problem.model.kinds:
        yield kind.attention.num_attention_heads % c.tp == 0
    yield job.sequence_length % c.cp == 0
    experts = [kind.mlp.num_experts for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    expert_ranks = c.ep * c.etp
    yield (expert_ranks == 1) | bool(experts)
    yield (c.tp * c.cp * c.dp) % expert_ranks == 0
    for number in experts:
        yield number % c.ep == 0
    if experts and c.any_of("rank_order"):
        yield placement.stages_agree(c.mapping)
    offloads = c.offload_weights | c.offload_activations | c.offload_optimizer
    yield ~offloads | (problem.hardware.host_memory is not None)
    yield ~offloads | ~c.split_backward
    yield c.node_order == 0
    yield from _schedule_rules(problem, c, m)


def _admitted(numbers: IntArray, asked: int | Range) -> BoolArray:
    """Which numbers [n] a job admits."""
    if isinstance(asked, int):
        return np.asarray(numbers == asked)
    inside = (numbers >= asked.minimum) & (numbers <= asked.maximum)
    return np.asarray(inside & ((numbers - asked.minimum) % asked.step == 0))


def _schedule_rules(problem: Problem, c: LayoutColumns, m: IntArray) -> Iterator[BoolArray]:
    """Those of ``work_order.check_schedule``, and that forwards alone fill and drain the pipeline."""
    interleaved, turns = c.schedule == _INTERLEAVED, _IS_V[c.schedule]
    yield m >= 1
    yield np.where(turns, c.vpp == 2, (c.vpp == 1) | interleaved)
    yield (c.vpp == 1) | (c.pp > 1)
    yield ~interleaved | (c.vpp == 1) | (m % c.pp == 0)
    yield ~c.runs_pairs | (m >= 2 * c.pp)
    if problem.inference:
        yield ((c.pp == 1) & ~c.split_backward) | (c.schedule == _GPIPE)
