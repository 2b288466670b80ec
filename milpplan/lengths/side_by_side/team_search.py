"""Finding a short step of teams.

Heuristic; what it gives is simulated exactly (``teams``), and what it could gain at most is proved elsewhere
(``team_prices``).

 1. *A start*: a quick step (``team_quick``), or sequences dealt out by the linear bound's prices
    (``team_packing``), which are changed a little at random, many times: what is cheapest by time need not pack
    well. Or whole micro-batches near those that the
    program of ``team_prices`` is made of.
 2. *Exchanges* of single sequences (``team_exchanges``).
 3. *Again and again*: what runs on the teams inside a block of seats, most often one around the seat that ends
    last, is dealt out anew at changed prices, with exchanges after; the shorter step stays. Exchanges of single
    sequences do not merge two micro-batches, or turn two teams into a larger one.

Random numbers are seeded and attempts counted, so that the same sequences get the same step unless time runs out.
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
from milpplan.lengths.side_by_side.teams import TeamStep, Turn, simulated
from milpplan.simulation.layout_columns import FloatArray, IntArray

# How much prices of degrees change, in turns: little matters where sequences are many, and few may go anywhere.
_SPREADS = (0.08, 0.08, 0.3)
# Shares of nearly one are whole; what a micro-batch without a share counts.
_ONE, _EVEN = 1.0 - 1e-6, 0.3
# How often the block is around the seat that ends last; how much longer a step may become on the way.
_SLOWEST, _LONGER = 0.7, 5e-4


@dataclass(frozen=True, slots=True)
class Effort:
    """``attempts`` at a start, ``rounds`` of exchanges after it, and how often something is dealt out ``again``,
    with ``fewer`` rounds after each."""

    attempts: int
    rounds: int
    again: int
    fewer: int = 50


def shortest(packer: Packer, effort: Effort, cutoff_ns: float, deadline: float) -> TeamStep:
    """The shortest step found before the ``deadline`` (of ``perf_counter``), or the first one after it; one of at
    most ``enough_ns`` will do."""
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
    _, turns = min(starts, key=lambda one: one[0])
    return reworked(packer, turns, effort, cutoff_ns, deadline)


def dealt(packer: Packer, found: Priced, limit_ns: float) -> list[Turn]:
    """Turns near the program of ``team_prices``: whole micro-batches near its shares, each under the degree that
    takes least of all seats' time and not the limit, dealt out the largest degree and the longest first."""
    family = packer.family
    degrees = [Degree.of(family, degree) for degree in family.degree_chain]
    batches = []
    for held in _whole(family.pool.load, found):
        ways = [Batch(degree, 0, held) for degree in degrees if held @ degree.sizes[:-1] <= degree.rooms[-1]]
        short = [one for one in ways if one.time_ns < limit_ns - family.fixed_cost_ns] or ways
        batches.append(min(short, key=lambda one: one.degree.size * one.time_ns))
    turns, ends = [], np.zeros(family.num_slots)
    for one in sorted(batches, key=lambda one: (-one.degree.size, -one.time_ns)):
        size = one.degree.size
        team = int(ends.reshape(-1, size).max(axis=1).argmin())
        ends[size * team : size * (team + 1)] += one.time_ns
        turns.append(Turn(one.degree.member(one.grains), team, one.held[None]))
    return turns


def _whole(load: Load, priced: Priced) -> list[IntArray]:
    """Micro-batches of all sequences, every one once: whole shares first, then what is left of one after another,
    preferably of large shares and where little is gone."""
    left, found = load.counts.copy(), []
    sizes = load.lengths // load.token_quantum
    rows, parts = priced.rows, priced.shares.copy()
    while left.any():
        now = np.minimum(rows, left)
        most = np.where((now == rows).all(axis=1) & (parts > _ONE), np.inf, (now @ sizes) / (rows @ sizes))
        place = int((most * (_EVEN + np.maximum(0.0, parts))).argmax())
        found.append(now[place])
        left -= now[place]
        parts[place] -= 1.0
    return found


def reworked(
    packer: Packer, turns: list[Turn], effort: Effort, cutoff_ns: float, deadline: float, seed: int = 1
) -> TeamStep:
    """Steps 2 and 3 from nested ``turns``."""
    family = packer.family
    random = np.random.default_rng(seed)
    short_ns = cutoff_ns - family.fixed_cost_ns
    now = improved(family, turns, effort.rounds, short_ns, deadline, seed)
    last = float(_ends(packer, now).max())
    best, least = now, last
    for turn in range(effort.again):
        if least <= short_ns or time.perf_counter() > deadline:
            break
        tried = improved(family, _dealt_anew(packer, now, random, turn), effort.fewer, short_ns, deadline, turn)
        end = float(_ends(packer, tried).max())
        if end <= least * (1.0 + _LONGER):
            now = tried
        if end < least:
            best, least = tried, end
    return simulated(family, best)


def _dealt_anew(packer: Packer, turns: list[Turn], random: np.random.Generator, turn: int) -> list[Turn]:
    """The turns with those of the teams inside a block of seats replaced."""
    family = packer.family
    ends = _ends(packer, turns)
    seat = int(ends.argmax() if random.random() < _SLOWEST else random.integers(family.num_slots))
    size = int(random.choice([degree for degree in family.degree_chain if degree > 1]))
    block = slice(seat // size * size, seat // size * size + size)
    inside = [block.start <= family.slots(one).start and family.slots(one).stop <= block.stop for one in turns]
    kept = [one for one, gone in zip(turns, inside, strict=True) if not gone]
    counts = sum(
        (one.packed.sum(axis=0) for one, gone in zip(turns, inside, strict=True) if gone),
        np.zeros_like(family.pool.load.counts),
    )
    factors = np.exp(random.normal(0.0, _SPREADS[turn % len(_SPREADS)], len(family.degree_chain)))
    return kept + spread(packer, factors, counts, block, _ends(packer, kept))


def _ends(packer: Packer, turns: list[Turn]) -> FloatArray:
    """When every seat is done, [M] ns: teams nest, so it is the sum of what runs on it."""
    ends = np.zeros(packer.family.num_slots)
    for one in turns:
        ends[packer.family.slots(one)] += packer.times(one.member, one.packed).sum()
    return ends
