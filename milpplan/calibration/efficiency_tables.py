"""Efficiency tables of matrix products and curves of attention, corrected node by node to measured kernels."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from milpplan.calibration.fitting.least_squares import MAD_TO_SIGMA
from milpplan.errors import InvalidInputError
from milpplan.problem import Constants, Factor, GemmTable, HardwareSpec, SizeCurve, Tables
from milpplan.problem.hardware import PrecisionName
from milpplan.problem.reading import shown
from milpplan.simulation.layers import interpolate_curve, interpolate_table
from milpplan.simulation.layers.kernels import engine_of, gemm_bytes

FloatArray = npt.NDArray[np.float64]

SMOOTHNESS: Final = 0.3
"""One sigma of a node's correction around the mean correction, relative."""
NOISE: Final = 0.03
"""One sigma of a measurement, relative."""
ROUNDS: Final = 5
MIN_EFFICIENCY, MAX_EFFICIENCY = 1e-4, 1.5
"""Bounds on efficiencies of nodes."""
MAX_STEPS: Final = 100
"""Maximum number of steps of the projected Newton method, which takes about ten."""
OPTIMAL: Final = 1e-10
"""Gradient, relative to the right-hand side, below which a point counts as optimal."""


def hat_weights(*axes: tuple[tuple[float, ...], FloatArray]) -> FloatArray:
    """Compute interpolation weights [rows, nodes] from axes with the sizes of the rows on them.

    An interpolation that is linear in the logarithms of the sizes is linear in the nodes, so each column is that
    of a unit node.
    """
    parts = []
    for axis, sizes in axes:
        grid = np.log(np.array(axis, dtype=np.float64))
        hats = np.eye(len(grid))
        parts.append(np.stack([np.interp(np.log(sizes), grid, hat) for hat in hats], axis=1))
    return reduce(lambda left, right: (left[:, :, None] * right[:, None, :]).reshape(len(left), -1), parts)


def corrected(weights: FloatArray, nodes: FloatArray, efficiency: FloatArray) -> FloatArray:
    """Fit node values: the description's times a common factor times corrections near 1.

    The objective is the sum of squares of the relative errors of ``efficiency`` [rows], and of the corrections'
    differences from their mean; rows with large errors count less. ``weights`` [rows, nodes], ``nodes`` [nodes] of
    the description.
    """
    common = float(np.median(efficiency / (weights @ nodes)))
    start = np.clip(nodes * common, MIN_EFFICIENCY, MAX_EFFICIENCY)
    # A node without measurements beside it keeps the mean correction.
    beside = weights.any(axis=0)
    # Normal equations, because there are many measurements and a few hundred nodes.
    rows = (weights * start / efficiency[:, None])[:, beside]
    low, high = (MIN_EFFICIENCY / start)[beside], np.maximum(MAX_EFFICIENCY / start, 1.001)[beside]
    trust = np.ones(len(efficiency))
    near = np.ones(len(low))
    for _ in range(ROUNDS):
        scaled = rows * trust[:, None] / NOISE
        matrix = scaled.T @ scaled + np.eye(len(low)) / SMOOTHNESS**2
        right = scaled.T @ (trust / NOISE) + np.ones(len(low)) / SMOOTHNESS**2
        near = least_within(matrix, right, low, high)
        # Weights of soft_l1, whose square roots multiply the rows.
        trust = (1.0 + ((rows @ near - 1.0) / NOISE) ** 2) ** -0.25
    correction = np.ones(len(start))
    correction[beside] = near
    return np.clip(start * correction, MIN_EFFICIENCY, MAX_EFFICIENCY)


def least_within(matrix: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Minimise x'Ax/2 - b'x between bounds, ``matrix`` A being positive definite.

    Source: Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J.
    Control Optim. 20 (1982), section 2: Newton steps over the variables that no bound holds, shortened until they
    descend.
    """

    def value(at: FloatArray) -> float:
        return float(at @ (matrix @ at) / 2 - right @ at)

    x = np.clip(np.ones(len(low)), low, high)
    for _ in range(MAX_STEPS):
        gradient = matrix @ x - right
        at_bound = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
        free = ~at_bound
        if not free.any() or np.abs(gradient[free]).max() <= OPTIMAL * np.abs(right).max():
            break
        step = np.zeros(len(low))
        step[free] = cho_solve(cho_factor(matrix[np.ix_(free, free)]), gradient[free])
        before, length = value(x), 1.0
        while value(np.clip(x - length * step, low, high)) >= before and length > OPTIMAL:
            length /= 2
        if length <= OPTIMAL:
            break
        x = np.clip(x - length * step, low, high)
    return x


_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TIMES: Final = {"time": 1.0} | {f"{word}_{unit}": s for word in ("time", "latency") for unit, s in _UNITS.items()}
TERA: Final = 1e12
MAX_ROWS: Final = 200_000
MAX_ELEMENTS: Final = 10**9
MEMORY_MARGIN: Final = 1.2
"""Factor over its memory traffic below which a product's time does not show the rate of the matrix engine."""
MIN_FOR_SIGMA: Final = 4
MAX_SIGMA: Final = 0.5
OUTLIER: Final = 5
"""Sigmas beyond which a product is reported as an outlier."""
_DO: Final = (
    "Give a CSV with the columns m,n,k and one of time_s, time_ms, time_us (or latency_...) or tflops; precision "
    "if fp8."
)


@dataclass(frozen=True, slots=True)
class Products:
    """Measured products (m x k)(k x n) of one number format, seconds each."""

    precision: PrecisionName
    m: FloatArray
    n: FloatArray
    k: FloatArray
    time_s: FloatArray


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Tables, notes, rows used, and mean absolute errors of the efficiency.

    ``constants`` are factors of 1 with the tables' one sigma: the robust scatter of products around a table that
    was fitted without them, as if it were common to all products (upper).
    """

    tables: Tables
    constants: Constants
    told: tuple[str, ...]
    num_rows: int
    error_before: float
    error_after: float


def is_gemm_csv(text: str) -> bool:
    """Test whether the first line names m, n and k."""
    first = text.lstrip().splitlines()[:1]
    return bool(first) and {"m", "n", "k"} <= {word.strip().lower() for word in first[0].split(",")}


def parse_gemm(text: str, source: str) -> list[Products]:
    """Parse the products of a CSV by number format.

    Raises:
        InvalidInputError: a column is missing, a value is not a positive number, or there are too many rows.
    """
    reader = csv.DictReader(io.StringIO(text.lstrip()))
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    measured = next((name for name in (*TIMES, "tflops") if name in reader.fieldnames), None)
    if measured is None:
        raise InvalidInputError(f"{source} has the columns {shown(reader.fieldnames)}.", "Expected a time.", _DO)
    rows: dict[str, list[tuple[float, ...]]] = {"bf16": [], "fp8": []}
    systems: set[str] = set()
    try:
        for number, row in enumerate(reader, start=2):
            if number > MAX_ROWS:
                raise InvalidInputError(f"{source} has more than {MAX_ROWS:,} rows.", "Expected fewer.", _DO)
            precision = (row.get("precision") or row.get("dtype") or "bf16").strip().lower()
            if precision not in rows:
                raise InvalidInputError(
                    f"{source}:{number}: precision {shown(precision)}.", "Expected bf16 or fp8.", _DO
                )
            systems.add((row.get("system") or "").strip())
            if len(systems) > 1:
                raise InvalidInputError(
                    f"{source}:{number}: system {shown(row.get('system'))} beside {shown(min(systems))}.",
                    "Expected products of one system.",
                    "Keep the rows of the accelerator that --hardware names.",
                )
            rows[precision].append(_row(row, measured, f"{source}:{number}"))
    except csv.Error as error:
        raise InvalidInputError(f"{source} is no CSV: {error}.", "Expected rows of numbers.", _DO) from error
    products = [_products(name, values) for name, values in rows.items() if values]
    if not products:
        raise InvalidInputError(f"{source} has no row.", "Expected measured products.", _DO)
    return products


def _products(name: str, values: list[tuple[float, ...]]) -> Products:
    precision: PrecisionName = "fp8" if name == "fp8" else "bf16"
    m, n, k, time_s = np.array(values, dtype=np.float64).T
    return Products(precision, m, n, k, time_s)


def _row(row: dict[str, Any], measured: str, where: str) -> tuple[float, ...]:
    """Parse m, n, k and seconds."""
    try:
        m, n, k, value = (float(row[name]) for name in ("m", "n", "k", measured))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidInputError(
            f"{where}: {shown(dict(row))}.", f"Expected numbers for m, n, k and {measured}.", _DO
        ) from error
    whole = all(math.isfinite(size) and 1 <= size <= MAX_ELEMENTS for size in (m, n, k))
    if not whole or not (math.isfinite(value) and 0 < value < 1e9):
        raise InvalidInputError(
            f"{where}: m={m:g}, n={n:g}, k={k:g}, {measured}={value:g}.", "Expected positive numbers.", _DO
        )
    time_s = 2.0 * m * n * k / (value * TERA) if measured == "tflops" else value * TIMES[measured]
    return m, n, k, time_s


def fit_gemm(products: list[Products], hardware: HardwareSpec) -> GemmFit:
    """Fit tables to measured products, by number format.

    The objective, over a correction of every node of the description's table, is the sum of squares of the
    relative errors of the efficiency, and of the corrections' differences from their mean; rows with large errors
    count less.

    Raises:
        InvalidInputError: no product is limited by the matrix engine, or the accelerator lacks the format.
    """
    tables: dict[str, GemmTable] = {}
    sigmas: dict[str, Factor] = {}
    notes: list[str] = []
    before: list[float] = []
    after: list[float] = []
    for part in products:
        table, sigma, errors = _fitted(part, hardware)
        tables[f"gemm_{part.precision}"] = table
        sigmas["gemm_efficiency" if part.precision == "bf16" else "gemm_fp8_efficiency"] = Factor(
            value=1.0, one_sigma=sigma
        )
        outliers = int(np.sum(errors[1] > OUTLIER * max(sigma, NOISE)))
        if outliers:
            notes.append(f"{part.precision}: {outliers:,} outliers, beyond {OUTLIER} sigma, that hardly count")
        before += errors[0].tolist()
        after += errors[1].tolist()
        used = len(errors[1])
        left = len(part.m) - used
        notes.append(f"{part.precision}: {used:,} products used, {left:,} limited by memory or launch left out")
    return GemmFit(
        Tables(**tables),
        Constants(**sigmas),
        tuple(notes),
        len(before),
        float(np.mean(before)),
        float(np.mean(after)),
    )


def _fitted(part: Products, hardware: HardwareSpec) -> tuple[GemmTable, float, tuple[FloatArray, FloatArray]]:
    """Fit a table; return it, its one sigma, and errors of the used products in the description's and the new
    table."""
    accelerator = hardware.accelerator
    engine = engine_of(accelerator, part.precision)
    kernel_s = part.time_s - accelerator.kernel_latency_s
    memory_s = gemm_bytes(part.precision, part.m, part.n, part.k) / accelerator.memory_rate_bytes_per_s
    use = kernel_s > MEMORY_MARGIN * memory_s
    if not use.any():
        raise InvalidInputError(
            f"None of the {len(use):,} {part.precision} products takes longer than its memory traffic.",
            "Expected products that the matrix engine limits.",
            "Measure larger m, n and k, and check the unit of the times.",
        )
    m, n, k = part.m[use], part.n[use], part.k[use]
    efficiency = np.clip(2 * m * n * k / kernel_s[use] / engine.peak_flops_per_s, MIN_EFFICIENCY, MAX_EFFICIENCY)
    weights = hat_weights((engine.gemm.m, m), (engine.gemm.n, n), (engine.gemm.k, k))
    nodes = np.array(engine.gemm.efficiency, dtype=np.float64)
    fitted = corrected(weights, nodes.ravel(), efficiency).reshape(nodes.shape)
    table = engine.gemm.model_copy(
        update={"efficiency": tuple(tuple(tuple(map(float, row)) for row in plane) for plane in fitted)}
    )
    errors = tuple(
        np.abs(interpolate_table(candidate, m, n, k) / efficiency - 1.0) for candidate in (engine.gemm, table)
    )
    return table, _one_sigma(weights, nodes.ravel(), efficiency), (errors[0], errors[1])


def _one_sigma(weights: FloatArray, nodes: FloatArray, efficiency: FloatArray) -> float:
    """Estimate the robust scatter of every second product around a table fitted to the others, in turn; for fewer
    than four products, return the noise assumed for a product."""
    if len(efficiency) < MIN_FOR_SIGMA:
        return NOISE
    errors = []
    for start in (0, 1):
        kept, left_out = slice(1 - start, None, 2), slice(start, None, 2)
        table = corrected(weights[kept], nodes, efficiency[kept])
        errors.append(np.abs(weights[left_out] @ table / efficiency[left_out] - 1.0))
    return min(MAD_TO_SIGMA * float(np.median(np.concatenate(errors))), MAX_SIGMA)


Direction = Literal["attention_forward", "attention_backward"]

LATENCY_MARGIN: Final = 2.0
"""Factor over the latency of any kernel below which a kernel's time does not show its rate."""


@dataclass(frozen=True, slots=True)
class Attentions:
    """Measured causal kernels of one direction: tokens per sequence, FLOPs including the last tiles, and seconds
    each."""

    direction: Direction
    length: FloatArray
    flops: FloatArray
    time_s: FloatArray


@dataclass(frozen=True, slots=True)
class CurveFit:
    """Curve, number of rows used, and mean absolute errors of the efficiency."""

    curve: SizeCurve
    num_rows: int
    error_before: float
    error_after: float


def fit_curve(kernels: Attentions, hardware: HardwareSpec) -> CurveFit | None:
    """Fit the curve of a direction at the description's lengths; None where no kernel is long enough."""
    accelerator = hardware.accelerator
    before: SizeCurve = getattr(accelerator, kernels.direction)
    use = kernels.time_s > LATENCY_MARGIN * accelerator.kernel_latency_s
    if not use.any():
        return None
    length = kernels.length[use]
    kernel_s = kernels.time_s[use] - accelerator.kernel_latency_s
    peak = accelerator.bf16.peak_flops_per_s * hardware.software.attention_efficiency
    efficiency = np.clip(kernels.flops[use] / kernel_s / peak, MIN_EFFICIENCY, MAX_EFFICIENCY)
    nodes = corrected(hat_weights((before.size, length)), np.array(before.value, dtype=np.float64), efficiency)
    curve = before.model_copy(update={"value": tuple(map(float, nodes))})
    errors = [
        float(np.mean(np.abs(interpolate_curve(candidate, length) / efficiency - 1.0)))
        for candidate in (before, curve)
    ]
    return CurveFit(curve, int(use.sum()), errors[0], errors[1])
