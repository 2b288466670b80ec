"""FlexSP's micro-batches as grouped problems: groups of sequence parallelism of chosen degrees side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from milpplan.groups.problem import GroupedProblem
from milpplan.groups.strategies import Pipeline, Strategy, SwitchTimes
from milpplan.groups.workload import workload_of

# FlexSP leaves out groups of one GPU.
_LEAST_DEGREE = 2


def micro_batch_problem(case: dict[str, Any], lengths: list[int]) -> GroupedProblem:
    """One micro-batch: every way to fill the cluster with groups is a strategy, of which one is chosen.

    T(s, d) = (alpha1 s^2 + alpha2 s) / d + 16 L h s / (2^20 d v_d) ms, beta1 a group, tokens in proportion to d.
    Source: FlexSP's solver.py; v_d is its all-to-all rate of d GPUs in GB/s.
    """
    degrees = []
    while (degree := _LEAST_DEGREE << len(degrees)) <= case["cluster_size"]:
        degrees.append(degree)
    pipelines = {degree: _group(case, degree) for degree in degrees}
    workload = workload_of(lengths)
    mixes = (tuple((pipelines[degree], number) for degree, number in mix) for mix in _mixes(case, degrees))
    strategies = [Strategy(" + ".join(f"{n} x {one.name}" for one, n in mix), mix) for mix in mixes]
    fitting = tuple(one for one in strategies if one.holds(workload.lengths).all())
    return GroupedProblem(
        workload.lengths, workload.counts, fitting, SwitchTimes.free(len(fitting)), max_strategies=1
    )


def _group(case: dict[str, Any], degree: int) -> Pipeline:
    values_mb = 16 * case["layers"] * case["hidden"] / 2**20
    linear_ms = (case["cpt_alpha2"] + values_mb / case["alltoall_GBs"][str(degree)]) / degree
    return Pipeline(
        f"sp{degree}",
        1,
        case["cpt_alpha1"] / degree * 1e6,
        linear_ms * 1e6,
        case["cpt_beta1"] * 1e6,
        case["device_token_capacity"] * degree,
        max_micro_batches=1,
        num_gpus=degree,
    )


def _mixes(case: dict[str, Any], degrees: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Pairs (degree, number) that use all GPUs."""

    def rest(gpus: int, left: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        if not left:
            if gpus == 0:
                yield ()
            return
        for number in range(gpus // left[-1] + 1):
            mine = ((left[-1], number),) if number else ()
            yield from (mine + others for others in rest(gpus - number * left[-1], left[:-1]))

    return rest(case["cluster_size"], degrees)
