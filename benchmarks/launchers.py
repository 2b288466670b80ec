"""Ten models on ten clusters, for every launcher: the best plan that it can run, exported, read back, simulated.

    python -m benchmarks.launchers [--space uniform|free] [--time-limit 60] [--out benchmarks/results/launchers.md]

Prints, for every pair, the proved best step of any launcher and what each launcher's best takes more; a launcher
that cannot run the model at all has its reason below the table. Every plan must come back from its files field by
field, at the same step time to the nanosecond and the same peak memory; the program ends with 1 if one does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import markdown_table, replace_section
from milpplan import Job, Plan, Problem, load_hardware, load_model, simulate, solve
from milpplan.errors import MilpplanError
from milpplan.launchers.records import ImportRequest
from milpplan.launchers.targets import TARGETS, restrict
from milpplan.problem.problem import SPACES
from milpplan.units import NS_PER_S
from milpplan.version import __version__

PAIRS = (
    ("llama2-7b", "dgx-a100-80", 16, 64),
    ("llama3-8b", "dgx-h100", 16, 64),
    ("mistral-7b", "dgx-h200", 8, 64),
    ("llama2-13b", "dgx-a100-40", 32, 128),
    ("qwen3-32b", "dgx-h100", 64, 256),
    ("llama3-70b", "dgx-h100", 64, 128),
    ("llama2-70b", "dgx-b200", 64, 256),
    ("mixtral-8x7b", "dgx-h100", 32, 256),
    ("qwen3-30b-a3b", "dgx-h200", 32, 256),
    ("gpt3-175b", "dgx-a100-80", 256, 512),
)


@dataclass(frozen=True)
class Cell:
    """A launcher's best plan of a pair: step, or why there is none."""

    step_ns: int | None
    why: str = ""
    lost: bool = False


def main() -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", choices=("uniform", "free"), default="uniform")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="A page whose section `launchers` is replaced.")
    words = parser.parse_args()
    started, rows, lost = time.process_time(), [], 0
    reasons: dict[tuple[str, str], list[str]] = {}
    for model, hardware, gpus, batch in PAIRS:
        whole = problem_of(model, hardware, gpus, batch, words.space)
        best = solve(whole, time_limit_s=words.time_limit, gap=1e-4)
        assert best.report is not None
        cells = {name: cell_of(whole, name, words.time_limit) for name in TARGETS}
        lost += sum(cell.lost for cell in cells.values())
        for name, cell in cells.items():
            if cell.why:
                reason = cell.why.partition("reason(s): ")[2].replace(model, "this model") or cell.why
                reasons.setdefault((name, reason), []).append(model)
        # A launcher that recomputes in its own way may be faster than every plan of the space.
        least_ns = min(best.report.step_time_ns, *(cell.step_ns for cell in cells.values() if cell.step_ns))
        more = [shown(cell, least_ns) for cell in cells.values()]
        rows.append([f"{model}, {gpus} x {hardware}, batch {batch}", f"{least_ns / NS_PER_S:.4g} s", *more])
        print(" | ".join(rows[-1]), flush=True)
    known = [target.capability for target in TARGETS.values()]
    versions = ", ".join(f"{one.name} {one.versions[0]}" for one in known)
    spent_s = time.process_time() - started
    lines = [
        f"`python -m benchmarks.launchers --space {words.space}`, {spent_s:.0f} CPU seconds; {versions}.",
        "",
        markdown_table(["job", "best of any", *TARGETS], rows),
        "",
        "Why a launcher cannot run a job:",
        "",
        *(f"- {name}, {', '.join(models)}: {reason}" for (name, reason), models in sorted(reasons.items())),
    ]
    print("\n".join(lines))
    if words.out:
        replace_section(words.out, "launchers", "\n".join(lines))
    if lost:
        print(f"{lost} plans did not come back as they were.", file=sys.stderr)
    return int(lost > 0)


def problem_of(model: str, hardware: str, gpus: int, batch: int, space: str) -> Problem:
    """A job of a pair, with the model's own sequence length, 4,096 tokens at most."""
    spec = load_model(model)
    length = min(spec.default_sequence_length, 4096)
    job = Job(num_gpus=gpus, global_batch_size=batch, sequence_length=length)
    return Problem(model=spec, hardware=load_hardware(hardware), job=job, space=SPACES[space])


def cell_of(whole: Problem, name: str, limit_s: float) -> Cell:
    """Restrict, solve, export, read back, simulate."""
    target = TARGETS[name]
    try:
        problem = restrict(whole, name, stack=False)
    except MilpplanError as error:
        return Cell(None, error.seen)
    result = solve(problem, time_limit_s=limit_s, gap=1e-4)
    if result.plan is None or result.report is None:
        return Cell(None, f"no plan ({result.status})")
    launch = target.export(problem, result.plan, target.capability.versions[0])
    file, text = next(iter(target.files(launch, __version__).items()))
    found = target.read(ImportRequest(text, file, whole.hardware, model=problem.model))
    same = same_plan(problem, found.plan, result.plan)
    again, planned = simulate(found.problem, found.plan), result.report
    same = same and again.step_time_ns == planned.step_time_ns
    return Cell(planned.step_time_ns, lost=not same or again.peak_memory_bytes != planned.peak_memory_bytes)


def same_plan(problem: Problem, found: Plan, plan: Plan) -> bool:
    """Equal, but for what changes nothing: orders of the ranks that place everything alike, modules of selective
    recomputation where no layer has it, and the name of the dispatch that the hardware has by default."""
    untold = {"rank_order": plan.layout.rank_order}
    named = "deepep" if problem.hardware.software.deduplicated_dispatch else "alltoall"
    if (plan.layout.expert_dispatch, found.layout.expert_dispatch) == ("default", named):
        untold["expert_dispatch"] = "default"
    if not plan.selects:
        untold["recompute_modules"] = plan.layout.recompute_modules
    return found.layout.model_copy(update=untold) == plan.layout and found.virtual_stages == plan.virtual_stages


def shown(cell: Cell, least_ns: int) -> str:
    """What a launcher's best takes more than the best of any."""
    if cell.step_ns is None:
        return "-"
    if cell.lost:
        return "lost"
    return f"+{100 * (cell.step_ns / least_ns - 1):.2f} %"


if __name__ == "__main__":
    sys.exit(main())
