"""Calibration as text and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.calibration.fitting.records import Constant, Fit
from milpplan.calibration.sources import Calibration
from milpplan.problem.overlay import FACTORS, SWITCHES
from milpplan.units import percent_text, printable, seconds_text
from milpplan.version import __version__

MAX_TOLD = 12


def report(calibration: Calibration) -> RenderableType:
    """Show constants, errors, and the parts that were left out."""
    overlay = calibration.overlay
    parts: list[RenderableType] = [
        Text(
            f"{printable(overlay.name)} on {printable(overlay.base)}: {printable(overlay.provenance.data)}", "bold"
        ),
        Text(),
    ]
    if calibration.fit is not None:
        parts += [constants_table(calibration.fit), errors_text(calibration.fit)]
    else:
        parts += _tables(calibration)
    notes = [printable(text) for text in calibration.told]
    parts += [Text(f"- {text}") for text in notes[:MAX_TOLD]]
    if len(notes) > MAX_TOLD:
        parts.append(Text(f"- and {len(notes) - MAX_TOLD} more"))
    return Group(*parts)


def constants_table(fit: Fit) -> Table:
    """Show every constant with its uncertainty."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (
        ("constant", "left"),
        ("value", "right"),
        ("one sigma", "right"),
        ("identified", "left"),
    ):
        table.add_column(Text(column), justify=justify)  # type: ignore[arg-type]
    for constant in fit.constants:
        said = "yes" if constant.identified else "not identified by these runs, kept"
        table.add_row(
            constant.name,
            _value(constant),
            _sigma(constant),
            f"{said}{': ' if constant.note else ''}{constant.note}",
        )
    return table


def _value(constant: Constant) -> str:
    if constant.name in SWITCHES:
        return "yes" if constant.value else "no"
    return f"{constant.value:.3f}" if constant.name in FACTORS else seconds_text(constant.value)


def _sigma(constant: Constant) -> str:
    if constant.one_sigma is None or not constant.identified:
        return "-"
    return f"{constant.one_sigma:.3f}" if constant.name in FACTORS else seconds_text(constant.one_sigma)


def errors_text(fit: Fit, what: str = "steps", parts: str = "runs") -> RenderableType:
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
    lines = [
        Text(text),
        Text(f"scatter that no constant explains: {percent_text(fit.residual_fraction)} (one sigma)"),
    ]
    if fit.outliers:
        names = ", ".join(printable(name) for name in fit.outliers[:4])
        rest = f" and {len(fit.outliers) - 4} more" if len(fit.outliers) > 4 else ""
        lines.append(Text(f"outliers that hardly count: {names}{rest}"))
    return Group(*lines)


def _tables(calibration: Calibration) -> list[RenderableType]:
    overlay = calibration.overlay
    names = [name for name in type(overlay.tables).model_fields if getattr(overlay.tables, name) is not None]
    lines = [Text(f"tables: {', '.join(names) or 'none'} ({overlay.provenance.num_measurements:,} measurements)")]
    for name in FACTORS:
        factor = getattr(overlay.constants, name)
        if factor is not None:
            lines.append(Text(f"{name} {factor.value:.3f}, one sigma {factor.one_sigma:.3f}"))
    before, after = overlay.provenance.error_before, overlay.provenance.error_after
    if before is not None:
        text = f"mean absolute error of the description's table: {percent_text(before)}"
        lines.append(Text(text + ("" if after is None else f"; of the new one: {percent_text(after)}")))
    return list(lines)


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
