"""Ranking of the layouts of a sweep: correlation with the measured order, and regret of the first choice.

A sweep is split into runs that compete: equal model, GPUs, global batch, sequence length, precision, framework and
release. Runs of several frameworks or releases are compared apart.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison
from milpplan.validation.runs import Run, framework_of, stack_of

_RELEASE = re.compile(r"\b(?:v|container |release )(\d+\.\d+(?:\.\d+)*)")
_COMMIT = re.compile(r"@([\w.\-]+)")
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


def release_of(run: Run) -> str:
    """Return the release that the source names, else the commit or tag of its files, else nothing."""
    match = _RELEASE.search(run.source or "") or _COMMIT.search(run.url or "")
    return match[1] if match else ""


def competitions(comparisons: Sequence[Comparison], across: bool = False) -> list[list[Comparison]]:
    """Group runs that compete, including those out of memory, with at least two layouts that ran.

    Args:
        comparisons: simulated runs.
        across: group runs of one job by at least two frameworks or releases, whatever their sweep, instead of
            those of one sweep, framework and release.

    Returns:
        Groups of competing runs.
    """
    groups: dict[tuple[object, ...], list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        if UNSCORED_FLAGS & set(comparison.run.flags) or not (across or comparison.run.sweep_id):
            continue
        if comparison.run.measured.status == "oom" or comparison.step is not None:
            key = _job(comparison) if across else (*_job(comparison), *_source(comparison))
            groups[key].append(comparison)
    if across:
        groups = {key: runs for key, runs in groups.items() if len({_program(one) for one in runs}) > 1}
    ran = [[comparison for comparison in members if comparison.step is not None] for members in groups.values()]
    several = [len({_layout_key(comparison) for comparison in finished}) > 1 for finished in ran]
    return [members for members, keep in zip(groups.values(), several, strict=True) if keep]


def sweeps(comparisons: Sequence[Comparison], across: bool = False) -> list[Sweep]:
    """Make every sweep with at least two finished runs; ``across`` as in ``competitions``."""
    all_sweeps = [
        _sweep(members, [comparison for comparison in members if comparison.step is not None])
        for members in competitions(comparisons, across)
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


def _program(comparison: Comparison) -> tuple[str, str]:
    """Return the program that ran: framework and release."""
    return framework_of(comparison.run).name, release_of(comparison.run)


def _source(comparison: Comparison) -> tuple[object, ...]:
    """Return the properties that runs of one sweep share."""
    run = comparison.run
    return run.group, run.sweep_id, stack_of(run), *_program(comparison)


def _job(comparison: Comparison) -> tuple[object, ...]:
    """Return the properties of the job that competing runs share."""
    problem, layout = comparison.statement.problem, comparison.statement.plan.layout
    return (
        problem.model,
        problem.hardware.name,
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
        id=f"{run.sweep_id or run.model.name} ({layout.num_gpus} GPUs, batch {layout.global_batch_size})",
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
