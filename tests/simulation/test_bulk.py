"""Bulk simulation: every number is the one that ``simulate`` gives."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Layout, Problem, simulate, simulate_many
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.problem import (
    EXPERT_DISPATCHES,
    RANK_ORDERS,
    SPLIT_SCHEDULES,
    TP_OVERLAPS,
    HostMemory,
    NodeGroup,
    Schedule,
    SizeCurve,
    Space,
)
from milpplan.simulation import LayoutColumns
from milpplan.simulation.bulk import lockstep, uniform_plan
from milpplan.simulation.bulk import simulate_many as bulk
from milpplan.simulation.bulk.lockstep import work_ends
from milpplan.simulation.pipeline.work_orders import rank_profile, structure
from tests.amounts import first, long_but
from tests.simulation.cases import problem_of, random_layout, random_problem, shipped_hardware

MODES = ("none", "selective", "full")


def switched(random: np.random.Generator, problem: Problem, layout: Layout) -> Layout:
    """The layout with switches of its own, as far as they go together."""
    changes = {
        "tp_overlap": str(random.choice(TP_OVERLAPS)),
        "pp_scatter_gather": bool(random.integers(2)),
        "gather_again": bool(random.integers(2)),
    }
    if not any(hasattr(kind.mlp, "num_experts") for kind in problem.model.kinds):
        changes["rank_order"] = str(random.choice(RANK_ORDERS))
    if layout.schedule not in SPLIT_SCHEDULES and problem.hardware.host_memory is not None:
        names = ("offload_weights", "offload_activations", "offload_optimizer")
        changes |= {name: bool(random.integers(4) == 0) for name in names}
        if not changes["offload_activations"] and problem.offload_modules and random.integers(3) == 0:
            named = problem.model_copy(update={"space": Space(offload_modules=None)}).offload_sets
            changes["offload_modules"] = str(random.choice(named))
    if layout.ep > 1:
        changes["expert_dispatch"] = EXPERT_DISPATCHES[int(random.integers(4)) if layout.etp == 1 else 2]
    groups = [n for n in (1, 2, 3, 4) if layout.dp % n == layout.expert_dp % n == 0 and n < layout.dp]
    if layout.zero_stage and groups:
        changes["dp_replicate"] = int(random.choice(groups))
    if layout.zero_stage == 3 and layout.pp == 1 and not problem.job.further_forwards and not problem.inference:
        changes["keep_weights"] = bool(random.integers(2)) and not changes.get("offload_weights", False)
    return layout.model_copy(update=changes)


def with_host(problem: Problem) -> Problem:
    """The problem on hardware with a second tier of memory."""
    curve = SizeCurve(size=(1.0,), value=(1.0,))
    host = HostMemory(capacity_bytes=5 * 10**10, bandwidth_bytes_per_s=2.5e10, efficiency=curve)
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"host_memory": host})})


def disagreements(problem: Problem, layouts: list[Layout], sample: int, random: np.random.Generator) -> list[str]:
    """Plans of which bulk and ``simulate`` say different things, out of a sample."""
    found, wrong = simulate_many(problem, layouts, MODES), []
    for _ in range(sample):
        row, mode = int(random.integers(len(layouts))), int(random.integers(len(MODES)))
        one = simulate(problem, uniform_plan(problem, layouts[row], MODES[mode]))
        alone = (one.step_time_ns, one.peak_memory_bytes, one.host_memory_bytes, one.fits)
        arrays = (found.step_time_ns, found.peak_memory_bytes, found.host_memory_bytes, found.fits)
        if alone != tuple(array[row, mode] for array in arrays):
            wrong.append(f"{layouts[row]} {MODES[mode]}")
    return wrong


@pytest.mark.parametrize("count", long_but((20,), (20, 40)))
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_bulk_is_the_simulator(count: int, seed: int) -> None:
    """Random problems, every schedule, every switch, stages that share nothing: the same nanoseconds and bytes."""
    random = np.random.default_rng(seed)
    problem = with_host(random_problem(random))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(count)]
    assert disagreements(problem, layouts, 8, random) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_bulk_is_the_simulator_on_many(seed: int) -> None:
    """The same on more problems."""
    random = np.random.default_rng(seed)
    problem = with_host(random_problem(random))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(60)]
    assert disagreements(problem, layouts, 60, random) == []


def test_long_pipelines_in_bulk() -> None:
    """Many micro-batches, so that rounds are jumped over: still the same."""
    problem, random = problem_of("gpt3-175b"), np.random.default_rng(5)
    layouts = [
        Layout(pp=pp, vpp=vpp, dp=2, zero_stage=1, global_batch_size=2 * rounds * pp, schedule=schedule,
               tp=tp, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
        for pp, vpp, rounds in ((4, 1, 64), (8, 1, 40), (6, 1, 33), (4, 3, 40), (8, 2, 16), (2, 24, 24))
        for schedule in (("interleaved",) if vpp > 1 else ("1f1b", "gpipe"))
        for tp in (1, 8)
        for overlap in (False, True)
    ]  # fmt: skip
    assert disagreements(problem, layouts, 8, random) == []


def test_late_gathers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gathers of later chunks or ranks end after their first input is there, the step waits for them."""
    hardware = shipped_hardware("dgx-a100-80")
    slow = hardware.scale_out.model_copy(update={"bandwidth_bytes_per_s": 2e9})
    hardware = hardware.model_copy(update={"scale_out": slow})
    problem, random = problem_of("megatron-22b", hardware, sequence_length=512), np.random.default_rng(6)
    origins = []
    monkeypatch.setattr(
        bulk, "work_ends", lambda name, work: origins.append(work.origin_ns) or work_ends(name, work)
    )
    layouts = [
        Layout(tp=1, pp=pp, vpp=vpp, dp=16, zero_stage=1, global_batch_size=16 * 2 * pp, micro_batch_size=1,
               schedule="interleaved" if vpp > 1 else "1f1b", overlap_grad_reduce=True, overlap_param_gather=True)
        for pp in (2, 4)
        for vpp in (1, 2, 6)
    ]  # fmt: skip
    assert disagreements(problem, layouts, 8, random) == []
    assert sum(origin is not None for origin in origins) > 2


def test_inference_in_bulk() -> None:
    """Forwards alone."""
    problem = problem_of("llama3-8b", "dgx-h100", kind="inference")
    layouts = [
        Layout(pp=pp, tp=2, global_batch_size=8, micro_batch_size=size, schedule="gpipe")
        for pp in (1, 4)
        for size in (1, 2)
    ]
    found = simulate_many(problem, layouts)
    assert found.modes == ("none",)
    alone = [simulate(problem, uniform_plan(problem, layout, "none")) for layout in layouts]
    assert found.step_time_ns[:, 0].tolist() == [one.step_time_ns for one in alone]
    assert found.peak_memory_bytes[:, 0].tolist() == [one.peak_memory_bytes for one in alone]


def test_mixed_clusters_in_bulk() -> None:
    """Several node types are simulated one by one, with the same answers."""
    base = problem_of("llama3-8b", "dgx-a100-80", num_gpus=16, global_batch_size=32)
    problem = base.model_copy(
        update={"other_hardware": (NodeGroup(hardware=shipped_hardware("dgx-h100"), num_gpus=8),)}
    )
    layouts = [Layout(tp=4, pp=4, global_batch_size=32, node_order=order) for order in ((0, 1), (1, 0))]
    assert disagreements(problem, layouts, 6, np.random.default_rng(7)) == []


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"tp": 5}, "tp=5"),
        ({"global_batch_size": 7, "dp": 2}, "global_batch_size=7"),
        ({"schedule": "interleaved", "pp": 4, "vpp": 2, "global_batch_size": 6}, "schedule cannot run"),
        ({"schedule": "dualpipe-v", "pp": 4, "vpp": 2, "global_batch_size": 4}, "schedule cannot run"),
        ({"vpp": 2, "pp": 2}, "schedule cannot run"),
        ({"ep": 2, "dp": 2}, "ep=2"),
        ({"node_order": (0, 1)}, "node_order"),
        ({"offload_weights": True, "schedule": "zb-h1", "pp": 2}, "offloaded"),
    ],
)
def test_illegal_layouts_are_named(change: dict[str, object], seen: str) -> None:
    """One layout that cannot run among many: its error is that of the simulator."""
    problem = problem_of("gpt3-175b")
    layouts = [Layout(global_batch_size=8), Layout(**{"global_batch_size": 8} | change)]
    with pytest.raises(IllegalPlanError, match=seen):
        simulate_many(problem, layouts)


def test_bad_modes_and_no_layouts() -> None:
    """An unknown mode is an error; no layouts are no numbers."""
    problem = problem_of("gpt3-175b")
    with pytest.raises(InvalidInputError, match="some"):
        simulate_many(problem, [Layout(global_batch_size=8)], ("some",))
    assert simulate_many(problem, []).step_time_ns.shape == (0, 3)
    with pytest.raises(IllegalPlanError, match="recomputes"):
        simulate_many(problem_of("llama3-8b", kind="inference"), [Layout(global_batch_size=8)], ("full",))


def by_items(schedule: Schedule, work: lockstep.Work, plan: int) -> tuple[list[int], list[int]]:
    """First starts and last ends of one plan, item by item over the graph of its schedule."""
    ranks, m = work.num_ranks, int(work.micro_batches[plan])
    graph = structure(schedule, ranks, m, work.vpp)
    took = np.concatenate([work.forward[work.class_of, plan], work.backward[work.class_of, plan]])
    origin = np.zeros(len(work.class_of)) if work.origin_ns is None else work.origin_ns[:, plan]
    first = dict(zip(graph.forward_node[:, 0].tolist(), origin.tolist(), strict=True))
    start, end = [0] * graph.num_nodes, [0] * (graph.num_nodes + ranks + 1)
    end[-1] = -int(work.transfer_ns[plan])
    for node in range(graph.num_nodes):
        received = end[graph.transfer_predecessor[node]] + int(work.transfer_ns[plan])
        start[node] = max(end[graph.rank_predecessor[node]], received, int(first.get(node, 0)))
        end[node] = start[node] + int(took[graph.duration_index[node]])
    return [start[node] for node in graph.forward_node[:, 0]], [end[node] for node in graph.backward_node[:, -1]]


@pytest.mark.parametrize("seed", range(8))
def test_lockstep_is_item_by_item(seed: int) -> None:
    """Any durations, also none, any classes of stages, short and long runs, late origins: the same ends."""
    random = np.random.default_rng(seed)
    for _ in range(8):
        schedule: Schedule = ("1f1b", "interleaved", "gpipe")[random.integers(3)]
        vpp = int(random.integers(2, 5)) if schedule == "interleaved" else 1
        ranks, plans, classes = int(random.integers(1 + (vpp > 1), 7)), 3, int(random.integers(1, 4))
        longest = int(random.choice([2, 20, 10_000]))
        draw = [random.integers(0, longest, (classes, plans)) for _ in range(2)]
        m = random.integers(1, 9, plans) * ranks if vpp > 1 else random.integers(1, 45, plans)
        origin = random.integers(0, 4 * longest, (ranks * vpp, plans)) if random.integers(2) else None
        transfer = random.integers(0, 1 + longest // 2, plans)
        work = lockstep.Work(ranks, vpp, random.integers(0, classes, ranks * vpp), *draw, transfer, m, origin)
        ends = work_ends(schedule, work)
        for plan in range(plans):
            start, end = by_items(schedule, work, plan)
            assert ends.first_start[:, plan].tolist() == start
            assert ends.last_end[:, plan].tolist() == end


def test_rounds_are_jumped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rounds of unequal ends take few steps, by repetition and by leaps, to the same end."""
    steps: list[int] = []
    for kind in (lockstep.OneChunk, lockstep.Interleaved):
        step = kind.step
        monkeypatch.setattr(kind, "step", lambda own, n, step=step: (steps.append(n), step(own, n))[1])
    for schedule, ranks, vpp in (("1f1b", 4, 1), ("interleaved", 3, 2)):
        class_of = np.array([0, *[1] * (ranks * vpp - 2), 2])
        forward, backward = np.array([[1100], [1000], [1003]]), np.array([[2100], [2000], [2005]])
        m = np.array([1000 * ranks])
        work = lockstep.Work(ranks, vpp, class_of, forward, backward, np.array([7]), m)
        ends = work_ends(schedule, work)
        assert ends.last_end[:, 0].tolist() == by_items(schedule, work, 0)[1]
        assert len(steps) < 100
        steps.clear()


@pytest.mark.parametrize(("ranks", "vpp"), [(2, 2), (3, 4), (4, 3)])
def test_live_counts_stay_after_three_groups(ranks: int, vpp: int) -> None:
    """What bulk memory takes for granted: more micro-batches than three a rank add no moment."""
    for rank in range(ranks):
        few = {groups: rank_profile("interleaved", ranks, groups * ranks, vpp, rank) for groups in (3, 4, 7)}
        assert set(few[3]) == set(few[4]) == set(few[7])


def test_columns_of_layouts_are_taken() -> None:
    """Records and columns give the same."""
    problem = problem_of("gpt3-175b")
    layouts = [Layout(tp=2, pp=2, global_batch_size=8), Layout(tp=4, global_batch_size=8)]
    one, other = simulate_many(problem, layouts), simulate_many(problem, LayoutColumns.of(layouts))
    assert (one.step_time_ns == other.step_time_ns).all()
