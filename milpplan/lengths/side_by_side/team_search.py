"""Heuristic search for a short step of teams.

The results are simulated exactly (``teams``); bounds come from elsewhere (``sequence_duals``).

 1. *Start*: a quick step (``team_quick``), or sequences assigned by the prices of the linear bound
    (``team_packing``), perturbed at random many times, as the cheapest degrees by time need not pack well; or
    whole micro-batches near the solution of the program of ``sequence_duals``.
 2. *Exchanges* of single sequences (``team_exchanges``).
 3. *Ruin and recreate*: the sequences of the teams inside a block of slots, most often one around the slot that
    ends last, are assigned anew at perturbed prices, with exchanges after; the shorter step is kept. Exchanges of
    single sequences cannot merge two micro-batches, or turn two teams into a larger one.

Random numbers are seeded and attempts counted, so that equal sequences get equal steps unless time runs out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.cost_tables import Load
from milpplan.lengths.side_by_side.sequence_duals import Priced
from milpplan.lengths.side_by_side.team_exchanges import Batch, Degree, improved
from milpplan.lengths.side_by_side.team_packing import Packer, spread
from milpplan.lengths.side_by_side.team_quick import quick_turns
from milpplan.lengths.side_by_side.teams import TeamStep, Turn, simulate_turns
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Spread of the random price factors, in turns: small for many sequences, large for few.
_SPREADS = (0.08, 0.08, 0.3)
# Share from which a micro-batch is whole; weight of a micro-batch without a share.
_ONE, _EVEN = 1.0 - 1e-6, 0.3
# Share of blocks around the slot that ends last; relative excess that a step may have on the way.
_SLOWEST, _LONGER = 0.7, 5e-4


@dataclass(frozen=True, slots=True)
class Effort:
    """Counted effort of a search."""

    attempts: int
    """Random starts."""
    rounds: int
    """Rounds of exchanges after the start."""
    again: int
    """Repetitions of ruin and recreate."""
    fewer: int = 50
    """Rounds of exchanges after each repetition."""


def shortest(packer: Packer, effort: Effort, cutoff_ns: float, deadline: float) -> TeamStep:
    """Return the shortest step found before the ``deadline`` (of ``perf_counter``), or the first one after it;
    stop at ``cutoff_ns``."""
    family = packer.family
    random = np.random.default_rng(1)
    quick = quick_turns(family, packer.lines)
    starts = [(float(_ends(packer, quick).max()), quick)]
    for attempt in range(effort.attempts):
        if time.perf_counter() > deadline:
            break
        size = _SPREADS[attempt % len(_SPREADS)] if attempt else 0.0
        ends = np.zeros(family.num_slots)
        factors = np.exp(random.normal(0.0, size, len(family.degree_chain)))
        turns = spread(packer, factors, family.pool.load.counts, slice(0, family.num_slots), ends)
        starts.append((float(ends.max()), turns))
    _, turns = min(starts, key=lambda start: start[0])
    return improve_turns(packer, turns, effort, cutoff_ns, deadline)


def dealt(packer: Packer, priced: Priced, limit_ns: float) -> list[Turn]:
    """Return turns near the solution of ``sequence_duals``.

    Whole micro-batches near its shares each take the degree with the minimum of slot time below the limit; they
    are assigned in order of degree and time, the largest first.
    """
    family = packer.family
    degrees = [Degree.of(family, degree) for degree in family.degree_chain]
    batches = []
    for counts in _whole(family.pool.load, priced):
        options = [
            Batch(degree, 0, counts) for degree in degrees if counts @ degree.sizes[:-1] <= degree.capacities[-1]
        ]
        below_limit = [batch for batch in options if batch.time_ns < limit_ns - family.fixed_cost_ns] or options
        batches.append(min(below_limit, key=lambda batch: batch.degree.size * batch.time_ns))
    turns, ends = [], np.zeros(family.num_slots)
    for batch in sorted(batches, key=lambda batch: (-batch.degree.size, -batch.time_ns)):
        size = batch.degree.size
        team = int(ends.reshape(-1, size).max(axis=1).argmin())
        ends[size * team : size * (team + 1)] += batch.time_ns
        turns.append(Turn(batch.degree.member(batch.quanta), team, batch.held[None]))
    return turns


def _whole(load: Load, priced: Priced) -> list[IntArray]:
    """Return micro-batches that hold every sequence once: whole shares first, then the remaining sequences,
    preferably of large shares that are nearly complete."""
    remaining, batches = load.counts.copy(), []
    sizes = load.lengths // load.token_quantum
    rows, shares = priced.rows, priced.shares.copy()
    while remaining.any():
        available = np.minimum(rows, remaining)
        scores = np.where(
            (available == rows).all(axis=1) & (shares > _ONE), np.inf, (available @ sizes) / (rows @ sizes)
        )
        best = int((scores * (_EVEN + np.maximum(0.0, shares))).argmax())
        batches.append(available[best])
        remaining -= available[best]
        shares[best] -= 1.0
    return batches


def improve_turns(
    packer: Packer, turns: list[Turn], effort: Effort, cutoff_ns: float, deadline: float, seed: int = 1
) -> TeamStep:
    """Improve nested ``turns`` by steps 2 and 3."""
    family = packer.family
    random = np.random.default_rng(seed)
    short_ns = cutoff_ns - family.fixed_cost_ns
    current = improved(family, turns, effort.rounds, short_ns, deadline, seed)
    end_ns = float(_ends(packer, current).max())
    best, best_ns = current, end_ns
    for repetition in range(effort.again):
        if best_ns <= short_ns or time.perf_counter() > deadline:
            break
        candidate = improved(
            family, _dealt_anew(packer, current, random, repetition), effort.fewer, short_ns, deadline, repetition
        )
        candidate_ns = float(_ends(packer, candidate).max())
        if candidate_ns <= best_ns * (1.0 + _LONGER):
            current = candidate
        if candidate_ns < best_ns:
            best, best_ns = candidate, candidate_ns
    return simulate_turns(family, best)


def _dealt_anew(packer: Packer, turns: list[Turn], random: np.random.Generator, repetition: int) -> list[Turn]:
    """Return the turns with those of the teams inside a block of slots assigned anew."""
    family = packer.family
    ends = _ends(packer, turns)
    slot = int(ends.argmax() if random.random() < _SLOWEST else random.integers(family.num_slots))
    size = int(random.choice([degree for degree in family.degree_chain if degree > 1]))
    block = slice(slot // size * size, slot // size * size + size)
    inside_block = [
        block.start <= family.slots(own).start and family.slots(own).stop <= block.stop for own in turns
    ]
    outside = [own for own, is_inside in zip(turns, inside_block, strict=True) if not is_inside]
    counts = sum(
        (own.packed.sum(axis=0) for own, is_inside in zip(turns, inside_block, strict=True) if is_inside),
        np.zeros_like(family.pool.load.counts),
    )
    factors = np.exp(random.normal(0.0, _SPREADS[repetition % len(_SPREADS)], len(family.degree_chain)))
    return outside + spread(packer, factors, counts, block, _ends(packer, outside))


def _ends(packer: Packer, turns: list[Turn]) -> FloatArray:
    """Return the end of every slot, [M] ns: teams nest, so it is the sum of what runs on it."""
    ends = np.zeros(packer.family.num_slots)
    for turn in turns:
        ends[packer.family.slots(turn)] += packer.times(turn.member, turn.packed).sum()
    return ends
