"""Steps of several lengths on this project's own cost model, and what others' rules make of them.

    python -m benchmarks.lengths [--jobs 1,5] [--time-limit S] [--write]

Every job of ``benchmarks.length_jobs`` is solved once over the whole space, at most two strategies in turn or
degrees side by side; once for strategies in turn only; once with up to three in turn; once with unlike replicas,
too; and the rules of others are applied to the same strategies and exact times. The first five tables of
benchmarks/results/lengths.md are of these runs, each time on idle cores. One to two minutes a job.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.length_jobs import ALIGNMENT, CASES, Case
from benchmarks.tables import markdown_table, replace_section, section
from milpplan import solve_lengths
from milpplan.lengths.records import BaselineStep, LengthsResult, StaticStep

DOCUMENT = Path(__file__).parent / "results" / "lengths.md"
GAP, MAX_STRATEGIES, MORE_STRATEGIES = 0.01, 2, 3
# Of the solve that others' rules come with: nothing of it is shown.
ANY_GAP = 0.5


@dataclass(frozen=True, slots=True)
class Solved:
    """A job, its best step of the ``whole`` space, its best one of strategies in ``turns``, that of the whole
    space with up to ``three`` of them, the best one with ``unlike`` replicas, too, and what ``others``' rules make
    of it."""

    case: Case
    whole: LengthsResult
    turns: LengthsResult
    three: LengthsResult
    unlike: LengthsResult
    others: tuple[BaselineStep, ...]

    @property
    def results(self) -> tuple[LengthsResult, ...]:
        """Those of all spaces."""
        return self.whole, self.turns, self.three, self.unlike

    @property
    def static(self) -> StaticStep:
        """The shortest static step of the solves."""
        return min((one.static for one in self.results), key=lambda one: one.step_time_s)

    @property
    def static_gap(self) -> float:
        """(time - bound) / time of the best static step; all bounds are proved, so the highest one counts."""
        bound_s = max(one.static.lower_bound_s for one in self.results)
        return 1 - bound_s / self.static.step_time_s


def solved(case: Case, time_limit_s: float) -> Solved:
    """A job, solved in all four spaces, with others' rules."""

    def run(
        gap: float, most: int = MAX_STRATEGIES, *, whole: bool = False, others: bool = False, unlike: bool = False
    ) -> LengthsResult:
        return solve_lengths(
            case.problem,
            case.workload,
            ALIGNMENT,
            most,
            gap,
            time_limit_s,
            "highs",
            baselines=others,
            hotspa=case.published if others else (),
            side_by_side=whole,
            unlike_replicas=unlike,
        )

    unlike = run(GAP, whole=True, unlike=True)
    more = run(GAP, MORE_STRATEGIES, whole=True)
    return Solved(case, run(GAP, whole=True), run(GAP), more, unlike, run(ANY_GAP, 1, others=True).baselines)


def strategies(result: LengthsResult) -> str:
    """Side by side or in order, and where the optimizer lives if that is none of them."""
    found = (" + " if result.is_side_by_side else " -> ").join(result.order)
    return found if result.home in result.order else f"{found}, home {result.home}"


def proved(result: LengthsResult) -> list[str]:
    """Step, bound, gap and strategies."""
    step, bound = f"{result.step_time_s:.3f}", f"{result.lower_bound_s:.3f}"
    return [step, bound, f"{result.gap:.1%}", strategies(result)]


def seconds(result: LengthsResult) -> list[str]:
    """Of CPUs, and of the clock."""
    return [f"{result.cpu_time_s:.0f}", f"{result.wall_time_s:.0f}"]


WHOLE = (
    *("job", "lengths", "best static (gap)", "its strategy", "best step", "bound", "gap", "strategies"),
    *("gain", "CPU s", "wall s"),
)


def whole_row(one: Solved) -> list[str]:
    """The best of all steps: strategies side by side, or in order."""
    best = one.whole
    return [
        one.case.job,
        f"{one.case.sequences} ({best.num_tokens // 1000:,}K tokens)",
        f"{one.static.step_time_s:.3f} ({one.static_gap:.1%})",
        one.static.strategy,
        *proved(best),
        f"{one.static.step_time_s / best.step_time_s:.3f}x",
        *seconds(best),
    ]


TURNS = (
    *("job", "lengths", "best static", "in turns", "bound", "gap", "strategies in order", "gain", "CPU s"),
    "wall s",
)


def turns_row(one: Solved) -> list[str]:
    """One strategy against two in turn."""
    result = one.turns
    return [
        one.case.job,
        one.case.sequences,
        f"{one.static.step_time_s:.3f}",
        *proved(result),
        f"{one.static.step_time_s / result.step_time_s:.3f}x",
        *seconds(result),
    ]


THREE = ("job", "lengths", "two (gap)", "wall s", "three", "bound", "gap", "strategies", "CPU s", "wall s")


def three_row(one: Solved) -> list[str]:
    """At most two strategies in turn against three."""
    result, two = one.three, one.whole
    return [
        one.case.job,
        one.case.sequences,
        f"{two.step_time_s:.3f} ({two.gap:.1%})",
        f"{two.wall_time_s:.0f}",
        *proved(result),
        *seconds(result),
    ]


UNLIKE = (
    *("job", "lengths", "best static", "best of the others (gap)", "with unlike replicas", "bound", "gap"),
    *("its replicas", "shorter by", "wall s"),
)


def unlike_row(one: Solved) -> list[str]:
    """The best step of the whole space, and with unlike replicas in it."""
    best, whole = one.unlike, one.whole
    return [
        one.case.job,
        one.case.sequences,
        f"{one.static.step_time_s:.3f}",
        f"{whole.step_time_s:.3f} ({whole.gap:.1%})",
        f"{best.step_time_s:.3f}",
        f"{best.lower_bound_s:.3f}",
        f"{best.gap:.1%}",
        replicas(best) if best.is_unlike else strategies(best),
        f"{1 - best.step_time_s / whole.step_time_s:.1%}",
        f"{best.wall_time_s:.0f}",
    ]


def replicas(result: LengthsResult) -> str:
    """How many of which, by the degrees of one."""
    numbers = Counter(turn.strategy for turn in result.turns)
    names = {name: " ".join(word for word in name.split() if word[:2] != "dp") for name in numbers}
    alone = {
        name: words if words[:2] in ("tp", "cp", "pp") else f"1 GPU {words}".strip()
        for name, words in names.items()
    }
    return " + ".join(f"{number} x {alone[name]}" for name, number in numbers.items())


RULES = ("bucketing", "HotSPa", "HotSPa, its strategies", "FlexSP")
OTHERS = (
    *("job", "lengths", "bucketing", "HotSPa's rules", "HotSPa's strategies", "FlexSP's rules"),
    *("strategies by HotSPa's rules", "best static", "in turns", "best step"),
)


def others_row(one: Solved) -> list[str]:
    """Others' rules, and how much longer they take than the best step of all."""
    rules = {step.rule: step for step in one.others}
    best_s = one.whole.step_time_s

    def cell(rule: str) -> str:
        if rule not in rules:
            return ""
        time_s = rules[rule].step_time_s
        return "none" if time_s is None else f"{time_s:.3f} ({time_s / best_s - 1:+.1%})"

    return [
        one.case.job,
        one.case.sequences,
        *map(cell, RULES),
        ", ".join(rules["HotSPa"].strategies),
        f"{one.static.step_time_s:.3f}",
        f"{one.turns.step_time_s:.3f}",
        f"{best_s:.3f}",
    ]


TABLES: dict[str, tuple[Sequence[str], Callable[[Solved], list[str]]]] = {
    "lengths": (WHOLE, whole_row),
    "turns": (TURNS, turns_row),
    "three": (THREE, three_row),
    "unlike": (UNLIKE, unlike_row),
    "baselines": (OTHERS, others_row),
}
"""Sections of the document."""


def tables(found: Sequence[Solved]) -> dict[str, str]:
    """Markdown by section."""
    return {name: markdown_table(header, [row(one) for one in found]) for name, (header, row) in TABLES.items()}


def with_rows(old: str, new: str, numbers: Sequence[int]) -> str:
    """A table with the rows of jobs, counted from 1, in the place of its own; all of it where it has others."""
    lines, rows = old.splitlines(), new.splitlines()
    if len(lines) != 2 + len(CASES) or lines[:2] != rows[:2]:
        return new
    for number, row in zip(numbers, rows[2:], strict=True):
        lines[1 + number] = row
    return "\n".join(lines)


def main() -> None:
    """Solve the jobs asked for, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", help="numbers of jobs, as in 1,5; all unless given")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve (30), four solves a job")
    parser.add_argument("--write", action="store_true", help="replace the rows of these jobs in lengths.md")
    words = parser.parse_args()
    numbers = [int(word) for word in words.jobs.split(",")] if words.jobs else list(range(1, len(CASES) + 1))
    if not all(1 <= number <= len(CASES) for number in numbers):
        parser.error(f"jobs are numbered from 1 to {len(CASES)}")
    found = []
    for number in numbers:
        found.append(solved(CASES[number - 1], words.time_limit))
        for _, row in TABLES.values():
            print(number, " | ".join(row(found[-1])), sep=" | ", flush=True)
    for name, table in tables(found).items():
        if words.write:
            replace_section(DOCUMENT, name, with_rows(section(DOCUMENT, name), table, numbers))
        else:
            print(f"\n{table}")


if __name__ == "__main__":
    main()
