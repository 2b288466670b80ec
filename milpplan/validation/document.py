"""JSON document of ``milpplan validate --json``; SI units, errors as fractions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from milpplan.validation.comparison import Comparison, Unstated, Validation
from milpplan.validation.families import Family
from milpplan.validation.summary import Errors, Fit, GroupedErrors, Source, Summary
from milpplan.version import __version__

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


def _compared(comparison: Comparison) -> dict[str, Any]:
    run, report, memory = comparison.run, comparison.report, comparison.memory
    layout = comparison.statement.plan.layout
    return {
        "id": run.id,
        "group": run.group,
        "sweep_id": run.sweep_id,
        "grade": run.grade,
        "flags": list(run.flags),
        "model": run.model.name,
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
        "id": run.id,
        "group": run.group,
        "sweep_id": run.sweep_id,
        "grade": run.grade,
        "flags": list(run.flags),
        "model": run.model.name,
        "scored": False,
        "measured": {"status": run.measured.status, "step_time_s": run.measured.step_time_s},
        "predicted": None,
        "error_fraction": None,
        "memory_error_fraction": None,
        "assumptions": [],
        "not_simulated": unstated.reason,
    }
