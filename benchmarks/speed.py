"""Layouts bounded a second, and simulator speed, each as a ratio to a baseline measured in the same run.

    python -m benchmarks.speed [--only NAME ...] [--json]

Everything runs on one core (the process is pinned to one where the system allows it).

Layouts: enumeration, the cost constants of every layout, and the bounds on step time and memory over all
its plans, as the planner does it before it solves anything. Baseline: ``milpplan.simulate`` on random plans
of the same layouts, one by one. For context: Calculon (Isaev et al. 2023) reports about 1,000 estimates a
second.

Simulator: ``milpplan.simulate`` (costs, longest path, memory and breakdown; the first call also builds the
schedule's graph, which plans of a layout share) and the longest path alone. Baseline: the event-by-event
simulation in plain Python that the tests compare the longest path with, on the same durations; it must give
the same step time. The ratio is that of the longest path, since the baseline does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.problems import CASES, Case, Kind
from benchmarks.tables import markdown_table, measured_on
from milpplan import Layout, Plan, Problem, load_hardware, load_model, simulate
from milpplan.optimize.bounds.closed_form import layout_bounds
from milpplan.optimize.bounds.uniform_plans import uniform_bounds, uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.problem import Job
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.simulator import step_times_ns
from milpplan.simulation.stages import durations, plan_stages
from milpplan.units import rate_text, seconds_text
from tests.simulation import event_simulation

CHUNK = 100_000
"""Layouts bounded at a time."""


@dataclass(frozen=True, slots=True)
class LayoutSpeed:
    """Layouts of a problem and seconds for all of them; plans simulated one by one and seconds for those."""

    problem: str
    space: Kind
    layouts: int
    enumerate_s: float
    bound_s: float
    simulated: int
    simulate_s: float

    @property
    def layouts_per_s(self) -> float:
        """Enumeration, constants and bounds together."""
        return self.layouts / (self.enumerate_s + self.bound_s)

    @property
    def plans_per_s(self) -> float:
        """One by one through the simulator."""
        return self.simulated / self.simulate_s


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """One plan through the simulator (first and later calls), its longest path alone, and the event
    simulation; all but the first are the best of several calls."""

    problem: str
    work_items: int
    first_s: float
    again_s: float
    path_s: float
    events_s: float


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def best(work: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Seconds of the fastest of some calls, and the result."""
    return min((timed(work) for _ in range(repeats)), key=lambda pair: pair[0])


def layout_speed(case: Case, kind: Kind, sample: int) -> LayoutSpeed:
    """Time to enumerate and bound every layout of a case (the best of three, as for the simulator: the first of a
    process also fills caches), and to simulate a random sample."""
    problem = case.problem(kind)
    enumerate_s, space = best(lambda: layout_space(problem))
    bound_s, _ = best(lambda: _bound_all(problem, space, kind))
    plans = _random_plans(case.problem("uniform"), sample)
    simulate_s, _ = timed(lambda: [simulate(problem, plan) for plan in plans])
    return LayoutSpeed(case.text(), kind, len(space), enumerate_s, bound_s, len(plans), simulate_s)


def _bound_all(problem: Problem, space: LayoutSpace, kind: Kind) -> None:
    bounds = uniform_bounds if kind == "uniform" else layout_bounds
    for start in range(0, len(space), CHUNK):
        part = space.take(np.arange(start, min(len(space), start + CHUNK)))
        bounds(problem, part, layout_costs(problem, part))


def _random_plans(problem: Problem, sample: int) -> list[Plan]:
    space = layout_space(problem)
    rows = np.random.default_rng(1).integers(len(space), size=sample)
    return [uniform_plan(problem, space.at(int(row)), "none") for row in rows]


def simulator_cases() -> tuple[tuple[Problem, Layout], ...]:
    """16 stages x 128 micro-batches of GPT-3 175B, and 64 x 512 x 4 virtual stages of Megatron 1T made twice
    as deep, so that each of the 256 virtual stages holds a layer."""
    deep = load_model("megatron-1t")
    deep = deep.model_copy(
        update={
            "name": "megatron-1t, 256 layers",
            "layers": tuple(run.model_copy(update={"count": 2 * run.count}) for run in deep.layers),
        }
    )
    hardware = load_hardware("dgx-a100-80")
    cases = []
    for model, pp, micro_batches, vpp in ((load_model("gpt3-175b"), 16, 128, 1), (deep, 64, 512, 4)):
        layout = Layout(
            tp=8,
            pp=pp,
            dp=4,
            vpp=vpp,
            global_batch_size=4 * micro_batches,
            sequence_parallel=True,
            zero_stage=1,
            schedule="interleaved" if vpp > 1 else "1f1b",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        job = Job(num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size, sequence_length=2048)
        cases.append((Problem(model=model, hardware=hardware, job=job), layout))
    return tuple(cases)


def simulator_speed(problem: Problem, layout: Layout) -> SimulatorSpeed:
    """One uniform plan through both simulators, which must agree to the nanosecond."""
    plan = uniform_plan(problem, layout, "none")
    first_s, report = timed(lambda: simulate(problem, plan))
    again_s, _ = best(lambda: simulate(problem, plan))
    costs = layout_costs(problem, LayoutColumns.of([layout])).at(0)
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    path_s, step_ns = best(lambda: int(step_times_ns(layout, costs, matrix)))
    rows = matrix.tolist()
    shape = (layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    switches = (layout.overlap_grad_reduce, layout.overlap_param_gather)
    network = int(costs.transfer_ns), *switches, int(costs.barrier_ns)
    events_s, step = best(lambda: event_simulation.simulate(shape, rows, *network))
    if not step.step_time == step_ns == report.step_time_ns:
        raise SystemExit(f"The simulators disagree: {report.step_time_ns} against {step.step_time} ns.")
    text = f"{problem.model.name}: {layout.pp} stages x {layout.num_micro_batches} x {layout.vpp}"
    items = 2 * layout.num_virtual_stages * layout.num_micro_batches
    return SimulatorSpeed(text, items, first_s, again_s, path_s, events_s)


def layout_table(speeds: Sequence[LayoutSpeed]) -> str:
    """Layouts a second, against simulating one by one."""
    header = ("problem", "space", "layouts", "enumerate", "bound", "layouts/s", "simulated/s", "ratio")
    return markdown_table(
        header,
        [
            (
                speed.problem,
                speed.space,
                f"{speed.layouts:,}",
                seconds_text(speed.enumerate_s),
                seconds_text(speed.bound_s),
                rate_text(speed.layouts_per_s),
                rate_text(speed.plans_per_s),
                rate_text(speed.layouts_per_s / speed.plans_per_s),
            )
            for speed in speeds
        ],
    )


def simulator_table(speeds: Sequence[SimulatorSpeed]) -> str:
    """Seconds a plan, against the event simulation."""
    header = ("plan", "work items", "simulate", "again", "longest path", "event by event", "ratio")
    return markdown_table(
        header,
        [
            (
                speed.problem,
                f"{speed.work_items:,}",
                seconds_text(speed.first_s),
                seconds_text(speed.again_s),
                seconds_text(speed.path_s),
                seconds_text(speed.events_s),
                f"{speed.events_s / speed.path_s:.1f}",
            )
            for speed in speeds
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Layouts a second on one core, and simulator speed.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these problems")
    parser.add_argument("--sample", type=int, default=50, help="plans to simulate one by one (50)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kinds: tuple[Kind, ...] = ("uniform", "free")
    layouts = [layout_speed(CASES[name], kind, options.sample) for name in options.only for kind in kinds]
    simulator = [simulator_speed(*case) for case in simulator_cases()]
    if options.json:
        document = {
            "measured_on": measured_on(),
            "layouts": [asdict(speed) for speed in layouts],
            "simulator": [asdict(speed) for speed in simulator],
        }
        print(json.dumps(document, indent=2))
        return
    print(layout_table(layouts), simulator_table(simulator), sep="\n\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
