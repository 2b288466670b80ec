"""Lines below the times of a pipeline's stages, for programs of real loads (``unequal``), and what the stages of
whole micro-batches have beyond one another."""

from __future__ import annotations

import numpy as np

from milpplan.groups.bounds.last_stage import MAX_MICRO_BATCHES
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.lengths.cost_tables import Load, Tables, line_below, turns_down
from milpplan.simulation.layout_columns import FloatArray

MOST_STAGES = 8
"""Of deeper pipelines the last stages may have programs alone: they are a pipeline of the same schedule."""

# What rounding of sums may take from what micro-batches hold at most.
_MORE = 1.0 + 1e-9


def stage_loads(tables: Tables, num_stages: int, max_quanta: int, at: float) -> StageLoads:
    """Least times of a pipeline under the lines that are highest ``at`` so many grains."""
    ahead, back = tables.stage([num_stages - 1], max_quanta, at)
    others = tables.stage(list(range(num_stages - 1)), max_quanta, at)
    last = ahead + back
    # Of sequences that fit: longer ones may leave the other stages less to do for each second of the last one.
    fits = tables.load.lengths <= max_quanta * tables.load.token_quantum
    pairs = np.stack([line.sequence / last.sequence for line in others])[:, fits]
    shares = pairs.min(axis=1).tolist()
    # Transfers and what the first stage has more grow with grains, of which a unit of load has so many at least.
    grains = float((tables.load.lengths / last.sequence)[fits].min()) / tables.load.token_quantum
    transfer, *more = tolls(tables, max_quanta)
    transfer_ns, slope = line_below(transfer, at)
    slopes = slope, *(float((one / np.arange(1, max_quanta + 1)).min()) for one in more)
    return StageLoads(
        last.sequence,
        last.constant,
        (shares[0], shares[1]),
        (others[0].constant, others[1].constant),
        transfer_ns,
        heaviest(last.sequence, tables.load, max_quanta),
        corners(pairs),
        (slopes[0] * grains, slopes[1] * grains, slopes[2] * grains),
    )


def corners(pairs: FloatArray) -> FloatArray:
    """Those of ``pairs`` [2, n] of which every other one has at least a mixture, [c, 2]; the first place rises."""
    found: list[tuple[float, float]] = []
    for pair in sorted(set(zip(*pairs.tolist(), strict=True))):
        if found and pair[1] >= found[-1][1]:
            continue
        while len(found) > 1 and turns_down(found[-2], found[-1], pair):
            found.pop()
        found.append(pair)
    return np.array(found)


def heaviest(each: FloatArray, load: Load, max_quanta: int) -> FloatArray:
    """How much more j micro-batches hold at most than j - 1, of what ``each`` [n] of the workload's sequences
    weighs: the heaviest for their tokens, cut where a micro-batch ends; [MAX_MICRO_BATCHES], falling.

    Of sequences that fit, all together in j times the tokens of one: whichever the micro-batches hold, no more.
    """
    grains = load.lengths / load.token_quantum
    fits = grains <= max_quanta
    order = np.argsort(-(each / grains)[fits], kind="stable")
    held = (load.counts * grains)[fits][order]
    weights = (load.counts * each)[fits][order]
    room = np.arange(MAX_MICRO_BATCHES + 1.0) * max_quanta
    sums = np.interp(room, np.append(0.0, np.cumsum(held)), np.append(0.0, np.cumsum(weights)))
    return np.asarray(np.diff(sums) * _MORE)


def tolls(tables: Tables, max_quanta: int) -> FloatArray:
    """What transfers between stages take, and the first stage more than the least of all before the last one,
    forward and backward, of micro-batches of so many grains, [3, most_grains] ns; nothing more where programs may
    be for the last stages alone."""
    num_stages, more = tables.candidate.layout.pp, []
    others = list(range(num_stages - 1 if num_stages <= MOST_STAGES else 1))
    for phase in (0, 1):
        ways = zip(tables.values([0], phase, max_quanta), tables.values(others, phase, max_quanta), strict=True)
        # The larger of two ways is higher by no less than both are.
        more.append(np.minimum(*(first - least for first, least in ways)))
    return np.array([tables.bare.transfer[:max_quanta], *more], dtype=np.float64)
