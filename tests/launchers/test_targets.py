"""Spaces restricted to a target: every plan of them can be exported and comes back; what is outside is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import launchers
from milpplan import Layout, Plan, Problem, Recompute, VirtualStage, simulate, solve
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError, UnknownNameError
from milpplan.launchers import TARGETS, ImportRequest, restrict
from milpplan.optimize import SolveOptions, target_price
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space import even_splits
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import NodeGroup
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import layer_activations
from milpplan.units import GIB
from tests.amounts import first, long_but
from tests.launchers.cases import as_run, glm_that_shares
from tests.simulation.cases import problem_of, shipped_hardware, shipped_model

MODELS = ("llama3-8b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
KEPT = Path(__file__).parents[1] / "data" / "launchers"
COMPLETE = [name for name, launcher in TARGETS.items() if launcher.capability.complete]
LOADERS = ("accelerate", "automodel", "trl", "llama-factory", "axolotl")
"""Launchers that load a model's own class of Transformers."""
MORE = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1"),
    "rank_order": ("tp-cp-dp-pp", "tp-cp-pp-dp", "pp-dp-cp-tp"),
    "micro_batch_size": (1, 2),
    "ulysses": None,
    "vpp_values": "distinct",
    "dp_replicate": None,
}
"""What the tests open of a space, and where they keep it small."""


def asked(model: str, **job: Any) -> Problem:
    """A problem of a model, with more schedules and orders than any target has."""
    problem = problem_of(model, "dgx-h100", **({"num_gpus": 16, "global_batch_size": 32} | job))
    space = problem.space.model_copy(update=MORE)
    return problem.model_copy(update={"space": space})


def drawn_plan(random: np.random.Generator, problem: Problem, layout: Layout) -> Plan:
    """A plan of the space with a layout: a random split that it allows, and one of its recompute settings."""
    modes = problem.recompute_modes
    if problem.space.kind == "uniform":
        return uniform_plan(problem, layout, str(random.choice(modes)))
    splits, stages = even_splits(problem, layout), layout.num_virtual_stages
    if splits is not None:
        sizes = splits[int(random.integers(len(splits)))]
    else:
        cuts = np.sort(random.choice(problem.model.num_layers - 1, stages - 1, replace=False)) + 1
        sizes = tuple(np.diff([0, *cuts.tolist(), problem.model.num_layers]).tolist())
    mode = str(random.choice(modes))
    block = int(random.integers(1, max(sizes) + 1))
    if problem.space.recompute_counts == "block" and {"none", "full"} <= set(modes) and random.integers(2):
        counts = [Recompute(full=min(block, size)) for size in sizes]
    else:
        counts = [Recompute(**({} if mode == "none" else {mode: size})) for size in sizes]
    ends = np.cumsum((0, *sizes)).tolist()
    held = zip(ends[:-1], ends[1:], counts, strict=True)
    return Plan(
        layout=layout,
        virtual_stages=tuple(VirtualStage(layers=(a, b), recompute=count) for a, b, count in held),
    )


@pytest.mark.parametrize("count", long_but((3,), (3, 6)))
@pytest.mark.parametrize("target", long_but(COMPLETE[:2], COMPLETE))
def test_every_plan_of_the_space_is_exported_and_comes_back(count: int, target: str) -> None:
    """Plans drawn from the restricted spaces of several models: none is refused, all come back, step and all."""
    random = np.random.default_rng(11)
    known, told = TARGETS[target], 0
    for model in MODELS:
        try:
            problem = restrict(asked(model), target)
        except IllegalPlanError:
            # It cannot build the model: the next test looks at what is said.
            continue
        space = layout_space(problem)
        for row in random.choice(len(space), min(count, len(space)), replace=False).tolist():
            plan = drawn_plan(random, problem, space.at(row))
            launch = known.export(problem, plan, known.capability.versions[0])
            name, text = next(iter(known.files(launch, "0").items()))
            found = known.read(ImportRequest(text, name, problem.hardware, model=problem.model))
            order = {"rank_order": plan.layout.rank_order}
            run = as_run(problem, plan, target)
            assert found.plan.layout.model_copy(update=order) == run.layout
            assert found.plan.virtual_stages == plan.virtual_stages
            step = simulate(problem, plan).step_time_ns
            assert simulate(found.problem, found.plan).step_time_ns == step
            told += 1
    assert told >= min(4, count)


@pytest.mark.parametrize("target", long_but(COMPLETE[:1], COMPLETE))
def test_solved_plans_are_of_the_target(target: str) -> None:
    """The best plan of a restricted space is proved, can be exported, and is no faster than that of the whole."""
    whole = problem_of("llama3-8b", "dgx-h100", num_gpus=8, global_batch_size=16)
    problem = restrict(whole, target)
    result = solve(problem, gap=1e-3)
    assert result.status == "optimal"
    assert result.plan is not None
    known = TARGETS[target]
    assert known.export(problem, result.plan, known.capability.versions[0]).version
    price = target_price(result, whole, SolveOptions(gap=1e-3), 20.0)
    assert price is not None
    assert 0 <= price.least_fraction <= price.most_fraction
    assert result.objective is not None
    assert price.objective_bound <= price.objective <= result.objective
    assert price.most_fraction == pytest.approx(result.objective / price.objective_bound - 1)


def test_restricting_twice_changes_nothing() -> None:
    """A restricted problem is restricted already; every value of it was one of the whole space."""
    for target in COMPLETE:
        problem = restrict(asked("llama3-70b"), target)
        assert restrict(problem, target) == problem
        assert 0 < len(layout_space(problem)) < len(layout_space(asked("llama3-70b")))


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_programs_of_transformers_keep_their_own_bytes(target: str) -> None:
    """A layer of Llama-3 8B that nothing compiles keeps two norms of 8 h bytes a token, queries, keys, values and
    the result of attention with its statistics, and four tensors of the width: 49.0 GiB in 32 layers of 8,192
    tokens, as measured, where fused kernels keep 34.0."""
    fused = problem_of("llama3-8b", "dgx-h100")
    problem = restrict(fused, target)
    columns = LayoutColumns.of([Layout(dp=16, global_batch_size=16)])
    h, kv, f, heads, tokens = 4096, 1024, 14336, 32, 8192
    kept = []
    for each in (problem, fused):
        (kind,) = each.model.kinds
        kept.append(float(layer_activations(each, kind, columns).kept[0]))
    attention = 2 * (2 * h + 2 * kv) + 4 * heads
    assert kept == [tokens * (2 * 8 * h + attention + 8 * f), tokens * (2 * 4 * h + attention + 6 * f)]
    assert [round(32 * each / GIB, 1) for each in kept] == [49.0, 34.0]
    megatron = restrict(fused, "megatron", stack=False)
    assert megatron.hardware == fused.hardware


def test_a_restricted_space_keeps_its_rules() -> None:
    """Values that somebody opens again after the restriction stay out: the rules are part of the space."""
    problem = restrict(asked("llama3-70b"), "megatron")
    opened = problem.space.model_copy(update={"schedule": ("zb-h1", "1f1b"), "tp_overlap": ("none", "pipelined")})
    columns = layout_space(problem.model_copy(update={"space": opened})).columns
    assert {columns.at(row).schedule for row in range(0, len(columns), 97)} == {"1f1b"}
    assert {columns.at(row).tp_overlap for row in range(0, len(columns), 97)} == {"none"}


def test_what_a_target_cannot_run_is_refused_with_the_way_out() -> None:
    """Unknown names, versions, models, jobs, and values that leave nothing."""
    problem = asked("llama3-70b")
    with pytest.raises(UnknownNameError, match="megatron"):
        restrict(problem, "megatrn")
    with pytest.raises(UnknownNameError, match="core_v0"):
        restrict(problem, "megatron", "core_v9")
    with pytest.raises(IllegalPlanError, match="softmax-type"):
        restrict(asked("gpt-oss-120b"), "megatron", "core_v0.14.0")
    with pytest.raises(IllegalPlanError, match="inference"):
        restrict(problem_of("llama3-8b", "dgx-h100", kind="inference"), "accelerate")
    fixed = problem.model_copy(update={"space": problem.space.model_copy(update={"pp": (4,)})})
    with pytest.raises(IllegalPlanError, match="pp 4"):
        restrict(fixed, "accelerate")
    unknown = problem.model_copy(update={"space": problem.space.model_copy(update={"target": "nobody"})})
    with pytest.raises(MilpplanError, match="nobody"):
        layout_space(unknown)


def small_plan(target: str) -> tuple[Problem, Plan]:
    """Llama 3 8B on 16 GPUs: ZeRO 3, with two tensor-parallel ranks where the program has them, or a pipeline."""
    layout = Layout(dp=16, global_batch_size=32, zero_stage=3)
    changes: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    if target == "axolotl":
        changes |= {"tp": 2, "dp": 8}
    if target == "automodel":
        changes = {"tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True, "zero_stage": 1}
    layout = layout.model_copy(update=changes)
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=16, global_batch_size=32)
    each = problem.model.num_layers // layout.pp
    stages = tuple(VirtualStage(layers=(j * each, (j + 1) * each)) for j in range(layout.pp))
    return problem, Plan(layout=layout, virtual_stages=stages)


@pytest.mark.parametrize("target", LOADERS)
def test_kept_files(target: str) -> None:
    """The files of a small plan are the kept ones."""
    problem, plan = small_plan(target)
    known = TARGETS[target]
    files = known.files(known.export(problem, plan, known.capability.versions[0]), "0")
    for name, text in files.items():
        kept = KEPT / f"llama3-8b.{name.replace('.', '-')}"
        assert text == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "old", "new", "error"),
    [
        ("accelerate", "fsdp_version: 2", "fsdp_version: 1", InvalidInputError),
        ("accelerate", "num_processes: 16", "num_processes: 12", IllegalPlanError),
        ("accelerate", "dp_replicate_size: 1", "dp_replicate_size: 2", IllegalPlanError),
        ("accelerate", "mixed_precision: bf16", "mixed_precision: fp8", InvalidInputError),
        ("accelerate", "offload_params: false", "offload_params: true", InvalidInputError),
        ("accelerate", "--block_size 8192", "", InvalidInputError),
        ("accelerate", "--do_train", "--do_train --gradient_checkpointing true", InvalidInputError),
        ("accelerate", "YAML", "TEXT", None),
        ("automodel", "strategy: fsdp2", "strategy: megatron_fsdp", InvalidInputError),
        ("automodel", "defer_fsdp_grad_sync: true", "defer_fsdp_grad_sync: false", InvalidInputError),
        ("automodel", "cp_size: 1", "cp_size: 2", MilpplanError),
        ("automodel", "activation_checkpointing: false", "activation_checkpointing: selective", InvalidInputError),
        ("automodel", "pp_microbatch_size: 1", "pp_microbatch_size: 0", InvalidInputError),
        ("automodel", "model.layers.2,", "model.layers.3,", InvalidInputError),
        ("automodel", "recipe:", "peft:\n  dim: 8\nrecipe:", InvalidInputError),
    ],
)
def test_files_that_say_something_else_are_refused(target: str, old: str, new: str, error: Any) -> None:
    """Settings that no plan has, that the framework refuses, or that change the cost are refused by name."""
    problem, plan = small_plan(target)
    known = TARGETS[target]
    launch = known.export(problem, plan, known.capability.versions[0])
    name, text = next(iter(known.files(launch, "0").items()))
    assert old in text
    changed = text.replace(old, new)
    if error is None:
        found = known.read(ImportRequest(changed, name, problem.hardware, model=problem.model))
        assert found.plan == plan
        return
    with pytest.raises(error) as raised:
        known.read(ImportRequest(changed, name, problem.hardware, model=problem.model))
    assert raised.value.do


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("types", [2, 3])
def test_replicas_of_different_make_are_refused_with_the_reason(target: str, types: int) -> None:
    """No launcher gives replicas different numbers of micro-batches: every one says so, with the numbers."""
    plan = uniform_plan(*different_replicas(types), "none")
    problem, layout = different_replicas(types)
    assert simulate(problem, plan).step_time_ns > 0
    with pytest.raises(IllegalPlanError, match="replicas of different make: they run 4 and 8") as caught:
        TARGETS[target].export(problem, plan, TARGETS[target].capability.versions[0])
    assert TARGETS[target].capability.name in str(caught.value)
    assert len(layout.replica_micro_batches) == types


def test_megatron_exports_an_indexer() -> None:
    """Megatron-LM's arguments describe the indexer and gathered keys, and read back they are the same model and
    plan; tensor parallelism needs sequence parallelism, older versions lack the kernel."""
    problem = asked("deepseek-v3.2", num_gpus=1024, global_batch_size=256, sequence_length=8192)
    layout = Layout(
        tp=2, cp=2, pp=16, ep=16, dp=16, zero_stage=1, sequence_parallel=True, global_batch_size=256,
        rank_order="tp-cp-dp-pp",
    )  # fmt: skip
    known = TARGETS["megatron"]
    plan = uniform_plan(problem, layout, "full")
    launch = known.export(problem, plan, known.capability.versions[0])
    name, text = next(iter(known.files(launch, "0").items()))
    for part in ("--dsa-indexer-topk 2048", "--dsa-kernel-backend cudnn", "--cp-comm-type allgather"):
        assert part in text
    back = known.read(ImportRequest(text, name, problem.hardware, model=problem.model))
    assert back.plan == as_run(problem, plan)
    assert back.problem.model.layers == problem.model.layers
    assert simulate(problem, back.plan) == simulate(problem, plan)
    without = plan.model_copy(update={"layout": layout.model_copy(update={"sequence_parallel": False})})
    with pytest.raises(IllegalPlanError, match="without sequence parallelism"):
        known.export(problem, without, known.capability.versions[0])
    with pytest.raises(IllegalPlanError, match="--dsa-kernel-backend"):
        known.export(problem, plan, "core_v0.18.0")


def test_megatron_exports_layers_that_share_keys() -> None:
    """GLM-5.2's arguments have the period and offset of its configuration, with which Megatron-LM's rule finds the
    layers without an indexer; read back without the model they are the same layers and step, with a layer of
    further tokens that selects its own keys. Layers that share without a period are refused."""
    problem, plan = glm_that_shares()
    model, known = problem.model, TARGETS["megatron"]
    name, text = next(iter(known.files(known.export(problem, plan, known.capability.versions[0]), "0").items()))
    assert "--dsa-indexer-topk-freq 4" in text
    assert "--dsa-indexer-skip-topk-offset 3" in text
    assert model.taking_layers == {number - 1 for number in range(1, 79) if max(number - 3, 0) % 4 != 0}
    back = known.read(ImportRequest(text, name, problem.hardware))
    assert back.plan == as_run(problem, plan)
    assert (back.problem.model.layers, back.problem.model.mtp_layer) == (model.layers, model.mtp_layer)
    assert simulate(problem, back.plan) == simulate(problem, plan)
    irregular = model.model_copy(update={"layers": (*model.layers[:-2], model.layers[-1], model.layers[-2])})
    with pytest.raises(IllegalPlanError, match="no period"):
        known.export(problem.model_copy(update={"model": irregular}), plan, known.capability.versions[0])


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "megatron"])
def test_no_other_target_exports_an_indexer(target: str) -> None:
    """A model whose queries attend to selected keys is refused, and never exported without its indexer."""
    known = TARGETS[target]
    problem = asked("deepseek-v3", num_gpus=1024, global_batch_size=1024)
    plan = uniform_plan(problem, Layout(pp=16, ep=64, dp=64, zero_stage=1, global_batch_size=1024), "full")
    sparse = problem.model_copy(update={"model": shipped_model("deepseek-v3.2")})
    with pytest.raises(MilpplanError, match=r"selected or compressed keys|latent attention") as caught:
        known.export(sparse, plan, known.capability.versions[0])
    assert "deepseek-v3.2" in str(caught.value)


def different_replicas(types: int) -> tuple[Problem, Layout]:
    """Llama-3 8B on eight GPUs of each type, a replica each."""
    hardware = [shipped_hardware(name) for name in ("dgx-a100-80", "dgx-h100", "dgx-b200")[:types]]
    shares = (4, 8, 12)[:types]
    groups = tuple(NodeGroup(hardware=own, num_gpus=8) for own in hardware[1:])
    problem = problem_of("llama3-8b", hardware[0], num_gpus=8 * types, global_batch_size=sum(shares))
    layout = Layout(
        tp=4, pp=2, dp=types, global_batch_size=sum(shares), replica_micro_batches=shares,
        rank_order="tp-cp-pp-dp", zero_stage=1,
    )  # fmt: skip
    return problem.model_copy(update={"other_hardware": groups}), layout


@pytest.mark.parametrize("part", [{"sliding_window": 1024, "chunked": True}, {"qk_norm": "unweighted"}])
@pytest.mark.parametrize("target", first(2, [name for name in COMPLETE if name not in LOADERS]))
def test_no_target_exports_attention_that_its_models_lack(target: str, part: dict[str, Any]) -> None:
    """Launchers that build a model from arguments have no attention in chunks and no norms without weights;
    ``LOADERS`` load the model's own class."""
    whole, known = asked("llama3-8b", num_gpus=8), TARGETS[target]
    plain = restrict(whole, target)
    plan = solve(plain, gap=0.1).plan
    assert plan is not None
    assert known.export(plain, plan, known.capability.versions[0])
    (run,) = whole.model.layers
    changed = run.model_copy(update={"attention": run.attention.model_copy(update=part)})
    model = whole.model.model_copy(update={"layers": (changed,)})
    with pytest.raises(IllegalPlanError):
        known.export(
            restrict(whole.model_copy(update={"model": model}), target), plan, known.capability.versions[0]
        )


def test_what_comes_back_takes_the_step_and_the_memory_of_the_solve() -> None:
    """Every launcher's best plan, read from its files on the bare hardware: the bytes that its program keeps are
    counted, as they are where the space is restricted to the launcher."""
    whole = launchers.problem_of("llama3-8b", "dgx-h100", 16, 64, "uniform")
    cells = {name: launchers.cell_of(whole, name, 60.0) for name in TARGETS}
    assert [name for name, cell in cells.items() if cell.lost or cell.step_ns is None] == []
