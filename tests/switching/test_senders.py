"""Times of switches: proved least, never beaten by others, and relays only where they help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan import Links, ModelSpec, Plan, load_hardware, plan_switch
from milpplan.errors import IllegalPlanError, InvalidInputError, UnknownNameError
from milpplan.switching import ownership
from milpplan.switching import routes as least_time
from milpplan.switching.ownership import Lots, lots
from milpplan.switching.routes import (
    WAVES,
    Route,
    Routes,
    blocks,
    least_time_routes,
    most_variables,
    nearest_routes,
    priced_bound_s,
    receiving_bound_s,
    routes_s,
)
from milpplan.switching.routes import Links as SwitchLinks
from tests.amounts import few_or_many
from tests.small import small_model
from tests.switching.cases import mixed_model, plan_of, plans

MODEL = mixed_model()
LINKS = Links(4, 2e11, 2.5e10)


@st.composite
def lots_of(draw: st.DrawFn, num_gpus: int = 8) -> Lots:
    """What a random switch has to move."""
    before, after = (draw(plans(MODEL, num_gpus)) for _ in range(2))
    return lots(MODEL, before, after, draw(st.sampled_from(["parameters", "gradients"])))


def busiest_s(found: Lots, routes: Routes, links: Links = LINKS) -> float:
    """Seconds of the busiest port, all messages at once."""
    return float(links.port_s(routes.sender, routes.receiver, routes.num_bytes, found.num_gpus).max(initial=0.0))


def covered(found: Lots, routes: Routes) -> None:
    """Every receiver of every lot gets all its bytes once, from ranks that have them."""
    got = np.zeros(found.receivers.shape)
    np.add.at(got, (routes.lot, routes.receiver), routes.num_bytes)
    assert np.allclose(got, found.receivers * found.num_bytes[:, None], rtol=1e-9, atol=1e-3)
    direct = ~routes.relay
    assert found.holders[routes.lot[direct], routes.sender[direct]].all()
    assert found.receivers[routes.lot[~direct], routes.sender[~direct]].all()


@few_or_many(10, 25, lots_of(), st.randoms(use_true_random=False))
def test_best_senders_meet_their_bound_and_nobody_beats_it(found: Lots, random: object) -> None:
    """The bound, computed from prices alone, is met by the program's routes, and is below the nearest ones and
    below random ones; prices that mean nothing give a bound as well."""
    routes, bound_s = least_time_routes(found, LINKS)
    covered(found, routes)
    assert busiest_s(found, routes) <= bound_s * (1 + 1e-5) + 1e-15
    assert receiving_bound_s(found, LINKS) <= bound_s * (1 + 1e-9)
    others = [nearest_routes(found, LINKS)]
    chosen: list[Route] = []
    for lot in range(len(found)):
        holders = np.flatnonzero(found.holders[lot]).tolist()
        for receiver in np.flatnonzero(found.receivers[lot]).tolist():
            sender = random.choice(holders)  # type: ignore[attr-defined]
            chosen.append((lot, sender, receiver, 0.0, float(found.num_bytes[lot]), False))
    others.append(Routes.of(chosen))
    for other in others:
        covered(found, other)
        assert busiest_s(found, other) >= bound_s * (1 - 1e-9)
    prices = np.array([random.random() for _ in range(4 * found.num_gpus)])  # type: ignore[attr-defined]
    assert (
        priced_bound_s(blocks(found, LINKS, False), LINKS, found.num_gpus, prices)
        <= busiest_s(found, routes) + 1e-15
    )


@few_or_many(6, 15, lots_of(16))
def test_relays_meet_their_bound_too(found: Lots) -> None:
    """With relays the busiest port is never busier than without, and its bound is met."""
    links = Links(8, 2e11, 2.5e10)
    direct, direct_bound_s = least_time_routes(found, links)
    routes, bound_s = least_time_routes(found, links, relay=True)
    covered(found, routes)
    assert bound_s <= direct_bound_s * (1 + 1e-9)
    assert receiving_bound_s(found, links) <= bound_s * (1 + 1e-9)
    assert busiest_s(found, routes, links) <= bound_s * (1 + 1e-5) + 1e-15
    inside = links.same_domain(routes.sender, routes.receiver)
    assert inside[routes.relay].all()
    assert busiest_s(found, routes, links) <= busiest_s(found, direct, links) * (1 + 1e-5) + 1e-15


def gathered() -> tuple[ModelSpec, Plan, Plan]:
    """Two pipeline stages of a node each to sixteen replicas: every node lacks half of the model, and the 8 parts
    of the vocabulary are equal."""
    model = small_model(4).model_copy(update={"vocab_size": 32768})
    return model, plan_of(model, None, tp=8, pp=2), plan_of(model, None, dp=16)


def test_a_relay_imports_once_and_fans_out() -> None:
    """Every GPU lacks the other node's half, H bytes, and 7/8 of its own node's. Directly H comes through each
    NIC. With relays little more than H / 8 does, and both its ports are busy all the time: 15/8 H in all."""
    links = Links(8, 2e11, 2.5e10)
    model, before, after = gathered()
    exact = plan_switch(model, before, after, links, "parameters", "exact")
    relay = plan_switch(model, before, after, links, "parameters", "relay")
    assert exact.total_bytes == relay.total_bytes
    half = exact.received_bytes[:, 1].max()
    assert exact.time_s == pytest.approx(half / 2.5e10, rel=1e-4)
    least = 15 / 8 * half / (2e11 + 2.5e10)
    assert relay.lower_bound_s == pytest.approx(least, rel=1e-3)
    assert relay.lower_bound_s < relay.time_s < least * (1 + 1 / WAVES)
    assert exact.sent_bytes[:, 1].sum() / 8 < relay.sent_bytes[:, 1].sum() < exact.sent_bytes[:, 1].sum() / 4
    assert relay.deliveries.relay.any()


def test_time_of_waves() -> None:
    """One importer sends 8 bytes on to one neighbour: (A + 15 C + B) / 16 with A = 8 / 1, B = 8 / 4, and C = 8 as
    the network is the busier; each wave has a latency, and the last relay one more."""
    links = Links(2, 4.0, 1.0, inside_latency_s=0.25, between_latency_s=0.5)
    routes = Routes.of([(0, 0, 2, 0.0, 8.0, False), (0, 2, 3, 0.0, 8.0, True)])
    assert routes_s(links, routes, routes.num_bytes, 4) == (8 + 15 * 8 + 2) / 16 + 16 * 0.5 + 0.25
    direct = Routes.of([(0, 0, 2, 0.0, 8.0, False), (0, 0, 3, 0.0, 8.0, False)])
    assert routes_s(links, direct, direct.num_bytes, 4) == 16.5


def test_links_of_hardware_and_rails() -> None:
    """Rates are those of single messages; other rails are slower; bad rates are refused."""
    hardware = load_hardware("dgx-h100")
    links = Links.of(hardware, 16)
    up, out = hardware.scale_up, hardware.scale_out
    assert links.inside_bytes_per_s == up.bandwidth_bytes_per_s * up.p2p_efficiency
    assert links.between_bytes_per_s == out.bandwidth_bytes_per_s * out.efficiency
    railed = Links(8, 2.0, 1.0, other_rail_fraction=0.5)
    seconds = railed.seconds(np.array([0, 0, 0]), np.array([1, 8, 9]), np.array([4.0, 4.0, 4.0]))
    assert seconds.tolist() == [2.0, 4.0, 8.0]
    with pytest.raises(InvalidInputError, match="between_bytes_per_s"):
        SwitchLinks(8, 1.0, 0.0)


def test_nothing_moves_between_equal_plans() -> None:
    """No bytes, no messages, no seconds, whatever the senders."""
    plan = plan_of(MODEL, None, dp=4)
    switch = plan_switch(MODEL, plan, plan, LINKS)
    assert (switch.total_bytes, switch.num_messages, switch.time_s, switch.lower_bound_s) == (0, 0, 0.0, 0.0)
    assert switch.to_dict()["messages"] == {"sender": [], "receiver": [], "bytes": [], "relay": []}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 3, "dp": 2, "tp": 1}, "not a multiple of dp=2"),
        ({"tp": 3, "dp": 1}, "tp=3"),
        ({"ep": 3, "dp": 3, "tp": 1}, "ep"),
        ({"schedule": "zb-v"}, "two virtual stages"),
    ],
)
def test_plans_that_cannot_run_are_refused_as_simulate_refuses_them(changes: dict[str, Any], words: str) -> None:
    """A switch from or to a plan that simulate refuses is refused with its words."""
    good = plan_of(MODEL, None, dp=2)
    layout = good.layout.model_copy(update=changes)
    bad = good.model_copy(update={"layout": layout})
    for before, after in ((good, bad), (bad, good)):
        with pytest.raises(IllegalPlanError, match=words):
            plan_switch(MODEL, before, after, LINKS)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown senders, other GPUs, too many GPUs, and programs that are too large."""
    one, two = plan_of(MODEL, None, dp=2), plan_of(MODEL, None, tp=2)
    with pytest.raises(UnknownNameError, match="nearest, exact, relay"):
        plan_switch(MODEL, one, two, LINKS, "gradients", "best")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="2 and 4 GPUs"):
        plan_switch(MODEL, one, plan_of(MODEL, None, dp=4), LINKS)
    assert plan_switch(MODEL, two, one, LINKS).total_bytes > 0
    apart = one.model_copy(update={"layout": one.layout.model_copy(update={"node_order": (1, 0)})})
    with pytest.raises(InvalidInputError, match="several node types"):
        plan_switch(MODEL, two, apart, LINKS)
    monkeypatch.setattr(least_time, "MAX_VARIABLES", 1)
    with pytest.raises(InvalidInputError, match="nearest senders"):
        plan_switch(MODEL, two, one, LINKS)
    monkeypatch.setattr(ownership, "MAX_GPUS", 1)
    with pytest.raises(InvalidInputError, match="rank by rank"):
        plan_switch(MODEL, two, one, LINKS, "parameters", "nearest")


@given(lots_of())
@settings(max_examples=10, deadline=None)
def test_size_of_the_program_is_known_before(found: Lots) -> None:
    """The count that refuses programs is no less than their variables."""
    for relay in (False, True):
        assert most_variables(found, LINKS) >= sum(b.num_variables for b in blocks(found, LINKS, relay))
