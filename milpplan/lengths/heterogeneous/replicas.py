"""Steps of unlike replicas: pipelines of different tensor, context and pipeline parallelism at the same time.

**The space.** Replicas of any strategies of the pool share the GPUs, so many of each, until all GPUs have one; a
replica may stay without sequences. Expert parallelism spans replicas, so it is left out, and so are orders of
ranks but the usual one. All hold the whole model and see sequences of their own, so they meet only after the last
backward of all, in one reduction:

    step = max over replicas of their times + reduction + finish

A step of one strategy is one of these, and not looked at again here. Source of the idea: Hydraulis (2412.07894),
whose micro-batches go to pipelines of unlike parallelism.

**States and reduction.** Each replica of g of the N GPUs keeps the share g / N of the optimizer's states of every
parameter, divided among its ranks that hold it: so every GPU has 1 / N of all, as in a step of its strategy alone,
and memory is that of ``candidates``. A rank of a replica sends away all gradients but those of its own share, and
receives as much in parameters: what it does in a reduction among replicas like itself. So once a step, reduction
and finish take as long as they take the slowest of the strategies in use, each alone.

**Places.** Replicas of more GPUs that work closely together (tp cp) come first. Where each of these sizes divides
the next larger one, every tensor- and context-parallel group stands at a multiple of its size, so it spans what it
spans in a step of its strategy alone; stages of one replica are next to each other, so transfers between stages
are at most those of that step, where stages are farthest apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from milpplan.lengths.records import LengthGroup, TeamTurn
from milpplan.lengths.replica_time import replicas_ns
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.units import NS_PER_S


@dataclass(frozen=True, eq=False)
class HeterogeneousStep:
    """A step at its exact time: replicas of every member of the pool with their sequences."""

    pool: StrategyTables
    packed: dict[int, Packed]
    time_ns: int

    @staticmethod
    def of(pool: StrategyTables, packed: Mapping[int, Packed]) -> HeterogeneousStep:
        """With its time."""
        time_ns = max(one.time_ns for one in packed.values())
        return HeterogeneousStep(pool, dict(packed), time_ns + reduce_ns(pool, packed) + finish_ns(pool, packed))

    @property
    def order(self) -> tuple[int, ...]:
        """Members in the order of their GPUs: those whose ranks work most closely together first."""
        return tuple(sorted(self.packed, key=lambda one: (-close(self.pool, one), one)))

    @property
    def home(self) -> int:
        """The strategy that the finish is as long as."""
        return max(self.packed, key=self.pool.finish_ns)

    def first_gpus(self, member: int) -> list[int]:
        """The first GPU of each of its replicas, with sequences or without."""
        start = 0
        for one in self.order:
            size, number = replica_gpus(self.pool, one), len(self.packed[one].replicas)
            if one == member:
                return [start + size * place for place in range(number)]
            start += size * number
        raise KeyError(member)


def heterogeneous_members(pool: StrategyTables) -> list[int]:
    """Strategies whose replicas may stand beside others."""
    layouts = [one.candidate.layout for one in pool.members]
    fits = [one.ep == one.etp == 1 and one.dp > 1 and one.rank_order == "tp-cp-dp-pp" for one in layouts]
    return [member for member, fit in enumerate(fits) if fit]


def replica_gpus(pool: StrategyTables, member: int) -> int:
    """GPUs of one replica."""
    layout = pool.members[member].candidate.layout
    return layout.num_gpus // layout.dp


def close(pool: StrategyTables, member: int) -> int:
    """Ranks of a stage."""
    layout = pool.members[member].candidate.layout
    return layout.tp * layout.cp


def have_places(pool: StrategyTables, numbers: Mapping[int, int]) -> bool:
    """Whether so many replicas of each member fill all GPUs, each where it may stand."""
    sizes = sorted({close(pool, member) for member in numbers})
    used = sum(number * replica_gpus(pool, member) for member, number in numbers.items())
    nested = all(larger % smaller == 0 for smaller, larger in pairwise(sizes))
    return nested and used == pool.members[0].candidate.layout.num_gpus


def reduce_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """The reduction among replicas of these members."""
    return max(map(pool.reduce_ns, members))


def finish_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """Norm, update and gather."""
    return max(map(pool.finish_ns, members))


def heterogeneous_turns(step: HeterogeneousStep) -> tuple[TeamTurn, ...]:
    """What every replica with sequences runs, in the order of their GPUs."""
    pool, found = step.pool, []
    for member in step.order:
        one, replicas = pool.members[member].candidate, step.packed[member].replicas
        times = replicas_ns(pool.problem, one, pool.load.lengths, replicas, pool.load.rules.mask).tolist()
        held = pool.micro_batches(replicas)
        for first, time_ns, micro_batches in zip(step.first_gpus(member), times, held, strict=True):
            if micro_batches:
                size = replica_gpus(pool, member)
                found.append(TeamTurn(one.name, first, size, 0.0, time_ns / NS_PER_S, micro_batches))
    return tuple(found)


def heterogeneous_groups(step: HeterogeneousStep) -> tuple[LengthGroup, ...]:
    """What runs under every strategy that has sequences, at the same time; the one reduction is the last one's."""
    pool, used = step.pool, [member for member in step.order if step.packed[member].time_ns]
    last_s = reduce_ns(pool, step.packed) / NS_PER_S
    grains = {member: pool.max_quanta(member, shared_memory=False) for member in used}
    return tuple(
        pool.group(one, step.packed[one], grains[one], last_s if one == used[-1] else 0.0) for one in used
    )
