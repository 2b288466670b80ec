"""Measured products become a table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from milpplan import load_hardware
from milpplan.calibration import fit_gemm, is_gemm_csv, least_within, parse_gemm
from milpplan.errors import InvalidInputError
from milpplan.problem import with_constants
from milpplan.simulation.layers.kernels import gemm_s


def products(factor: float, noise: float = 0.01) -> str:
    """A CSV of products on an H100 whose matrix engine is ``factor`` times as efficient, a few of them absurd."""
    random = np.random.default_rng(1)
    gpu = with_constants(load_hardware("dgx-h100"), {"gemm_efficiency": factor}, {}).accelerator
    sizes = np.exp(random.uniform(np.log(512), np.log(16384), (300, 3))).round()
    times = np.asarray(gemm_s(gpu, "bf16", *sizes.T)) * np.exp(noise * random.standard_normal(300))
    times[::30] *= 4
    rows = [f"{m:.0f},{n:.0f},{k:.0f},{t * 1e6:.3f}" for (m, n, k), t in zip(sizes, times, strict=True)]
    return "m,n,k,time_us\n" + "\n".join(rows) + "\n"


def test_a_factor_is_found() -> None:
    """All nodes, measured or not, follow a common factor; a few absurd products do not matter."""
    base = load_hardware("dgx-h100")
    found = fit_gemm(parse_gemm(products(0.8), "x.csv"), base)
    table = found.tables.gemm_bf16
    assert table is not None
    ratios = np.array(table.efficiency) / np.array(base.accelerator.bf16.gemm.efficiency)
    assert np.median(ratios) == pytest.approx(0.8, rel=0.02)
    assert np.median(np.abs(ratios / 0.8 - 1)) < 0.05
    assert found.error_after < found.error_before
    assert found.tables.gemm_fp8 is None


def test_products_left_out_say_how_sure_the_table_is() -> None:
    """Products that scatter by 4 % leave a one sigma of that and more (half of them fit the table for the other
    half), exact ones less than half of it; absurd ones are told."""
    base = load_hardware("dgx-h100")
    noisy, exact = (fit_gemm(parse_gemm(products(0.8, noise), "x.csv"), base) for noise in (0.04, 0.0))
    assert noisy.constants.gemm_efficiency is not None
    assert exact.constants.gemm_efficiency is not None
    assert noisy.constants.gemm_efficiency.value == 1.0
    assert 0.04 < noisy.constants.gemm_efficiency.one_sigma < 0.12
    assert exact.constants.gemm_efficiency.one_sigma < noisy.constants.gemm_efficiency.one_sigma / 2
    assert any("outliers" in text for text in exact.told)


def test_tflops_are_read_as_well() -> None:
    """2 m n k / (TFLOP/s * 1e12) seconds."""
    (found,) = parse_gemm("M, N, K, TFLOPS\n4096,4096,4096,500\n", "x.csv")
    assert found.time_s[0] == pytest.approx(2 * 4096**3 / 500e12)


@pytest.mark.parametrize("column", ["time_us", "latency_us"])
def test_times_have_two_names(column: str) -> None:
    """Microseconds under either name; rows of one system may say so."""
    (found,) = parse_gemm(f"system,m,n,k,{column},eff\nh100,4096,4096,4096,250,0.5\n", "x.csv")
    assert found.time_s[0] == pytest.approx(250e-6)


@pytest.mark.parametrize(
    "text",
    [
        "m,n,k,speed\n1,2,3,4\n",
        "system,m,n,k,time_s\na100,1,2,3,4\nh100,1,2,3,4\n",
        "m,n,k,time_s\n",
        "m,n,k,time_s\n1,2,3\n",
        "m,n,k,time_s\n1,2,x,1\n",
        "m,n,k,time_s\n1,2,3,-1\n",
        "m,n,k,time_s\n1,2,3,nan\n",
        "m,n,k,time_s,precision\n1,2,3,1,int3\n",
        "m,n,k,time_s\n0,2,3,1\n",
    ],
)
def test_hostile_tables_are_refused(text: str) -> None:
    """Three parts, and the place in the file."""
    assert is_gemm_csv(text)
    with pytest.raises(InvalidInputError) as caught:
        parse_gemm(text, "x.csv")
    assert caught.value.seen.startswith("x.csv")
    assert caught.value.expected
    assert caught.value.do


def test_products_that_only_move_memory_say_nothing() -> None:
    """Shorter than their memory traffic: the unit is wrong."""
    with pytest.raises(InvalidInputError, match="memory traffic"):
        fit_gemm(parse_gemm("m,n,k,time_s\n4096,4096,4096,1e-9\n", "x.csv"), load_hardware("dgx-h100"))


@pytest.mark.parametrize("seed", range(20))
def test_corrections_are_the_least_squares_within_their_bounds(seed: int) -> None:
    """The projected Newton steps end where SciPy's bounded least squares do, whichever bounds hold."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, 30))
    factor = draw.normal(size=(size + 5, size))
    matrix = factor.T @ factor + 0.1 * np.eye(size)
    right = draw.normal(size=size) * 10
    low, high = draw.uniform(0.0, 1.0, size), draw.uniform(1.001, 1.5, size)
    root = np.linalg.cholesky(matrix)
    best = lsq_linear(root.T, np.linalg.solve(root, right), bounds=(low, high), tol=1e-14).x
    found = least_within(matrix, right, low, high)
    assert np.all((low <= found) & (found <= high))
    assert found == pytest.approx(best, abs=1e-6)
