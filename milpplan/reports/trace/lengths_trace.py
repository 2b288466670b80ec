"""Timeline of a step of several lengths, switches included, as a trace-event file (see ``step_trace``).

Strategies in turn: one process, with a thread for the GPUs' work and waits (parameters, groups, reductions, the
finish), and a thread for the gradients in transit. Degrees side by side and heterogeneous replicas: a thread for
the GPUs of every team or replica. Parameters and gradients state the bytes moved and their strategies. Times are
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from milpplan.problem.reading import parse_json, read_text, validated
from milpplan.reports.documents.lengths_document import EventRecord, LengthsFile, TurnRecord
from milpplan.units import NS_PER_S, counted
from milpplan.version import __version__

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
        InvalidInputError: the file cannot be read, or fields of such a result are wrong.
    """
    data = parse_json(read_text(path), str(path))
    return validated(LengthsFile, data, str(path)) if {"groups", "switches", "static"} <= set(data) else None


def lengths_trace(result: LengthsFile) -> str:
    """Write the whole file, an event per line."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(result))
    about = json.dumps({"milpplan": __version__, "step_time_s": result.step_time_s, "order": result.order})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{events}\n]}}\n'


def _events(result: LengthsFile) -> Iterator[dict[str, Any]]:
    yield _named("process_name", 0, f"step of {counted(result.num_sequences, 'sequence')}")
    beside, turns = result.beside
    if beside:
        yield from _teams(result, turns)
        return
    yield _named("thread_name", _COMPUTE, "strategies in turn")
    yield _named("thread_name", _BESIDE, "gradients on the way")
    before = result.home
    for event in result.timeline:
        args = _moved(result, event, before)
        thread = _THREADS.get(event.kind, _COMPUTE)
        name = event.strategy if event.kind == "group" else f"{event.kind}: {event.strategy}"
        yield _slice(event.kind, name, thread, event.start_s, event.end_s, args)
        before = event.strategy if event.kind == "reduce" else before


def _teams(result: LengthsFile, turns: tuple[TurnRecord, ...]) -> Iterator[dict[str, Any]]:
    """Write the turns of every team, or the replicas, by their first GPU, and the final work of all GPUs."""
    yield _named("thread_name", 0, "all GPUs")
    for gpu in sorted({turn.first_gpu for turn in turns}):
        yield _named("thread_name", 1 + gpu, f"from GPU {gpu}")
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


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": {"name": name}}


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
