"""LoRA adapters and frozen parts: parameters, states, time, proofs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Layout, Problem, simulate
from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError
from milpplan.launchers import restrict
from milpplan.problem import Job, Lora
from milpplan.simulation import LayoutColumns, states
from milpplan.simulation.layers import Part, Phase, layer_activations, layer_seconds, trained_parameters
from milpplan.simulation.layout_costs import layout_costs
from milpplan.validation import used_terms
from tests.amounts import first, long_but
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import (
    MODEL_HARDWARE,
    adapted,
    even_plan,
    ideal_hardware,
    problem_of,
    random_cases,
    random_layout,
    takes_adapters,
)
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host

INDEXED = next(case for case in MODEL_HARDWARE if case[0] == "deepseek-v3.2")
"""A model with sparse attention."""
QV = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def lora_job(problem: Problem, rank: int = 16, modules: tuple[Any, ...] | None = None) -> Problem:
    """The problem with adapters on all matrices, or on those named."""
    lora = Lora(rank=rank, modules=modules or problem.model.linear_modules)
    return problem.model_copy(update={"job": problem.job.model_copy(update={"lora": lora})})


@pytest.mark.parametrize(
    ("model", "rank", "modules", "count"),
    [
        ("llama2-7b", 8, QV, 4_194_304),
        ("llama3-8b", 8, QV, 3_407_872),
        ("llama3-8b", 16, ATTENTION, 13_631_488),
        ("llama3-8b", 16, None, 41_943_040),
        ("gpt3-175b", 8, QV, 37_748_736),
    ],
)
def test_trained_parameters_are_the_published_ones(
    model: str, rank: int, modules: tuple[str, ...] | None, count: int
) -> None:
    """Of Llama, what ``print_trainable_parameters`` of Hugging Face PEFT prints ("trainable params: 4,194,304", or
    13,631,488); of GPT-3 the 37.7M of Hu et al. 2021, table 4."""
    assert trained_parameters(lora_job(problem_of(model), rank, modules)) == count


def test_adapters_of_experts_and_latent_attention_by_hand() -> None:
    """DeepSeek-V3 with rank 8 on the experts and kv_b_proj: every one of 256 + 1 experts has its own adapter."""
    problem = lora_job(problem_of("deepseek-v3"), 8, ("up_proj", "kv_b_proj"))
    up, dense, latent = 8 * (7168 + 2048), 8 * (7168 + 18432), 8 * (512 + 128 * (128 + 128))
    assert trained_parameters(problem) == 61 * latent + 3 * dense + 58 * 257 * up


def test_frozen_parts_have_no_gradients() -> None:
    """Of Llama-3 8B with frozen ends the layers are trained; tied ends are frozen together."""
    problem = problem_of("llama3-8b", frozen=("embedding", "head"))
    assert trained_parameters(problem) == 8_030_261_248 - 2 * 128_256 * 4096 - 4096
    sizes = layout_costs(problem, LayoutColumns.of([Layout(global_batch_size=1)])).at(0).state_bytes
    assert (sizes[0] > 0).all()
    assert (sizes[1:, :-2] > 0).all()
    assert (sizes[1:, -2:] == 0).all()
    with pytest.raises(ValueError, match="share a matrix: freeze both or neither"):
        problem_of("gemma-7b", frozen=("head",))
    with pytest.raises(ValueError, match="llama3-8b has no kv_b_proj to adapt"):
        problem_of("llama3-8b", lora=Lora(rank=8, modules=("kv_b_proj",)))
    with pytest.raises(ValueError, match="must name each matrix once"):
        Lora(rank=8, modules=("q_proj", "q_proj"))
    with pytest.raises(ValueError, match="sparse attention with an indexer"):
        problem_of(INDEXED[0], INDEXED[1], lora=Lora(rank=8))


def test_gpt3_takes_the_papers_memory_and_speed() -> None:
    """Hu et al. 2021, sections 4.2 and 5.5: the states of GPT-3 175B fall to 350 GB, its weights in 16 bits, and
    training gets 25 % faster on the same number of weight shards (43.1 for 32.5 tokens a second: 33 % more)."""
    full = problem_of("gpt3-175b", "dgx-h100", sequence_length=2048)
    plan = even_plan(full, Layout(tp=8, sequence_parallel=True, global_batch_size=4))
    adapted = lora_job(full, 8, QV)
    columns = LayoutColumns.of([plan.layout])
    held = 0.0
    for kind, count in zip(adapted.model.kinds, np.bincount(adapted.model.layer_kinds), strict=True):
        local = states.local_layer_parameters(adapted, kind, columns)
        held += count * states.state_bytes(adapted, columns, local).sum()
    assert 8 * held == pytest.approx(350e9, rel=0.01)
    faster = simulate(full, plan).step_time_s / simulate(adapted, plan).step_time_s
    assert 1.25 < faster < 1.5


def test_backward_is_the_input_gradients_and_the_adapters() -> None:
    """At peak everywhere, the backward of linear layers takes half as long where all weights are frozen, and
    adapters add 6 FLOPs a parameter and token."""
    problem = problem_of("llama3-8b", ideal_hardware(), sequence_length=128)
    columns = LayoutColumns.of([Layout(global_batch_size=1)])
    kind = problem.model.kinds[0]

    def compute(case: Problem) -> np.ndarray[Any, Any]:
        return layer_seconds(case, kind, columns)[Part.COMPUTE, : Phase.BACKWARD + 1, 0]

    bare = lora_job(problem)
    bare.job.lora.__dict__["modules"] = ()
    peak = problem.hardware.accelerator.bf16.peak_flops_per_s
    weights = sum(4096 * width for width in (4096, 1024, 1024, 4096, *[14336] * 3))
    assert compute(problem) - compute(bare) == pytest.approx([0, 2 * weights * 128 / peak])
    adapters = 16 * sum(4096 + width for width in (4096, 1024, 1024, 4096, *[14336] * 3))
    flops = np.array([2, 4]) * adapters * 128
    assert compute(lora_job(problem)) - compute(bare) == pytest.approx(flops / peak)


def test_inputs_of_frozen_layers_are_not_kept() -> None:
    """Of a dense layer in one rank, a frozen one keeps neither norm's output nor the activation's; an adapter on
    one matrix brings back its input, and the rank's columns."""
    problem = problem_of("llama2-7b", "dgx-h100", sequence_length=4096)
    columns, kind = LayoutColumns.of([Layout(global_batch_size=1)]), problem.model.kinds[0]

    def kept(case: Problem) -> float:
        return float(layer_activations(case, kind, columns).kept[0]) / (2 * 4096)

    whole, h, f = kept(problem), 4096, 11008
    assert kept(lora_job(problem)) == whole + 7 * 16
    assert kept(lora_job(problem, 16, ("o_proj",))) == whole - 2 * h - f + 16
    assert kept(lora_job(problem, 16, ("up_proj",))) == whole - h - f + 16
    assert kept(lora_job(problem, 16, QV)) == whole - h - f + 32


@pytest.mark.parametrize("seed", long_but((0,), range(10)))
def test_adapters_take_less_memory_and_no_more_than_their_own_time(seed: int) -> None:
    """On random plans of real models no part of the states grows but the weights, by the adapters; adapters of
    rank 1 on one matrix take no longer than training all weights."""
    for problem, plan in random_cases(seed, 6):
        if not takes_adapters(problem):
            continue
        frozen = lora_job(problem, 1, (problem.model.linear_modules[0],))
        full, part = simulate(problem, plan), simulate(frozen, plan)
        assert part.peak_memory_bytes < full.peak_memory_bytes
        assert part.step_time_ns <= full.step_time_ns
        ends = problem.model_copy(update={"job": problem.job.model_copy(update={"frozen": ("embedding", "head")})})
        assert simulate(ends, plan).peak_memory_bytes <= full.peak_memory_bytes
        assert simulate(ends, plan).step_time_ns <= full.step_time_ns


@pytest.mark.parametrize("seed", long_but((0,), range(20)))
def test_bulk_bounds_and_traffic_know_adapters(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = with_host(adapted(random, real_problem(random)))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(12)]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", first(1, BACKENDS))
@pytest.mark.parametrize("seed", long_but((3,), range(12)))
def test_optimum_with_frozen_weights_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems with adapters or frozen ends, on every backend."""
    first = random_problem(seed + 100 * BACKENDS.index(backend))
    lora = Lora(rank=8, modules=first.model.linear_modules[seed % 3 :])
    change: dict[str, Any] = {"frozen": ("embedding", "head")} if seed % 3 == 2 else {"lora": lora}
    check(first.model_copy(update={"job": first.job.model_copy(update=change)}), backend)


def run(*words: str) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(app, list(words))


JOB = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "32", "--fix", "pp=1,cp=1")


@pytest.mark.long
def test_the_command_line_answers_with_evidence(tmp_path: Path) -> None:
    """A solve with adapters names them, says that no measured run covers them, and writes a plan file that
    ``explain`` reads and ``export`` and ``switch`` refuse by name."""
    file = tmp_path / "plan.json"
    adapters = ("--lora-rank", "8", "--lora-modules", "all-linear")
    answer = run(*JOB, "--space", "uniform", *adapters, "--out", str(file))
    assert answer.exit_code == 0
    assert "no measured run on Hopper covers LoRA adapters or frozen parts" in " ".join(answer.output.split())
    written = json.loads(file.read_text())
    assert written["problem"]["job"]["lora"]["rank"] == 8
    explained = run("explain", str(file))
    assert explained.exit_code == 0
    for words in (("export", str(file), "--to", "torchtitan"), ("switch", str(file), str(file))):
        refused = run(*words)
        assert refused.exit_code == 2
        assert "LoRA adapters of rank 8" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("--lora-modules", "q_proj"), "without --lora-rank"),
        (("--lora-rank", "8", "--lora-modules", "wq"), "--lora-modules 'wq' does not exist"),
        (("--lora-rank", "8", "--lora-modules", "kv_b_proj"), "--lora-modules 'kv_b_proj' does not exist"),
        (("--lora-rank", "0"), "lora.rank"),
        (("--lora-rank", "8", "--freeze", "head"), "lora freezes all parts of the model"),
        (("--lora-rank", "8", "--inference"), "an inference job trains nothing"),
        (("--freeze", "neck"), "Expected one of embedding, head"),
        (("--lora-rank", "8", "--target", "megatron"), "LoRA adapters of rank 8"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...], seen: str) -> None:
    """A job that contradicts itself or the model says so."""
    answer = run(*JOB, *words)
    assert answer.exit_code == 2
    assert seen in " ".join(answer.output.split())


def test_targets_and_terms_name_frozen_parts() -> None:
    """A launcher refuses frozen parts, and the terms of a plan have them only where they are."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=8)
    plan = even_plan(problem, Layout(dp=8, global_batch_size=8))
    frozen = problem.model_copy(update={"job": Job(**{**dict(problem.job), "frozen": ("embedding",)})})
    with pytest.raises(IllegalPlanError, match="frozen embedding"):
        restrict(frozen, "nanotron")
    names = [{term.name for term in used_terms(case, plan)} for case in (problem, frozen)]
    assert names[1] - names[0] == {"frozen_weights"}
