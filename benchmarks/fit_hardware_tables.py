"""(Re)create the measured tables of ``hardware/*.toml`` from aiconfigurator's public measurements.

The input is CSV (gzip or plain), exported from the parquet files of ai-dynamo/aiconfigurator@095f58a51
(aic-core/src/aiconfigurator_core/systems/data/<system>/...):

- gemm: columns system, m, n, k, latency_us (gemm/trtllm/**/gemm_perf.parquet, bfloat16)
- nccl: columns system, op_name, num_gpus, bytes, latency_us (comm/nccl/**/nccl_perf.parquet)
- attention: columns system, batch_size, isl, num_heads, causal_eff (context attention, bf16, head size 128)

Prints TOML fragments on stdout and the fit error on stderr. Examples:

    fit_hardware_tables.py gemm gemm.csv.gz --system h100_sxm --preset hardware/dgx-h100.toml
    fit_hardware_tables.py gemm gemm.csv.gz --system h100_sxm --preset hardware/dgx-h100.toml \
        --precision fp8 --large 0.616 --narrow 0.217
    fit_hardware_tables.py gemm nvfp4.csv.gz --system gb200 --preset hardware/gb200-nvl72.toml --precision nvfp4 \
        --peak 10e15 --cast-bytes 2.5625
    fit_hardware_tables.py nccl nccl.csv.gz --system h100_sxm
    fit_hardware_tables.py nccl nccl.csv.gz --system gb200 --grow-to 72
    fit_hardware_tables.py nccl nccl.csv.gz --system l40s --groups-like rtx_pro_6000_server
    fit_hardware_tables.py mesh --links-bytes-per-s 47.7e9 46.2e9 44.7e9
    fit_hardware_tables.py attention attention.csv.gz --system a100_sxm
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import sys
import tomllib
from pathlib import Path

import numpy as np

from milpplan.problem.hardware import Accelerator, GemmTable, HardwareSpec, Precision, PrecisionName
from milpplan.simulation.layers.kernels import (
    FloatArray,
    engine_of,
    gemm_bytes,
    gemm_s,
    interpolate_table,
)

M_AXIS = (128, 256, 512, 1024, 4096, 16384)
N_AXIS = M_AXIS
K_AXIS = M_AXIS
MESSAGE_BYTES = tuple(2**power for power in (16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29))
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
TOML_NAME = {"alltoall": "all_to_all"}
MESH_LATENCY_S = (23.8e-6, 17.0e-6, 16.2e-6, 14.8e-6)
"""Latencies of the same operations among 8 A100 (least-squares t = latency + factor * bytes / rate)."""
SMOOTHNESS = 0.3
"""Weight of second differences against the data; small, it only fills grid points that few shapes touch."""


def rows_of(path: Path, system: str) -> list[dict[str, str]]:
    """The rows of one system."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["system"] == system]


def gemm_columns(rows: list[dict[str, str]]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """m, n, k and seconds of the shapes with m a multiple of 8, as every training shape is."""
    table = np.array([[float(row[name]) for name in ("m", "n", "k", "latency_us")] for row in rows])
    table = table[table[:, 0] % 8 == 0]
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3] * 1e-6


def design_matrix(sizes: tuple[FloatArray, FloatArray, FloatArray]) -> FloatArray:
    """Trilinear weights of every grid point for every shape, [shapes, points]."""
    columns = []
    for axis, size in zip((M_AXIS, N_AXIS, K_AXIS), sizes, strict=True):
        position = np.interp(np.log(size), np.log(np.array(axis, dtype=np.float64)), np.arange(len(axis)))
        below = np.minimum(position.astype(np.intp), len(axis) - 2)
        weight = position - below
        basis = np.zeros((len(size), len(axis)))
        basis[np.arange(len(size)), below] = 1 - weight
        basis[np.arange(len(size)), below + 1] += weight
        columns.append(basis)
    product = np.einsum("pi,pj,pl->pijl", *columns)
    return np.asarray(product.reshape(len(sizes[0]), -1))


def second_differences(shape: tuple[int, ...]) -> FloatArray:
    """Rows that vanish on tables linear along each axis, [rows, points]."""
    identity = np.eye(int(np.prod(shape))).reshape(*shape, -1)
    blocks = [np.diff(identity, 2, axis=axis).reshape(-1, identity.shape[-1]) for axis in range(3)]
    return np.concatenate(blocks)


def least_absolute(design: FloatArray, target: FloatArray, smooth: FloatArray) -> FloatArray:
    """Minimise sum |design x / target - 1| + smoothness by reweighted least squares."""
    relative = design / target[:, None]
    penalty = SMOOTHNESS**2 * len(target) / len(smooth) * smooth.T @ smooth
    weight = np.ones(len(target))
    solution = np.zeros(design.shape[1])
    for _ in range(25):
        weighted = relative * weight[:, None]
        solution = np.linalg.solve(weighted.T @ relative + penalty, weighted.sum(axis=0))
        weight = 1 / np.maximum(np.abs(relative @ solution - 1), 0.02)
        weight /= weight.mean()
    return solution


def three_digits(values: FloatArray) -> FloatArray:
    """Rounded up to three significant digits; stays the float nearest to that decimal."""
    places = 2 - np.floor(np.log10(values)).astype(int)
    rounded = [
        round(math.ceil(v * 10**p - 1e-9) / 10**p, p) for v, p in zip(values.flat, places.flat, strict=True)
    ]
    return np.array(rounded).reshape(values.shape)


def keep_time_monotone(efficiency: FloatArray) -> FloatArray:
    """Raise small shapes until no larger shape is faster: e[i] >= e[i+1] / (1 + log(axis[i+1] / axis[i]))."""
    raised = three_digits(efficiency)
    for _ in range(5):
        for axis, sizes in enumerate((M_AXIS, N_AXIS, K_AXIS)):
            view = np.moveaxis(raised, axis, 0)
            for i in range(len(sizes) - 2, -1, -1):
                least = view[i + 1] / (1 + np.log(sizes[i + 1] / sizes[i]))
                view[i] = np.maximum(view[i], three_digits(least))
    return raised


def as_table(efficiency: FloatArray) -> GemmTable:
    """The record of a table; ``efficiency`` has shape [m, n, k]."""
    safe = keep_time_monotone(np.clip(efficiency, 0.002, 1.0))
    planes = tuple(tuple(tuple(row) for row in plane) for plane in safe.tolist())
    return GemmTable(m=M_AXIS, n=N_AXIS, k=K_AXIS, efficiency=planes)


def fit_gemm(
    accelerator: Accelerator,
    precision: PrecisionName,
    peak_flops_per_s: float,
    sizes: tuple[FloatArray, FloatArray, FloatArray],
    time_s: FloatArray,
) -> GemmTable:
    """Efficiency of the products that memory does not limit, latency taken off the measured time."""
    m, n, k = sizes
    memory_s = gemm_bytes(precision, m, n, k) / accelerator.memory_rate_bytes_per_s
    kernel_s = time_s - accelerator.kernel_latency_s
    use = (kernel_s > 0.3 * time_s) & (memory_s < 0.9 * kernel_s) & (n >= 128) & (k >= 128)
    target = 2 * m[use] * n[use] * k[use] / kernel_s[use] / peak_flops_per_s
    shape = (len(M_AXIS), len(N_AXIS), len(K_AXIS))
    design = design_matrix((m[use], n[use], k[use]))
    solution = least_absolute(design, target, second_differences(shape))
    return as_table(solution.reshape(shape))


def with_table(
    accelerator: Accelerator, precision: PrecisionName, table: GemmTable, peak: float | None = None
) -> Accelerator:
    """The accelerator with one table replaced."""
    peak = peak or engine_of(accelerator, precision).peak_flops_per_s
    return accelerator.model_copy(update={precision: Precision(peak_flops_per_s=peak, gemm=table)})


def scaled_table(table: GemmTable, large: float, narrow: float) -> GemmTable:
    """Multiply by a factor of min(n, k): ``narrow`` up to 768, ``large`` from 4096, log-linear between."""
    smallest = np.minimum.outer(np.array(N_AXIS), np.array(K_AXIS))
    factor = np.interp(np.log(smallest), np.log([768, 4096]), [narrow, large])
    return as_table(np.array(table.efficiency) * factor[None])


def median_efficiencies(
    accelerator: Accelerator, precision: PrecisionName, m: FloatArray, n: FloatArray, k: FloatArray
) -> tuple[float, float]:
    """Median fraction of peak that ``gemm_s`` predicts for large (m, n, k >= 4096) and narrow shapes."""
    peak = engine_of(accelerator, precision).peak_flops_per_s
    fraction = 2 * m * n * k / gemm_s(accelerator, precision, m, n, k) / peak
    least = np.minimum(n, k)
    narrow = (m >= 2048) & (least >= 512) & (least <= 1024)
    return float(np.median(fraction[np.minimum(m, least) >= 4096])), float(np.median(fraction[narrow]))


def meet_quantiles(
    accelerator: Accelerator,
    precision: PrecisionName,
    source: GemmTable,
    shapes: tuple[FloatArray, FloatArray, FloatArray],
    wanted: tuple[float, float],
) -> GemmTable:
    """Scale ``source`` until the medians of large and narrow shapes are the published ones."""
    factors = np.ones(2)
    table = source
    for _ in range(30):
        table = scaled_table(source, factors[0], factors[1])
        seen = median_efficiencies(with_table(accelerator, precision, table), precision, *shapes)
        factors *= np.array(wanted) / np.array(seen)
    print(f"derived: factors {factors.round(3)}, medians {np.round(seen, 3)}", file=sys.stderr)
    return table


def print_gemm(table: GemmTable, precision: str) -> None:
    """The TOML fragment of a table."""
    print(f"[accelerator.{precision}.gemm]")
    for axis in ("m", "n", "k"):
        print(f"{axis} = {[int(size) for size in getattr(table, axis)]}")
    print("efficiency = [")
    for plane in table.efficiency:
        print("  [")
        for row in plane:
            print(f"    {list(row)},")
        print("  ],")
    print("]")


def gemm_command(options: argparse.Namespace) -> None:
    """Fit a number format, or derive its table from a fit of bf16 and published medians."""
    spec = HardwareSpec.model_validate(tomllib.loads(options.preset.read_text(encoding="utf-8")))
    target = spec.accelerator
    measured = (
        spec
        if options.measured_on is None
        else HardwareSpec.model_validate(tomllib.loads(options.measured_on.read_text(encoding="utf-8")))
    )
    m, n, k, time_s = gemm_columns(rows_of(options.csv, options.system))
    gpu, fitted_format = measured.accelerator, "bf16" if options.large is not None else options.precision
    time_s = time_s - options.cast_bytes * m * k / gpu.memory_rate_bytes_per_s
    peak = options.peak or engine_of(gpu, fitted_format).peak_flops_per_s
    table = fit_gemm(gpu, fitted_format, peak, (m, n, k), time_s)
    test = (m >= 512) & (n >= 256) & (k >= 256)
    fitted = with_table(gpu, fitted_format, table, peak)
    error = np.abs(gemm_s(fitted, fitted_format, m, n, k) / time_s - 1)[test]
    quantiles = np.quantile(error, [0.5, 0.9]) * 100
    print(
        f"{options.system}: fitted to the compute-limited of {len(m)} shapes; on {test.sum()} with "
        "m >= 512, n >= 256, k >= 256 the "
        f"absolute error of time is {quantiles[0]:.1f} % in the median, {quantiles[1]:.1f} % at p90; "
        f"interpolated efficiency at 8192^3 {float(interpolate_table(table, 8192, 8192, 8192)):.3f}",
        file=sys.stderr,
    )
    if options.large is not None:
        narrow = options.narrow or options.large * median_efficiencies(fitted, "bf16", m, n, k)[1]
        table = meet_quantiles(target, options.precision, table, (m, n, k), (options.large, narrow))
    print_gemm(table, options.precision)


def measured_times(rows: list[dict[str, str]], op: str) -> dict[int, FloatArray]:
    """Seconds by number of GPUs, one value a message size, made non-decreasing in the message."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["op_name"] == op:
            found.setdefault(int(row["num_gpus"]), {})[int(row["bytes"])] = float(row["latency_us"]) * 1e-6
    return {
        count: np.maximum.accumulate([times[size] for size in MESSAGE_BYTES])
        for count, times in sorted(found.items())
    }


def bus_factor(op: str, count: int) -> float:
    """nccl-tests: bus bandwidth = factor * bytes / time."""
    return (2 if op == "all_reduce" else 1) * (count - 1) / count


def grown_times(times: dict[int, FloatArray], op: str, largest: int) -> dict[int, FloatArray]:
    """Larger groups at the bus bandwidth of the largest measured one, with a latency that grows.

    All-reduce pays one in-switch reduction (NVLS, 25 us), all-gather and reduce-scatter 1.9 us a further ring
    hop (LL128), all-to-all 3.4 us for every 8 further peers. Source: NVIDIA/nccl src/graph/tuning.cc.
    """
    base = max(times)
    counts = [*(count for count in (8, 16, 32, 64) if base < count < largest), largest]
    grown = dict(times)
    for count in counts:
        more = count - base
        latency = {"all_reduce": 25e-6, "alltoall": 3.4e-6 * more / 8}.get(op, 1.9e-6 * more)
        grown[count] = times[base] * bus_factor(op, count) / bus_factor(op, base) + latency
    return grown


def print_bus_tables(times_of: dict[str, dict[int, FloatArray]]) -> None:
    """The TOML fragments of the four operations."""
    for op, times in times_of.items():
        print(f"[scale_up.{TOML_NAME.get(op, op)}]\nnum_gpus = {list(times)}")
        print(f"message_bytes = {list(MESSAGE_BYTES)}\nbus_bandwidth_bytes_per_s = [")
        for count, row in times.items():
            rates = bus_factor(op, count) * np.array(MESSAGE_BYTES) / row
            print(f"  [{', '.join(f'{rate:.3g}' for rate in rates)}],")
        print("]")


def nccl_command(options: argparse.Namespace) -> None:
    """Tables by operation, GPUs and message of one system, or derived from its smallest group."""
    rows = rows_of(options.csv, options.system)
    tables = {op: measured_times(rows, op) for op in OPERATIONS}
    if options.groups_like is not None:
        like = rows_of(options.csv, options.groups_like)
        for op in OPERATIONS:
            other = measured_times(like, op)
            tables[op] = {count: tables[op][2] * other[count] / other[2] for count in other}
    if options.grow_to is not None:
        tables = {op: grown_times(times, op, options.grow_to) for op, times in tables.items()}
    print_bus_tables(tables)


def mesh_command(options: argparse.Namespace) -> None:
    """A full mesh: n GPUs use n - 1 links each; time = latency + factor * bytes / ((n - 1) * link rate)."""
    latency_s = dict(zip(OPERATIONS, options.latency_s, strict=True))
    tables = {}
    for op in OPERATIONS:
        tables[op] = {
            count: latency_s[op] + bus_factor(op, count) * np.array(MESSAGE_BYTES) / ((count - 1) * link)
            for count, link in zip((2, 4, 8), options.links_bytes_per_s, strict=True)
        }
    print_bus_tables(tables)


def attention_command(options: argparse.Namespace) -> None:
    """Median causal efficiency by length where batch times heads fills the accelerator."""
    by_length: dict[int, list[float]] = {}
    for row in rows_of(options.csv, options.system):
        heads = int(row["num_heads"])
        if heads >= 8 and int(row["batch_size"]) * heads >= 32 and int(row["isl"]) >= 256:
            by_length.setdefault(int(row["isl"]), []).append(float(row["causal_eff"]))
    lengths = sorted(by_length)
    print(f"[accelerator.attention_forward]\nsize = {lengths}")
    print(f"value = {[float(f'{np.median(by_length[length]):.3g}') for length in lengths]}")


def command_line() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    gemm = commands.add_parser("gemm", help=gemm_command.__doc__)
    nccl = commands.add_parser("nccl", help=nccl_command.__doc__)
    attention = commands.add_parser("attention", help=attention_command.__doc__)
    mesh = commands.add_parser("mesh", help=mesh_command.__doc__)
    for sub, command in ((gemm, gemm_command), (nccl, nccl_command), (attention, attention_command)):
        sub.add_argument("csv", type=Path)
        sub.add_argument("--system", required=True, help="the system column, e.g. h100_sxm")
        sub.set_defaults(command=command)
    gemm.add_argument("--preset", type=Path, required=True, help="hardware file the table is for")
    gemm.add_argument("--measured-on", type=Path, help="hardware file of --system, if another")
    gemm.add_argument("--precision", choices=("bf16", "fp8", "nvfp4"), default="bf16")
    gemm.add_argument("--peak", type=float, help="dense FLOP/s of a format that the preset does not have yet")
    gemm.add_argument("--cast-bytes", type=float, default=0.0, help="bytes an element of (m x k) also moved")
    gemm.add_argument("--large", type=float, help="published median for m, n, k >= 4096: derive")
    gemm.add_argument("--narrow", type=float, help="published median for min(n, k) in 512..1024")
    nccl.add_argument("--grow-to", type=int, help="GPUs of a domain larger than what was measured")
    nccl.add_argument("--groups-like", help="system whose slowdown from 2 GPUs to more is taken over")
    mesh.add_argument("--links-bytes-per-s", type=float, nargs=3, required=True, help="for 2, 4, 8 GPUs")
    mesh.add_argument("--latency-s", type=float, nargs=4, default=MESH_LATENCY_S, help="by operation")
    mesh.set_defaults(command=mesh_command)
    return parser


def main() -> None:
    """Run one command."""
    options = command_line().parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
