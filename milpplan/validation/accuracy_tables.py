"""Accuracy as tables: errors, fit, ranking, lines, single runs, and runs that could not be simulated.

``document`` is the output of ``milpplan validate --json``; SI units, errors as fractions.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.units import gib_text, percent_text, printable, seconds_text, signed_percent_text
from milpplan.validation.comparison import Comparison, Unstated, Validation
from milpplan.validation.ranking import Sweep
from milpplan.validation.runs.records import Run
from milpplan.validation.summary import Errors, Family, Fit, GroupedErrors, Source, Summary
from milpplan.version import __version__

MAX_ROWS = 40
"""Maximum number of rows of single items; the rest is counted here, and listed in the JSON document."""
MAX_NAMED = 3
"""Maximum number of runs named per reason, unless all are requested."""
MAX_SHOWN_ERROR = 9.99
"""Maximum relative error of slopes and intercepts that is shown; a larger one means a measured value near zero."""
_VARIES = {"micro_batches": "micro-batches", "layers": "layers", "gpus": "GPUs"}


def report(
    validation: Validation, summary: Summary, each: bool = False, covered: float | None = None
) -> RenderableType:
    """Show the whole output of ``milpplan validate``.

    Args:
        validation: The compared runs.
        summary: Their accuracy figures.
        each: Show every run.
        covered: Share of runs within one sigma of their prediction; None: not known.
    """
    parts: list[RenderableType] = [_headline(validation, summary, covered), Text()]
    for title, table in (
        ("Step time by source (errors: predicted over measured, minus 1, in per cent)", _source_table(summary)),
        (
            "Step time by hardware generation (scored runs, per cent; every source weighs the same)",
            _generations(summary),
        ),
        ("Memory (errors in per cent)", _memory_table(summary)),
        ("Fits or runs out of memory (accuracy, precision and recall in per cent)", _fit_table(summary)),
        ("Sweeps: order, and regret of the first choice in per cent", _sweep_table(summary.sweeps)),
        ("Jobs of several frameworks or releases: the same figures", _sweep_table(summary.sweeps_across)),
        (
            "Slopes and intercepts (start) by source (per cent, without signs: median relative to the measured "
            "one, mean relative to the step)",
            _line_table(summary),
        ),
        ("Slopes and intercepts (start) of the step time (errors in per cent)", _family_table(summary)),
    ):
        if table.row_count:
            parts += [Text(title, style="bold"), table]
    parts += run_parts(validation, each)
    if summary.contradictions:
        parts += [Text("Records that contradict themselves or each other", style="bold")]
        parts += [_contradiction_table(summary, each)]
    if validation.unstated:
        parts += [Text("Not simulated", style="bold"), _unstated_table(validation, each)]
    return Group(*parts)


def _headline(validation: Validation, summary: Summary, covered: float | None) -> Text:
    lines = [
        f"{len(validation.comparisons):,} runs simulated, {len(validation.unstated):,} not"
        + (f", {len(validation.rejected):,} records rejected" if validation.rejected else "")
    ]
    for name, errors in (("dense", summary.dense), ("mixture of experts", summary.moe)):
        if errors is not None:
            lines.append(
                f"{name}: mean absolute error of the step time {percent_text(errors.mean_abs_error)} over "
                f"{errors.num_sources} source{'s' if errors.num_sources > 1 else ''} ({errors.num_runs:,} scored "
                f"run{'s' if errors.num_runs > 1 else ''}), worst run "
                f"{percent_text(errors.max_abs_error)}"
            )
    if covered is not None:
        lines.append(f"error bars: {percent_text(covered, 0)} of a sample of scored runs are within one sigma")
    return Text("\n".join(lines))


def _table(*columns: str, left: int = 1, wrapped: Sequence[int] = (0,)) -> Table:
    """Make a table whose first ``left`` columns and ``wrapped`` ones are left-aligned; only the latter wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        wraps = index in wrapped
        justify: Literal["left", "right"] = "left" if index < left or wraps else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=not wraps)
    return table


def _signed(fraction: float | None) -> str:
    return "-" if fraction is None else f"{'+' if fraction >= 0 else '-'}{_bare(abs(fraction))}"


def _bare(fraction: float) -> str:
    """Write per cent without the sign, for columns whose title implies it."""
    return percent_text(fraction).removesuffix(" %")


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else _bare(fraction)


def _figures(errors: Errors | GroupedErrors | None) -> tuple[str, ...]:
    if errors is None:
        return ("0", "-", "-", "-", "-")
    return (
        f"{errors.num_runs:,}",
        _signed(errors.mean_error),
        _bare(errors.mean_abs_error),
        _bare(errors.median_abs_error),
        _bare(errors.max_abs_error),
    )


def _source_table(summary: Summary) -> Table:
    table = _table("source", "runs", "stated", "timed", "mean", "scored", "mean", "abs", "median", "worst")
    for source in summary.sources:
        table.add_row(*_source_row(source, source.group))
    if summary.korthikanti is not None:
        table.add_section()
        table.add_row("Korthikanti et al., table 5", "", "", "", "", *_figures(summary.korthikanti))
    return table


def _source_row(source: Source, name: str) -> tuple[str, ...]:
    timed = source.timed
    return (
        printable(name),
        f"{source.num_runs:,}",
        f"{source.num_simulated:,}",
        f"{timed.num_runs:,}" if timed else "0",
        _signed(timed.mean_error if timed else None),
        *_figures(source.scored),
    )


def _generations(summary: Summary) -> Table:
    table = _table("generation", "models", "sources", "runs", "mean", "abs", "median", "worst", left=2)
    for name, parts in summary.by_generation.items():
        for part, errors in parts.items():
            if errors is not None:
                table.add_row(printable(name), part, f"{errors.num_sources}", *_figures(errors))
    return table


def _memory_table(summary: Summary) -> Table:
    table = _table("source", "runs", "mean", "abs", "median", "worst")
    for kind, errors in summary.memory.items():
        if errors is not None:
            table.add_row(f"all, {kind}", *_figures(errors))
    for group, errors in summary.memory_by_source.items():
        table.add_row(printable(group), *_figures(errors))
    return table


def _fit_table(summary: Summary) -> Table:
    table = _table("source", "ran", "predicted", "out of memory", "predicted", "accuracy", "precision", "recall")
    if summary.fit is not None:
        table.add_row("all", *_fit_row(summary.fit))
    for group, fit in summary.fit_by_source.items():
        if fit.num_oom:
            table.add_row(printable(group), *_fit_row(fit))
    return table


def _fit_row(fit: Fit) -> tuple[str, ...]:
    return (
        f"{fit.num_ok:,}",
        f"{fit.ok_predicted:,}",
        f"{fit.num_oom:,}",
        f"{fit.oom_predicted:,}",
        _bare(fit.accuracy),
        _share(fit.precision),
        _share(fit.recall),
    )


def _sweep_table(all_sweeps: Sequence[Sweep]) -> Table:
    """Show the means and the sweeps with most runs."""
    table = _table("sweep", "ran", "oom", "tau", "regret", "pick", "failed", "rule", "random")
    if len(all_sweeps) > 1:
        table.add_row(*_mean_row(all_sweeps))
        table.add_section()
    for sweep in sorted(all_sweeps, key=lambda sweep: -sweep.num_ok)[:MAX_ROWS]:
        table.add_row(
            printable(sweep.id),
            f"{sweep.num_ok}",
            f"{sweep.num_oom}",
            "-" if sweep.kendall_tau is None else f"{sweep.kendall_tau:.2f}",
            _bare(sweep.regret),
            _share(sweep.pick_regret),
            f"{sweep.failed_trials}",
            _bare(sweep.rule_regret),
            _bare(sweep.random_regret),
        )
    left = len(all_sweeps) - MAX_ROWS
    if left > 0:
        table.add_row(f"and {left} smaller sweeps", *("",) * 8)
    return table


def _mean_row(all_sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    taus = [sweep.kendall_tau for sweep in all_sweeps if sweep.kendall_tau is not None]
    picks = [sweep.pick_regret for sweep in all_sweeps if sweep.pick_regret is not None]
    return (
        f"mean of {len(all_sweeps)} (largest regret {percent_text(max(sweep.regret for sweep in all_sweeps))})",
        f"{sum(sweep.num_ok for sweep in all_sweeps)}",
        f"{sum(sweep.num_oom for sweep in all_sweeps)}",
        f"{fmean(taus):.2f}" if taus else "-",
        _bare(fmean(sweep.regret for sweep in all_sweeps)),
        _share(fmean(picks) if picks else None),
        f"{sum(sweep.failed_trials for sweep in all_sweeps)}",
        _bare(fmean(sweep.rule_regret for sweep in all_sweeps)),
        _bare(fmean(sweep.random_regret for sweep in all_sweeps)),
    )


def _contradiction_table(summary: Summary, each: bool) -> Table:
    table = _table("records", "contradiction", wrapped=(0, 1))
    shown = summary.contradictions if each else summary.contradictions[:MAX_ROWS]
    for contradiction in shown:
        table.add_row(printable(", ".join(contradiction.ids)), printable(contradiction.reason))
    left = len(summary.contradictions) - len(shown)
    if left > 0:
        table.add_row(f"and {left} more", "")
    return table


def _line_table(summary: Summary) -> Table:
    table = _table("source", "varies", "families", "runs", "slope", "of step", "start", "of step", left=2)
    for line in summary.family_errors:
        table.add_row(
            printable(line.group),
            _VARIES[line.varies],
            f"{line.num_families}",
            f"{line.num_runs}",
            _share(line.slope_error),
            _bare(line.slope_of_step),
            _share(line.intercept_error),
            _bare(line.intercept_of_step),
        )
    return table


def _family_table(summary: Summary) -> Table:
    table = _table("source", "varies", "runs", "slope", "error", "of step", "start", "error", "of step", left=2)
    for family in sorted(summary.families, key=lambda family: -len(family.ids))[:MAX_ROWS]:
        table.add_row(*_family_row(family))
    left = len(summary.families) - MAX_ROWS
    if left > 0:
        table.add_row(f"and {left} smaller families", *("",) * 8)
    return table


def _family_row(family: Family) -> tuple[str, ...]:
    return (
        printable(family.group),
        f"{_VARIES[family.varies]} {family.values[0]:,.0f} to {family.values[-1]:,.0f}",
        f"{len(family.ids)}",
        seconds_text(family.measured.slope_s),
        _line_error(family.slope_error_fraction),
        _signed(family.slope_error_of_step),
        seconds_text(family.measured.intercept_s),
        _line_error(family.intercept_error_fraction),
        _signed(family.intercept_error_of_step),
    )


def _line_error(fraction: float | None) -> str:
    """Write an error relative to a value that may be near zero."""
    return "-" if fraction is None else ">999" if fraction > MAX_SHOWN_ERROR else _signed(fraction)


def _unstated_table(validation: Validation, each: bool) -> Table:
    """Show reasons with their runs, all by name if ``each`` or if there are few."""
    table = _table("source", "reason", "runs", "which", wrapped=(0, 1, 3))
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for unstated in validation.unstated:
        reasons[unstated.run.group, unstated.reason].append(unstated.run.id)
    num_named = len(validation.unstated) if each else MAX_NAMED
    for (group, reason), ids in sorted(reasons.items()):
        rest = f" and {len(ids) - num_named} more" if len(ids) > num_named else ""
        table.add_row(
            printable(group), printable(reason), f"{len(ids)}", printable(", ".join(ids[:num_named]) + rest)
        )
    return table


MAX_RUNS_SHOWN: Final = 40
"""Maximum number of runs in the table; of more only the worst run of each source is shown, unless all are
requested."""
_COLUMNS: Final = ("run", "measured", "as", "predicted", "error", "peak", "predicted", "error", "fits", "assumed")
_AS: Final = {
    "step time": "time",
    "model FLOP/s": "FLOP/s",
    "hardware FLOP/s": "hw FLOP/s",
    "model FLOPs utilisation": "MFU",
    "hardware FLOPs utilisation": "HFU",
}


def run_parts(validation: Validation, each: bool) -> list[RenderableType]:
    """Show the runs, their assumptions, and the runs that were not simulated; every run if ``each`` or if there
    are few."""
    runs = validation.comparisons
    shown = list(runs) if each or len(runs) <= MAX_RUNS_SHOWN else _furthest(runs)
    parts: list[RenderableType] = []
    if shown:
        numbers = _numbers(shown)
        title = (
            "Runs (as: what the source printed; peaks in GiB, errors in per cent; fits: predicted, and what "
            "happened where it is no or the run was out of memory; assumed: numbers of the lines below)"
        )
        parts += [Text(title, style="bold"), _runs_table(shown, numbers)]
        left = len(runs) - len(shown)
        if left:
            parts.append(
                Text(f"These are the furthest off of each source; {left:,} more with --each and in --json.\n")
            )
        parts += [Text("Assumed, where the source does not say", style="bold"), _assumed_table(shown, numbers)]
    return parts


def _furthest(runs: Iterable[Comparison]) -> list[Comparison]:
    """Select the run of each source with the largest error of step time, or else of memory; scored runs first."""

    def off(comparison: Comparison) -> tuple[bool, bool, float]:
        error = comparison.error_fraction
        other = comparison.memory_error_fraction or 0.0
        return (comparison.scored, error is not None, abs(other if error is None else error))

    best: dict[str, Comparison] = {}
    for comparison in runs:
        if comparison.run.group not in best or off(comparison) > off(best[comparison.run.group]):
            best[comparison.run.group] = comparison
    return [best[group] for group in sorted(best)][:MAX_RUNS_SHOWN]


def _numbers(runs: Iterable[Comparison]) -> dict[str, int]:
    """Number the assumptions, the most frequent first."""
    counts = Counter(text for comparison in runs for text in comparison.assumptions)
    return {text: number for number, (text, _) in enumerate(counts.most_common(), start=1)}


def _runs_table(runs: Iterable[Comparison], numbers: dict[str, int]) -> Table:
    table = _table(*_COLUMNS, wrapped=(0, 9))
    for comparison in runs:
        table.add_row(*_row(comparison), _ranges([numbers[text] for text in comparison.assumptions]))
    return table


def _row(comparison: Comparison) -> tuple[str, ...]:
    step, memory, status = comparison.step, comparison.memory, comparison.run.measured.status
    step_error, memory_error = comparison.error_fraction, comparison.memory_error_fraction
    return (
        printable(comparison.run.id),
        "-" if step is None else seconds_text(step.step_time_s),
        "-" if step is None else _AS.get(words := step.how.split(",")[0], words),
        seconds_text(comparison.report.step_time_s),
        _error(step_error),
        "-" if memory is None else _gib(memory.peak_bytes),
        _gib(comparison.predicted_memory_bytes),
        _error(memory_error),
        {(True, "oom"): "yes (oom)", (False, "oom"): "no (oom)", (False, "ok"): "no (ran)"}.get(
            (comparison.report.fits, status), "yes" if comparison.report.fits else "no"
        ),
    )


def _gib(num_bytes: float) -> str:
    return gib_text(num_bytes).removesuffix(" GiB")


def _error(fraction: float | None) -> str:
    return "-" if fraction is None else signed_percent_text(fraction).removesuffix(" %")


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers in order, with runs of three or more as ``4-7``."""
    parts: list[str] = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        row = [number for _, number in group]
        parts += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else [str(number) for number in row]
    return ", ".join(parts)


def _assumed_table(runs: Iterable[Comparison], numbers: dict[str, int]) -> Table:
    counts = Counter(text for comparison in runs for text in comparison.assumptions)
    table = _table("", "assumption", "runs", left=0, wrapped=(1,))
    for text, number in numbers.items():
        table.add_row(f"{number}", printable(text), f"{counts[text]:,}")
    return table


SCHEMA_VERSION: Final = 1
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
_OF_FAMILIES: Final = (
    "slope_error_fraction",
    "slope_error_of_step",
    "intercept_error_fraction",
    "intercept_error_of_step",
)


def document_text(validation: Validation, summary: Summary, covered: Mapping[str, float] = NOTHING) -> str:
    """Write the document as text with a final newline; ``covered`` as for ``document``."""
    return json.dumps(document(validation, summary, covered), indent=1, allow_nan=False) + "\n"


def document(validation: Validation, summary: Summary, covered: Mapping[str, float] = NOTHING) -> dict[str, Any]:
    """Make the document of every run, compared or not, and of the accuracy figures.

    Args:
        validation: The compared runs.
        summary: Their accuracy figures.
        covered: Share of a sample of the scored runs within one sigma of their prediction, by source.
    """
    runs = [_compared(comparison) for comparison in validation.comparisons] + [
        _unstated(unstated) for unstated in validation.unstated
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "milpplan_version": __version__,
        "runs": runs,
        "rejected": list(validation.rejected),
        "summary": summary_document(summary) | {"within_one_sigma_by_source": dict(covered)},
    }


def summary_document(summary: Summary) -> dict[str, Any]:
    """Make the document of the accuracy figures. The three plain ones are over the sources of scored dense
    runs."""
    dense = summary.dense
    return {
        "mean_abs_error": dense.mean_abs_error if dense else None,
        "median_abs_error": dense.median_abs_error if dense else None,
        "max_abs_error": dense.max_abs_error if dense else None,
        "dense": _plain(dense),
        "moe": _plain(summary.moe),
        "korthikanti_table_5": _plain(summary.korthikanti),
        "by_source": {source.group: _source(source) for source in summary.sources},
        "by_generation": {
            name: {part: _plain(errors) for part, errors in parts.items()}
            for name, parts in summary.by_generation.items()
        },
        "oom_accuracy": summary.fit.accuracy if summary.fit else None,
        "oom": _fit(summary.fit),
        "oom_by_source": {group: _fit(fit) for group, fit in summary.fit_by_source.items()},
        "memory": {kind: _plain(errors) for kind, errors in summary.memory.items()},
        "memory_by_source": {group: _plain(errors) for group, errors in summary.memory_by_source.items()},
        "sweeps": [asdict(sweep) for sweep in summary.sweeps],
        "sweeps_across": [asdict(sweep) for sweep in summary.sweeps_across],
        "contradictions": [asdict(contradiction) for contradiction in summary.contradictions],
        "families": [_family(family) for family in summary.families],
        "family_errors": [asdict(errors) for errors in summary.family_errors],
    }


def _source(source: Source) -> dict[str, Any]:
    return {
        "num_runs": source.num_runs,
        "num_simulated": source.num_simulated,
        "timed": _plain(source.timed),
        "scored": _plain(source.scored),
    }


def _fit(fit: Fit | None) -> dict[str, Any] | None:
    if fit is None:
        return None
    return asdict(fit) | {"accuracy": fit.accuracy, "precision": fit.precision, "recall": fit.recall}


def _family(family: Family) -> dict[str, Any]:
    return asdict(family) | {name: getattr(family, name) for name in _OF_FAMILIES}


def _plain(errors: Errors | GroupedErrors | None) -> dict[str, Any] | None:
    return None if errors is None else asdict(errors)


def _named(run: Run) -> dict[str, Any]:
    names = {"id": run.id, "group": run.group, "sweep_id": run.sweep_id, "grade": run.grade}
    return {**names, "flags": list(run.flags), "model": run.model.name}


def _compared(comparison: Comparison) -> dict[str, Any]:
    run, report, memory = comparison.run, comparison.report, comparison.memory
    layout = comparison.statement.plan.layout
    return {
        **_named(run),
        "hardware": comparison.statement.problem.hardware.name,
        "layout": layout.model_dump(mode="json"),
        "scored": comparison.scored,
        "moe": comparison.has_experts,
        "measured": {
            "status": run.measured.status,
            "step_time_s": comparison.step.step_time_s if comparison.step else None,
            "from": comparison.step.how if comparison.step else None,
            "peak_memory_bytes": memory.peak_bytes if memory else None,
            "memory_kind": memory.kind if memory else None,
            "memory_stage": memory.stage if memory else None,
            **comparison.measured_rates,
        },
        "predicted": {
            "step_time_s": report.step_time_s,
            "peak_memory_bytes": comparison.predicted_memory_bytes,
            "fits": report.fits,
            "mfu": report.mfu,
            "breakdown_s": report.breakdown_s,
            **comparison.predicted_rates,
        },
        "error_fraction": comparison.error_fraction,
        "memory_error_fraction": comparison.memory_error_fraction,
        "memory": [
            {
                "kind": measure.kind,
                "stage": measure.stage,
                "measured_bytes": measure.peak_bytes,
                "predicted_bytes": comparison.predicted_peak(measure),
                "error_fraction": comparison.memory_error(measure),
            }
            for measure in comparison.memories
        ],
        "assumptions": list(comparison.assumptions),
        "not_simulated": None,
    }


def _unstated(unstated: Unstated) -> dict[str, Any]:
    run = unstated.run
    return {
        **_named(run),
        "scored": False,
        "measured": {"status": run.measured.status, "step_time_s": run.measured.step_time_s},
        "predicted": None,
        "error_fraction": None,
        "memory_error_fraction": None,
        "assumptions": [],
        "not_simulated": unstated.reason,
    }
