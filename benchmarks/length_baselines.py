"""Others' rules on our own cost model: `python -m benchmarks.length_baselines` (minutes of CPU).

Writes the second table of docs/lengths.md: the cases of ``benchmarks.lengths``, planned by bucketing, by HotSPa's
rules and by FlexSP's, over the same strategies and exact times, beside the best static step and ours.
"""

from __future__ import annotations

from benchmarks.lengths import ALIGNMENT, CASES, DOCUMENT, Case, workload
from benchmarks.tables import markdown_table, replace_section
from milpplan import Job, Problem, load_hardware, load_model, solve_lengths
from milpplan.lengths.records import BaselineStep, LengthsResult

PUBLISHED = {
    ("llama2-7b", 16): ((2, 4, 2), (4, 4, 1), (16, 1, 1)),
    ("qwen3-32b", 32): ((1, 16, 2), (2, 8, 2), (4, 2, 4)),
}
"""HotSPa's (dp, tp, pp) at 32K for its 7B on 16 GPUs and its 32B on 32, the longest bucket first. Source:
ccchengff/HotSPa-AE 941a18d, hotspa/scripts/llama_hot_switch.sh, buckets c1."""


def solved(case: Case, time_limit_s: float = 45.0) -> LengthsResult:
    """The step of a case with at most two strategies, and what the rules make of it."""
    job = Job(num_gpus=case.num_gpus, global_batch_size=1, sequence_length=ALIGNMENT)
    problem = Problem(model=load_model(case.model), hardware=load_hardware(case.hardware), job=job)
    given = PUBLISHED.get((case.model, case.num_gpus), ())
    return solve_lengths(
        problem, workload(case), ALIGNMENT, 2, 0.01, time_limit_s, "highs", baselines=True, hotspa=given
    )


def row(case: Case, result: LengthsResult) -> list[str]:
    """One line of the table."""
    rules = {one.rule: one for one in result.baselines}

    def cell(rule: str) -> str:
        return _shown(rules[rule], result) if rule in rules else ""

    return [
        f"{case.model}, {case.num_gpus} x {case.hardware}",
        f"{case.law}, to {case.longest // 1024}K",
        *(cell(rule) for rule in ("bucketing", "HotSPa", "HotSPa, its strategies", "FlexSP")),
        ", ".join(rules["HotSPa"].strategies),
        f"{result.static.step_time_s:.3f}",
        f"{result.step_time_s:.3f}",
        f"{result.lower_bound_s:.3f}",
    ]


def _shown(step: BaselineStep, result: LengthsResult) -> str:
    if step.step_time_s is None:
        return "none"
    return f"{step.step_time_s:.3f} ({step.step_time_s / result.step_time_s - 1:+.1%})"


def main() -> None:
    """Solve everything and write the table."""
    rows = []
    for case in CASES:
        rows.append(row(case, solved(case)))
        print(" | ".join(rows[-1]), flush=True)
    rules = ["bucketing", "HotSPa's rules", "HotSPa's strategies", "FlexSP's rules"]
    header = ["job", "lengths", *rules, "strategies by HotSPa's rules", "best static", "this step", "bound"]
    replace_section(DOCUMENT, "baselines", markdown_table(header, rows))


if __name__ == "__main__":
    main()
