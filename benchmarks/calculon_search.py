"""Calculon's searches and milpplan's proofs over the same space: time, and both choices.

    python -m benchmarks.calculon_search CHECKOUT_PATH [--case NAME ...] [--part NAME ...]

Everything is measured in this run on the same cores. The space of both is all that Calculon's search decides
(``calculon_full``), every value of every switch; milpplan proves its best plan within 1e-4.

complete   small problems (``--problem``): Calculon's own program to its end on all cores, and the proof in a
           process of its own
proofs     the large problems. Calculon's time is an extrapolation: the number of its executions times the mean CPU
           seconds of random ones, called as its search calls them, with the standard error; and the same with its
           messages taken out of its source. milpplan's time is that of the proof, and with it of proofs over what
           Megatron-LM's rules and a fixed batch leave out of Calculon's space
choices    Calculon's true optimum (of a complete search made once, estimated again here) and milpplan's, each
           priced by both; and what a wider space adds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import calculon_space
from benchmarks.calculon_complete import PROBLEMS, Complete, Solved, complete, solved
from benchmarks.calculon_full import CASES, Outside, outside_of, whole_space
from benchmarks.calculon_prices import Crossed, Priced, crossed, optimum
from benchmarks.calculon_side import Checkout, Tree, load, search_problem, without_messages
from benchmarks.calculon_space import Cost
from benchmarks.tables import markdown_table, measured_on
from milpplan import PlanResult, Problem
from milpplan.units import gap_text, percent_text, seconds_text

PARTS = ("complete", "proofs", "choices")


@dataclass(frozen=True, slots=True)
class Proof:
    """One large problem: the proof, what lies outside its space, and Calculon's time for the whole space as it is
    (``theirs``) and without its messages (``stripped``)."""

    name: str
    procs: int
    ours: Solved
    outside: Outside
    theirs: Cost
    stripped: Cost

    @property
    def cpu_s(self) -> float:
        """milpplan's, with what lies outside."""
        return self.ours.cpu_s + self.outside.cpu_s

    @property
    def wall_s(self) -> float:
        """milpplan's, with what lies outside."""
        return self.ours.wall_s + self.outside.wall_s


def problem_of(checkout: Checkout, system: Tree, case: tuple[str, int, int]) -> tuple[Tree, Problem]:
    """Calculon's model, and the problem in the whole space."""
    model = checkout.files("models")[case[0]]
    return model, search_problem(model, system, case[1], case[2], whole_space())


def proof(
    checkout: Checkout, name: str, system: Tree, case: tuple[str, int, int], sample: int
) -> tuple[Proof, PlanResult]:
    """Both of one problem."""
    (_, procs, batch), (model, problem) = case, problem_of(checkout, system, case)
    ours, result = solved(problem)
    outside = outside_of(checkout, model, system, procs, batch, sample)
    theirs, stripped = (
        calculon_space.cost(one, model, system, procs, batch, sample, talk=talk)
        for one, talk in ((checkout, True), (without_messages(checkout), False))
    )
    return Proof(name, procs, ours, outside, theirs, stripped), result


def complete_table(all_: Sequence[Complete]) -> str:
    """Complete searches and proofs."""
    rows = [
        (
            one.name,
            f"{one.executions:,} ({one.good:,} good)",
            seconds_text(one.quiet_cpu_s),
            seconds_text(one.process_cpu_s),
            f"{one.quiet_cpu_s / one.process_cpu_s:,.0f}",
            f"{seconds_text(one.wall_s)} / {seconds_text(one.cpu_s)}",
            f"{seconds_text(one.process_wall_s)} / {seconds_text(one.process_cpu_s)}",
            f"{one.wall_s / one.process_wall_s:,.0f} / {one.cpu_s / one.process_cpu_s:,.0f}",
            f"{seconds_text(one.ours.wall_s)} / {seconds_text(one.ours.cpu_s)}",
            f"{one.ours.status}, gap {_gap(one.ours.gap)}",
        )
        for one in all_
    ]
    header = (
        "problem",
        "Calculon's executions, all of them",
        "Calculon without messages, CPU",
        "milpplan with the start of Python, CPU",
        "ratio",
        "Calculon as it is, wall / CPU",
        "milpplan with the start, wall / CPU",
        "ratios",
        "milpplan without the start",
    )
    return markdown_table((*header, "proof"), rows)


def proof_table(all_: Sequence[Proof]) -> str:
    """Proofs, and Calculon's times."""
    rows = [
        (
            one.name,
            f"{one.ours.status}, gap {_gap(one.ours.gap)}",
            f"{one.ours.legal:,}",
            f"{seconds_text(one.ours.wall_s)} / {seconds_text(one.ours.cpu_s)}",
            f"{seconds_text(one.wall_s)} / {seconds_text(one.cpu_s)}",
            f"{one.theirs.executions:,} ({one.theirs.number[0]:,})",
            f"{one.theirs.cpu_s / 3600:.1f} ± {one.theirs.standard_error_s / 3600:.1f} h",
            f"{one.theirs.cpu_s / one.cpu_s:,.0f}",
            f"{one.theirs.cpu_s / 2 / one.wall_s:,.0f}",
            f"{one.stripped.cpu_s / one.cpu_s:,.0f}",
        )
        for one in all_
    ]
    header = ("problem", "milpplan", "legal layouts", "wall / CPU", "with what lies outside")
    header += (
        "Calculon's executions (estimated)",
        "CPU, extrapolated",
        "ratio of CPU",
        "of wall",
        "CPU, no messages",
    )
    return markdown_table(header, rows)


def outside_table(all_: Sequence[Proof]) -> str:
    """What of Calculon's space the searched one lacks."""
    rows = []
    for one in all_:
        outside, best = one.outside, one.ours.step_s
        number = one.theirs.number[0]
        shares = (outside.inside, outside.tiles, outside.batch, outside.interleaving)
        steps = (outside.tiles_step_s, outside.batch_step_s)
        said = ["-" if step is None or best is None else f"{100 * (step / best - 1):+.2f} %" for step in steps]
        rows.append(
            (one.name, f"{number:,}", *(percent_text(part / number) for part in shares), outside.checked, *said)
        )
    header = (
        "problem",
        "executions that Calculon estimates",
        "in the space",
        "tiles without sequence parallelism",
    )
    header += ("smaller batch", "interleaving that Megatron-LM refuses", "checked", "best with such tiles")
    return markdown_table((*header, "best with a smaller batch"), rows)


def crossed_table(all_: Sequence[Crossed]) -> str:
    """Both choices by both models, and the wider space."""
    rows = []
    for one in all_:
        ours, theirs, step = one.ours, one.theirs, one.wider.step_s
        gain = "-" if step is None else percent_text(1 - step / ours.ours_s, 2)
        rows.append(
            (
                one.name,
                ours.choice,
                theirs.choice,
                f"{seconds_text(ours.ours_s)} / {_step(theirs.ours_s, theirs.fits_ours)}",
                _needs(theirs) if not theirs.fits_ours else percent_text(theirs.ours_s / ours.ours_s - 1, 2),
                f"{_step(ours.theirs_s, ours.fits_theirs)} / {_step(theirs.theirs_s, theirs.fits_theirs)}",
                "-"
                if ours.theirs_s is None or theirs.theirs_s is None
                else percent_text(ours.theirs_s / theirs.theirs_s - 1, 2),
                f"{gain} ({one.wider.status}, gap {_gap(one.wider.gap)}): {one.wider_choice}",
            )
        )
    header = ("problem", "milpplan's choice", "Calculon's choice", "by milpplan: ours / theirs", "theirs loses")
    return markdown_table((*header, "by Calculon: ours / theirs", "ours loses", "the wider space saves"), rows)


def _needs(one: Priced) -> str:
    return f"needs {one.device_gib:.1f} GiB, {one.host_gib:.0f} of the host"


def _gap(gap: float | None) -> str:
    return "-" if gap is None else gap_text(gap)


def _step(seconds: float | None, fits: bool) -> str:
    return "-" if seconds is None else f"{seconds_text(seconds)}{'' if fits else ' (does not fit)'}"


def measured(checkout: Checkout, options: argparse.Namespace) -> dict[str, list[Any]]:
    """Every part that is asked for; each table is printed as soon as it is complete."""
    system = checkout.files("systems")[options.system]
    found: dict[str, list[Any]] = {name: [] for name in PARTS}
    told = sys.stderr if options.json else sys.stdout
    # The first proof of a process fills caches.
    solved(problem_of(checkout, system, ("megatron-5B", 8, 8))[1])
    for name in options.case if {"proofs", "choices"} & set(options.part) else ():
        print(f"{name} ...", file=sys.stderr, flush=True)
        one, result = proof(checkout, name, system, CASES[name], options.sample)
        found["proofs"].append(one)
        known = optimum(*CASES[name], options.system)
        if "choices" in options.part and known is not None:
            model, problem = problem_of(checkout, system, CASES[name])
            best = known["best"]["execution"]
            found["choices"].append(crossed(checkout, name, model, system, problem, result, best))
    if found["proofs"]:
        print(proof_table(found["proofs"]), outside_table(found["proofs"]), sep="\n\n", end="\n\n", file=told)
    if any(found["choices"]):
        print(crossed_table([one for one in found["choices"] if one]), end="\n\n", file=told, flush=True)
    for name in options.problem if "complete" in options.part else ():
        print(f"complete search of {name} ...", file=sys.stderr, flush=True)
        found["complete"].append(complete(checkout, name, options.system, options.cores))
    if found["complete"]:
        print(complete_table(found["complete"]), end="\n\n", file=told, flush=True)
        pairs = []
        for one in found["complete"]:
            model, problem = problem_of(checkout, system, PROBLEMS[one.name])
            pairs.append(crossed(checkout, one.name, model, system, problem, solved(problem)[1], one.best))
        print(crossed_table([pair for pair in pairs if pair]), end="\n\n", file=told, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Calculon's searches and milpplan's proofs.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="these problems (all)")
    parser.add_argument(
        "--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="these complete searches (all)"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (all)")
    parser.add_argument("--system", default="a100_80g", help="a system of the checkout (a100_80g)")
    parser.add_argument("--sample", type=int, default=100, help="executions that give Calculon's rate (100)")
    parser.add_argument(
        "--cores",
        type=int,
        default=os.cpu_count() or 1,
        help="processes of Calculon's complete searches (all cores)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document; the tables go to stderr")
    options = parser.parse_args(arguments)
    found = measured(load(options.checkout.resolve()), options)
    if options.json:
        document = {name: [asdict(one) for one in all_ if one] for name, all_ in found.items()}
        print(json.dumps({"measured_on": measured_on()} | document, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
