"""Whole steps: every sequence runs once, the time is that of the parts, no other plan is below the bound."""

from __future__ import annotations

import pickle
import pkgutil
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from milpplan import solve_lengths
from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.lengths import MAX_SEQUENCES, LengthsResult, Step, Workload, workload_of
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.turns import TurnSearch
from tests.amounts import long_but
from tests.lengths.cases import GRAIN, pool, restrict, workload
from tests.small import small_problem


@cache
def solved() -> LengthsResult:
    """Short sequences and two long ones, where one strategy is dear; in turn."""
    problem = small_problem(memory_gib=40)
    return solve_lengths(problem, workload(), GRAIN, 2, 0.02, 20.0, "highs", side_by_side=False)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("milpplan.lengths.side_by_side.team_search.TeamSearch.run", marks=pytest.mark.long),
        pytest.param("milpplan.lengths.heterogeneous.search.HeterogeneousBound.relax", marks=pytest.mark.long),
        "milpplan.lengths.single.single_strategy_search.SingleStrategySearch.run",
        pytest.param("milpplan.lengths.turns.set_bounds.SetBounds.screen", marks=pytest.mark.long),
        pytest.param("milpplan.lengths.turns.turn_search.TurnSearch._price", marks=pytest.mark.long),
        pytest.param("milpplan.lengths.turns.turn_search.TurnSearch._branch", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_gives_the_best_step_so_far(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Wherever it is heard, the first time that something is called: a step of all sequences, and a bound that no
    known step is below."""
    module, name = when.rsplit(".", 1)
    owner = pkgutil.resolve_name(module)
    usual, heard = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not heard:
            heard.append(name)
            raise KeyboardInterrupt
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    problem, beside = small_problem(memory_gib=40), "TeamSearch" in when
    spaces = {"side_by_side": beside, "unlike_replicas": "Heterogeneous" in when}
    result = solve_lengths(problem, workload(), GRAIN, 2, 0.001, 2.0, "highs", **spaces)
    assert heard
    assert result.interrupted
    assert result.to_dict()["interrupted"]
    assert result.lower_bound_s <= solved().step_time_s
    assert result.lower_bound_s <= result.step_time_s <= 1.2 * solved().step_time_s
    assert sum(count for group in result.groups for _, count in group.buckets) == result.num_sequences


@pytest.mark.parametrize("beside", long_but((True,), (False, True)))
def test_ctrl_c_again_gives_the_step_without_a_bound(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """While bounds are sought after the first one: what is not proved is not said."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    for name in (
        "milpplan.lengths.side_by_side.team_search.TeamSearch.run",
        "milpplan.lengths.turns.set_bounds.SetBounds.screen",
    ):
        module, method = name.rsplit(".", 1)
        monkeypatch.setattr(pkgutil.resolve_name(module), method, interrupted)
    result = solve_lengths(
        small_problem(memory_gib=40), workload(), GRAIN, 2, 0.001, 8.0, "highs", side_by_side=beside
    )
    assert result.interrupted
    assert result.lower_bound_s == 0.0
    assert result.status == "feasible"
    assert sum(count for group in result.groups for _, count in group.buckets) == result.num_sequences


def test_every_sequence_runs_once_within_its_micro_batch() -> None:
    """Micro-batches of all groups hold the workload, and none more tokens than its strategy may."""
    steps, held = workload(), Counter[int]()
    for group in solved().groups:
        mine = Counter(length for replica in group.micro_batches for one in replica for length in one)
        assert mine == dict(group.buckets)
        assert len(group.micro_batches) == group.plan.layout.dp
        assert max(sum(one) for replica in group.micro_batches for one in replica) <= group.micro_batch_tokens
        held += mine
    assert held == dict(zip(steps.lengths.tolist(), steps.counts.tolist(), strict=True))


def test_the_step_is_the_sum_of_its_parts() -> None:
    """Parameters are waited for, gradients hide behind groups, reductions and the finish follow."""
    result = solved()
    moved = {(one.source, one.target, one.what): one.time_s for one in result.switches}
    total, before = result.finish_s, result.home
    for position, group in enumerate(result.groups):
        total += moved.get((before, group.strategy, "parameters"), 0.0)
        hidden = moved.get((before, group.strategy, "gradients"), 0.0) if position else 0.0
        total += max(group.time_s, hidden) + group.reduce_s
        before = group.strategy
    total += moved.get((before, result.home, "gradients"), 0.0)
    assert total == pytest.approx(result.step_time_s, abs=1e-8)
    groups = [event for event in result.timeline if event.kind == "group"]
    assert [event.strategy for event in groups] == list(result.order)
    assert all(ahead.end_s <= after.start_s for ahead, after in pairwise(groups))
    assert result.timeline[-1].kind == "finish"
    assert result.timeline[-1].end_s == pytest.approx(result.step_time_s, abs=1e-8)
    assert result.lower_bound_s <= result.step_time_s <= result.static.step_time_s
    assert result.static.lower_bound_s <= result.static.step_time_s
    assert result.speedup == result.static.step_time_s / result.step_time_s


@pytest.mark.parametrize("every", long_but((8,), (8, 1)))
def test_no_step_of_one_strategy_is_below_the_static_bound(every: int) -> None:
    """Every strategy, or every eighth one, packed at its exact time."""
    found = pool()
    for member in range(0, len(found.members), every):
        one = found.members[member]
        if one.candidate.layout.pp > 2:
            continue
        packed = found.pack(member, found.load.counts, one.own_memory_quanta)
        if packed is not None:
            total = packed.time_ns + found.reduce_ns(member) + found.finish_ns(member)
            assert total * 1e-9 >= solved().static.lower_bound_s - 1e-9, one.candidate.name


@pytest.mark.parametrize("number", long_but((4,), (4, 10)))
def test_no_step_of_two_strategies_is_below_the_bound(number: int) -> None:
    """Random pairs and random shares of the sequences, with switches that cost nothing."""
    found, random = pool(), np.random.default_rng(7)
    several = [
        member
        for member, one in enumerate(found.members)
        if one.shared_memory_quanta and one.candidate.layout.pp == 1
    ]
    timed = 0
    for _ in range(number):
        pair = random.choice(several, 2, replace=False)
        share = random.integers(0, found.load.counts + 1)
        parts = [
            found.pack(int(member), held, found.members[member].shared_memory_quanta)
            for member, held in zip(pair, (share, found.load.counts - share), strict=True)
            if held.any()
        ]
        if None in parts:
            continue
        total = sum(part.time_ns for part in parts if part is not None)
        total += sum(found.reduce_ns(int(member)) for member in pair) + min(found.finish_ns(int(m)) for m in pair)
        assert total * 1e-9 >= solved().lower_bound_s
        timed += 1
    assert timed > number // 3


def test_results_are_plain_data() -> None:
    """They can be pickled, and their dictionary has the documented keys."""
    result = solved()
    assert pickle.loads(pickle.dumps(result)) == result
    document = result.to_dict()
    assert {"groups", "order", "switches", "static", "speedup", "gap", "lower_bound_s"} <= set(document)
    assert {"strategy", "buckets", "micro_batches", "time_s"} <= set(document["groups"][0])
    assert set(document["static"]) >= {"step_time_s", "lower_bound_s"}


def test_bad_steps_are_refused() -> None:
    """Sequences that fit nowhere, too many of them, and jobs that groups do not know."""
    problem = small_problem(memory_gib=40)
    with pytest.raises(InfeasibleError, match=r"them is [\d.]+ GiB; a GPU has [\d.]+ GiB"):
        solve_lengths(small_problem(memory_gib=4), workload_of([GRAIN], GRAIN), GRAIN)
    with pytest.raises(InfeasibleError, match="fits under no strategy"):
        solve_lengths(problem, workload_of([16_000_000], GRAIN), GRAIN)
    with pytest.raises(InvalidInputError, match="--align 256"):
        solve_lengths(small_problem(memory_gib=4_000), workload_of([GRAIN * 5_000], GRAIN), GRAIN)
    many = Workload(np.array([128]), np.array([MAX_SEQUENCES + 1]))
    with pytest.raises(InvalidInputError, match="8,193 sequences"):
        solve_lengths(problem, many, GRAIN)
    with pytest.raises(InvalidInputError, match="multiples"):
        solve_lengths(problem, workload_of([100]), GRAIN)
    for counts in ([1, 0], [1, -1], [1]):
        with pytest.raises(InvalidInputError, match="one of every length"):
            solve_lengths(problem, Workload(np.array([128, 256]), np.array(counts)), GRAIN)
    numbers: list[tuple[dict[str, Any], str]] = [
        ({"max_strategies": 0}, "max_strategies"),
        ({"max_strategies": 2.5}, "max_strategies"),
        ({"gap": float("nan")}, "gap is nan"),
        ({"gap": -1.0}, "gap is -1"),
        ({"time_limit_s": -1.0}, "time limit"),
        ({"backend": "gurobi"}, "backend is 'gurobi'"),
    ]
    for given, said in numbers:
        with pytest.raises(InvalidInputError, match=said):
            solve_lengths(problem, workload(), GRAIN, **given)
    unfused = small_problem(attention_kernel="unfused")
    with pytest.raises(InvalidInputError, match="flash"):
        solve_lengths(unfused, workload(), GRAIN)
    fixed = small_problem(space={"zero_stage": (3,)})
    with pytest.raises(InvalidInputError, match="zero_stage"):
        solve_lengths(fixed, workload(), GRAIN)
    for name in ("offload_weights", "offload_activations", "offload_optimizer"):
        with pytest.raises(InvalidInputError, match=name):
            solve_lengths(small_problem(space={name: (True,)}), workload(), GRAIN)


@pytest.mark.long
@pytest.mark.parametrize("number", long_but((1,), (1, 2)))
def test_no_set_is_shorter_than_what_is_known_of_it(number: int) -> None:
    """Sets with pipelines, cut into intervals and by who holds the longest sequence, and priced: no random share
    of the sequences, packed and timed exactly, in its best order with its switches, is below any of the bounds."""
    found, random = pool(), np.random.default_rng(9)
    # A step that everything is shorter than closes nothing.
    search = TurnSearch(found, Step(0, (0,), {}, 10**15), 0.0)
    search.deadline = Deadline.after(60.0)
    pipelines = [member for member in search.members if found.num_stages(member) == 2]
    others = [member for member in search.members if found.num_stages(member) == 1]
    restrict(search, [*random.choice(pipelines, 3, replace=False).tolist(), *random.choice(others, 3).tolist()])
    sets = search.bounds.screen(2, search.target_ns, search.deadline).sets
    with_pipelines = [
        one for one in sets if sum(found.num_stages(search.members[place]) == 2 for place in one.strategies) == 1
    ]
    checked, tight = 0, 0.0
    for place in random.choice(len(with_pipelines), number, replace=False).tolist():
        left = search.node(with_pipelines[place], place)
        bounds = [left.bound_ns]
        for learn in left.bounding_steps[:4]:
            learn(left)
            bounds.append(left.bound_ns)
        assert bounds == sorted(bounds)
        held = [search.members[one] for one in with_pipelines[place].strategies]
        for _ in range(8 // number):
            share = random.integers(0, found.load.counts + 1)
            parts = {held[0]: share, held[1]: found.load.counts - share}
            step = search.orders.arranged(held, parts) if all(one.any() for one in parts.values()) else None
            if step is not None:
                assert left.bound_ns <= step.time_ns
                tight = max(tight, left.bound_ns / step.time_ns)
                checked += 1
    assert checked > 5
    assert tight > 0.7, tight
