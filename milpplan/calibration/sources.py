"""Calibration from a file of measurements of any kind to an overlay, and overlays as TOML files."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import numpy as np

from milpplan.calibration.bus_tables import BusFit, fit_bus, is_nccl_log, parse_nccl
from milpplan.calibration.efficiency_tables import GemmFit, fit_gemm, is_gemm_csv, parse_gemm
from milpplan.calibration.event_files import event_steps, is_event_file
from milpplan.calibration.fitting import Fit
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.fitting.least_squares import MAD_TO_SIGMA
from milpplan.calibration.measured import Observation, observations
from milpplan.calibration.profiler_traces import MAX_FILE_BYTES as MAX_TRACE_BYTES
from milpplan.calibration.profiler_traces import is_trace, read_trace, unpacked
from milpplan.calibration.training_logs import LoggedSteps, logged_steps, program_of
from milpplan.errors import InvalidInputError
from milpplan.problem import (
    Constants,
    HardwareSpec,
    Overlay,
    Plan,
    Problem,
    Provenance,
    Tables,
    hardware_names,
    load_hardware,
    read_bytes,
    read_text,
    validated,
)
from milpplan.problem.hardware import MEMORY_MARGIN
from milpplan.problem.overlay import USUAL
from milpplan.problem.problem import MAX_MARGIN
from milpplan.reports import write_whole
from milpplan.simulation import StepReport, simulate
from milpplan.units import counted, gib_text, percent_text, seconds_text
from milpplan.validation.runs import read_runs
from milpplan.validation.runs.reader import is_packed

Kind = Literal["runs", "nccl", "gemm", "logs", "trace"]
SINGLE_CONSTANT: Final = "gemm_efficiency"
"""Constant that is fitted alone where the runs identify none of several: products take most of a step."""
MIN_FOR_SCATTER: Final = 3
"""Minimum number of logs whose peaks show a scatter."""
MAX_RUNS: Final = 2000
"""Maximum number of timed runs of a fit."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Overlay, the kind of its source, notes, and the fit if the source holds runs."""

    kind: Kind
    overlay: Overlay
    hardware: HardwareSpec
    told: tuple[str, ...]
    fit: Fit | None = None


def kind_of(path: Path) -> Kind:
    """Recognise the kind of a file: a profiler's trace, an output of nccl-tests, a CSV of products, or runs.

    Raises:
        InvalidInputError: the file cannot be read, or is of none of these kinds.
    """
    data = read_bytes(path, max_bytes=MAX_TRACE_BYTES)
    if is_trace(unpacked(data)):
        return "trace"
    if is_packed(data):
        return "runs"
    program = "TensorBoard" if is_event_file(path) else None
    text = "" if program else read_text(path)
    if is_nccl_log(text):
        return "nccl"
    if is_gemm_csv(text):
        return "gemm"
    if program := program or program_of(text):
        raise InvalidInputError(
            f"{path} is a training log of {program}: it does not say which layout ran.",
            "Expected the launch script before its log, or measurements of another kind.",
            f"Give both: milpplan calibrate SCRIPT {path.name} --from LAUNCHER ...",
        )
    if text.lstrip()[:1] in ("[", "{"):
        return "runs"
    raise InvalidInputError(
        f"{path} is neither a list of runs nor an output of nccl-tests nor a table of products.",
        "Expected JSON, the table with `# size count type ...`, or a CSV whose first line names m, n and k.",
        "See docs/calibration.md for the formats; a launch script comes with its log and --from.",
    )


def calibrated(
    path: Path,
    hardware: str,
    name: str | None = None,
    out: Path | None = None,
    constants: Sequence[str] = USUAL,
    num_gpus: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Make the overlay of a file of measurements on a hardware description.

    Args:
        path: the file of measurements.
        hardware: name or path of the description.
        name: of the overlay.
        out: path of the overlay, to which a base given as a path is made relative.
        constants: the constants to fit.
        num_gpus: number of ranks of an output of nccl-tests that does not state it.
        progress: called with a description of the present work.

    Raises:
        InvalidInputError: the file or the hardware cannot be read, or has nothing that can be fitted.
    """
    spec = load_hardware(hardware)
    kind = kind_of(path)
    words = checked_words(hardware, out, name or _name(path, hardware))
    if kind == "runs":
        return _of_runs(path, spec, words, constants, progress)
    if kind == "trace":
        return _of_trace(path, spec, words)
    date = datetime.date.today().isoformat()
    if kind == "nccl":
        bus = fit_bus(parse_nccl(read_text(path), str(path), num_gpus), spec)
        provenance = Provenance(
            data=f"nccl-tests, {path.name}",
            date=date,
            method="bus bandwidth from the out-of-place times, medians of repeated sizes",
            num_measurements=bus.num_rows,
            error_before=bus.error_before,
        )
        overlay = Overlay(**words, provenance=provenance, tables=bus.tables, constants=bus.constants)
        usable = bus.constants.scale_up_efficiency is not None or bus.error_before is None
        unknown = () if usable else ("one sigma of the tables: not known, no size was measured twice",)
        return Calibration(kind, overlay, spec, bus.told + unknown)
    table = fit_gemm(parse_gemm(read_text(path), str(path)), spec)
    provenance = Provenance(
        data=f"matrix products, {path.name}",
        date=date,
        method="robust least squares of node corrections; errors are those of the efficiency",
        num_measurements=table.num_rows,
        error_before=table.error_before,
        error_after=table.error_after,
    )
    overlay = Overlay(**words, provenance=provenance, tables=table.tables, constants=table.constants)
    return Calibration(kind, overlay, spec, table.told)


def _of_trace(path: Path, spec: HardwareSpec, words: dict[str, Any]) -> Calibration:
    """Make the overlay of the products and the collectives of a profiler's trace.

    Raises:
        InvalidInputError: no trace, or nothing in it that this hardware can use.
    """
    products, logs, notes = read_trace(path, spec.scale_up.num_gpus)
    attempts: list[Callable[[], GemmFit | BusFit]] = []
    if products:
        attempts.append(lambda: fit_gemm(products, spec))
    if logs:
        attempts.append(lambda: fit_bus(logs, spec))
    fits: list[GemmFit | BusFit] = []
    failed: list[InvalidInputError] = []
    for attempt in attempts:
        try:
            fits.append(attempt())
        except InvalidInputError as error:
            failed.append(error)
    if not fits:
        raise failed[0]
    tables = {name: table for fit in fits for name, table in fit.tables if table is not None}
    constants = {name: constant for fit in fits for name, constant in fit.constants if constant is not None}
    provenance = Provenance(
        data=f"profiler trace, {path.name}",
        date=datetime.date.today().isoformat(),
        method="medians of products by size, shortest collectives by size",
        num_measurements=sum(fit.num_rows for fit in fits),
    )
    overlay = Overlay(**words, provenance=provenance, tables=Tables(**tables), constants=Constants(**constants))
    told = [note for fit in fits for note in fit.told]
    return Calibration("trace", overlay, spec, (*notes, *told, *(error.seen for error in failed)))


def _of_runs(
    path: Path,
    spec: HardwareSpec,
    words: dict[str, Any],
    constants: Sequence[str],
    progress: Callable[[str], None] | None,
) -> Calibration:
    file = read_runs(path)
    selected, left_out = observations(file, spec)
    notes = [str(error) for error in file.rejected] + left_out
    if not selected:
        raise InvalidInputError(
            f"{path} has no run to fit to: {'; '.join(notes[:3]) or 'it is empty'}.",
            "Expected runs that milpplan can simulate, with a measured step time.",
            "See docs/accuracy.md for the format.",
        )
    if len(selected) > MAX_RUNS:
        raise InvalidInputError(
            f"{path} has {len(selected):,} timed runs.", f"Expected at most {MAX_RUNS:,}.", "Split the file."
        )
    return _fitted(
        "runs", selected, f"{len(selected)} runs of {path.name}", spec, words, constants, notes, progress
    )


def _fitted(
    kind: Kind,
    runs: Sequence[Observation],
    data: str,
    spec: HardwareSpec,
    words: dict[str, Any],
    constants: Sequence[str],
    notes: Sequence[str],
    progress: Callable[[str], None] | None,
) -> Calibration:
    """Fit constants, or ``SINGLE_CONSTANT`` alone where the runs identify none of the usual ones."""
    result = fit(runs, None, constants, progress=progress)
    told = list(notes)
    if constants == USUAL and not any(constant.identified for constant in result.constants):
        result = fit(runs, None, (SINGLE_CONSTANT,), progress=progress)
        told.append(_single_note(result))
    date = datetime.date.today().isoformat()
    overlay = result.overlay(words["base"], words["name"], data, date)
    return Calibration(kind, overlay, spec, tuple(told), result)


def _single_note(result: Fit) -> str:
    """Describe the fit of ``SINGLE_CONSTANT`` alone, or why the runs do not identify even this constant."""
    if result.identified:
        return (
            f"these runs tell no constant from the others: {SINGLE_CONSTANT} stands for all; layouts that differ"
            " in degrees and micro-batches identify more"
        )
    ratio = float(np.median(result.measured_s / result.before_s))
    return (
        f"no constant was changed: the measured steps are {ratio:.2f} times the predicted ones, which no plausible"
        f" {SINGLE_CONSTANT} explains. Check that GPUs, precision, recomputation and batch of the run are those"
        " of its description, and that the measurement is of an undisturbed run"
    )


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Launch script as problem and plan, with the log of its run."""

    log: Path
    launcher: str
    problem: Problem
    plan: Plan


def steps_of(run: LoggedRun) -> LoggedSteps:
    """Read the steps of a run from its log or its event file.

    Raises:
        InvalidInputError: the log cannot be read, has no step of its run, or prints other degrees.
    """
    if is_event_file(run.log):
        return event_steps(run.log, run.plan)
    return logged_steps(read_text(run.log), str(run.log), run.problem, run.plan)


def calibrated_from_logs(
    runs: Sequence[LoggedRun],
    hardware: str,
    name: str | None = None,
    out: Path | None = None,
    constants: Sequence[str] = USUAL,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Make the overlay of training runs from their logs.

    Args:
        runs: what was launched, and its logs.
        hardware: name or path of the description that the problems have.
        name: of the overlay.
        out: path of the overlay, to which a base given as a path is made relative.
        constants: the constants to fit.
        progress: called with a description of the present work.

    Raises:
        InvalidInputError: a log cannot be read, or has no step of its script.
    """
    words = checked_words(hardware, out, name or _name(runs[0].log, hardware))
    measured, notes, scatter, peaks = [], [], 0.0, []
    for run in runs:
        steps = steps_of(run)
        report = simulate(run.problem, run.plan)
        notes += _log_notes(steps, run, report)
        if "allocated" in steps.peak_bytes:
            peaks.append(steps.peak_bytes["allocated"] / report.peak_memory_bytes)
        scatter = max(scatter, steps.scatter or 0.0)
        measured.append(Observation(run.log.name, run.launcher, run.problem, run.plan, steps.step_s))
    data = f"{counted(len(runs), 'training log')}: {', '.join(run.log.name for run in runs)}"
    spec = runs[0].problem.hardware
    margin, words_of_memory = peak_margin(peaks, spec)
    notes += words_of_memory
    result = _fitted("logs", measured, data[:4000], spec, words, constants, notes, progress)
    overlay = _with_scatter(result.overlay, scatter)
    return replace(result, overlay=overlay.model_copy(update={"memory_margin_fraction": margin}))


def peak_margin(ratios: Sequence[float], hardware: HardwareSpec) -> tuple[float | None, list[str]]:
    """Find the margin of memory that measured peaks ask for.

    A plan is safe if its predicted peak p times the median ratio f leaves the default margin m of the memory M:
    f p <= usable - m M. As a margin of predicted peaks that is usable / M - (usable / M - m) / f. It is never
    below the description's.

    Args:
        ratios: measured over predicted peaks, one a log.
        hardware: the description, with its own margin.

    Returns:
        The share of the memory to leave, None where the description's suffices or no plan could be safe; notes.
    """
    if not ratios:
        return None, []
    factor = median(ratios)
    usable = hardware.usable_bytes / hardware.accelerator.memory_bytes
    margin = usable - (usable - MEMORY_MARGIN) / factor
    scatter = MAD_TO_SIGMA * median(abs(ratio / factor - 1.0) for ratio in ratios)
    spread = "" if len(ratios) < MIN_FOR_SCATTER else f", scatter {percent_text(scatter)}"
    text = f"allocated peaks are {factor:.2f} times the predicted ones ({counted(len(ratios), 'log')}{spread})"
    if margin <= hardware.memory_margin_fraction:
        kept = percent_text(hardware.memory_margin_fraction)
        return None, [f"{text}: plans leave {kept} of the memory, as in the description"]
    if margin > MAX_MARGIN:
        return None, [f"{text}: too far for a margin; the description's stays. Check that script and log agree"]
    return margin, [
        f"{text}: plans leave {percent_text(margin)} of the memory (--memory-margin takes another share)"
    ]


def _with_scatter(overlay: Overlay, scatter: float) -> Overlay:
    """Raise the unexplained one sigma of an overlay to the scatter between steps of a run."""
    provenance = overlay.provenance
    residual = max(provenance.residual_fraction or 0.0, scatter)
    return overlay.model_copy(update={"provenance": provenance.model_copy(update={"residual_fraction": residual})})


def _log_notes(steps: LoggedSteps, run: LoggedRun, report: StepReport) -> list[str]:
    """Describe what was read of a log, beside the prediction before the fit."""
    name = run.log.name
    warm_up = f", {counted(steps.num_warm_up, 'line')} of warm-up left out" if steps.num_warm_up else ""
    scatter = "" if steps.scatter is None else f", scatter {percent_text(steps.scatter)}"
    notes = [
        f"{name}: {seconds_text(steps.step_s)} a step, the median of {counted(len(steps.steps_s), 'line')} of"
        f" {steps.program}{warm_up}{scatter}; predicted {seconds_text(report.step_time_s)}"
    ]
    if not steps.num_warm_up:
        notes.append(f"{name}: the warm-up is in this step")
    for kind, peak in steps.peak_bytes.items():
        notes.append(
            f"{name}: {gib_text(peak)} {kind} at most on the ranks that it names; predicted"
            f" {gib_text(report.peak_memory_bytes)} allocated on the fullest"
        )
    return notes


def checked_words(hardware: str, out: Path | None, name: str) -> dict[str, Any]:
    """Return ``base`` and ``name`` of an overlay with the path ``out``.

    Raises:
        InvalidInputError: the name is invalid; raised before time is spent on a fit.
    """
    words: dict[str, Any] = {"base": base_name(hardware, out), "name": name}
    empty = Provenance(data="", date="", method="", num_measurements=0)
    validated(Overlay, {**words, "provenance": empty.model_dump()}, "the overlay's name and base")
    return words


def base_name(hardware: str, out: Path | None) -> str:
    """Return a shipped name unchanged, and a path relative to the overlay's directory where that is possible."""
    if hardware in hardware_names():
        return hardware
    path = Path(hardware).resolve()
    if out is not None:
        try:
            return str(path.relative_to(out.resolve().parent))
        except ValueError:
            pass
    return str(path)


def _name(path: Path, hardware: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.split(".")[0]) or "measured"
    return f"{Path(hardware).name.removesuffix('.toml')}-{stem}"[:200]


COMMENT = "# Fitted by `milpplan calibrate` or `profile`; docs/calibration.md describes every field. SI units.\n"


def overlay_text(overlay: Overlay) -> str:
    """Write an overlay as TOML; reading it gives an equal overlay."""
    data = overlay.model_dump(mode="json", exclude_none=True)
    return COMMENT + "\n".join(_lines(data, "")) + "\n"


def write_overlay(path: Path, overlay: Overlay) -> None:
    """Write the file.

    Raises:
        InvalidInputError: it cannot be written; nothing of it remains.
    """
    write_whole(path, overlay_text(overlay))


def _lines(table: dict[str, Any], name: str) -> Iterator[str]:
    """Write values first, then the tables inside, as TOML requires."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if name and len(inner) < len(table):
        yield f"\n[{name}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        yield from _lines(value, f"{name}.{key}" if name else key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"  {_value(row)},\n" for row in value).rstrip("\n") + "\n]"
        return "[" + ", ".join(_value(element) for element in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        clean = value.encode("utf-8", "replace").decode("utf-8")
        return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
