"""Number formats of products: bytes, times, published ratios, proofs, launchers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.switches import FORMAT_PAIRS, format_steps, measured_s
from milpplan import HardwareSpec, Problem
from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import restrict
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.launchers.megatron_bridge.launcher import MegatronBridge
from milpplan.problem import NO_MODULES, PRECISIONS, QUANTIZATIONS, Accelerator, PrecisionName
from milpplan.simulation import states
from milpplan.simulation.layers import Part, Phase, layer_activations, layer_seconds
from milpplan.simulation.layers.kernels import gemm_s
from milpplan.validation.terms import used_terms
from tests.amounts import long_but
from tests.consumers import assert_consumers_agree
from tests.launchers.cases import as_run, deepseek, llama_uneven, round_trip
from tests.launchers.test_bridge import read, script_of, without_ring
from tests.launchers.test_megatron_round_trip import assert_same
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import columns_of, problem_of, random_layout, shipped_hardware
from tests.simulation.test_bulk import switched, with_host

QUANTIZED = PRECISIONS[1:]


def alone(hardware: HardwareSpec, weights_only: bool = True) -> HardwareSpec:
    """The hardware with quantized weights alone, or beside bf16."""
    software = hardware.software.model_copy(update={"fp8_weights_only": weights_only})
    return hardware.model_copy(update={"software": software})


def with_engines(gpu: Accelerator) -> Accelerator:
    """The accelerator with engines for all formats: twice and four times the rate of bf16."""
    fast = [gpu.bf16.model_copy(update={"peak_flops_per_s": n * gpu.bf16.peak_flops_per_s}) for n in (2, 4)]
    return gpu.model_copy(update={"fp8": fast[0], "nvfp4": fast[1], "mxfp8": 0.9, "fp8_blockwise": 0.8})


def in_format(problem: Problem, precision: str) -> Problem:
    """The problem in another number format."""
    return problem.model_copy(update={"job": problem.job.model_copy(update={"precision": precision})})


BYTES = {
    "fp8": (1.0, 2.0, 1.0),
    "fp8-tensorwise": (1.0, 2.0, 1.0),
    "fp8-blockwise": (1.03125, 2.0625, 1.0),
    "mxfp8": (1.03125, 2.0625, 2.0),
    "nvfp4": (0.5625, 1.125, 0.5),
}
"""Bytes of a kept input, of a weight alone and of a gathered weight: 8 bits, with 32 bits a 128 values or 8 a 32
values; 4 bits with 8 a 16 values."""


@pytest.mark.parametrize("precision", QUANTIZED)
def test_bytes_by_hand(precision: PrecisionName) -> None:
    """Two norm outputs and the input of the down projection are kept in a copy; weights have two copies, alone or
    beside bf16; only weights alone are gathered in the format."""
    kept, weight, gathered = BYTES[precision]
    bf16, other = (problem_of("llama3-8b", "gb200-nvl72", precision=name) for name in ("bf16", precision))
    columns, kind = columns_of(), bf16.model.kinds[0]
    saved = (2 - kept) * 8192 * (2 * 4096 + 14336)
    plain, quantized = (layer_activations(case, kind, columns).kept[0] for case in (bf16, other))
    assert plain - quantized == pytest.approx(saved)
    assert states.weight_bytes(other) == 2 + weight
    assert states.gathered_weight_bytes(other) == 2
    only = other.model_copy(update={"hardware": alone(other.hardware)})
    assert states.weight_bytes(only) == weight
    assert states.gathered_weight_bytes(only) == gathered


def test_passes_and_rates_by_hand() -> None:
    """Each format moves its bytes before a product, and block scales have the rate of the description."""
    passes = {"fp8": 4, "fp8-tensorwise": 6, "fp8-blockwise": 4.0625, "mxfp8": 4.0625, "nvfp4": 5.125}
    assert {name: QUANTIZATIONS[name].pass_bytes for name in QUANTIZED} == passes
    gpu = shipped_hardware("gb200-nvl72").accelerator
    size = (16384.0, 16384.0, 16384.0)
    net = {name: float(gemm_s(gpu, name, *size)) - gpu.kernel_latency_s for name in PRECISIONS}
    assert gpu.mxfp8 is not None
    assert net["fp8"] / net["mxfp8"] == pytest.approx(gpu.mxfp8)
    assert net["fp8-tensorwise"] == net["fp8"]
    assert net["nvfp4"] < 0.75 * net["fp8"] < 0.6 * net["bf16"]


def test_published_ratios() -> None:
    """Steps in MXFP8 and NVFP4 over those in fp8 under one plan; NVFP4's own steps are met within 3 %."""
    for base, other, precision, error in FORMAT_PAIRS:
        steps = format_steps(base, precision)
        measured = measured_s(other)
        assert steps[1] / steps[0] == pytest.approx(measured / measured_s(base), rel=error)
        if precision == "nvfp4":
            assert steps[1] == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("seed", long_but((4,), range(10)))
def test_optimum_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems in every format, on every backend."""
    problem = random_problem(seed + 100 * BACKENDS.index(backend))
    hardware = problem.hardware.model_copy(update={"accelerator": with_engines(problem.hardware.accelerator)})
    changed = {"hardware": alone(hardware, seed % 2 == 0), "other_hardware": ()}
    check(in_format(problem.model_copy(update=changed), QUANTIZED[seed % 5]), backend)


@pytest.mark.parametrize("precision", long_but(("nvfp4",), QUANTIZED))
def test_bulk_bounds_and_traffic_know_the_format(precision: str) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(QUANTIZED.index(precision))
    hardware = alone(shipped_hardware("gb200-nvl72"))
    problem = with_host(problem_of("qwen3-30b-a3b", hardware, sequence_length=1024, precision=precision))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(12)]
    assert_consumers_agree(problem, layouts, random)


def run(*words: str) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(app, list(words))


def test_the_command_line_answers_with_evidence(tmp_path: Path) -> None:
    """A solve names the format and says that no scored run has it; GPUs without it are refused."""
    file = tmp_path / "plan.json"
    words = ("--gpus", "8", "--global-batch", "32", "--fix", "pp=1,cp=1", "--precision", "nvfp4")
    answer = run("solve", "llama3-8b", "gb200-nvl72", *words, "--out", str(file), "--verbose")
    assert answer.exit_code == 0
    said = " ".join(answer.output.split())
    assert "no scored run on Blackwell exercises: products with a scale a block of values" in said
    for target in ("torchtitan", "nanotron"):
        refused = run("export", str(file), "--to", target)
        assert refused.exit_code == 2
        assert "precision nvfp4" in " ".join(refused.output.split())
    refused = run("solve", "llama3-8b", "dgx-h100", *words)
    assert refused.exit_code == 2
    assert "has no nvfp4; use precision bf16 or fp8 or fp8-tensorwise or fp8-blockwise" in " ".join(
        refused.output.split()
    )


RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "fp8": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("delayed",)},
    "fp8-tensorwise": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("tensorwise",)},
    "fp8-blockwise": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("blockwise",)},
    "mxfp8": {"--fp8-format": ("e4m3",), "--fp8-recipe": ("mxfp8",)},
    "nvfp4": {"--fp4-format": ("e2m1",), "--fp4-recipe": ("nvfp4",)},
}
"""Arguments of Megatron-LM: the choices of its parser, and the formats of Megatron-Bridge's recipes."""


@pytest.mark.parametrize("precision", QUANTIZED)
def test_megatron_and_bridge_write_the_format(precision: PrecisionName) -> None:
    """Plans come back with weights alone and beside bf16; Bridge takes the formats of its own recipes."""
    for weights_only, (problem, plan) in zip((False, True), (deepseek(), llama_uneven()), strict=True):
        plan = plan.model_copy(update={"layout": plan.layout.model_copy(update={"zero_stage": 1})})
        hardware = alone(shipped_hardware("gb200-nvl72"), weights_only)
        problem = in_format(problem.model_copy(update={"hardware": hardware}), precision)
        launch, found = round_trip(problem, plan)
        assert_same(problem, plan, found.problem, found.plan)
        given = {flag: values for part in launch.sections for flag, values in part.arguments.items()}
        assert RECIPES[precision].items() <= given.items()
        assert any("param-gather" in flag for flag in given if flag != "--overlap-param-gather") == weights_only
        if problem.hardware.software.fp8_weights_only != (precision != "fp8-blockwise"):
            with pytest.raises(IllegalPlanError, match="fp8_weights_only = "):
                script_of(*without_ring((problem, plan)))
            continue
        problem, plan = without_ring((problem, plan))
        back = read(problem, script_of(problem, plan))
        assert back.problem.job.precision == precision
        assert back.plan == as_run(problem, plan)
    if precision == "nvfp4":
        with pytest.raises(IllegalPlanError, match=r"0\.3\.1 keeps weights in bf16"):
            MegatronBridge().export(problem, plan, "0.3.1")
    if precision in ("mxfp8", "nvfp4", "fp8-blockwise"):
        with pytest.raises(IllegalPlanError, match="is not written for core_v0"):
            Megatron().export(problem, plan, "core_v0.19.0")


def test_delayed_scaling_leaves_modules_out() -> None:
    """Megatron-LM recomputes neither norms nor activations of experts with delayed scaling."""
    space = {"recompute_modules": None, "recompute": ("selective",), "zero_stage": (1,)}
    for precision, allowed in (("fp8", False), ("fp8-tensorwise", True)):
        problem = problem_of("qwen3-30b-a3b", "dgx-h100", num_gpus=8, global_batch_size=8, precision=precision)
        problem = problem.model_copy(update={"space": problem.space.model_copy(update=space)})
        sets = restrict(problem, "megatron").module_sets
        assert any("moe_act" in modules for modules in sets) == allowed
        assert sets != (NO_MODULES,)


def test_terms_name_block_scales_only_where_they_are() -> None:
    """8-bit products and block scales are terms of their own; a format without arithmetic is a word."""
    problem, plan = llama_uneven()
    problem = problem.model_copy(update={"hardware": shipped_hardware("gb200-nvl72")})
    names = {name: {term.name for term in used_terms(in_format(problem, name), plan)} for name in PRECISIONS}
    added = {name: names[name] - names["bf16"] for name in QUANTIZED}
    assert added["fp8"] == added["fp8-tensorwise"] == {"fp8_products"}
    assert added["mxfp8"] == added["fp8-blockwise"] == {"fp8_products", "block_scales"}
    assert added["nvfp4"] == {"block_scales"}
    with pytest.raises(InvalidInputError, match=r"add accelerator\.mxfp8"):
        gemm_s(shipped_hardware("dgx-h100").accelerator, "mxfp8", 8, 8, 8)
    cases = [in_format(problem, name) for name in ("bf16", "fp8-tensorwise", "nvfp4")]
    seconds = [layer_seconds(case, case.model.kinds[0], columns_of()) for case in cases]
    compute = [one[Part.COMPUTE, Phase.FORWARD, 0] for one in seconds]
    assert compute[0] > compute[1] > compute[2]
