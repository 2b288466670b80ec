"""Calibration as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from milpplan.calibration.fitting import Fit
from milpplan.calibration.fitting.records import Constant
from milpplan.calibration.sources import Calibration
from milpplan.problem import FACTORS
from milpplan.problem.overlay import CONGESTION, SWITCHES, TIMES
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.units import percent_text, printable, seconds_text
from milpplan.version import __version__

MAX_TOLD = 12


def calibration_blocks(calibration: Calibration) -> list[Block]:
    """Show constants, errors, and the parts that were left out."""
    overlay, fit = calibration.overlay, calibration.fit
    title = f"{printable(overlay.name)} on {printable(overlay.base)}: {printable(overlay.provenance.data)}"
    found = _tables(calibration) if fit is None else [constants_table(fit), *errors_blocks(fit)]
    return [Paragraph(title, "bold"), Paragraph(), *found, *note_blocks(calibration.told, MAX_TOLD)]


def note_blocks(notes: Sequence[str], max_notes: int) -> list[Block]:
    """Show at most ``max_notes`` notes, a line each, and the number of the others."""
    lines = [Paragraph(f"- {printable(text)}") for text in notes[:max_notes]]
    more = len(notes) - max_notes
    return [*lines, Paragraph(f"- and {more} more")] if more > 0 else [*lines]


def constants_table(fit: Fit) -> Table:
    """Show every constant with its uncertainty."""
    rows = []
    for constant in fit.constants:
        identified = "yes" if constant.identified else "not identified by these runs, kept"
        note = f"{identified}{': ' if constant.note else ''}{constant.note}"
        rows.append((constant.name, _value(constant), _sigma(constant), note))
    return Table("", ("constant", "value", "one sigma", "identified"), rows, words=(0, -1))


def _value(constant: Constant) -> str:
    if constant.name in SWITCHES:
        return "yes" if constant.value else "no"
    if constant.name == CONGESTION:
        return f"{constant.value:.2e} s a byte"
    return seconds_text(constant.value) if constant.name in TIMES else f"{constant.value:.3f}"


def _sigma(constant: Constant) -> str:
    if constant.one_sigma is None or not constant.identified:
        return "-"
    if constant.name == CONGESTION:
        return f"{constant.one_sigma:.2f} of its logarithm"
    return seconds_text(constant.one_sigma) if constant.name in TIMES else f"{constant.one_sigma:.3f}"


def errors_blocks(fit: Fit, what: str = "steps", parts: str = "runs") -> list[Block]:
    """Show errors before, after and of left-out parts."""
    text = (
        f"mean absolute error of {len(fit.ids)} {what}: {percent_text(fit.error_before)} before, "
        f"{percent_text(fit.error_after)} after"
    )
    left_out = fit.error_left_out
    if left_out is None:
        text += "; with a single part nothing could be left out, so nothing shows whether it over-fits"
    else:
        text += f", {percent_text(left_out)} of {parts} left out ({fit.num_folds} parts in turn)"
    lines: list[Block] = [
        Paragraph(text),
        Paragraph(f"scatter that no constant explains: {percent_text(fit.residual_fraction)} (one sigma)"),
    ]
    if fit.outliers:
        names = ", ".join(printable(name) for name in fit.outliers[:4])
        rest = f" and {len(fit.outliers) - 4} more" if len(fit.outliers) > 4 else ""
        lines.append(Paragraph(f"outliers that hardly count: {names}{rest}"))
    return lines


def _tables(calibration: Calibration) -> list[Block]:
    overlay = calibration.overlay
    names = [name for name in type(overlay.tables).model_fields if getattr(overlay.tables, name) is not None]
    lines: list[Block] = [
        Paragraph(f"tables: {', '.join(names) or 'none'} ({overlay.provenance.num_measurements:,} measurements)")
    ]
    for name in FACTORS:
        factor = getattr(overlay.constants, name)
        if factor is not None:
            lines.append(Paragraph(f"{name} {factor.value:.3f}, one sigma {factor.one_sigma:.3f}"))
    before, after = overlay.provenance.error_before, overlay.provenance.error_after
    if before is not None:
        text = f"mean absolute error of the description's table: {percent_text(before)}"
        lines.append(Paragraph(text + ("" if after is None else f"; of the new one: {percent_text(after)}")))
    return lines


def document_text(calibration: Calibration) -> str:
    """Write the JSON document, with a final newline."""
    fit = calibration.fit
    document: dict[str, Any] = {
        "schema_version": 1,
        "milpplan_version": __version__,
        "kind": calibration.kind,
        "overlay": calibration.overlay.model_dump(mode="json"),
        "told": list(calibration.told),
        "fit": None if fit is None else fit_document(fit),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def fit_document(fit: Fit) -> dict[str, Any]:
    """Make the JSON object of a fit."""
    rows = zip(fit.ids, fit.measured_s, fit.before_s, fit.after_s, fit.left_out_s, strict=True)
    return {
        "constants": [
            {
                "name": constant.name,
                "value": bool(constant.value) if constant.name in SWITCHES else constant.value,
                "one_sigma": constant.one_sigma,
                "identified": constant.identified,
                "prior": bool(constant.prior) if constant.name in SWITCHES else constant.prior,
                "note": constant.note,
            }
            for constant in fit.constants
        ],
        "error_before": fit.error_before,
        "error_after": fit.error_after,
        "error_left_out": fit.error_left_out,
        "num_folds": fit.num_folds,
        "scatter": fit.scatter,
        "residual_fraction": fit.residual_fraction,
        "outliers": list(fit.outliers),
        "runs": [
            {
                "id": name,
                "measured_s": float(measured),
                "before_s": float(before),
                "after_s": float(after),
                "left_out_s": None if math.isnan(left_out) else float(left_out),
            }
            for name, measured, before, after, left_out in rows
        ],
    }
