"""Collectives among processes of this machine, one per device; the ranks send their times to the caller."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from typing import Any, Final

import torch
import torch.distributed as dist

from milpplan.profiling.pytorch.clock import Marks
from milpplan.profiling.records import CollectiveTime, Exchange, MeasurementError, timing_of

OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SAMPLES: Final = 7
WARM_UPS: Final = 2
CALLS: Final = 10
"""Consecutive calls that make a sample, as in nccl-tests: their launches overlap with the previous calls."""
START_S: Final = 120.0
"""Maximum wait for the ranks to find each other, or for a collective."""
TICK_S: Final = 0.2


def collective_times(shape: Exchange, device: str) -> Iterator[CollectiveTime]:
    """Iterate over times of every operation and message; the ranks end with the iterator.

    Raises:
        MeasurementError: the ranks do not start, or a rank fails.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    words = (shape, device, _free_port(), sender)
    ranks = [context.Process(target=_rank, args=(rank, *words), daemon=True) for rank in range(shape.num_ranks)]
    try:
        for process in ranks:
            process.start()
        sender.close()
        yield from _received(receiver, ranks)
    finally:
        for process in ranks:
            if process.is_alive():
                process.terminate()
        for process in ranks:
            if process.pid is not None:
                process.join(timeout=5.0)


def _received(receiver: Any, ranks: list[Any]) -> Iterator[CollectiveTime]:
    """Iterate over the results that rank 0 sends until it is done."""
    silent_s = 0.0
    while True:
        if receiver.poll(TICK_S):
            silent_s = 0.0
            try:
                message = receiver.recv()
            except EOFError:
                raise MeasurementError("the ranks ended without an answer") from None
            if message is None:
                return
            if isinstance(message, str):
                raise MeasurementError(message)
            yield message
            continue
        silent_s += TICK_S
        failed = [process.exitcode for process in ranks if process.exitcode not in (None, 0)]
        if failed or silent_s > START_S:
            raise MeasurementError(f"a rank ended with {failed[0]}" if failed else "the ranks are silent")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _rank(rank: int, shape: Exchange, device: str, port: int, sender: Any) -> None:
    """Run a rank."""
    # Ctrl-C is for the calling process, which ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(own)
        words = {"backend": "nccl", "device_id": own} if device == "cuda" else {"backend": "gloo"}
        wait = timedelta(seconds=START_S)
        dist.init_process_group(**words, rank=rank, world_size=shape.num_ranks, timeout=wait)
        for operation in OPERATIONS:
            for size in shape.message_bytes:
                row = _timed(operation, size, shape.num_ranks, own)
                if rank == 0:
                    sender.send(row)
        dist.barrier()
        if rank == 0:
            sender.send(None)
        dist.destroy_process_group()
    except Exception as error:
        # A rank can report only to the caller, which ends the others.
        sender.send(f"rank {rank}: {type(error).__name__}: {error}"[:900])


def _timed(operation: str, num_bytes: int, ranks: int, device: Any) -> CollectiveTime:
    """Time calls on every rank from a barrier to the end of its own calls; rank 0's samples are returned."""
    elements = max(num_bytes // (2 * ranks), 1) * ranks
    run = _call(operation, elements, ranks, device)
    once = _device_s if device.type == "cuda" else _host_s
    samples = []
    for number in range(WARM_UPS + SAMPLES):
        dist.barrier()
        seconds = once(run) / CALLS
        if number >= WARM_UPS:
            samples.append(seconds)
    row = {"operation": operation, "num_ranks": ranks, "message_bytes": 2 * elements, "time": timing_of(samples)}
    return CollectiveTime.model_validate(row)


def _host_s(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return time.perf_counter() - start


def _device_s(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    marks = Marks(on_device=True)
    marks.mark()
    for _ in range(CALLS):
        run()
    marks.mark()
    return marks.between_s()[0]


def _call(operation: str, elements: int, ranks: int, device: Any) -> Callable[[], object]:
    """Make a call of the operation on 16-bit elements; ``elements`` of the whole message, as nccl-tests counts
    it."""
    whole = torch.ones(elements, dtype=torch.bfloat16, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    part = torch.ones(elements // ranks, dtype=torch.bfloat16, device=device)
    # Newer versions rename both.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    if operation == "all_gather":
        return lambda: gather(whole, part)
    return lambda: scatter(part, whole)
