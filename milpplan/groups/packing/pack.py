"""Packing the sequences of one kind of pipeline: which replica, which micro-batch, in which order.

Heuristics only; what they give is simulated exactly (``plan``), and bounds come from elsewhere. Two ways, then a
local search: with several stages, micro-batches are filled towards the best real loads (``profile``); with one
stage only the sum counts, so sequences go to the replica that would be done first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.path_duals import best_profile
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.bounds.pipeline_time import pipeline_times_ns
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import FloatArray, Int64Array

# Numbers of micro-batches tried, the most promising ones.
_TRIES = 4


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences of every micro-batch of every replica of a kind: arrays [micro-batches, K] of counts."""

    kind: Kind
    replicas: tuple[Int64Array, ...]

    def loads(self, replica: int) -> Int64Array:
        """Units of the micro-batches of a replica, their own included, [micro-batches]."""
        return np.asarray(self.replicas[replica] @ self.kind.units + self.kind.pipeline.micro_batch_units)

    def times_ns(self) -> Int64Array:
        """Exact time of every replica, [replicas]."""
        times = [
            int(pipeline_times_ns(self.kind.pipeline, self.loads(replica)))
            for replica in range(len(self.replicas))
        ]
        return np.array(times, np.int64)

    @property
    def time_ns(self) -> int:
        """The slowest replica."""
        return int(self.times_ns().max(initial=0))


def pack(
    kind: Kind, cuts: PipelineCuts, counts: Int64Array, rounds: int = 60, deadline: float = float("inf")
) -> Packing | None:
    """A good packing of ``counts`` [K] sequences, None if none was found that fits in memory; after the
    ``deadline`` (of ``perf_counter``) the first one that was found."""
    from milpplan.groups.packing.local_search import improve

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
    found = [start for start in starts if start is not None]
    found.sort(key=lambda packing: packing.time_ns)
    return improve(found[:1], rounds, deadline)[0] if found else None


def _promising(kind: Kind, cuts: PipelineCuts, counts: Int64Array) -> list[int]:
    """Numbers of micro-batches, least bound first."""
    load = float(counts @ kind.units) / kind.num_replicas
    tokens = int(counts @ kind.lengths)
    least = -(-tokens // (kind.pipeline.micro_batch_tokens * kind.num_replicas))
    most = min(int(counts.sum()), kind.pipeline.max_micro_batches or 2**31)
    if least > most:
        return []
    ranked = sorted(cuts.slots, key=lambda slot: slot.at(load))
    numbers = [slot.num_micro_batches for slot in ranked if least <= slot.num_micro_batches <= most]
    return numbers[:_TRIES] or [max(1, min(least + 1, most))]


def _by_profile(kind: Kind, counts: Int64Array, number: int, deadline: float) -> Packing | None:
    """Sequences, longest first, each into the micro-batch that lacks most of its best real load; loads around long
    sequences are those without them where programs would end after the ``deadline``."""
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
        targets, placed = _around_long(kind, plain.units, long, load, deadline)
    return filled_towards(kind, targets, items[len(long) :], placed)


def _around_long(
    kind: Kind, plain: FloatArray, long: list[int], load: int, deadline: float
) -> tuple[list[FloatArray], list[tuple[int, int, int]]]:
    """Targets of every replica around its long sequences, and where these are: (replica, micro-batch, k)."""
    number, replicas = plain.size, kind.num_replicas
    held: list[list[int]] = [[] for _ in range(replicas)]
    for k in long:
        least = min(range(replicas), key=lambda r: sum(int(kind.units[one]) for one in held[r]))
        held[least].append(k)
    # Long sequences stand where the plain profile is highest.
    order = np.argsort(-plain, kind="stable")
    places = sorted(order[: max(len(one) for one in held)].tolist())
    targets, placed = [], []
    for replica, sequences in enumerate(held):
        floors = tuple(zip(places, (int(kind.units[k]) for k in sequences), strict=False))
        total = max(load, sum(least for _, least in floors))
        late = time.perf_counter() > deadline
        profile = None if late else best_profile(kind.pipeline, number, total, kind.cap_units, floors)
        targets.append(plain if profile is None else profile.units)
        placed += [(replica, place, k) for place, k in zip(places, sequences, strict=False)]
        if len(sequences) > number:
            # More long ones than micro-batches: the rest share.
            extra = sequences[number:]
            placed += [(replica, i % number, k) for i, k in enumerate(extra)]
    return targets, placed


def filled_towards(
    kind: Kind, targets: list[FloatArray], items: Int64Array, placed: list[tuple[int, int, int]]
) -> Packing | None:
    """Items in turn into the micro-batch with the most room under its target that has room for the tokens.

    ``targets`` are units of every replica's micro-batches, ``placed`` what is there: (replica, micro-batch, k).
    """
    most = max(one.size for one in targets)
    room = np.array([np.pad(one, (0, most - one.size), constant_values=-np.inf) for one in targets])
    tokens = np.where(np.isfinite(room), kind.pipeline.micro_batch_tokens, 0)
    packed = np.zeros((*room.shape, kind.units.size), np.int64)
    for replica, place, k in placed:
        packed[replica, place, k] += 1
        room[replica, place] -= kind.units[k]
        tokens[replica, place] -= kind.lengths[k]
    if (tokens < 0).any():
        return None
    for k in items.tolist():
        open_room = np.where(tokens >= kind.lengths[k], room, -np.inf)
        at = np.unravel_index(int(open_room.argmax()), room.shape)
        if not np.isfinite(open_room[at]):
            return None
        packed[at][k] += 1
        room[at] -= kind.units[k]
        tokens[at] -= kind.lengths[k]
    packing = Packing(kind, tuple(_used(replica) for replica in packed))
    return packing if _in_flight_fits(packing) else None


def _used(replica: Int64Array) -> Int64Array:
    """Without empty micro-batches."""
    return np.asarray(replica[replica.any(axis=1)])


def _in_flight_fits(packing: Packing) -> bool:
    return all(in_flight_fits(packing.kind, replica) for replica in packing.replicas)


def in_flight_fits(kind: Kind, replica: Int64Array) -> bool:
    """Whether every window of ``num_stages`` consecutive micro-batches [v, K] fits in the tokens in flight."""
    limit = kind.pipeline.in_flight_tokens
    if limit is None or not len(replica):
        return True
    tokens = np.concatenate(([0], np.cumsum(replica @ kind.lengths)))
    width = min(kind.pipeline.num_stages, len(replica))
    return bool((tokens[width:] - tokens[:-width] <= limit).all())


def _by_least_time(kind: Kind, counts: Int64Array) -> Packing | None:
    """Longest first, to the replica done first with it, into its fullest micro-batch with room (or a new one)."""
    pipeline = kind.pipeline
    bins: list[list[Int64Array]] = [[] for _ in range(kind.num_replicas)]
    rooms: list[list[int]] = [[] for _ in range(kind.num_replicas)]
    times = np.zeros(kind.num_replicas)
    items = np.repeat(np.arange(counts.size), counts)
    capacity = pipeline.micro_batch_tokens
    if pipeline.in_flight_tokens is not None:
        capacity = min(capacity, pipeline.in_flight_tokens)
    most = pipeline.max_micro_batches or items.size
    for k in items[np.argsort(-kind.units[items], kind="stable")].tolist():
        length, units = int(kind.lengths[k]), int(kind.units[k])
        fitting = [[room for room in one if room >= length] for one in rooms]
        after = [
            times[r] + units + (0 if fitting[r] else pipeline.micro_batch_units)
            if fitting[r] or len(bins[r]) < most
            else np.inf
            for r in range(kind.num_replicas)
        ]
        replica = int(np.argmin(after))
        if not np.isfinite(after[replica]):
            return None
        if fitting[replica]:
            place = rooms[replica].index(min(fitting[replica]))
        else:
            place = len(bins[replica])
            bins[replica].append(np.zeros(counts.size, np.int64))
            rooms[replica].append(capacity)
        bins[replica][place][k] += 1
        rooms[replica][place] -= length
        times[replica] = after[replica]
    return Packing(kind, tuple(np.array(one, np.int64).reshape(-1, counts.size) for one in bins))
