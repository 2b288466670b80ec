"""Trials until within 2 % of the best run of a published sweep, which is played as a cluster (``milpplan tune``).

python -m benchmarks.trials [--write]

Compared are orders of the runs: ``tune``, fastest prediction first, random, grid, Optuna's TPE, rule of thumb.
Optuna comes from ``pip install optuna`` and is needed only here.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.tables import markdown_table, replace_section
from milpplan.calibration.trials import play
from milpplan.units import percent_text
from milpplan.validation.comparison import Comparison, compare
from milpplan.validation.ranking import competitions
from milpplan.validation.runs.reader import read_runs

RESULTS = Path(__file__).parent / "results" / "trials.md"
MIN_RUNS = 5
MAX_REGRET = 0.02
SEEDS = 100
"""Number of random orders of a sweep."""
TPE_SEEDS = 5
MAX_ASKS = 400
"""Maximum of TPE's suggestions; the rest of its order is random."""
RECOMPUTE = {"none": 0, "selective": 1, "full": 2, None: 0}
HEADER = ("order", "median trials", "mean trials", "median regret", "mean regret", "worst regret")
SWEEP_HEADER = (
    "sweep",
    "runs",
    "stop",
    "regret at the stop",
    "tune",
    "predicted",
    "random",
    "grid",
    "TPE",
    "rule",
)
Order = list[int]
TPE_ORDERS: dict[tuple[str, ...], list[Order]] = {}
"""TPE's orders by the runs of the sweep: they are equal with and without stacks."""


def _settings(run: Comparison) -> dict[str, Any]:
    """Return the fields of a run's layout, and its recomputation."""
    return {**run.statement.plan.layout.model_dump(), "recompute": run.run.parallel.recompute or "none"}


def varying(runs: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return the values of every run in the fields that vary in a sweep, as text."""
    settings = [_settings(run) for run in runs]
    names = [name for name in settings[0] if len({str(entry[name]) for entry in settings}) > 1]
    return [tuple(str(entry[name]) for name in names) for entry in settings]


def grid_order(runs: Sequence[Comparison]) -> Order:
    """Order runs by tp, cp, ep, pp, chunks, micro-batch and ZeRO stage, each ascending."""
    names = ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size", "zero_stage")
    layouts = [run.statement.plan.layout for run in runs]
    return sorted(range(len(runs)), key=lambda index: [getattr(layouts[index], name) for name in names])


def rule_order(runs: Sequence[Comparison]) -> Order:
    """Order runs by the rule of thumb: minimum model parallelism, then minimum recomputation; ties as the grid."""

    def key(index: int) -> tuple[int, int]:
        layout = runs[index].statement.plan.layout
        return layout.tp * layout.pp * layout.cp, RECOMPUTE[runs[index].run.parallel.recompute]

    return sorted(grid_order(runs), key=key)


def random_order(runs: Sequence[Comparison], seed: int) -> Order:
    """Shuffle the runs."""
    order = list(range(len(runs)))
    random.Random(seed).shuffle(order)
    return order


def tpe_order(runs: Sequence[Comparison], seed: int) -> Order:
    """Order runs as Optuna's TPE suggests them; layouts outside the sweep and repetitions cost no trial."""
    import optuna

    steps, settings = steps_of(runs), varying(runs)
    worst = 10.0 * max(step for step in steps if step < float("inf"))
    choices = [sorted(set(values)) for values in zip(*settings, strict=True)]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    order: Order = []
    for _ in range(MAX_ASKS):
        trial = study.ask()
        asked = tuple(trial.suggest_categorical(str(field), values) for field, values in enumerate(choices))
        matching = [index for index, values in enumerate(settings) if values == asked]
        if not matching:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        index = next((index for index in matching if index not in order), matching[0])
        study.tell(trial, min(steps[index], worst))
        order += [] if index in order else [index]
        if steps[index] <= (1.0 + MAX_REGRET) * min(steps):
            break
    return order + [index for index in random_order(runs, seed) if index not in order]


def steps_of(runs: Sequence[Comparison]) -> list[float]:
    """Return measured seconds a step; infinite for runs out of memory."""
    return [float("inf") if run.step is None else run.step.step_time_s for run in runs]


def trials_needed(order: Order, steps: Sequence[float]) -> int:
    """Count trials until a run within ``MAX_REGRET`` of the best one."""
    limit = (1.0 + MAX_REGRET) * min(steps)
    return next(number for number, index in enumerate(order, 1) if steps[index] <= limit)


def regret_after(order: Order, steps: Sequence[float], num_trials: int) -> float:
    """Compute the measured regret of the best of the first trials; that of the first run that ran before it."""
    ran = [number for number, index in enumerate(order, 1) if steps[index] < float("inf")]
    return min(steps[index] for index in order[: max(num_trials, ran[0])]) / min(steps) - 1.0


def orders_of(runs: Sequence[Comparison]) -> tuple[int, dict[str, list[Order]]]:
    """Return the number of trials after which ``tune`` stops, and the orders by name."""
    played = play(runs, MAX_REGRET)
    names = tuple(run.run.id for run in runs)
    if names not in TPE_ORDERS:
        TPE_ORDERS[names] = [tpe_order(runs, seed) for seed in range(TPE_SEEDS)]
    fitting = sorted(
        range(len(runs)), key=lambda index: (not runs[index].report.fits, runs[index].report.step_time_s)
    )
    return played.num_until_stop, {
        "tune": [[trial.candidate for trial in played.trials]],
        "fastest prediction first": [fitting],
        "random": [random_order(runs, seed) for seed in range(SEEDS)],
        "grid": [grid_order(runs)],
        "Optuna TPE": TPE_ORDERS[names],
        "rule of thumb": [rule_order(runs)],
    }


def tables(stacks: bool) -> tuple[str, str]:
    """Play all sweeps: the table of all orders, and that of the sweeps."""
    trials: dict[str, list[float]] = {}
    regrets: dict[str, list[float]] = {}
    rows = []
    for runs in competitions(compare(read_runs(None), stacks=stacks).comparisons):
        steps = steps_of(runs)
        if sum(step < float("inf") for step in steps) < MIN_RUNS:
            continue
        stop, orders = orders_of(runs)
        needed = {
            name: median(trials_needed(order, steps) for order in several) for name, several in orders.items()
        }
        for name, several in orders.items():
            trials.setdefault(name, []).append(needed[name])
            regrets.setdefault(name, []).append(median(regret_after(order, steps, stop) for order in several))
        layout = runs[0].statement.plan.layout
        name = f"{runs[0].run.sweep_id}, {layout.num_gpus} GPUs, batch {layout.global_batch_size}"
        counts = [f"{number:g}" for number in needed.values()]
        rows.append((name, str(len(runs)), str(stop), percent_text(regrets["tune"][-1]), *counts))
        print(*rows[-1], flush=True)
    summary = [
        (
            name,
            f"{median(numbers):g}",
            f"{fmean(numbers):.1f}",
            *(percent_text(value(regrets[name])) for value in (median, fmean, max)),
        )
        for name, numbers in trials.items()
    ]
    return markdown_table(HEADER, summary), markdown_table(SWEEP_HEADER, rows)


def main() -> None:
    """Play all sweeps with bare hardware and with stacks, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    for name, stacks in (("bare hardware", False), ("fitted stacks", True)):
        for kind, table in zip(("orders", "sweeps"), tables(stacks), strict=True):
            print(f"\n{kind}, {name}\n\n{table}", flush=True)
            if asked.write:
                replace_section(RESULTS, f"{kind} with {name}", table)


if __name__ == "__main__":
    main()
