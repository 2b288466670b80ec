"""Packing around a sequence that is longer than the best real loads: the number of micro-batches, and its place.

A pipeline waits around such a sequence, so fewer and larger micro-batches than elsewhere are best, and the replica
that holds it takes less of the work. Both follow from the best real loads with it in one micro-batch
(``profile.best_profile`` with a floor), found step by step from those without. Heuristics only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np

from milpplan.groups.bounds.path_duals import BestLoads, best_profile
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.packing.local_search import improve
from milpplan.groups.packing.pack import Packing, filled_towards
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Int64Array

# Steps in the number of micro-batches and in the place of the sequence, wide ones first.
_STEPS = (3, 1)
# Numbers and places tried.
_STARTS = 6
# Loads are rounded down to multiples of this part of all that fits.
_GRID = 128
# Times that replicas' loads are levelled.
_LEVELLED = 3


def pack_around(kind: Kind, cuts: PipelineCuts, counts: Int64Array, rounds: int = 60) -> Packing | None:
    """A packing of ``counts`` [K] around its longest sequence; None where nothing waits for it, or where the
    others do not fit in these micro-batches."""
    if kind.pipeline.num_stages == 1 or not counts.any():
        return None
    load = int(counts @ kind.units) // kind.num_replicas
    longest = int(np.flatnonzero(counts)[-1])
    least = int(kind.units[longest])
    number = min(cuts.slots, key=lambda slot: slot.at(load)).num_micro_batches
    plain = best_profile(kind.pipeline, number, load, kind.cap_units)
    if plain is None or plain.units.max() >= least or load < least:
        return None
    less, others = 0, kind.num_replicas - 1
    rest: list[BestLoads] = []
    start = number, int(plain.units.argmax())
    for _ in range(_LEVELLED if others else 1):
        around = _best_places(kind, max(least, load - less), least, start)
        if not around:
            return None
        start = around[0][0].units.size, around[0][1]
        if others:
            one = best_profile(kind.pipeline, number, load + less // others, kind.cap_units)
            if one is None:
                return None
            rest = [one] * others
            late = (around[0][0].time_ns - one.time_ns) / kind.pipeline.parts
            less += int(late * others / kind.num_replicas)
    items = np.repeat(np.arange(counts.size), counts)[-2::-1]
    items = items[np.argsort(-kind.units[items], kind="stable")]
    packings = []
    for shape, place in around[:_STARTS]:
        targets = [one.units for one in (shape, *rest)]
        packing = filled_towards(kind, targets, items, [(0, place, longest)])
        packings += improve([packing], rounds) if packing is not None else []
    return min(packings, key=lambda one: one.time_ns, default=None)


def _best_places(kind: Kind, load: int, least: int, start: tuple[int, int]) -> list[tuple[BestLoads, int]]:
    """Best real loads with ``least`` in one of the micro-batches, and its place, stepwise from ``start`` (number,
    place) to the best ones, which come first."""
    # Programs of loads that are nearly the same are solved once.
    grid = max(1, kind.total_units // _GRID)
    near = max(least, load // grid * grid)
    scale = load / near
    seen: dict[tuple[int, int], BestLoads] = {}

    def time_ns(number: int, place: int) -> float:
        if (number, place) not in seen and 0 <= place < number:
            found = best_profile(kind.pipeline, number, near, kind.cap_units, ((place, least),))
            if found is not None:
                seen[number, place] = replace(found, units=found.units * scale, time_ns=found.time_ns * scale)
        return seen[number, place].time_ns if (number, place) in seen else math.inf

    at = start
    for step in _STEPS:
        while True:
            moves = [(at[0] + i * step, at[1] + j * step) for i, j in product((-1, 0, 1), repeat=2)]
            best = min(moves, key=lambda move: time_ns(*move))
            if time_ns(*best) >= time_ns(*at):
                break
            at = best
    return sorted(((one, place) for (_, place), one in seen.items()), key=lambda pair: pair[0].time_ns)
