"""How both costs grow with the number of processors, 64 to 16,384.

    python -m benchmarks.calculon_growth CHECKOUT_PATH [--series NAME ...] [--plot FILE.svg] [--save FILE.json]

A series is a rule for model and batch by the number of processors. ``weak``: a sequence a processor, as in
Calculon's published searches (2,240 on 2,240, 2,520 on 2,520, 3,072 on 3,072, 4,096 on 4,096), one series for
every model that it ships; ``weak x 8``: eight sequences, as in its search of 22B on 64; ``strong``: the same batch
for all; ``ladder``: larger models with more processors, in five steps by size.

All points of all series are measured in turns: in every round each has one proof and one share of its sample of
Calculon's executions, so that other work on the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.calculon_complete import solved
from benchmarks.calculon_full import whole_space
from benchmarks.calculon_growth_figure import growth_figure
from benchmarks.calculon_side import Checkout, Tree, load, search_problem
from benchmarks.calculon_space import Cost, cost_of, drawn, each_s
from benchmarks.tables import markdown_table, measured_on
from milpplan.reports.files import write_whole
from milpplan.simulation.layout_columns import FloatArray
from milpplan.units import seconds_text

GROWTH = (64, 256, 1024, 4096, 16384)
MODELS = (
    "megatron-126M",
    "megatron-5B",
    "gpt3-13B",
    "megatron-22B",
    "megatron-40B",
    "anthropic-52B",
    "chinchilla",
)
MODELS += ("lamda", "gpt3-175B", "gopher-280B", "turing-530B", "palm-540B", "megatron-1T")
"""What Calculon ships, by size."""
LADDER = ("megatron-22B", "megatron-40B", "gpt3-175B", "gopher-280B", "megatron-1T")
STRONG_BATCH = 4096
LIMIT_S = 120.0

Case = tuple[str, int, int]
"""Model, processors, batch."""


def series() -> dict[str, list[Case]]:
    """The cases of every series, one for each number of processors."""
    found = {
        "strong gpt3-175B": [("gpt3-175B", procs, STRONG_BATCH) for procs in GROWTH],
        "weak x 8 gpt3-175B": [("gpt3-175B", procs, 8 * procs) for procs in GROWTH],
        "ladder": [(model, procs, procs) for model, procs in zip(LADDER, GROWTH, strict=True)],
    }
    weak = {f"weak {model}": [(model, procs, procs) for procs in GROWTH] for model in MODELS}
    return found | weak


@dataclass(frozen=True, slots=True)
class Point:
    """One case: the proofs, one a round, and Calculon's whole space from samples of its executions.

    ``wall_s``: of a proof, the mean. ``their_wall_s``: as ``theirs.cpu_s``, of the clock, in one process.
    """

    model: str
    procs: int
    batch: int
    status: str
    legal: int
    cpu_s: tuple[float, ...]
    wall_s: float
    theirs: Cost
    their_wall_s: float

    @property
    def mean_s(self) -> float:
        """CPU seconds of a proof."""
        return float(np.mean(self.cpu_s))

    @property
    def error_s(self) -> float:
        """Standard error of ``mean_s``."""
        return float(np.std(self.cpu_s, ddof=1) / math.sqrt(len(self.cpu_s))) if len(self.cpu_s) > 1 else 0.0


@dataclass(slots=True)
class Running:
    """What is measured of one case so far."""

    case: Case
    number: tuple[int, int]
    executions: tuple[tuple[Tree, ...], tuple[Tree, ...]]
    status: str = ""
    legal: int = 0
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    theirs_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    their_wall_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def round(self, checkout: Checkout, system: Tree, part: slice) -> None:
        """One proof, and one share of the sample."""
        name, procs, batch = self.case
        model = checkout.files("models")[name]
        ours = solved(search_problem(model, system, procs, batch, whole_space()), LIMIT_S)[0]
        self.status, self.legal = ours.status, ours.legal
        self.cpu_s.append(ours.cpu_s)
        self.wall_s.append(ours.wall_s)
        for sort, all_ in enumerate(self.executions):
            started = time.monotonic()
            self.theirs_s[sort].extend(each_s(checkout, model, system, all_[part]))
            self.their_wall_s[sort] += time.monotonic() - started

    def point(self) -> Point:
        """Everything that was measured."""
        walls = (
            number * wall / max(1, len(own))
            for number, wall, own in zip(self.number, self.their_wall_s, self.theirs_s, strict=True)
        )
        theirs, wall_s = cost_of(self.number, self.theirs_s), float(np.mean(self.wall_s))
        return Point(*self.case, self.status, self.legal, tuple(self.cpu_s), wall_s, theirs, sum(walls))


def measured(
    checkout: Checkout, system: Tree, cases: Sequence[Case], rounds: int, sample: int
) -> dict[Case, Point]:
    """All cases in ``rounds`` turns, each with ``sample`` executions a round; a first proof fills caches."""
    models, running = checkout.files("models"), []
    for name, procs, batch in dict.fromkeys(cases):
        space = drawn(checkout, models[name], system, procs, batch, rounds * sample)
        running.append(Running((name, procs, batch), space.number, space.executions))
        solved(search_problem(models[name], system, procs, batch, whole_space()), LIMIT_S)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}, {len(running)} cases", file=sys.stderr, flush=True)
        for one in running:
            one.round(checkout, system, slice(number * sample, (number + 1) * sample))
    return {one.case: one.point() for one in running}


def slope(
    procs: Sequence[float], cost: Sequence[float], error: Sequence[float] | None = None
) -> tuple[float, float]:
    """Exponent of the growth with the processors, least squares of the logarithms, and its standard error.

    cost ~ procs^b, b = sum w log cost, w = (x - mean x) / sum (x - mean x)^2, x = log procs. The error is that of
    the measured costs alone: sum w^2 (error / cost)^2, not of the points' distance from a power law.
    """
    x, y = np.log(procs), np.log(cost)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    relative = np.zeros(len(y)) if error is None else np.asarray(error) / np.asarray(cost)
    return float(weights @ y), float(np.sqrt((weights**2) @ relative**2))


@dataclass(frozen=True, slots=True)
class Exponents:
    """Of one series: legal layouts, our CPU seconds and their error; Calculon's executions, those that it
    estimates, its CPU seconds and their error."""

    legal: float
    ours: tuple[float, float]
    executions: float
    estimated: float
    theirs: tuple[float, float]

    @property
    def slower(self) -> tuple[float, float]:
        """By how much our exponent is below Calculon's, and the standard error of that."""
        return self.theirs[0] - self.ours[0], math.hypot(self.ours[1], self.theirs[1])


def exponents(points: Sequence[Point]) -> Exponents:
    """All of one series."""
    procs = [one.procs for one in points]
    return Exponents(
        slope(procs, [one.legal for one in points])[0],
        slope(procs, [one.mean_s for one in points], [one.error_s for one in points]),
        slope(procs, [one.theirs.executions for one in points])[0],
        slope(procs, [one.theirs.number[0] for one in points])[0],
        slope(procs, [one.theirs.cpu_s for one in points], [one.theirs.standard_error_s for one in points]),
    )


def elasticity(found: Mapping[str, Sequence[Point]]) -> tuple[float, float]:
    """Exponents of the CPU seconds in the size of the space, within the series: ours in the legal layouts, and
    Calculon's in the executions that it estimates.

    Least squares of the logarithms, each less its mean over its series: sum x y / sum x^2.
    """
    sizes = (lambda one: one.legal, lambda one: one.theirs.number[0])
    costs = (lambda one: one.mean_s, lambda one: one.theirs.cpu_s)
    found_ = []
    for size, cost in zip(sizes, costs, strict=True):
        x, y = (
            np.concatenate([_centred([measure(one) for one in points]) for points in found.values()])
            for measure in (size, cost)
        )
        found_.append(float(x @ y / (x @ x)))
    return found_[0], found_[1]


def _centred(values: Sequence[float]) -> FloatArray:
    """Logarithms less their mean."""
    logs = np.log(values)
    return np.asarray(logs - logs.mean())


def exponent_table(found: Mapping[str, Sequence[Point]]) -> str:
    """One row for each series."""
    rows = []
    for name, points in found.items():
        own = exponents(points)
        plans = sum(one.status in ("optimal", "feasible") for one in points)
        proved = sum(one.status in ("optimal", "infeasible") for one in points)
        numbers = (own.legal, own.executions, own.estimated)
        both = (f"{value:+.3f} ± {error:.3f}" for value, error in (own.ours, own.theirs, own.slower))
        rows.append((name, f"{proved}, {plans}", *(f"{number:+.3f}" for number in numbers), *both))
    header = ("series", "proved, with a plan", "legal layouts", "Calculon's executions", "of them estimated")
    return markdown_table((*header, "milpplan, CPU", "Calculon, CPU", "Calculon's less ours"), rows)


Costs = list[tuple[float, float]]
"""CPU seconds of a proof (or several) and of Calculon's searches, on every number of processors."""


def cost_table(found: Mapping[str, Sequence[Point]]) -> str:
    """One row for each series: both costs on every number of processors."""
    rows = {name: [(one.mean_s, one.theirs.cpu_s) for one in points] for name, points in found.items()}
    return _table_of_costs(rows)


def total_table(found: Mapping[str, Sequence[Point]]) -> str:
    """The same of all weak series together, a sequence a processor, and with their exponents."""
    weak = [found[f"weak {model}"] for model in MODELS if f"weak {model}" in found]
    if not weak:
        return "-"
    columns = list(zip(*weak, strict=True))
    total = [(sum(one.mean_s for one in own), sum(one.theirs.cpu_s for one in own)) for own in columns]
    procs = [own[0].procs for own in columns]
    grown = (slope(procs, costs)[0] for costs in zip(*total, strict=True))
    said = "exponents {:+.3f} (milpplan) and {:+.3f} (Calculon)".format(*grown)
    return f"{_table_of_costs({f'sum of {len(weak)} weak series': total})}\n\n{said}"


def _table_of_costs(costs: Mapping[str, Costs]) -> str:
    rows = []
    for name, points in costs.items():
        cells = [f"{seconds_text(ours)}, {theirs / 3600:.1f} h" for ours, theirs in points]
        ratios = [theirs / ours for ours, theirs in points]
        grown = (points[-1][who] / points[0][who] for who in (0, 1))
        rows.append((name, *cells, f"{min(ratios):,.0f} to {max(ratios):,.0f}", *(f"{one:.2f}" for one in grown)))
    header = ("series", *(f"{procs:,}" for procs in GROWTH), "ratio of CPU")
    return markdown_table((*header, "ours, 16,384 / 64", "Calculon's"), rows)


def read_points(path: Path) -> dict[str, list[Point]]:
    """What ``--save`` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))["series"]
    return {
        name: [Point(**one | {"theirs": Cost(**one["theirs"]), "cpu_s": tuple(one["cpu_s"])}) for one in points]
        for name, points in document.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    all_ = series()
    parser = argparse.ArgumentParser(description="Growth of Calculon's searches and of milpplan's proofs.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--series", nargs="+", choices=all_, default=list(all_), help="these series (all)")
    parser.add_argument("--system", default="a100_80g", help="a system of the checkout (a100_80g)")
    parser.add_argument("--rounds", type=int, default=3, help="proofs of each case (3)")
    parser.add_argument("--sample", type=int, default=30, help="executions of Calculon's a round (30)")
    parser.add_argument("--plot", type=Path, help="write the growth as SVG here")
    parser.add_argument("--save", type=Path, help="write all points as JSON here")
    parser.add_argument("--load", type=Path, help="measure nothing: tables and plot of what was saved here")
    options = parser.parse_args(arguments)
    if options.load:
        found = read_points(options.load)
    else:
        checkout = load(options.checkout.resolve())
        system = checkout.files("systems")[options.system]
        cases = [case for name in options.series for case in all_[name]]
        points = measured(checkout, system, cases, options.rounds, options.sample)
        found = {name: [points[case] for case in all_[name]] for name in options.series}
    print(cost_table(found), total_table(found), exponent_table(found), sep="\n\n", end="\n\n")
    ours, theirs = elasticity(found)
    print(f"CPU ~ legal layouts ^ {ours:.2f} (milpplan), executions estimated ^ {theirs:.2f} (Calculon)")
    print(", ".join(f"{name} {value}" for name, value in measured_on().items()))
    if options.plot:
        lines = {
            name: (
                [(one.procs, one.mean_s, one.error_s) for one in own],
                [(one.procs, one.theirs.cpu_s, one.theirs.standard_error_s) for one in own],
            )
            for name, own in found.items()
        }
        write_whole(options.plot, growth_figure(lines))
    if options.save:
        document = {name: [asdict(one) for one in own] for name, own in found.items()}
        write_whole(options.save, json.dumps({"measured_on": measured_on(), "series": document}, indent=1) + "\n")


if __name__ == "__main__":
    main()
