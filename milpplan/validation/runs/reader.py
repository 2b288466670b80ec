"""Reader of files of measured runs. A wrong record is reported and left out; the others are kept."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, TypeGuard

from pydantic import BaseModel

from milpplan.errors import InvalidInputError
from milpplan.problem import read_bytes, validated
from milpplan.problem.reading import shown, whole_or_float
from milpplan.units import GIB, GIGA, MIB
from milpplan.validation.runs.records import Cluster, Measured, ModelDims, Parallel, Run

Section = dict[str, Any]
WORDS: Final[dict[tuple[str, str], dict[object, object]]] = {
    ("measured", "status"): {
        "success": "ok",
        "completed": "ok",
        "done": "ok",
        "out of memory": "oom",
        "out_of_memory": "oom",
        "failed": "error",
    },
    ("parallel", "recompute"): {
        True: "full",
        False: "none",
        "no": "none",
        "off": "none",
        "uniform": "full",
        "on": "full",
    },
    ("", "kind"): {
        "pretraining": "pretrain",
        "pre-training": "pretrain",
        "pre-train": "pretrain",
        "training": "pretrain",
    },
    ("parallel", "precision"): {
        "bfloat16": "bf16",
        "bf16-mixed": "bf16",
        "bf16 mixed": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "16-mixed": "fp16",
        "fp16-mixed": "fp16",
        "e4m3": "fp8",
        "fp8_hybrid": "fp8",
    },
}
"""Section and field, with words for its values."""
LOWER: Final = (("measured", "status"), ("parallel", "recompute"), ("", "kind"))
"""Fields whose words are in lower case."""
MAX_UTILISATION: Final = 1.5
"""Maximum utilisation as a share of the peak; above it, up to 100, it is in per cent."""
MAX_NUMBER: Final = 1e30
MS: Final = 1e-3
PER_CENT: Final = 1e-2


def respelled(data: object) -> tuple[object, list[str]]:
    """Return a record in the format's own words, and a list of changes in words. The given record is not
    changed."""
    if not isinstance(data, dict):
        return data, []
    record = {name: dict(part) if isinstance(part, dict) else part for name, part in data.items()}
    notes: list[str] = []
    _defaults(record, notes)
    for (section, field), words in WORDS.items():
        _word(record if not section else record.get(section), field, words, (section, field) in LOWER, notes)
    measured, parallel = record.get("measured"), record.get("parallel")
    if isinstance(measured, dict):
        _rates(record, measured, notes)
    if isinstance(parallel, dict):
        _tokens_of_batch(record, parallel, notes)
    return record, notes


def _defaults(record: Section, notes: list[str]) -> None:
    """Set a default grade and source, and the status of a run that was timed."""
    if "grade" not in record:
        record["grade"] = "C"
        notes.append("grade C (not given)")
    elif record["grade"] in ("a", "b", "c"):
        record["grade"] = record["grade"].upper()
    if "group" not in record and isinstance(record.get("id"), str):
        record["group"] = "unnamed"
        notes.append("source 'unnamed' (group not given)")
    measured = record.get("measured")
    if isinstance(measured, dict) and "status" not in measured and any(map(_number, measured.values())):
        measured["status"] = "ok"
        notes.append("status ok (not given, but something was measured)")


def _word(section: object, field: str, words: dict[object, object], lower: bool, notes: list[str]) -> None:
    if not isinstance(section, dict) or not isinstance(section.get(field), str | bool):
        return
    given = section[field]
    small = given.strip().lower() if isinstance(given, str) else given
    section[field] = words.get(small, small if lower else given)
    if section[field] != given:
        notes.append(f"{field} {given!r} read as {section[field]}")


def _rates(record: Section, measured: Section, notes: list[str]) -> None:
    """Convert times, rates and sizes in other units, where the format's own are missing."""
    for name in ("mfu", "hfu"):
        value = measured.get(name)
        if _number(value) and MAX_UTILISATION < value <= 100:
            measured[name] = value * PER_CENT
            notes.append(f"{name} of {value:g} read as per cent")
    gpus, batch = (_of(record, *path) for path in (("hardware", "gpus_total"), ("parallel", "global_batch")))
    others: list[tuple[str, str, Callable[[float], float] | None]] = [
        ("step_time_ms", "step_time_s", lambda value: value * MS),
        ("iterations_per_s", "step_time_s", lambda value: 1 / value),
        ("samples_per_s", "step_time_s", None if batch is None else lambda value: batch / value),
        ("tokens_per_s", "tokens_per_s_per_gpu", None if gpus is None else lambda value: value / gpus),
        ("tflops_total", "tflops_per_gpu", None if gpus is None else lambda value: value / gpus),
        ("pflops_total", "tflops_per_gpu", None if gpus is None else lambda value: value / MS / gpus),
        ("peak_mem_GB", "peak_mem_GiB", lambda value: value * GIGA / GIB),
    ]
    for name, ours, change in others:
        value = measured.get(name)
        if change is None or not _number(value) or value <= 0 or measured.get(ours) is not None:
            continue
        measured[ours] = change(value)
        del measured[name]
        notes.append(f"{name} of {value:g} read as {ours} of {measured[ours]:.6g}")


def _tokens_of_batch(record: Section, parallel: Section, notes: list[str]) -> None:
    """Convert a batch in tokens to sequences, where the numbers divide."""
    tokens, length = parallel.get("global_batch_tokens"), _of(record, "model", "seq_len")
    if parallel.get("global_batch") is None and _number(tokens) and length is not None and tokens % length == 0:
        parallel["global_batch"] = int(tokens // length)
        del parallel["global_batch_tokens"]
        notes.append(f"batch of {tokens:,} tokens read as {parallel['global_batch']:,} sequences")


def _of(record: Section, section: str, field: str) -> float | None:
    """Return a positive number of a section, or None."""
    part = record.get(section)
    value = part.get(field) if isinstance(part, dict) else None
    return value if _number(value) and value > 0 else None


def _number(value: object) -> TypeGuard[float]:
    """Test for a number that can be computed with: no NaN, and no number of thousands of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER


MAX_FILE_BYTES: Final = 64 * MIB
MAX_TEXT_BYTES: Final = 256 * MIB
"""Maximum size of a file, and of the contents of a compressed file."""
MAX_RUNS: Final = 200_000

_GZIP_MAGIC = b"\x1f\x8b"
_CHECKOUT = Path(__file__).resolve().parents[3]
_MAX_DIGITS: Final = 300
"""Digits beyond which an integer is read as infinity, so that only its record is refused."""
_DECODER: Final = json.JSONDecoder(
    parse_float=whole_or_float, parse_int=lambda text: (int if len(text) <= _MAX_DIGITS else float)(text)
)
_HALF: Final = re.compile("[\ud800-\udfff]")
_BETWEEN: Final = re.compile(r"[ \t\r\n,]*")
_START: Final = re.compile(r'\s*(?:\{\s*"runs"\s*:\s*)?\[')
_EXPECTED = "Expected runs as JSON."
_DO = "Give a JSON file of runs, or one record a line, plain or gzipped, as described in docs/accuracy.md."
_SECTIONS: dict[str, type[BaseModel]] = {
    "": Run,
    "model": ModelDims,
    "hardware": Cluster,
    "parallel": Parallel,
    "measured": Measured,
}


@dataclass(frozen=True, slots=True)
class RunFile:
    """Records of one or more files.

    ``told`` maps the id of a run to the values that were ignored in its record or read as something else;
    ``rejected`` are the records that could not be read, each with its reason.
    """

    runs: tuple[Run, ...]
    told: dict[str, tuple[str, ...]]
    rejected: tuple[InvalidInputError, ...]


def read_runs(path: Path | None) -> RunFile:
    """Read the runs of a file, or by default the published runs that ship with milpplan.

    Raises:
        InvalidInputError: the file cannot be read, is not JSON, or has no list of records.
    """
    files = [(path, str(path))] if path is not None else [(entry, entry.name) for entry in shipped_files()]
    runs: dict[str, Run] = {}
    notes: dict[str, tuple[str, ...]] = {}
    rejected: list[InvalidInputError] = []
    for file, name in files:
        for source, given in _records(_text(file, name), name):
            try:
                if isinstance(given, InvalidInputError):
                    raise given
                data, read_as = respelled(given)
                _refuse_halves(data, source)
                run = validated(Run, data, source)
                _refuse_second(run, runs, source)
            except InvalidInputError as error:
                rejected.append(InvalidInputError(error.seen, error.expected, "Correct or remove the record."))
                continue
            runs[run.id] = run
            ignored = [f"field {field} of the record is not known and was ignored" for field in _unknown(data)]
            if read_as or ignored:
                notes[run.id] = (*read_as, *ignored)
    if not runs and not rejected:
        raise InvalidInputError(f"{files[0][1]} holds no record.", "Expected one at least.", _DO)
    return RunFile(tuple(runs.values()), notes, tuple(rejected))


def shipped_files() -> tuple[Traversable, ...]:
    """Locate the published runs: inside the installed package, else at the root of the source checkout."""
    packaged: Traversable = resources.files("milpplan") / "presets" / "runs"
    directory = packaged if packaged.is_dir() else _CHECKOUT / "runs"
    files = [entry for entry in directory.iterdir() if entry.name.endswith((".json", ".json.gz"))]
    return tuple(sorted(files, key=lambda entry: entry.name))


def _refuse_second(run: Run, runs: dict[str, Run], source: str) -> None:
    if run.id in runs:
        raise InvalidInputError(
            f"{source}: id {shown(run.id)} appears a second time.", "Expected ids to be unique."
        )


def _refuse_halves(data: object, source: str, field: str = "") -> None:
    """Refuse halves of a character (UTF-16 surrogates), which are not text, and name the field."""
    if isinstance(data, str) and _HALF.search(data):
        raise InvalidInputError(f"{source}: {field}: half a character (got {shown(data)}).", "Expected text.")
    if isinstance(data, dict):
        for key, value in data.items():
            _refuse_halves(key, source, f"a name in {field}" if field else "a name")
            _refuse_halves(value, source, f"{field}.{key}".lstrip("."))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _refuse_halves(value, source, f"{field}[{index}]")


def is_packed(data: bytes) -> bool:
    """Test whether bytes are those of a gzipped file."""
    return data.startswith(_GZIP_MAGIC)


def _text(file: Path | Traversable, name: str) -> str:
    """Read a plain or gzipped file, with its size checked before and while it unpacks."""
    data = read_bytes(file, _EXPECTED, _DO, MAX_FILE_BYTES) if isinstance(file, Path) else file.read_bytes()
    try:
        if is_packed(data):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
                data = unpacked.read(MAX_TEXT_BYTES + 1)
            if len(data) > MAX_TEXT_BYTES:
                raise InvalidInputError(
                    f"{name} unpacks to more than {MAX_TEXT_BYTES:,} bytes.", _EXPECTED, "Split the file."
                )
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidInputError(f"{name} cannot be read: {reason}.", _EXPECTED, _DO) from error


def _records(text: str, name: str) -> Iterator[tuple[str, object]]:
    """Iterate over the records of a text with their names for messages; a broken line yields an error."""
    data = _parsed(text, name)
    if len(data) > MAX_RUNS:
        raise InvalidInputError(f"{name} holds {len(data):,} records.", f"Expected at most {MAX_RUNS:,}.", _DO)
    for index, record in enumerate(data):
        label = record.get("id") if isinstance(record, dict) else None
        yield f"{name}, record {index} ({shown(label) if label is not None else 'no id'})", record


def _parsed(text: str, name: str) -> list[Any]:
    """Parse the records of a list, of a list under ``runs``, of a single record, or of JSON lines."""
    try:
        data = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        whole = _before_the_fault(text)
        if whole:
            return [*whole, _no_json(f"{name} after record {len(whole) - 1}, where reading stopped,", error)]
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") for _, line in lines[:2]):
            return [_line(line, f"{name}, line {number}") for number, line in lines]
        raise _no_json(name, error) from error
    if isinstance(data, dict):
        data = data["runs"] if isinstance(data.get("runs"), list) else [data] if "measured" in data else data
    if not isinstance(data, list):
        raise InvalidInputError(f"{name} holds {shown(data)}.", "Expected a list of records at its top.", _DO)
    return data


def _line(text: str, source: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return _no_json(source, error)


def _before_the_fault(text: str) -> list[Any]:
    """Parse the complete records of a list that breaks off or has an error further on; empty without any."""
    start = _START.match(text)
    records: list[Any] = []
    try:
        at = start.end() if start else len(text)
        while True:
            between = _BETWEEN.match(text, at)
            record, at = _DECODER.raw_decode(text, between.end() if between else at)
            records.append(record)
    except (ValueError, RecursionError):
        return records if any(isinstance(record, dict) for record in records) else []


def _no_json(source: str, error: Exception) -> InvalidInputError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InvalidInputError(f"{source} is not valid JSON: {reason}.", "Expected JSON.", _DO)


def _unknown(data: Any) -> Iterator[str]:
    for section, record in _SECTIONS.items():
        part = data[section] if section else data
        yield from (f"{section}.{name}".lstrip(".") for name in part if name not in record.model_fields)
