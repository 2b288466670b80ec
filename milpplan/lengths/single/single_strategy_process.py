"""The steps of one strategy, looked after by another process while this one searches sets of strategies.

What both need of each other is little: how long the best step is. The other process works in slices; after each it
tells the best step of one strategy and what is proved of each, and is told what there is to beat. If it dies, what
it has told stays true, and this process goes on by itself.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import InfeasibleError, MilpplanError
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.single.single_strategy_search import SingleStrategySearch
from milpplan.lengths.steps import Step
from milpplan.lengths.strategy_tables import LoadsKey
from milpplan.optimize.search.worker_process import WorkerProcess, can_start, usable_cpus

# Seconds of a slice, and slices that it is asked for at once: for so long it is not heard while teams are searched
# and sets are screened.
_SLICE_S, _AHEAD = 1.5, 7
# Slices of the beginning, in which this process packs pipelines, so that the other one need not; and where it is
# heard all the time.
_FIRST_AHEAD, _FEW_AHEAD = 2, 2


@dataclass(frozen=True, eq=False)
class SingleProcessInit:
    """What the other process begins with."""

    search: SingleStrategySearch

    def worker(self, gone: threading.Event) -> SingleStrategyWorker:
        """Who answers the messages after this one."""
        return SingleStrategyWorker(self.search, reported_cache=dict(self.search.pool.work_bound_cache))


@dataclass(frozen=True, slots=True)
class SingleProcessRequest:
    """What is to beat, ns, the seconds of the slice, and when all ends, by ``time.time``; the ``best`` step of one
    strategy, if it was not told before, and the seconds that its packing took; whether pipelines are packed; the
    ``least`` time of each strategy in ns that is known here, what is ``taken`` to be proved here, what was
    ``packed``."""

    below_ns: float
    seconds: float
    end_s: float
    best: Step | None = None
    took_s: float = 0.0
    packs: bool = True
    bounds_ns: dict[int, float] = field(default_factory=dict)
    proved_elsewhere: frozenset[int] = frozenset()
    packed_elsewhere: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SingleProcessReply:
    """The best step of one strategy, whether more care may make it shorter (``rough``), the least time of each in
    ns, what programs raised of some pipelines, what else ``Pool.loaded`` has by now, the CPU seconds that it took
    so far; ``idle`` where nothing was left to do."""

    best: Step | None
    rough: bool
    bounds_ns: dict[int, float]
    raised_bounds: dict[int, PipelineWorkBound]
    work_bound_cache: dict[LoadsKey, PipelineWorkBound]
    cpu_s: float
    idle: bool


@dataclass(slots=True)
class SingleStrategyWorker:
    """Answers slices, in the other process."""

    search: SingleStrategySearch
    # What was told of pipelines.
    reported_bounds: dict[int, PipelineWorkBound] = field(default_factory=dict)
    reported_cache: dict[LoadsKey, PipelineWorkBound] = field(default_factory=dict)

    def reply(self, asked: SingleProcessRequest) -> SingleProcessReply:
        """What is known after a slice."""
        # It may have waited for long.
        now, left_s = time.perf_counter(), max(0.0, asked.end_s - time.time())
        pause = now + min(asked.seconds, left_s)
        self.search.packs = asked.packs
        self.search.raise_bounds(asked.bounds_ns)
        self.search.proved_elsewhere, self.search.packed_elsewhere = asked.proved_elsewhere, asked.packed_elsewhere
        if asked.best is not None:
            self.search.incumbents.take(asked.best, asked.took_s)
        with suppress(InfeasibleError):
            self.search.run(asked.below_ns, now + left_s, pause, eager=True)
        idle = time.perf_counter() < pause
        pool = self.search.pool
        loads = {member: pool.best_own_memory_bound(member) for member in {*self.search.configuration_bounds, *pool.adopted_work_bounds}}
        new = {member: one for member, one in loads.items() if self.reported_bounds.get(member) is not one}
        self.reported_bounds |= new
        others = {key: one for key, one in pool.work_bound_cache.items() if key[0] not in self.search.configuration_bounds}
        loaded = {key: one for key, one in others.items() if self.reported_cache.get(key) is not one}
        self.reported_cache |= loaded
        best, known = self.search.best, self.search.incumbents
        rough = best is not None and best.home not in known.polished
        return SingleProcessReply(best, rough, dict(self.search.bounds_ns), new, loaded, time.process_time(), idle)


def can_help(workers: int | None) -> bool:
    """Whether there may be another process: as many as there are CPUs, unless ``workers`` says how many."""
    return can_start() and (usable_cpus() if workers is None else workers) > 1


class SingleStrategyProcess:
    """Our end: ``statics`` is brought up to date by ``hear``."""

    def __init__(self, statics: SingleStrategySearch, below_ns: float, deadline: float) -> None:
        """Start it; the ``deadline`` is one of ``perf_counter``."""
        self.search, self.deadline = statics, deadline
        self.process: WorkerProcess | None = WorkerProcess(SingleProcessInit(statics))
        self.cpu_s, self.idle, self.num_awaited, self.asked_ns = 0.0, False, 0, np.inf
        self.reported_step = statics.best
        # What this process packs meanwhile is told later.
        self._ask(below_ns, _FIRST_AHEAD, packs=False)

    def _ask(self, below_ns: float, number: int = _AHEAD, *, packs: bool = True) -> None:
        """A few slices, so that it need not wait until it is heard."""
        assert self.process is not None
        self.asked_ns, self.idle = below_ns, False
        while self.num_awaited < number:
            end_s = time.time() + self.deadline - time.perf_counter()
            best = self.search.best if self.search.best is not self.reported_step else None
            given = best, self.search.incumbents.pack_time_s, packs, dict(self.search.bounds_ns)
            packed = frozenset({*self.search.incumbents.packed, *self.search.pack_attempts})
            self.process.send(
                SingleProcessRequest(below_ns, _SLICE_S, end_s, *given, frozenset(self.search.proved_here), packed)
            )
            self.reported_step = self.search.best
            self.num_awaited += 1

    def poll(self, below_ns: float, *, few: bool = False) -> bool:
        """Take over what it has told, and say what is to beat now, for ``few`` slices or more; False where it will
        tell nothing more: nothing is left to do, the time is over, or it died."""
        while self.process is not None and self.num_awaited and self.process.answered:
            self.num_awaited -= 1
            try:
                known: SingleProcessReply = self.process.answer(None, None)
            except MilpplanError:
                self.close()
                return False
            self.search.pool.merge_bounds(known.work_bound_cache)
            self.search.learn(known.best, known.bounds_ns, known.raised_bounds, rough=known.rough)
            self.cpu_s, self.idle = known.cpu_s, known.idle
        best, now = self.search.best, time.perf_counter()
        below_ns = below_ns if best is None else min(below_ns, best.time_ns)
        if self.process is None or now > self.deadline + (_SLICE_S if self.num_awaited else 0.0):
            return False
        if not self.idle or below_ns < self.asked_ns:
            self._ask(below_ns, _FEW_AHEAD if few else _AHEAD)
        return self.num_awaited > 0

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.close(at_once=True)
            self.process = None
