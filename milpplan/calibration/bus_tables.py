"""Bus bandwidth tables inside a domain and network efficiency between domains, from logs of nccl-tests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from milpplan.calibration.fitting.least_squares import MAD_TO_SIGMA
from milpplan.errors import InvalidInputError
from milpplan.problem import COLLECTIVES, BusTable, Constants, Factor, HardwareSpec, Tables
from milpplan.problem.overlay import LEAST_FACTOR, MOST_FACTOR
from milpplan.problem.reading import shown
from milpplan.simulation.network import bus_bandwidth_bytes_per_s
from milpplan.simulation.network.collectives import Operation
from milpplan.units import percent_text, size_text

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
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?")
_GPUS = re.compile(r"\bnThread\s+(\d+)\s+nGpus\s+(\d+)\b")
_COLUMNS = re.compile(r"^#\s+size\s+count\b")
_TAG = re.compile(r"^\s*(?:\[[^\]\s]*(?: [^\]]*)?\](?:<std(?:out|err)>)?:?|[\w.-]+(?:\[\d+\])?:)(?=[\s#]|$)")
"""Tags of a launcher before a line: ``[0]`` (mpirun -prepend-rank), ``[1,0]<stdout>:`` (--tag-output), ``0:``
(srun --label), ``node3:`` (pdsh), or a time in brackets."""
_RANK_TAG = re.compile(r"\[\d+\]")
"""Tag of a rank within a line, where the program wrote the line in parts."""
_WRITER = re.compile(r"^\s*(\[(?:\d+,)?\d{1,7}\]|[\w.-]+(?:\[\d+\])?:)")
"""Tag that names a rank or a host, not a time."""
_MIN_NUMBERS: Final = 6
"""Numbers in a line beside which other text cannot be the talk of a program: the line is a row."""
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
    writers: frozenset[str] = frozenset()
    """Ranks and hosts whose tags the rows of the table have."""


def untagged(text: str) -> list[tuple[frozenset[str], str]]:
    """Split a text into lines without the tags of a launcher, each with the ranks or hosts that its tags name.

    Tags are removed only if the header of the table has one.
    """
    lines = text.splitlines()
    plain = [(frozenset[str](), line) for line in lines]
    if any(_COLUMNS.match(line) for line in lines):
        return plain
    bare = [_TAG.sub("", line).strip() for line in lines]
    if not any(_COLUMNS.match(line) for line in bare):
        return plain
    return [
        (_writers(line), rest if rest.startswith("#") else _RANK_TAG.sub(" ", rest))
        for line, rest in zip(lines, bare, strict=True)
    ]


def _writers(line: str) -> frozenset[str]:
    """Return the tags of ranks and hosts in a line."""
    first = _WRITER.match(line)
    inside = _RANK_TAG.findall(line) if first is not None and _RANK_TAG.fullmatch(first[1]) else []
    return frozenset(inside if first is None else [first[1], *inside])


def is_nccl_log(text: str) -> bool:
    """Test whether a text has the header of nccl-tests' table."""
    return any(_COLUMNS.match(line) for _, line in untagged(text))


def parse_nccl(text: str, source: str, num_gpus: int | None = None) -> list[BusLog]:
    """Parse the tables of an output, merged by operation and number of ranks.

    ``num_gpus`` is the number of ranks where the output does not state it.

    Raises:
        InvalidInputError: no table, an unnamed operation, an unknown number of ranks, an incomplete line, or rows
            of several ranks or hosts in one table.
    """
    section = _Section(_operation_of(source.rsplit("/", 1)[-1]))
    rows: dict[tuple[str, int], dict[int, list[float]]] = {}
    pairs: dict[tuple[str, int], list[float]] = {}
    for number, (writers, line) in enumerate(untagged(text), start=1):
        if line.lstrip().startswith("#") or not _is_row(line, section.columns):
            _read_header(line.strip(), section)
        elif section.columns:
            _check_writers(section, writers, f"{source}:{number}")
            operation, ranks = _named(section, source, num_gpus, line.split())
            size, rate = _row(line, section.columns, PASSES[operation] * (ranks - 1) / ranks, f"{source}:{number}")
            if rate > 0:
                rows.setdefault((operation, ranks), {}).setdefault(size, []).append(rate)
                pairs.setdefault((operation, ranks), []).extend(_in_place(line.split(), section.columns))
    logs = [_log(key, rates, pairs[key]) for key, rates in rows.items()]
    if not logs:
        raise InvalidInputError(f"{source} has no row of a bandwidth table.", "Expected sizes and times.", _DO)
    return logs


def _is_row(line: str, columns: list[str]) -> bool:
    """Test for a row of a table: it opens with a number, or has so many that it is a torn or tagged row."""
    if line.lstrip()[:1].isdigit():
        return True
    return bool(columns) and sum(_NUMBER.fullmatch(word) is not None for word in line.split()) >= _MIN_NUMBERS


def _check_writers(section: _Section, writers: frozenset[str], where: str) -> None:
    """Require rows of a single rank or host in a table."""
    section.writers |= writers
    if len(section.writers) > 1:
        raise InvalidInputError(
            f"{where}: rows of {', '.join(sorted(section.writers))} are mixed in one table.",
            "Expected the table of one run, which a single rank prints.",
            "Keep the lines of one rank; if every rank printed a table, start one MPI job instead of many.",
        )


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
        section.writers = frozenset()
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
        if len(words) != len(columns):
            raise ValueError("a torn line, or two in one")
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


RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")
MAX_SIGMA: Final = 0.5
"""Maximum one sigma of tables; repetitions with a larger scatter do not determine a value."""
LARGEST: Final = 3
"""Number of largest messages whose rates give the efficiency of the network."""


@dataclass(frozen=True, slots=True)
class BusFit:
    """Fit to collectives: tables, constants, notes, and mean absolute errors of the previous description's
    bandwidth over ``num_rows`` rows inside a domain (None without any)."""

    tables: Tables
    constants: Constants
    told: tuple[str, ...]
    num_rows: int
    error_before: float | None


def fit_bus(logs: list[BusLog], hardware: HardwareSpec) -> BusFit:
    """Fit tables and network efficiency to measured collectives; values without measurements are kept.

    Raises:
        InvalidInputError: nothing in the logs can be used on this hardware.
    """
    domain = hardware.scale_up.num_gpus
    inside = [log for log in logs if log.num_ranks <= domain]
    outside = [log for log in logs if log.num_ranks > domain]
    notes: list[str] = []
    tables: dict[str, BusTable] = {}
    errors: list[float] = []
    for operation in dict.fromkeys(log.operation for log in inside):
        own = [log for log in inside if log.operation == operation]
        for log in own:
            errors += _errors(log, hardware)
        tables[operation] = _table(own, hardware, operation, notes)
    factors = _network_factors(outside, hardware, notes)
    constants = _constants(inside, factors, notes)
    if not tables and not factors:
        raise InvalidInputError(
            f"None of the {len(logs)} tables says anything about {hardware.name} ({'; '.join(notes)}).",
            f"Expected collectives of 2 to {domain} ranks, or rings of several whole domains of {domain}.",
            "Run nccl-tests inside one node, or on whole nodes.",
        )
    missing = [name for name in COLLECTIVES if name not in tables]
    if tables and missing:
        notes.append(f"not measured, as in the description: {', '.join(missing)}")
    return BusFit(
        Tables(**tables),
        constants,
        tuple(notes),
        sum(len(log.rates) for log in logs),
        float(np.mean(errors)) if errors else None,
    )


def _constants(inside: list[BusLog], factors: list[float], notes: list[str]) -> Constants:
    """Fit the network's efficiency, and the one sigma of the tables: scatter of repetitions, as if common to
    all."""
    constants: dict[str, Factor] = {}
    if factors:
        sigma = float(np.std(factors)) if len(factors) > 1 else 0.1 * factors[0]
        constants["scale_out_efficiency"] = Factor(value=float(np.median(factors)), one_sigma=sigma)
        notes.append(f"network between domains: {len(factors)} rates of the largest messages")
    spread = [size for log in inside for size in log.spread]
    if spread:
        sigma = min(MAD_TO_SIGMA * float(np.median(spread)), MAX_SIGMA)
        constants["scale_up_efficiency"] = Factor(value=1.0, one_sigma=sigma)
        notes.append(f"one sigma of the tables: {percent_text(sigma)} (repetitions, in place and out of place)")
    return Constants(**constants)


def _described(hardware: HardwareSpec, operation: str, sizes: list[int], ranks: float) -> list[float]:
    """Return bus bandwidths of the description, bytes/s."""
    name: Operation = operation  # type: ignore[assignment]
    rates = bus_bandwidth_bytes_per_s(hardware, name, np.array(sizes, dtype=np.float64), ranks)
    return [float(rate) for rate in rates]


def _errors(log: BusLog, hardware: HardwareSpec) -> list[float]:
    described = _described(hardware, log.operation, list(log.rates), log.num_ranks)
    return [abs(a / b - 1.0) for a, b in zip(described, log.rates.values(), strict=True)]


def _table(logs: list[BusLog], hardware: HardwareSpec, operation: str, notes: list[str]) -> BusTable:
    """Make a table of measured rows on the union of their sizes. Numbers of ranks in the description that were not
    measured keep their rates, interpolated at these sizes."""
    measured = {log.num_ranks: log for log in logs}
    before: BusTable = getattr(hardware.scale_up, operation)
    sizes = sorted({size for log in logs for size in log.rates if size > 0})
    rows: dict[float, list[float]] = {}
    for ranks in sorted({*map(float, measured), *before.num_gpus}):
        log = measured.get(int(ranks)) if ranks == int(ranks) else None
        if log is None:
            rows[ranks] = _described(hardware, operation, sizes, ranks)
            continue
        known = np.log(list(log.rates)), np.log(list(log.rates.values()))
        rows[ranks] = [float(rate) for rate in np.exp(np.interp(np.log(sizes), *known))]
    kept = [f"{ranks:g}" for ranks in rows if ranks not in measured]
    if kept:
        notes.append(f"{operation}: {', '.join(kept)} ranks not measured, as in the description")
    if sizes[-1] < before.message_bytes[-1]:
        notes.append(f"{operation}: messages beyond {size_text(sizes[-1])} have the rate of the largest one")
    return BusTable(
        num_gpus=tuple(rows),
        message_bytes=tuple(map(float, sizes)),
        bus_bandwidth_bytes_per_s=tuple(map(tuple, rows.values())),
    )


def _network_factors(logs: list[BusLog], hardware: HardwareSpec, notes: list[str]) -> list[float]:
    """Return measured over described bus bandwidth of large messages in rings over whole domains."""
    domain, out = hardware.scale_up.num_gpus, hardware.scale_out
    described = domain * out.bandwidth_bytes_per_s * out.efficiency
    factors: list[float] = []
    for log in logs:
        if log.operation not in RINGS or log.num_ranks % domain:
            notes.append(f"{log.operation} of {log.num_ranks} ranks not used: no ring over whole domains")
            continue
        largest = list(log.rates.values())[-LARGEST:]
        factors += [min(max(rate / described, LEAST_FACTOR), MOST_FACTOR) for rate in largest]
    return factors
