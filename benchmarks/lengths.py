"""Steps of several lengths on this project's own cost model: `python -m benchmarks.lengths` (minutes of CPU).

Writes the table of docs/lengths.md. Wikipedia's lengths are those of data/length_groups.json (with its source);
the other laws are fitted to them and varied: the body is theirs, the tail a Pareto law of the exponent given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.length_groups import data
from benchmarks.tables import markdown_table, replace_section
from milpplan import Job, Problem, Workload, load_hardware, load_model, solve_lengths, workload_of
from milpplan.groups.distributions import LogNormal, Mixture, Pareto
from milpplan.lengths.records import LengthsResult

DOCUMENT = Path(__file__).parents[1] / "docs" / "lengths.md"
ALIGNMENT, NUM_SEQUENCES, TAIL_SHARE = 128, 512, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster, and sequences: Wikipedia's, or with a tail of another exponent; cut at ``longest``."""

    model: str
    hardware: str
    num_gpus: int
    longest: int
    tail: float | None = None

    @property
    def law(self) -> str:
        """The lengths in words."""
        return "Wikipedia" if self.tail is None else f"Pareto tail {self.tail:g}"


CASES = (
    Case("llama2-7b", "dgx-a100-80", 16, 32_768),
    Case("llama2-7b", "dgx-a100-80", 16, 8_192, 3.0),
    Case("llama2-7b", "dgx-a100-80", 16, 65_536, 0.9),
    Case("llama2-13b", "dgx-a100-80", 32, 32_768),
    Case("llama2-13b", "dgx-h100", 32, 131_072, 0.9),
    Case("qwen3-32b", "dgx-h100", 32, 32_768),
    Case("qwen3-32b", "dgx-h100", 64, 131_072, 0.9),
)


def workload(case: Case) -> Workload:
    """512 sequences from a fixed seed."""
    wikipedia = np.array(data()["steps"][0]["lengths"], dtype=np.int64)
    if case.tail is None:
        return workload_of(wikipedia, ALIGNMENT, case.longest)
    edge = float(np.quantile(wikipedia, 1 - TAIL_SHARE))
    body = LogNormal.fitted(wikipedia[wikipedia <= edge])
    law = Mixture(((1 - TAIL_SHARE, body), (TAIL_SHARE, Pareto(edge, case.tail))))
    drawn = law.draw(NUM_SEQUENCES, np.random.default_rng(1))
    return workload_of(drawn, ALIGNMENT, case.longest)


def solved(case: Case, time_limit_s: float = 90.0) -> LengthsResult:
    """The step of a case with at most two strategies."""
    job = Job(num_gpus=case.num_gpus, global_batch_size=1, sequence_length=ALIGNMENT)
    problem = Problem(model=load_model(case.model), hardware=load_hardware(case.hardware), job=job)
    return solve_lengths(problem, workload(case), ALIGNMENT, 2, 0.01, time_limit_s, "highs")


def row(case: Case, result: LengthsResult) -> list[str]:
    """One line of the table."""
    static = result.static
    static_gap = 1 - static.lower_bound_s / static.step_time_s
    return [
        f"{case.model}, {case.num_gpus} x {case.hardware}",
        f"{case.law}, to {case.longest // 1024}K ({result.num_tokens // 1000:,}K tokens)",
        f"{static.step_time_s:.3f} ({static_gap:.1%})",
        static.strategy,
        f"{result.step_time_s:.3f}",
        f"{result.lower_bound_s:.3f}",
        f"{result.gap:.1%}",
        " -> ".join(result.order),
        f"{result.speedup:.3f}x",
        f"{result.cpu_time_s:.0f}",
    ]


def main() -> None:
    """Solve everything and write the table."""
    header = ["job", "lengths", "best static (gap)", "its strategy", "this step", "bound", "gap"]
    rows = []
    for case in CASES:
        rows.append(row(case, solved(case)))
        print(" | ".join(rows[-1]), flush=True)
    replace_section(DOCUMENT, "lengths", markdown_table([*header, "strategies in order", "gain", "CPU s"], rows))


if __name__ == "__main__":
    main()
