"""Ranking of the layouts of a sweep: correlation with the measured order, and regret of the first choice.

A sweep is split into runs that compete: equal model, GPUs, global batch, sequence length and precision.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison
from milpplan.validation.runs.frameworks import stack_of

_RECOMPUTE_ORDER = {"none": 0, "selective": 1, "full": 2, None: 0}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep. Regrets are measured time of a choice over the best measured time, minus 1.

    ``regret``: of the layout with the fastest prediction among those that ran. ``pick_regret``: of the first
    layout in predicted order that runs, trying only layouts that are predicted to fit, after ``failed_trials``
    that ran out of memory; None if none is predicted to fit. ``rule_regret``: of the rule "minimum model
    parallelism that fits" (mean over ties), then minimum recomputation. ``random_regret``: mean over all that ran.
    """

    id: str
    group: str
    num_ok: int
    num_oom: int
    kendall_tau: float | None
    regret: float
    pick_regret: float | None
    failed_trials: int
    rule_regret: float
    random_regret: float
    best_id: str
    first_id: str


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Compute Kendall's tau-b of two rankings; None where a ranking is constant.

    (concordant - discordant) / sqrt(pairs not tied in the first * pairs not tied in the second). Source: Kendall
    1945, "The treatment of ties in ranking problems".
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    signs_x = np.sign(x[:, None] - x[None, :])
    signs_y = np.sign(y[:, None] - y[None, :])
    untied = float(np.abs(signs_x).sum()) * float(np.abs(signs_y).sum())
    return float((signs_x * signs_y).sum() / np.sqrt(untied)) if untied else None


def competitions(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Group runs of a sweep that compete, including those out of memory, with at least two layouts that ran."""
    groups: dict[tuple[object, ...], list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.run.sweep_id is None or UNSCORED_FLAGS & set(comparison.run.flags):
            continue
        if comparison.run.measured.status == "oom" or comparison.step is not None:
            groups[_competition(comparison)].append(comparison)
    ran = [[comparison for comparison in members if comparison.step is not None] for members in groups.values()]
    several = [len({_layout_key(comparison) for comparison in finished}) > 1 for finished in ran]
    return [members for members, keep in zip(groups.values(), several, strict=True) if keep]


def sweeps(comparisons: Sequence[Comparison]) -> list[Sweep]:
    """Make every sweep with at least two finished runs."""
    all_sweeps = [
        _sweep(members, [comparison for comparison in members if comparison.step is not None])
        for members in competitions(comparisons)
    ]
    return _named_apart(sorted(all_sweeps, key=lambda sweep: (sweep.id, -sweep.num_ok)))


def _named_apart(all_sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Number the parts of a sweep that differ only in the model or the precision."""
    seen: Counter[str] = Counter()
    named = []
    for sweep in all_sweeps:
        seen[sweep.id] += 1
        times = seen[sweep.id]
        named.append(sweep if times == 1 else replace(sweep, id=f"{sweep.id} [{times}]"))
    return named


def _competition(comparison: Comparison) -> tuple[object, ...]:
    """Return the properties that competing runs share."""
    problem, layout = comparison.statement.problem, comparison.statement.plan.layout
    return (
        comparison.run.group,
        comparison.run.sweep_id,
        problem.model,
        problem.hardware.name,
        stack_of(comparison.run),
        problem.job.precision,
        problem.job.sequence_length,
        layout.num_gpus,
        layout.global_batch_size,
    )


def _layout_key(comparison: Comparison) -> tuple[object, ...]:
    return comparison.statement.plan, comparison.statement.problem.job.attention_kernel


def _time(comparison: Comparison) -> float:
    assert comparison.step is not None
    return comparison.step.step_time_s


def _predicted(comparison: Comparison) -> float:
    return comparison.report.step_time_s


def _sweep(members: Sequence[Comparison], ran: Sequence[Comparison]) -> Sweep:
    best = min(ran, key=_time)
    first = min(ran, key=_predicted)
    pick, failed = _pick(members)
    run, layout = best.run, best.statement.plan.layout
    smallest = min(_model_parallelism(comparison) for comparison in ran)
    by_rule = [_time(comparison) for comparison in ran if _model_parallelism(comparison) == smallest]
    return Sweep(
        id=f"{run.sweep_id} ({layout.num_gpus} GPUs, batch {layout.global_batch_size})",
        group=run.group,
        num_ok=len(ran),
        num_oom=len(members) - len(ran),
        kendall_tau=kendall_tau(
            [_predicted(comparison) for comparison in ran], [_time(comparison) for comparison in ran]
        ),
        regret=_time(first) / _time(best) - 1,
        pick_regret=None if pick is None else _time(pick) / _time(best) - 1,
        failed_trials=failed,
        rule_regret=fmean(by_rule) / _time(best) - 1,
        random_regret=fmean(_time(comparison) for comparison in ran) / _time(best) - 1,
        best_id=run.id,
        first_id=first.run.id,
    )


def _pick(members: Sequence[Comparison]) -> tuple[Comparison | None, int]:
    failed = 0
    for comparison in sorted((comparison for comparison in members if comparison.report.fits), key=_predicted):
        if comparison.step is not None:
            return comparison, failed
        failed += 1
    return None, failed


def _model_parallelism(comparison: Comparison) -> tuple[int, int]:
    layout = comparison.statement.plan.layout
    return layout.tp * layout.pp * layout.cp, _RECOMPUTE_ORDER[comparison.run.parallel.recompute]
