"""Buckets of lengths: every sequence is padded to the end of its bucket, with minimum padded work."""

from __future__ import annotations

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.groups.strategies import FloatArray, Int64Array

# The dynamic program holds this many squared costs, for all pairs of ends.
MAX_DISTINCT = 4096


def optimal_buckets(lengths: Int64Array, counts: Int64Array, work: FloatArray, num_buckets: int) -> Int64Array:
    """Choose the ends of at most ``num_buckets`` buckets of ascending ``lengths`` [K], for minimum padded work.

    Padded work is sum_k counts_k work_e(k), with e(k) the end of k's bucket and ``work`` [K] (not falling) the
    work of one sequence of each length: tokens, or a time. Ends are lengths that occur, since any other could be
    lowered to one. Dynamic program over ends: B[b, i] = min_j B[b - 1, j] + work_i (n_{j+1} + ... + n_i), in
    O(num_buckets K^2); the form of FlexSP's bucketing (2412.01523), with any work.
    """
    number = lengths.size
    if not num_buckets >= 1 or number == 0 or counts.shape != lengths.shape or work.shape != lengths.shape:
        raise InvalidInputError(
            f"{num_buckets} buckets for {number} lengths, {counts.size} counts, {work.size} works.",
            "At least one bucket, and as many counts and works as lengths, expected.",
            "Correct the number of buckets.",
        )
    if number > MAX_DISTINCT:
        raise InvalidInputError(
            f"There are {number} distinct lengths.",
            f"At most {MAX_DISTINCT} expected.",
            "Align them to more tokens first.",
        )
    if (np.diff(lengths) <= 0).any() or (np.diff(work) < 0).any():
        raise InvalidInputError(
            "Lengths or their works fall.",
            "Ascending lengths with works that do not fall expected.",
            "Sort them.",
        )
    sums = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    best = np.full(number + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(num_buckets, number)):
        # costs[i, j]: buckets before j, then one that holds lengths j .. i - 1.
        costs = best[None, :-1] + work[:, None] * (sums[1:, None] - sums[None, :-1])
        costs[np.triu_indices(number, 1)] = np.inf
        choices.append(costs.argmin(axis=1))
        best = np.concatenate(([0.0], costs.min(axis=1)))
    ends = []
    end = number
    for choice in reversed(choices):
        if end == 0:
            break
        ends.append(int(lengths[end - 1]))
        end = int(choice[end - 1])
    return np.array(ends[::-1], np.int64)


def padded(lengths: Int64Array, ends: Int64Array) -> Int64Array:
    """Return the end of every length's bucket; shape of ``lengths``."""
    buckets = np.searchsorted(ends, lengths)
    if (buckets >= ends.size).any():
        raise InvalidInputError(
            f"The longest sequence has {int(lengths.max())} tokens.",
            f"At most {int(ends[-1])}, the last bucket's end, expected.",
            "Add a bucket that ends above it, or cut sequences (--seq-len).",
        )
    return np.asarray(ends[buckets])
