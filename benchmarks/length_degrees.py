"""Degrees side by side on our own cost model: `python -m benchmarks.length_degrees` (minutes of CPU).

Writes the third table of docs/lengths.md: the cases of ``benchmarks.lengths`` with context parallelism of several
degrees at once in the space, beside the best static step and FlexSP's rules.
"""

from __future__ import annotations

from benchmarks.lengths import ALIGNMENT, CASES, DOCUMENT, Case, workload
from benchmarks.tables import markdown_table, replace_section
from milpplan import Job, Problem, load_hardware, load_model, solve_lengths
from milpplan.lengths.records import LengthsResult


def solved(case: Case, time_limit_s: float = 45.0) -> LengthsResult:
    """The step of a case: degrees side by side, or at most two strategies in turn."""
    job = Job(num_gpus=case.num_gpus, global_batch_size=1, sequence_length=ALIGNMENT)
    problem = Problem(model=load_model(case.model), hardware=load_hardware(case.hardware), job=job)
    return solve_lengths(
        problem, workload(case), ALIGNMENT, 2, 0.01, time_limit_s, "highs", baselines=True, side_by_side=True
    )


def row(case: Case, result: LengthsResult) -> list[str]:
    """One line of the table."""
    flexsp = next(one.step_time_s for one in result.baselines if one.rule == "FlexSP")
    longer = "none" if flexsp is None else f"{flexsp:.3f} ({flexsp / result.step_time_s - 1:+.1%})"
    return [
        f"{case.model}, {case.num_gpus} x {case.hardware}",
        f"{case.law}, to {case.longest // 1024}K",
        f"{result.static.step_time_s:.3f}",
        longer,
        f"{result.step_time_s:.3f}",
        f"{result.lower_bound_s:.3f}",
        f"{result.gap:.1%}",
        f"{result.speedup:.3f}x",
        (" + " if result.is_side_by_side else " -> ").join(result.order),
        f"{result.cpu_time_s:.0f}",
    ]


def main() -> None:
    """Solve everything and write the table."""
    rows = []
    for case in CASES:
        rows.append(row(case, solved(case)))
        print(" | ".join(rows[-1]), flush=True)
    header = ["job", "lengths", "best static", "FlexSP's rules", "this step", "bound", "gap", "gain"]
    replace_section(DOCUMENT, "degrees", markdown_table([*header, "strategies", "CPU s"], rows))


if __name__ == "__main__":
    main()
