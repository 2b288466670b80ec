"""FlexSP's assignment: groups of sequence parallelism of different degree side by side, proved.

FlexSP (github.com/PKU-DAIR/Hetu-Galvatron, branch flexsp at b466689, galvatron/flexsp_solver/solver.py) cuts a
batch into M micro-batches, the longest sequences first, so that the fullest holds the fewest tokens, for M from
the least that fits to four more; then it fills the cluster with groups of 2, 4, ... GPUs for each micro-batch
and deals its sequences out to them, by an integer program over 16 buckets of lengths that SCIP gets 5 to 10 s
for. A group of d GPUs takes for its sequences s

    beta1 + sum_s [(alpha1 s^2 + alpha2 s) / d + 16 L h s / (2^20 d v_d)]                              ms

with v_d the all-to-all rate of d GPUs in GB/s, and holds ``device_token_capacity`` d tokens. Here every way to
fill the cluster is a strategy with different replicas, sequences keep their own lengths, and each micro-batch
comes with a bound. The bound of a batch is that of its cut into micro-batches.

    python examples/adapters/flexsp.py [case]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.lengths.bounds.count_cuts import PipelineCuts
from milpplan.lengths.tabled.problem import GroupedProblem, Pipeline, Strategy, SwitchTimes
from milpplan.lengths.tabled.search import GroupedResult, ranked_sets, solve_groups
from milpplan.lengths.workload import workload_of

CASES = Path(__file__).with_name("flexsp_cases.json")
NS_PER_MS = 1e6
# FlexSP leaves out groups of one GPU.
_LEAST_DEGREE = 2
# Numbers of micro-batches that it tries.
_OPTIONS = 5

Groups = tuple[tuple[int, tuple[int, ...]], ...]
"""Groups of a micro-batch: the degree and the lengths of each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Groups of every micro-batch, their ms together, the bound for this cut into micro-batches, CPU seconds."""

    micro_batches: tuple[Groups, ...]
    time_ms: float
    bound_ms: float
    cpu_s: float


def group_ms(config: dict[str, Any], degree: int, lengths: Sequence[int]) -> float:
    """Time of one group, by FlexSP's cost model."""
    per_sequence = (
        config["cpt_alpha1"] * s * s + config["cpt_alpha2"] * s + _all_to_all_ms(config, degree) * s
        for s in lengths
    )
    return float(config["cpt_beta1"] + sum(per_sequence) / degree)


def _all_to_all_ms(config: dict[str, Any], degree: int) -> float:
    """Eight all-to-alls of bf16 a token of every layer, ms a token of one GPU."""
    return float(16 * config["layers"] * config["hidden"] / 2**20 / config["alltoall_GBs"][str(degree)])


def problem_of(config: dict[str, Any], lengths: Sequence[int]) -> GroupedProblem:
    """One micro-batch: every way to fill the cluster with groups is a strategy, of which one is chosen."""
    degrees = []
    while (degree := _LEAST_DEGREE << len(degrees)) <= config["cluster_size"]:
        degrees.append(degree)
    pipelines = {degree: _group(config, degree) for degree in degrees}
    workload = workload_of(list(lengths))
    mixes = (tuple((pipelines[degree], number) for degree, number in mix) for mix in _mixes(config, degrees))
    strategies = [Strategy(" + ".join(f"{n} x {one.name}" for one, n in mix), mix) for mix in mixes]
    fitting = tuple(one for one in strategies if one.holds(workload.lengths).all())
    if not fitting:
        raise InfeasibleError(
            f"A sequence of {max(lengths)} tokens fits into no group.",
            f"At most {config['device_token_capacity'] * config['cluster_size']} tokens on all GPUs expected.",
        )
    return GroupedProblem(
        workload.lengths, workload.counts, fitting, SwitchTimes.free(len(fitting)), max_strategies=1
    )


def _group(config: dict[str, Any], degree: int) -> Pipeline:
    linear_ms = (config["cpt_alpha2"] + _all_to_all_ms(config, degree)) / degree
    return Pipeline(
        f"sp{degree}",
        1,
        config["cpt_alpha1"] / degree * NS_PER_MS,
        linear_ms * NS_PER_MS,
        config["cpt_beta1"] * NS_PER_MS,
        config["device_token_capacity"] * degree,
        max_micro_batches=1,
        num_gpus=degree,
    )


def _mixes(config: dict[str, Any], degrees: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Pairs (degree, number) that use all GPUs."""

    def rest(gpus: int, left: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        if not left:
            if gpus == 0:
                yield ()
            return
        for number in range(gpus // left[-1] + 1):
            mine = ((left[-1], number),) if number else ()
            yield from (mine + others for others in rest(gpus - number * left[-1], left[:-1]))

    return rest(config["cluster_size"], degrees)


def split(lengths: Sequence[int], number: int) -> list[list[int]]:
    """``number`` runs of the sequences, longest first, so that the fullest holds the fewest tokens.

    Dynamic program over the ends of the runs: F[m, i] = min_j max(F[m - 1, j], tokens from j to i).
    """
    ordered = np.sort(np.asarray(lengths, np.int64))[::-1]
    sums = np.concatenate(([0], np.cumsum(ordered)))
    least = sums.copy()
    starts = []
    for _ in range(number - 1):
        table = np.maximum(least[None, :], sums[:, None] - sums[None, :])
        table[np.triu_indices(len(sums), 1)] = sums[-1] + 1
        starts.append(table.argmin(axis=1))
        least = table.min(axis=1)
    ends = [len(ordered)]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    bounds = [0, *reversed(ends)]
    return [ordered[a:b].tolist() for a, b in pairwise(bounds) if b > a]


def planned(
    config: dict[str, Any], lengths: Sequence[int], relative_gap: float = 0.01, time_limit_s: float = 10.0
) -> Answer:
    """The best of FlexSP's cuts of a batch into micro-batches, each planned in at most ``time_limit_s``."""
    fewest = -(-sum(lengths) // (config["cluster_size"] * config["device_token_capacity"]))
    best: Answer | None = None
    for number in range(fewest, fewest + _OPTIONS):
        problems = [problem_of(config, part) for part in split(lengths, number)]
        least_ms = sum(_quick_bound_ms(one) for one in problems)
        if best is not None and least_ms >= best.time_ms:
            continue
        answer = _together([solve_groups(one, "highs", relative_gap, time_limit_s) for one in problems])
        if best is None or answer.time_ms < best.time_ms:
            best = answer
    assert best is not None
    return best


def _quick_bound_ms(problem: GroupedProblem) -> float:
    """The first bound of the search, before any program."""
    return ranked_sets(problem, {kind: PipelineCuts(kind) for kind in problem.kinds})[0].bound_ns / NS_PER_MS


def _together(results: Sequence[GroupedResult]) -> Answer:
    return Answer(
        tuple(groups_of(one) for one in results),
        sum(one.plan.time_ns for one in results) / NS_PER_MS,
        sum(one.bound_ns for one in results) / NS_PER_MS,
        sum(one.cpu_time_s for one in results),
    )


def groups_of(result: GroupedResult) -> Groups:
    """A micro-batch in FlexSP's words: groups that hold sequences."""
    problem = result.plan.problem
    return tuple(
        (packing.kind.pipeline.num_gpus, tuple(np.repeat(problem.lengths, row).tolist()))
        for group in result.plan.groups
        for packing in group.packings
        for replica in packing.replicas
        for row in replica
    )


def cases() -> dict[str, Any]:
    """FlexSP's own runs by name: configuration, lengths, its plans, and the best known."""
    return {case["case"]: case for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]}


def main() -> None:
    """Plan the cases (or those whose names begin with the argument) and print one line each."""
    for name, case in cases().items():
        if name.startswith(sys.argv[1] if len(sys.argv) > 1 else ""):
            answer = planned(case, case["lengths"])
            theirs = min(one["total_ms"] for one in case["theirs"])
            print(f"{name}: {answer.time_ms:.1f} ms in {len(answer.micro_batches)} micro-batches,", end=" ")
            print(f"bound {answer.bound_ms:.1f}; {answer.cpu_s:.1f} s of CPU; FlexSP {theirs:.1f} ms")


if __name__ == "__main__":
    main()
