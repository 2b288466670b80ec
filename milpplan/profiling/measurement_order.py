"""Measurements and their order: a coarse part of everything first, for users who stop early."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from milpplan.problem import HardwareSpec
from milpplan.problem.records import Record
from milpplan.profiling.records import (
    MODES,
    Attention,
    AttentionTime,
    Copy,
    CopyTime,
    Exchange,
    Failure,
    Layers,
    Machine,
    MeasurementError,
    Measurements,
    Product,
    ProductTime,
    Traffic,
    TrafficTime,
)
from milpplan.units import MIB

Task = Product | Attention | Traffic | Copy | Exchange | Layers


@dataclass(frozen=True, slots=True)
class Width:
    """Sizes of a layer; heads of 128."""

    hidden: int
    intermediate: int
    heads: int
    key_heads: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes that suit a kind of device. ``coarse`` sizes come first, and are the only ones with ``--quick``."""

    coarse_widths: tuple[Width, ...]
    fine_widths: tuple[Width, ...]
    coarse_tokens: tuple[int, ...]
    fine_tokens: tuple[int, ...]
    """Tokens of a micro-batch: rows of the products, and sequence lengths of the layers."""
    nodes_up_to: int
    """Maximum size up to which nodes of the description's table of products are measured."""
    attention_lengths: tuple[int, ...]
    attention_tokens: int
    attention_heads: int
    coarse_traffic: tuple[int, ...]
    fine_traffic: tuple[int, ...]
    copies: tuple[int, ...]
    messages: tuple[int, ...]
    small: Width
    """Layer whose kernels are shorter than their launches."""
    small_tokens: tuple[int, ...]
    num_layers: int
    head_dim: int = 128


GPU: Final = Extent(
    coarse_widths=(Width(2048, 5632, 16, 16), Width(4096, 14336, 32, 8)),
    fine_widths=(Width(3072, 8192, 24, 8), Width(5120, 13824, 40, 40), Width(8192, 28672, 64, 8)),
    coarse_tokens=(4096,),
    fine_tokens=(2048, 8192),
    nodes_up_to=16384,
    attention_lengths=(512, 1024, 2048, 4096, 8192, 16384),
    attention_tokens=16384,
    attention_heads=32,
    coarse_traffic=(MIB // 16, 192 * MIB, 768 * MIB),
    fine_traffic=(MIB // 64, MIB // 4, 24 * MIB, 96 * MIB, 384 * MIB, 1536 * MIB),
    copies=(16 * MIB, 256 * MIB),
    messages=tuple(2**power for power in (16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29)),
    small=Width(1024, 2816, 8, 8),
    small_tokens=(256, 512),
    num_layers=4,
)
CPU: Final = Extent(
    coarse_widths=(Width(128, 256, 2, 2),),
    fine_widths=(Width(256, 512, 4, 4),),
    coarse_tokens=(64,),
    fine_tokens=(128,),
    nodes_up_to=256,
    attention_lengths=(128, 256),
    attention_tokens=256,
    attention_heads=4,
    coarse_traffic=(MIB // 16, 12 * MIB),
    fine_traffic=(3 * MIB, 48 * MIB),
    copies=(),
    messages=(MIB // 16, MIB),
    small=Width(64, 128, 1, 1),
    small_tokens=(16,),
    num_layers=2,
    head_dim=64,
)
EXTENTS: Final = {"cuda": GPU, "cpu": CPU}


def sweep(hardware: HardwareSpec, extent: Extent, num_ranks: int, quick: bool) -> list[Task]:
    """List all measurements on a device with ``num_ranks`` peers, the coarse part first; with ``quick`` only that.

    ``hardware`` gives the number formats and the nodes of products.
    """
    tasks = _part(hardware, extent, num_ranks, coarse=True)
    if not quick:
        tasks += _part(hardware, extent, num_ranks, coarse=False)
    return list(dict.fromkeys(tasks))


def _part(hardware: HardwareSpec, extent: Extent, num_ranks: int, coarse: bool) -> list[Task]:
    every = (*extent.coarse_widths, *extent.fine_widths)
    widths = extent.coarse_widths if coarse else every
    tokens = extent.coarse_tokens if coarse else (*extent.coarse_tokens, *extent.fine_tokens)
    sizes = extent.coarse_traffic if coarse else extent.fine_traffic
    tasks: list[Task] = []
    tasks += [Traffic(operator=name, num_bytes=size) for size in sizes for name in ("add", "norm")]
    tasks += _layers(extent, widths, tokens)
    tasks += _attentions(extent, extent.attention_lengths[::2] if coarse else extent.attention_lengths)
    tasks += _products(extent, widths, tokens)
    if hardware.accelerator.fp8 is not None:
        tasks += [
            product.model_copy(update={"precision": "fp8"}) for product in _products(extent, widths, tokens[:1])
        ]
    tasks += _copies(extent, coarse)
    if not coarse:
        tasks += _nodes(hardware, extent)
    messages = extent.messages[::3] if coarse else extent.messages
    tasks += [Exchange(num_ranks=ranks, message_bytes=messages) for ranks in _groups(num_ranks)]
    return tasks


def _copies(extent: Extent, coarse: bool) -> list[Copy]:
    sizes = extent.copies[-1:] if coarse else extent.copies
    return [Copy(direction=way, num_bytes=size) for size in sizes for way in ("host_to_device", "device_to_host")]


def _layers(extent: Extent, widths: tuple[Width, ...], tokens: tuple[int, ...]) -> list[Layers]:
    cases = [(extent.small, length) for length in extent.small_tokens] + list(product(widths, tokens))
    return [
        Layers(
            hidden_size=width.hidden,
            intermediate_size=width.intermediate,
            num_attention_heads=width.heads,
            num_key_value_heads=width.key_heads,
            head_dim=extent.head_dim,
            sequence_length=length,
            micro_batch_size=1,
            num_layers=extent.num_layers,
            recompute=mode,
        )
        for width, length in cases
        for mode in MODES
    ]


def _attentions(extent: Extent, lengths: tuple[int, ...]) -> list[Attention]:
    return [
        Attention(
            sequence_length=length,
            micro_batch_size=max(extent.attention_tokens // length, 1),
            num_heads=extent.attention_heads,
            head_dim=extent.head_dim,
        )
        for length in lengths
    ]


def _products(extent: Extent, widths: tuple[Width, ...], tokens: tuple[int, ...]) -> list[Product]:
    """List the products of a layer: for every matrix the forward, and the gradients of its input and weights."""
    products: list[Product] = []
    for width, rows in product(widths, tokens):
        hidden, inner = width.hidden, width.heads * extent.head_dim
        packed = inner + 2 * width.key_heads * extent.head_dim
        matrices = (
            (packed, hidden),
            (hidden, inner),
            (2 * width.intermediate, hidden),
            (hidden, width.intermediate),
        )
        for n, k in matrices:
            products += [Product(m=rows, n=n, k=k), Product(m=rows, n=k, k=n), Product(m=n, n=k, k=rows)]
    return products


def _nodes(hardware: HardwareSpec, extent: Extent) -> list[Product]:
    """List the nodes of the description's table."""
    table = hardware.accelerator.bf16.gemm
    axes = [[int(size) for size in axis if size <= extent.nodes_up_to] for axis in (table.m, table.n, table.k)]
    return [Product(m=m, n=n, k=k) for m, n, k in product(*axes)]


def _groups(num_ranks: int) -> list[int]:
    """List powers of two up to all ranks, and all ranks."""
    powers = [2**power for power in range(1, num_ranks.bit_length()) if 2**power <= num_ranks]
    return sorted({*powers, num_ranks} - {0, 1})


Progress = Callable[[str], None]
MAX_REASON = 900
"""Maximum number of characters of a failure's reason."""


@dataclass(slots=True)
class _Books:
    """Rows by the field of ``Measurements`` that they belong to."""

    rows: dict[str, list[Record]] = field(default_factory=dict)

    def add(self, name: str, row: Record) -> None:
        """Add a row."""
        self.rows.setdefault(name, []).append(row)


def measure(
    machine: Machine,
    tasks: Sequence[Task],
    time_limit_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measurements:
    """Measure the tasks in order until they are done, time is up or Ctrl-C; finished measurements are kept.

    A measurement that has begun is finished, so the limit may be exceeded by one measurement.
    """
    tell = progress or (lambda text: None)
    books = _Books()
    end = clock() + time_limit_s
    stopped = ""
    try:
        for number, task in enumerate(tasks, start=1):
            if clock() >= end:
                stopped = "time limit"
                break
            tell(f"{number} of {len(tasks)}: {words_of(task)}")
            stopped = _measured(machine, task, books, lambda: clock() >= end)
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    values: dict[str, Any] = {name: tuple(rows) for name, rows in books.rows.items()}
    return Measurements(environment=machine.environment(), stopped=stopped, **values)


def _measured(machine: Machine, task: Task, books: _Books, late: Callable[[], bool]) -> str:
    """Measure a task; return the reason why it was not finished, or an empty text."""
    try:
        if isinstance(task, Exchange):
            return _exchanged(machine, task, books, late)
        if isinstance(task, Product):
            books.add("products", ProductTime(shape=task, time=machine.product(task)))
        elif isinstance(task, Traffic):
            books.add("traffic", TrafficTime(shape=task, time=machine.traffic(task)))
        elif isinstance(task, Copy):
            books.add("copies", CopyTime(shape=task, time=machine.copy(task)))
        elif isinstance(task, Attention):
            forward, backward = machine.attention(task)
            books.add("attentions", AttentionTime(shape=task, forward=forward, backward=backward))
        else:
            books.add("layers", machine.layers(task))
    except MeasurementError as error:
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        books.add("failures", Failure(what=words_of(task), reason=reason))
    return ""


def _exchanged(machine: Machine, task: Exchange, books: _Books, late: Callable[[], bool]) -> str:
    """Measure the collectives of a group. The iterator is always closed, which ends the ranks."""
    rows = machine.collectives(task)
    try:
        for row in rows:
            books.add("collectives", row)
            if late():
                return "time limit"
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()
    return ""


def words_of(task: Task) -> str:
    """Describe a task in a few words."""
    if isinstance(task, Product):
        return f"{task.precision} product {task.m} x {task.n} x {task.k}"
    if isinstance(task, Attention):
        return f"attention of {task.micro_batch_size} x {task.sequence_length} tokens, {task.num_heads} heads"
    if isinstance(task, Traffic):
        return f"{task.operator} of {task.num_bytes:,} bytes"
    if isinstance(task, Copy):
        return f"copy {task.direction.replace('_', ' ')} of {task.num_bytes:,} bytes"
    if isinstance(task, Exchange):
        return f"collectives of {task.num_ranks} ranks"
    return layers_words(task)


def layers_words(shape: Layers) -> str:
    """Name a measurement of layers."""
    return (
        f"{shape.num_layers} layers of width {shape.hidden_size}, {shape.micro_batch_size} x "
        f"{shape.sequence_length} tokens, recompute {shape.recompute}"
    )
