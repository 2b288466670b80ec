"""Lines below the times of a pipeline's stages, for programs of divisible loads, and differences between the
stages of whole micro-batches."""

from __future__ import annotations

import numpy as np

from milpplan.groups.bounds.last_stage import MAX_MICRO_BATCHES
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.lengths.cost_tables import Load, Tables, line_below, turns_down
from milpplan.simulation.layout_columns import FloatArray

MOST_STAGES = 8
"""Maximum number of stages in programs: of deeper pipelines the last stages suffice, as they form a pipeline of
the same schedule."""

# Factor that covers the rounding of sums in the capacity of micro-batches.
_MORE = 1.0 + 1e-9


def stage_loads(tables: Tables, num_stages: int, max_quanta: int, at: float) -> StageLoads:
    """Return the minimum times of a pipeline's stages under the lines that are highest at ``at`` quanta."""
    ahead, back = tables.stage([num_stages - 1], max_quanta, at)
    others = tables.stage(list(range(num_stages - 1)), max_quanta, at)
    last = ahead + back
    # Only fitting sequences: longer ones may have smaller shares.
    fits = tables.load.lengths <= max_quanta * tables.load.token_quantum
    pairs = np.stack([line.sequence / last.sequence for line in others])[:, fits]
    shares = pairs.min(axis=1).tolist()
    # Transfers and the extra time of the first stage grow with the quanta, of which a unit of work has at least so
    # many.
    quanta_per_ns = float((tables.load.lengths / last.sequence)[fits].min()) / tables.load.token_quantum
    transfer, *extras = tolls(tables, max_quanta)
    transfer_ns, slope = line_below(transfer, at)
    slopes = slope, *(float((extra / np.arange(1, max_quanta + 1)).min()) for extra in extras)
    return StageLoads(
        last.sequence,
        last.constant,
        (shares[0], shares[1]),
        (others[0].constant, others[1].constant),
        transfer_ns,
        heaviest(last.sequence, tables.load, max_quanta),
        corners(pairs),
        (slopes[0] * quanta_per_ns, slopes[1] * quanta_per_ns, slopes[2] * quanta_per_ns),
    )


def corners(pairs: FloatArray) -> FloatArray:
    """Return the ``pairs`` [2, n] that are not above a mixture of others, [c, 2], the first entry ascending."""
    kept: list[tuple[float, float]] = []
    for pair in sorted(set(zip(*pairs.tolist(), strict=True))):
        if kept and pair[1] >= kept[-1][1]:
            continue
        while len(kept) > 1 and turns_down(kept[-2], kept[-1], pair):
            kept.pop()
        kept.append(pair)
    return np.array(kept)


def heaviest(sequence_weights: FloatArray, load: Load, max_quanta: int) -> FloatArray:
    """Return how much more j micro-batches can hold than j - 1, [MAX_MICRO_BATCHES], descending.

    The weights are ``sequence_weights`` [n] of the workload's sequences. The fractional knapsack of the heaviest
    fitting sequences per token, in j times the capacity, limits any contents.
    """
    quanta = load.lengths / load.token_quantum
    fits = quanta <= max_quanta
    order = np.argsort(-(sequence_weights / quanta)[fits], kind="stable")
    quanta_held = (load.counts * quanta)[fits][order]
    weights = (load.counts * sequence_weights)[fits][order]
    capacities = np.arange(MAX_MICRO_BATCHES + 1.0) * max_quanta
    sums = np.interp(capacities, np.append(0.0, np.cumsum(quanta_held)), np.append(0.0, np.cumsum(weights)))
    return np.asarray(np.diff(sums) * _MORE)


def tolls(tables: Tables, max_quanta: int) -> FloatArray:
    """Return the transfer terms of micro-batches by quanta, [3, max_quanta] ns.

    They are the transfers between stages, and the extra time of the first stage over the minimum of all stages
    before the last one, forward and backward; 0 if programs may have the last stages only.
    """
    num_stages, extras = tables.candidate.layout.pp, []
    others = list(range(num_stages - 1 if num_stages <= MOST_STAGES else 1))
    for phase in (0, 1):
        pairs = zip(tables.values([0], phase, max_quanta), tables.values(others, phase, max_quanta), strict=True)
        # The maximum of both cases exceeds the other's maximum by at least the smaller excess.
        extras.append(np.minimum(*(first - other for first, other in pairs)))
    return np.array([tables.bare.transfer[:max_quanta], *extras], dtype=np.float64)
