"""Switches of the execution as decisions: proved optima are those of brute force, and no bound is above a plan."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from milpplan import Layout, load_hardware, load_model, simulate, solve
from milpplan.optimize import SolveContext, SolveOptions
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.solve import plain_plans, with_plain_switches
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.optimize.space.rules import EXECUTION
from milpplan.problem import EXPERT_DISPATCHES, HostMemory, Job, Problem, SizeCurve, Space
from milpplan.simulation import host_capacity_bytes
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import first, long_but
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import brute_force, constants, costed_plans, naive_layouts, time_and_peak
from tests.optimize.problems import FAMILIES, random_plan, random_problem, with_memory
from tests.optimize.test_optimality import assert_optimal, check
from tests.oracles.whole_program import solve_monolithic

OFFLOAD = ("offload_weights", "offload_activations", "offload_optimizer")
BOTH = (False, True)


def with_execution(seed: int, names: tuple[str, ...] = EXECUTION, kind: str = "free", **drawn: Any) -> Problem:
    """A layout of a random problem (``drawn``: how it is) with some of its switches open, less memory, and hosts
    of any speed and size."""
    rng = random.Random(seed)
    problem = random_problem(seed, kind=kind, family=FAMILIES[seed % len(FAMILIES)], **drawn)
    columns = layout_space(problem).columns
    opened = rng.sample(names, min(len(names), rng.choice((1, 2, 2, 3))))
    open_values: dict[str, Any] = {
        "tp_overlap": ("none", "ring", "pipelined"), "ulysses": None, "dp_replicate": None,
        "recompute_modules": None, "expert_dispatch": EXPERT_DISPATCHES, "offload_modules": None,
    }  # fmt: skip
    values = {name: open_values.get(name, BOTH) for name in opened}
    device = problem.hardware.accelerator.memory_bytes
    host = HostMemory(
        capacity_bytes=max(1, int(device * rng.choice((0.05, 0.3, 10.0)))),
        bandwidth_bytes_per_s=rng.choice((1e8, 1e9, 1e10, 1e12)),
        efficiency=SizeCurve(size=(1e4, 1e6), value=(0.3, 0.9)),
    )
    smaller = problem.hardware.accelerator.model_copy(
        update={"memory_bytes": int(device * rng.choice((0.5, 0.8, 1.0)))}
    )
    hardware = problem.hardware.model_copy(update={"host_memory": host, "accelerator": smaller})
    space = _only(problem.space, columns.at(rng.randrange(len(columns)))).model_copy(update=values)
    return problem.model_copy(update={"hardware": hardware, "space": space})


@pytest.mark.parametrize("backend", long_but(("cpsat",), ("cpsat", "cbc", "highs")))
def test_optimum_is_that_of_brute_force(backend: str) -> None:
    """With switches to decide ``solve`` finds the optimum of brute force, or proves that nothing fits."""
    for seed in range(5):
        check(with_execution(seed + 5 * ("cpsat", "cbc", "highs").index(backend)), backend)


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_optimum_is_that_of_brute_force_often(block: int) -> None:
    """The same on 400 more."""
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        check(with_execution(seed), "auto")


@pytest.mark.parametrize("backend", long_but(("cpsat",), ("cpsat", "highs")))
@pytest.mark.parametrize("family", first(1, ("dense", "mla", "window")))
def test_exchange_of_heads_is_that_of_brute_force(family: str, backend: str) -> None:
    """With context parallelism the exchange of heads, the ring and both together are decided as by brute force,
    and no bound is above a plan of theirs."""
    decided = set()
    for seed in range(30, 34):
        problem = random_problem(seed, family=family)
        heads = {"num_attention_heads": 8} | ({} if family == "mla" else {"num_key_value_heads": 4})
        attention = problem.model.kinds[0].attention.model_copy(update=heads)
        run = problem.model.layers[0].model_copy(update={"count": 3, "attention": attention})
        model = problem.model.model_copy(update={"layers": (run,)})
        job = Job(num_gpus=4, global_batch_size=2, sequence_length=4096)
        space = Space(cp=(4,), ulysses=None, zero_stage=(0, 1), recompute=problem.space.recompute)
        asked = problem.model_copy(update={"model": model, "job": job, "space": space})
        check(asked, backend)
        decided |= {one.layout.ulysses for one in bounded_layouts(asked)}
    assert decided >= ({1, 4} if family == "window" else {1, 2, 4})


def test_uniform_optimum_is_that_of_brute_force() -> None:
    """The same in the uniform space."""
    for seed in range(6):
        check(with_execution(seed, kind="uniform"), "auto")


@pytest.mark.long
def test_monolithic_form_agrees() -> None:
    """One program with the switches as variables has the same optimum."""
    solved = 0
    for seed in range(40, 52):
        problem = with_execution(seed)
        if len(layout_space(problem)) <= 12:
            best, result = brute_force(problem), solve_monolithic(problem, gap=0.0)
            assert (best is None) == (result.step_time_ns is None)
            assert best is None or result.step_time_ns == pytest.approx(best.value, rel=1e-12)
            solved += best is not None
    assert solved >= 2


def hybrid_problem(seed: int, kind: str = "free") -> Problem:
    """A tiny model on eight replicas, or four of two ranks, on a slow network of small domains, with the memory
    that a plan of some groups of replicas needs."""
    base = random_problem(seed, kind=kind, family=FAMILIES[seed % len(FAMILIES)])
    rng = random.Random(seed)
    out = base.hardware.scale_out.model_copy(update={"bandwidth_bytes_per_s": rng.choice((1e8, 1e9, 1e10))})
    two = base.hardware.scale_up.model_copy(update={"num_gpus": 2, "segments": ()})
    hardware = base.hardware.model_copy(update={"scale_out": out, "scale_up": two, "gpus_per_node": 2})
    job = base.job.model_copy(update={"num_gpus": 8, "global_batch_size": 8, "sequence_length": 512})
    space = Space(
        kind="uniform" if kind == "uniform" else "free",
        tp=(1, 2), cp=(1,), pp=(1,), etp=(1,), vpp=(1,), micro_batch_size=(1,), schedule=("1f1b",),
        sequence_parallel=(True,) if base.model.has_experts else (False,), zero_stage=(0, 1, 3),
        dp_replicate=None, overlap_grad_reduce=(True,), overlap_param_gather=(True,), recompute=("none", "full"),
    )  # fmt: skip
    if base.model.has_experts:
        space = space.model_copy(update={"tp": (1,), "sequence_parallel": (False,)})
    problem = base.model_copy(update={"hardware": hardware, "job": job, "space": space})
    columns = layout_space(problem).columns
    layout = columns.at(rng.choice(np.flatnonzero(columns.dp_replicate > 1).tolist()))
    plan = random_plan(rng, problem, layout, recompute=0.0)
    return with_memory(problem, time_and_peak(problem, constants(problem, layout), plan)[1])


@pytest.mark.long
@pytest.mark.parametrize("backend", long_but(("highs",), ("cpsat", "highs")))
def test_hybrid_sharding_is_that_of_brute_force(backend: str) -> None:
    """Groups that shard by themselves are decided as brute force decides, in both spaces; some optima have them,
    and no bound is above a plan of them."""
    hybrid = 0
    for seed in range(600, 612):
        problem = hybrid_problem(seed, ("free", "uniform")[seed % 2])
        best, result = brute_force(problem), solve(problem, backend=backend, gap=0.0)
        assert_optimal(problem, result, best)
        hybrid += result.plan is not None and result.plan.layout.dp_replicate > 1
        assert any(one.layout.dp_replicate > 1 for one in bounded_layouts(problem))
    assert hybrid >= 2


@pytest.mark.long
def test_hybrid_sharding_in_one_program() -> None:
    """The program over blocks and the program of the whole space have the optimum of brute force, too."""
    for seed in (600, 603, 604):
        problem = hybrid_problem(seed)
        best = brute_force(problem)
        if best is None:
            continue
        whole = solve_monolithic(problem, gap=0.0, max_layouts=200)
        assert whole.step_time_ns == pytest.approx(best.value, rel=1e-12)
        blocks = solve_block_program(solve(problem, gap=0.0))
        assert blocks.step_time_ns == whole.step_time_ns


@pytest.mark.parametrize("backend", long_but(("cpsat",), ("cpsat", "cbc", "highs", "scip")))
def test_kept_weights_are_those_of_brute_force(backend: str) -> None:
    """Gathers once or twice a micro-batch are decided as brute force decides, in both spaces and in one program;
    some optima keep weights, some have no memory for them, and no bound is above a plan of theirs."""
    chosen = set()
    for seed in range(700, 706):
        problem = hybrid_problem(seed, ("free", "uniform")[seed % 2])
        opened = {"keep_weights": BOTH, "dp_replicate": (1,), "zero_stage": (0, 3)}
        job = problem.job.model_copy(update={"global_batch_size": 16})
        problem = problem.model_copy(update={"job": job, "space": problem.space.model_copy(update=opened)})
        rows = layout_space(problem).columns
        layout = rows.at(int(np.flatnonzero(rows.keep_weights)[0]))
        plan = random_plan(random.Random(seed), problem, layout, recompute=0.3)
        peak = time_and_peak(problem, constants(problem, layout), plan)[1]
        problem = with_memory(problem, int(peak * (1.0 if seed < 703 else 0.93)))
        best, result = brute_force(problem), solve(problem, backend=backend, gap=0.0)
        assert_optimal(problem, result, best)
        assert any(one.layout.keep_weights for one in bounded_layouts(problem))
        if best is not None and result.plan is not None:
            chosen.add((result.plan.layout.zero_stage, result.plan.layout.keep_weights))
            if seed == 700:
                whole = solve_monolithic(problem, gap=0.0, max_layouts=200)
                assert whole.step_time_ns == pytest.approx(best.value, rel=1e-12)
    assert chosen >= {(3, False), (3, True)}


DISPATCHED = ((4, 4, True, 2), (8, 1, True, 2), (8, 4, False, 2), (8, 8, True, 4))
"""Experts, experts of a token, whether the software sends once to a domain, and GPUs of a domain."""


@pytest.mark.parametrize("backend", long_but(("cpsat",), ("cpsat", "cbc", "highs", "scip")))
def test_dispatch_is_that_of_brute_force(backend: str) -> None:
    """How tokens reach experts is decided as brute force decides, in both spaces and in one program: by all-gather
    where a token has an expert on nearly every rank, else as by default, or better where that sends all copies."""
    chosen = set()
    for number, (experts, per_token, once, domain) in enumerate(DISPATCHED):
        base = random_problem(800 + number, kind=("free", "uniform")[number % 2], family="moe")
        (run,) = {kind.mlp.type: kind for kind in base.model.kinds if kind.mlp.type == "moe"}.values()
        mlp = run.mlp.model_copy(update={"num_experts": experts, "num_experts_per_tok": per_token})
        model = base.model.model_copy(update={"layers": (run.model_copy(update={"count": 2, "mlp": mlp}),)})
        software = base.hardware.software.model_copy(update={"deduplicated_dispatch": once})
        links = base.hardware.scale_up.model_copy(update={"num_gpus": domain, "segments": ()})
        hardware = {"software": software, "scale_up": links, "gpus_per_node": domain}
        space = Space(
            kind=base.space.kind, tp=(1,), cp=(1,), pp=(1,), ep=(1, 4), micro_batch_size=(1,), zero_stage=(0,),
            expert_dispatch=EXPERT_DISPATCHES, recompute=("none",), overlap_grad_reduce=(True,),
        )  # fmt: skip
        job = base.job.model_copy(update={"num_gpus": 4, "global_batch_size": 8, "sequence_length": 1024})
        changes = {
            "model": model,
            "hardware": base.hardware.model_copy(update=hardware),
            "job": job,
            "space": space,
        }
        problem = with_memory(base.model_copy(update=changes), 10**12)
        forced = space.model_copy(update={"ep": (4,)})
        for asked in (problem, problem.model_copy(update={"space": forced})):
            best, result = brute_force(asked), solve(asked, backend=backend, gap=0.0)
            assert_optimal(asked, result, best)
            assert result.plan is not None
            chosen.add(result.plan.layout.expert_dispatch)
            if asked.space.kind == "free":
                assert best is not None
                assert solve_monolithic(asked, gap=0.0).step_time_ns == pytest.approx(best.value, rel=1e-12)
    assert chosen >= {"default", "allgather", "deepep"}


@pytest.mark.parametrize(("count", "least"), [(10, 5), pytest.param(18, 15, marks=pytest.mark.long)])
def test_no_bound_is_above_a_plan(count: int, least: int) -> None:
    """Bounds of layouts that offload, gather or tile are below every one of their plans."""
    offloaded = 0
    for seed in range(100, 100 + count):
        # The last two switches have tests of their own.
        problem = with_execution(seed, EXECUTION[:-2])
        offloaded += sum(one.layout.offloads for one in bounded_layouts(problem))
    assert offloaded > least


@pytest.mark.parametrize("count", long_but((3,), (3, 6)))
def test_enumeration_is_naive_and_nothing_is_lost(count: int) -> None:
    """The layouts are those of trying every combination less the dominated ones, which never hold the optimum
    alone; every rule that leaves one out is counted."""
    # The first opens modules to recompute and modules on the host, which exclude each other.
    for seed in (13, *range(200, 200 + count)):
        problem = with_execution(seed)
        columns, everything = layout_space(problem).columns, naive_layouts(problem)
        kept = {columns.at(row) for row in range(len(columns))}
        assert kept <= set(everything)
        best, all_best = brute_force(problem), brute_force(problem, everything)
        assert (best is None) == (all_best is None)
        assert best is None or all_best is None or best.value == all_best.value


def test_closed_switches_change_nothing() -> None:
    """With every switch at its default the layouts are the same, whatever memory the host has."""
    for seed in range(2):
        problem = random_problem(seed)
        alone = problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"host_memory": None})})
        assert problem.space == Space.model_validate(problem.space.model_dump())
        with_host, without = layout_space(problem), layout_space(alone)
        assert with_host.rejected == without.rejected
        assert not set(with_host.rejected) & {"offload_needs_host_memory", "dominated_by_ring"}
        columns = with_host.columns
        assert all(columns.at(row) == without.columns.at(row) for row in range(len(columns)))


def rtx_problem(**space: tuple[bool, ...]) -> Problem:
    """Llama-2 7B on one RTX 4090: states alone are five times its memory."""
    job = Job(num_gpus=1, global_batch_size=4, sequence_length=2048)
    return Problem(
        model=load_model("llama2-7b"),
        hardware=load_hardware("rtx4090"),
        job=job,
        space=Space.model_validate(space),
    )


def test_a_search_starts_from_plans_with_plain_switches() -> None:
    """They are legal plans of the space; the second has the degrees of the first and any switches."""
    found = 0
    for seed in range(4):
        problem = with_execution(seed)
        plain, space = with_plain_switches(problem), layout_space(problem)
        if plain is None or not len(space):
            continue
        context = SolveContext(SolveOptions(gap=1e-4), backend("auto"), [], None)
        plans = plain_plans(problem, context, [])
        steps = [simulate(problem, plan).step_time_ns for plan in plans]
        assert steps == sorted(steps, reverse=True)
        assert all(space.find(plan.layout) is not None for plan in plans)
        assert not plans or layout_space(plain).find(plans[0].layout) is not None
        best = solve(problem, gap=1e-4, simplest=False).report
        assert best is None or all(step >= best.step_time_ns for step in steps)
        found += len(plans)
    assert found > 1


def test_poor_gpu_needs_its_host() -> None:
    """One RTX 4090 cannot train Llama-2 7B; with weights and optimizer on the host, and gradients in bf16, it
    can, within the memory of both."""
    problem = rtx_problem()
    problem = problem.model_copy(update={"job": problem.job.model_copy(update={"grad_dtype": "bf16"})})
    assert solve(problem).status == "infeasible"
    opened = problem.space.model_copy(update=dict.fromkeys(OFFLOAD, BOTH))
    host = problem.hardware.host_memory
    assert host is not None
    larger = host.model_copy(update={"capacity_bytes": 2 * host.capacity_bytes})
    hardware = problem.hardware.model_copy(update={"host_memory": larger})
    result = solve(problem.model_copy(update={"space": opened, "hardware": hardware}))
    assert result.status == "optimal"
    assert result.plan is not None
    assert result.report is not None
    assert result.plan.layout.offload_weights
    assert result.plan.layout.offload_optimizer
    assert 80e9 < result.report.host_memory_bytes <= host_capacity_bytes(result.problem)


def test_named_rejections() -> None:
    """Every rule of the execution refuses a layout, by its name."""
    problem = rtx_problem()
    bare = problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"host_memory": None})})
    unfused = problem.model_copy(update={"job": problem.job.model_copy(update={"attention_kernel": "unfused"})})
    windows = problem.model_copy(update={"model": load_model("gpt-oss-120b")})
    base: dict[str, Any] = {"tp": 2, "pp": 2, "global_batch_size": 4}
    cases = {
        "tp_overlap_needs_sequence_parallel": (problem, Layout(**base, tp_overlap="ring")),
        "kept_gathered_needs_sequence_parallel": (problem, Layout(**base, gather_again=False)),
        "scatter_gather_needs_whole_activations": (
            problem,
            Layout(**base, sequence_parallel=True, pp_scatter_gather=True),
        ),
        "ulysses_divides_cp_and_heads": (problem, Layout(**base, cp=2, ulysses=4)),
        "ulysses_needs_flash_attention": (unfused, Layout(**base, cp=2, ulysses=2)),
        "windows_need_one_exchange": (windows, Layout(**base, cp=4, ulysses=2)),
        "offload_needs_host_memory": (bare, Layout(**base, offload_optimizer=True)),
        "offloaded_states_fit_host_memory": (
            problem,
            Layout(global_batch_size=4, offload_weights=True, offload_optimizer=True),
        ),
    }
    for name, (asked, layout) in cases.items():
        assert name in broken_rules(asked, layout)


def test_capacity_of_the_host_decides_layers() -> None:
    """A host that is too small for the layers of one rank, but not for the mean, forces another split; one byte
    less than the least makes the layout infeasible."""
    for seed in range(300, 330):
        problem = with_execution(seed, ("offload_optimizer",))
        forced = problem.space.model_copy(update={"offload_optimizer": (True,), "pp": (2,), "vpp": (1,)})
        problem = problem.model_copy(update={"space": forced})
        roomy = with_capacity(problem, 10**13)
        columns = layout_space(roomy).columns
        if not len(columns):
            continue
        plans = costed_plans(roomy, columns.at(0), layout_costs(roomy, columns).at(0))
        least, most = int(plans.host_bytes.min()), int(plans.host_bytes.max())
        if least == most:
            continue
        only = roomy.model_copy(update={"space": _only(roomy.space, columns.at(0))})
        check(with_capacity(only, least), "auto")
        check(with_capacity(only, (least + most) // 2), "auto")
        assert solve(with_capacity(only, least - 1)).status == "infeasible"
        return
    raise AssertionError("no problem with two stages")


def with_capacity(problem: Problem, capacity: int) -> Problem:
    """The problem on hosts of so many bytes."""
    host = problem.hardware.host_memory
    assert host is not None
    changed = problem.hardware.model_copy(
        update={"host_memory": host.model_copy(update={"capacity_bytes": capacity})}
    )
    return problem.model_copy(update={"hardware": changed})


def _only(space: Space, layout: Layout) -> Space:
    """The space of one layout."""
    names = set(Space.model_fields) & set(Layout.model_fields)
    return space.model_copy(update={name: (getattr(layout, name),) for name in names})


def test_result_is_what_simulate_says() -> None:
    """The plan of a solve with offloading simulates to the same report."""
    for seed in range(400, 402):
        problem = with_execution(seed, OFFLOAD)
        result = solve(problem, gap=0.0)
        assert_optimal(problem, result, brute_force(problem))
        if result.plan is not None:
            assert simulate(problem, result.plan) == result.report
            assert np.isfinite(result.objective or 0.0)
