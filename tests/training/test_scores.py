"""Heads of scores: time, memory and messages by hand, reward models on pairs, PPO's critic, proofs, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from milpplan import Layout, Problem, simulate
from milpplan.cli.app import app
from milpplan.communication.wires import end_messages
from milpplan.errors import IllegalPlanError
from milpplan.launchers import restrict
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import Alignment, Lora, Rollout
from milpplan.simulation.layers import Part, Phase, head_endpoint, total_parameters
from milpplan.simulation.layers.kernels import gemm_s, memory_bound_s
from milpplan.simulation.network import collectives
from milpplan.switching.ownership import model_tensors
from milpplan.validation.terms import step_doubled_s, step_without_s, used_terms
from tests.amounts import first, long_but
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import columns_of, even_plan, ideal_hardware, problem_of, random_layout, shipped_model
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host

REWARD, CRITIC = Alignment(method="reward"), Alignment(method="critic")


def scored(problem: Problem, alignment: Alignment | None = None, num_labels: int = 1) -> Problem:
    """The problem with a head of scores, and another way of training."""
    job = problem.job.model_copy(update={"alignment": alignment})
    return problem.model_copy(update={"model": problem.model.with_scores(num_labels), "job": job})


def test_a_head_of_scores_by_hand() -> None:
    """With sequence parallelism every rank scores its tokens and gathers scores of 4 bytes; the matrix is copied,
    and the kept bytes are the norm's input and output and the scores."""
    problem = scored(problem_of("llama3-8b", "dgx-h100", sequence_length=4096), num_labels=3)
    columns, gpu = columns_of(tp=4, sequence_parallel=True), problem.hardware.accelerator
    end, tokens, hidden = head_endpoint(problem, columns), 1024.0, 4096.0
    assert end.parameters(columns.tp)[0] == 3 * 4096 + 4096
    assert end.kept_bytes[0] == 2 * 2 * tokens * hidden + 4 * 4096 * 3
    forward = (
        memory_bound_s(gpu, 2 * 2 * tokens * hidden)
        + gemm_s(gpu, "bf16", tokens, 3, hidden)
        + memory_bound_s(gpu, 32 * 4096 * 3)
    )
    assert end.seconds[Part.COMPUTE, Phase.FORWARD, 0] == pytest.approx(float(forward))
    gather = collectives.all_gather_s(problem.hardware, 4.0 * 4096 * 3, 4, 1)
    assert end.seconds[Part.TP, Phase.FORWARD, 0] == pytest.approx(float(gather))
    assert not end.seconds[Part.TP, Phase.BACKWARD].any()
    (message,) = end_messages(problem, True, columns)
    assert (message.operation, message.num_bytes[0], message.forward[0], message.backward[0]) == (
        "all_gather",
        4.0 * 4096 * 3,
        1.0,
        0.0,
    )
    alone = head_endpoint(problem, columns_of(tp=4))
    assert not alone.seconds[Part.TP].any()


def test_parameters_are_those_of_the_published_reward_model() -> None:
    """Skywork-Reward-Llama-3.1-8B, Llama 3.1 8B with a score for its output matrix, has 7.5 billion parameters
    (its model card); Llama 3 has the same sizes."""
    model = shipped_model("llama3-8b").with_scores()
    assert total_parameters(model) == 8_030_261_248 - (128_256 - 1) * 4096
    assert round(total_parameters(model) / 1e9, 1) == 7.5
    tensors = model_tensors(model)
    assert sum(tensor.shape.size for tensor in tensors) == total_parameters(model)
    tied = shipped_model("gemma-7b")
    assert total_parameters(tied.with_scores()) == total_parameters(tied) + tied.hidden_size


def test_the_critic_runs_a_forward_before_its_update() -> None:
    """At peak everywhere and without a pipeline the critic's step is four thirds of training its model, which
    takes as long as layers without a vocabulary; FLOPs likewise. Its rollout is a phase of the step."""
    base = problem_of("llama3-8b", ideal_hardware(), sequence_length=512, num_gpus=1, global_batch_size=4)
    plan = even_plan(base, Layout(micro_batch_size=2, global_batch_size=4))
    plain, critic, whole = (simulate(problem, plan) for problem in (scored(base), scored(base, CRITIC), base))
    assert critic.breakdown_s["compute"] == pytest.approx(plain.breakdown_s["compute"] * 4 / 3, rel=2e-3)
    assert critic.mfu * critic.step_time_s == pytest.approx(plain.mfu * plain.step_time_s * 4 / 3)
    head = 6 * (128_256 - 1) * 4096
    tokens = 4 * 512
    flops = (
        whole.mfu * whole.step_time_s - plain.mfu * plain.step_time_s
    ) * base.hardware.accelerator.bf16.peak_flops_per_s
    assert flops == pytest.approx(head * tokens)
    problem = scored(base, CRITIC)
    job = problem.job.model_copy(update={"rollout": Rollout(seconds=2.0)})
    assert simulate(problem.model_copy(update={"job": job}), plan).step_time_ns == critic.step_time_ns + 2 * 10**9


def test_pairs_of_a_reward_model_share_a_micro_batch() -> None:
    """Chosen and rejected sequences are scored together, without a reference."""
    problem = scored(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16), REWARD)
    odd = Layout(dp=8, global_batch_size=16)
    assert broken_rules(problem, odd) == ["pairs_share_a_micro_batch"]
    even = odd.model_copy(update={"micro_batch_size": 2})
    plan = even_plan(problem, even)
    assert simulate(problem, plan) == simulate(scored(problem), plan)
    with pytest.raises(ValidationError, match="reward has no reference"):
        Alignment(method="reward", reference="frozen")


@pytest.mark.parametrize("seed", long_but((1,), range(12)))
def test_all_prices_agree(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = with_host(scored(real_problem(random), CRITIC if seed % 2 else None, 1 + seed % 3))
    layouts = [
        switched(random, problem, random_layout(random, problem)).model_copy(update={"offload_weights": False})
        for _ in range(12)
    ]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", first(1, BACKENDS))
@pytest.mark.parametrize("seed", long_but((71,), range(71, 79)))
def test_optimum_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems of critics, reward models and classes, on every backend."""
    seed += 100 * BACKENDS.index(backend)
    check(scored(random_problem(seed), (CRITIC, None)[seed % 2], 1 + seed % 3), backend)


def test_the_term_is_named_as_not_measured() -> None:
    """A plan with a head of scores has a term of its own, and a critic that of its forward."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16)
    plan = even_plan(problem, Layout(dp=8, micro_batch_size=2, global_batch_size=16))
    added = {term.name for term in used_terms(scored(problem, CRITIC), plan)}
    added -= {term.name for term in used_terms(problem, plan)}
    assert added == {"head_of_scores", "reference_forwards"}
    (term,) = [term for term in used_terms(scored(problem), plan) if term.name == "head_of_scores"]
    step = simulate(scored(problem), plan).step_time_s
    assert step_without_s(scored(problem), plan, [term]) < step < step_doubled_s(scored(problem), plan, [term])


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"alignment": Alignment(method="dpo")}, "alignment dpo beside a head of 1 scores"),
        ({"lora": Lora(rank=8)}, "lora beside a head of 1 scores"),
        ({"kind": "inference"}, "inference beside a head of 1 scores"),
        ({"mtp_layers": 1}, "mtp_layers beside a head of 1 scores"),
    ],
)
def test_what_no_formula_has_is_refused(changes: dict[str, Any], seen: str) -> None:
    """Jobs that need the vocabulary, or a head that a trainer treats apart, are refused."""
    problem = scored(problem_of("llama3-8b", "dgx-h100"))
    job = problem.job.model_copy(update=changes)
    with pytest.raises(ValidationError, match=seen):
        Problem(model=problem.model, hardware=problem.hardware, job=job)
    tied = problem.model.model_copy(update={"tie_word_embeddings": True})
    with pytest.raises(ValidationError, match="tie_word_embeddings=false"):
        Problem(model=tied, hardware=problem.hardware, job=problem.job)
    words = problem_of("llama3-8b").job.model_copy(update={"alignment": CRITIC})
    with pytest.raises(ValidationError, match="critic beside a head over the vocabulary"):
        Problem(model=shipped_model("llama3-8b"), hardware=problem.hardware, job=words)


def test_launchers_refuse_and_the_command_line_replaces_the_head() -> None:
    """Exports write logits of words. ``--alignment critic`` gives a model over words its head of one score."""
    with pytest.raises(IllegalPlanError, match="head of scores"):
        restrict(scored(problem_of("llama3-8b", "dgx-h100")), "megatron")
    job = ("llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "32", "--space", "uniform", "--fix", "pp=1")
    answer = CliRunner().invoke(app, ["solve", *job, "--alignment", "critic"])
    assert answer.exit_code == 0
    assert "the critic of PPO" in " ".join(answer.output.split())
    refused = CliRunner().invoke(app, ["solve", *job, "--alignment", "reward", "--reference", "frozen"])
    assert refused.exit_code == 2
    assert "reward has no reference" in " ".join(refused.output.split())
