"""Recomputation by module: bytes, replays, messages, proofs, Megatron-LM's flag both ways."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.switches import moonlight_step, nemotron_step
from milpplan import Layout, Problem, simulate, solve
from milpplan.cli.app import app
from milpplan.communication import wires
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import ImportRequest, restrict
from milpplan.launchers.megatron.launcher import imported, torchrun_script
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.problem import MODULE_SETS, Lora, Plan, Space
from milpplan.reports.words.plan_words import space_text
from milpplan.simulation import LayoutColumns
from milpplan.simulation.bulk.simulate_many import uniform_plan
from milpplan.simulation.layers import EXPOSED, Phase, layer_activations, layer_seconds
from tests.amounts import first, long_but
from tests.communication.test_messages import HIDDEN, OF_PART, free_of_contention, seconds
from tests.consumers import assert_consumers_agree
from tests.launchers.cases import round_trip
from tests.launchers.test_megatron_round_trip import assert_same
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import brute_force, constants, time_and_peak
from tests.optimize.problems import with_memory
from tests.optimize.test_execution import with_execution
from tests.optimize.test_optimality import BACKENDS, assert_optimal
from tests.oracles.whole_program import solve_monolithic
from tests.simulation.cases import MODEL_HARDWARE, columns_of, even_plan, problem_of, random_layout
from tests.simulation.test_bulk import with_host
from tests.small import small_problem

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def priced_sets(problem: Problem) -> list[str]:
    """All values of the field that the problem prices."""
    return [modules for modules in MODULE_SETS if problem.prices_modules(modules)]


def dropped(problem: Problem, kind: int, modules: str, **layout: Any) -> float:
    """Bytes that the modules drop of a layer."""
    columns = columns_of(recompute_modules=modules, **layout)
    return float(layer_activations(problem, problem.model.kinds[kind], columns).dropped_selective[0])


def test_bytes_by_hand() -> None:
    """DeepSeek-V3, 4,096 tokens over 2 ranks with sequence parallelism: u = 2 bytes, h = 7,168, 64 heads a rank of
    192 + 192 + 128, 2,048 x 8 rows of 2,048 in the routed experts and 4,096 of 1,024 in the shared one."""
    problem = problem_of("deepseek-v3", "dgx-h100", sequence_length=4096)
    split: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "ep": 8, "dp": 8}
    local, rows = 2048 * 7168, 2048 * 8
    expected = {
        "core_attn": 4 * 4096 * 64,
        "mla_up_proj": 2 * 4096 * 64 * (192 + 192 + 128),
        "moe_act": 2 * rows * 2048,
        "layernorm": 2 * 2 * local,
        "shared_experts": 2 * 4096 * 3 * 1024,
        "moe": 2 * rows * 7168 + 2 * rows * 3 * 2048 + 8 * 2048 * 256 + 2 * rows * 7168 + 2 * 4096 * 3 * 1024,
        "mlp": 0,
    }
    experts = problem.model.layer_kinds[-1]
    for modules, size in expected.items():
        assert dropped(problem, experts, modules, **split) == size
    # Of the dense layers, 9,216 of 18,432 neurons a rank, and the input of the first product.
    dense = problem.model.layer_kinds[0]
    assert dropped(problem, dense, "mlp", **split) == 2 * local + 2 * 4096 * 3 * 9216
    assert dropped(problem, dense, "moe", **split) == 0
    assert dropped(problem, dense, "layernorm", **split) == 2 * local


@pytest.mark.parametrize("case", range(len(MODEL_HARDWARE)))
def test_sets_are_sums_and_less_than_whole_layers(case: int) -> None:
    """Bytes and replays of modules beside each other add up, none is above full recomputation, and the messages
    that replays repeat take the time of their communication."""
    model, hardware, kernel, precision = MODEL_HARDWARE[case]
    problem = free_of_contention(
        problem_of(model, hardware, sequence_length=1024, attention_kernel=kernel, precision=precision)
    )
    layout = random_layout(np.random.default_rng(case), problem)
    sets = priced_sets(problem)
    columns = LayoutColumns.of([layout.model_copy(update={"recompute_modules": modules}) for modules in sets])
    assert len(sets) > 1 or not problem.model.recompute_modules
    for kind in problem.model.kinds:
        whole, bytes_of = layer_seconds(problem, kind, columns), layer_activations(problem, kind, columns)
        alone = {
            modules: (bytes_of.dropped_selective[row], whole[EXPOSED, Phase.SELECTIVE, row].sum())
            for row, modules in enumerate(sets)
        }
        for modules in sets[1:]:
            parts = np.sum([alone[name] for name in modules.split("+")], axis=0)
            assert alone[modules] == pytest.approx(parts, rel=1e-9, abs=1e-12)
        assert np.all(bytes_of.dropped_selective <= bytes_of.dropped_full * (1 + 1e-12))
        replays, full = (whole[EXPOSED, phase, 1:].sum(axis=0) for phase in (Phase.SELECTIVE, Phase.FULL))
        assert np.all(replays <= full * (1 + 1e-9))
        for row in range(1, len(sets), 5):
            one = columns.take(np.array([row]))
            again = wires.replayed_messages(problem, kind, one)
            for part, names in OF_PART.items():
                expected = whole[part, Phase.SELECTIVE, row]
                expected += whole[HIDDEN[part], Phase.SELECTIVE, row] if part in HIDDEN else 0.0
                took = sum(m.backward[0] * seconds(problem, one, m) for m in again if m.parallelism in names)
                assert took == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_published_savings() -> None:
    """Nemotron 3 Nano on 16 H100: moe_act saves 4.194 GB, layernorm beside moe 1.014 GB at 3.07 % of the step.
    Moonlight on 8 H100: moe_act saves 0.677 GB for 1.99 % of the step, mla_up_proj 0.716 GB for 5.19 %, core_attn
    0.004 GB for 3.85 %. The latter run waits for its host (a third of the rate that is simulated), so the order of
    the prices holds, and not their size; its savings end where another moment is the peak: layernorm beside
    moe_act saves 0.669 GB.

    Source: NVIDIA-NeMo/Megatron-Bridge at 067f987d, skills/nemo-mbridge-perf-activation-recompute/SKILL.md.
    """
    sets = None, "moe_act", "moe", "layernorm+moe"
    none, act, moe, both = ((report.step_time_s, report.peak_memory_bytes) for report in map(nemotron_step, sets))
    assert none[1] - act[1] == pytest.approx(4.194e9, rel=0.05)
    assert moe[1] - both[1] == pytest.approx(1.014e9, rel=0.05)
    assert moe[0] < both[0] < 1.0307 * moe[0]
    reports = map(moonlight_step, (None, "moe_act", "mla_up_proj", "core_attn"))
    none, act, up, core = ((report.step_time_s, report.peak_memory_bytes) for report in reports)
    assert none[1] == pytest.approx(36.618e9, rel=0.03)
    assert none[1] - act[1] == pytest.approx(0.677e9, rel=0.3)
    assert none[1] - up[1] == pytest.approx(0.716e9, rel=0.3)
    assert 0 < none[1] - core[1] < 0.005e9
    prices = [after[0] / none[0] - 1 for after in (act, up, core)]
    assert 0 < prices[0] < 0.0199 < prices[1] < 0.0519
    assert prices[0] < prices[2] < 0.0385


def tight_problem(seed: int) -> Problem:
    """A problem whose memory is what selective recomputation of some set of modules takes."""
    problem = with_execution(seed, ("recompute_modules",), ("free", "uniform")[seed % 2])
    opened = problem.space.model_copy(update={"recompute": Space().recompute})
    problem = problem.model_copy(update={"space": opened})
    columns = layout_space(problem).columns
    row = random.Random(seed).choice(np.flatnonzero(columns.recompute_modules).tolist())
    plan = uniform_plan(problem, columns.at(row), "selective")
    return with_memory(problem, time_and_peak(problem, constants(problem, plan.layout), plan)[1])


@pytest.mark.parametrize("backend", long_but(("cpsat",), BACKENDS))
@pytest.mark.parametrize("count", long_but((5,), (5, 8)))
def test_optimum_is_that_of_brute_force(count: int, backend: str) -> None:
    """What selective recomputation replays is decided as brute force decides, in both spaces; most optima name
    modules, and no bound is above a plan of them."""
    decided = []
    for seed in range(700, 700 + count):
        problem = tight_problem(seed)
        result = solve(problem, backend=backend, gap=0.0)
        assert_optimal(problem, result, brute_force(problem))
        assert result.plan is not None
        decided.append(result.plan.layout.recompute_modules)
        used = any(stage.recompute.selective for stage in result.plan.virtual_stages)
        assert used or decided[-1] == "default"
        assert {one.layout.recompute_modules for one in bounded_layouts(problem)} == set(problem.module_sets)
    assert len(set(decided) - {"default"}) >= 3


@pytest.mark.long
def test_one_program_has_the_optimum() -> None:
    """The program over blocks and the program of the whole space have the optimum of brute force, too."""
    for seed in (700, 702, 712):
        problem = tight_problem(seed)
        best = brute_force(problem)
        assert best is not None
        whole = solve_monolithic(problem, gap=0.0, max_layouts=200)
        assert whole.step_time_ns == pytest.approx(best.value, rel=1e-12)
        assert solve_block_program(solve(problem, gap=0.0)).step_time_ns == whole.step_time_ns


@pytest.mark.parametrize("model", first(1, ("deepseek-v3", "llama3-8b")))
def test_consumers_agree(model: str) -> None:
    """Bulk simulation, bounds and traffic give the simulator's numbers for layouts that name modules."""
    generator = np.random.default_rng(7)
    problem = with_host(problem_of(model, "dgx-h100", sequence_length=1024))
    sets = priced_sets(problem)
    layouts = [
        random_layout(generator, problem).model_copy(update={"recompute_modules": str(generator.choice(sets))})
        for _ in range(4)
    ]
    assert_consumers_agree(problem, layouts, generator)


def test_launches_name_the_modules() -> None:
    """An export names the set, and an import reads it; modules that a model lacks change nothing, and modules
    inside ``moe`` are refused."""
    job: dict[str, int] = {"num_gpus": 16, "global_batch_size": 32, "sequence_length": 4096}
    problem = problem_of("qwen3-30b-a3b", "dgx-h100", **job)
    layout = Layout(ep=8, dp=16, zero_stage=1, global_batch_size=32, recompute_modules="layernorm+moe", **OVERLAPS)
    plan = even_plan(problem, layout, selective=48)
    launch, found = round_trip(problem, plan)
    assert_same(problem, plan, found.problem, found.plan)
    assert not any("no module drops" in note for note in launch.notes)
    script = torchrun_script(launch, "0")
    flag = "--recompute-modules layernorm moe"
    assert flag in script

    def read(modules: str) -> Plan:
        text = script.replace(flag, f"--recompute-modules {modules}")
        return imported(ImportRequest(text, "megatron.sh", problem.hardware)).plan

    assert read("moe_act layernorm").layout.recompute_modules == "moe_act+layernorm"
    assert read("mlp core_attn").layout.recompute_modules == "core_attn"
    assert read("mlp") == even_plan(
        problem, layout.model_copy(update={"recompute_modules": "default", "expert_dispatch": "deepep"})
    )
    with pytest.raises(InvalidInputError, match="moe, moe_act is not priced"):
        read("moe moe_act")


def test_targets_count_what_their_modules_keep() -> None:
    """A plan for Megatron-LM replays the modules that its export names, and keeps shared experts' activations: the
    default drops them. Without a flash kernel both are the scores of the attention."""
    job: dict[str, Any] = {"num_gpus": 64, "global_batch_size": 64, "sequence_length": 4096}
    problem = problem_of("deepseek-v3", "dgx-h100", **job)
    (modules,) = restrict(problem, "megatron").space.recompute_modules or ()
    assert modules == "moe_act+layernorm+mla_up_proj"
    layout = Layout(ep=8, dp=64, zero_stage=1, global_batch_size=64, **OVERLAPS)
    plan = even_plan(problem, layout, selective=61)
    named = plan.model_copy(update={"layout": layout.model_copy(update={"recompute_modules": modules})})
    # Outputs of the activations of 58 shared experts and 3 dense layers, in bf16.
    kept = 2 * 4096 * (58 * 2048 + 3 * 18_432)
    assert simulate(problem, named).peak_memory_bytes >= simulate(problem, plan).peak_memory_bytes + kept
    unfused = problem.model_copy(update={"job": problem.job.model_copy(update={"attention_kernel": "unfused"})})
    assert restrict(unfused, "megatron").space.recompute_modules == ("default",)


def test_targets_have_modules_of_dense_models() -> None:
    """Megatron-LM drops no norm and no activation of a dense model with flash attention, but whole MLPs."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=8)
    assert restrict(problem, "megatron").space.recompute == ("none", "full")
    opened = problem.space.model_copy(update={"recompute_modules": None})
    space = restrict(problem.model_copy(update={"space": opened}), "megatron").space
    assert (space.recompute, space.recompute_modules) == (("none", "selective", "full"), ("mlp",))
    alone = problem.model_copy(update={"space": space.model_copy(update={"recompute": ("none", "full")})})
    assert alone.module_sets == ("mlp",)


def test_refusals() -> None:
    """Modules that a model lacks, inside another, beside adapters or beside kept inputs are refused, in simulation
    as in the space; a name that no module has is refused by the command."""
    problem = problem_of("mixtral-8x7b", "dgx-h100", num_gpus=8, global_batch_size=8)
    adapted = problem.model_copy(update={"job": problem.job.model_copy(update={"lora": Lora(rank=8)})})
    base: dict[str, Any] = {"tp": 2, "dp": 4, "sequence_parallel": True, "global_batch_size": 8}
    refused = [
        (problem, Layout(**base, recompute_modules="mlp")),
        (problem, Layout(**base, recompute_modules="moe+moe_act")),
        (problem, Layout(**base, recompute_modules="moe", gather_again=False)),
        (adapted, Layout(**base, recompute_modules="moe")),
    ]
    for asked, layout in refused:
        assert broken_rules(asked, layout) == ["recompute_modules_of_the_model"]
        with pytest.raises(IllegalPlanError, match="recompute_modules"):
            simulate(asked, even_plan(asked, layout))
    with pytest.raises(ValueError, match="modules are default"):
        Layout(global_batch_size=8, recompute_modules="attention")


@pytest.mark.long
def test_command_names_what_is_replayed() -> None:
    """``--fix`` takes modules in any order; the answer says what is replayed, and that no measured run is."""
    words = "solve mixtral-8x7b dgx-h100 --gpus 64 --global-batch 128 --space uniform"
    fixed = "--fix recompute_modules=moe+layernorm,recompute=selective,tp=1,pp=4,zero_stage=1"
    done = CliRunner().invoke(app, f"{words} {fixed}".split())
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "selective recomputation replays layernorm, moe" in said
    assert "recomputation of named modules" in said


def test_a_proof_names_the_sets_that_it_covers() -> None:
    """The space that leaves the modules open has a chain of sets, not all of them, and its words say so."""
    problem = small_problem(space={"recompute_modules": None})
    assert "a chain of recompute_modules" in space_text(problem)
    assert len(problem.module_sets) < len(MODULE_SETS)
