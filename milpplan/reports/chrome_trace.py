"""Step as a trace-event file, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process for every pipeline rank, a thread for every stream of it, and a counter of its memory. With heterogeneous
replicas the processes of a replica on the first node type come first, then those on the next. Transfers do not
wait for each other in the cost model and may overlap: overlapping transfers get a second thread, because slices of
a thread must nest. Times are microseconds, as the format requires; nanoseconds are exact thousandths.

Source: Google, "Trace Event Format" (complete events "X", counter events "C", metadata events "M").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem import parse_json, read_text, validated
from milpplan.reports.answers import LengthsFile
from milpplan.reports.answers.lengths import EventRecord, TurnRecord
from milpplan.reports.documents.fields import json_digest
from milpplan.simulation import IntArray
from milpplan.simulation.pipeline.lanes import LANES, SLICE_KINDS, Lane, RankLanes, StepLanes
from milpplan.units import NS_PER_S, counted
from milpplan.version import __version__

MAX_SLICES: Final = 2_000_000
"""Maximum number of slices that viewers open (a file of about 300 MB)."""
NS_PER_US: Final = 1000
ROWS: Final = 1000
"""Stride of thread ids between lanes, above the number of rows of any lane."""
COLOURS: Final = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "weight gradients": "thread_state_runnable",
    "gather": "rail_load",
    "reduction": "rail_animation",
    "activations": "good",
    "gradients": "bad",
    "norm": "grey",
    "optimizer": "rail_response",
}
"""Colour names of the viewers."""


def trace_text(lanes: StepLanes, title: str) -> str:
    """Write the whole file, an event per line.

    Raises:
        InvalidInputError: more slices than a viewer opens.
    """
    if lanes.num_slices > MAX_SLICES:
        raise InvalidInputError(
            f"The step has {lanes.num_slices:,} slices on {counted(len(lanes.ranks), 'pipeline rank')}.",
            f"Expected at most {MAX_SLICES:,}, which is what viewers open.",
            "Trace a plan with fewer micro-batches: the steady part repeats.",
        )
    return _text(trace_events(lanes), title=title, milpplan=__version__, step_time_ns=lanes.step_time_ns)


def _text(events: Iterable[dict[str, Any]], **about: object) -> str:
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def trace_events(lanes: StepLanes) -> Iterator[dict[str, Any]]:
    """Iterate over the events, process by process."""
    for rank in lanes.ranks:
        yield from _names(rank)
        for lane in rank.lanes:
            yield from _slices(rank, lane)
        yield from _memory(rank)


def _names(rank: RankLanes) -> Iterator[dict[str, Any]]:
    count = sum(rank.num_layers)
    name = f"{rank.name} ({counted(rank.num_gpus, 'GPU')}, {counted(count, 'layer')})"
    yield _metadata(rank.rank, "process_name", 0, name=name)
    yield _metadata(rank.rank, "process_sort_index", 0, sort_index=rank.rank)
    for lane in rank.lanes:
        rows = rows_of(lane)
        for row in range(int(rows.max()) + 1):
            thread = _thread(lane, row)
            yield _metadata(rank.rank, "thread_name", thread, name=lane.name + (f" ({row + 1})" if row else ""))
            yield _metadata(rank.rank, "thread_sort_index", thread, sort_index=ROWS * LANES.index(lane.name) + row)


def _metadata(process: int, what: str, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _thread(lane: Lane, row: int) -> int:
    return 1 + LANES.index(lane.name) + row * len(LANES)


def rows_of(lane: Lane) -> IntArray:
    """Assign each slice of a lane to the first row that is free at its start, [n]."""
    rows = np.zeros(len(lane), dtype=np.int64)
    if len(lane) < 2 or bool((lane.start_ns[1:] >= lane.end_ns[:-1]).all()):
        return rows
    free: list[int] = []
    for index, (start, end) in enumerate(zip(lane.start_ns.tolist(), lane.end_ns.tolist(), strict=True)):
        row = next((row for row, until in enumerate(free) if until <= start), len(free))
        free[row : row + 1] = [end]
        rows[index] = row
    return rows


def _slices(rank: RankLanes, lane: Lane) -> Iterator[dict[str, Any]]:
    layers = dict(zip(rank.virtual_stages, rank.num_layers, strict=True))
    columns = (rows_of(lane), lane.start_ns, lane.end_ns, lane.kind, lane.stage, lane.micro_batch)
    for row, start, end, kind, stage, micro_batch in zip(*(part.tolist() for part in columns), strict=True):
        word = SLICE_KINDS[kind]
        event = {
            "ph": "X",
            "name": word if micro_batch < 0 else f"{word} {micro_batch}",
            "cat": lane.name,
            "pid": rank.rank,
            "tid": _thread(lane, row),
            "ts": start / NS_PER_US,
            "dur": (end - start) / NS_PER_US,
            "cname": COLOURS[word],
        }
        if stage >= 0:
            event["args"] = {"virtual_stage": stage, "layers": layers[stage]}
            if micro_batch >= 0:
                event["args"]["micro_batch"] = micro_batch
        yield event


def _memory(rank: RankLanes) -> Iterator[dict[str, Any]]:
    """Write bytes by part at every change; of changes at one moment the largest sum, so that no peak is lost."""
    memory = rank.memory
    total = memory.total_bytes
    when = np.rint(memory.time_s * NS_PER_S).astype(np.int64)
    order = np.lexsort((total, when))
    # Of changes at one moment the last in this order is the largest; then comes the value that holds from then on.
    last = np.append(when[order][1:] != when[order][:-1], True)
    moments = np.unique(np.concatenate([order[last], np.flatnonzero(np.append(when[1:] != when[:-1], True))]))
    columns = (when[moments], memory.activations_bytes[moments], memory.transient_bytes[moments])
    for at, activations, transient in zip(*(part.tolist() for part in columns), strict=True):
        parts = {"states": memory.static_bytes, "activations": activations, "transient": transient}
        yield {
            "ph": "C",
            "name": "memory of a GPU (bytes)",
            "pid": rank.rank,
            "tid": 0,
            "ts": at / NS_PER_US,
            "args": parts,
        }


US_PER_S: Final = NS_PER_S / 1000
_COMPUTE, _BESIDE = 1, 2
_THREADS: Final = {"gradients": _BESIDE}
_COLOURS: Final = {
    "parameters": "rail_load",
    "gradients": "bad",
    "group": "thread_state_running",
    "reduce": "rail_animation",
    "finish": "rail_response",
}


def lengths_in(path: Path) -> LengthsFile | None:
    """Read the result of a solve with ``--lengths`` from a file; None where the file holds something else.

    Raises:
        InvalidInputError: the file cannot be read, fields of such a result are wrong, or it was changed.
    """
    data = parse_json(read_text(path), str(path))
    if not {"groups", "switches", "static"} <= set(data):
        return None
    result = validated(LengthsFile, data, str(path))
    if json_digest(data | {"sha256": ""}) != result.sha256:
        raise InvalidInputError(
            f"{path} was changed since milpplan wrote it, or has no digest.",
            "Expected a result that nobody has changed.",
            "Take the original file, or solve again.",
        )
    return result


def lengths_trace(result: LengthsFile) -> str:
    """Write the whole file, an event per line."""
    return _text(_events(result), milpplan=__version__, step_time_s=result.step_time_s, order=result.order)


def _events(result: LengthsFile) -> Iterator[dict[str, Any]]:
    yield _metadata(0, "process_name", 0, name=f"step of {counted(result.num_sequences, 'sequence')}")
    beside, turns = result.beside
    if beside:
        yield from _teams(result, turns)
        return
    yield _metadata(0, "thread_name", _COMPUTE, name="strategies in turn")
    yield _metadata(0, "thread_name", _BESIDE, name="gradients on the way")
    before = result.home
    for event in result.timeline:
        args = _moved(result, event, before)
        thread = _THREADS.get(event.kind, _COMPUTE)
        name = event.strategy if event.kind == "group" else f"{event.kind}: {event.strategy}"
        yield _slice(event.kind, name, thread, event.start_s, event.end_s, args)
        before = event.strategy if event.kind == "reduce" else before


def _teams(result: LengthsFile, turns: tuple[TurnRecord, ...]) -> Iterator[dict[str, Any]]:
    """Write the turns of every team, or the replicas, by their first GPU, and the final work of all GPUs."""
    yield _metadata(0, "thread_name", 0, name="all GPUs")
    for gpu in sorted({turn.first_gpu for turn in turns}):
        yield _metadata(0, "thread_name", 1 + gpu, name=f"from GPU {gpu}")
    for turn in turns:
        args = {"gpus": turn.num_gpus, "micro_batches": len(turn.micro_batches)}
        yield _slice("group", turn.strategy, 1 + turn.first_gpu, turn.start_s, turn.end_s, args)
    for event in result.timeline:
        if event.kind != "group":
            yield _slice(event.kind, f"{event.kind}: {event.strategy}", 0, event.start_s, event.end_s, {})


def _moved(result: LengthsFile, event: EventRecord, before: str) -> dict[str, Any]:
    """Describe the source and size of moved bytes, or the sequences of a group."""
    for switch in result.switches:
        if (switch.what, switch.source, switch.target) == (event.kind, before, event.strategy):
            return {"from": before, "bytes": switch.bytes}
    groups = [group for group in result.groups if group.strategy == event.strategy and event.kind == "group"]
    return {"sequences": sum(bucket.sequences for group in groups for bucket in group.buckets)} if groups else {}


def _slice(
    kind: str, name: str, thread: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": 0,
        "tid": thread,
        "ts": start_s * US_PER_S,
        "dur": (end_s - start_s) * US_PER_S,
        "cname": _COLOURS[kind],
        "args": args,
    }
