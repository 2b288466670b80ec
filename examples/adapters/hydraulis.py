"""Hydraulis' dispatch and packing as one problem: pipelines of different make side by side, proved.

Hydraulis (github.com/PKU-DAIR/Hetu, main at 9e47240, examples/hydraulis/strategy) is given a few strategies,
each a list of pipelines (tp, pp) on disjoint GPUs, and one regression for every kind of pipeline: a sequence of
s tokens takes a s^2 + b s ms of a slot, a micro-batch c more. For one batch it first deals sequences out to
pipelines, then packs every pipeline's into v micro-batches, and prices a pipeline as

    (max_m t_m + c) (pp - 1 + v)                                                                       (estimate)

It takes the strategy whose slowest pipeline is estimated lowest. A pipeline whose micro-batches differ takes
less: (estimate) lets every slot last as long as the longest. Here all strategies are in one problem, dealing out
and packing are decided together, times are those of 1F1B with the micro-batches as they are, and the bound is
one for all strategies. Source: cost_model.py (times, memory), new_dynamic.py (choice), dynamic_pulp.py (packing,
estimate).

    python examples/adapters/hydraulis.py [case]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milpplan.lengths.tabled.problem import GroupedProblem, Pipeline, Strategy, SwitchTimes, pipeline_times_ns
from milpplan.lengths.tabled.search import solve_groups
from milpplan.lengths.workload import workload_of

CASES = Path(__file__).with_name("hydraulis_cases.json")
ALIGNMENT = 128
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The best strategy (its index), the lengths in every micro-batch of every pipeline in the strategy's order,
    ms of the slowest pipeline, the proved bound over all strategies, and CPU seconds."""

    strategy: int
    pipelines: tuple[tuple[tuple[int, ...], ...], ...]
    time_ms: float
    bound_ms: float
    cpu_s: float


def max_seqlen(pool: dict[str, Any], tp: int, pp: int, home: Sequence[int]) -> int:
    """Most tokens of a micro-batch beside the optimizer states of ``home`` (dp, tp, pp), a multiple of 128.

    Source: cost_model.py, get_strategy_max_seqlen.
    """
    model, memory, cluster = pool["model_config"], pool["memory_regression"], pool["cluster_config"]
    layers, hidden, vocabulary = model["L"], model["H"], model["V"]
    dp0, tp0, pp0 = home
    moved, state = memory["alpha"], memory["B"]
    blocks = layers * hidden**2 * state * (moved / (pp0 * tp0 * dp0) + (1 - moved) / (pp * tp))
    ends = [32 if stages == 1 else 16 for stages in (pp0, pp)]
    tables = hidden * vocabulary * (ends[0] * moved / (tp0 * dp0) + ends[1] * (1 - moved) / tp)
    free = cluster["gpu_memory_bound"] - memory["safe_bound"] - memory["gap"]["node"] - blocks - tables
    tokens = free / (layers * hidden / tp * memory["A"][f"tp{tp}"])
    return max(0, int(tokens // ALIGNMENT) * ALIGNMENT)


def pipeline(pool: dict[str, Any], tp: int, pp: int, tokens: int) -> Pipeline:
    """One kind of pipeline with micro-batches of so many ``tokens``; a third of a slot is forward."""
    row = next(one for one in pool["strategies"] if (one["tp"], one["pp"]) == (tp, pp))
    a_ns, b_ns, c_ns = (row[name] * NS_PER_MS for name in ("a", "b", "c"))
    return Pipeline(f"tp{tp} pp{pp}", pp, a_ns, b_ns, c_ns, tokens, num_gpus=tp * pp)


def problem_of(
    pool: dict[str, Any],
    strategies: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
) -> GroupedProblem:
    """The batch under one of the ``strategies`` (lists of (tp, pp)); the first one, of equal pipelines, holds the
    optimizer. ``tokens`` of every pipeline's micro-batches, by ``max_seqlen`` unless given."""
    first = strategies[0]
    home = (len(first), *first[0])
    kinds = []
    for number, pairs in enumerate(strategies):
        held = [max_seqlen(pool, *pair, home) for pair in pairs] if tokens is None else tokens[number]
        side_by_side = Counter(pipeline(pool, *pair, most) for pair, most in zip(pairs, held, strict=True))
        kinds.append(Strategy(name_of(pairs), tuple(side_by_side.items())))
    steps = workload_of(list(lengths))
    return GroupedProblem(steps.lengths, steps.counts, tuple(kinds), SwitchTimes.free(len(kinds)), 1)


def name_of(pairs: Sequence[Sequence[int]]) -> str:
    """A strategy in words."""
    counts = Counter((tp, pp) for tp, pp in pairs)
    return " + ".join(f"{count} x (tp{tp}, pp{pp})" for (tp, pp), count in counts.items())


def planned(
    pool: dict[str, Any],
    strategies: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
    relative_gap: float = 0.01,
    time_limit_s: float = 20.0,
) -> Answer:
    """The best strategy for a batch with its dispatch and packing, and what no strategy undercuts."""
    problem = problem_of(pool, strategies, lengths, tokens)
    found = solve_groups(problem, "auto", relative_gap, time_limit_s)
    (group,) = found.plan.groups
    rows = {packing.kind.pipeline: iter(packing.replicas) for packing in group.packings}
    pairs = strategies[group.strategy]
    held = {(one.num_gpus // one.num_stages, one.num_stages): one for one in rows}
    pipelines = tuple(
        tuple(tuple(np.repeat(problem.lengths, row).tolist()) for row in next(rows[held[tp, pp]]))
        for tp, pp in pairs
    )
    return Answer(
        group.strategy,
        pipelines,
        found.plan.time_ns / NS_PER_MS,
        found.bound_ns / NS_PER_MS,
        found.cpu_time_s,
    )


def estimate_ms(pool: dict[str, Any], tp: int, pp: int, micro_batches: Sequence[Sequence[int]]) -> float:
    """(estimate) of a pipeline's micro-batches, given as lengths."""
    slots = slots_ms(pool, tp, pp, micro_batches)
    return max(slots) * (pp - 1 + len(slots)) if slots else 0.0


def slots_ms(pool: dict[str, Any], tp: int, pp: int, micro_batches: Sequence[Sequence[int]]) -> list[float]:
    """What every micro-batch takes of a slot."""
    row = next(one for one in pool["strategies"] if (one["tp"], one["pp"]) == (tp, pp))
    return [sum(row["a"] * s * s + row["b"] * s for s in one) + row["c"] for one in micro_batches]


def simulated_ms(pp: int, slots: Sequence[float]) -> float:
    """1F1B with micro-batches of these slots, in this order: a longest path."""
    stages = Pipeline("", pp, 0.0, 0.0, 0.0, 1)
    units = np.rint(np.array(slots) * NS_PER_MS / stages.parts).astype(np.int64)
    return float(pipeline_times_ns(stages, units)) / NS_PER_MS


def cases() -> dict[str, Any]:
    """Its own runs by name: lengths, strategies, its packings and estimates; and ``pools``."""
    content = json.loads(CASES.read_text(encoding="utf-8"))
    return {case["case"]: {**case, "pool": content["pools"][case["pool"]]} for case in content["cases"]}


def pools() -> dict[str, Any]:
    """Its published regressions by model."""
    content: dict[str, Any] = json.loads(CASES.read_text(encoding="utf-8"))["pools"]
    return content


def own_times_ms(result: dict[str, Any]) -> tuple[float, float]:
    """Hydraulis' packing of one strategy: its estimate, and what the same packing takes."""
    slots = list(zip(result["strategy"], result["micro_ms"], strict=True))
    estimate = max(max(one) * (pp - 1 + len(one)) for (_, pp), one in slots)
    return estimate, max(simulated_ms(pp, one) for (_, pp), one in slots)


def main() -> None:
    """Plan the cases (or those whose names begin with the argument) and print what Hydraulis chose beside it."""
    for name, case in cases().items():
        if not name.startswith(sys.argv[1] if len(sys.argv) > 1 else ""):
            continue
        results = case["results"]
        chosen = min(results, key=lambda one: own_times_ms(one)[0])
        estimate, own = own_times_ms(chosen)
        print(
            f"{name}: Hydraulis picks {name_of(chosen['strategy'])}, estimated {estimate:.0f} ms, takes {own:.0f}"
        )
        answer = planned(
            case["pool"],
            [one["strategy"] for one in results],
            case["lengths"],
            [one["max_seqlen"] for one in results],
        )
        print(f"  here {name_of(results[answer.strategy]['strategy'])}: {answer.time_ms:.0f} ms,", end=" ")
        print(f"bound {answer.bound_ms:.0f} over all; {answer.cpu_s:.1f} s of CPU")


if __name__ == "__main__":
    main()
