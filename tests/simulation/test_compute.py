"""Matrix products, memory-bound operators and attention on one accelerator."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError
from milpplan.problem import Accelerator, GemmTable, HardwareSpec, SizeCurve
from milpplan.simulation.layers import (
    attention_backward_s,
    attention_forward_s,
    interpolate_curve,
    interpolate_table,
    memory_bound_s,
)
from milpplan.simulation.layers.kernels import (
    batched_small_gemm_s,
    gemm_s,
    last_tile_flops,
    weight_gradient_s,
)

HARDWARE = Path(__file__).parents[2] / "hardware"
ACCELERATORS = {
    path.stem: HardwareSpec.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).accelerator
    for path in sorted(HARDWARE.glob("*.toml"))
}
H100 = ACCELERATORS["dgx-h100"]
A100 = ACCELERATORS["dgx-a100-80"]
TABLE = GemmTable(m=(1, 4), n=(1, 4), k=(1, 4), efficiency=(((0.1, 0.2), (0.3, 0.4)), ((0.5, 0.6), (0.7, 0.8))))

accelerators = st.sampled_from(list(ACCELERATORS.values()))
sizes = st.integers(1, 300_000)


def test_table_is_exact_at_its_grid_points() -> None:
    """At a grid point the interpolation returns the stored efficiency."""
    assert float(interpolate_table(TABLE, 4, 1, 4)) == pytest.approx(0.6)
    assert float(interpolate_table(TABLE, 1, 4, 1)) == pytest.approx(0.3)


def test_table_is_linear_in_the_logarithms() -> None:
    """Halfway in every logarithm (2 between 1 and 4) the efficiency is the mean of the eight corners."""
    assert float(interpolate_table(TABLE, 2, 2, 2)) == pytest.approx(0.45)


def test_table_is_constant_outside() -> None:
    """Beyond the grid the nearest point of the grid counts."""
    assert float(interpolate_table(TABLE, 1e9, 1e9, 1e9)) == pytest.approx(0.8)
    assert float(interpolate_table(TABLE, 0.5, 0.5, 0.5)) == pytest.approx(0.1)


def test_table_with_one_point_is_a_constant() -> None:
    """A table of a single point gives its value everywhere."""
    table = GemmTable(m=(7,), n=(7,), k=(7,), efficiency=(((0.5,),),))
    assert interpolate_table(table, np.array([1.0, 7.0, 99.0]), 3, 5).tolist() == [0.5, 0.5, 0.5]


def test_curve_is_linear_in_the_logarithm_and_clamped() -> None:
    """A curve from 0.2 at 1 to 0.6 at 16 has 0.4 at 4, and its ends outside."""
    curve = SizeCurve(size=(1, 16), value=(0.2, 0.6))
    assert interpolate_curve(curve, np.array([0.01, 1, 4, 16, 1e6])) == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])


def test_large_product_on_h100_runs_at_the_published_rate() -> None:
    """8192^3 in bf16 reaches 70 to 80 % of 989 TFLOP/s (aiconfigurator median 0.78 for m, n, k >= 4096)."""
    fraction = 2 * 8192**3 / float(gemm_s(H100, "bf16", 8192, 8192, 8192)) / 989e12
    assert 0.70 <= fraction <= 0.80


def test_narrow_product_is_less_efficient() -> None:
    """A product with k = 512 reaches a smaller fraction of the peak than one with k = 8192."""
    wide = 2 * 8192**3 / gemm_s(H100, "bf16", 8192, 8192, 8192)
    narrow = 2 * 8192**2 * 512 / gemm_s(H100, "bf16", 8192, 8192, 512)
    assert narrow < 0.9 * wide


def test_memory_limits_a_thin_product() -> None:
    """With k = 1 the output's 2 m n bytes at 0.8 * 3350 GB/s set the time."""
    m = n = 16384
    moved = 2 * (m + n + m * n)
    expected = moved / (0.8 * 3350e9) + H100.kernel_latency_s
    assert float(gemm_s(H100, "bf16", m, n, 1)) == pytest.approx(expected)


def test_fp8_reads_half_the_bytes() -> None:
    """Where memory limits, an fp8 input costs one byte an element and the output two."""
    m, n, k = 1, 16384, 16384
    moved = m * k + k * n + 2 * m * n
    expected = moved / (0.8 * 3350e9) + H100.kernel_latency_s
    assert float(gemm_s(H100, "fp8", m, n, k)) == pytest.approx(expected)


def test_missing_engine_is_a_user_error() -> None:
    """fp8 on an A100 is refused in words, not with a traceback."""
    with pytest.raises(InvalidInputError, match="no fp8 matrix engine"):
        gemm_s(A100, "fp8", 128, 128, 128)


def test_grouped_products_share_one_launch() -> None:
    """Eight grouped products take eight kernels' time and one launch latency."""
    one = float(gemm_s(H100, "bf16", 512, 1024, 2048)) - H100.kernel_latency_s
    grouped = float(gemm_s(H100, "bf16", 512, 1024, 2048, 8))
    assert grouped == pytest.approx(8 * one + H100.kernel_latency_s)


@pytest.mark.parametrize(
    ("m", "n", "k", "microseconds"),
    [
        (4096, 8192, 10240, 613.238),
        (8192, 8192, 28672, 3387.637),
        (16384, 8192, 57344, 13541.55),
        (4096, 57344, 8192, 3514.264),
    ],
)
def test_products_back_to_back_on_b200(m: int, n: int, k: int, microseconds: float) -> None:
    """Products timed back to back on B200 (MooreThreads/SimuMax@4dcaae513): within 12 %, 21 to 29 % too fast by
    the table alone."""
    assert float(gemm_s(ACCELERATORS["dgx-b200"], "bf16", m, n, k)) == pytest.approx(microseconds * 1e-6, rel=0.12)


@pytest.mark.parametrize(
    ("m", "n", "k", "microseconds"),
    [(14336, 8192, 2048, 442.982), (4096, 7168, 4096, 261.644), (24576, 5120, 16384, 3724.707)],
)
def test_weight_gradients_on_b200(m: int, n: int, k: int, microseconds: float) -> None:
    """The same with sums in fp32: within 15 %."""
    found = weight_gradient_s(ACCELERATORS["dgx-b200"], "bf16", m, n, k, 1, 4)
    assert float(found) == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_weight_gradient_by_hand() -> None:
    """Adding to an fp32 sum moves 8 bytes an element instead of the 2 of a plain product; 0.6 of it is exposed."""
    plain = float(gemm_s(H100, "bf16", 4096, 1024, 8192, 3))
    added = float(weight_gradient_s(H100, "bf16", 4096, 1024, 8192, 3, 4)) - plain
    assert added == pytest.approx(0.6 * 3 * 4096 * 1024 * 6 / (3350e9 * 0.8))
    assert float(weight_gradient_s(H100, "bf16", 4096, 0, 8192, 3, 4)) == 0


def test_weight_gradient_added_apart() -> None:
    """In a kernel of its own the sum costs all its traffic: 2 bytes of the product, 4 read and 4 written."""
    plain = float(gemm_s(H100, "bf16", 4096, 1024, 8192, 3))
    added = float(weight_gradient_s(H100, "bf16", 4096, 1024, 8192, 3, 4, fused=False)) - plain
    assert added == pytest.approx(3 * 4096 * 1024 * 10 / (3350e9 * 0.8))


def test_sustained_slows_products_only() -> None:
    """Half the sustained rate doubles a product that compute limits and leaves memory-bound operators alone."""
    slow = H100.model_copy(update={"bf16": H100.bf16.model_copy(update={"sustained": 0.5})})
    kernel = float(gemm_s(H100, "bf16", 8192, 8192, 8192)) - H100.kernel_latency_s
    assert float(gemm_s(slow, "bf16", 8192, 8192, 8192)) == pytest.approx(2 * kernel + H100.kernel_latency_s)
    assert memory_bound_s(slow, 1e9) == memory_bound_s(H100, 1e9)


def test_unaligned_heads_leave_the_matrix_engine() -> None:
    """Head size 150 runs at about the 8.4 TFLOP/s that BLOOM's runs show on A100; 144 is untouched."""
    flops = 2 * 2048 * 2048 * 150 * 12
    unaligned = float(batched_small_gemm_s(A100, 2048, 2048, 150, 12, False))
    assert flops / unaligned / 1e12 == pytest.approx(8.4, rel=0.2)
    aligned = batched_small_gemm_s(A100, 2048, 2048, 144, 12, True)
    assert aligned == gemm_s(A100, "bf16", 2048, 2048, 144, 12)


@pytest.mark.parametrize(("heads", "efficiency"), [(64, 0.594), (32, 0.566), (16, 0.494), (8, 0.388)])
def test_few_heads_do_not_fill_a100(heads: int, efficiency: float) -> None:
    """Causal forwards of 4096 tokens on A100 (MooreThreads/SimuMax@4dcaae513, half of the efficiency that it
    counts over the full square): within 6 %."""
    flops = 2 * 4096 * 4096 / 2 * heads * 256
    seconds = attention_forward_s(A100, flops + last_tile_flops(A100, 4096, 256), 4096)
    assert flops / float(seconds) / 312e12 == pytest.approx(efficiency, rel=0.06)


def test_memory_bound_operator_moves_bytes() -> None:
    """2.68 GB at 0.8 * 3350 GB/s take one millisecond and a launch."""
    assert float(memory_bound_s(H100, 2.68e9)) == pytest.approx(1e-3 + H100.kernel_latency_s)


def test_attention_on_h100_runs_at_the_published_rate() -> None:
    """At 8k tokens cuDNN's causal forward runs at 529 TFLOP/s (FlashAttention-3, figure 5)."""
    assert float(attention_forward_s(H100, 529e12, 8192)) == pytest.approx(1.0, rel=0.005)


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_attention_backward_is_less_efficient_than_forward(name: str) -> None:
    """At every length the backward takes at least as long for the same FLOPs."""
    lengths = np.geomspace(64, 1e6, 50)
    accelerator = ACCELERATORS[name]
    assert np.all(
        attention_backward_s(accelerator, 1e12, lengths) >= attention_forward_s(accelerator, 1e12, lengths)
    )


def test_nothing_costs_nothing() -> None:
    """Any zero size gives exactly zero seconds, without latency and without warnings."""
    zero = np.array([0, 4])
    assert gemm_s(H100, "bf16", zero, 8, 8)[0] == 0 < gemm_s(H100, "bf16", zero, 8, 8)[1]
    assert gemm_s(H100, "bf16", 8, 0, 8) == gemm_s(H100, "fp8", 8, 8, 0) == 0
    assert gemm_s(H100, "bf16", 8, 8, 8, 0) == 0
    assert memory_bound_s(H100, 0) == 0
    assert attention_forward_s(H100, 0, 4096) == attention_backward_s(H100, 0, 4096) == 0


@given(accelerators, sizes, sizes, sizes, st.floats(1, 8), st.sampled_from("mnk"))
def test_a_larger_product_is_never_faster(
    accelerator: Accelerator, m: int, n: int, k: int, growth: float, axis: str
) -> None:
    """Growing one of m, n, k never shortens a product, in any preset and precision."""
    small = {"m": float(m), "n": float(n), "k": float(k)}
    large = small | {axis: small[axis] * growth}
    for precision in ("bf16", "fp8"):
        if precision == "fp8" and accelerator.fp8 is None:
            continue
        before, after = (float(gemm_s(accelerator, precision, **size)) for size in (small, large))
        assert np.isfinite(before)
        assert 0 < before <= after * (1 + 1e-9)


@given(accelerators, st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=20))
def test_arrays_equal_scalars(accelerator: Accelerator, shapes: list[tuple[int, int, int]]) -> None:
    """Costing many shapes at once gives the same seconds as one at a time."""
    m, n, k = np.array(shapes, dtype=np.float64).T
    together = gemm_s(accelerator, "bf16", m, n, k)
    alone = [float(gemm_s(accelerator, "bf16", *shape)) for shape in shapes]
    assert together.tolist() == alone
    forward = attention_forward_s(accelerator, m * 1e9, n)
    assert forward.tolist() == [float(attention_forward_s(accelerator, a * 1e9, b)) for a, b, _ in shapes]


@given(accelerators, st.floats(0, 1e13), st.floats(1, 10))
def test_more_bytes_and_flops_are_never_cheaper(accelerator: Accelerator, work: float, growth: float) -> None:
    """Memory-bound operators and attention take at least as long for more work, and finite time."""
    assert memory_bound_s(accelerator, work) <= memory_bound_s(accelerator, work * growth) < np.inf
    before = attention_backward_s(accelerator, work, 4096)
    assert before <= attention_backward_s(accelerator, work * growth, 4096) < np.inf


def test_shapes_broadcast() -> None:
    """A column of m against a row of n gives a matrix."""
    seconds = gemm_s(H100, "bf16", np.array([[128], [256]]), np.array([512, 1024, 2048]), 4096)
    assert seconds.shape == (2, 3)
