"""Products and collectives in Chrome traces of PyTorch's profiler (Kineto).

Formats, read off traces of PyTorch 2.13 and of facebookresearch/HolisticTraceAnalysis (tests/data):

- Operators (``cat`` of ``cpu_op``) have the sizes of their inputs, ``Input Dims``, where ``record_shapes`` was on.
  Kernels (``cat`` of ``kernel``) have the ``External id`` of the operator that launched them.
- Kernels of NCCL have ``Collective name``, ``dtype``, ``In msg nelems``, ``Out msg nelems``, ``Group size`` and
  ``Process Group Ranks`` (pytorch/pytorch torch/csrc/distributed/c10d/ParamCommsUtils.hpp).

Times are microseconds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from milpplan.calibration.bus_tables import MAX_BYTES, MICRO, PASSES, BusLog
from milpplan.calibration.efficiency_tables import Products
from milpplan.errors import InvalidInputError
from milpplan.problem import read_bytes
from milpplan.problem.hardware import PrecisionName
from milpplan.units import counted

MAX_FILE_BYTES: Final = 256 * 2**20
MAX_S: Final = 1e3
"""Maximum plausible time of a kernel in seconds."""
MIN_REPEATS: Final = 3
"""Minimum number of kernels of a collective and a size: the shortest stands for their transfer."""
_GZIP: Final = b"\x1f\x8b"
_PRODUCTS: Final = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
"""Position of the left factor among the inputs, by operator."""
_FORMATS: Final[dict[str, PrecisionName]] = {
    "c10::BFloat16": "bf16",
    "c10::Half": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
_COLLECTIVES: Final = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}
"""Collective by its name in a trace. An exchange of uneven parts (``all_to_allv``) has no size in common."""
_BYTES: Final = {"byte": 1, "char": 1, "half": 2, "bfloat16": 2, "float": 4, "float32": 4, "double": 8}
_EXPECTED: Final = "Expected a trace of torch.profiler with kernels of GPUs, record_shapes=True for products."
_DO: Final = "Give the file of export_chrome_trace or tensorboard_trace_handler, .json or .json.gz."


def is_trace(data: bytes) -> bool:
    """Test for a Chrome trace."""
    return data[:64].lstrip().startswith(b"{") and b'"traceEvents"' in data


def unpacked(data: bytes) -> bytes:
    """Unpack data if it is packed by gzip, up to the maximum size of a trace."""
    if not data.startswith(_GZIP):
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, MAX_FILE_BYTES)
    except zlib.error:
        return data


def read_trace(path: Path, domain: int) -> tuple[list[Products], list[BusLog], list[str]]:
    """Read the products and the collectives of a rank's trace.

    Args:
        path: the trace.
        domain: number of GPUs in a domain of the hardware; ranks are numbered domain by domain.

    Returns:
        Products by number format, collectives inside a domain or over whole domains, and notes on the rest.

    Raises:
        InvalidInputError: no trace, or neither a product nor a collective in it.
    """
    data = unpacked(read_bytes(path, _EXPECTED, _DO, MAX_FILE_BYTES))
    try:
        document = json.loads(data)
        events = [event for event in document["traceEvents"] if isinstance(event.get("args"), dict)]
        kernels = [event for event in events if event.get("cat") == "kernel" and 0 < _duration_s(event) < MAX_S]
        notes: list[str] = []
        products = list(_products(events, kernels, notes))
        logs = _bus_logs(kernels, domain, notes)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{path} is no trace: {type(error).__name__}: {error}.", _EXPECTED, _DO) from error
    if not products and not logs:
        seen = f"{counted(len(kernels), 'kernel')} of GPUs" + "".join(f"; {note}" for note in notes)
        raise InvalidInputError(f"{path} has {seen}.", _EXPECTED, _DO)
    return products, logs, notes


def _duration_s(event: dict[str, Any]) -> float:
    return float(event.get("dur", 0.0)) * MICRO


def _products(events: list[dict[str, Any]], kernels: list[dict[str, Any]], notes: list[str]) -> Iterator[Products]:
    """Yield the products of each number format, each size once with its median time.

    An operator's time is that of all its kernels.
    """
    sizes: dict[int, tuple[PrecisionName, int, int, int]] = {}
    others = 0
    for event in events:
        first = _PRODUCTS.get(event.get("name", ""))
        if first is None or "Input Dims" not in event["args"]:
            continue
        (m, k), (_, n) = event["args"]["Input Dims"][first : first + 2]
        precision = _FORMATS.get(event["args"]["Input type"][first])
        if precision is None or not min(m, n, k) > 0:
            others += 1
        else:
            sizes[event["args"]["External id"]] = (precision, m, n, k)
    times: dict[int, float] = {}
    for kernel in kernels:
        identifier = kernel["args"].get("External id")
        if identifier in sizes:
            times[identifier] = times.get(identifier, 0.0) + _duration_s(kernel)
    if others:
        notes.append(f"{counted(others, 'product')} of other number formats left out")
    for precision in dict.fromkeys(sizes[identifier][0] for identifier in times):
        repeats: dict[tuple[int, int, int], list[float]] = {}
        for identifier, time_s in times.items():
            if sizes[identifier][0] == precision:
                repeats.setdefault(sizes[identifier][1:], []).append(time_s)
        m, n, k = np.array(list(repeats), dtype=np.float64).T
        yield Products(precision, m, n, k, np.array([median(part) for part in repeats.values()]))


def _bus_logs(kernels: list[dict[str, Any]], domain: int, notes: list[str]) -> list[BusLog]:
    """Return the shortest kernel of each collective, group and size, as bus bandwidth.

    A kernel lasts until the last rank of its group has come, so that all but the shortest contain waits.
    """
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    left_out = 0
    for kernel in kernels:
        words = kernel["args"]
        if "Collective name" not in words:
            continue
        operation = _COLLECTIVES.get(str(words["Collective name"]).lower())
        width = _BYTES.get(str(words.get("dtype")).lower())
        size = int(words["Group size"])
        if operation is None or width is None or not _usable_ranks(words.get("Process Group Ranks"), size, domain):
            left_out += 1
            continue
        message = width * max(int(words["In msg nelems"]), int(words["Out msg nelems"]))
        if 0 < message <= MAX_BYTES:
            times.setdefault((operation, size), {}).setdefault(message, []).append(_duration_s(kernel))
    if left_out:
        notes.append(
            f"{counted(left_out, 'collective')} left out: neither inside a domain nor over whole domains, or of"
            " another kind"
        )
    logs = []
    for (operation, size), by_message in times.items():
        passes = PASSES[operation] * (size - 1) / size
        rates = {
            message: passes * message / min(by_message[message])
            for message in sorted(by_message)
            if len(by_message[message]) >= MIN_REPEATS
        }
        if rates:
            logs.append(BusLog(operation, size, rates))
    if times:
        notes.append(
            f"the shortest kernel of a collective and size counts, of at least {MIN_REPEATS}: longer ones wait for"
            " other ranks"
        )
    return logs


def _usable_ranks(ranks: Any, size: int, domain: int) -> bool:
    """Test whether a group lies inside a domain, or covers whole domains."""
    members = json.loads(ranks) if isinstance(ranks, str) and "..." not in ranks else ranks
    if size < 2 or not isinstance(members, list) or len(members) != size:
        return False
    domains = {int(rank) // domain for rank in members}
    return len(domains) == 1 or size == len(domains) * domain
