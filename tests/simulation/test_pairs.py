"""What layers take in a pair, a forward beside a whole backward, and where the step's report puts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from milpplan.problem import SCHEDULES, HardwareSpec, Layout, Plan, Problem, Recompute
from milpplan.simulation import LayoutColumns, LayoutCosts, simulate
from milpplan.simulation.layers import EXPOSED, LAYER_COMMUNICATION, ONCE, Part, Phase, Term, least_paired_ns
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import long_but
from tests.simulation.cases import MODEL_HARDWARE, columns_of, even_plan, problem_of
from tests.simulation.test_stages import stage

FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "cp": 2, "dp": 2, "sequence_parallel": True, "zero_stage": 1},
    {"cp": 2, "dp": 2, "zero_stage": 3},
    {"dp": 4, "zero_stage": 2},
)


def paired(fields: dict[str, Any], schedule: Any = "dualpipe-v") -> LayoutColumns:
    """Columns of one layout with two stages and two chunks."""
    columns = columns_of(**{"pp": 2, "vpp": 2, "global_batch_size": 16} | fields)
    return replace(columns, schedule=np.array([SCHEDULES.index(schedule)]))


def of_both(problem: Problem, fields: dict[str, Any]) -> tuple[LayoutCosts, LayoutCosts]:
    """Constants under DualPipeV and under ZB-V."""
    found = [layout_costs(problem, paired(fields, name)).at(0) for name in ("dualpipe-v", "zb-v")]
    return found[0], found[1]


def experts_on(hardware: HardwareSpec, fraction: float) -> Problem:
    """DeepSeek-V3 where collectives take a share of the processors."""
    tiers = {
        name: getattr(hardware, name).model_copy(update={"processor_fraction": fraction})
        for name in ("scale_up", "scale_out")
    }
    problem = problem_of("deepseek-v3", "dgx-h100")
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update=tiers)})


@pytest.mark.parametrize("case", long_but(MODEL_HARDWARE[1::2], MODEL_HARDWARE), ids=lambda case: case[0])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_pair_is_between_the_busiest_resource_and_one_after_another(
    case: tuple[str, str, str, str], fields: dict[str, Any]
) -> None:
    """Forward and whole backward of a layer in a pair are each no less than their compute and their communication,
    no more than alone; together no less than the forward alone or the backward alone without its weight
    gradients."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    if any(kind.mlp.type == "moe" for kind in problem.model.kinds):
        ranks = fields.get("tp", 1) * fields.get("cp", 1) * fields.get("dp", 1)
        fields = fields | {"ep": min(4, ranks)}
    costs, other = of_both(problem, fields)
    assert np.array_equal(costs.duration_ns, other.duration_ns)
    assert not other.runs_pairs
    layer, alone = costs.parts.layer, costs.duration_ns
    forward, whole = costs.paired_ns[:, 0], costs.paired_ns[:, 1] + alone[:, Phase.WEIGHT]
    for found, phases in ((forward, [Phase.FORWARD]), (whole, [Phase.BACKWARD, Phase.WEIGHT])):
        assert np.all(found >= layer[:, Part.COMPUTE][:, phases].sum(axis=1))
        sent = layer[:, list(LAYER_COMMUNICATION)][:, :, phases].sum(axis=(1, 2))
        assert np.all(found >= sent - 20)
        assert np.all(found <= alone[:, phases].sum(axis=1))
    zero = layer[:, Part.ZERO]
    longest = np.maximum(alone[:, Phase.FORWARD] - zero[:, 0], alone[:, Phase.BACKWARD] - zero[:, 1])
    assert np.all(forward + whole >= longest - 20)
    assert np.all(costs.paired_ns <= alone[:, :2])
    least, exact = least_paired_ns(problem, paired(fields))[..., 0], np.stack([forward, whole], axis=1)
    assert np.all(least <= exact)
    if fields.get("zero_stage", 0) < 2:
        assert np.all(least >= exact - 99)


def test_without_communication_a_pair_saves_nothing() -> None:
    """One GPU a stage: nothing is sent inside a layer, so nothing can be hidden."""
    for model in ("gpt3-175b", "llama3-8b"):
        costs, _ = of_both(problem_of(model, "dgx-h100"), {})
        assert np.array_equal(costs.paired_ns, costs.duration_ns[:, :2])


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_expert_layer_by_hand(fraction: float) -> None:
    """The all-to-alls of DeepSeek-V3 over 64 GPUs, M seconds a pass, beside the compute C of the same layer:
    max(C, M) + share * min(C, M), for the forward and for the whole backward."""
    problem = experts_on(problem_of("deepseek-v3", "dgx-h100").hardware, fraction)
    costs, _ = of_both(problem, {"dp": 64, "ep": 64, "global_batch_size": 1024})
    compute, sent = costs.parts.layer[1, Part.COMPUTE], costs.parts.layer[1, Part.EP]
    assert np.count_nonzero(costs.parts.layer[1, EXPOSED][:, ONCE]) == 5
    expected = []
    for phases in ([Phase.FORWARD], [Phase.BACKWARD, Phase.WEIGHT]):
        C, M = int(compute[phases].sum()), int(sent[phases].sum())
        expected.append(max(C, M) + fraction * min(C, M))
    assert costs.paired_ns[1, 0] == pytest.approx(expected[0], abs=3)
    assert costs.paired_ns[1, 1] + costs.duration_ns[1, Phase.WEIGHT] == pytest.approx(expected[1], abs=3)
    assert expected[0] < costs.duration_ns[1, Phase.FORWARD]


def test_affine_in_layers_and_recompute_counts() -> None:
    """Every further layer adds the same to both parts of a pair, every replay what it adds to a backward alone."""
    costs, _ = of_both(problem_of("deepseek-v3", "dgx-h100"), {"dp": 8, "ep": 8, "global_batch_size": 64})
    for ends in ("", "first", "last"):
        found = [stage(costs, [1] * n, ends=ends).terms[:, 0] for n in range(5)]
        for term in (Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD):
            assert np.all(np.diff([terms[term] for terms in found], n=2) == 0)
            assert found[4][term] > 0
        # The ends of the model hide nothing.
        assert found[0][Term.PAIRED_FORWARD] == found[0][Term.FORWARD]
        assert found[0][Term.PAIRED_BACKWARD] == found[0][Term.BACKWARD]
    none, some = stage(costs, [1] * 6).terms[:, 0], stage(costs, [1] * 6, 2, 3).terms[:, 0]
    assert np.flatnonzero(some - none).tolist() == [Term.BACKWARD, Term.PAIRED_BACKWARD]
    assert np.ptp((some - none)[[Term.BACKWARD, Term.PAIRED_BACKWARD]]) == 0


def test_what_pairs_hide_leaves_the_report_of_what_is_exposed() -> None:
    """With experts over 8 GPUs DualPipeV hides all-to-alls that ZB-V does not, and says how much: exposed and
    hidden together are the same, compute and recomputation too, and all parts add up to the step."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    plans = [
        even_plan(
            problem,
            Layout(pp=4, vpp=2, dp=8, ep=8, schedule=name, zero_stage=1, global_batch_size=256),
            full=1,
        )
        for name in ("dualpipe-v", "zb-v")
    ]
    pairs, none = (simulate(problem, plan) for plan in plans)
    for one, other in zip(pairs.stages, none.stages, strict=True):
        assert sum(one.breakdown_s.values()) == pytest.approx(pairs.step_time_s)
        for name in ("compute", "recompute", "optimizer"):
            assert one.breakdown_s[name] == other.breakdown_s[name]
        assert one.hidden_s["ep_hidden"] > 0 == other.hidden_s["ep_hidden"]
        sent = one.breakdown_s["ep_exposed"] + one.hidden_s["ep_hidden"]
        assert sent == pytest.approx(other.breakdown_s["ep_exposed"])
        assert min(one.breakdown_s.values()) >= 0


def test_recomputation_is_not_hidden() -> None:
    """A layer more that is recomputed in every virtual stage makes a step of one long run of pairs longer by its
    whole replay: m micro-batches, two chunks."""
    problem = problem_of("gpt3-175b", "dgx-h100")
    layout = Layout(
        pp=2, vpp=2, tp=8, sequence_parallel=True, schedule="dualpipe-v", global_batch_size=64, micro_batch_size=1
    )
    costs = layout_costs(problem, LayoutColumns.of([layout])).at(0)
    plan = even_plan(problem, layout)
    steps = [simulate(problem, recomputed(plan, full)).step_time_ns for full in (0, 1)]
    replays = 2 * 64 * int(costs.duration_ns[0, Phase.FULL])
    assert replays <= steps[1] - steps[0] <= replays * (1 + 4 / 64)


def recomputed(plan: Plan, full: int) -> Plan:
    """The plan with so many layers recomputed in every virtual stage."""
    stages = [item.model_copy(update={"recompute": Recompute(full=full)}) for item in plan.virtual_stages]
    return plan.model_copy(update={"virtual_stages": tuple(stages)})
