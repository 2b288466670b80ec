"""The trace of a step of several lengths: its time line, switches included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milpplan.problem import validated
from milpplan.reports import lengths_in, lengths_trace
from milpplan.reports.answers import LengthsFile


def event(kind: str, strategy: str, start_s: float, end_s: float) -> dict[str, Any]:
    """One thing of the time line."""
    return {"kind": kind, "strategy": strategy, "start_s": start_s, "end_s": end_s}


def document() -> dict[str, Any]:
    """Two strategies in turn: the short ones first, then at home the long ones, gradients on their way beside."""
    layout = {"tp": 1, "cp": 1, "pp": 1, "dp": 4, "global_batch_size": 4}
    return {
        "schema_version": 1, "milpplan_version": "0", "status": "optimal", "step_time_s": 10.5,
        "lower_bound_s": 10.0, "gap": 0.05, "num_sequences": 5, "num_tokens": 5000, "alignment": 128,
        "mask": "causal", "padding": False,
        "groups": [
            {
                "strategy": name, "layout": layout, "recompute": {}, "time_s": time_s,
                "buckets": [{"tokens": 1024, "sequences": number}], "micro_batch_tokens": 4096,
                "micro_batches": [[[1024] * number]], "reduce_s": 0.5,
            }
            for name, number, time_s in (("short", 4, 3.0), ("long", 1, 4.0))
        ],
        "order": ["short", "long"], "home": "long", "finish_s": 0.5,
        "switches": [
            {"from": "long", "to": "short", "what": "parameters", "bytes": 700, "time_s": 1.0},
            {"from": "short", "to": "long", "what": "parameters", "bytes": 800, "time_s": 1.0},
            {"from": "short", "to": "long", "what": "gradients", "bytes": 900, "time_s": 2.0},
        ],
        "timeline": [
            event("parameters", "short", 0.0, 1.0), event("group", "short", 1.0, 4.0),
            event("reduce", "short", 4.0, 4.5), event("parameters", "long", 4.5, 5.5),
            event("gradients", "long", 5.5, 7.5), event("group", "long", 5.5, 9.5),
            event("reduce", "long", 9.5, 10.0), event("finish", "long", 10.0, 10.5),
        ],
        "static": {"strategy": "long", "step_time_s": 12.0, "lower_bound_s": 11.0}, "speedup": 1.14,
        "num_candidates": 2, "num_sets": 1, "cpu_time_s": 1.0, "wall_time_s": 1.0,
    }  # fmt: skip


def slices(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The complete events of the trace of a document."""
    trace = lengths_trace(validated(LengthsFile, content, "the document"))
    return [one for one in json.loads(trace)["traceEvents"] if one["ph"] == "X"]


def test_every_event_has_a_slice_and_switches_their_bytes() -> None:
    """Microseconds of the time line; bytes and source of what moves; gradients on a thread of their own."""
    found = slices(document())
    assert [(one["ts"], one["ts"] + one["dur"]) for one in found] == [
        pytest.approx((1e6 * one["start_s"], 1e6 * one["end_s"])) for one in document()["timeline"]
    ]
    moved = [(one["name"], one["args"]) for one in found if "bytes" in one["args"]]
    assert moved == [
        ("parameters: short", {"from": "long", "bytes": 700}),
        ("parameters: long", {"from": "short", "bytes": 800}),
        ("gradients: long", {"from": "short", "bytes": 900}),
    ]
    assert [one["args"]["sequences"] for one in found if one["cat"] == "group"] == [4, 1]
    # What shares a thread does not overlap.
    alone = [one for one in found if one["cat"] != "gradients"]
    assert len({one["tid"] for one in alone}) == 1
    assert found[4]["tid"] != alone[0]["tid"]


def test_degrees_side_by_side_have_a_thread_for_their_gpus() -> None:
    """Turns from the same GPU on follow each other on one thread."""
    turns = [
        {
            "strategy": "cp4",
            "first_gpu": 0,
            "num_gpus": 4,
            "start_s": 0.0,
            "end_s": 3.0,
            "micro_batches": [[9]],
        },
        {"strategy": "cp2", "first_gpu": 0, "num_gpus": 2, "start_s": 3.0, "end_s": 5.0, "micro_batches": [[5]]},
        {"strategy": "cp2", "first_gpu": 2, "num_gpus": 2, "start_s": 3.0, "end_s": 4.0, "micro_batches": [[4]]},
    ]
    beside = {"step_time_s": 5.5, "lower_bound_s": 5.0, "num_families": 1, "turns": turns}
    line = [event("group", "cp4", 0.0, 3.0), event("group", "cp2", 3.0, 5.0), event("reduce", "cp2", 5.0, 5.5)]
    found = slices(document() | {"step_time_s": 5.5, "timeline": line, "side_by_side": beside})
    assert [(one["name"], one["args"].get("gpus"), one["tid"]) for one in found] == [
        ("cp4", 4, 1), ("cp2", 2, 1), ("cp2", 2, 3), ("reduce: cp2", None, 0),
    ]  # fmt: skip
    # Another step was shorter: its time line counts.
    found = slices(document() | {"side_by_side": beside | {"step_time_s": 11.0}})
    assert len(found) == len(document()["timeline"])


def test_unlike_replicas_have_a_thread_each() -> None:
    """All start at once, by their first GPU; the reduction is everybody's."""
    kept = {"start_s": 0.0, "micro_batches": [[9]]}
    replicas = [
        {"strategy": "tp4", "first_gpu": 0, "num_gpus": 4, "end_s": 3.0} | kept,
        {"strategy": "tp2", "first_gpu": 4, "num_gpus": 2, "end_s": 2.5} | kept,
        {"strategy": "tp2", "first_gpu": 6, "num_gpus": 2, "end_s": 2.75} | kept,
    ]
    unlike = {"step_time_s": 3.5, "lower_bound_s": 3.0, "num_strategies": 2, "replicas": replicas}
    line = [event("group", "tp4", 0.0, 3.0), event("group", "tp2", 0.0, 2.75), event("reduce", "tp4", 3.0, 3.5)]
    found = slices(document() | {"step_time_s": 3.5, "timeline": line, "unlike_replicas": unlike})
    assert [(one["name"], one["args"].get("gpus"), one["tid"], one["dur"]) for one in found] == [
        ("tp4", 4, 1, 3e6), ("tp2", 2, 5, 2.5e6), ("tp2", 2, 7, 2.75e6), ("reduce: tp4", None, 0, 5e5),
    ]  # fmt: skip


def test_another_file_is_none(tmp_path: Path) -> None:
    """A plan of one length is for the trace of plans."""
    file = tmp_path / "plan.json"
    file.write_text('{"plan": {}}', encoding="utf-8")
    assert lengths_in(file) is None
