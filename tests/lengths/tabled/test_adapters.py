"""Adapters of Hydraulis and FlexSP, held to what these planners say themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.length_groups import case_problem
from examples.adapters import flexsp, hydraulis
from milpplan.errors import InfeasibleError
from milpplan.lengths.tabled import solve_groups


def test_hydraulis_capacities_come_out() -> None:
    """Tokens a micro-batch holds beside the optimizer of the first strategy, against its own figures."""
    for case in hydraulis.cases().values():
        first = case["results"][0]["strategy"]
        home = (len(first), *first[0])
        for result in case["results"]:
            held = [hydraulis.max_seqlen(case["pool"], *pair, home) for pair in result["strategy"]]
            assert held == result["max_seqlen"]


def test_hydraulis_estimates_come_out() -> None:
    """Its packings priced by its own rule give its figures; simulated, none takes more, one a quarter less."""
    errors = []
    for case in hydraulis.cases().values():
        for result in case["results"]:
            estimate, exact = hydraulis.own_times_ms(result)
            assert estimate == pytest.approx(result["cost_ms"], rel=1e-4)
            assert exact <= estimate * (1 + 1e-9)
            errors.append(estimate / exact - 1)
    assert max(errors) == pytest.approx(0.339, abs=1e-3)


def test_slots_are_those_of_the_regression() -> None:
    """2 tokens and 4 tokens at a = 1, b = 10, c = 100: 1 * 20 + 10 * 6 + 100, twice in two slots of two stages."""
    pool = {"strategies": [{"tp": 1, "pp": 2, "a": 1.0, "b": 10.0, "c": 100.0}]}
    assert hydraulis.slots_ms(pool, 1, 2, [[2, 4], [6]]) == [180.0, 196.0]
    assert hydraulis.estimate_ms(pool, 1, 2, [[2, 4], [6]]) == 196.0 * 3
    # Forward is a third: f1 f2 b1 b2 on the last stage, after f1 and before b2 on the first.
    assert hydraulis.simulated_ms(2, [180.0, 180.0]) == pytest.approx(540.0)


def test_hydraulis_picks_the_slower_strategy() -> None:
    """32B on 64 GPUs: by its estimates it takes the homogeneous one, whose step is a third longer even in its own
    packings; the adapter takes the other, and proves that the homogeneous one cannot come near."""
    case = hydraulis.cases()["H2_32b_64gpu_200K"]
    times = [hydraulis.own_times_ms(result) for result in case["results"]]
    assert times[0][0] < times[1][0]
    assert 1 - times[1][1] / times[0][1] == pytest.approx(0.241, abs=1e-3)
    strategies, tokens = ([one[name] for one in case["results"]] for name in ("strategy", "max_seqlen"))
    answer = hydraulis.planned(case["pool"], strategies, case["lengths"], tokens, relative_gap=0.02)
    assert answer.strategy == 1
    assert answer.bound_ms <= answer.time_ms <= answer.bound_ms * 1.02
    assert answer.time_ms < times[1][1]
    homogeneous = solve_groups(case_problem(case, 0), "highs", 0.02, 20)
    assert 1 - answer.time_ms * 1e6 / homogeneous.bound_ns > 0.22
    _holds_all(case["lengths"], [one for pipeline in answer.pipelines for one in pipeline])
    slots = [
        hydraulis.slots_ms(case["pool"], *pair, pipeline)
        for pair, pipeline in zip(strategies[1], answer.pipelines, strict=True)
    ]
    own = [hydraulis.simulated_ms(pp, one) for (_, pp), one in zip(strategies[1], slots, strict=True)]
    assert max(own) == pytest.approx(answer.time_ms, rel=1e-6)
    most = [max(map(sum, pipeline)) for pipeline in answer.pipelines]
    assert all(one <= limit for one, limit in zip(most, tokens[1], strict=True))


def test_flexsps_plans_cost_what_it_says() -> None:
    """Its groups, priced here, take its times to nine digits, and its batches are cut as it cuts them."""
    for case in flexsp.cases().values():
        best = min(case["theirs"], key=lambda one: one["total_ms"])
        for groups, known in zip(case["plan"], best["micro_ms"], strict=True):
            assert max(flexsp.group_ms(case, *group) for group in groups) == pytest.approx(known, rel=1e-9)
        for option in case["theirs"]:
            parts = flexsp.split(case["lengths"], option["micro_batches"])
            assert [len(part) for part in parts] == option["sizes"]


def test_flexsp_batch_is_planned_below_its_own() -> None:
    """7B on 16 GPUs, all of its cuts: shorter than FlexSP's plan, at most 0.3 % above the bound, no known plan
    below the bound, every sequence once, every group within its tokens, and the time by FlexSP's own formula."""
    case = flexsp.cases()["F1_16gpu_7b_64K_gbs128"]
    answer = flexsp.planned(case, case["lengths"], relative_gap=0.003)
    assert answer.time_ms < min(one["total_ms"] for one in case["theirs"])
    assert answer.bound_ms <= sum(one["best_ms"] for one in case["known"])
    assert answer.time_ms <= answer.bound_ms * 1.003
    _holds_all(case["lengths"], [held for groups in answer.micro_batches for _, held in groups])
    total = 0.0
    for groups in answer.micro_batches:
        assert sum(degree for degree, _ in groups) <= case["cluster_size"]
        assert all(sum(held) <= degree * case["device_token_capacity"] for degree, held in groups)
        total += max(flexsp.group_ms(case, *group) for group in groups)
    assert total == pytest.approx(answer.time_ms, rel=1e-6)


def test_sequences_beyond_the_cluster_are_refused() -> None:
    """One sequence longer than all GPUs hold together."""
    case = flexsp.cases()["F1_16gpu_7b_64K_gbs128"]
    with pytest.raises(InfeasibleError, match="fits"):
        flexsp.problem_of(case, [16 * case["device_token_capacity"] + 1])


def _holds_all(lengths: list[int], held: list[tuple[int, ...]]) -> None:
    """Each sequence of the batch is held once."""
    assert Counter(length for one in held for length in one) == Counter(lengths)
