"""Who holds what: every element as often as it has replicas, and as many bytes as the simulator counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import IllegalPlanError
from milpplan.problem import GroupedQueryAttention, Plan
from milpplan.simulation import LayoutColumns, plan_stages
from milpplan.simulation.layout_costs import layout_costs
from milpplan.switching.ownership import (
    SHARDED_FROM,
    WHATS,
    ShardRules,
    Tensor,
    What,
    element_bytes,
    lots,
    model_tensors,
    ownership,
)
from tests.small import small_model, small_problem
from tests.switching.cases import mixed_model, plan_of, plans

MODEL = mixed_model()


def copies(plan: Plan, tensor: Tensor, what: What) -> int:
    """How many ranks must hold each element that tensor parallelism divides, on one pipeline rank."""
    layout = plan.layout
    experts = tensor.expert is not None
    divided = layout.ep * layout.etp if experts else layout.tp
    replicas = layout.tp * layout.cp * layout.dp // divided
    sharded = layout.zero_stage >= SHARDED_FROM[what] and (what != "parameters" or tensor.place >= 0)
    shards = replicas // layout.dp_replicate if sharded else 1
    whole = tensor.shape.split == "none"
    return int(replicas // shards * ((layout.etp if experts else layout.tp) if whole else 1))


@given(plan=plans(MODEL, 8), what=st.sampled_from(WHATS))
@settings(max_examples=40, deadline=None)
def test_every_element_has_its_copies(plan: Plan, what: What) -> None:
    """No element is lost, and none is held more often than replicas without ZeRO say; key and value heads that
    are fewer than tp have more copies."""
    owner = ownership(MODEL, plan, what)
    for tensor in {(t.shape, t.place, t.expert): t for t in model_tensors(MODEL)}.values():
        held = np.zeros((tensor.shape.rows, tensor.shape.columns), dtype=np.int64)
        for _, top, bottom, left, right in owner.boxes(tensor).tolist():
            held[top:bottom, left:right] += 1
        expected = copies(plan, tensor, what) * len(owner.stages(tensor))
        units = tensor.shape.units
        shared = tensor.shape.split != "none" and not tensor.shape.vocabulary and units < plan.layout.tp
        assert (held == expected * (plan.layout.tp // units if shared else 1)).all(), tensor.name


@pytest.mark.parametrize(
    "degrees", [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "zero_stage": 1}, {"dp": 4, "zero_stage": 3}]
)
def test_bytes_are_those_of_the_simulator(degrees: dict[str, int]) -> None:
    """Weights and optimizer states of every rank as ``costs`` prices them (no padding: the vocabulary of 32,000
    divides). Gradients, whole in the simulator's memory at stage 1, are a third of the states: the same shares."""
    problem = small_problem()
    plan = plan_of(problem.model, None, **degrees)
    costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    moved = {what: lots(problem.model, plan, plan, what, 4) for what in WHATS}
    for what, row in (("parameters", 0), ("optimizer", 2)):
        for rank in range(4):
            stage = rank * plan.layout.pp // 4
            assert moved[what].old_bytes[rank] == stages[stage].state_bytes[row], (what, rank)
    assert (3 * moved["gradients"].old_bytes == moved["optimizer"].old_bytes).all()
    for found in moved.values():
        assert len(found) == 0
        assert (found.old_bytes == found.kept_bytes).all()


def test_heads_are_not_cut() -> None:
    """With more tensor ranks than key/value heads neighbours hold the same head; query heads are divided."""
    model = small_model(1)
    attention = model.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    owner = ownership(model, plan_of(model, None, tp=16), "parameters")
    keys = next(t for t in model_tensors(model) if t.name == "layers.0.attention.k.weight")
    boxes = owner.boxes(keys)
    assert (boxes[:, 2] - boxes[:, 1] == attention.head_dim).all()
    assert boxes[:, 1].tolist() == [rank // 2 * attention.head_dim for rank in range(16)]


def test_padded_vocabulary_leaves_the_last_ranks_less() -> None:
    """300 rows on 2 ranks: Megatron pads to 512 and cuts at 256; in equal parts they would be cut at 150."""
    words = model_tensors(MODEL)[0]
    plan = plan_of(MODEL, None, tp=2)
    padded = ownership(MODEL, plan, "parameters").boxes(words)
    assert padded[:, 1:3].tolist() == [[0, 256], [256, 300]]
    equal = ownership(MODEL, plan, "parameters", ShardRules(padded_vocabulary=False)).boxes(words)
    assert equal[:, 1:3].tolist() == [[0, 150], [150, 300]]


@pytest.mark.parametrize(
    ("degrees", "spans", "message"),
    [
        ({"pp": 2}, [2, 4], "holds 4 layers"),
        ({"dp": 2, "ep": 4}, [5], "tp"),
        ({"dp": 3, "ep": 3}, [5], "num_experts"),
    ],
)
def test_plans_of_another_model_are_refused(degrees: dict[str, int], spans: list[int], message: str) -> None:
    """A wrong number of layers, and degrees that do not divide."""
    with pytest.raises(IllegalPlanError, match=message):
        ownership(MODEL, plan_of(MODEL, spans, **degrees), "parameters")


def test_bytes_of_an_element() -> None:
    """bf16 weights, gradients as the job says, Adam in fp32."""
    assert [element_bytes(what, 4) for what in WHATS] == [2, 4, 12]
    assert element_bytes("gradients", 2) == 2
