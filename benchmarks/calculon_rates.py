"""Estimates a CPU second of one core, Calculon's and milpplan's, on the same executions in one run.

    python -m benchmarks.calculon_rates CHECKOUT_PATH [--case NAME ...] [--sample 100] [--checked 20] [--json]

Executions: those of a problem of Calculon's that both can run (equal chunks, its order of networks), in two
spaces: ``plain``, the uniform space with its recomputation and sharding, and ``switches`` with all values of every
switch of Calculon's that a layout has here (overlaps, communication, offload). Memory is unlimited in Calculon, so
that every execution is estimated and none refused early.

milpplan: the enumeration of the layouts and ``simulate_many`` of all of them, every recompute mode: the exact step
time, bytes on the device and on the host, and whether they fit. ``--checked`` of them are simulated one by one,
which must give the same numbers, and also gives that rate. Not counted: the start of Python.

Calculon, on a random sample of these executions that it does not refuse at once: as its search calls it, which
builds every debug message; with its logger switched off; and with all calls of the logger taken out of its source,
which no run of its own does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calculon_full import CASES, SHARED, opened
from benchmarks.calculon_side import (
    Checkout,
    Tree,
    execution_of,
    load,
    search_problem,
    without_memory_limit,
    without_messages,
)
from benchmarks.tables import markdown_table, measured_on
from milpplan import Problem, Space, simulate, simulate_many
from milpplan.optimize.bounds.uniform_plans import uniform_bounds, uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.simulation.bulk.simulate_many import BulkSteps
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.units import rate_text

SPACES = ("plain", "switches")


@dataclass(frozen=True, slots=True)
class Rates:
    """Estimates a CPU second. ``steady``: milpplan's in later runs of the process, its caches filled."""

    problem: str
    space: str
    executions: int
    search: float
    quiet: float
    stripped: float
    bulk: float
    steady: float
    bounds: float
    singly: float


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def shared_columns(problem: Problem) -> LayoutColumns:
    """Layouts of the space whose chunks are equal, as Calculon's all are."""
    columns = layout_space(problem).columns
    return columns.take(np.flatnonzero(problem.model.num_layers % (columns.pp * columns.vpp) == 0))


def bulk_of(problem: Problem) -> tuple[LayoutColumns, BulkSteps]:
    """Enumerate and price."""
    columns = shared_columns(problem)
    return columns, simulate_many(problem, columns)


def bounds_of(problem: Problem) -> None:
    """Enumerate and bound, as a search does first."""
    columns = shared_columns(problem)
    uniform_bounds(problem, columns, layout_costs(problem, columns))


def checked_s(
    problem: Problem, columns: LayoutColumns, found: BulkSteps, picked: Iterable[Sequence[int]]
) -> float:
    """CPU seconds of ``simulate`` for the picked (layout, mode), which must agree with the bulk."""
    seconds = 0.0
    for row, mode in picked:
        plan = uniform_plan(problem, columns.at(row), found.modes[mode])
        took, one = cpu_s(lambda plan=plan: simulate(problem, plan))
        seconds += took
        alone = (one.step_time_ns, one.peak_memory_bytes, one.host_memory_bytes)
        arrays = (found.step_time_ns, found.peak_memory_bytes, found.host_memory_bytes)
        if alone != tuple(int(array[row, mode]) for array in arrays):
            raise SystemExit(f"Bulk and simulator disagree on {plan.layout}, {found.modes[mode]}.")
    return seconds


def calculon_s(checkout: Checkout, model: Tree, system: Tree, executions: Sequence[Tree], *, talk: bool) -> float:
    """CPU seconds of Calculon for all executions."""
    application, built = checkout.llm.Application(model), unlimited(checkout, system, executions[0])
    return cpu_s(lambda: [checkout.estimate(application, one, built, talk=talk) for one in executions])[0]


def unlimited(checkout: Checkout, system: Tree, execution: Tree) -> Any:
    """Calculon's record of a system without a limit of memory."""
    built = checkout.system(without_memory_limit(system))
    built.set_datatype(execution["datatype"])
    return built


def accepted(
    checkout: Checkout, model: Tree, system: Tree, draws: Iterable[tuple[list[int], Tree]]
) -> Iterator[tuple[list[int], Tree]]:
    """What Calculon does not refuse at once (a degree that does not fill a node): those would cost it nothing."""
    application = checkout.llm.Application(model)
    for picked, execution in draws:
        built = unlimited(checkout, system, execution)
        if checkout.estimate(application, execution, built) is not None:
            yield picked, execution


def rates(checkout: Checkout, case: str, space: str, system: Tree, sample: int, checked: int) -> Rates:
    """All rates of one problem in one space."""
    name, procs, batch = CASES[case]
    model = checkout.files("models")[name]
    fields = SHARED | (opened() if space == "switches" else {})
    problem = search_problem(model, system, procs, batch, Space(**fields))
    first_s, (columns, found) = cpu_s(lambda: bulk_of(problem))
    steady_s = min(cpu_s(lambda: bulk_of(problem))[0] for _ in range(3))
    bounds_s = min(cpu_s(lambda: bounds_of(problem))[0] for _ in range(2))
    number = found.step_time_ns.size
    random = np.random.default_rng(1)
    places = (list(divmod(int(random.integers(number)), len(found.modes))) for _ in range(20 * sample))
    draws = ((at, execution_of(problem, columns.at(at[0]), found.modes[at[1]], system)) for at in places)
    chosen = list(islice(accepted(checkout, model, system, draws), sample))
    said = [execution for _, execution in chosen]
    singly_s = checked_s(problem, columns, found, [at for at, _ in chosen[:checked]])
    plain = without_messages(checkout)
    theirs = [
        calculon_s(one, model, system, said, talk=talk)
        for one, talk in ((checkout, True), (checkout, False), (plain, False))
    ]
    their_rates = [len(said) / seconds for seconds in theirs]
    ours = (number / first_s, number / steady_s, number / bounds_s, min(checked, len(said)) / singly_s)
    return Rates(case, space, number, *their_rates, *ours)


def rate_table(all_: Sequence[Rates]) -> str:
    """Rates, and those of the bulk over Calculon's."""
    rows = [
        (
            f"{one.problem}, {one.space}",
            f"{one.executions:,}",
            *(rate_text(rate) for rate in (one.search, one.quiet, one.stripped, one.singly, one.bounds)),
            f"{rate_text(one.bulk)} / {rate_text(one.steady)}",
            *(f"{one.steady / rate:,.0f}" for rate in (one.search, one.quiet, one.stripped)),
        )
        for one in all_
    ]
    header = ("problem", "executions", "Calculon's search", "its messages off", "its messages taken out")
    header += ("simulated singly", "bounds", "simulated in bulk, first / later", "ratio to its search")
    return markdown_table((*header, "to messages off", "to taken out"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Estimates a CPU second, Calculon's and milpplan's.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="these problems (all)")
    parser.add_argument("--space", nargs="+", choices=SPACES, default=list(SPACES), help="these spaces (both)")
    parser.add_argument("--system", default="a100_80g", help="a system of the checkout (a100_80g)")
    parser.add_argument("--sample", type=int, default=100, help="executions that Calculon estimates (100)")
    parser.add_argument("--checked", type=int, default=20, help="of them also simulated one by one (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args(arguments)
    checkout = load(options.checkout)
    system = checkout.files("systems")[options.system]
    extent = (options.sample, options.checked)
    all_ = [rates(checkout, case, space, system, *extent) for space in options.space for case in options.case]
    if options.json:
        print(json.dumps({"measured_on": measured_on(), "rates": [asdict(one) for one in all_]}, indent=2))
        return
    print(rate_table(all_))
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
