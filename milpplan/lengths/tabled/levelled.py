"""Packing of every kind of replicas, and balancing between the kinds of a group and between groups.

**Around the longest sequence** (``pack_around``). A pipeline waits around such a sequence, so fewer and larger
micro-batches than elsewhere are best, and the replica that holds it takes less of the work. Both follow from the
best real loads with the sequence in one micro-batch (``best_profile`` with a floor). The number of
micro-batches and the sequence's position are found stepwise from the best loads without it.

**Relocation** (``relocate``). An assignment program counts work, not sequences: a group of few long sequences
leaves replicas idle while the longest runs. Sequences moved there cost no time. Only plans that are faster in
exact simulation count.

**Packing** of one kind of pipeline (``pack``) decides replica, micro-batch and order of every sequence. Plans are
simulated exactly (``plan``), and bounds come from elsewhere. A construction comes first, then a local search: with
several stages, micro-batches are filled towards the best real loads (``best_profile``); with one stage only the
sum counts, so each sequence goes to the replica that finishes it first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from milpplan.lengths.bounds import PipelineCuts, best_profile
from milpplan.lengths.bounds.pipeline_bounds import BestLoads
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.tabled import (
    FloatArray,
    Group,
    GroupedPlan,
    GroupedProblem,
    Int64Array,
    Kind,
    Packing,
    arranged,
)
from milpplan.lengths.tabled.local_search import balance, exchange_pairs, has_single_micro_batches, improve
from milpplan.lengths.tabled.step_plan import in_flight_fits

# Number of micro-batch counts tried, best bound first.
_TRIES = 4


def pack(
    kind: Kind, cuts: PipelineCuts, counts: Int64Array, rounds: int = 60, deadline: Deadline = NEVER
) -> Packing | None:
    """Pack ``counts`` [K] sequences by construction and local search.

    Args:
        kind: the kind of pipelines.
        cuts: its bounds by number of micro-batches, which rank the numbers.
        counts: sequences of each length, [K].
        rounds: maximum rounds of the local search.
        deadline: after it the first packing is returned.

    Returns:
        A packing; None if no packing within memory was found.
    """
    if not counts.any():
        empty = np.zeros((0, counts.size), np.int64)
        return Packing(kind, (empty,) * kind.num_replicas)
    if kind.pipeline.num_stages == 1:
        starts = [_by_least_time(kind, counts)]
    else:
        starts = []
        for number in _promising(kind, cuts, counts):
            starts.append(_by_profile(kind, counts, number, deadline))
            if starts[-1] is not None and deadline.passed:
                break
    packings = [start for start in starts if start is not None]
    packings.sort(key=lambda packing: packing.time_ns)
    return improve(packings[:1], rounds, deadline)[0] if packings else None


def _promising(kind: Kind, cuts: PipelineCuts, counts: Int64Array) -> list[int]:
    """List numbers of micro-batches, smallest bound first."""
    load = float(counts @ kind.units) / kind.num_replicas
    tokens = int(counts @ kind.lengths)
    fewest = -(-tokens // (kind.pipeline.micro_batch_tokens * kind.num_replicas))
    largest = min(int(counts.sum()), kind.pipeline.max_micro_batches or 2**31)
    if fewest > largest:
        return []
    ranked = sorted(cuts.slots, key=lambda slot: slot.at(load))
    numbers = [slot.num_micro_batches for slot in ranked if fewest <= slot.num_micro_batches <= largest]
    return numbers[:_TRIES] or [max(1, min(fewest + 1, largest))]


def _by_profile(kind: Kind, counts: Int64Array, number: int, deadline: Deadline) -> Packing | None:
    """Fill ``number`` micro-batches towards their best real loads, longest sequence first.

    After the ``deadline`` no programs are solved for loads around long sequences: these take the loads without
    them.
    """
    load = int(counts @ kind.units) // kind.num_replicas
    plain = best_profile(kind.pipeline, number, load, kind.cap_units)
    if plain is None:
        return None
    targets = [plain.units] * kind.num_replicas
    items = np.repeat(np.arange(counts.size), counts)[::-1]
    items = items[np.argsort(-kind.units[items], kind="stable")]
    long = [k for k in items.tolist() if kind.units[k] > plain.units.max()]
    placed: list[tuple[int, int, int]] = []
    if long:
        targets, placed = _targets_around_long(kind, plain.units, long, load, deadline)
    return fill_towards(kind, targets, items[len(long) :], placed)


def _targets_around_long(
    kind: Kind, plain: FloatArray, long: list[int], load: int, deadline: Deadline
) -> tuple[list[FloatArray], list[tuple[int, int, int]]]:
    """Compute every replica's target loads around its long sequences.

    Returns:
        Targets by replica, and positions of the long sequences: (replica, micro-batch, k).
    """
    number, replicas = plain.size, kind.num_replicas
    long_of_replica: list[list[int]] = [[] for _ in range(replicas)]
    for k in long:
        emptiest = min(range(replicas), key=lambda r: sum(int(kind.units[item]) for item in long_of_replica[r]))
        long_of_replica[emptiest].append(k)
    # Long sequences stand where the plain profile is highest.
    order = np.argsort(-plain, kind="stable")
    positions = sorted(order[: max(len(indices) for indices in long_of_replica)].tolist())
    targets, placed = [], []
    for replica, sequences in enumerate(long_of_replica):
        floors = tuple(zip(positions, (int(kind.units[k]) for k in sequences), strict=False))
        total = max(load, sum(floor for _, floor in floors))
        is_late = deadline.passed
        profile = None if is_late else best_profile(kind.pipeline, number, total, kind.cap_units, floors)
        targets.append(plain if profile is None else profile.units)
        placed += [(replica, position, k) for position, k in zip(positions, sequences, strict=False)]
        if len(sequences) > number:
            # With more long sequences than micro-batches, the others share micro-batches.
            extra = sequences[number:]
            placed += [(replica, i % number, k) for i, k in enumerate(extra)]
    return targets, placed


def fill_towards(
    kind: Kind, targets: list[FloatArray], items: Int64Array, placed: list[tuple[int, int, int]]
) -> Packing | None:
    """Put each item into the micro-batch furthest below its target that has capacity for the tokens.

    Args:
        kind: the kind of pipelines.
        targets: target units of every replica's micro-batches.
        items: indices of lengths, in the order of placing.
        placed: sequences that are placed already, (replica, micro-batch, k).

    Returns:
        The packing; None if an item does not fit.
    """
    width = max(target.size for target in targets)
    missing_units = np.array(
        [np.pad(target, (0, width - target.size), constant_values=-np.inf) for target in targets]
    )
    tokens = np.where(np.isfinite(missing_units), kind.pipeline.micro_batch_tokens, 0)
    packed = np.zeros((*missing_units.shape, kind.units.size), np.int64)
    for replica, micro_batch, k in placed:
        packed[replica, micro_batch, k] += 1
        missing_units[replica, micro_batch] -= kind.units[k]
        tokens[replica, micro_batch] -= kind.lengths[k]
    if (tokens < 0).any():
        return None
    for k in items.tolist():
        open_units = np.where(tokens >= kind.lengths[k], missing_units, -np.inf)
        position = np.unravel_index(int(open_units.argmax()), missing_units.shape)
        if not np.isfinite(open_units[position]):
            return None
        packed[position][k] += 1
        missing_units[position] -= kind.units[k]
        tokens[position] -= kind.lengths[k]
    packing = Packing(kind, tuple(np.asarray(replica[replica.any(axis=1)]) for replica in packed))
    return packing if _in_flight_fits(packing) else None


def _in_flight_fits(packing: Packing) -> bool:
    return all(in_flight_fits(packing.kind, replica) for replica in packing.replicas)


def _by_least_time(kind: Kind, counts: Int64Array) -> Packing | None:
    """Put each sequence, longest first, on the replica that finishes it first.

    There it goes into the fullest micro-batch with capacity, or a new one.
    """
    pipeline = kind.pipeline
    bins: list[list[Int64Array]] = [[] for _ in range(kind.num_replicas)]
    free_tokens: list[list[int]] = [[] for _ in range(kind.num_replicas)]
    times = np.zeros(kind.num_replicas)
    items = np.repeat(np.arange(counts.size), counts)
    capacity = pipeline.micro_batch_tokens
    if pipeline.in_flight_tokens is not None:
        capacity = min(capacity, pipeline.in_flight_tokens)
    max_micro_batches = pipeline.max_micro_batches or items.size
    for k in items[np.argsort(-kind.units[items], kind="stable")].tolist():
        length, units = int(kind.lengths[k]), int(kind.units[k])
        fitting_tokens = [[free for free in replica_tokens if free >= length] for replica_tokens in free_tokens]
        end_times = [
            times[r] + units + (0 if fitting_tokens[r] else pipeline.micro_batch_units)
            if fitting_tokens[r] or len(bins[r]) < max_micro_batches
            else np.inf
            for r in range(kind.num_replicas)
        ]
        replica = int(np.argmin(end_times))
        if not np.isfinite(end_times[replica]):
            return None
        if fitting_tokens[replica]:
            micro_batch = free_tokens[replica].index(min(fitting_tokens[replica]))
        else:
            micro_batch = len(bins[replica])
            bins[replica].append(np.zeros(counts.size, np.int64))
            free_tokens[replica].append(capacity)
        bins[replica][micro_batch][k] += 1
        free_tokens[replica][micro_batch] -= length
        times[replica] = end_times[replica]
    return Packing(
        kind, tuple(np.array(micro_batches, np.int64).reshape(-1, counts.size) for micro_batches in bins)
    )


# Steps in the number of micro-batches and in the position of the sequence, wide steps first.
_STEPS = (3, 1)
# Maximum number of pairs (number of micro-batches, position) that are packed.
_STARTS = 6
# Loads are rounded down to multiples of the total load divided by this number.
_GRID = 128
# Rounds that level the replicas' loads.
_LEVELLED = 3


def pack_around(kind: Kind, cuts: PipelineCuts, counts: Int64Array, rounds: int = 60) -> Packing | None:
    """Pack ``counts`` [K] around their longest sequence.

    Returns:
        The packing; None where nothing waits for the longest sequence, or where the others do not fit in these
        micro-batches.
    """
    if kind.pipeline.num_stages == 1 or not counts.any():
        return None
    load = int(counts @ kind.units) // kind.num_replicas
    longest = int(np.flatnonzero(counts)[-1])
    longest_units = int(kind.units[longest])
    number = min(cuts.slots, key=lambda slot: slot.at(load)).num_micro_batches
    plain = best_profile(kind.pipeline, number, load, kind.cap_units)
    if plain is None or plain.units.max() >= longest_units or load < longest_units:
        return None
    shift, num_others = 0, kind.num_replicas - 1
    other_loads: list[BestLoads] = []
    start = number, int(plain.units.argmax())
    for _ in range(_LEVELLED if num_others else 1):
        shapes = _best_positions(kind, max(longest_units, load - shift), longest_units, start)
        if not shapes:
            return None
        start = shapes[0][0].units.size, shapes[0][1]
        if num_others:
            rest_loads = best_profile(kind.pipeline, number, load + shift // num_others, kind.cap_units)
            if rest_loads is None:
                return None
            other_loads = [rest_loads] * num_others
            delay = (shapes[0][0].time_ns - rest_loads.time_ns) / kind.pipeline.parts
            shift += int(delay * num_others / kind.num_replicas)
    items = np.repeat(np.arange(counts.size), counts)[-2::-1]
    items = items[np.argsort(-kind.units[items], kind="stable")]
    packings = []
    for shape, position in shapes[:_STARTS]:
        targets = [loads.units for loads in (shape, *other_loads)]
        packing = fill_towards(kind, targets, items, [(0, position, longest)])
        packings += improve([packing], rounds) if packing is not None else []
    return min(packings, key=lambda packing: packing.time_ns, default=None)


def _best_positions(
    kind: Kind, load: int, longest_units: int, start: tuple[int, int]
) -> list[tuple[BestLoads, int]]:
    """Find the best real loads with ``longest_units`` in one micro-batch, stepwise from ``start``.

    Returns:
        Pairs (loads, position of that micro-batch), best first. ``start`` is (number of micro-batches, position).
    """
    # Nearly equal loads share one program, which is cached.
    grid_units = max(1, kind.total_units // _GRID)
    grid_load = max(longest_units, load // grid_units * grid_units)
    scale = load / grid_load
    seen: dict[tuple[int, int], BestLoads] = {}

    def time_ns(number: int, position: int) -> float:
        if (number, position) not in seen and 0 <= position < number:
            profile = best_profile(kind.pipeline, number, grid_load, kind.cap_units, ((position, longest_units),))
            if profile is not None:
                seen[number, position] = replace(
                    profile, units=profile.units * scale, time_ns=profile.time_ns * scale
                )
        return seen[number, position].time_ns if (number, position) in seen else math.inf

    current = start
    for step in _STEPS:
        while True:
            moves = [(current[0] + i * step, current[1] + j * step) for i, j in product((-1, 0, 1), repeat=2)]
            best = min(moves, key=lambda move: time_ns(*move))
            if time_ns(*best) >= time_ns(*current):
                break
            current = best
    return sorted(((loads, position) for (_, position), loads in seen.items()), key=lambda pair: pair[0].time_ns)


# Maximum rounds of moves between the kinds of a group, and of balancing replicas of one micro-batch.
_ROUNDS, _BALANCED_ROUNDS = 150, 1_000


def pack_kinds(
    counts: Mapping[Kind, Int64Array], cuts: Mapping[Kind, PipelineCuts], *, around: bool = False
) -> dict[Kind, Packing] | None:
    """Pack every kind's sequences, ``around`` the longest where that is possible.

    Returns:
        The packings; None if a kind has no packing.
    """
    packings = {}
    for kind in counts:
        packing = pack_around(kind, cuts[kind], counts[kind]) if around else None
        if packing is None:
            packing = pack(kind, cuts[kind], counts[kind])
        if packing is None:
            return None
        packings[kind] = packing
    return packings


def plan_from_packings(problem: GroupedProblem, packings: Mapping[Kind, Packing]) -> GroupedPlan:
    """Arrange all packings as a plan, balanced between the kinds of a group."""
    groups: dict[int, list[Packing]] = {}
    for kind, packing in packings.items():
        groups.setdefault(kind.strategy, []).append(packing)
    for strategy, side_by_side in groups.items():
        if len(side_by_side) > 1:
            groups[strategy] = improve(side_by_side, _ROUNDS)
        if has_single_micro_batches([packing.kind for packing in side_by_side]):
            groups[strategy] = balance(groups[strategy], _BALANCED_ROUNDS)
    return arranged(
        problem, [Group(strategy, tuple(group_packings)) for strategy, group_packings in groups.items()]
    )


def exchange_in_group(group: Group) -> Group:
    """Exchange pairs of sequences in a group whose replicas run one micro-batch each."""
    if not has_single_micro_batches([packing.kind for packing in group.packings]):
        return group
    return Group(group.strategy, tuple(exchange_pairs(group.packings)))


Packer = Callable[[dict[Kind, Int64Array]], GroupedPlan | None]

# Shares of the idle time that are filled, one plan each.
_SHARES = (0.95, 0.7, 0.4)


def relocate(plan: GroupedPlan, cuts: Mapping[Kind, PipelineCuts], pack_all: Packer) -> GroupedPlan | None:
    """Return the best plan with idle time filled from another group; None if no such plan was packed."""
    counts = {packing.kind: _counts(packing.replicas) for group in plan.groups for packing in group.packings}
    idle = {
        packing.kind: float((group.time_ns - packing.times_ns()).sum())
        for group in plan.groups
        for packing in group.packings
    }
    best: GroupedPlan | None = None
    for taker, giver in itertools.permutations(counts, 2):
        for share in _SHARES:
            moved = _sequences_to_move(taker, giver, counts[giver], share * idle[taker])
            if not moved.any():
                continue
            candidate = pack_all({**counts, taker: counts[taker] + moved, giver: counts[giver] - moved})
            if candidate is not None and (best is None or candidate.time_ns < best.time_ns):
                best = candidate
    return best


def _counts(replicas: tuple[Int64Array, ...]) -> Int64Array:
    """Sum the sequences of all replicas, [K]."""
    return np.asarray(sum(replica.sum(axis=0) for replica in replicas))


def _sequences_to_move(taker: Kind, giver: Kind, counts: Int64Array, idle_ns: float) -> Int64Array:
    """Choose sequences of the giver that fit into the idle time: largest saving per cost first, then longest."""
    parts = taker.pipeline.parts
    gain = giver.units * giver.pipeline.parts / (giver.num_replicas * np.maximum(1, taker.units * parts))
    moved = np.zeros_like(counts)
    for k in sorted(np.flatnonzero(counts * taker.fits).tolist(), key=lambda k: (-gain[k], -k)):
        cost = int(taker.units[k]) * parts
        number = min(int(counts[k]), int(idle_ns // cost)) if cost else int(counts[k])
        moved[k] = number
        idle_ns -= number * cost
    return moved
