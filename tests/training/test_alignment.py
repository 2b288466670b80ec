"""Training on preferences: the reference's time, memory and messages, pairs, proofs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Layout, Problem, simulate, solve
from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError
from milpplan.explain import run_totals
from milpplan.launchers import restrict
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.problem import Alignment, Lora, Plan, RankOrder, Rollout
from milpplan.simulation import LayoutColumns, costs_of, plan_stages, step_times_ns
from milpplan.simulation.layers import (
    Part,
    Phase,
    Term,
    embedding_endpoint,
    head_endpoint,
    layer_seconds,
    total_parameters,
)
from milpplan.simulation.layout_costs import layout_costs
from milpplan.switching.planning import plan_switch
from milpplan.switching.routes import Links
from milpplan.validation.terms import step_doubled_s, step_without_s, used_terms
from tests.amounts import first, long_but
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import even_plan, ideal_hardware, problem_of, random_layout, random_plan
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host

FROZEN, BEFORE = Alignment(method="dpo"), Alignment(method="dpo", reference="none")
GRPO = Alignment(method="grpo")
ROLLOUT = Rollout(seconds=0.004, held_bytes=10**6)
APART = ("--rollout-apart", "--rollout-seconds", "30")


def aligned(problem: Problem, alignment: Alignment | None = FROZEN, rollout: Rollout | None = None) -> Problem:
    """The problem with another way of training."""
    changes = {"alignment": alignment, "rollout": rollout}
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


def test_a_reference_is_a_third_of_the_work() -> None:
    """At peak everywhere and without a pipeline, a forward beside forward and backward is four thirds of the
    step; so is the count of FLOPs. Log-probabilities from before cost nothing."""
    problem = problem_of("llama3-8b", ideal_hardware(), sequence_length=512, num_gpus=1, global_batch_size=4)
    plan = even_plan(problem, Layout(micro_batch_size=2, global_batch_size=4))
    alone, frozen, before = (simulate(aligned(problem, a), plan) for a in (None, FROZEN, BEFORE))
    assert before == alone
    for name in ("compute", "tp_exposed"):
        assert frozen.breakdown_s[name] == pytest.approx(alone.breakdown_s[name] * 4 / 3, rel=2e-3)
    assert frozen.mfu * frozen.step_time_s == pytest.approx(alone.mfu * alone.step_time_s * 4 / 3)
    both = simulate(aligned(problem, GRPO), plan)
    assert both.breakdown_s["compute"] == pytest.approx(alone.breakdown_s["compute"] * 5 / 3, rel=4e-3)
    assert both.mfu * both.step_time_s == pytest.approx(alone.mfu * alone.step_time_s * 5 / 3)


def test_only_the_forward_changes() -> None:
    """Forwards of layers and ends double in every part. With adapters the reference is the base model, whose
    forward is faster than the policy's."""
    columns = LayoutColumns.of(
        [Layout(tp=2, dp=2, sequence_parallel=True, micro_batch_size=2, global_batch_size=4)]
    )
    for model, lora in (("mixtral-8x7b", None), ("llama3-8b", Lora(rank=16))):
        problem = problem_of(model, "dgx-h100", sequence_length=1024, lora=lora)
        base = problem_of(model, "dgx-h100", sequence_length=1024)
        kind = problem.model.kinds[-1]
        alone, both, reference = (layer_seconds(p, kind, columns) for p in (problem, aligned(problem), base))
        added = both - alone
        assert added[:, Phase.FORWARD] == pytest.approx(reference[:, Phase.FORWARD], abs=1e-15)
        assert not added[:, Phase.BACKWARD :].any()
        in_grpo = layer_seconds(aligned(problem, GRPO), kind, columns) - both
        assert in_grpo[:, Phase.FORWARD] == pytest.approx(alone[:, Phase.FORWARD], abs=1e-15)
        assert (added[Part.COMPUTE, Phase.FORWARD] < alone[Part.COMPUTE, Phase.FORWARD]).all() == (
            lora is not None
        )
        for end in (embedding_endpoint, head_endpoint):
            single, double = (end(p, columns).seconds for p in (problem, aligned(problem)))
            assert double[:, Phase.FORWARD] == pytest.approx(2 * single[:, Phase.FORWARD])
            assert (double[:, Phase.BACKWARD] == single[:, Phase.BACKWARD]).all()


@pytest.mark.parametrize("zero_stage", range(4))
def test_the_copy_is_sharded_as_the_policy(zero_stage: int) -> None:
    """A reference holds two bytes a parameter, sharded only where the policy's weights are; nothing else changes,
    and adapters or log-probabilities from before need no copy."""
    problem = problem_of("llama3-8b", "dgx-h100")
    overlaps = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), zero_stage > 1)
    columns = LayoutColumns.of(
        [Layout(dp=8, micro_batch_size=2, global_batch_size=16, zero_stage=zero_stage, **overlaps)]
    )
    alone, frozen, before = (layout_costs(aligned(problem, a), columns).at(0) for a in (None, FROZEN, BEFORE))
    added = frozen.state_bytes - alone.state_bytes
    layers = np.array([problem.model.num_layers, 1, 1])
    ends = added[0, 1:].sum()
    expected = 2 * total_parameters(problem.model)
    whole = expected if zero_stage < 3 else ends + (expected - ends) / 8
    assert int(added[0] @ layers) == pytest.approx(whole, abs=64)
    assert ends == 2 * (2 * 128_256 * 4096 + 4096)
    assert not added[1:].any()
    assert (before.state_bytes == alone.state_bytes).all()
    for name in ("kept_bytes", "workspace_bytes", "buffer_bytes", "optimizer_ns", "reduce_ns", "gather_ns"):
        assert (getattr(frozen, name) == getattr(alone, name)).all()
    adapted = problem_of("llama3-8b", "dgx-h100", lora=Lora(rank=16))
    lora, with_base = (layout_costs(aligned(adapted, a), columns).at(0) for a in (None, FROZEN))
    assert (lora.state_bytes == with_base.state_bytes).all()
    assert (with_base.duration_ns[:, Phase.FORWARD] > lora.duration_ns[:, Phase.FORWARD]).all()


def test_stages_send_both_activations() -> None:
    """A transfer carries the activations of policy and reference, as one of twice the sequences does."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=4, global_batch_size=8)
    sizes = LayoutColumns.of([Layout(pp=4, micro_batch_size=size, global_batch_size=8) for size in (2, 4)])
    alone, frozen = (layout_costs(aligned(problem, a), sizes) for a in (None, FROZEN))
    assert frozen.at(0).transfer_ns == alone.at(1).transfer_ns > alone.at(0).transfer_ns


def test_rollouts_add_time_and_memory() -> None:
    """On the same GPUs a rollout adds its seconds to the step and what its engine holds to every stage's peak;
    apart it adds nothing."""
    problem = aligned(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16), GRPO)
    plan = even_plan(problem, Layout(dp=4, pp=2, global_batch_size=16))
    bare, beside, apart = (
        simulate(aligned(problem, GRPO, rollout), plan)
        for rollout in (None, Rollout(seconds=12.5, held_bytes=2**30), Rollout(seconds=12.5, apart=True))
    )
    assert apart == bare
    assert beside.step_time_ns == bare.step_time_ns + 12_500_000_000
    assert beside.breakdown_s["step_overhead"] == pytest.approx(bare.breakdown_s["step_overhead"] + 12.5)
    for more, less in zip(beside.stages, bare.stages, strict=True):
        assert more.memory.peak_bytes == less.memory.peak_bytes + 2**30


def test_a_run_waits_for_rollouts_on_other_accelerators() -> None:
    """Ten generations of 1,000 s are the length of the run and its bound, whatever the plan; rollouts that are
    faster than the training change nothing."""
    problem = aligned(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16), GRPO)
    whole = {"training_tokens": 10 * 16 * problem.job.sequence_length}
    totals = []
    for rollout in (None, Rollout(seconds=0.001, apart=True), Rollout(seconds=1000.0, apart=True)):
        job = aligned(problem, GRPO, rollout).job.model_copy(update=whole)
        space = problem.space.model_copy(update={"kind": "uniform", "tp": (1,)})
        totals.append(run_totals(solve(problem.model_copy(update={"job": job, "space": space}))))
    assert totals[0] == totals[1] != totals[2]
    assert totals[2] is not None
    assert totals[2].gpu_hours == pytest.approx(8 * 10_000 / 3600)
    assert totals[2].least_gpu_hours == pytest.approx(8 * 10_000 / 3600)


@pytest.mark.parametrize("seed", range(3))
def test_phases_in_turn_are_not_faster(seed: int) -> None:
    """Forwards as phases of their own, each a flow shop of sum f + (M - 1) max f, take at least as long as beside
    those of training, and as long where all stages are alike."""
    random = np.random.default_rng(seed)
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=4, global_batch_size=12, sequence_length=1024)
    layout = Layout(pp=4, micro_batch_size=1, global_batch_size=12)
    plan = Plan.model_validate(random_plan(random, problem, layout).model_dump())
    stages = plan_stages(costs_of(problem, layout), problem.model.layer_kinds, plan)
    forward = np.array([int(stage.terms[Term.FORWARD, 0]) for stage in stages])
    phase_ns = forward.sum() + 11 * forward.max()
    alone, both = (simulate(aligned(problem, a), plan).step_time_ns for a in (None, GRPO))
    assert alone + 2 * 12 * int(forward.min()) <= both <= alone + 2 * phase_ns + 64
    alike = np.stack([stage.terms[:, 0] for stage in stages[1:2] * 4], axis=1)
    more = alike.copy()
    more[[Term.FORWARD, Term.LAST]] += alike[Term.FORWARD]
    steps = step_times_ns(layout, costs_of(problem, layout), np.stack([alike, more]))
    assert steps[1] - steps[0] == (12 + 4 - 1) * alike[Term.FORWARD, 0]


def test_weights_move_as_hybridflow_says() -> None:
    """From tp = 8 to generation with tp = 4, a GPU receives (tp - tg) / (tg tp) of the model where its new slice
    holds its old slice, and more where it does not; padding of the vocabulary aside.

    Source: Sheng et al. 2024 (HybridFlow), table 2."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=8)
    links = Links.of(problem.hardware, 8)
    before = even_plan(problem, Layout(tp=8, global_batch_size=8))
    received = []
    orders: tuple[RankOrder, ...] = ("dp-tp-cp-pp", "tp-cp-dp-pp")
    for order in orders:
        after = even_plan(problem, Layout(tp=4, dp=2, rank_order=order, global_batch_size=8))
        switch = plan_switch(problem.model, before, after, links, "parameters", "nearest")
        received.append(switch.received_bytes.sum(axis=1) / (2 * total_parameters(problem.model)))
    assert received[0] == pytest.approx(np.full(8, (8 - 4) / (4 * 8)), rel=5e-3)
    assert received[1].mean() > 1.4 * received[0].mean()


@pytest.mark.parametrize("seed", long_but((2,), range(24)))
def test_all_prices_agree(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up, with
    adapters on every third problem."""
    random = np.random.default_rng(seed)
    way = (FROZEN, None) if seed % 2 else (GRPO, ROLLOUT)
    problem = with_host(aligned(real_problem(random), *way))
    if seed % 3 == 2:
        base = problem_of("llama3-8b", "dgx-h100", sequence_length=512, lora=Lora(rank=8))
        problem = with_host(aligned(base, *way))
    layouts = []
    for _ in range(12):
        layout = switched(random, problem, random_layout(random, problem))
        doubled = 2 * layout.global_batch_size if layout.micro_batch_size == 1 else layout.global_batch_size
        layouts.append(
            layout.model_copy(
                update={"micro_batch_size": 2, "global_batch_size": doubled, "offload_weights": False}
            )
        )
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", first(1, BACKENDS))
@pytest.mark.parametrize("seed", long_but((51,), range(51, 63)))
def test_optimum_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems of pairs with a frozen reference, and of rollouts, on every backend."""
    seed += 100 * BACKENDS.index(backend)
    if seed % 2:
        problem = random_problem(seed, alignment=FROZEN)
        assert all(size % 2 == 0 for size in layout_space(problem).columns.micro_batch_size)
    else:
        problem = random_problem(seed, alignment=GRPO, rollout=ROLLOUT)
    check(problem, backend)


def test_pairs_share_a_micro_batch() -> None:
    """Layouts with odd micro-batches are refused by name, in the space and by the simulator."""
    problem = aligned(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16))
    odd = Layout(dp=8, global_batch_size=16)
    assert broken_rules(problem, odd) == ["pairs_share_a_micro_batch"]
    assert broken_rules(problem, odd.model_copy(update={"micro_batch_size": 2})) == []
    assert layout_space(problem).rejected["pairs_share_a_micro_batch"] > 0
    with pytest.raises(IllegalPlanError, match="2 sequences of a pair share a micro-batch"):
        simulate(problem, even_plan(problem, odd))


def test_terms_scale_the_reference() -> None:
    """Without the term a step is that of log-probabilities from before, but for transfers and memory."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16)
    plan = even_plan(problem, Layout(dp=8, micro_batch_size=2, global_batch_size=16))
    (term,) = set(used_terms(aligned(problem), plan)) - set(used_terms(problem, plan))
    assert term.name == "reference_forwards"
    steps = [simulate(aligned(problem, a), plan).step_time_s for a in (BEFORE, FROZEN)]
    assert step_without_s(aligned(problem), plan, [term]) == pytest.approx(steps[0])
    assert step_doubled_s(aligned(problem), plan, [term]) == pytest.approx(2 * steps[1] - steps[0])


def run(*words: str) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(app, list(words))


JOB = (
    "solve",
    "llama3-8b",
    "dgx-h100",
    "--gpus",
    "8",
    "--global-batch",
    "32",
    "--space",
    "uniform",
    "--fix",
    "pp=1",
)


@pytest.mark.long
def test_the_command_line_answers_with_evidence(tmp_path: Path) -> None:
    """A solve names the reference, says that no measured run has one, and writes a plan that launchers
    and ``switch`` refuse."""
    file = tmp_path / "plan.json"
    answer = run(*JOB, "--alignment", "dpo", "--out", str(file), "--verbose")
    said = " ".join(answer.output.split())
    assert answer.exit_code == 0
    assert "DPO with a frozen reference" in said
    assert "terms that no scored run on Hopper exercises: forwards of a frozen reference or of the policy" in said
    assert json.loads(file.read_text())["problem"]["job"]["alignment"] == {"method": "dpo", "reference": "frozen"}
    for words in (("export", str(file), "--to", "nanotron"), ("switch", str(file), str(file))):
        refused = run(*words)
        assert refused.exit_code == 2
        assert "DPO with a frozen reference" in " ".join(refused.output.split())
    with pytest.raises(IllegalPlanError, match="trains on the next token"):
        restrict(aligned(problem_of("llama3-8b")), "megatron")


@pytest.mark.long
def test_a_step_of_grpo_is_one_plan(tmp_path: Path) -> None:
    """A rate makes seconds of the batch; the plan says what the rollout takes, and ``switch`` moves its weights to
    the layout of an inference plan, but not back."""
    files = [str(tmp_path / name) for name in ("train.json", "rollout.json")]
    rate = ("--alignment", "grpo", "--rollout-tokens-per-s", "2000", "--rollout-memory", "8")
    answer = run(*JOB, *rate, "--out", files[0])
    said = " ".join(answer.output.split())
    assert "GRPO with a frozen reference; rollouts of 16.38 s before it on these GPUs" in said
    assert "8.0 GiB held while training" in said
    rollout = json.loads(Path(files[0]).read_text())["problem"]["job"]["rollout"]
    assert rollout == {"seconds": 32 * 8192 / 16_000, "held_bytes": 2**33, "apart": False}
    assert run(*JOB, "--inference", "--fix", "tp=2", "--out", files[1]).exit_code == 0
    moved = json.loads(run("switch", *files, "--json").output)["switches"]
    assert list(moved) == ["parameters"]
    assert run("switch", *reversed(files)).exit_code == 2


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("--alignment", "ppo"), "ppo"),
        (("--reference", "none"), "--reference is 'none', without --alignment"),
        (("--alignment", "dpo", "--rollout-seconds", "3"), "rollout needs alignment grpo"),
        (("--alignment", "grpo", "--rollout-memory", "3"), "described with no time"),
        (("--alignment", "grpo", "--rollout-seconds", "3", "--rollout-tokens-per-s", "9"), "with both times"),
        (("--alignment", "grpo", "--rollout-seconds", "-3"), "seconds"),
        (("--alignment", "grpo", "--rollout-apart", "--rollout-seconds", "3", "--rollout-memory", "1"), "apart"),
        (("--alignment", "grpo", *APART, "--tokens", "1e9", "--deadline-days", "0.5"), "rollouts take"),
        (
            ("--alignment", "grpo", *APART, "--tokens", "1e9", "--objective", "gpu_hours"),
            "rollouts apart need one",
        ),
        (("--alignment", "dpo", "--inference"), "beside inference is not modelled"),
        (("--alignment", "dpo", "--mtp-layers", "1"), "beside layers of multi-token prediction is not modelled"),
        (("--alignment", "dpo", "--target", "torchtitan"), "DPO with a frozen reference"),
        (("--alignment", "dpo", "--fix", "micro_batch_size=1"), "pairs"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...], seen: str) -> None:
    """A job that contradicts itself or the launcher says so."""
    answer = run(*JOB, *words)
    assert answer.exit_code in (2, 3)
    assert seen in " ".join(answer.output.split())


def test_the_host_keeps_no_weights_beside_a_copy() -> None:
    """Weights on the host are refused beside a copy, and allowed where there is none."""
    problem = with_host(problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16))
    layout = Layout(dp=8, micro_batch_size=2, global_batch_size=16, offload_weights=True)
    assert broken_rules(aligned(problem), layout) == ["offloaded_weights_need_no_reference"]
    assert broken_rules(aligned(problem, BEFORE), layout) == []
    with pytest.raises(IllegalPlanError, match="offload_weights beside a frozen reference"):
        simulate(aligned(problem), even_plan(problem, layout))
