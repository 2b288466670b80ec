"""Packing of the sequences of one kind of pipeline: replica, micro-batch and order.

Heuristics: plans are simulated exactly (``plan``), and bounds come from elsewhere. A construction, then a local
search: with several stages, micro-batches are filled towards the best real loads (``path_duals``); with one stage
only the sum counts, so each sequence goes to the replica that finishes it first.
"""

from __future__ import annotations

import time

import numpy as np

from milpplan.groups.bounds.path_duals import best_profile
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.packing.local_search import improve
from milpplan.groups.plan import Packing, in_flight_fits
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import FloatArray, Int64Array

# Number of micro-batch counts tried, best bound first.
_TRIES = 4


def pack(
    kind: Kind, cuts: PipelineCuts, counts: Int64Array, rounds: int = 60, deadline: float = float("inf")
) -> Packing | None:
    """Pack ``counts`` [K] sequences by construction and local search.

    Args:
        kind: the kind of pipelines.
        cuts: its bounds by number of micro-batches, which rank the numbers.
        counts: sequences of each length, [K].
        rounds: maximum rounds of the local search.
        deadline: after it (on the clock of ``perf_counter``) the first packing is returned.

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
            if starts[-1] is not None and time.perf_counter() > deadline:
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


def _by_profile(kind: Kind, counts: Int64Array, number: int, deadline: float) -> Packing | None:
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
    kind: Kind, plain: FloatArray, long: list[int], load: int, deadline: float
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
        is_late = time.perf_counter() > deadline
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
    packing = Packing(kind, tuple(_used(replica) for replica in packed))
    return packing if _in_flight_fits(packing) else None


def _used(replica: Int64Array) -> Int64Array:
    """Drop empty micro-batches."""
    return np.asarray(replica[replica.any(axis=1)])


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
