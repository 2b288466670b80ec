"""Inputs of modules on the host: bytes, transfers, proofs, Megatron-LM's flags both ways, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import Layout, Problem, simulate, solve
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import ImportRequest
from milpplan.launchers.megatron.launcher import Megatron, imported, torchrun_script
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import OFFLOAD_SETS, SPLIT_SCHEDULES, Space
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import hosted_module_bytes, layer_activations
from milpplan.simulation.layout_costs import host_transfer_s, layout_costs
from tests.amounts import first, long_but
from tests.consumers import assert_consumers_agree
from tests.launchers.cases import round_trip
from tests.launchers.test_megatron_round_trip import assert_same
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import brute_force, constants, time_and_peak
from tests.optimize.problems import with_memory
from tests.optimize.test_execution import with_execution
from tests.optimize.test_optimality import assert_optimal
from tests.oracles.whole_program import solve_monolithic
from tests.simulation.cases import MODEL_HARDWARE, columns_of, even_plan, problem_of, random_layout
from tests.simulation.test_bulk import with_host

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def hosted(problem: Problem, kind: int, modules: str, **layout: Any) -> list[float]:
    """Bytes of a layer on the host in the modes none, selective and full."""
    columns = columns_of(offload_modules=modules, **layout)
    return hosted_module_bytes(problem, problem.model.kinds[kind], columns)[:, 0].tolist()


def test_bytes_by_hand() -> None:
    """DeepSeek-V3, 4,096 tokens over 2 ranks with sequence parallelism, in bf16: h = 7,168, 64 heads a rank of
    192 + 192 + 128, latent vectors of 1,536 + 512 + 64 before and after their norms, 2,048 x 8 rows of experts of
    2,048. Default selective recomputation drops the norm's output and expanded queries, keys and values."""
    problem = problem_of("deepseek-v3", "dgx-h100", sequence_length=4096)
    split: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "ep": 8, "dp": 8}
    local, rows = 2048 * 7168, 2048 * 8
    latent = 2 * 2048 * 2 * (1536 + 512 + 64)
    expanded = 2 * 4096 * 64 * (192 + 192 + 128)
    expected = {
        "attn_norm": (2 * local, 2 * local),
        "qkv_linear": (2 * local + latent, latent),
        "core_attn": (expanded, 0),
        "core_attn+attn_proj": (expanded + 2 * 4096 * 64 * 128, 2 * 4096 * 64 * 128),
        "mlp_norm": (2 * local, 2 * local),
        "expert_fc1": (2 * rows * 7168, 2 * rows * 7168),
        "moe_act": (2 * rows * 2 * 2048, 2 * rows * 2 * 2048),
    }
    for modules, (kept, left) in expected.items():
        assert hosted(problem, -1, modules, **split) == [kept, left, 0]
    assert hosted(problem, 0, "moe_act", **split) == [0, 0, 0]
    assert hosted(problem, -1, "core_attn", recompute_modules="moe_act", **split)[1] == expanded
    assert hosted(problem, -1, "core_attn", recompute_modules="mla_up_proj", **split)[1] == 0
    dense = problem_of("llama3-8b", "dgx-h100", sequence_length=1024)
    assert hosted(dense, 0, "qkv_linear") == [2 * 2 * 1024 * 4096, 2 * 1024 * 4096, 0]
    assert hosted(dense, 0, "core_attn+attn_proj") == [2 * 1024 * (4096 + 2 * 1024 + 4096)] * 2 + [0]


@pytest.mark.parametrize("case", range(len(MODEL_HARDWARE)))
def test_bytes_move_from_the_device_to_the_host(case: int) -> None:
    """Bytes of sets add up and are part of what a layer keeps in every mode; what leaves the device is on the
    host, and takes the time of its transfer where that is longer than the work."""
    model, hardware, kernel, precision = MODEL_HARDWARE[case]
    problem = with_host(
        problem_of(model, hardware, sequence_length=1024, attention_kernel=kernel, precision=precision)
    )
    layout = random_layout(np.random.default_rng(case), problem).model_copy(
        update={"recompute_modules": "default"}
    )
    sets = [modules for modules in OFFLOAD_SETS if problem.prices_offload(modules)]
    assert len(sets) > 1 or not problem.offload_modules
    columns = LayoutColumns.of([layout.model_copy(update={"offload_modules": modules}) for modules in sets])
    costs = layout_costs(problem, columns)
    before = costs.at(0)
    for place, kind in enumerate(problem.model.kinds):
        size, kept = hosted_module_bytes(problem, kind, columns), layer_activations(problem, kind, columns)
        whole = (kept.kept, kept.kept - kept.dropped_selective, kept.kept - kept.dropped_full)
        for mode in range(3):
            assert np.all(size[mode] <= whole[mode] * (1 + 1e-12))
        alone = {modules: size[0, row] for row, modules in enumerate(sets) if "+" not in modules}
        for row, modules in enumerate(sets[1:], start=1):
            if all(name in alone for name in modules.split("+")):
                assert size[0, row] == pytest.approx(sum(alone[name] for name in modules.split("+")))
            after = costs.at(row)
            moved = int(after.host_kept_bytes[0, place])
            assert moved == pytest.approx(size[0, row], abs=1)
            assert before.kept_bytes[place] - after.kept_bytes[place] == moved
            transfer = float(host_transfer_s(problem.hardware, moved)) * 1e9
            longest = max(int(before.duration_ns[place, 0]), round(transfer))
            assert after.duration_ns[place, 0] == pytest.approx(longest, abs=2)


def tight_problem(seed: int) -> Problem:
    """A problem whose chain of sets is open, with too little memory for what is kept, and a host of any speed."""
    problem = with_execution(seed, ("offload_modules",), ("free", "uniform")[seed % 2])
    opened = problem.space.model_copy(update={"recompute": Space().recompute})
    problem = problem.model_copy(update={"space": opened})
    best = brute_force(with_memory(problem, 10**13))
    assert best is not None
    peak = time_and_peak(problem, constants(problem, best.plan.layout), best.plan)[1]
    return with_memory(problem, int(peak * (0.8, 0.9)[seed % 2]))


@pytest.mark.parametrize("backend", long_but(("cpsat",), ("cpsat", "cbc", "highs", "scip")))
@pytest.mark.parametrize("seeds", first(1, [range(900, 908, 7), range(900, 910)]))
def test_optimum_is_that_of_brute_force(seeds: range, backend: str) -> None:
    """Sets of modules on the host are decided as brute force decides, in both spaces; some optima name modules,
    and no bound is above a plan of them."""
    decided = set()
    for seed in seeds:
        problem = tight_problem(seed)
        result, best = solve(problem, backend=backend, gap=0.0), brute_force(problem)
        assert_optimal(problem, result, best)
        assert {one.layout.offload_modules for one in bounded_layouts(problem)} <= set(problem.offload_sets)
        if result.plan is not None:
            decided.add(result.plan.layout.offload_modules)
            if seed in (900, 902) and best is not None:
                whole = solve_monolithic(problem, gap=0.0, max_layouts=200)
                assert whole.step_time_ns == pytest.approx(best.value, rel=1e-12)
                assert solve_block_program(result).step_time_ns == whole.step_time_ns
    assert decided > {"default"}


@pytest.mark.parametrize("model", first(1, ("deepseek-v3", "qwen3-30b-a3b", "llama3-8b")))
def test_consumers_agree(model: str) -> None:
    """Bulk simulation, bounds and traffic give the simulator's numbers for layouts that name modules."""
    generator = np.random.default_rng(7)
    problem = with_host(problem_of(model, "dgx-h100", sequence_length=1024))
    sets = [modules for modules in OFFLOAD_SETS if problem.prices_offload(modules)]
    drawn = [random_layout(generator, problem) for _ in range(12)]
    layouts = [
        layout.model_copy(update={"offload_modules": str(generator.choice(sets))})
        for layout in drawn
        if layout.schedule not in SPLIT_SCHEDULES and layout.recompute_modules == "default"
    ]
    assert len(layouts) > 2
    assert_consumers_agree(problem, layouts, generator)


def test_launches_name_the_modules() -> None:
    """An export names the set beside recomputed modules, and an import reads it; whole layers that are recomputed,
    other modules and versions without the flag are refused."""
    job: dict[str, int] = {"num_gpus": 16, "global_batch_size": 32, "sequence_length": 4096}
    problem = problem_of("qwen3-30b-a3b", "dgx-h100", **job)
    layout = Layout(
        ep=8, dp=16, zero_stage=1, global_batch_size=32, recompute_modules="layernorm",
        offload_modules="core_attn+attn_proj+expert_fc1", **OVERLAPS,
    )  # fmt: skip
    plan = even_plan(problem, layout, selective=48)
    launch, found = round_trip(problem, plan)
    assert_same(problem, plan, found.problem, found.plan)
    script = torchrun_script(launch, "0")
    flag = "--offload-modules core_attn attn_proj expert_fc1"
    assert flag in script
    assert "NVTE_CPU_OFFLOAD_V1=1" in script
    back = imported(
        ImportRequest(script.replace(flag, "--offload-modules attn_norm moe_act"), "x.sh", problem.hardware)
    )
    assert back.plan.layout.offload_modules == "moe_act"
    with pytest.raises(InvalidInputError, match="fused_group_mlp"):
        imported(
            ImportRequest(script.replace(flag, "--offload-modules fused_group_mlp"), "x.sh", problem.hardware)
        )
    with pytest.raises(IllegalPlanError, match="recomputes layers wholly"):
        Megatron().export(problem, even_plan(problem, layout, full=48), "d98e8a64")
    with pytest.raises(IllegalPlanError, match="--offload-modules"):
        Megatron().export(problem, plan, "core_v0.15.0")


def test_refusals() -> None:
    """Modules that a model lacks, outputs of attention without its inputs, modules inside recomputed experts, and
    modules beside all activations are refused, in simulation as in the space."""
    problem = with_host(problem_of("qwen3-30b-a3b", "dgx-h100", sequence_length=1024))
    for changes in (
        {"offload_modules": "attn_norm"},
        {"offload_modules": "attn_proj"},
        {"offload_modules": "moe_act", "recompute_modules": "moe"},
        {"offload_modules": "moe_act", "offload_activations": True},
    ):
        layout = Layout(global_batch_size=8, **changes)
        assert broken_rules(problem, layout) == ["offload_modules_of_the_model"]
        with pytest.raises(IllegalPlanError, match="offload_modules"):
            simulate(problem, even_plan(problem, layout))
