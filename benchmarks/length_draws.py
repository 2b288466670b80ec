"""How near steps of several lengths are proved in jobs that nobody chose.

    python -m benchmarks.length_draws [--number 36] [--seed 23] [--far] [--time-limit 30]

Models, clusters, laws and longest lengths of ``benchmarks.length_jobs``, in combinations that a seed gives. Each
job is solved once over the whole space: at most two strategies in turn, or degrees side by side. Times are of idle
cores. About 20 seconds a job. ``--far`` are those that were farthest from a proof when they were found, of another
seed and by hand: what it is worst at.
"""

from __future__ import annotations

import argparse
import random

from benchmarks.length_jobs import ALIGNMENT, Case, K, Law, LogNormalLaw, ParetoTail, Wikipedia
from benchmarks.lengths import GAP, MAX_STRATEGIES, strategies
from milpplan import solve_lengths
from milpplan.lengths.records import LengthsResult

GPUS = {"llama2-7b": (16, 32, 64), "llama2-13b": (16, 32, 64), "llama-33b": (32, 64), "qwen3-32b": (32, 64)}
HARDWARE = ("dgx-a100-80", "dgx-h100")
LONGEST = (8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
LAWS: tuple[Law, ...] = (
    *(Wikipedia(), Wikipedia(first=512), Wikipedia(first=1024), Wikipedia(1024), Wikipedia(2048)),
    *(LogNormalLaw(0.8), LogNormalLaw(), LogNormalLaw(1.5)),
    *(ParetoTail(3.0), ParetoTail(1.5), ParetoTail(0.9)),
)
CONTEXT_SHARE = 0.6
HEADER = ("job", "lengths", "best step", "bound", "gap", "its strategies", "wall s")
EDGES = (0.01, 0.015, 0.02)


def drawn(number: int, seed: int) -> list[Case]:
    """So many different jobs."""
    found: dict[Case, None] = {}
    source = random.Random(seed)
    while len(found) < number:
        model = source.choice(list(GPUS))
        hardware, num_gpus = source.choice(HARDWARE), source.choice(GPUS[model])
        longest, law = source.choice(LONGEST), source.choice(LAWS)
        found[Case(model, hardware, num_gpus, longest, law, source.random() < CONTEXT_SHARE)] = None
    return list(found)


def far() -> list[Case]:
    """Jobs that were far from a proof when they were found."""
    found = drawn(10, 24)
    return [
        *(found[place] for place in (4, 8, 9)),
        Case("llama2-13b", "dgx-h100", 32, 8 * K, LogNormalLaw(1.5)),
        Case("llama-33b", "dgx-h100", 64, 8 * K, LogNormalLaw(1.5)),
        Case("llama-33b", "dgx-a100-80", 32, 64 * K, ParetoTail(0.9), context=False),
    ]


def row(case: Case, result: LengthsResult) -> list[str]:
    """One job."""
    return [
        case.job,
        f"{case.sequences} ({result.num_tokens // 1000:,}K tokens)",
        f"{result.step_time_s:.3f}",
        f"{result.lower_bound_s:.3f}",
        f"{result.gap:.2%}",
        strategies(result),
        f"{result.wall_time_s:.0f}",
    ]


def summary(gaps: list[float]) -> str:
    """Count the jobs that are proved to each gap."""
    # As printed: two digits of a per cent.
    counts = [f"{sum(round(gap, 4) <= edge for gap in gaps)} to {edge:.1%}" for edge in EDGES]
    return f"Of {len(gaps)} jobs, {', '.join(counts)} are proved; the largest gap is {max(gaps):.1%}."


def main() -> None:
    """Solve the jobs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=36, help="jobs (36)")
    parser.add_argument("--seed", type=int, default=23, help="of the draw (23)")
    parser.add_argument("--far", action="store_true", help="the jobs that were farthest from a proof instead")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a job (30)")
    words = parser.parse_args()
    if words.number < 1:
        parser.error("one job at least is expected for --number")
    rows, gaps = [], []
    for case in far() if words.far else drawn(words.number, words.seed):
        limits = GAP, words.time_limit, "highs"
        result = solve_lengths(case.problem, case.workload, ALIGNMENT, MAX_STRATEGIES, *limits)
        gaps.append(result.gap)
        rows.append(row(case, result))
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{summary(gaps)}")


if __name__ == "__main__":
    main()
