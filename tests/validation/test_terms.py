"""Terms: which plans have them, and what a step takes without them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from milpplan import Layout, Plan, Problem, Recompute, VirtualStage, load_hardware, load_model, simulate
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job
from milpplan.simulation import OFFLOADS
from milpplan.validation import BY_NAME, TERMS, step_doubled_s, step_without_s, used_terms
from tests.amounts import long_but
from tests.optimize.problems import random_plan, random_problem

DENSE = {"tensor_parallel_inside", "gradient_reduction_across", "parameter_gather"}


def case(
    model: str = "llama3-8b", precision: Any = "bf16", recompute: str = "none", **degrees: Any
) -> tuple[Problem, Plan]:
    """A plan with equal stages on DGX H100; what the degrees leave of 32 GPUs are replicas."""
    values = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "zero_stage": 1, "micro_batch_size": 1} | degrees
    values["dp"] = degrees.get("dp", 32 // (values["tp"] * values["cp"] * values["pp"]))
    values = {"schedule": "interleaved" if values["vpp"] > 1 else "1f1b"} | values
    layout = Layout(global_batch_size=values["dp"] * 8, **values)
    spec = load_model(model)
    each, stages = spec.num_layers // layout.num_virtual_stages, []
    for number in range(layout.num_virtual_stages):
        count = {name: each if recompute == name else 0 for name in ("full", "selective")}
        stages.append(VirtualStage(layers=(number * each, (number + 1) * each), recompute=Recompute(**count)))
    job = Job(
        num_gpus=layout.num_gpus,
        global_batch_size=layout.global_batch_size,
        sequence_length=4096,
        precision=precision,
    )
    return Problem(model=spec, hardware=load_hardware("dgx-h100"), job=job), Plan(
        layout=layout, virtual_stages=tuple(stages)
    )


CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "tp": ({"tp": 8}, DENSE),
    "tp across nodes": ({"tp": 16}, DENSE - {"tensor_parallel_inside"} | {"tensor_parallel_across"}),
    "one node": ({"tp": 2, "dp": 4}, DENSE - {"gradient_reduction_across"} | {"gradient_reduction_inside"}),
    "alone": ({"tp": 8, "dp": 1}, {"tensor_parallel_inside"}),
    "cp": ({"cp": 4}, DENSE - {"tensor_parallel_inside"} | {"context_parallel"}),
    "zero 2": ({"zero_stage": 2}, {"zero_2", "parameter_gather"}),
    "zero 3": ({"zero_stage": 3}, {"zero_3"}),
    "full": ({"tp": 8, "recompute": "full"}, DENSE | {"full_recompute"}),
    "selective": ({"tp": 8, "recompute": "selective"}, DENSE | {"selective_recompute"}),
    "pipeline": ({"tp": 4, "pp": 4, "dp": 16}, DENSE | {"pipeline"}),
    "interleaved": ({"tp": 4, "pp": 4, "vpp": 2, "dp": 16}, DENSE | {"interleaved_pipeline"}),
    "zero bubble": ({"tp": 4, "pp": 4, "dp": 16, "schedule": "zb-h1"}, DENSE | {"zero_bubble_pipeline"}),
    "V": ({"tp": 4, "pp": 4, "vpp": 2, "dp": 16, "schedule": "zb-v"}, DENSE | {"zero_bubble_pipeline"}),
    "pairs": (
        {"model": "mixtral-8x7b", "ep": 8, "pp": 4, "vpp": 2, "dp": 8, "schedule": "dualpipe-v"},
        DENSE - {"tensor_parallel_inside", "gradient_reduction_across"}
        | {"gradient_reduction_inside", "experts", "expert_dispatch_inside"}
        | {"zero_bubble_pipeline", "paired_layers"},
    ),
    "fp8": ({"tp": 8, "precision": "fp8"}, DENSE | {"fp8_products"}),
    "experts": (
        {"model": "mixtral-8x7b", "ep": 8},
        DENSE - {"tensor_parallel_inside"} | {"experts", "expert_dispatch_inside"},
    ),
    "experts across nodes": (
        {"model": "mixtral-8x7b", "tp": 4, "etp": 4, "ep": 8, "sequence_parallel": True},
        DENSE | {"experts", "expert_dispatch_across"},
    ),
    "hybrid sharding": ({"tp": 8, "dp_replicate": 2}, DENSE | {"hybrid_sharding"}),
    "kept weights": ({"zero_stage": 3, "keep_weights": True}, {"zero_3", "kept_weights"}),
    "offload": ({"tp": 8, "offload_weights": True, "offload_optimizer": True}, DENSE | {"host_traffic"}),
    "modules": ({"tp": 8, "offload_modules": "qkv_linear"}, DENSE | {"host_traffic"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_the_terms_of_its_layout(name: str) -> None:
    """Domains of 8 GPUs; tensor parallelism is inside, then come context parallelism and replicas."""
    words, expected = CASES[name]
    problem, plan = case(**words)
    assert {term.name for term in used_terms(problem, plan)} == expected


OFTEN_AND_LONG = [
    name if number % 5 == 0 else pytest.param(name, marks=pytest.mark.long) for number, name in enumerate(CASES)
]
"""Every fifth without the long tests."""


@pytest.mark.parametrize("name", OFTEN_AND_LONG)
def test_without_a_term_a_step_is_no_longer(name: str) -> None:
    """Nothing scaled is the simulator's step; a term at zero never adds to it, a doubled one never takes from it,
    and a term that the plan has not changes nothing."""
    problem, plan = case(**CASES[name][0])
    step = simulate(problem, plan).step_time_s
    assert step_without_s(problem, plan, ()) == step
    for term in TERMS:
        without, doubled = step_without_s(problem, plan, [term]), step_doubled_s(problem, plan, [term])
        if term.used(problem, plan):
            assert 0 < without <= step <= doubled
        else:
            assert without == step == doubled
    assert 0 < step_without_s(problem, plan, TERMS) < step < step_doubled_s(problem, plan, TERMS)


@pytest.mark.parametrize("seed", long_but((14, 192), range(200)))
def test_terms_of_random_plans_with_something_on_the_host(seed: int) -> None:
    """Where a layer that recomputes nothing waits for its transfers, a replay alone may take less than nothing,
    and a bubble may be longer than the step that other terms leave. No term at zero adds to the step for that, no
    doubled one takes from it, and no step is negative, with one term or with all."""
    rng, problem = random.Random(seed), random_problem(seed)
    columns = layout_space(problem).columns
    for row in range(min(len(columns), 4)):
        switches = {name: rng.random() < 0.7 for name in OFFLOADS}
        plan = random_plan(rng, problem, columns.at(row).model_copy(update=switches))
        step = simulate(problem, plan).step_time_s
        assert step_without_s(problem, plan, ()) == step
        for terms in (*((term,) for term in used_terms(problem, plan)), TERMS):
            assert 0 <= step_without_s(problem, plan, terms) <= step <= step_doubled_s(problem, plan, terms)


@pytest.mark.parametrize(
    ("name", "term", "exposed", "hidden"),
    [
        ("tp", "tensor_parallel_inside", "tp_exposed", "tp_hidden"),
        ("tp across nodes", "tensor_parallel_across", "tp_exposed", "tp_hidden"),
        ("cp", "context_parallel", "cp_exposed", "cp_hidden"),
        ("zero 3", "zero_3", "zero_exposed", "zero_hidden"),
        ("experts", "expert_dispatch_inside", "ep_exposed", None),
        ("tp", "gradient_reduction_across", "grad_reduce_exposed", None),
        ("tp", "parameter_gather", "param_gather_exposed", None),
        ("full", "full_recompute", "recompute", None),
        ("selective", "selective_recompute", "recompute", None),
        ("pipeline", "pipeline", "bubble", None),
        ("V", "zero_bubble_pipeline", "bubble", None),
        ("interleaved", "interleaved_pipeline", "bubble", None),
    ],
)
def test_a_term_is_its_part_of_the_breakdown(name: str, term: str, exposed: str, hidden: str | None) -> None:
    """On one stage without overlap of the reduction, the step is a sum: without a term its exposed part is gone,
    with twice the term the hidden part is exposed as well. (ZeRO 3's ends are gathered once a step.)"""
    problem, plan = case(**CASES[name][0])
    report = simulate(problem, plan)
    seconds = report.breakdown_s[exposed]
    assert seconds > 0
    without = step_without_s(problem, plan, [BY_NAME[term]])
    assert report.step_time_s - without == pytest.approx(seconds, abs=1e-8)
    more = seconds + (report.hidden_s[hidden] if hidden else 0.0)
    doubled = step_doubled_s(problem, plan, [BY_NAME[term]])
    assert doubled - report.step_time_s == pytest.approx(more, abs=1e-8)


def test_pairs_cover_what_they_cover_today() -> None:
    """Without expert dispatch a step of pairs loses less than all of it, exposed or covered; with twice the
    dispatch it is longer by no less than all of it, because pairs cover no more than today."""
    problem, plan = case(**CASES["pairs"][0])
    report, term = simulate(problem, plan), BY_NAME["expert_dispatch_inside"]
    assert report.hidden_s["ep_hidden"] > 0
    exposed, hidden = (report.stages[0].breakdown_s["ep_exposed"], report.stages[0].hidden_s["ep_hidden"])
    assert 0 < report.step_time_s - step_without_s(problem, plan, [term]) < exposed + hidden
    assert step_doubled_s(problem, plan, [term]) - report.step_time_s >= exposed + hidden


def test_without_transfers_of_the_host_none_is_exposed() -> None:
    """On one stage a step of offloaded states loses exactly what of their transfers no work covers."""
    problem, plan = case(**CASES["offload"][0])
    report = simulate(problem, plan)
    without = step_without_s(problem, plan, [BY_NAME["host_traffic"]])
    assert report.breakdown_s["offload_exposed"] > 0
    assert report.step_time_s - without == pytest.approx(report.breakdown_s["offload_exposed"], abs=1e-6)


def test_pairs_that_hide_nothing_take_as_long_as_their_layers() -> None:
    """With twice what pairs leave exposed, the dispatch that they hide is exposed as well."""
    problem, plan = case(**CASES["pairs"][0])
    report, term = simulate(problem, plan), BY_NAME["paired_layers"]
    hidden = report.stages[0].hidden_s["ep_hidden"]
    assert hidden > 0
    assert step_doubled_s(problem, plan, [term]) - report.step_time_s > 0.9 * hidden


def test_without_experts_their_products_are_gone() -> None:
    """Twice as wide experts have twice the products: what they add is what the term takes off, but for routing,
    permutation and latencies."""
    problem, plan = case(**CASES["experts"][0])
    wide = [
        kind.model_copy(update={"mlp": kind.mlp.model_copy(update={"intermediate_size": 2 * 14336})})
        for kind in problem.model.layers
    ]
    wider = problem.model_copy(update={"model": problem.model.model_copy(update={"layers": tuple(wide)})})
    compute = [simulate(one, plan).breakdown_s["compute"] for one in (problem, wider)]
    share = simulate(problem, plan).step_time_s - step_without_s(problem, plan, [BY_NAME["experts"]])
    assert compute[1] - compute[0] == pytest.approx(share, rel=0.1)


def test_without_8_bit_products_only_their_traffic_is_left() -> None:
    """No product beats the peak, so what is gone is at least the layers' FLOPs over it."""
    problem, plan = case(**CASES["fp8"][0])
    layout = plan.layout
    share = simulate(problem, plan).step_time_s - step_without_s(problem, plan, [BY_NAME["fp8_products"]])
    assert problem.hardware.accelerator.fp8 is not None
    weights = problem.model.num_layers * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    tokens = layout.global_batch_size // layout.dp * 4096
    least = 6 * weights * tokens / layout.tp / problem.hardware.accelerator.fp8.peak_flops_per_s
    assert least < share < 3 * least


def test_names_are_distinct() -> None:
    """A name is a key of documents, and words are told to people."""
    assert len({term.name for term in TERMS}) == len({term.words for term in TERMS}) == len(TERMS)
