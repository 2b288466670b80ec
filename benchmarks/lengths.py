"""Where steps of several lengths pay, on this project's own cost model, against one strategy and others' rules.

    python -m benchmarks.lengths [--jobs 1,5] [--time-limit S] [--write]

Jobs of ``benchmarks.length_jobs`` are solved over the whole space (at most two strategies in turn, or degrees
side by side), for strategies in turn only and with heterogeneous replicas; the rules of others get the same
strategies and exact times. Jobs of real lengths are solved again where links between nodes are slow and where
communication hardly hides (the first two doubts of ``--robust`` that lengths know). Searches count their work: but
for heterogeneous replicas other machines find the same steps, unless the limit of time ends a solve. One to two
minutes a job.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.length_jobs import ALIGNMENT, CASES, Case, Wikipedia
from benchmarks.tables import markdown_table, replace_section, section
from milpplan import solve_lengths
from milpplan.lengths.records import BaselineStep, LengthsResult, StaticStep
from milpplan.problem import Problem
from milpplan.problem.scenarios import default_scenarios, in_scenario

DOCUMENT = Path(__file__).parent / "results" / "lengths.md"
GAP, MAX_STRATEGIES = 0.01, 2
# Of the solve that others' rules come with: nothing of it is shown.
ANY_GAP = 0.5
SCENARIOS = ("slow links", "hardly hidden")


@dataclass(frozen=True, slots=True)
class Solved:
    """A job, its best steps of the ``whole`` space, of strategies in ``turns``, and with ``unlike`` replicas, what
    ``others``' rules make of it, and the whole space in ``scenarios``, by name."""

    case: Case
    whole: LengthsResult
    turns: LengthsResult
    unlike: LengthsResult
    others: tuple[BaselineStep, ...]
    scenarios: dict[str, LengthsResult]

    @property
    def static(self) -> StaticStep:
        """The shortest static step of the solves."""
        steps = [one.static for one in (self.whole, self.turns, self.unlike)]
        return min(steps, key=lambda one: one.step_time_s)


def solved(case: Case, time_limit_s: float) -> Solved:
    """A job, solved in all spaces, with others' rules, and in the scenarios if its lengths are real."""

    def run(
        problem: Problem, most: int = MAX_STRATEGIES, gap: float = GAP, *, whole: bool = True, **more: bool
    ) -> LengthsResult:
        hotspa = case.published if more.get("baselines") else ()
        limits = most, gap, time_limit_s, "highs"
        return solve_lengths(problem, case.workload, ALIGNMENT, *limits, hotspa=hotspa, side_by_side=whole, **more)

    problem = case.problem
    is_real = isinstance(case.law, Wikipedia)
    scenarios = {one.name: one for one in default_scenarios(problem)} if is_real else {}
    return Solved(
        case,
        run(problem),
        run(problem, whole=False),
        run(problem, unlike_replicas=True),
        run(problem, 1, ANY_GAP, whole=False, baselines=True).baselines,
        {name: run(in_scenario(problem, scenarios[name])) for name in SCENARIOS if name in scenarios},
    )


def strategies(result: LengthsResult) -> str:
    """Degrees side by side, or strategies in order, and where the optimizer lives if that is none of them."""
    degrees = tuple(dict.fromkeys(re.sub(r" (selective|full)\b", "", name) for name in result.order))
    if result.is_side_by_side and len(degrees) > 1:
        return " + ".join(degrees)
    found = (" + " if result.is_side_by_side else " -> ").join(result.order)
    return found if result.home in result.order else f"{found}, home {result.home}"


RULES = ("bucketing", "HotSPa", "FlexSP")
HEADER = (
    *("job", "lengths", "one strategy", "in turn", "whole space", "gap", "saved", "in doubt", "unlike replicas"),
    *("gap", "bucketing", "HotSPa", "FlexSP", "CPU s", "strategies of the whole space"),
)


def saved(result: LengthsResult, static_s: float) -> float:
    """Share of the static step that the best step saves."""
    return 1 - result.step_time_s / static_s


def row(one: Solved) -> list[str]:
    """One strategy, strategies in turn, the whole space, and others' rules with their excess over it."""
    best, rules = one.whole, {step.rule: step for step in one.others}
    doubts = [saved(result, result.static.step_time_s) for result in one.scenarios.values()]

    def excess(rule: str) -> str:
        time_s = rules[rule].step_time_s
        return "no plan" if time_s is None else f"{time_s / best.step_time_s - 1:+.0%}"

    return [
        one.case.job,
        one.case.sequences,
        f"{one.static.step_time_s:.3f}",
        f"{one.turns.step_time_s:.3f}",
        f"{best.step_time_s:.3f}",
        f"{best.gap:.1%}",
        f"{saved(best, one.static.step_time_s):.1%}",
        f"{min(doubts):.1%}" if doubts else "",
        f"{one.unlike.step_time_s:.3f}",
        f"{one.unlike.gap:.1%}",
        *(excess(rule) for rule in RULES),
        f"{best.cpu_time_s:.0f}",
        strategies(best),
    ]


def main() -> None:
    """Solve the jobs asked for, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", help="numbers of jobs, as in 1,5; those of real lengths unless given")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve (30), up to six a job")
    parser.add_argument("--write", action="store_true", help="replace the rows of these jobs in lengths.md")
    words = parser.parse_args()
    real = [number for number, case in enumerate(CASES, 1) if isinstance(case.law, Wikipedia)]
    numbers = [int(word) for word in words.jobs.split(",")] if words.jobs else real
    if not all(1 <= number <= len(CASES) for number in numbers):
        parser.error(f"jobs are numbered from 1 to {len(CASES)}")
    found = []
    for number in numbers:
        found.append(solved(CASES[number - 1], words.time_limit))
        print(number, " | ".join(row(found[-1])), sep=" | ", flush=True)
    table = markdown_table(HEADER, [row(one) for one in found])
    if words.write:
        replace_section(DOCUMENT, "lengths", with_rows(section(DOCUMENT, "lengths"), table))
    else:
        print(f"\n{table}")


def with_rows(old: str, new: str) -> str:
    """A table with the rows of some jobs in the place of their own, by the first two cells; the new one where its
    columns or its jobs are others."""
    rows = {tuple(line.split(" | ")[:2]): line for line in new.splitlines()}
    lines = old.splitlines()
    known = {tuple(line.split(" | ")[:2]) for line in lines}
    if lines[:1] != new.splitlines()[:1] or not set(rows) <= known:
        return new
    return "\n".join(rows.get(tuple(line.split(" | ")[:2]), line) for line in lines)


if __name__ == "__main__":
    main()
