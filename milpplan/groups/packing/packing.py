"""Packing: the sequences of every micro-batch of every replica of one kind of pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.pipeline_time import pipeline_times_ns
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Int64Array


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences of every micro-batch of every replica of a kind: arrays [micro-batches, K] of counts."""

    kind: Kind
    replicas: tuple[Int64Array, ...]

    def loads(self, replica: int) -> Int64Array:
        """Return the units of the micro-batches of a replica, empty micro-batch included, [micro-batches]."""
        return np.asarray(self.replicas[replica] @ self.kind.units + self.kind.pipeline.micro_batch_units)

    def times_ns(self) -> Int64Array:
        """Return the exact time of every replica, [replicas]."""
        times = [
            int(pipeline_times_ns(self.kind.pipeline, self.loads(replica)))
            for replica in range(len(self.replicas))
        ]
        return np.array(times, np.int64)

    @property
    def time_ns(self) -> int:
        """Time of the slowest replica, ns."""
        return int(self.times_ns().max(initial=0))


def in_flight_fits(kind: Kind, replica: Int64Array) -> bool:
    """Check that every ``num_stages`` consecutive micro-batches [v, K] fit in the tokens in flight."""
    limit = kind.pipeline.in_flight_tokens
    if limit is None or not len(replica):
        return True
    tokens = np.concatenate(([0], np.cumsum(replica @ kind.lengths)))
    width = min(kind.pipeline.num_stages, len(replica))
    return bool((tokens[width:] - tokens[:-width] <= limit).all())
