"""Steps of so many unlike replicas each, packed: heuristics only, timed exactly.

What the program of ``unlike_bound`` puts under each strategy is made whole, packed on its replicas alone, and then
improved on all replicas together: sequences go from one to the other whatever their strategies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths.heterogeneous.replicas import HeterogeneousStep, have_places, replica_gpus, heterogeneous_members
from milpplan.lengths.single.construct_packing import shaped
from milpplan.lengths.single.packing_local_search import Replica, Timer, improved_replicas
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Packings by the shapes of real loads gain more by more care than others: they may begin longer by this part.
_SHAPED = 0.02
# Work of an improvement: of the first one, and of more care.
_EFFORT, _MORE_EFFORT = 120_000, 400_000
# Seconds for the shapes of real loads of one strategy.
_SHAPE_S = 0.4


@dataclass(frozen=True, eq=False)
class HeterogeneousPacker:
    """Packings of a pool's strategies side by side."""

    pool: StrategyTables
    timers: dict[int, Timer] = field(default_factory=dict)

    def pack(
        self, numbers: Mapping[int, int], loads: Mapping[int, FloatArray], deadline: float
    ) -> HeterogeneousStep | None:
        """So many replicas of each member, which hold about so many sequences [n] together; None where not all
        GPUs can be filled, or a strategy was not packed. After the ``deadline`` (of ``perf_counter``) with little
        care."""
        pool, full = self.pool, self._filled(numbers)
        if full is None:
            return None
        replicas: list[Replica] = []
        owners: list[int] = []
        whole = self._whole(loads)
        if whole is None:
            return None
        for member, counts in whole.items():
            packed = self._alone(member, counts, full[member], deadline)
            if packed is None:
                return None
            replicas += [Replica.of(self._timer(member), one) for one in packed.replicas]
            owners += [member] * full[member]
        for member in sorted(set(full) - set(owners)):
            empty = np.zeros((0, len(pool.load.counts)), dtype=np.int64)
            replicas += [Replica.of(self._timer(member), empty)] * full[member]
            owners += [member] * full[member]
        return self._step(owners, improved_replicas(replicas, _EFFORT))

    def _alone(self, member: int, counts: IntArray, number: int, deadline: float) -> Packed | None:
        """So many sequences [n] on so many replicas of a strategy; of a pipeline by the shape of its best real
        loads, if that is not much longer."""
        pool, grains = self.pool, self._grains(member)
        packed = pool.pack(member, counts, grains, deadline, number)
        if packed is None or pool.num_stages(member) == 1:
            return packed
        known, load = pool.best_own_memory_bound(member), replace(pool.load, counts=counts)
        each = known.sequence_loads * known.num_replicas / number
        part = replace(known, sequence_loads=each, num_replicas=number, total_load=float(each @ counts))
        end = min(deadline, time.perf_counter() + _SHAPE_S)
        ways = [pool.time_packing(member, one, grains) for one in shaped(part, load, grains, end)]
        best = min(ways, key=lambda one: one.time_ns, default=packed)
        return best if best.time_ns <= packed.time_ns * (1.0 + _SHAPED) else packed

    def polish(self, step: HeterogeneousStep) -> HeterogeneousStep:
        """The step with more care."""
        pairs = [(member, one) for member, packed in step.packed.items() for one in packed.replicas]
        replicas = [Replica.of(self._timer(member), one) for member, one in pairs]
        found = self._step([member for member, _ in pairs], improved_replicas(replicas, _MORE_EFFORT))
        return min(step, found, key=lambda one: one.time_ns)

    def _filled(self, numbers: Mapping[int, int]) -> dict[int, int] | None:
        """Numbers with as many empty replicas as fill the GPUs."""
        pool, full = self.pool, dict(numbers)
        rest = pool.members[0].candidate.layout.num_gpus
        rest -= sum(number * replica_gpus(pool, member) for member, number in full.items())
        for member in sorted([*full, *heterogeneous_members(pool)], key=lambda one: -replica_gpus(pool, one)):
            size = replica_gpus(pool, member)
            more = {**full, member: full.get(member, 0) + rest // size}
            if rest and rest % size == 0 and have_places(pool, more):
                return more
        return full if have_places(pool, full) else None

    def _whole(self, loads: Mapping[int, FloatArray]) -> dict[int, IntArray] | None:
        """Whole sequences near ``loads``, the longest first: where a share is left over, it goes to whoever is
        behind most of what it should take. None where a sequence fits nowhere."""
        pool, members = self.pool, list(loads)
        shares = np.array([pool.linear_bounds(member, shared_memory=False).shares[0] for member in members])
        wanted = np.array([loads[member] for member in members])
        counts, fits = pool.load.counts, np.isfinite(shares)
        if not fits.any(axis=0).all():
            return None
        # A program that was stopped may have left something out.
        wanted = np.where(fits & (wanted.sum(axis=0) < 1e-6), 1.0, wanted)
        wanted *= counts / np.maximum(wanted.sum(axis=0), 1e-9)
        found = np.zeros(wanted.shape, dtype=np.int64)
        behind = np.zeros(len(members))
        for length in range(len(counts) - 1, -1, -1):
            some = np.flatnonzero(wanted[:, length] > 0.0)
            given = np.floor(wanted[:, length] + 1e-6).astype(np.int64)
            missing = wanted[:, length] - given
            for _ in range(int(counts[length] - given.sum())):
                late = behind[some] + missing[some] * shares[some, length]
                chosen = some[int(late.argmax())]
                given[chosen] += 1
                missing[chosen] -= 1.0
            behind[some] += missing[some] * shares[some, length]
            found[:, length] = given
        return {member: one for member, one in zip(members, found, strict=True) if one.any()}

    def _step(self, owners: list[int], replicas: list[Replica]) -> HeterogeneousStep:
        """The exact one."""
        found = {}
        for member in dict.fromkeys(owners):
            mine = [one.packed for owner, one in zip(owners, replicas, strict=True) if owner == member]
            found[member] = self.pool.time_packing(member, tuple(mine), self._grains(member))
        return HeterogeneousStep.of(self.pool, found)

    def _timer(self, member: int) -> Timer:
        if member not in self.timers:
            self.timers[member] = Timer.of(self.pool.tables[member], self._grains(member))
        return self.timers[member]

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)
