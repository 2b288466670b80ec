"""Screening of all sets of strategies by a bound from work and the longest sequence: the *sum* of ``search``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.bounds.path_duals import SCALE_BITS
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts, last_stage_cut
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import FloatArray, Int64Array
from milpplan.groups.tours import least_overhead_ns

Proof = Literal["sum", "relaxation", "master", "waits", "exact"]

_MAX_SETS = 300_000


@dataclass(slots=True)
class SetRecord:
    """One set of strategies: its proved bound, and the bounding procedure that proved it."""

    used: tuple[int, ...]
    bound_ns: int
    by: Proof = "sum"


def ranked_sets(problem: GroupedProblem, cuts: dict[Kind, PipelineCuts]) -> list[SetRecord]:
    """List all sets of at most ``max_strategies`` strategies that hold every length, by their *sum* bound."""
    shares, constants = sequence_shares(problem, cuts)
    useful = [s for s in range(len(problem.strategies)) if np.isfinite(shares[s]).any()]
    max_size = min(problem.max_strategies, len(useful))
    num_sets = sum(math.comb(len(useful), size) for size in range(1, max_size + 1))
    if num_sets > _MAX_SETS:
        raise InvalidInputError(
            f"{len(useful)} strategies make {num_sets} sets of at most {max_size}.",
            f"At most {_MAX_SETS} sets expected.",
            "Offer fewer strategies, or lower max_strategies.",
        )
    times_alone = np.array([alone_ns(problem, s) for s in range(len(problem.strategies))])
    records = []
    for size in range(1, max_size + 1):
        for used in itertools.combinations(useful, size):
            lowest_shares = shares[list(used)].min(axis=0)
            if np.isfinite(lowest_shares).all():
                total = math.floor(float(problem.counts @ lowest_shares) * (1.0 - 1e-9)) + int(
                    constants[list(used)].sum()
                )
                longest = int(times_alone[list(used)].min(axis=0).max())
                records.append(SetRecord(used, max(total, longest) + least_overhead_ns(problem, used)))
    return sorted(records, key=lambda record: (record.bound_ns, record.used))


def alone_ns(problem: GroupedProblem, strategy: int) -> FloatArray:
    """Return the time of each length in a micro-batch of its own on the strategy's best replica, ns, [K].

    Infinite if the length fits nowhere. The micro-batch passes all stages forward and back, so no group that holds
    the sequence takes less.
    """
    times = []
    for kind in problem.kinds_of(strategy):
        pipeline = kind.pipeline
        lag = 2 * (pipeline.num_stages - 1) * pipeline.transfer_ns
        passed = (kind.units + pipeline.micro_batch_units) * (pipeline.num_stages * pipeline.parts) + lag
        times.append(np.where(kind.fits, passed, np.inf))
    return np.asarray(np.min(times, axis=0))


def sequence_shares(problem: GroupedProblem, cuts: dict[Kind, PipelineCuts]) -> tuple[FloatArray, Int64Array]:
    """Bound the time that a sequence, and a group without sequences, add to the group's time from below, ns.

    Shapes [strategies, K], infinite where a length does not fit, and [strategies]. For kinds j side by side and
    any weights w_j >= 0 with sum 1, there are two forms; a strategy whose pipelines all have one stage takes the
    second:

     - Z >= r_j (f + b) W_j / D_j for each j (r_j the inflation), so Z >= sum_j w_j r_j (f + b) W_j / D_j.
     - Z >= (f + b) W_j / D_j + e_j for each kind that is used (e_j the minimum that one micro-batch adds).
     Weighted
       over these, Z sum_used w_j >= sum_used w_j ((f + b) W_j / D_j + e_j), so Z >= sum_j w_j (f + b) W_j / D_j +
       min_j e_j, because an unused kind has W_j = 0 and the weights used add up to at most 1.

    A sequence then adds at least its smallest term over j. Weights are in proportion to the kinds' speeds.
    """
    shares = np.full((len(problem.strategies), problem.lengths.size), np.inf)
    constants = np.zeros(len(problem.strategies), np.int64)
    for s in range(len(problem.strategies)):
        kinds = [kind for kind in problem.kinds_of(s) if kind.fits.any()]
        if not kinds:
            continue
        is_single_stage = all(kind.pipeline.num_stages == 1 for kind in kinds)
        times = [_unit_times(kind, 1.0 if is_single_stage else cuts[kind].inflation) for kind in kinds]
        common = np.logical_and.reduce([kind.fits for kind in kinds])
        speeds = np.array(
            [1.0 / max(1e-9, float((unit_times * problem.counts)[common].sum())) for unit_times in times]
        )
        weights = speeds / speeds.sum()
        shares[s] = np.min(
            [unit_times * weight for unit_times, weight in zip(times, weights, strict=True)], axis=0
        )
        if is_single_stage:
            constants[s] = min(last_stage_cut(kind, 1).constant >> SCALE_BITS for kind in kinds)
    return shares, constants


def _unit_times(kind: Kind, inflation: float) -> FloatArray:
    """Return the time of one sequence of each length if all replicas share it, ns, [K]; infinite if too long."""
    times = kind.units * (inflation * kind.pipeline.parts / kind.num_replicas)
    return np.where(kind.fits, times, np.inf)
