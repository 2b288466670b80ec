"""Packing heuristic for heterogeneous replicas; the results are timed exactly.

The assignment of the program of ``step_bound`` is rounded, packed on each strategy's replicas, and then improved
by local search over all replicas together: sequences move between them whatever their strategies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.heterogeneous.replicas import (
    HeterogeneousStep,
    have_places,
    heterogeneous_members,
    replica_gpus,
)
from milpplan.lengths.single.construct_packing import packings_by_shape
from milpplan.lengths.single.packing_local_search import Replica, Timer, improved_replicas
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Relative excess up to which a packing from load shapes is preferred, as it gains more by local search.
_SHAPED = 0.02
# Effort of the first local search, and of a longer one.
_EFFORT, _MORE_EFFORT = 120_000, 400_000
# Seconds for the load shapes of one strategy.
_SHAPE_S = 0.4


@dataclass(frozen=True, eq=False)
class HeterogeneousPacker:
    """Packer of a pool's strategies side by side."""

    pool: StrategyTables
    timers: dict[int, Timer] = field(default_factory=dict)

    def pack(
        self, numbers: Mapping[int, int], loads: Mapping[int, FloatArray], deadline: float
    ) -> HeterogeneousStep | None:
        """Pack a step of some replicas.

        Args:
            numbers: number of replicas by member.
            loads: approximate sequences [n] by member.
            deadline: of ``perf_counter``; later with little effort.

        Returns:
            The step; None if not all GPUs can be filled, or a strategy was not packed.
        """
        pool, counts_of = self.pool, self._filled(numbers)
        if counts_of is None:
            return None
        replicas: list[Replica] = []
        owners: list[int] = []
        rounded = self._whole(loads)
        if rounded is None:
            return None
        for member, counts in rounded.items():
            packed = self._alone(member, counts, counts_of[member], deadline)
            if packed is None:
                return None
            replicas += [Replica.of(self._timer(member), replica) for replica in packed.replicas]
            owners += [member] * counts_of[member]
        for member in sorted(set(counts_of) - set(owners)):
            empty = np.zeros((0, len(pool.load.counts)), dtype=np.int64)
            replicas += [Replica.of(self._timer(member), empty)] * counts_of[member]
            owners += [member] * counts_of[member]
        return self._step(owners, improved_replicas(replicas, _EFFORT))

    def _alone(self, member: int, counts: IntArray, number: int, deadline: float) -> Packed | None:
        """Pack ``counts`` [n] sequences on ``number`` replicas of a strategy; pipelines prefer load shapes unless
        these are much longer."""
        pool, quanta = self.pool, self._grains(member)
        first_packing = pool.pack(member, counts, quanta, deadline, number)
        if first_packing is None or pool.num_stages(member) == 1:
            return first_packing
        work_bound, load = pool.best_own_memory_bound(member), replace(pool.load, counts=counts)
        sequence_loads = work_bound.sequence_loads * work_bound.num_replicas / number
        scaled = replace(
            work_bound,
            sequence_loads=sequence_loads,
            num_replicas=number,
            total_load=float(sequence_loads @ counts),
        )
        end = min(deadline, time.perf_counter() + _SHAPE_S)
        packings = [
            pool.time_packing(member, replicas, quanta)
            for replicas in packings_by_shape(scaled, load, quanta, end)
        ]
        best = min(packings, key=lambda packing: packing.time_ns, default=first_packing)
        return best if best.time_ns <= first_packing.time_ns * (1.0 + _SHAPED) else first_packing

    def polish(self, step: HeterogeneousStep) -> HeterogeneousStep:
        """Improve a step by a longer local search; return the shorter one."""
        pairs = [(member, replica) for member, packed in step.packed.items() for replica in packed.replicas]
        replicas = [Replica.of(self._timer(member), replica) for member, replica in pairs]
        improved_step = self._step([member for member, _ in pairs], improved_replicas(replicas, _MORE_EFFORT))
        return min(step, improved_step, key=lambda replica: replica.time_ns)

    def _filled(self, numbers: Mapping[int, int]) -> dict[int, int] | None:
        """Add empty replicas so that all GPUs are filled; None if that is impossible."""
        pool, counts_of = self.pool, dict(numbers)
        free_gpus = pool.members[0].candidate.layout.num_gpus
        free_gpus -= sum(number * replica_gpus(pool, member) for member, number in counts_of.items())
        for member in sorted(
            [*counts_of, *heterogeneous_members(pool)], key=lambda candidate: -replica_gpus(pool, candidate)
        ):
            size = replica_gpus(pool, member)
            extended = {**counts_of, member: counts_of.get(member, 0) + free_gpus // size}
            if free_gpus and free_gpus % size == 0 and have_places(pool, extended):
                return extended
        return counts_of if have_places(pool, counts_of) else None

    def _whole(self, loads: Mapping[int, FloatArray]) -> dict[int, IntArray] | None:
        """Round ``loads`` to whole sequences, the longest first; None if a sequence fits nowhere.

        A remaining sequence goes to the strategy that is furthest behind its share of the time.
        """
        pool, members = self.pool, list(loads)
        shares = np.array([pool.linear_bounds(member, shared_memory=False).shares[0] for member in members])
        wanted = np.array([loads[member] for member in members])
        counts, fits = pool.load.counts, np.isfinite(shares)
        if not fits.any(axis=0).all():
            return None
        # A stopped program may have left sequences out.
        wanted = np.where(fits & (wanted.sum(axis=0) < 1e-6), 1.0, wanted)
        wanted *= counts / np.maximum(wanted.sum(axis=0), 1e-9)
        rounded = np.zeros(wanted.shape, dtype=np.int64)
        behind = np.zeros(len(members))
        for length in range(len(counts) - 1, -1, -1):
            takers = np.flatnonzero(wanted[:, length] > 0.0)
            floors = np.floor(wanted[:, length] + 1e-6).astype(np.int64)
            remainders = wanted[:, length] - floors
            for _ in range(int(counts[length] - floors.sum())):
                behind_ns = behind[takers] + remainders[takers] * shares[takers, length]
                chosen = takers[int(behind_ns.argmax())]
                floors[chosen] += 1
                remainders[chosen] -= 1.0
            behind[takers] += remainders[takers] * shares[takers, length]
            rounded[:, length] = floors
        return {member: row for member, row in zip(members, rounded, strict=True) if row.any()}

    def _step(self, owners: list[int], replicas: list[Replica]) -> HeterogeneousStep:
        """Return the exact step."""
        packings = {}
        for member in dict.fromkeys(owners):
            own = [replica.packed for owner, replica in zip(owners, replicas, strict=True) if owner == member]
            packings[member] = self.pool.time_packing(member, tuple(own), self._grains(member))
        return HeterogeneousStep.of(self.pool, packings)

    def _timer(self, member: int) -> Timer:
        if member not in self.timers:
            self.timers[member] = Timer.of(self.pool.tables[member], self._grains(member))
        return self.timers[member]

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)
