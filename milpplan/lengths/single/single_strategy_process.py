"""Worker process that searches single strategies while this process searches sets of strategies.

The processes exchange little: the time to beat. The worker runs in slices; each reply has its best step and its
bounds, each request the time to beat. If the worker dies, its results stay valid and this process continues alone.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import InfeasibleError, MilpplanError
from milpplan.lengths import Step
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.parameters import PARAMETERS
from milpplan.lengths.single.single_strategy_search import SingleStrategySearch
from milpplan.lengths.strategy_tables import WorkBoundKey
from milpplan.parallel import WorkerProcess, can_start, usable_cpus


@dataclass(frozen=True, eq=False)
class SingleProcessInit:
    """First message: the search as it stands."""

    search: SingleStrategySearch

    def worker(self, gone: threading.Event) -> SingleStrategyWorker:
        """Return the object that answers the following messages."""
        return SingleStrategyWorker(self.search, reported_cache=dict(self.search.pool.work_bound_cache))


@dataclass(frozen=True, slots=True)
class SingleProcessRequest:
    """Request for a slice."""

    below_ns: float
    """Time to beat."""
    seconds: float
    """Length of the slice."""
    end_s: float
    """End of the search, by ``time.time``."""
    best: Step | None = None
    """Best step of one strategy, if it is new."""
    took_s: float = 0.0
    """Seconds that its packing took."""
    packs: bool = True
    """True if the worker packs pipelines."""
    bounds_ns: dict[int, float] = field(default_factory=dict)
    """Bounds known here, by strategy."""
    proved_elsewhere: frozenset[int] = frozenset()
    """Strategies that the parent process proves."""
    packed_elsewhere: frozenset[int] = frozenset()
    """Strategies that the parent process packed."""


@dataclass(frozen=True, slots=True)
class SingleProcessReply:
    """Result of a slice."""

    best: Step | None
    """Best step of one strategy."""
    rough: bool
    """True if more effort may make it shorter."""
    bounds_ns: dict[int, float]
    """Bounds by strategy."""
    raised_bounds: dict[int, PipelineWorkBound]
    """Work bounds that programs raised."""
    work_bound_cache: dict[WorkBoundKey, PipelineWorkBound]
    """Other new entries of ``StrategyTables.work_bound_cache``."""
    cpu_s: float
    """CPU seconds so far."""
    idle: bool
    """True if there was nothing left to do."""


@dataclass(slots=True)
class SingleStrategyWorker:
    """Side of the worker process: answers requests."""

    search: SingleStrategySearch
    # Bounds that were reported before.
    reported_bounds: dict[int, PipelineWorkBound] = field(default_factory=dict)
    reported_cache: dict[WorkBoundKey, PipelineWorkBound] = field(default_factory=dict)

    def reply(self, request: SingleProcessRequest) -> SingleProcessReply:
        """Search for a slice and return its result."""
        # The request may have waited for long.
        now, left_s = time.perf_counter(), max(0.0, request.end_s - time.time())
        pause = now + min(request.seconds, left_s)
        self.search.packs = request.packs
        self.search.raise_bounds(request.bounds_ns)
        self.search.proved_elsewhere, self.search.packed_elsewhere = (
            request.proved_elsewhere,
            request.packed_elsewhere,
        )
        if request.best is not None:
            self.search.incumbents.take(request.best, request.took_s)
        with suppress(InfeasibleError):
            self.search.run(request.below_ns, now + left_s, pause, eager=True)
        idle = time.perf_counter() < pause
        pool = self.search.pool
        bounds = {
            member: pool.best_own_memory_bound(member)
            for member in {*self.search.configuration_bounds, *pool.adopted_work_bounds}
        }
        new_bounds = {
            member: bound for member, bound in bounds.items() if self.reported_bounds.get(member) is not bound
        }
        self.reported_bounds |= new_bounds
        other_entries = {
            key: bound
            for key, bound in pool.work_bound_cache.items()
            if key[0] not in self.search.configuration_bounds
        }
        new_entries = {
            key: bound for key, bound in other_entries.items() if self.reported_cache.get(key) is not bound
        }
        self.reported_cache |= new_entries
        best, incumbents = self.search.best, self.search.incumbents
        is_rough = best is not None and best.home not in incumbents.polished
        return SingleProcessReply(
            best, is_rough, dict(self.search.bounds_ns), new_bounds, new_entries, time.process_time(), idle
        )


def can_help(workers: int | None) -> bool:
    """Return whether a second process may start: there is more than one CPU, or ``workers`` allows it."""
    return can_start() and (usable_cpus() if workers is None else workers) > 1


class SingleStrategyProcess:
    """Side of the parent process: ``poll`` updates its ``search``."""

    def __init__(self, search: SingleStrategySearch, below_ns: float, deadline: float) -> None:
        """Start the worker; the ``deadline`` is one of ``perf_counter``."""
        self.search, self.deadline = search, deadline
        self.process: WorkerProcess | None = WorkerProcess(SingleProcessInit(search))
        self.cpu_s, self.idle, self.num_awaited, self.asked_ns = 0.0, False, 0, np.inf
        self.reported_step = search.best
        # What this process packs meanwhile is reported later.
        self._ask(below_ns, PARAMETERS.first_slices, packs=False)

    def _ask(self, below_ns: float, num_slices: int = PARAMETERS.slices_ahead, *, packs: bool = True) -> None:
        """Request some slices ahead, so that the worker does not wait for the next poll."""
        assert self.process is not None
        self.asked_ns, self.idle = below_ns, False
        while self.num_awaited < num_slices:
            end_s = time.time() + self.deadline - time.perf_counter()
            best = self.search.best if self.search.best is not self.reported_step else None
            message = best, self.search.incumbents.pack_time_s, packs, dict(self.search.bounds_ns)
            packed = frozenset({*self.search.incumbents.packed, *self.search.pack_attempts})
            self.process.send(
                SingleProcessRequest(
                    below_ns,
                    PARAMETERS.worker_slice_s,
                    end_s,
                    *message,
                    frozenset(self.search.proved_here),
                    packed,
                )
            )
            self.reported_step = self.search.best
            self.num_awaited += 1

    def poll(self, below_ns: float, *, few: bool = False) -> bool:
        """Take over the replies and request further slices for steps below ``below_ns``; return whether more
        replies will come.

        Args:
            below_ns: time to beat.
            few: request few slices, as this process polls often.
        """
        while self.process is not None and self.num_awaited and self.process.answered:
            self.num_awaited -= 1
            try:
                reply: SingleProcessReply = self.process.answer(None, None)
            except MilpplanError:
                self.close()
                return False
            self.search.pool.merge_bounds(reply.work_bound_cache)
            self.search.learn(reply.best, reply.bounds_ns, reply.raised_bounds, rough=reply.rough)
            self.cpu_s, self.idle = reply.cpu_s, reply.idle
        best, now = self.search.best, time.perf_counter()
        below_ns = below_ns if best is None else min(below_ns, best.time_ns)
        if self.process is None or now > self.deadline + (PARAMETERS.worker_slice_s if self.num_awaited else 0.0):
            return False
        if not self.idle or below_ns < self.asked_ns:
            self._ask(below_ns, PARAMETERS.few_slices if few else PARAMETERS.slices_ahead)
        return self.num_awaited > 0

    def close(self) -> None:
        """End the worker."""
        if self.process is not None:
            self.process.close(at_once=True)
            self.process = None
