"""Calibration from a file of measurements of any kind to an overlay, and overlays as TOML files."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from milpplan.calibration.bus_tables import fit_bus, is_nccl_log, parse_nccl
from milpplan.calibration.efficiency_tables import fit_gemm, is_gemm_csv, parse_gemm
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.fitting.records import Fit
from milpplan.calibration.measured import observations
from milpplan.errors import InvalidInputError
from milpplan.problem.catalog import hardware_names, load_hardware
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import USUAL, Overlay, Provenance
from milpplan.problem.reading import read_bytes, read_text, validated
from milpplan.reports.files import write_whole
from milpplan.units import counted
from milpplan.validation.runs.reader import MAX_FILE_BYTES, is_packed, read_runs

Kind = Literal["runs", "nccl", "gemm"]
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
    """Recognise the kind of a file: an output of nccl-tests, a CSV of products, or runs.

    Raises:
        InvalidInputError: the file cannot be read, or is of none of these kinds.
    """
    if is_packed(read_bytes(path, max_bytes=MAX_FILE_BYTES)):
        return "runs"
    text = read_text(path)
    if is_nccl_log(text):
        return "nccl"
    if is_gemm_csv(text):
        return "gemm"
    if (steps := megatron_steps_s(text)) is not None:
        raise _training_log(path, *steps)
    if text.lstrip()[:1] in ("[", "{"):
        return "runs"
    raise InvalidInputError(
        f"{path} is neither a list of runs nor an output of nccl-tests nor a table of products.",
        "Expected JSON, the table with `# size count type ...`, or a CSV whose first line names m, n and k.",
        "See docs/calibration.md for the three formats.",
    )


def megatron_steps_s(text: str) -> tuple[list[float], str | None] | None:
    """Read the seconds of the steps in a log of Megatron-LM, and the global batch; None for other texts."""
    steps_ms = _ITERATION.findall(text)
    batch = _BATCH.search(text)
    return ([float(match) / 1e3 for match in steps_ms], None if batch is None else batch[1]) if steps_ms else None


_ITERATION = re.compile(r"\biteration\s+\d+/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*([\d.]+) \|")
_BATCH = re.compile(r"\bglobal batch size:\s*(\d+) \|")


def _training_log(path: Path, steps_s: list[float], batch: str | None) -> InvalidInputError:
    step = f"{statistics.median(steps_s):.6g}"
    size = "" if batch is None else f", global batch {batch}"
    return InvalidInputError(
        f"{path} is a training log of Megatron-LM: {counted(len(steps_s), 'line')} with an iteration time, in the "
        f"median {step} s{size}; what was trained, on how many GPUs and under which degrees it does not say.",
        "Expected runs as JSON, which say that beside the time, an output of nccl-tests, or a CSV of products.",
        "Write a record of the run, "
        '[{"id": "mine", "model": {"name": "llama3-8b"}, "hardware": {...}, "parallel": {"tp": 8, ...}, '
        f'"measured": {{"step_time_s": {step}}}}}], as docs/accuracy.md describes, and calibrate with that.',
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
    result = fit(selected, None, constants, progress=progress)
    date = datetime.date.today().isoformat()
    overlay = result.overlay(words["base"], words["name"], f"{len(selected)} runs of {path.name}", date)
    return Calibration("runs", overlay, spec, tuple(notes), result)


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
