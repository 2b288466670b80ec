"""Records of runs for tests: small, complete, and what milpplan itself would measure."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from milpplan.validation import compare_run
from milpplan.validation.runs import Run, RunFile, read_runs

RECORD: dict[str, Any] = {
    "id": "case-1",
    "group": "simumax-b200",
    "kind": "pretrain",
    "sweep_id": "case/sweep",
    "grade": "A",
    "missing": [],
    "flags": [],
    "model": {
        "name": "a small Llama",
        "layers": 8,
        "hidden": 1024,
        "ffn_hidden": 4096,
        "heads": 16,
        "kv_heads": 8,
        "vocab": 32000,
        "seq_len": 2048,
        "gated_mlp": True,
        "tied_embeddings": False,
        "moe": None,
    },
    "hardware": {
        "gpu": "H100",
        "gpu_mem_GB": 80,
        "gpus_total": 16,
        "gpus_per_node": 8,
        "interconnect": "InfiniBand",
    },
    "parallel": {
        "tp": 2,
        "pp": 2,
        "vpp": 1,
        "dp": 4,
        "cp": 1,
        "sp": True,
        "zero": 1,
        "fsdp": False,
        "micro_batch": 1,
        "global_batch": 64,
        "grad_accum": 16,
        "recompute": "none",
        "precision": "bf16",
        "schedule": "1F1B",
    },
    "measured": {"status": "ok", "step_time_s": 1.0},
}


@cache
def shipped_runs() -> RunFile:
    """The published runs that ship, read once: they are thousands."""
    return read_runs(None)


def record(**changes: Any) -> dict[str, Any]:
    """A complete record; ``section__field=value`` changes a field of a section."""
    data = copy.deepcopy(RECORD)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            data[section][field] = value
        else:
            data[section] = value
    return data


def run(**changes: Any) -> Run:
    """The record as a run."""
    return Run.model_validate_json(json.dumps(record(**changes)), strict=True)


def exact_record(**changes: Any) -> dict[str, Any]:
    """A record whose step time is the one that the simulator gives."""
    data = record(**changes)
    one = compare_run(Run.model_validate_json(json.dumps(data), strict=True))
    data["measured"]["step_time_s"] = one.report.step_time_s
    data["measured"]["peak_mem_GiB"] = one.report.peak_memory_bytes / 2**30
    return data


def written(path: Path, records: object) -> Path:
    """The records as a JSON file."""
    path.write_text(json.dumps(records), encoding="utf-8")
    return path
