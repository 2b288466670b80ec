"""Step times and memory in the event files of TensorBoard.

Formats, each read off its source:

- Records: length, checksum, data, checksum (tensorflow/tensorflow tensorflow/core/lib/io/record_writer.h).
- Data: protocol buffers ``Event``, ``Summary`` and ``Summary.Value`` (tensorflow/core/util/event.proto,
  tensorflow/core/framework/summary.proto), of which scalars in ``simple_value`` are read, as PyTorch's
  ``SummaryWriter`` writes them.
- Tags: ``training_log`` of NVIDIA/Megatron-LM, the metrics processor of pytorch/torchtitan, NeMo's
  ``TimingCallback``, ``Monitor`` of microsoft/DeepSpeed, ``TensorBoardCallback`` of huggingface/transformers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from milpplan.calibration.training_logs import TRAINER, LoggedSteps, num_warm_up
from milpplan.errors import InvalidInputError
from milpplan.problem import Plan, read_bytes
from milpplan.units import GIB

MAX_FILE_BYTES: Final = 256 * 2**20
MAX_RECORD_BYTES: Final = 2**16
"""Length beyond which a record is skipped: images, histograms and graphs."""
MARK: Final = b"brain.Event:"
"""Text of the first record of every event file, which states the version."""
_EXPECTED: Final = "Expected an event file of TensorBoard."
_DO: Final = "Give a file events.out.tfevents.* of one run, or the directory of its files."
_POLYNOMIAL: Final = 0x82F63B78
"""CRC-32C, reflected. Source: RFC 3720, section 12.1."""
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")

_TIMES: Final = {
    "iteration-time": "Megatron-LM",
    "time_metrics/end_to_end(s)": "torchtitan",
    "train_step_timing in s": "NeMo",
}
"""Program by its tag of seconds a step."""
_LOSSES: Final = {"lm loss": "Megatron-LM", "Train/Samples/train_loss": "DeepSpeed", "train/loss": TRAINER}
"""Program by its tag of the loss, whose clock times give seconds a step where no tag has them."""
_COUNTS_SAMPLES: Final = "DeepSpeed"
_MEMORY: Final = {
    "mem-max-allocated-bytes": ("allocated", 1),
    "mem-reserved-bytes": ("reserved", 1),
    "memory/max_reserved(GiB)": ("reserved", GIB),
}
_BATCH: Final = "batch-size"


class Scalar(NamedTuple):
    """Point of a series: step, seconds since 1970, and value."""

    step: int
    clock_s: float
    value: float


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC: Final = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Compute the masked CRC-32C. Source: tensorflow, tensorflow/core/lib/hash/crc32c.h."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(path: Path) -> bool:
    """Test for an event file, or a directory with event files."""
    return path.is_dir() or MARK in read_bytes(path, max_bytes=MAX_FILE_BYTES)[:64]


def read_scalars(path: Path) -> dict[str, list[Scalar]]:
    """Read the scalars of an event file, or of those in a directory, by tag in the order of the files.

    Raises:
        InvalidInputError: no event file, or a record that is damaged. A last record that is not complete is left
            out: the program may still be writing.
    """
    files = sorted(path.glob("*tfevents*")) if path.is_dir() else [path]
    if not files:
        raise InvalidInputError(f"{path} has no event file.", _EXPECTED, _DO)
    series: dict[str, list[Scalar]] = {}
    for file in files:
        data = read_bytes(file, _EXPECTED, _DO, MAX_FILE_BYTES)
        for start, end in _records(data, file):
            try:
                _add_scalars(data[start:end], series)
            except (ValueError, IndexError, struct.error) as error:
                raise _damaged(file, start) from error
    return series


def _damaged(file: Path, start: int) -> InvalidInputError:
    return InvalidInputError(f"{file}: the record at byte {start:,} is damaged.", _EXPECTED, _DO)


def _records(data: bytes, file: Path) -> Iterator[tuple[int, int]]:
    """Yield where the data of each complete record starts and ends, except for long records."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, check = _HEADER.unpack_from(data, at)
        if _masked_crc(data[at : at + 8]) != check:
            raise _damaged(file, at)
        start = at + _HEADER.size
        end = start + length
        at = end + _CHECKSUM.size
        if at > len(data):
            return
        if length <= MAX_RECORD_BYTES:
            if _masked_crc(data[start:end]) != _CHECKSUM.unpack_from(data, end)[0]:
                raise _damaged(file, start)
            yield start, end


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Yield number, wire type and value of the fields of a message. Source: protobuf.dev, Encoding."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        size, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), at)
        if size < 0 or at + size > len(data):
            raise ValueError("no field of a protocol buffer")
        yield number, wire, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at + shift // 7]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError("no number of a protocol buffer")


def _add_scalars(event: bytes, series: dict[str, list[Scalar]]) -> None:
    """Add the scalars of an event to the series of their tags."""
    clock_s, step, summaries = 0.0, 0, []
    for number, wire, value in _fields(event):
        if (number, wire) == (1, 1):
            (clock_s,) = struct.unpack("<d", value)  # type: ignore[arg-type]
        elif (number, wire) == (2, 0):
            step = int(value)
        elif (number, wire) == (5, 2):
            summaries.append(bytes(value))
    for summary in summaries:
        for number, wire, value in _fields(summary):
            if (number, wire) != (1, 2):
                continue
            parts = {part[:2]: part[2] for part in _fields(bytes(value))}
            if (1, 2) in parts and (2, 5) in parts:
                tag = bytes(parts[1, 2]).decode("utf-8", "replace")
                (scalar,) = struct.unpack("<f", parts[2, 5])  # type: ignore[arg-type]
                if math.isfinite(scalar) and math.isfinite(clock_s):
                    series.setdefault(tag, []).append(Scalar(step, clock_s, scalar))


def event_steps(path: Path, plan: Plan) -> LoggedSteps:
    """Read the steps and the memory of event files.

    Args:
        path: an event file, or the directory of a run's event files.
        plan: the plan of the launch script; steps of another global batch do not count.

    Returns:
        Steps after the warm-up, and peaks of memory.

    Raises:
        InvalidInputError: no event file, or no series with the time of a step.
    """
    series = read_scalars(path)
    batch = plan.layout.global_batch_size
    others = {scalar.step for scalar in series.get(_BATCH, ()) if scalar.value != batch}
    program, steps = _timed(series, others)
    if not steps:
        program, steps = _by_clock(series, batch, others)
    if not steps:
        seen = f"the tags {', '.join(sorted(series)[:12])}" if series else "no scalar"
        raise InvalidInputError(
            f"{path} has {seen}: no step of a global batch of {batch}.",
            f"Expected one of {', '.join((*_TIMES, *_LOSSES))}.",
            "Give the event file of this script's run; Megatron-LM needs --log-timers-to-tensorboard.",
        )
    first = num_warm_up(steps)
    peaks: dict[str, int] = {}
    for tag, (peak, unit) in _MEMORY.items():
        if tag in series:
            peaks[peak] = round(max(scalar.value for scalar in series[tag]) * unit)
    return LoggedSteps(f"{program}'s event file", tuple(steps[first:]), first, peaks)


def _timed(series: dict[str, list[Scalar]], others: set[int]) -> tuple[str, list[float]]:
    """Return the program, and the seconds a step of its tag."""
    for tag, program in _TIMES.items():
        steps = [scalar.value for scalar in series.get(tag, ()) if scalar.value > 0 and scalar.step not in others]
        if steps:
            return program, steps
    return "", []


def _by_clock(series: dict[str, list[Scalar]], batch: int, others: set[int]) -> tuple[str, list[float]]:
    """Return the program, and seconds a step between points of its loss; evaluation and checkpoints count."""
    for tag, program in _LOSSES.items():
        unit = batch if program == _COUNTS_SAMPLES else 1
        pairs = [
            (after.clock_s - before.clock_s, (after.step - before.step) / unit)
            for before, after in pairwise(series.get(tag, ()))
            if after.step > before.step and after.step not in others
        ]
        steps = [seconds / number for seconds, number in pairs if seconds > 0]
        if steps:
            return program, steps
    return "", []
