"""The best step of blocks over all families, with its proof, and as records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.block_bound import shared_work
from milpplan.lengths.block_packing import shortest
from milpplan.lengths.blocks import BlockStep, Run, families
from milpplan.lengths.pool import Pool
from milpplan.lengths.records import BlockRun, LengthGroup, SideBySide
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True, eq=False)
class BestBlocks:
    """The shortest ``step`` of blocks below what was asked, None if none was found; no step of any of
    ``num_families`` takes less than ``bound_ns`` (infinite without a family)."""

    step: BlockStep | None
    bound_ns: float
    num_families: int

    def record(self) -> SideBySide:
        """In seconds, with the runs of the step."""
        step = self.step
        return SideBySide(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_families,
            () if step is None else block_runs(step),
        )


def best_blocks(pool: Pool, below_ns: float, gap: float, deadline: float) -> BestBlocks:
    """The best step of all families shorter than ``below_ns``; families that could not save the ``gap`` are not
    searched, nor any after the ``deadline`` (of ``perf_counter``)."""
    found = sorted(((shared_work(one), one) for one in families(pool)), key=lambda pair: pair[0].bound_ns)
    least = min((shared.bound_ns for shared, _ in found), default=float("inf"))
    best: BlockStep | None = None
    for shared, family in found:
        if shared.bound_ns >= below_ns * (1.0 - gap):
            break
        step = shortest(family, shared, shared.bound_ns / (1.0 - gap / 2), deadline)
        if step.time_ns < below_ns:
            best, below_ns = step, step.time_ns
    return BestBlocks(best, least, len(found))


def block_runs(step: BlockStep) -> tuple[BlockRun, ...]:
    """Every run with its GPUs, in the order in which they start."""
    family = step.family
    found = []
    for run, start_ns, end_ns in zip(step.runs, step.starts_ns, step.ends_ns, strict=True):
        part = family.slots(run)
        found.append(
            BlockRun(
                strategy=family.pool.members[run.member].candidate.name,
                first_gpu=part.start * family.slot_gpus,
                num_gpus=(part.stop - part.start) * family.slot_gpus,
                start_s=start_ns / NS_PER_S,
                end_s=end_ns / NS_PER_S,
                micro_batches=_lengths(family.pool, run),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.start_s, one.first_gpu)))


def block_groups(step: BlockStep) -> tuple[LengthGroup, ...]:
    """What runs under every strategy; its replicas are the blocks of its degree. Groups overlap: ``time_s`` is
    from the first start to the last end of a group's runs. The reduction is the last one's."""
    return tuple(_group(step, member) for member in step.order)


def _group(step: BlockStep, member: int) -> LengthGroup:
    pool = step.family.pool
    candidate = pool.members[member].candidate
    mine = [place for place, run in enumerate(step.runs) if run.member == member]
    held = sum((step.runs[place].packed.sum(axis=0) for place in mine), np.zeros_like(pool.load.counts))
    blocks: list[tuple[tuple[int, ...], ...]] = [()] * candidate.layout.dp
    for place in mine:
        run = step.runs[place]
        blocks[run.block] += _lengths(pool, run)
    span_ns = max(step.ends_ns[place] for place in mine) - min(step.starts_ns[place] for place in mine)
    return LengthGroup(
        strategy=candidate.name,
        plan=candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(pool.load.lengths, held, strict=True) if count
        ),
        micro_batches=tuple(blocks),
        micro_batch_tokens=step.family.grains(member) * pool.load.grain,
        time_s=span_ns / NS_PER_S,
        reduce_s=step.family.reduce_ns / NS_PER_S if member == step.order[-1] else 0.0,
    )


def _lengths(pool: Pool, run: Run) -> tuple[tuple[int, ...], ...]:
    """Lengths of the sequences of every micro-batch of a run."""
    return tuple(tuple(np.repeat(pool.load.lengths, row).tolist()) for row in run.packed)
