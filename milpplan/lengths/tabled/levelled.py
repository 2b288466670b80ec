"""Construction of packings, and balancing between groups.

**Packing** of one kind of pipeline (``pack``) decides replica, micro-batch and order of every sequence. Plans are
simulated exactly (``plan``), and bounds come from elsewhere. With several stages, micro-batches are filled towards
the best real loads (``best_profile``); with one stage only the sum counts, so each sequence goes to the replica
that finishes it first. The local search (``local_search``) improves the kinds of a group together.

**Relocation** (``relocate``). An assignment program counts work, not sequences: a group of few long sequences
leaves replicas idle while the longest runs. Sequences moved there cost no time. Only plans that are faster in
exact simulation count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from milpplan.lengths.bounds import PipelineCuts, best_profile
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.search_parameters import PARAMETERS
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
from milpplan.lengths.tabled.local_search import improved_packings
from milpplan.lengths.tabled.step_plan import in_flight_fits


def pack(kind: Kind, cuts: PipelineCuts, counts: Int64Array, deadline: Deadline = NEVER) -> Packing | None:
    """Pack ``counts`` [K] sequences by construction.

    Args:
        kind: the kind of pipelines.
        cuts: its bounds by number of micro-batches, which rank the numbers.
        counts: sequences of each length, [K].
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
    return min(packings, key=lambda packing: packing.time_ns, default=None)


def _promising(kind: Kind, cuts: PipelineCuts, counts: Int64Array) -> list[int]:
    """List at most four numbers of micro-batches, smallest bound first."""
    load = float(counts @ kind.units) / kind.num_replicas
    tokens = int(counts @ kind.lengths)
    fewest = -(-tokens // (kind.pipeline.micro_batch_tokens * kind.num_replicas))
    largest = min(int(counts.sum()), kind.pipeline.max_micro_batches or 2**31)
    if fewest > largest:
        return []
    ranked = sorted(cuts.slots, key=lambda slot: slot.at(load))
    numbers = [slot.num_micro_batches for slot in ranked if fewest <= slot.num_micro_batches <= largest]
    return numbers[:4] or [max(1, min(fewest + 1, largest))]


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
    """Compute every replica's target loads around the first of its long sequences.

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
        total = max(load, sum(int(kind.units[k]) for k in sequences))
        floor = int(kind.units[sequences[0]]) if sequences else 0
        arguments = kind.pipeline, number, total, max(kind.cap_units, floor), positions[0], floor
        profile = None if deadline.passed else best_profile(*arguments)
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


def pack_kinds(counts: Mapping[Kind, Int64Array], cuts: Mapping[Kind, PipelineCuts]) -> dict[Kind, Packing] | None:
    """Pack every kind's sequences by construction; None if a kind has no packing."""
    packings = {kind: pack(kind, cuts[kind], own) for kind, own in counts.items()}
    kept = {kind: packing for kind, packing in packings.items() if packing is not None}
    return kept if len(kept) == len(packings) else None


def plan_from_packings(problem: GroupedProblem, packings: Mapping[Kind, Packing]) -> GroupedPlan:
    """Arrange all packings as a plan, improved by the local search over the kinds of every group."""
    groups: dict[int, list[Packing]] = {}
    for kind, packing in packings.items():
        groups.setdefault(kind.strategy, []).append(packing)
    return arranged(
        problem,
        [
            Group(strategy, tuple(improved_packings(own, PARAMETERS.group_effort)))
            for strategy, own in groups.items()
        ],
    )


Packer = Callable[[dict[Kind, Int64Array]], GroupedPlan | None]


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
        # Shares of the idle time that are filled.
        for share in (0.95, 0.7, 0.4):
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
