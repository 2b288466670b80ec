"""Complete searches of Calculon's, by its own program to the end, beside proofs of the same problems.

Problems small enough for that. Calculon's program runs with as many processes as it is given cores, as it is
meant to; milpplan's proof is a fresh process of its own, so that the start of Python and the imports are measured
too. It is run twice, and the second one counts: the first one compiles what is not compiled yet, which an
installed package is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.calculon_full import whole_space
from benchmarks.calculon_side import Checkout, Tree, copy_without_messages, search_problem
from benchmarks.tables import layout_text
from milpplan import PlanResult, Problem, solve
from milpplan.optimize.search.closed_layouts import FATES

PROBLEMS = {
    "5b-2": ("megatron-5B", 2, 2),
    "22b-2": ("megatron-22B", 2, 2),
    "126m-4": ("megatron-126M", 4, 4),
    "5b-4": ("megatron-5B", 4, 4),
}
"""Model, processors and batch; 22b-2 needs the second memory. Calculon's searches take from 20 s to minutes."""
GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Solved:
    """One proof: status, gap, step, seconds of ``solve``, legal layouts and what they were sieved from."""

    status: str
    gap: float | None
    step_s: float | None
    wall_s: float
    cpu_s: float
    legal: int
    enumerated: int
    plan: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Both of one problem.

    Attributes:
        quiet_wall_s: Wall seconds of Calculon's program without its debug messages.
        quiet_cpu_s: CPU seconds of that.
        process_wall_s: Wall seconds of milpplan with the start of Python.
        process_cpu_s: CPU seconds of that.
    """

    name: str
    cores: int
    executions: int
    good: int
    wall_s: float
    cpu_s: float
    quiet_wall_s: float
    quiet_cpu_s: float
    best: Tree
    best_step_s: float
    ours: Solved
    process_wall_s: float
    process_cpu_s: float


def solved(problem: Problem, limit_s: float | None = None, **options: Any) -> tuple[Solved, PlanResult]:
    """Prove, and measure."""
    cpu, wall = time.process_time(), time.monotonic()
    result = solve(problem, time_limit_s=limit_s, gap=GAP, **options)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    fates = result.layouts
    legal = 0 if fates is None else sum(fates.count(fate) for fate in FATES)
    text = "-" if result.plan is None else layout_text(result.plan)
    enumerated = 0 if fates is None else fates.space.enumerated
    return Solved(result.status, result.gap, result.step_time_s, wall, cpu, legal, enumerated, text), result


def complete(checkout: Checkout, name: str, system_name: str, cores: int) -> Complete:
    """Calculon's search to its end, then the proof."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = copy_without_messages(checkout, Path(folder))
        quiet_wall_s, quiet_cpu_s, _, _ = _searched(quiet, name, system_name, cores)
    wall_s, cpu_s, said, best = _searched(checkout.path, name, system_name, cores)
    told = ["-m", "benchmarks.calculon_complete", str(checkout.path), "--prove", name, "--system", system_name]
    _run(told, {})
    process_wall_s, process_cpu_s, answer = _run(told, {})
    ours = Solved(**json.loads(answer))
    return Complete(
        name=name,
        cores=cores,
        executions=_counted(said, "Total executions"),
        good=_counted(said, "Good executions"),
        wall_s=wall_s,
        cpu_s=cpu_s,
        quiet_wall_s=quiet_wall_s,
        quiet_cpu_s=quiet_cpu_s,
        best=best["execution"],
        best_step_s=best["stats"]["total_time"],
        ours=ours,
        process_wall_s=process_wall_s,
        process_cpu_s=process_cpu_s,
    )


def _searched(path: Path, name: str, system_name: str, cores: int) -> tuple[float, float, str, Tree]:
    """Run the program of a checkout to its end.

    Returns:
        Wall seconds, CPU seconds, the program's log and its best execution.
    """
    model_name, procs, batch = PROBLEMS[name]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "best.json"
        parts = [str(path / "bin" / "calculon"), "llm-optimal-execution"]
        parts += [str(path / "models" / f"{model_name}.json"), str(procs), str(batch), "float16"]
        parts += [str(path / "systems" / f"{system_name}.json"), str(output), "-c", str(cores), "-t", "1"]
        wall_s, cpu_s, said = _run(parts, {"PYTHONPATH": str(path)})
        return wall_s, cpu_s, said, json.loads(output.read_text(encoding="utf-8"))["0"]


def _run(arguments: Sequence[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds of the process and its children, and what it printed."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *arguments], env=own | environment, capture_output=True, text=True, check=False
    )
    wall, after = time.monotonic() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu_s, done.stdout if done.stdout.strip() else done.stderr


def _counted(said: str, what: str) -> int:
    """A count that Calculon's program logs."""
    line = next(line for line in said.splitlines() if what in line)
    return int(line.rpartition(":")[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prove one problem in this process, and print it as JSON."""
    parser = argparse.ArgumentParser(description="A proof of one problem in a process of its own.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--prove", choices=PROBLEMS, required=True, help="the problem")
    parser.add_argument("--system", default="a100_80g", help="a system of the checkout (a100_80g)")
    options = parser.parse_args(arguments)
    model_name, procs, batch = PROBLEMS[options.prove]
    model, system = (
        json.loads((options.checkout / kind / f"{name}.json").read_text(encoding="utf-8"))
        for kind, name in (("models", model_name), ("systems", options.system))
    )
    print(json.dumps(asdict(solved(search_problem(model, system, procs, batch, whole_space()))[0])))


if __name__ == "__main__":
    main()
