"""Worker process for sets of strategies, used when no single strategy is in question any more.

Both processes use the same bounding steps; the worker begins with a copy of the search after screening. Sets whose
longest sequences run under the same strategy share the most expensive bounds, so they go to one process if both
keep enough work. Every request names the sets to work on; every reply has their bounds and the best step found. If
the worker dies, its sets return to this process.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import MilpplanError
from milpplan.lengths.steps import Step
from milpplan.lengths.turns.screening import Node
from milpplan.lengths.turns.turn_search import TurnSearch
from milpplan.parallel import WorkerProcess

# Seconds of a time slice; the minimum remaining seconds for which a worker is started.
_SLICE_S, _WORTH_S = 0.5, 4.0


@dataclass(frozen=True, eq=False)
class SetProcessInit:
    """First message: the search after screening."""

    search: TurnSearch

    def worker(self, gone: threading.Event) -> SetsWorker:
        """Return the object that answers the following messages."""
        # The parent process packs the first set and polishes steps.
        self.search.packed_first = self.search.polished = True
        return SetsWorker(self.search)


@dataclass(frozen=True, slots=True)
class SetProcessRequest:
    """Request for a time slice."""

    numbers: frozenset[int]
    """Sets to work on."""
    below_ns: float
    """Time to beat."""
    end_s: float
    """End of the search, by ``time.time``."""


@dataclass(frozen=True, slots=True)
class SetProcessReply:
    """Result of a time slice."""

    bounds: dict[int, tuple[float, float]]
    """Bound and cost of the order of every set in ns."""
    ended: frozenset[int]
    """Sets without further bounding steps."""
    best: Step | None
    """Best new step, if there is one."""
    cpu_s: float
    """CPU seconds so far."""


@dataclass(slots=True)
class SetsWorker:
    """Side of the worker process: answers requests."""

    search: TurnSearch
    num_reported: int = 0

    def reply(self, request: SetProcessRequest) -> SetProcessReply:
        """Work for a time slice and return its result."""
        search, now = self.search, time.perf_counter()
        search.below_ns = min(search.below_ns, request.below_ns)
        search.deadline = now + request.end_s - time.time()
        pause = min(now + _SLICE_S, search.deadline)
        nodes = [node for node in search.nodes if node.number in request.numbers]
        search.tighten(pause_ns=lambda: -np.inf if time.perf_counter() > pause else np.inf, sets=nodes)
        new = search.steps[self.num_reported :]
        self.num_reported = len(search.steps)
        return SetProcessReply(
            {node.number: (node.bound_ns, node.order_ns) for node in nodes},
            frozenset(node.number for node in nodes if not node.bounding_steps),
            min(new, key=lambda node: node.time_ns, default=None),
            time.process_time(),
        )


@dataclass(eq=False)
class SetProcess:
    """Side of the parent process: assigns open sets to the worker and takes finished ones back."""

    search: TurnSearch
    process: WorkerProcess | None
    assigned: dict[int, Node] = field(default_factory=dict)
    awaited: bool = False
    cpu_s: float = 0.0

    @staticmethod
    def of(search: TurnSearch) -> SetProcess | None:
        """Start the worker; None if there are too few open sets or too little time."""
        open_ = [node for node in search.nodes if node.bound_ns < search.target_ns]
        if len(open_) < 2 or search.deadline - time.perf_counter() < _WORTH_S:
            return None
        return SetProcess(search, WorkerProcess(SetProcessInit(search)))

    @property
    def busy(self) -> bool:
        """True if the worker has an open set."""
        return self.process is not None and any(self._open(self.assigned.values()))

    def share(self, nodes: list[Node]) -> None:
        """Poll the worker, take finished sets back into the heap ``left`` and assign new ones; no set is in both
        processes."""
        if self.process is None or (self.awaited and not self.process.answered):
            return
        if self.awaited:
            self.awaited = False
            try:
                self._take(self.process.answer(None, None), nodes)
            except MilpplanError:
                self.close()
                nodes += self.assigned.values()
                self.recall()
                heapq.heapify(nodes)
                return
        self._deal(nodes)
        heapq.heapify(nodes)
        numbers = frozenset(node.number for node in self._open(self.assigned.values()))
        if numbers:
            end_s = time.time() + self.search.deadline - time.perf_counter()
            self.process.send(SetProcessRequest(numbers, self.search.best.time_ns, end_s))
            self.awaited = True

    def _take(self, reply: SetProcessReply, nodes: list[Node]) -> None:
        """Apply the reply to the sets, some of which may have come back meanwhile."""
        self.cpu_s = reply.cpu_s
        if reply.best is not None:
            self.search.take(reply.best)
        for node in [*self.assigned.values(), *nodes]:
            bound_ns, order_ns = reply.bounds.get(node.number, (0.0, 0.0))
            node.raise_to(bound_ns)
            # The bound contains the order's cost.
            node.order_ns = max(node.order_ns, order_ns)
        target_ns = self.search.target_ns
        for number in [
            key for key, node in self.assigned.items() if key in reply.ended or node.bound_ns >= target_ns
        ]:
            node = self.assigned.pop(number)
            node.bounding_steps = []
            nodes.append(node)

    def _deal(self, nodes: list[Node]) -> None:
        """Give half of the open sets of one process to the other if that has none."""
        here, there = (
            sorted(node for node in self._open(nodes) if node.bounding_steps),
            sorted(self._open(self.assigned.values())),
        )
        if not there:
            self.assigned |= {node.number: node for node in self._half(here)}
            nodes[:] = [node for node in nodes if node.number not in self.assigned]
        elif not here:
            nodes += [self.assigned.pop(node.number) for node in self._half(there)]

    def _half(self, nodes: list[Node]) -> list[Node]:
        """Return every other class of sets by ``_holds_longest``, or every other set within a single class,
        without the first."""
        classes = list(dict.fromkeys(self._holds_longest(node) for node in nodes))
        if len(classes) == 1:
            return nodes[1::2]
        chosen = set(classes[1::2])
        return [node for node in nodes if self._holds_longest(node) in chosen]

    def _holds_longest(self, node: Node) -> int:
        """Return the strategy of the set with the largest capacity."""
        search = self.search
        return max(
            node.screened.strategies,
            key=lambda strategy: search.pool.max_quanta(search.members[strategy], shared_memory=True),
        )

    def _open(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes whose bound is below the target."""
        return [node for node in nodes if node.bound_ns < self.search.target_ns]

    def recall(self) -> None:
        """Return all assigned sets to this process."""
        self.assigned.clear()

    def close(self) -> None:
        """End the worker."""
        if self.process is not None:
            self.process.close(at_once=True)
            self.process = None
