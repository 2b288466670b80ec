"""Muon: matrices, states, orthogonalization, proofs, launchers, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.switches import moonlight, muon_share
from milpplan import Layout, Problem, simulate
from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.explain.why_not import WORDS
from milpplan.launchers import ImportRequest, restrict
from milpplan.launchers.megatron.launcher import Megatron, imported, torchrun_script
from milpplan.problem import Lora
from milpplan.simulation import LayoutColumns, hidden_matrices, matrix_updates, states
from milpplan.simulation.layers import layer_parameters, total_parameters
from milpplan.simulation.layout_costs import layout_costs
from milpplan.validation.terms import used_terms
from tests.amounts import long_but
from tests.consumers import assert_consumers_agree
from tests.launchers.cases import deepseek, llama_uneven, round_trip
from tests.launchers.test_megatron_round_trip import assert_same
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import (
    MODEL_HARDWARE,
    columns_of,
    even_plan,
    ideal_hardware,
    problem_of,
    random_layout,
)
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MODES = ("duplicated", "distributed", "blockwise")


def by_muon(problem: Problem, mode: str = "duplicated") -> Problem:
    """The problem with the optimizer Muon, on fp32 states."""
    changes = {"optimizer": "muon", "muon_tp_mode": mode}
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


@pytest.mark.parametrize("case", MODEL_HARDWARE)
def test_matrices_hold_all_but_vectors(case: tuple[str, ...]) -> None:
    """Matrices have the parameters of their layer but for norms, biases and convolutions: under 0.3 %."""
    model = problem_of(case[0]).model
    for kind in model.kinds:
        matrices = hidden_matrices(model, kind)
        held = sum(m.outputs * m.inputs * max(m.num_experts, 1) for m in matrices)
        counts = layer_parameters(model, kind)
        assert 0.997 * counts.total < held <= counts.total
        experts = sum(m.outputs * m.inputs * m.num_experts for m in matrices)
        assert 0.997 * counts.experts <= experts <= counts.experts
        divided = sum(m.outputs * m.inputs for m in matrices if m.divided and not m.num_experts)
        assert 0.99 * counts.tensor_parallel <= divided <= counts.tensor_parallel


def test_a_layer_by_hand() -> None:
    """Llama-3 8B at peak: q, k, v, output, gate with up, down; 5 iterations of 2 (2 m^2 n + m^3) FLOPs each, which
    copy 4 (m^2 + m n) bytes; 56 bytes a parameter in passes; and 36 launches a matrix."""
    problem = by_muon(problem_of("llama3-8b", ideal_hardware(), sequence_length=128))
    gpu = problem.hardware.accelerator.model_copy(
        update={"memory_bandwidth_bytes_per_s": 1e12, "kernel_latency_s": 1e-6}
    )
    problem = problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"accelerator": gpu})})
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096, 28672), (4096, 14336)]
    flops = [5 * 2 * (2 * m * m * n + m**3) for m, n in shapes]
    moved = sum(56 * m * n + 5 * 4 * (m * m + m * n) for m, n in shapes)
    dense, experts = matrix_updates(problem, problem.model.kinds[0], columns_of())
    by_hand = sum(flops) / gpu.bf16.peak_flops_per_s + moved / 1e12 + 36e-6 * len(shapes)
    assert dense.seconds == pytest.approx(by_hand, rel=1e-6)
    assert dense.parameters == sum(m * n for m, n in shapes)
    assert dense.largest_parameters == 4096 * 28672
    assert experts.seconds == experts.parameters == 0


def test_tensor_parallel_modes_by_hand() -> None:
    """Of an output projection 4096 x 4096 over 4 ranks: all the work and a gather of 4 bytes; products 4096 x 4096
    of 1024 rows and 5 all-reduces of 2 bytes; or a matrix of 1024 x 4096."""
    flops = {
        "duplicated": 2 * 4096**3 + 4096**3,
        "distributed": 2 * 4096 * 4096 * 1024 + 4096**3,
        "blockwise": 2 * 1024 * 1024 * 4096 + 1024**3,
    }
    bytes_sent = {"duplicated": (4 * 4096**2, 0), "distributed": (0, 5 * 2 * 4096**2), "blockwise": (0, 0)}
    base = problem_of("llama3-8b", ideal_hardware(), sequence_length=128)
    kind = base.model.kinds[0]
    bare = {"num_attention_heads": 32, "num_key_value_heads": 32}
    square = kind.model_copy(
        update={
            "attention": kind.attention.model_copy(update=bare),
            "mlp": kind.mlp.model_copy(update={"intermediate_size": 4096, "gated": False}),
        }
    )
    for mode in MODES:
        problem = by_muon(base, mode)
        dense, _ = matrix_updates(problem, square, columns_of(tp=4, sequence_parallel=True))
        gpu = problem.hardware.accelerator
        least = 10 * flops[mode] / gpu.bf16.peak_flops_per_s
        gathered, added = bytes_sent[mode]
        assert (dense.gathered_bytes, dense.added_bytes) == (6 * gathered, 6 * added)
        assert dense.seconds >= 6 * least * (1 - 1e-9)
        if mode == "blockwise":
            assert dense.seconds == pytest.approx(6 * least, rel=1e-6)


def test_states_are_the_measured_ones() -> None:
    """99.0M parameters, with embedding and head of 4096 x 1024: masters and moments of 378 + 410 MiB instead of
    1,133 with Adam, and of 47 + 51 MiB on each of 8 ranks, a mean.

    Source: ROCm/Megatron-LM at 73114c73, kimi_k3/tools/opt_mem_probe.py and its report (the tensors of Megatron's
    muon and dist_muon).
    """
    mib, ends = 2**20, 2 * 4096 * 1024
    problem = by_muon(problem_of("llama3-8b"))
    layouts = [Layout(global_batch_size=8), Layout(dp=8, zero_stage=1, global_batch_size=8)]
    columns = LayoutColumns.of(layouts)
    count = np.full(2, 99.0e6 - ends)
    update = states.local_layer_parameters(problem, problem.model.kinds[0], columns).muon
    assert update is not None
    nothing = np.zeros(2)
    whole = type(update[0])(count, *[nothing] * 5)
    none = type(update[0])(*[nothing] * 6)
    layers = states.LocalParameters(count, nothing, muon=(whole, none))
    embedding = states.LocalParameters(np.full(2, ends), nothing)
    found = sum(states.state_bytes(problem, columns, part)[2] for part in (layers, embedding)) / mib
    assert found == pytest.approx([378 + 410, 47 + 51], rel=0.005)
    assert 12 * 99.0e6 / mib == pytest.approx(1133, rel=0.005)


def test_moonlight_takes_the_papers_memory_and_share() -> None:
    """Liu et al. 2025, section 2.3: one momentum buffer is half of AdamW's two; and all that the optimizer exposes
    takes usually 1 to 3 % of forward and backward. The paper names no number of GPUs: here 128 and 256 H800 with
    the batch of 2,048 sequences of 8K tokens."""
    model = moonlight()
    assert round(total_parameters(model) / 1e9) == 16
    assert all(0.01 < muon_share(gpus, tp) < 0.03 for gpus, tp in ((128, 1), (128, 2), (256, 2)))
    job = {"sequence_length": 8192, "num_gpus": 128, "global_batch_size": 2048}
    adam = problem_of(model, "h800", **job)
    plan = even_plan(adam, Layout(dp=128, ep=8, zero_stage=1, global_batch_size=2048, **OVERLAPS))
    before, after = (simulate(case, plan).step_time_s for case in (adam, by_muon(adam)))
    assert before < after < 1.003 * before
    columns = LayoutColumns.of([Layout(global_batch_size=1)])
    adam, muon = (layout_costs(case, columns).at(0).state_bytes[2, :-2] for case in (adam, by_muon(adam)))
    masters = adam / 3
    assert (muon - masters) / (adam - masters) == pytest.approx(0.5, abs=0.001)


def test_whole_matrices_bound_the_most_loaded_rank() -> None:
    """Four layers of DeepSeek-V3, dealt out longest first: the most loaded rank takes at most the priced mean and
    the longest matrix's rest (Graham 1969), and at least half of that."""
    problem = by_muon(problem_of("deepseek-v3", "dgx-h200"))
    kind, one = problem.model.kinds[0], columns_of()
    all_s = float(matrix_updates(problem, kind, one)[0].seconds[0])
    times = [
        float(matrix_updates(problem, kind, one, (matrix,))[0].seconds[0]) - all_s
        for matrix in hidden_matrices(problem.model, kind)
    ]
    for ranks in (2, 8, 64):
        loads = [0.0] * ranks
        for time in sorted(4 * times, reverse=True):
            loads[loads.index(min(loads))] += time
        columns = columns_of(dp=ranks, zero_stage=1)
        local = states.local_layer_parameters(problem, kind, columns)
        priced = 4 * all_s / ranks + float(states.beyond_the_mean(columns, local)[0][0])
        assert priced / 2 < max(loads) <= priced
    columns = columns_of(dp=64, ep=64, zero_stage=1)
    muon, adam = (layout_costs(case, columns).at(0) for case in (problem, problem_of("deepseek-v3", "dgx-h200")))
    assert muon.barrier_ns - adam.barrier_ns == muon.whole_matrix_ns > 0
    assert adam.whole_matrix_ns == 0


@pytest.mark.parametrize("seed", long_but((0,), range(20)))
def test_bulk_bounds_and_traffic_know_the_update(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = real_problem(random)
    while problem.job.lora is not None or problem.inference or problem.hardware.software.states_text:
        problem = real_problem(random)
    problem = with_host(by_muon(problem, MODES[seed % 3]))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(12)]
    kept = {"keep_weights": False}
    layouts = [layout.model_copy(update={"zero_stage": min(layout.zero_stage, 1), **kept}) for layout in layouts]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("seed", long_but((5,), range(12)))
def test_optimum_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems with Muon, on every backend."""
    seed += 100 * BACKENDS.index(backend)
    problem = random_problem(seed)
    while problem.job.lora is not None or problem.inference or len(problem.node_types) > 1:
        seed += 12
        problem = random_problem(seed)
    check(by_muon(problem, MODES[seed % 3]), backend)


def run(*words: str) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(app, list(words))


JOB = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "32", "--fix", "pp=1,cp=1")


def test_the_command_line_answers_with_evidence(tmp_path: Path) -> None:
    """A solve names Muon, says that no measured run covers it, and writes a plan that launchers without it, and
    ``switch``, refuse."""
    file = tmp_path / "plan.json"
    answer = run(*JOB, "--optimizer", "muon", "--out", str(file))
    assert answer.exit_code == 0
    said = " ".join(answer.output.split())
    assert "no measured run on Hopper covers the update of Muon" in said
    assert json.loads(file.read_text())["problem"]["job"]["optimizer"] == "muon"
    for words in (("export", str(file), "--to", "nanotron"), ("switch", str(file), str(file))):
        refused = run(*words)
        assert refused.exit_code == 2
        assert "optimizer muon" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("--optimizer", "lion"), "Expected one of adam, muon"),
        (("--optimizer", "muon", "--inference"), "beside inference is not modelled"),
        (("--optimizer", "muon", "--lora-rank", "8"), "beside lora is not modelled"),
        (("--optimizer", "muon", "--target", "torchtitan"), "optimizer muon"),
        (("--optimizer", "muon", "--fix", "zero_stage=3"), "a free zero_stage (instead of zero_stage=3)"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...], seen: str) -> None:
    """A job that contradicts itself, the launcher or the rule says so."""
    answer = run(*JOB, *words)
    assert answer.exit_code in (2, 3)
    assert seen in " ".join(answer.output.split())


def test_zero_2_and_states_in_16_bits_are_refused() -> None:
    """A plan that cuts matrices, hardware with other states, and a word for the rule."""
    problem = by_muon(problem_of("llama3-8b", "dgx-h100"))
    with pytest.raises(IllegalPlanError, match="leave every matrix whole"):
        simulate(problem, even_plan(problem, Layout(dp=8, global_batch_size=8, zero_stage=2, **OVERLAPS)))
    small = problem.hardware.software.model_copy(update={"optimizer_state_bytes": 4})
    with pytest.raises(ValueError, match="optimizer states of 4 bytes"):
        problem_of("llama3-8b", problem.hardware.model_copy(update={"software": small}), optimizer="muon")
    with pytest.raises(ValueError, match="beside lora is not modelled"):
        problem_of("llama3-8b", lora=Lora(rank=8), optimizer="muon")
    assert "muon_needs_whole_matrices" in WORDS


def test_megatron_takes_muon_and_others_refuse() -> None:
    """Plans come back; ``dist_muon`` shards without another flag; versions and settings that are not priced are
    named."""
    for mode, (problem, plan) in zip(("distributed", "blockwise"), (deepseek(), llama_uneven()), strict=True):
        problem = by_muon(problem, mode)
        launch, found = round_trip(problem, plan)
        assert_same(problem, plan, found.problem, found.plan)
        given = {flag: values for section in launch.sections for flag, values in dict(section.arguments).items()}
        assert given["--optimizer"] == ("muon",)
        assert given["--muon-tp-mode"] == (mode,)
    with pytest.raises(IllegalPlanError, match="core_v0"):
        Megatron().export(problem, plan, "core_v0.19.0")
    for target in ("torchtitan", "nanotron", "deepspeed", "accelerate", "automodel", "slime", "megatron-bridge"):
        with pytest.raises(IllegalPlanError, match="optimizer muon"):
            restrict(by_muon(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=8)), target)
    text = torchrun_script(launch, "0")
    old = text.replace("--use-distributed-optimizer", "").replace("--optimizer muon", "--optimizer dist_muon")
    read = imported(ImportRequest(old, "run.sh", problem.hardware))
    assert_same(problem, plan, read.problem, read.plan)
    fsdp = text.replace("--use-distributed-optimizer", "--use-megatron-fsdp --ckpt-format fsdp_dtensor")
    with pytest.raises(IllegalPlanError, match="Megatron-FSDP with --optimizer muon"):
        imported(ImportRequest(fsdp, "run.sh", problem.hardware))
    for setting, seen in (("--muon-num-ns-steps 8", "Expected 5"), ("--muon-use-syrk", "muon-use-syrk")):
        other = text.replace("--muon-tp-mode", f"{setting} --muon-tp-mode")
        with pytest.raises(InvalidInputError, match=seen):
            imported(ImportRequest(other, "run.sh", problem.hardware))


def test_terms_name_the_update_only_where_it_is() -> None:
    """The terms of a plan have Muon with the job."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=8)
    plan = even_plan(problem, Layout(dp=8, global_batch_size=8, zero_stage=1))
    terms = [{term.name for term in used_terms(case, plan)} for case in (problem, by_muon(problem))]
    assert terms[1] - terms[0] == {"muon"}
