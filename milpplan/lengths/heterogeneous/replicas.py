"""Steps of heterogeneous replicas: pipelines of different tensor, context and pipeline parallelism at the same
time.

**The space.** Replicas of any strategies of the pool share the GPUs, until all GPUs have one; a replica may stay
without sequences. Expert parallelism spans replicas, so it is left out, and so are orders of ranks but the default
one. All replicas hold the whole model and see sequences of their own, so they meet only after the last backward of
all, in one reduction:

    step = max over replicas of their times + reduction + finish

A step of one strategy is a special case, and not searched again here.

**States and reduction.** Each replica of g of the N GPUs keeps the share g / N of the optimizer's states of every
parameter, divided among its ranks that hold it. So every GPU has 1 / N of all, as in a step of its strategy by
itself, and memory is that of ``candidates``. A rank of a replica sends away all gradients but those of its own
share, and receives as much in parameters, as in a reduction among equal replicas. So once a step, reduction and
finish take as long as for the slowest of the strategies in use.

**Placement.** Replicas with larger groups (tp cp) come first. If each of these sizes divides the next larger one,
every tensor- and context-parallel group starts at a multiple of its size, so it spans the same links as in a step
of its strategy by itself. Stages of one replica are next to each other, so transfers between stages take at most
as long as in that step, where stages are farthest apart.

Source: Hydraulis (2412.07894), whose micro-batches go to pipelines of different parallelism.
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
    """A step at its exact time: replicas of members of the pool with their sequences."""

    pool: StrategyTables
    packed: dict[int, Packed]
    time_ns: int

    @staticmethod
    def of(pool: StrategyTables, packed: Mapping[int, Packed]) -> HeterogeneousStep:
        """Build the step with its time."""
        time_ns = max(packing.time_ns for packing in packed.values())
        return HeterogeneousStep(pool, dict(packed), time_ns + reduce_ns(pool, packed) + finish_ns(pool, packed))

    @property
    def order(self) -> tuple[int, ...]:
        """Members in the order of their GPUs: the largest groups first."""
        return tuple(sorted(self.packed, key=lambda member: (-close(self.pool, member), member)))

    @property
    def home(self) -> int:
        """The strategy with the slowest finish."""
        return max(self.packed, key=self.pool.finish_ns)

    def first_gpus(self, member: int) -> list[int]:
        """Return the first GPU of each replica of a member, with sequences or without."""
        start = 0
        for owner in self.order:
            size, number = replica_gpus(self.pool, owner), len(self.packed[owner].replicas)
            if owner == member:
                return [start + size * index for index in range(number)]
            start += size * number
        raise KeyError(member)


def heterogeneous_members(pool: StrategyTables) -> list[int]:
    """Return the strategies whose replicas may run beside others."""
    layouts = [candidate.candidate.layout for candidate in pool.members]
    allowed = [
        candidate.ep == candidate.etp == 1 and candidate.dp > 1 and candidate.rank_order == "tp-cp-dp-pp"
        for candidate in layouts
    ]
    return [member for member, is_allowed in enumerate(allowed) if is_allowed]


def replica_gpus(pool: StrategyTables, member: int) -> int:
    """Return the number of GPUs of one replica."""
    layout = pool.members[member].candidate.layout
    return layout.num_gpus // layout.dp


def close(pool: StrategyTables, member: int) -> int:
    """Return the number of ranks of a stage."""
    layout = pool.members[member].candidate.layout
    return layout.tp * layout.cp


def have_places(pool: StrategyTables, numbers: Mapping[int, int]) -> bool:
    """Return whether ``numbers`` of replicas fill all GPUs with every group at a multiple of its size."""
    sizes = sorted({close(pool, member) for member in numbers})
    used = sum(number * replica_gpus(pool, member) for member, number in numbers.items())
    nested = all(larger % smaller == 0 for smaller, larger in pairwise(sizes))
    return nested and used == pool.members[0].candidate.layout.num_gpus


def reduce_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """Return the time of the reduction among replicas of these members."""
    return max(map(pool.reduce_ns, members))


def finish_ns(pool: StrategyTables, members: Mapping[int, object]) -> int:
    """Return the time of norm, update and gather."""
    return max(map(pool.finish_ns, members))


def heterogeneous_turns(step: HeterogeneousStep) -> tuple[TeamTurn, ...]:
    """Return what every replica with sequences runs, in the order of their GPUs."""
    pool, turns = step.pool, []
    for member in step.order:
        candidate, replicas = pool.members[member].candidate, step.packed[member].replicas
        times = replicas_ns(pool.problem, candidate, pool.load.lengths, replicas, pool.load.rules.mask).tolist()
        lengths_of = pool.micro_batches(replicas)
        for first, time_ns, micro_batches in zip(step.first_gpus(member), times, lengths_of, strict=True):
            if micro_batches:
                size = replica_gpus(pool, member)
                turns.append(TeamTurn(candidate.name, first, size, 0.0, time_ns / NS_PER_S, micro_batches))
    return tuple(turns)


def heterogeneous_groups(step: HeterogeneousStep) -> tuple[LengthGroup, ...]:
    """Return the groups of the strategies with sequences; the reduction belongs to the last one."""
    pool, running = step.pool, [member for member in step.order if step.packed[member].time_ns]
    last_s = reduce_ns(pool, step.packed) / NS_PER_S
    quanta = {member: pool.max_quanta(member, shared_memory=False) for member in running}
    return tuple(
        pool.group(member, step.packed[member], quanta[member], last_s if member == running[-1] else 0.0)
        for member in running
    )
