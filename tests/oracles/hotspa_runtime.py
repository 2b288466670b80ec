"""The packing of HotSPa's runtime.

Source: ccchengff/HotSPa-AE 941a18d, hotspa/llama_hot_switch.py (Bucket, sort_and_pack_for_global_batch).
"""

from __future__ import annotations

from collections.abc import Sequence


def runtime_packs(lengths: Sequence[int], bucket_sizes: Sequence[int]) -> list[list[list[int]]]:
    """Return the packs of every bucket, longest bucket first, by the runtime's own packing; lengths in packs.

    A length counts trained tokens; in a pack each sequence takes one token more, its last label, and the pack
    holds b_j + 1. A sequence above b_0 is cut to it (the data set truncates).
    """
    buckets: list[list[list[int]]] = [[] for _ in bucket_sizes[1:]]
    for length in sorted((min(tokens, bucket_sizes[0]) for tokens in lengths), reverse=True):
        j = next(i for i, edge in enumerate(bucket_sizes[1:]) if length > edge)
        capacity = bucket_sizes[j] + 1
        fitting = next((pack for pack in buckets[j] if sum(pack) + len(pack) + length + 1 <= capacity), None)
        if fitting is None:
            buckets[j].append([length])
        else:
            fitting.append(length)
    return buckets
