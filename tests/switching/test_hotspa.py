"""HotSPa's published strategies: its bytes exactly, and never more of its seconds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.switching import (
    GRAD_BYTES,
    HETU,
    LINKS,
    Case,
    cases,
    compare,
    model_of,
    name_of,
    plan_of,
    tables,
)
from milpplan import best_order, plan_switch, switch_costs
from milpplan.simulation.layers import total_parameters
from milpplan.switching.ownership import What
from tests.amounts import first, long_but

KINDS: tuple[tuple[str, What], ...] = (("param", "parameters"), ("grad", "gradients"))
NODES = [case for case in cases() if case["gpus"] > 8 and (case["model"], case["comb"]) != ("32b", "c1")]
"""Instances of several nodes, and one of 32 GPUs."""


@pytest.mark.parametrize("case", long_but(cases()[:7:3], cases()), ids=name_of)
def test_bytes_and_seconds_of_every_switch(case: Case) -> None:
    """Total, the split by tier and the largest receiver are HotSPa's to the byte; the nearest senders take no
    longer than its own choice, and the best ones what a program over single slices says."""
    model = model_of(case)
    assert total_parameters(model) == case["n_params"]
    for arc in case["arcs"]:
        before, after = (plan_of(case, arc[end]) for end in ("src", "dst"))
        for kind, what in KINDS:
            if arc[kind] is None:
                continue
            theirs: dict[str, Any] = arc[kind]
            near = plan_switch(model, before, after, LINKS, what, "nearest", GRAD_BYTES, HETU)
            assert near.total_bytes == theirs["total"]
            assert near.sent_bytes.sum(axis=0).tolist() == [theirs["intra"], theirs["inter"]]
            assert near.received_bytes.sum(axis=1).max() == theirs["max_recv"]
            assert near.time_s <= theirs["t_greedy"] * (1 + 1e-4)
            best = plan_switch(model, before, after, LINKS, what, "exact", GRAD_BYTES, HETU)
            assert best.total_bytes == theirs["total"]
            assert best.time_s == pytest.approx(theirs["t_opt"], rel=1e-4)
            assert best.lower_bound_s <= best.time_s * (1 + 1e-9)


@pytest.mark.parametrize("case", first(2, NODES), ids=name_of)
def test_orders_take_no_longer_than_the_best_known(case: Case) -> None:
    """With gradients handed on the best circuits are the published ones; sent straight home they are no worse, to
    what rounding to whole rows adds."""
    model, plans = model_of(case), [plan_of(case, strategy) for strategy in case["order"]]
    costs = switch_costs(model, plans, LINKS, "exact", GRAD_BYTES, HETU)
    assert best_order(costs, 0, "pairwise").time_s == pytest.approx(case["best_same_home_s"], rel=1e-4)
    assert best_order(costs, None, "pairwise").time_s == pytest.approx(case["best_any_home_s"], rel=1e-4)
    assert best_order(costs).time_s <= case["best_any_home_s"] * (1 + 1e-7)


def test_table_of_the_benchmark() -> None:
    """7B on 16 GPUs: 0.304 s in HotSPa's order, 0.147 s in the best one, 0.089 s with relays."""
    found = compare(next(case for case in cases() if case["gpus"] == 16))
    assert found.hotspa_s == pytest.approx(0.304, abs=5e-4)
    assert found.direct_s == pytest.approx((0.304, 0.147, 0.147), abs=5e-4)
    assert found.relay_s[2] == pytest.approx(0.089, abs=5e-4)
    assert "7B, 16 GPUs, c1" in tables([found])
