"""Launcher's rule of thumb as code: the plan that a practitioner takes from the published tables.

Source: NVIDIA-NeMo/Megatron-Bridge@0026ec18, docs/parallelisms.md, "Strategy Selection Guide": the tables "Dense
Models by Size", "MoE Models" (total parameters) and "By Sequence Length". The tables give ranges; the practitioner
takes from them the minimum model parallelism with which the model fits. Settings that the tables leave open follow
the project's recipes: sequence parallelism with tp > 1, the distributed optimizer (ZeRO-1) with both overlaps,
micro-batch 1, and interleaving with the smallest chunks of at least two layers (GPT-3 175B: PP8 VP6, Llama-3 405B:
PP8 VP8; of one layer where no other chunks are equal). Recomputation is the minimum that memory requires. Where
the depth does not divide, embedding and loss count as a layer each (Llama-3 405B), else the last stage is short
(DeepSeek-V3: 15 stages of 4 layers and one of 1, as in its PP16 recipe).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from milpplan.errors import IllegalPlanError
from milpplan.explain.records import RuleOfThumb
from milpplan.problem.model import MixtureOfExperts
from milpplan.problem.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.parameters import total_parameters
from milpplan.simulation.report import StepReport
from milpplan.simulation.simulator import simulate

Degrees = tuple[int, ...]
MODES = ("none", "selective", "full")
LAYERS_A_CHUNK = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table: models of up to ``largest`` parameters, and the recommended ranges."""

    largest: float
    tp: Degrees = (1,)
    pp: Degrees = (1,)
    cp: Degrees = (1,)
    ep: Degrees = (1,)


DENSE = (
    Row(1e9),
    Row(10e9, tp=(2, 4)),
    Row(70e9, tp=(4, 8), pp=(2, 4)),
    Row(175e9, tp=(8,), pp=(4, 8)),
    Row(500e9, tp=(8,), pp=(8, 16), cp=(2,)),
)
MOE = (
    Row(20e9, ep=(8,)),
    Row(100e9, tp=(1, 2), pp=(2, 4), ep=(8, 16)),
    Row(500e9, tp=(2, 4), pp=(8, 16), ep=(8, 16, 32)),
    Row(float("inf"), tp=(2,), pp=(16,), ep=(32, 64)),
)
CP_BY_SEQUENCE = ((8192, (1,)), (32768, (2,)), (float("inf"), (4, 8)))
"""Maximum sequence length and the recommended cp. The table's rows share their ends, which count as the
shorter."""


def rule_of_thumb(problem: Problem) -> RuleOfThumb | None:
    """Build the practitioner's plan; None where it does not fit even with more pipeline stages than the table
    says."""
    row = row_of(problem)
    for pp, within_table in _wider_and_wider(row, problem.model.num_layers):
        for recomputed in ("selective", "full"):
            for degrees in _least_first(problem, row, pp):
                priced = _plan(problem, degrees, recomputed)
                if priced is not None:
                    return RuleOfThumb(*priced, within_table)
    return None


def row_of(problem: Problem) -> Row:
    """Return the row for a model's size; the last dense row also covers larger models."""
    table = MOE if _experts(problem) else DENSE
    size = total_parameters(problem.model)
    return next((row for row in table if size <= row.largest), table[-1])


def _experts(problem: Problem) -> int:
    """Return the number of routed experts of the model's layers (0: dense)."""
    return max(
        (kind.mlp.num_experts for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)),
        default=0,
    )


def _wider_and_wider(row: Row, layers: int) -> Iterator[tuple[Degrees, bool]]:
    """Iterate over the row's pp, then doubled repeatedly."""
    yield row.pp, True
    pp = 2 * row.pp[-1]
    while pp <= layers:
        yield (pp,), False
        pp *= 2


def _least_first(problem: Problem, row: Row, pps: Degrees) -> list[dict[str, int]]:
    """List legal degrees by model parallelism, then tp, then ep, smallest first."""
    job, experts = problem.job, _experts(problem)
    (gpus,), (batch,) = job.num_gpus_values, job.global_batch_values
    by_sequence = next(cps for longest, cps in CP_BY_SEQUENCE if job.sequence_length <= longest)
    cps = row.cp if max(row.cp) >= max(by_sequence) else by_sequence
    eps = sorted({min(ep, experts) for ep in row.ep}) if experts else (1,)
    legal = []
    for tp, pp, cp, ep in product(row.tp, pps, cps, eps):
        dp, rest = divmod(gpus, tp * pp * cp)
        in_node = tp <= problem.hardware.gpus_per_node
        if dp and not rest and in_node and batch % dp == 0 and (tp * cp * dp) % ep == 0:
            legal.append({"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp})
    return sorted(legal, key=lambda d: (d["tp"] * d["pp"] * d["cp"], d["tp"], d["ep"]))


def _plan(problem: Problem, degrees: dict[str, int], max_recompute: str) -> tuple[Plan, StepReport] | None:
    """Build the plan of given degrees with the minimum recomputation that fits, up to ``max_recompute``."""
    (batch,) = problem.job.global_batch_values
    split = split_of_layers(problem.model.num_layers, degrees["pp"], batch // degrees["dp"])
    if split is None:
        return None
    vpp = len(split) // degrees["pp"]
    layout = Layout(
        **degrees,
        vpp=vpp,
        global_batch_size=batch,
        sequence_parallel=degrees["tp"] > 1,
        zero_stage=int(degrees["dp"] * degrees["cp"] > 1),
        schedule="interleaved" if vpp > 1 else "1f1b",
        overlap_grad_reduce=degrees["dp"] * degrees["cp"] > 1,
        overlap_param_gather=degrees["dp"] * degrees["cp"] > 1,
    )
    for mode in MODES[: MODES.index(max_recompute) + 1]:
        plan = Plan(layout=layout, virtual_stages=_stages(split, mode))
        try:
            report = simulate(problem, plan)
        except IllegalPlanError:
            # The tables ignore heads, sequences and experts that a degree does not divide.
            return None
        if report.fits_with_margin:
            return plan, report
    return None


def split_of_layers(layers: int, pp: int, micro_batches: int) -> Degrees | None:
    """Choose the layers of every virtual stage: interleaved with the smallest chunks of at least two layers (of
    one where no other chunks are equal), if the micro-batches allow it; else one chunk."""
    if pp > 1 and micro_batches % pp == 0:
        splits = [_even(layers, pp * vpp) for vpp in range(-(-layers // pp), 1, -1)]
        even = [split for split in splits if split is not None]
        coarse = [split for split in even if max(split) >= LAYERS_A_CHUNK]
        for candidates in (coarse, even):
            if candidates:
                return candidates[0]
    each = -(-layers // pp)
    last = layers - each * (pp - 1)
    return _even(layers, pp) or (((each,) * (pp - 1) + (last,)) if last >= 1 else None)


def _even(layers: int, stages: int) -> Degrees | None:
    """Split into equal stages; embedding and loss count as a layer each where only that divides."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1 and (layers + 2) // stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return None


def _stages(split: Degrees, mode: str) -> tuple[VirtualStage, ...]:
    first, stages = 0, []
    for count in split:
        recompute = Recompute() if mode == "none" else Recompute.model_validate({mode: count})
        stages.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    return tuple(stages)
