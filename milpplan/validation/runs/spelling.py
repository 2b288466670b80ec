"""Translation of other files' names for runs into the format's own fields, with a report of every change.

Only unambiguous names are translated. Text is never read as a number, and a value of a wrong type is kept, so that
the strict records refuse it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard

from milpplan.units import GIB, GIGA

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
