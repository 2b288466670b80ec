"""Bounds of pairs in turn against all of their steps, of few sequences with pipelines."""

from __future__ import annotations

import pytest

from milpplan import Job, Problem, Space, load_hardware, load_model, solve_lengths
from milpplan.lengths import Step, Switches, workload_of
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.turns import Orders, TurnSearch
from tests.amounts import first
from tests.lengths.all_turns import AllTurns
from tests.lengths.cases import GRAIN, pool_of
from tests.small import GIB, small_model, small_problem

LONG = pytest.mark.long


def slow_network(name: str, memory_gib: float, share: float, num_layers: int, pp: tuple[int, ...]) -> Problem:
    """Four GPUs whose network has a share of its bandwidth, so that pipelines pay beside tensor parallelism."""
    hardware = load_hardware(name)
    tier = hardware.scale_up

    def slower(table):  # type: ignore[no-untyped-def]
        rates = tuple(tuple(one * share for one in row) for row in table.bus_bandwidth_bytes_per_s)
        return table.model_copy(update={"bus_bandwidth_bytes_per_s": rates})

    tables = {one: slower(getattr(tier, one)) for one in ("all_reduce", "all_gather", "reduce_scatter")}
    accelerator = hardware.accelerator.model_copy(update={"memory_bytes": int(memory_gib * GIB)})
    changed = tier.model_copy(update={"num_gpus": 4, "segments": (), **tables})
    return Problem(
        model=small_model(num_layers),
        hardware=hardware.model_copy(update={"accelerator": accelerator, "gpus_per_node": 4, "scale_up": changed}),
        job=Job(num_gpus=4, global_batch_size=8, sequence_length=128),
        space=Space(kind="uniform", cp=(1,), tp=(1, 4), pp=pp),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "lengths"),
    [
        pytest.param(("mi300x", 32.0, 0.3, 4, (1, 4)), [102_400] + [1_280] * 6, marks=LONG),
        pytest.param(("mi300x", 28.0, 0.03, 4, (1, 4)), [102_400] + [3_840] * 6, marks=LONG),
        (("dgx-a100-80", 20.0, 0.1, 4, (1, 2, 4)), [51_200] + [3_840] * 6),
        pytest.param(("dgx-a100-80", 22.0, 0.03, 4, (1, 2, 4)), [102_400] + [15_360] * 5, marks=LONG),
    ],
)
def test_a_pipeline_in_turn_is_found_and_its_bound_holds(
    asked: tuple[str, float, float, int, tuple[int, ...]], lengths: list[int]
) -> None:
    """Long sequences under tensor parallelism, short ones on a pipeline: the bound of the whole solve is not above
    the best of all steps, and its step not below. (Tables count the passage of the first and the last micro-batch
    of a pipeline with its reduction, other bounds of the group with its time: it was counted twice.)"""
    problem, steps = slow_network(*asked), workload_of(lengths, GRAIN)
    found = pool_of(problem, steps)
    turns, switches = AllTurns(found), Switches(found)
    members = [one for one, member in enumerate(found.members) if member.shared_memory_quanta]
    switches.price(members)
    pairs = [(a, b) for place, a in enumerate(members) for b in members[place + 1 :]]
    singles = [turns.single_ns(one) for one in range(len(found.members))]
    best_ns = min([*singles, *(turns.pair_ns(pair, switches) for pair in pairs)])
    result = solve_lengths(problem, steps, GRAIN, 2, 5e-3, 20.0, side_by_side=False)
    assert result.lower_bound_s * 1e9 <= best_ns + 1.0
    assert best_ns <= result.step_time_s * 1e9 + 1.0
    assert result.step_time_s * 1e9 <= best_ns * 1.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("memory_gib", "num_layers", "space", "lengths"),
    [
        (60, 6, {"tp": (2, 4)}, [128, 512]),
        pytest.param(60, 12, {"tp": (1, 2), "cp": (1,), "recompute": ("none",)}, [4_096, 21_248], marks=LONG),
        pytest.param(60, 6, {}, [128, 512], marks=LONG),
        pytest.param(60, 12, {"tp": (1, 2), "cp": (1,)}, [4_096, 21_248], marks=LONG),
        pytest.param(40, 4, {"cp": (1,)}, [640, 640, 7_680], marks=LONG),
        pytest.param(60, 8, {"tp": (1, 2)}, [256, 1_024, 20_480], marks=LONG),
    ],
)
def test_no_way_to_know_more_of_a_set_says_too_much(
    memory_gib: float, num_layers: int, space: dict[str, tuple[int | str, ...]], lengths: list[int]
) -> None:
    """Every set of two, every way to know more of it in turn, far above all steps: never above the best of its
    steps. (Programs whose groups' times had an end below what is known of them were called infeasible; what is
    known of nothing was divided by nothing.)"""
    problem = small_problem(num_gpus=4, memory_gib=memory_gib, space=dict(space))
    problem = problem.model_copy(update={"model": small_model(num_layers)})
    found = pool_of(problem, workload_of(lengths, GRAIN))
    turns = AllTurns(found)
    target_ns = 3 * min(turns.single_ns(one) for one in range(len(found.members)))
    search = TurnSearch(found, Step(0, (0,), {}, target_ns), 0.0)
    search.deadline = Deadline.after(60.0)
    search.switches.price(search.members)
    kept, checked = search.bounds.screen(2, search.target_ns, search.deadline).sets, 0
    piped = [one for one in kept if any(found.num_stages(search.members[place]) > 1 for place in one.strategies)]
    for number, one in enumerate(piped[:12]):
        left = search.node(one, number)
        first, second = (search.members[place] for place in one.strategies)
        best_ns = turns.pair_ns((first, second), search.switches)
        for way in left.bounding_steps:
            held = search.best
            way(left)
            search.best = held
            assert left.bound_ns <= best_ns + 1.0, (one.strategies, way)
            checked += 1
    assert checked >= 15


@pytest.mark.parametrize("lengths", first(1, ([1_280] * 6 + [25_600], [7_680] * 5 + [76_800])))
def test_what_the_longest_adds_is_for_groups_that_hold_it(lengths: list[int]) -> None:
    """A pipeline with as much memory beside others as alone, of which more is known alone: no set is above its
    best step. (All its groups were taken to hold the longest sequence: up to 15 % above.)"""
    problem = slow_network("dgx-h100", 100.0, 0.1, 4, (1, 4))
    space = problem.space.model_copy(update={"recompute": ("none",)})
    found = pool_of(problem.model_copy(update={"space": space}), workload_of(lengths, GRAIN))
    turns = AllTurns(found)
    pipelines = [member for member in range(len(found.members)) if found.num_stages(member) > 1]
    assert any(
        found.members[one].shared_memory_quanta == found.members[one].own_memory_quanta for one in pipelines
    )
    for member in pipelines:
        found.work_bound_with_longest(member, float("inf"))
    target_ns = 5 * min(turns.single_ns(one) for one in range(len(found.members)))
    search = TurnSearch(found, Step(0, (0,), {}, target_ns), 0.0)
    search.deadline = Deadline.after(60.0)
    search.switches.price(search.members)
    kept = search.bounds.screen(2, search.target_ns, search.deadline).sets
    assert len(kept) == 3
    for number, one in enumerate(kept):
        first, second = (search.members[place] for place in one.strategies)
        best_ns = turns.pair_ns((first, second), search.switches)
        left = search.node(one, number)
        search._branch(left)
        assert left.bound_ns <= best_ns + 1.0, one.strategies


def test_the_optimizers_home_runs_something() -> None:
    """Where the update is shorter under a strategy that runs nothing the optimizer lives with one that does: steps
    of others are in no bound."""
    job = Job(num_gpus=16, global_batch_size=1, sequence_length=128)
    problem = Problem(model=load_model("llama2-7b"), hardware=load_hardware("l40s"), job=job)
    found = pool_of(problem, workload_of([16_384, 16_384], GRAIN))
    names = [one.candidate.name for one in found.members]
    runs, idle = names.index("dp2 tp4 cp2"), names.index("tp4 pp4")
    assert found.finish_ns(idle) < found.finish_ns(runs)
    switches = Switches(found)
    switches.price([runs, idle])
    packed = found.pack(runs, found.load.counts, found.max_quanta(runs, shared_memory=True))
    assert packed is not None
    step = Orders(found, switches).best([runs, idle], {runs: packed})
    assert (step.home, step.order) == (runs, (runs,))
