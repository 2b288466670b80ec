"""Real arrays: after a switch every rank holds exactly its slices, filled from old ones and deliveries alone."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from milpplan import Links, Plan, plan_switch
from milpplan.errors import IllegalPlanError
from milpplan.simulation import check_plan_of_model
from milpplan.switching.ownership import WHATS, ShardRules, What, ownership
from milpplan.switching.planning import SENDERS, Senders, boxes_of_ranks, held_of, move
from tests.amounts import few_or_many
from tests.switching.cases import mixed_model, plans

MODEL = mixed_model()
RULES = (ShardRules(), ShardRules(shards="hetu", padded_vocabulary=False))


@st.composite
def two_plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Any two plans on the same GPUs that can run: a switch refuses others."""
    num_gpus = draw(st.sampled_from([2, 4, 8, 16]))
    runnable = plans(MODEL, num_gpus).filter(can_run)
    return draw(runnable), draw(runnable)


def can_run(plan: Plan) -> bool:
    """Tell whether the model can be trained under a plan."""
    try:
        check_plan_of_model(MODEL, plan)
    except IllegalPlanError:
        return False
    return True


def check_moved(pair: tuple[Plan, Plan], what: What, senders: Senders, domain: int, rules: ShardRules) -> None:
    """Move numbers that are all different, and compare every rank's arrays with slices of the whole tensors."""
    before, after = pair
    switch = plan_switch(MODEL, before, after, Links(domain, 2e11, 2.5e10), what, senders, 4, rules)
    sizes = [tensor.shape.size for tensor in switch.tensors]
    first = np.cumsum([0, *sizes])
    whole = [
        np.arange(start, start + size, dtype=np.float64).reshape(tensor.shape.rows, tensor.shape.columns)
        for start, size, tensor in zip(first, sizes, switch.tensors, strict=False)
    ]
    boxes = [boxes_of_ranks(ownership(MODEL, plan, what, rules), switch.tensors, switch.num_gpus) for plan in pair]
    old = [held_of(own, lambda n, b: whole[n][b[0] : b[1], b[2] : b[3]].copy()) for own in boxes[0]]
    new = [held_of(own, lambda _, b: np.full((b[1] - b[0], b[3] - b[2]), np.nan)) for own in boxes[1]]
    move(switch, old, new)
    for held in new:
        for number, pieces in held.items():
            for box, array in pieces:
                assert np.array_equal(array, whole[number][box[0] : box[1], box[2] : box[3]])
    lacking = switch.new_bytes - switch.kept_bytes
    assert (switch.received_bytes.sum(axis=1) == lacking).all()
    assert switch.total_bytes == lacking.sum()
    assert not (switch.deliveries.sender == switch.deliveries.receiver).any()
    assert (switch.deliveries.num_bytes > 0).all()
    assert (switch.peak_bytes >= np.maximum(switch.old_bytes, switch.new_bytes)).all()


@few_or_many(
    12,
    30,
    two_plans(),
    st.sampled_from(WHATS),
    st.sampled_from(SENDERS),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(RULES),
)
def test_every_rank_gets_exactly_its_slices(
    pair: tuple[Plan, Plan], what: What, senders: Senders, domain: int, rules: ShardRules
) -> None:
    """Any degrees, ZeRO stages, uneven and empty stages, chunks, orders of ranks, domains and senders."""
    check_moved(pair, what, senders, domain, rules)
