"""Times of kernels on one accelerator: matrix products, memory-bound operators, flash attention.

Every function broadcasts floats and NumPy arrays and returns seconds as float64 in the broadcast shape
(zero-dimensional for scalars). A size of zero gives exactly 0 seconds, without latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.problem import Accelerator, GemmTable, Precision, SizeCurve
from milpplan.problem.hardware import QUANTIZATIONS, PrecisionName

FloatArray = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.floating] | npt.NDArray[np.integer]
Mask = Literal["causal", "full"]

FP32_BYTES = 4
BF16_BYTES = 2
TINY = np.finfo(np.float64).tiny
"""Smallest size whose logarithm is taken."""
EXPOSED_SUM_FRACTION = 0.6
"""Share of the traffic of accumulated gradients that the next tile does not hide.

Fitted to products of 100 us and more in MooreThreads/SimuMax@4dcaae513, 436 on B200 and 182 on A100: the median
absolute errors are 5.8 and 2.3 %, without the term 7.3 and 3.0 %, with all of the traffic 5.2 and 3.6 %.
"""
UNALIGNED_VECTOR_EFFICIENCY = 0.5
"""Share of the vector rate that unaligned products reach. Fitted to BLOOM's runs on A100 with head sizes 108, 150
and 450 (8 to 11 TFLOP/s against those with 144 and 216)."""
ATTENTION_TILE_ROWS = 128
"""Queries of one block of flash attention (Dao 2023, section 3.3)."""
LAST_TILE_FRACTION = 0.65
"""Mean share of its longest tile that a processor still works on when the other processors are done.

Fitted to 1,234 causal forwards on A100 with 128 * 2 processors over (batch * heads * length) above 0.06
(ai-dynamo/aiconfigurator@095f58a51, head size 128): the median error by class of size is within 9 % instead of -2
to -60 %. Kernels of MooreThreads/SimuMax@4dcaae513 (4096 tokens, head size 128) with 8 to 64 heads: forward on
A100 within 5 % instead of -36, on B200 -42 (8 heads) to -1 instead of -66 to -9. The backward adds the tiles once,
not 2.5 times: chosen on its kernels in the second source, within 9 % on A100 and 11 % on B200 instead of -25 and
-20; 2.5 times would be up to 15 and 47 % too slow. With 4 heads all are too fast.
"""


MIN_RUNS: Final = 1_024
"""Number of points from which on equal neighbours are looked for."""


@lru_cache(maxsize=256)
def _table_arrays(table: GemmTable) -> tuple[tuple[FloatArray, ...], FloatArray]:
    """Return the logarithms of the axes m, n, k, and the efficiencies [m, n, k]."""
    axes = tuple(np.log(np.array(axis, dtype=np.float64)) for axis in (table.m, table.n, table.k))
    return axes, np.array(table.efficiency, dtype=np.float64)


def interpolate_grid(log_axes: Sequence[FloatArray], values: FloatArray, sizes: Sequence[Numbers]) -> FloatArray:
    """Interpolate a table: linear in the logarithm of every size, constant outside.

    Args:
        log_axes: logarithms of the sizes of the grid, one array an axis.
        values: values at the points of the grid.
        sizes: where to interpolate, one an axis; any shapes that broadcast.

    Returns:
        Interpolated values, in the broadcast shape.
    """
    # Layouts that differ in the network alone lie side by side: of long rows one point of each run of equal ones.
    arrays, repeats = np.broadcast_arrays(*sizes), None
    length = arrays[0].size
    if length >= MIN_RUNS and arrays[0].ndim == 1:
        is_new = np.logical_or.reduce([array[1:] != array[:-1] for array in arrays])
        starts = np.concatenate([[0], np.flatnonzero(is_new) + 1])
        if 2 * len(starts) <= length:
            sizes, repeats = [array[starts] for array in arrays], np.diff(starts, append=length)
    first, steps, weights = np.zeros((), dtype=np.intp), np.zeros(1, dtype=np.intp), []
    for axis, size in zip(log_axes, sizes, strict=True):
        above = np.array((0, min(1, len(axis) - 1)))
        log_size = np.log(np.maximum(np.asarray(size, dtype=np.float64), TINY))
        # Grid points below, and the weight in [0, 1] of the next; sizes outside the axis are clamped.
        position = np.interp(log_size, axis, np.arange(len(axis), dtype=np.float64))
        below = np.minimum(position.astype(np.intp), max(len(axis) - 2, 0))
        weights.append(np.asarray(position - below)[..., None])
        first = first * len(axis) + below
        steps = (steps[:, None] * len(axis) + above).ravel()
    # All corners of a cell, the last axis fastest.
    corners = values.ravel()[first[..., None] + steps]
    for weight in reversed(weights):
        corners = (1 - weight) * corners[..., 0::2] + weight * corners[..., 1::2]
    values_at = np.asarray(corners[..., 0])
    return values_at if repeats is None else np.repeat(values_at, repeats)


def interpolate_curve(curve: SizeCurve, size: Numbers) -> FloatArray:
    """Interpolate a curve: linear in log(size) between its points, constant outside.

    size: any shape; returns the same shape.
    """
    log_size = np.log(np.maximum(np.asarray(size, dtype=np.float64), TINY))
    return np.interp(log_size, np.log(np.array(curve.size, dtype=np.float64)), curve.value)


def interpolate_table(table: GemmTable, m: Numbers, n: Numbers, k: Numbers) -> FloatArray:
    """Interpolate the efficiency of an (m x k)(k x n) product: trilinear in logarithms, constant outside.

    m, n, k: any shapes that broadcast; returns the broadcast shape.
    """
    return interpolate_grid(*_table_arrays(table), (m, n, k))


def engine_of(accelerator: Accelerator, precision: PrecisionName) -> Precision:
    """Return the matrix engine of a number format.

    Raises:
        InvalidInputError: the accelerator has no such engine.
    """
    engine = accelerator.engine(precision)
    if engine is None:
        raise InvalidInputError(
            f"{accelerator.name} has no {precision} matrix engine.",
            "A precision that the hardware file describes was expected.",
            f"Use bf16, or add accelerator.{QUANTIZATIONS[precision].rate or precision} to the hardware file.",
        )
    return engine


def gemm_bytes(precision: PrecisionName, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
    """Count the bytes that one product (m x k)(k x n) reads and writes.

    b (m k + k n) + 2 m n, with b = 2 in bf16, 1 in fp8 and ``Quantization.copy_bytes`` elsewhere, output in bf16:
    each operand passes memory once. m, n, k: elements, any shapes that broadcast.
    """
    return np.asarray(QUANTIZATIONS[precision].copy_bytes * (m * k + k * n) + BF16_BYTES * m * n)


def gemm_s(
    accelerator: Accelerator,
    precision: PrecisionName,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    count: Numbers = 1.0,
) -> FloatArray:
    """Time ``count`` equal matrix products (m x k)(k x n) in one launch, such as those of the experts of a rank.

    count * max(2 m n k / (peak * sustained * eff(m, n, k)), (b (m k + k n) + 2 m n) / (bandwidth * eff_bw)) +
    kernel latency, with b bytes an input element as in ``gemm_bytes``, output in bf16; 0 where count m n k =
    0. The efficiency is that of a single product: an upper bound where a product does not fill the accelerator.
    m, n, k: elements; count: products; any shapes that broadcast; returns seconds.
    Source: roofline (Williams et al. 2009) with a measured compute ceiling, the table of the hardware file.
    """
    engine = engine_of(accelerator, precision)
    m, n, k, count = (np.asarray(size, dtype=np.float64) for size in (m, n, k, count))
    efficiency = interpolate_grid(*_table_arrays(engine.gemm), (m, n, k))
    flops_per_s = engine.peak_flops_per_s * engine.sustained * efficiency
    memory_s = gemm_bytes(precision, m, n, k) / accelerator.memory_rate_bytes_per_s
    kernels_s = count * np.maximum(2 * m * n * k / flops_per_s, memory_s)
    empty = (m == 0) | (n == 0) | (k == 0) | (count == 0)
    return np.where(empty, 0.0, kernels_s + accelerator.kernel_latency_s)


def weight_gradient_s(
    accelerator: Accelerator,
    precision: PrecisionName,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    count: Numbers,
    sum_bytes: int,
    fused: bool = True,
) -> FloatArray:
    """Time ``count`` products (m x k)(k x n) that each add to a sum of ``sum_bytes`` bytes an element.

    ``gemm_s``, which writes 2 bytes an element, plus 0.6 * count m n (2 sum_bytes - 2) / (bandwidth *
    eff_bw): each tile reads and writes the sum at its end, partly beside the next tile. Where the sum is not
    ``fused`` into the product, another kernel reads the product and the sum and writes the sum: count m n (2 +
    2 sum_bytes) / (bandwidth * eff_bw), which nothing hides. m, n, k, count: any shapes that broadcast.
    Source: gradient accumulation fusion, Megatron-LM core/tensor_parallel/layers.py; ``EXPOSED_SUM_FRACTION``.
    """
    product = gemm_s(accelerator, precision, m, n, k, count)
    elements = np.asarray(count, dtype=np.float64) * np.asarray(m) * np.asarray(n)
    traffic = EXPOSED_SUM_FRACTION * elements * (2 * sum_bytes - BF16_BYTES)
    if not fused:
        traffic = elements * (2 * sum_bytes + BF16_BYTES)
    return np.where(product == 0, 0.0, product + traffic / accelerator.memory_rate_bytes_per_s)


def adapter_s(
    accelerator: Accelerator,
    rank: int,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    count: Numbers,
    sum_bytes: int,
    fused: bool,
) -> FloatArray:
    """Time ``count`` adapters B A of ``rank`` beside products (m x k)(k x n), in seconds [3, ...].

    Forward, input gradient and weight gradients, in bf16. Beside the products with A and B, the forward scales B A
    x (4 m n bytes) and adds it (6 m n); the backward scales the gradient (4 m n) and adds the input gradient (6 m
    k). Dropout of x is not priced. m, n, k, count: any shapes that broadcast.
    Source: Hugging Face PEFT, src/peft/tuners/lora/layer.py (``Linear.forward``).
    """
    r, rows = float(rank), np.asarray(count, dtype=np.float64) * np.asarray(m)
    scale = memory_bound_s(accelerator, 2 * BF16_BYTES * rows * n)
    seconds = [
        scale + memory_bound_s(accelerator, 3 * BF16_BYTES * rows * n),
        scale + memory_bound_s(accelerator, 3 * BF16_BYTES * rows * k),
        np.zeros(()),
    ]
    for row, (inner, outer) in ((0, (k, n)), (1, (n, k))):
        seconds[row] = seconds[row] + gemm_s(accelerator, "bf16", m, r, inner, count)
        seconds[row] = seconds[row] + gemm_s(accelerator, "bf16", m, outer, r, count)
    for outputs, inputs in ((r, k), (n, r)):
        seconds[2] = seconds[2] + weight_gradient_s(
            accelerator, "bf16", outputs, inputs, m, count, sum_bytes, fused
        )
    return np.stack(np.broadcast_arrays(*seconds))


def batched_small_gemm_s(
    accelerator: Accelerator, m: Numbers, n: Numbers, k: Numbers, count: Numbers, aligned: bool
) -> FloatArray:
    """Time ``count`` equal bf16 products in one batched launch, as in unfused attention with a product a head.

    ``gemm_s``; where a size is no multiple of 8 elements (16 bytes) at least 2 count m n k / (0.5 *
    vector rate), because cuBLAS then leaves the matrix engine.
    Source: NVIDIA, Matrix multiplication background user's guide (alignment to 16 bytes);
    ``UNALIGNED_VECTOR_EFFICIENCY``.
    """
    seconds = gemm_s(accelerator, "bf16", m, n, k, count)
    if aligned or accelerator.vector_flops_per_s is None:
        return seconds
    flops = 2 * np.asarray(count, dtype=np.float64) * np.asarray(m) * np.asarray(n) * np.asarray(k)
    slow = flops / (UNALIGNED_VECTOR_EFFICIENCY * accelerator.vector_flops_per_s)
    return np.asarray(np.maximum(seconds, slow))


def memory_bound_s(accelerator: Accelerator, num_bytes: Numbers) -> FloatArray:
    """Time an operator limited by device memory (norms, activations, casts, optimizer steps).

    num_bytes / (bandwidth * eff_bw) + kernel latency; 0 where num_bytes = 0.
    num_bytes: bytes read plus written, any shape; returns seconds. Source: roofline (Williams et al. 2009).
    """
    moved = np.asarray(num_bytes, dtype=np.float64)
    seconds = moved / accelerator.memory_rate_bytes_per_s
    return np.where(moved == 0, 0.0, seconds + accelerator.kernel_latency_s)


def last_tile_flops(accelerator: Accelerator, keys: Numbers, width: Numbers) -> FloatArray:
    """Count the FLOPs that flash attention loses to processors without a tile at the end of a kernel.

    0.65 * processors * 128 queries * keys * 2 * width, with ``keys`` of the longest tile and ``width`` the head
    sizes of queries and values together. The forward and the backward each lose them once.
    Source: fitted, see ``LAST_TILE_FRACTION``.
    """
    waste = LAST_TILE_FRACTION * accelerator.num_processors * ATTENTION_TILE_ROWS
    return np.asarray(waste * 2.0 * np.asarray(keys) * np.asarray(width), dtype=np.float64)


def flash_attention_flops(
    accelerator: Accelerator,
    tokens: Numbers,
    keys: Numbers,
    heads: Numbers,
    width: Numbers,
    tiles: tuple[Numbers, Numbers],
) -> tuple[FloatArray, FloatArray]:
    """Count the FLOPs of flash attention forward and backward, with the FLOPs lost to the last tiles.

    forward: 2 * tokens * keys * heads * width + last tiles; backward: 2.5 times the first term + last tiles.

    Args:
        keys: mean number of keys that a query attends to.
        width: head sizes of queries and values together.
        tiles: number of kernels, and keys of the longest tile in each.

    Source: FlashAttention-2 (Dao 2023) section 4.1 for the factor 2.5; ``last_tile_flops``.
    """
    flops = 2 * np.asarray(tokens, dtype=np.float64) * keys * heads * width
    tails = tiles[0] * last_tile_flops(accelerator, tiles[1], width)
    return np.asarray(flops + tails), np.asarray(2.5 * flops + tails)


def average_keys(
    sequence_length: Numbers, window: int | None, mask: Mask = "causal", chunked: bool = False
) -> FloatArray:
    """Average the number of keys that a query attends to.

    Causal mask: w - w^2/(2s) with a window of w keys, at most s, so s/2 without a window. Chunks of w keys: the
    mean of w/2 over n = floor(s/w) whole chunks and of r/2 over the rest r = s - n w, (n w^2 + r^2)/(2s). Full
    mask: s; windows are not supported. Any shape.
    """
    length = np.asarray(sequence_length, dtype=np.float64)
    if mask == "full":
        assert window is None
        return length
    if chunked:
        assert window is not None
        whole = np.floor(length / window)
        rest = length - whole * window
        return np.asarray((whole * window**2 + rest**2) / (2 * length))
    visible = length if window is None else np.minimum(length, window)
    return np.asarray(visible - visible * visible / (2 * length))


def _attention_s(
    accelerator: Accelerator, curve: SizeCurve, flops: Numbers, sequence_length: Numbers
) -> FloatArray:
    """Time attention: flops / (bf16 peak * curve(length)) + kernel latency; 0 where flops = 0."""
    work = np.asarray(flops, dtype=np.float64)
    flops_per_s = accelerator.bf16.peak_flops_per_s * interpolate_curve(curve, sequence_length)
    return np.where(work == 0, 0.0, work / flops_per_s + accelerator.kernel_latency_s)


def attention_forward_s(accelerator: Accelerator, flops: Numbers, sequence_length: Numbers) -> FloatArray:
    """Time a flash-attention forward: flops / (bf16 peak * eff_fwd(sequence_length)) + kernel latency.

    flops: computed FLOPs (causal attention counts half the square); sequence_length: tokens that set the
    efficiency; any shapes that broadcast; returns seconds.
    Source: FlashAttention-2 (Dao 2023) section 4.1 for the count of FLOPs; the curve is in the hardware file.
    """
    return _attention_s(accelerator, accelerator.attention_forward, flops, sequence_length)


def attention_backward_s(accelerator: Accelerator, flops: Numbers, sequence_length: Numbers) -> FloatArray:
    """Time a flash-attention backward: flops / (bf16 peak * eff_bwd(sequence_length)) + kernel latency.

    flops: 2.5 times those of the forward; shapes and units as in ``attention_forward_s``.
    Source: FlashAttention-2 (Dao 2023) section 4.1 for the factor 2.5; the curve is in the hardware file.
    """
    return _attention_s(accelerator, accelerator.attention_backward, flops, sequence_length)
