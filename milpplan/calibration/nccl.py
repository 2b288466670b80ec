"""Parser of the output of nccl-tests (or rccl-tests): printed tables of one or more collectives.

Sizes are in bytes, times in microseconds, bandwidths in GB/s (1e9 bytes/s). The out-of-place columns are used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

PASSES: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""bus bandwidth = passes (n - 1) / n * bytes / time. Source: nccl-tests, doc/PERFORMANCE.md."""
REDUCING: Final = frozenset({"all_reduce", "reduce_scatter"})
SAME_FACTOR: Final = 0.02
"""Relative tolerance of the factor between the bandwidths: small ones are printed with only two decimals."""
MICRO: Final = 1e-6
GIGA: Final = 1e9
MAX_RANKS: Final = 1_048_576
MAX_BYTES: Final = 1e15
MAX_RATE: Final = 1e16
"""Maximum plausible rate in bytes per second; a row beyond it is not a measurement."""

_OPERATION = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?:_perf)?\b", re.IGNORECASE)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_GPUS = re.compile(r"\bnThread\s+(\d+)\s+nGpus\s+(\d+)\b")
_COLUMNS = re.compile(r"^#\s+size\s+count\b")
_TAG = re.compile(r"^\s*(?:\[[^\]\s]*(?: [^\]]*)?\](?:<std(?:out|err)>)?:?|[\w.-]+(?:\[\d+\])?:)(?=[\s#]|$)")
"""Tags of a launcher before a line: ``[0]`` (mpirun -prepend-rank), ``[1,0]<stdout>:`` (--tag-output), ``0:``
(srun --label), ``node3:`` (pdsh), or a time in brackets."""
_RANK_TAG = re.compile(r"\[\d+\]")
"""Tag of a rank within a line, where the program wrote the line in parts."""
_DO = "Give the whole output of all_reduce_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf."


@dataclass(slots=True)
class BusLog:
    """Collective among ``num_ranks``: bus bandwidth in bytes/s by message size in bytes, ascending."""

    operation: str
    num_ranks: int
    rates: dict[int, float] = field(default_factory=dict)
    spread: list[float] = field(default_factory=list)
    """Relative deviations of measurements of one message size, scaled to a single measurement: repetitions from
    their median, times in place from those out of place divided by the square root of two."""


@dataclass(slots=True)
class _Section:
    """State of the parser: information of earlier lines about the next table."""

    operation: str | None
    ranks: set[int] = field(default_factory=set)
    gpus: int | None = None
    columns: list[str] = field(default_factory=list)


def untagged(text: str) -> list[str]:
    """Split a text into lines, without the tags of a launcher if the header of the table has one."""
    lines = text.splitlines()
    if any(_COLUMNS.match(line) for line in lines):
        return lines
    bare = [_TAG.sub("", line) for line in lines]
    if not any(_COLUMNS.match(line.lstrip()) for line in bare):
        return lines
    return [line if line.lstrip().startswith("#") else _RANK_TAG.sub(" ", line) for line in map(str.strip, bare)]


def is_nccl_log(text: str) -> bool:
    """Test whether a text has the header of nccl-tests' table."""
    return any(_COLUMNS.match(line) for line in untagged(text))


def parse_nccl(text: str, source: str, num_gpus: int | None = None) -> list[BusLog]:
    """Parse the tables of an output, merged by operation and number of ranks.

    ``num_gpus`` is the number of ranks where the output does not state it.

    Raises:
        InvalidInputError: no table, an unnamed operation, an unknown number of ranks, or an incomplete line.
    """
    section = _Section(_operation_of(source.rsplit("/", 1)[-1]))
    rows: dict[tuple[str, int], dict[int, list[float]]] = {}
    pairs: dict[tuple[str, int], list[float]] = {}
    for number, line in enumerate(untagged(text), start=1):
        if line.lstrip().startswith("#") or not line.lstrip()[:1].isdigit():
            _read_header(line.strip(), section)
        elif section.columns:
            operation, ranks = _named(section, source, num_gpus, line.split())
            size, rate = _row(line, section.columns, PASSES[operation] * (ranks - 1) / ranks, f"{source}:{number}")
            if rate > 0:
                rows.setdefault((operation, ranks), {}).setdefault(size, []).append(rate)
                pairs.setdefault((operation, ranks), []).extend(_in_place(line.split(), section.columns))
    logs = [_log(key, rates, pairs[key]) for key, rates in rows.items()]
    if not logs:
        raise InvalidInputError(f"{source} has no row of a bandwidth table.", "Expected sizes and times.", _DO)
    return logs


def _log(key: tuple[str, int], found: dict[int, list[float]], pairs: list[float]) -> BusLog:
    rates = {size: _median(found[size]) for size in sorted(found)}
    again = [abs(math.log(rate / rates[size])) for size in rates if len(found[size]) > 1 for rate in found[size]]
    return BusLog(*key, rates, again + pairs)


def _in_place(words: list[str], columns: list[str]) -> list[float]:
    """Return the logarithm of the in-place over the out-of-place time, divided by the square root of two; empty
    without both."""
    places = [index for index, name in enumerate(columns) if name == "time"]
    try:
        first, second = (float(words[index]) for index in places)
        return [abs(math.log(second / first)) / math.sqrt(2)]
    except (ValueError, IndexError, ZeroDivisionError):
        return []


def _operation_of(text: str) -> str | None:
    match = _OPERATION.search(text)
    if match is None:
        return None
    plain = match.group(1).lower().replace("_", "")
    return next(name for name in PASSES if name.replace("_", "") == plain)


def _read_header(line: str, section: _Section) -> None:
    """Read a comment, a rank, the columns, or the words of the command."""
    rank = _RANK.match(line)
    gpus = _GPUS.search(line)
    if _COLUMNS.match(line):
        section.columns = line.lstrip("# ").split()
    elif gpus is not None:
        # A new run starts here, followed by its ranks.
        section.gpus, section.ranks, section.columns = int(gpus[1]) * int(gpus[2]), set(), []
    elif rank is not None:
        section.ranks.add(int(rank[1]))
    else:
        named = _operation_of(line)
        if named is not None:
            section.operation = named


def _recognised(section: _Section, ranks: int, words: list[str]) -> str | None:
    """Recognise the collective by the ratio of its bus bandwidth to the algorithm's, among those that reduce or do
    not; None where several have this ratio."""
    try:
        algorithm, bus = (float(words[section.columns.index(name)]) for name in ("algbw", "busbw"))
        reduces = words[section.columns.index("redop")] != "none"
    except (ValueError, IndexError):
        return None
    if not algorithm > 0 or ranks < 2:
        return None
    passes = bus / algorithm * ranks / (ranks - 1)
    names = [
        name
        for name, factor in PASSES.items()
        if abs(passes / factor - 1.0) < SAME_FACTOR and (name in REDUCING) == reduces
    ]
    return names[0] if len(names) == 1 else None


def _named(section: _Section, source: str, num_gpus: int | None, words: list[str]) -> tuple[str, int]:
    ranks = len(section.ranks) or num_gpus or section.gpus or 0
    operation = section.operation or _recognised(section, ranks, words)
    if operation is None:
        raise InvalidInputError(
            f"{source} does not say which collective it measures.",
            f"Expected one of {', '.join(PASSES)} in its text or in its file name.",
            "Name the file after the program, for instance all_reduce_perf.txt.",
        )
    if not 2 <= ranks <= MAX_RANKS:
        raise InvalidInputError(
            f"{source} measures {ranks} ranks." if ranks else f"{source} does not say how many ranks took part.",
            "Expected lines `#  Rank  0 ...`, or `# nThread ... nGpus ...`, of at least 2 ranks.",
            "Give the whole output, or the number of ranks with --gpus-per-node.",
        )
    return operation, ranks


def _row(line: str, columns: list[str], factor: float, where: str) -> tuple[int, float]:
    """Parse the message size in bytes, and compute bus bandwidth in bytes/s from the time, whose rounding is
    finer."""
    words = line.split()
    try:
        if len(words) > len(columns):
            raise ValueError("more words than columns")
        size = int(words[0])
        time_s = float(words[columns.index("time")]) * MICRO
        bus = float(words[columns.index("busbw")]) * GIGA
    except (ValueError, IndexError) as error:
        raise InvalidInputError(
            f"{where} is {shown(line.strip())}.",
            f"Expected the columns {' '.join(columns[:8])}.",
            "Give the output as printed; remove lines that were cut.",
        ) from error
    if not (0 <= size <= MAX_BYTES and math.isfinite(time_s) and math.isfinite(bus) and 0 <= bus <= MAX_RATE):
        raise InvalidInputError(
            f"{where} is {shown(line.strip())}.",
            "Expected a size in bytes, a time in microseconds and a bandwidth in GB/s, none negative.",
            "Correct or remove the line.",
        )
    rate = factor * size / time_s if time_s > 0 else bus
    return size, rate if rate <= MAX_RATE else 0.0


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])
