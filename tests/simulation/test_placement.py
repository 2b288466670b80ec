"""Strides, members and domains of every group against lists of ranks written down one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from milpplan.errors import IllegalPlanError
from milpplan.problem import RANK_ORDERS, HardwareSpec, Layout, Rails
from milpplan.simulation import LayoutColumns, simulate
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import RankGroup, group_place, placement
from tests.simulation.cases import even_plan, problem_of, random_layout, random_problem, shipped_hardware
from tests.simulation.rank_listing import Ranks, listed

GROUPS = (
    *("tensor", "context", "head_exchange", "context_ring", "pipeline", "replicas"),
    *("expert_tensor", "expert", "expert_replicas"),
)


def random_grid(random: np.random.Generator, values: tuple[int, ...]) -> Layout:
    """Degrees, an experts' grid and an order, all drawn; at most 256 ranks."""
    while True:
        tp, cp, dp, pp = (int(random.choice(values)) for _ in range(4))
        if tp * cp * dp * pp <= 256:
            break
    etp = int(random.choice([d for d in range(1, tp + 1) if tp % d == 0]))
    shared = tp * cp * dp // etp
    ep = int(random.choice([d for d in range(1, shared + 1) if shared % d == 0]))
    order = RANK_ORDERS[random.integers(len(RANK_ORDERS))]
    ulysses = int(random.choice([d for d in range(1, cp + 1) if cp % d == 0]))
    grid = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, global_batch_size=dp, rank_order=order)
    return grid.model_copy(update={"ulysses": ulysses})


def spelled(group: RankGroup, first: int) -> Ranks:
    """The ranks of the group that begins at ``first``."""
    size, stride, blocks, apart = (int(value[0]) for value in group)
    return tuple(sorted(first + i * stride + j * apart for i in range(size) for j in range(blocks)))


def with_domain(size: int, segments: tuple[int, ...] = ()) -> HardwareSpec:
    """An H100 cluster with domains of another size, wired in rails."""
    base = shipped_hardware("dgx-h100")
    up = base.scale_up.model_copy(update={"num_gpus": size, "segments": segments})
    out = base.scale_out.model_copy(update={"rails": Rails(bandwidth_fraction=0.5)})
    return base.model_copy(update={"scale_up": up, "scale_out": out})


@pytest.mark.parametrize("values", [(1, 2, 4), (1, 2, 3, 5)])
def test_strides_are_those_of_listed_ranks(values: tuple[int, ...]) -> None:
    """For any order of any degrees, every group that begins at its lowest rank has exactly the listed ranks."""
    random = np.random.default_rng(1)
    for _ in range(30):
        layout = random_grid(random, values)
        for name in GROUPS:
            group: RankGroup = getattr(placement, name)(LayoutColumns.of([layout]))
            for ranks in listed(layout)[name]:
                assert spelled(group, ranks[0]) == ranks, (layout, name)


@pytest.mark.parametrize("domain", [4, 8])
def test_members_and_domains_of_listed_ranks(domain: int) -> None:
    """With powers of two the members of a domain, the domains of a group and whether it stays on its rails are
    those of the listed ranks, for groups of two progressions, too."""
    random, hardware, seen = np.random.default_rng(domain), with_domain(domain), 0
    for _ in range(40):
        layout = random_grid(random, (1, 2, 4, 8))
        for name in GROUPS:
            group: RankGroup = getattr(placement, name)(LayoutColumns.of([layout]))
            place = group_place(hardware, *group)
            seen += int(group.blocks[0] > 1)
            for ranks in listed(layout)[name]:
                parts = Counter(rank // domain for rank in ranks)
                assert (int(place.members[0]), int(place.domains[0])) == (min(parts.values()), len(parts))
                rails = {frozenset(r % domain for r in ranks if r // domain == where) for where in parts}
                assert bool(place.one_rail[0]) == (len(rails) == 1)
    assert seen >= 2


@pytest.mark.parametrize("domain", [4, 6, 8])
def test_members_and_domains_bound_listed_ranks(domain: int) -> None:
    """With any degrees no domain holds fewer ranks of a group than said, and no group touches more domains: upper
    bounds of the time."""
    random, hardware = np.random.default_rng(domain), with_domain(domain)
    for _ in range(40):
        layout = random_grid(random, (1, 2, 3, 4, 5))
        for name in GROUPS:
            place = group_place(hardware, *getattr(placement, name)(LayoutColumns.of([layout])))
            for ranks in listed(layout)[name]:
                parts = Counter(rank // domain for rank in ranks)
                assert int(place.members[0]) <= min(parts.values())
                assert int(place.domains[0]) >= len(parts)


def test_shards_and_their_copies() -> None:
    """The replicas fall into groups of neighbours that shard; the ranks with the same share are the others."""
    random = np.random.default_rng(3)
    for _ in range(30):
        layout = random_grid(random, (1, 2, 4))
        group = placement.replicas(LayoutColumns.of([layout]))
        total = int(group.num_ranks[0])
        shards = int(random.choice([d for d in range(1, total + 1) if total % d == 0]))
        count = np.array([shards])
        for ranks in listed(layout)["replicas"]:
            assert spelled(group.first(count), ranks[0]) == ranks[:shards]
            assert spelled(group.apart(count), ranks[0]) == ranks[::shards]


def test_the_usual_order_costs_what_it_did() -> None:
    """An order that places the ranks as the usual one gives the same costs to the nanosecond: here pp stands
    elsewhere, but has one stage."""
    random = np.random.default_rng(4)
    for _ in range(4):
        problem = random_problem(random)
        layout = random_layout(random, problem, max_stages=1)
        other = layout.model_copy(update={"rank_order": "pp-tp-cp-dp"})
        table = layout_costs(problem, LayoutColumns.of([layout, other]))
        for name in ("duration_ns", "reduce_ns", "gather_ns", "transfer_ns"):
            assert np.array_equal(getattr(table.at(0), name), getattr(table.at(1), name))


def test_columns_of_any_order_cost_as_one_by_one() -> None:
    """Layouts in any order cost the same together as alone: no key is forgotten."""
    random = np.random.default_rng(5)
    for _ in range(3):
        problem = random_problem(random)
        layouts = [
            random_layout(random, problem).model_copy(update={"rank_order": RANK_ORDERS[random.integers(24)]})
            for _ in range(8)
        ]
        together = layout_costs(problem, LayoutColumns.of(layouts))
        for number, layout in enumerate(layouts):
            alone = layout_costs(problem, LayoutColumns.of([layout])).at(0)
            for name in ("duration_ns", "embedding_ns", "head_ns", "reduce_ns", "gather_ns", "transfer_ns"):
                assert np.array_equal(getattr(together.at(number), name), getattr(alone, name)), (name, layout)


@pytest.mark.parametrize("experts", [False, True])
def test_orders_that_place_alike_are_one(experts: bool) -> None:
    """Of all orders that list the same ranks in every group exactly one is kept."""
    random = np.random.default_rng(6)
    names = GROUPS if experts else GROUPS[:4]
    for _ in range(25):
        layout = random_grid(random, (1, 1, 2))
        if not experts:
            layout = layout.model_copy(update={"ep": 1, "etp": 1})
        every = [layout.model_copy(update={"rank_order": order}) for order in RANK_ORDERS]
        kept = placement.is_first_alike(LayoutColumns.of(every).mapping, tuple(range(24)), experts)
        groups = [tuple(listed(one)[name] for name in (*names, "stages")) for one in every]
        assert len({groups[i] for i in np.flatnonzero(kept)}) == len(set(groups)) == kept.sum()


def test_experts_stay_on_their_stage() -> None:
    """A plan whose two grids give a stage different ranks is refused; one whose grids agree is not."""
    random = np.random.default_rng(7)
    for _ in range(80):
        layout = random_grid(random, (1, 2, 4))
        agree = bool(placement.stages_agree(LayoutColumns.of([layout]).mapping)[0])
        assert agree == (listed(layout)["stages"] == listed(layout)["expert_stages"]), layout
    problem = problem_of("mixtral-8x7b", "dgx-h200", sequence_length=512)
    layout = Layout(tp=2, sequence_parallel=True, pp=2, dp=4, ep=4, global_batch_size=8, rank_order="tp-cp-pp-dp")
    with pytest.raises(IllegalPlanError, match="rank_order=tp-cp-pp-dp"):
        simulate(problem, even_plan(problem, layout))
    legal = layout.model_copy(update={"rank_order": "tp-cp-dp-pp"})
    assert simulate(problem, even_plan(problem, legal)).step_time_s > 0
