"""The layout space against a naive enumeration, and each of its rules against an example made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from benchmarks.families import configurations
from milpplan import Range
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.optimize import explain, fixed
from milpplan.optimize.space import enumerate_layouts, in_space
from milpplan.optimize.space import layout_space as rule_filter
from milpplan.optimize.space.enumerate_layouts import broken_rules, divisors, layout_space
from milpplan.problem import (
    RANK_ORDERS,
    SCHEDULES,
    DenseMlp,
    GroupedQueryAttention,
    LayerRun,
    Layout,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Problem,
    Space,
    VirtualStage,
)
from milpplan.problem.huggingface import model_from_config
from milpplan.simulation import simulate
from milpplan.simulation.simulator import check_plan_of_model
from tests.amounts import long_but
from tests.optimize.brute_force import plan_of
from tests.simulation.cases import even_plan, problem_of
from tests.simulation.rank_listing import listed

LAYERS = 5


def model(experts: int = 0) -> ModelSpec:
    """Five small layers with 8 query heads over 4 key/value heads."""
    attention = GroupedQueryAttention(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    mlp: Any = DenseMlp(intermediate_size=768)
    if experts:
        mlp = MixtureOfExperts(num_experts=experts, num_experts_per_tok=2, intermediate_size=96)
    return ModelSpec(
        name="small",
        hidden_size=256,
        vocab_size=1000,
        max_position_embeddings=64,
        layers=(LayerRun(count=LAYERS, attention=attention, mlp=mlp),),
        default_sequence_length=64,
    )


def small(experts: int = 0, *, space: Space | None = None, **job: Any) -> Problem:
    """A problem on a few H100s."""
    defaults: dict[str, Any] = {"num_gpus": 4, "global_batch_size": 4, "sequence_length": 16}
    problem = problem_of(model(experts), "dgx-h100", **(defaults | job))
    return problem.model_copy(update={"space": space or Space()})


def naive(problem: Problem) -> Iterator[Layout]:
    """Every legal layout, by loops over everything and the rules in plain words."""
    degrees = range(1, 33)
    for gpus in problem.job.num_gpus_values:
        factors = [d for d in degrees if gpus % d == 0]
        for tp, cp, pp in product(factors, repeat=3):
            if gpus % (tp * cp * pp):
                continue
            dp = gpus // (tp * cp * pp)
            for batch in problem.job.global_batch_values:
                for ep, etp, micro_batch in product(degrees, factors, degrees):
                    head = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "pp": pp, "dp": dp}
                    head |= {"micro_batch_size": micro_batch, "global_batch_size": batch}
                    if batch % (dp * micro_batch) == 0 and degrees_are_legal(problem, head):
                        for order in orders_of(problem, head):
                            yield from with_switches(problem, head | {"rank_order": order})


def orders_of(problem: Problem, c: dict[str, Any]) -> Iterator[str]:
    """Orders of the ranks that Megatron-LM takes, each list of groups once."""
    seen = set()
    moe = isinstance(problem.model.layers[0].mlp, MixtureOfExperts)
    for order in sorted(problem.space.rank_order, key=RANK_ORDERS.index):
        groups = listed(Layout(**(c | {"rank_order": order})))
        if moe and c["pp"] > 1 and not order.endswith("pp") and c["dp"] != len(groups["expert_replicas"][0]):
            continue
        if moe and groups["stages"] != groups["expert_stages"]:
            continue
        names = [name for name in groups if moe or not name.startswith("expert")]
        placed = tuple(groups[name] for name in names)
        if placed not in seen:
            seen.add(placed)
            yield order


def degrees_are_legal(problem: Problem, c: dict[str, Any]) -> bool:
    """What Megatron-LM demands of the degrees, and what the space's lists admit."""
    space, run = problem.space, problem.model.layers[0]
    for name in ("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size"):
        allowed = getattr(space, name)
        if allowed is not None and c[name] not in allowed:
            return False
    if isinstance(run.mlp, MixtureOfExperts):
        experts = run.mlp.num_experts % c["ep"] == 0 and run.mlp.intermediate_size % c["etp"] == 0
        grid = (c["tp"] * c["cp"] * c["dp"]) % (c["ep"] * c["etp"]) == 0 and c["tp"] % c["etp"] == 0
        widths = experts and grid
    else:
        widths = c["ep"] == c["etp"] == 1 and run.mlp.intermediate_size % c["tp"] == 0
    kv = getattr(run.attention, "num_key_value_heads")  # noqa: B009
    return (
        widths
        and run.attention.num_attention_heads % c["tp"] == 0
        and (kv % c["tp"] == 0 or c["tp"] % kv == 0)
        and (c["cp"] == 1 or problem.job.sequence_length % (2 * c["cp"]) == 0)
    )


def with_switches(problem: Problem, c: dict[str, Any]) -> Iterator[Layout]:
    """Virtual stages, schedule, sharding and switches of legal degrees."""
    space = problem.space
    for vpp, schedule, sp, zero, grad, param in product(
        space.vpp or range(1, LAYERS + 3),
        space.schedule,
        space.sequence_parallel,
        space.zero_stage,
        space.overlap_grad_reduce,
        space.overlap_param_gather,
    ):
        micro_batches = c["global_batch_size"] // (c["dp"] * c["micro_batch_size"])
        if not stages_are_legal(problem, c["pp"], vpp, schedule, micro_batches):
            continue
        moe = isinstance(problem.model.layers[0].mlp, MixtureOfExperts)
        if sp and (c["tp"] == 1 or (problem.job.sequence_length // c["cp"]) % c["tp"]):
            continue
        if moe and c["tp"] > 1 and not sp:
            continue
        if zero > 1 and c["pp"] > 1 and not space.zero_pipeline:
            continue
        if sharding_is_legal(space, c["cp"] * c["dp"], zero, grad, param):
            switches: dict[str, Any] = {
                "vpp": vpp,
                "schedule": schedule,
                "sequence_parallel": sp,
                "zero_stage": zero,
                "overlap_grad_reduce": grad,
                "overlap_param_gather": param,
            }
            yield Layout(**(c | switches))


def stages_are_legal(problem: Problem, pp: int, vpp: int, schedule: str, micro_batches: int) -> bool:
    """Enough layers for the virtual stages, and a schedule that exists."""
    stages = pp * vpp
    if problem.space.kind == "uniform":
        if LAYERS - -(-LAYERS // stages) * (stages - 1) < 1:
            return False
    elif stages > LAYERS + 2:
        return False
    if pp == 1:
        plain = "1f1b" if "1f1b" in problem.space.schedule else "gpipe"
        return vpp == 1 and schedule == plain
    if schedule == "interleaved":
        return vpp > 1 and micro_batches % pp == 0
    return vpp == 1


def sharding_is_legal(space: Space, replicas: int, zero: int, grad: bool, param: bool) -> bool:
    """Sharding and overlap need replicas; a switch is on wherever it may be."""
    if replicas == 1:
        return zero == 0 and not grad and not param
    if zero >= 2 and not grad:
        return False
    if zero == 3 and not param:
        return False
    if param and not (zero >= 1 and grad):
        return False
    if not grad and True in space.overlap_grad_reduce:
        return False
    return not (not param and zero >= 1 and grad and True in space.overlap_param_gather)


PROBLEMS = [
    small(),
    small(space=Space(kind="uniform")),
    small(4, num_gpus=8, global_batch_size=8),
    small(6, num_gpus=6, global_batch_size=12, space=Space(kind="uniform")),
    small(num_gpus=6, global_batch_size=6, space=Space(schedule=("gpipe", "1f1b"))),
    small(num_gpus=8, space=Space(schedule=("gpipe", "interleaved"), vpp=(1, 2, 3))),
    small(num_gpus=8, sequence_length=12, space=Space(overlap_grad_reduce=(False,))),
    small(num_gpus=8, space=Space(overlap_param_gather=(False,), zero_stage=(0, 1))),
    small(num_gpus=8, space=Space(overlap_param_gather=(True,), overlap_grad_reduce=(True,))),
    small(4, num_gpus=16, global_batch_size=16, space=Space(tp=(2, 4), ep=(1, 2), etp=(1, 2), pp=(1, 2))),
    small(
        num_gpus={"minimum": 2, "maximum": 6, "step": 2},
        global_batch_size={"minimum": 4, "maximum": 8, "step": 4},
        space=Space(sequence_parallel=(True,), micro_batch_size=(1, 4)),
    ),
    small(num_gpus=8, space=Space(rank_order=RANK_ORDERS, zero_stage=(1,), schedule=("1f1b",))),
    small(
        4,
        num_gpus=8,
        global_batch_size=8,
        space=Space(rank_order=RANK_ORDERS, zero_stage=(0,), schedule=("1f1b",), micro_batch_size=(1,)),
    ),
    small(4, num_gpus=8, space=Space(rank_order=("dp-tp-pp-cp", "tp-cp-pp-dp"), zero_stage=(1,), pp=(2,))),
    small(space=Space(zero_pipeline=True)),
]


@pytest.mark.parametrize("problem", long_but(PROBLEMS[::4], PROBLEMS))
def test_equals_a_naive_enumeration(problem: Problem) -> None:
    """The space holds exactly the layouts that plain loops find, each once, and each passes every rule."""
    columns = layout_space(problem).columns
    found = [columns.at(row) for row in range(len(columns))]
    expected = set(naive(problem))
    assert len(found) == len(set(found)) > 0
    assert set(found) == expected
    assert all(broken_rules(problem, layout) == [] for layout in found)


@pytest.mark.parametrize("number", long_but((0,), range(5)))
def test_every_layout_has_a_plan(number: int) -> None:
    """A layout of the space can be simulated with some split of the layers (40 layouts of each space)."""
    problem = PROBLEMS[number]
    columns = layout_space(problem).columns
    for row in range(0, len(columns), -(-len(columns) // 40)):
        layout = columns.at(row)
        stages = layout.num_virtual_stages
        counts = [LAYERS // stages + (j < LAYERS % stages) for j in range(stages)]
        if stages > LAYERS:
            counts = [0] + [1] * LAYERS + [0] * (stages - LAYERS - 1)
        ends = [sum(counts[: j + 1]) for j in range(stages)]
        held = tuple(VirtualStage(layers=(end - n, end)) for end, n in zip(ends, counts, strict=True))
        assert simulate(problem, Plan(layout=layout, virtual_stages=held)).step_time_s > 0


LEGAL: dict[str, Any] = {"global_batch_size": 24}
BROKEN: list[tuple[str, int, dict[str, Any]]] = [
    ("heads_divisible_by_tp", 0, {"tp": 3}),
    ("kv_heads_multiple_or_divisor_of_tp", 0, {"tp": 6}),
    ("intermediate_size_divisible_by_tp", 0, {"tp": 5}),
    ("sequence_divisible_by_twice_cp", 0, {"cp": 16}),
    ("pp_not_above_stages", 0, {"pp": 8}),
    ("batch_divisible_by_dp", 0, {"dp": 5}),
    ("experts_divisible_by_ep", 4, {"dp": 3, "ep": 3}),
    ("expert_width_divisible_by_etp", 4, {"tp": 5, "etp": 5, "sequence_parallel": True}),
    ("expert_grid_divides_ranks", 4, {"dp": 2, "ep": 4}),
    ("etp_divides_tp", 4, {"tp": 2, "dp": 2, "etp": 4, "sequence_parallel": True}),
    ("experts_need_moe", 0, {"dp": 2, "ep": 2}),
    (
        "experts_need_pp_last_or_equal_replicas",
        4,
        {"dp": 4, "ep": 4, "pp": 2, "rank_order": "tp-cp-pp-dp"},
    ),
    (
        "expert_stages_are_dense_stages",
        4,
        {"tp": 2, "sequence_parallel": True, "dp": 2, "pp": 2, "rank_order": "tp-pp-cp-dp"},
    ),
    ("sequence_parallel_needs_tp", 0, {"sequence_parallel": True}),
    ("sequence_divisible_by_tp", 0, {"tp": 8, "cp": 4, "sequence_parallel": True}),
    ("experts_with_tp_need_sequence_parallel", 4, {"tp": 2}),
    ("virtual_stages_not_above_layers", 0, {"pp": 4, "vpp": 2, "schedule": "interleaved"}),
    ("interleaving_needs_two_stages", 0, {"vpp": 2, "schedule": "interleaved"}),
    (
        "interleaved_micro_batches_divisible_by_pp",
        0,
        {"pp": 2, "vpp": 2, "schedule": "interleaved", "micro_batch_size": 8},
    ),
    ("schedule_matches_vpp", 0, {"pp": 2, "schedule": "interleaved"}),
    ("split_backward_needs_two_stages", 0, {"schedule": "zb-h1"}),
    ("offload_needs_whole_backward", 0, {"pp": 2, "schedule": "zb-h1", "offload_optimizer": True}),
    (
        "pairs_need_two_micro_batches_per_stage",
        0,
        {"pp": 2, "vpp": 2, "schedule": "dualpipe-v", "micro_batch_size": 8},
    ),
    ("zero_needs_replicas", 0, {"tp": 2, "zero_stage": 1}),
    ("grad_overlap_needs_replicas", 0, {"tp": 2, "overlap_grad_reduce": True}),
    ("param_overlap_needs_zero_and_grad_overlap", 0, {"dp": 2, "overlap_param_gather": True}),
    ("sharded_gradients_are_overlapped", 0, {"dp": 2, "zero_stage": 2}),
    ("sharded_weights_are_overlapped", 0, {"dp": 2, "zero_stage": 3, "overlap_grad_reduce": True}),
    ("dp_replicate_divides_dp", 0, {"dp": 4, "zero_stage": 1, "dp_replicate": 3}),
    ("dp_replicate_divides_expert_replicas", 4, {"dp": 4, "ep": 4, "zero_stage": 1, "dp_replicate": 2}),
    ("dp_replicate_leaves_shards", 0, {"dp": 2, "zero_stage": 1, "dp_replicate": 2}),
    ("dp_replicate_needs_zero", 0, {"dp": 4, "dp_replicate": 2}),
    ("kept_weights_need_no_pipeline", 0, {"dp": 2, "pp": 2, "zero_stage": 3, "keep_weights": True}),
    ("kept_weights_are_trained_once", 0, {"dp": 2, "keep_weights": True, "offload_weights": True}),
    (
        "allgather_needs_whole_experts",
        4,
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "sequence_parallel": True, "expert_dispatch": "allgather"},
    ),
    ("offload_modules_of_the_model", 0, {"dp": 2, "offload_modules": "attn_norm"}),
    ("shared_images_need_context_parallelism", 0, {"dp": 2, "vision_data_parallel": True}),
    ("kept_weights_need_zero_3", 0, {"dp": 2, "zero_stage": 2, "keep_weights": True}),
    ("micro_batch_divides_share_of_batch", 0, {"dp": 2, "micro_batch_size": 5}),
]


@pytest.mark.parametrize(("rule", "experts", "fields"), BROKEN, ids=[rule for rule, _, _ in BROKEN])
def test_rule_rejects_an_example(rule: str, experts: int, fields: dict[str, Any]) -> None:
    """Each named rule refuses a layout made to break it, and the layout is not in the space."""
    layout = Layout(**(LEGAL | fields))
    problem = small(experts, num_gpus=layout.num_gpus, global_batch_size=24)
    assert rule in broken_rules(problem, layout)
    opened = problem.model_copy(update={"space": Space(rank_order=RANK_ORDERS, dp_replicate=None)})
    more = layout.rank_order != RANK_ORDERS[0] or layout.dp_replicate > 1
    columns = layout_space(opened if more else problem).columns
    assert layout not in [columns.at(row) for row in range(len(columns))]


def test_context_parallel_ranks_need_whole_heads_of_a_recurrence() -> None:
    """tp x cp divides the heads of linear recurrences, also where tp alone does."""
    problem = problem_of("qwen3-next-80b", "dgx-h100", num_gpus=64, global_batch_size=64)
    layout = Layout(tp=2, cp=16, dp=2, sequence_parallel=True, global_batch_size=64)
    assert broken_rules(problem, layout) == ["recurrent_heads_divisible_by_tp_and_cp"]
    columns = layout_space(problem).columns
    assert (columns.cp > 1).any()
    assert (columns.tp * columns.cp)[columns.cp > 1].max() == 16
    runs = [
        run.model_copy(update={"attention": run.attention.model_copy(update={"update": "kda", "gate_rank": 128})})
        if run.attention.type == "recurrence"
        else run
        for run in problem.model.layers
    ]
    narrow = problem.model_copy(update={"model": problem.model.model_copy(update={"layers": tuple(runs)})})
    assert layout_space(narrow).columns.cp.max() == 1


def test_stages_start_with_layers_that_select_keys() -> None:
    """GLM-5.2 selects keys in layers 0, 1, 2, 6, 10 and so on to 74. Megatron-Bridge's recipes of it (067f987d,
    recipes/glm: 14, 12, 12, 12, 12 and 16 layers; model_verification_cards/glm5-2: 11 stages) are plans of the
    space, and neither equal stages nor a split that moves a layer are; a pipeline has 22 stages at most."""
    model = model_from_config(configurations()["zai-org--GLM-5.2"], "glm-5.2")
    problem = problem_of(model, "dgx-b200", num_gpus=1056, global_batch_size=1056)
    columns = layout_space(problem).columns
    assert set(columns.pp[columns.vpp == 1].tolist()) == {pp for pp in range(1, 23) if 1056 % pp == 0}
    for sizes in ((14, 12, 12, 12, 12, 16), (6, *(8,) * 8, 4, 4)):
        layout = Layout(pp=len(sizes), dp=1056 // len(sizes), global_batch_size=1056)
        for split, legal in ((sizes, True), ((sizes[0] + 1, sizes[1] - 1, *sizes[2:]), False)):
            plan = plan_of(layout, *np.array([split, split, [0] * len(sizes)]))
            assert in_space(problem, plan) == legal
            with nullcontext() if legal else pytest.raises(IllegalPlanError, match="takes the keys of the layer"):
                check_plan_of_model(model, plan)
    space = layout_space(problem.model_copy(update={"space": Space(kind="uniform", zero_stage=(1,))}))
    assert set((space.columns.pp * space.columns.vpp).tolist()) == {1}
    assert space.rejected["layers_split_into_stages"] > 0


def test_zero_2_and_3_with_a_pipeline_are_opened() -> None:
    """The default space refuses ZeRO 2 and 3 in pipelines by a rule with a count; the space that allows them has
    just these layouts besides, and so has a space that fixes both."""
    problem = small(num_gpus=8)
    opened = problem.model_copy(update={"space": Space(zero_pipeline=True)})
    closed, every = layout_space(problem), layout_space(opened)
    both = (every.columns.zero_stage > 1) & (every.columns.pp > 1)
    assert len(closed) == len(every) - both.sum() < len(every)
    assert closed.rejected["zero_2_and_3_without_pipeline"] == both.sum()
    assert not ((closed.columns.zero_stage > 1) & (closed.columns.pp > 1)).any()
    asked = fixed(problem, {"zero_stage": 3, "pp": 2})
    assert asked.space.zero_pipeline
    columns = layout_space(asked).columns
    assert len(columns) == (both & (every.columns.zero_stage == 3) & (every.columns.pp == 2)).sum() > 0
    assert not fixed(problem, {"zero_stage": 3}).space.zero_pipeline
    assert (layout_space(fixed(problem, {"zero_stage": 3})).columns.pp == 1).all()
    listed = problem.model_copy(update={"space": Space(zero_stage=(3,), pp=(2,))})
    why = explain(listed)
    assert "zero_2_and_3_without_pipeline" in why.seen
    assert "--allow zero-pipeline" in why.do


@pytest.mark.parametrize("num_micro_batches", long_but((1, 2), (1, 2, 7)))
@pytest.mark.parametrize(("tp", "dp", "zero_stage"), [(8, 1, 0), (2, 4, 0), (1, 8, 1), (2, 4, 2), (1, 8, 3)])
def test_one_schedule_stands_for_those_that_are_the_same(
    num_micro_batches: int, tp: int, dp: int, zero_stage: int
) -> None:
    """Without a pipeline gpipe and 1f1b have one report, to the nanosecond and the byte; of the schedules that
    differ there is none to stand for."""
    problem = problem_of("llama3-8b", "dgx-h100", sequence_length=2048)
    sizes: dict[str, Any] = {"tp": tp, "dp": dp, "global_batch_size": dp * num_micro_batches}
    sharded = {"zero_stage": zero_stage, "overlap_grad_reduce": zero_stage > 1}
    found = [Layout(schedule=name, **sizes, **sharded) for name in ("1f1b", "gpipe")]  # type: ignore[arg-type]
    first, second = (simulate(problem, even_plan(problem, layout)) for layout in found)
    assert first == second
    split = found[0].model_copy(update={"schedule": "zb-h1"})
    assert "split_backward_needs_two_stages" in broken_rules(problem, split)


def test_every_rule_has_an_example() -> None:
    """No rule of the module goes without an example (those that only the space knows are tested by it)."""
    from milpplan.optimize.space import enumerate_layouts as sut
    from milpplan.optimize.space.rules import PAIR_RULES, SCHEDULE_RULES, SPLIT_BACKWARD_RULES, SPLIT_RULES

    rules = {
        *sut.DEGREE_RULES,
        *sut.EXPERT_RULES,
        *sut.ORDER_RULES,
        *sut.SEQUENCE_RULES,
        *SPLIT_RULES,
        *SCHEDULE_RULES,
        *SPLIT_BACKWARD_RULES,
        *PAIR_RULES,
        *sut.SHARDING_RULES,
    }
    of_the_space = {"layers_split_into_stages", "one_schedule_without_pipeline", "pairs_need_one_node_type"}
    of_the_space.add("recurrent_heads_divisible_by_tp_and_cp")
    assert rules - of_the_space <= {rule for rule, _, _ in BROKEN}


def test_rejections_are_counted_by_name() -> None:
    """What is enumerated and not legal was refused by a rule with a name."""
    space = layout_space(small(4, num_gpus=8, global_batch_size=8))
    assert space.rejected["experts_with_tp_need_sequence_parallel"] > 0
    assert all(count >= 0 for count in space.rejected.values())
    assert space.enumerated >= len(space.columns) + max(space.rejected.values())


def test_fixed_values_are_kept() -> None:
    """Fixing fields keeps exactly the layouts that have those values."""
    problem = small(4, num_gpus=8, global_batch_size=8)
    every = layout_space(problem).columns
    for values in ({"tp": 2}, {"pp": 2, "vpp": 1}, {"zero_stage": 1, "ep": 4}, {"sequence_parallel": False}):
        found = layout_space(fixed(problem, values)).columns
        rows = [every.at(row) for row in range(len(every))]
        expected = [row for row in rows if all(getattr(row, name) == v for name, v in values.items())]
        assert {found.at(row) for row in range(len(found))} == set(expected)


def test_a_forbidden_overlap_brings_its_twin_back() -> None:
    """Layouts without overlap are left out only because their twin is in the space: fixing the switch off
    brings them back."""
    problem = small(num_gpus=4)
    assert layout_space(problem).rejected["dominated_by_overlap"] > 0
    off = layout_space(fixed(problem, {"overlap_grad_reduce": False})).columns
    assert (off.dp * off.cp > 1).any()
    assert not off.overlap_grad_reduce.any()


def test_forbidden_layouts_are_left_out() -> None:
    """Forbidding partial layouts drops those that match one of them in every named field, and counts them."""
    problem = small(num_gpus=8)
    every = layout_space(problem).columns
    rows = {every.at(row) for row in range(len(every))}
    forbidden = ({"tp": 2, "schedule": "1f1b"}, {"zero_stage": 3})
    space = layout_space(problem, forbidden)
    left = {space.columns.at(row) for row in range(len(space.columns))}
    dropped = {row for row in rows if (row.tp == 2 and row.schedule == "1f1b") or row.zero_stage == 3}
    assert left == rows - dropped
    assert space.rejected["forbidden_by_caller"] == len(dropped) > 0


FORBIDDEN: tuple[tuple[dict[str, int], ...], ...] = ((), ({"zero_stage": 2}, {"tp": 4}), ({"pp": 1},))


@pytest.mark.parametrize("forbidden", long_but(FORBIDDEN[:2], FORBIDDEN))
def test_rows_are_the_same_one_by_one_and_together(forbidden: tuple[dict[str, int], ...]) -> None:
    """Rows that are made when they are taken are those of the whole table; each is found again, others are not."""
    space = layout_space(small(4, num_gpus=8), forbidden)
    layouts = [space.columns.at(row) for row in range(len(space))]
    assert len(set(layouts)) == len(layouts) > 100
    assert [space.at(row) for row in range(len(space))] == layouts
    assert [space.find(layout) for layout in layouts] == list(range(len(space)))
    assert space.find(layouts[0].model_copy(update={"micro_batch_size": 999})) is None
    assert space.find(layouts[0].model_copy(update={"zero_stage": 1, "overlap_grad_reduce": False})) is None
    assert np.array_equal(space.spread(space.families.tp), space.columns.tp)
    backwards = space.take(np.arange(len(space))[::-1])
    assert [backwards.at(row) for row in range(len(space))] == layouts[::-1]


@pytest.mark.long
def test_spaces_beyond_memory_are_refused() -> None:
    """Ranges of GPUs and batches multiply: the product is refused before it is listed, with advice."""
    ranges = {
        "num_gpus": Range(minimum=512, maximum=16384, step=512),
        "global_batch_size": Range(minimum=1024, maximum=16384, step=1024),
    }
    with pytest.raises(InvalidInputError, match=r"more than 4,000,000 combinations .* sweep"):
        layout_space(problem_of("deepseek-v3", "dgx-h100", **ranges))


def test_refusals_count_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space whose rules split no block is refused where it has more blocks than the limit."""
    gpus, batches = Range(minimum=1, maximum=8), Range(minimum=1, maximum=8)
    problem = small(num_gpus=gpus, global_batch_size=batches, space=Space(rank_order=RANK_ORDERS[:1]))
    blocks = len(layout_space(problem).blocks)
    for limit in (0, blocks // 2, blocks - 1):
        monkeypatch.setattr(enumerate_layouts, "MAX_BLOCKS", limit)
        with pytest.raises(InvalidInputError, match="combinations"):
            layout_space(problem)
    monkeypatch.setattr(enumerate_layouts, "MAX_BLOCKS", 2 * blocks)
    assert len(layout_space(problem).blocks) == blocks


def test_large_spaces_are_listed_until_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time may be up at any look at the clock; small spaces are listed whole."""
    problem = small(space=Space(schedule=SCHEDULES, tp_overlap=("none", "ring")))
    whole = layout_space(problem, stop=lambda: True)
    monkeypatch.setattr(rule_filter, "SMALL_TABLE", 0)
    looks = count()
    assert layout_space(problem, stop=lambda: next(looks) < 0).sha256() == whole.sha256()
    total = next(looks)
    assert total > 20
    for last in range(0, total, 7):
        seen = count()
        with pytest.raises(KeyboardInterrupt):
            layout_space(problem, stop=lambda seen=seen, last=last: next(seen) >= last)


def test_unknown_fields_are_refused() -> None:
    """Fixing a name that no layout has is the caller's mistake."""
    with pytest.raises(InvalidInputError, match="tensor_parallel"):
        fixed(small(), {"tensor_parallel": 8})


def test_an_empty_space() -> None:
    """Values that no rule admits give an empty space, not an error."""
    assert len(layout_space(small(space=Space(tp=(3,)))).columns) == 0
    assert len(layout_space(small(4, space=Space(ep=(3,)))).columns) == 0
    assert len(layout_space(small(global_batch_size=1, space=Space(dp=(4,)))).columns) == 0


def test_divisors() -> None:
    """All divisors in ascending order, squares once."""
    assert divisors(36).tolist() == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1).tolist() == [1]
    assert all(divisors(n).tolist() == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 200))
