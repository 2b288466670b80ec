"""Products and collectives read from traces of PyTorch's profiler.

The operators are as PyTorch 2.13 writes them on a CPU; the kernels have the fields that its documentation and
source state.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milpplan import load_hardware
from milpplan.calibration import read_trace
from milpplan.cli.app import app
from milpplan.errors import InvalidInputError

Event = dict[str, Any]


def product(identifier: int, name: str, dims: list[list[int]], dtype: str, *kernels_us: float) -> list[Event]:
    """An operator and its kernels."""
    words = {
        "External id": identifier,
        "Input Dims": dims,
        "Input type": [dtype] * len(dims),
        "Ev Idx": identifier,
    }
    operator = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1.0, "dur": 5.0, "args": words}
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "sm90_gemm", "dur": us, "args": {"External id": identifier}}
        for us in kernels_us
    ]
    return [operator, *kernels]


def collective(name: str, sent: int, received: int, ranks: list[int] | str, us: float) -> Event:
    """A kernel of NCCL with BFloat16 elements."""
    size = len(json.loads(ranks)) if isinstance(ranks, str) and "..." not in ranks else 8
    words = {
        "Collective name": name,
        "dtype": "BFloat16",
        "In msg nelems": sent,
        "Out msg nelems": received,
        "Group size": size if isinstance(ranks, str) else len(ranks),
        "Process Group Ranks": ranks,
    }
    return {"ph": "X", "cat": "kernel", "name": f"ncclDevKernel_{name}", "dur": us, "args": words}


def trace(path: Path, events: list[Event]) -> Path:
    """Write the trace."""
    data = json.dumps({"schemaVersion": 1, "record_shapes": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


NODE = list(range(8))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_products_have_the_median_time_of_their_kernels(name: str, tmp_path: Path) -> None:
    """Two kernels of an operator add up; the left factor of ``addmm`` is its second input; float32 is left out."""
    events = [
        *product(1, "aten::mm", [[4096, 1024], [1024, 8192]], "c10::BFloat16", 90.0, 10.0),
        *product(2, "aten::mm", [[4096, 1024], [1024, 8192]], "c10::BFloat16", 104.0),
        *product(3, "aten::addmm", [[512], [4096, 2048], [2048, 512], [], []], "c10::Half", 50.0),
        *product(4, "aten::_scaled_mm", [[4096, 1024], [1024, 8192]], "c10::Float8_e4m3fn", 60.0),
        *product(5, "aten::mm", [[4096, 1024], [1024, 8192]], "float", 500.0),
        *product(6, "aten::mm", [[64, 64], [64, 64]], "c10::BFloat16"),
    ]
    products, logs, notes = read_trace(trace(tmp_path / name, events), 8)
    rows = {
        (part.precision, *map(int, row)): time_s
        for part in products
        for *row, time_s in zip(part.m, part.n, part.k, part.time_s, strict=True)
    }
    assert rows == pytest.approx(
        {
            ("bf16", 4096, 8192, 1024): 102e-6,
            ("bf16", 4096, 512, 2048): 50e-6,
            ("fp8", 4096, 8192, 1024): 60e-6,
        }
    )
    assert not logs
    assert notes == ["1 product of other number formats left out"]


def test_the_shortest_collective_of_a_size_counts(tmp_path: Path) -> None:
    """Bytes are those of the larger side; two kernels are too few; groups across parts of nodes are left out."""
    events = [
        *(collective("allreduce", 2**20, 2**20, NODE, us) for us in (90.0, 70.0, 400.0)),
        *(collective("_allgather_base", 2**17, 2**20, "[8, 9, 10, 11, 12, 13, 14, 15]", 50.0) for _ in range(3)),
        *(collective("_reduce_scatter_base", 2**20, 2**16, list(range(16)), 200.0) for _ in range(3)),
        *(collective("all_to_all", 2**20, 2**20, NODE, 60.0) for _ in range(2)),
        *(collective("allreduce", 2**20, 2**20, [0, 8], 60.0) for _ in range(3)),
        *(collective("allreduce", 2**20, 2**20, "[0, 1, ..., 7]", 60.0) for _ in range(3)),
        *(collective("broadcast", 2**20, 2**20, NODE, 60.0) for _ in range(3)),
    ]
    products, logs, notes = read_trace(trace(tmp_path / "trace.json", events), 8)
    assert not products
    assert {(log.operation, log.num_ranks): log.rates for log in logs} == {
        ("all_reduce", 8): pytest.approx({2**21: 2 * 7 / 8 * 2**21 / 70e-6}),
        ("all_gather", 8): pytest.approx({2**21: 7 / 8 * 2**21 / 50e-6}),
        ("reduce_scatter", 16): pytest.approx({2**21: 15 / 16 * 2**21 / 200e-6}),
    }
    assert notes[0].startswith("9 collectives left out")


def test_a_trace_becomes_tables(tmp_path: Path) -> None:
    """The command writes tables of both kinds, and the overlay is a hardware description."""
    events = [
        *(collective("allreduce", 2**24, 2**24, NODE, 200.0) for _ in range(3)),
        *(
            event
            for number, m in enumerate((2048, 4096, 8192, 16384))
            for event in product(
                number, "aten::mm", [[m, 4096], [4096, 4096]], "c10::BFloat16", 2e6 * m * 4096**2 / 5e14
            )
        ),
    ]
    path, out = trace(tmp_path / "trace.json.gz", events), tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["calibrate", str(path), "--hardware", "dgx-h100", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "tables: all_reduce, gemm_bf16 (5 measurements)" in done.stdout
    table = load_hardware(out).scale_up.all_reduce
    assert table.bus_bandwidth_bytes_per_s[table.num_gpus.index(8)][-1] == pytest.approx(1.75 * 2**25 / 200e-6)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (product(1, "aten::mm", [[512, 512], [512, 512]], "c10::BFloat16"), "has 0 kernels of GPUs"),
        (product(1, "aten::mm", [[512, 512]], "c10::BFloat16"), "is no trace"),
        ([{"cat": "kernel", "dur": 5.0, "args": {"Collective name": "allreduce"}}], "is no trace"),
    ],
)
def test_traces_without_kernels_are_refused(events: list[Event], words: str, tmp_path: Path) -> None:
    """A trace of a CPU, and damaged ones."""
    with pytest.raises(InvalidInputError, match=words):
        read_trace(trace(tmp_path / "trace.json", events), 8)
