"""A pipeline's bound by the longest sequence of every replica.

Whether D replicas can do a workload within a time Z is in ``filled`` the question of what one with the longest
sequence does, and D - 1 others. But every replica has a longest sequence, its *leader*, around which stages wait,
and not all of the others lead with short ones: sequences longer than a leader are elsewhere. So replicas are told
apart by their leaders, in classes c of lengths. One led by class c does no more than V_c(Z), which windows around
a micro-batch with such a sequence leave for contents without longer ones. In the order of their leaders, the
longest first, replicas 1 to i - 1 hold all sequences that are longer than those of the class of replica i:

    V_c1 + ... + V_c(i-1) >= load of all classes above ci,        V_c1 + ... + V_cD >= load of all,

and they are as many as these sequences need at least (``together``). If no chain of classes (``leader_chains``)
has that, Z is too short.

**Prices of chains.** V_c counts what is done most cheaply, of all classes the same sequences. What is true of
loads is true whatever sequences are worth: so the windows that do most in the chain that does most are asked
together for the prices by which they do least of the workload (``chain_programs``), and chains are looked at with
these worths, too; windows that do most then join, and are asked again.

**More than one.** Programs share out what a micro-batch holds, the second long sequence of a replica among all of
them, where it makes no stage wait. A leader is the foremost of its class, and windows are parted by whether the
micro-batch of which programs share one out most holds one, too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.long_sequence import WindowBound, halved
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.lengths.bounds.class_assignments import MAX_ASSIGNMENTS, ClassAssignments
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.min_replicas import MinReplicas
from milpplan.lengths.bounds.restricted_master import ClassWindow, restricted_master_duals
from milpplan.lengths.bounds.window_tree import Duals, WindowNode, WindowTree
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Classes begin at these parts of the load of the longest sequence: around shorter ones stages wait no longer.
_EDGES = (0.55, 0.7, 0.8, 0.9)
# Programs of real loads for a class.
_EFFORT = 30
# Halvings of the interval of the bound, and how much longer an interval is looked at first.
_HALVINGS, _LONGER = 14, 1.01
# Where a time for which nothing more is to be had is so near what is proved, nothing more is tried.
_NEAR = 1.002
# Micro-batches of which it is told whether they hold a long sequence, too.
_MOST_TOLD = 12
# Of a leader's load that a replica has at least, whatever sums of floats may lose.
_SAFETY = 1.0 - 1e-6
_NONE = -np.inf
# All of more micro-batches than programs of all of them are for.
_MANY = Window((0, 0), (63, 63), (False, True))
# Seconds in which it is asked what sequences are worth for a chain, how often that is, and what a sequence is
# worth at least of what it was before.
_ASK_S, _ASKED, _LEAST_WORTH = 4.0, 12, 0.5

Classes = list[tuple[int, int]]
"""Of lengths: from which number on, up to one before which."""


Coverings = dict[int, tuple[tuple[WindowTree, ...], ...]]
"""By class: sides that cover all replicas that it leads, in one way or another."""


@dataclass(eq=False)
class ReplicaClassBound:
    """What replicas led by each class do at most, by one of some ``ways`` to cover them, as loads by a measure: at
    least that of a leader, ``least`` [C] (its own is there); all sequences longer than those of a class are
    ``above`` [C]. ``windows``: those by which sequences are worth so much; ``looked_at``: how often, by class."""

    duals: Duals
    coverings: Coverings
    least: FloatArray
    above: FloatArray
    windows: tuple[ClassWindow, ...] = ()
    num_visits: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(
        measure: Duals, classes: Classes, ways: Coverings, windows: tuple[ClassWindow, ...] = ()
    ) -> ReplicaClassBound:
        """By a measure."""
        each, counts = measure.sequence_loads, measure.counts
        least = [float(each[first:end].min()) * _SAFETY for first, end in classes]
        above = [float(counts[end:] @ each[end:]) for _, end in classes]
        return ReplicaClassBound(measure, ways, np.array(least), np.array(above), windows)

    def loosest_nodes(self, place: int, time_ns: float) -> list[tuple[WindowTree, WindowNode]]:
        """The piece of a class that leaves most for a time, by every way, the way that leaves least first."""
        found = [[(side, side.loosest(time_ns)) for side in way] for way in self.coverings[place]]
        most = [max(way, key=lambda one: one[1].max_load(time_ns)) for way in found]
        return sorted(most, key=lambda one: one[1].max_load(time_ns))

    def least_visited(self, chain: IntArray | FloatArray) -> list[int]:
        """The classes of a chain, first those that lead more replicas, and were looked at less."""
        return sorted(np.flatnonzero(chain).tolist(), key=lambda at: float(self.num_visits[at] / chain[at]))

    def max_load(self, place: int, time_ns: float) -> float:
        """What a replica led by a class does at most, as a load; ``-inf`` where there is none."""
        left = self.loosest_nodes(place, time_ns)[0][1].max_load(time_ns)
        return left if left >= self.least[place] else _NONE

    def with_duals(self, measure: Duals, classes: Classes, windows: tuple[ClassWindow, ...]) -> ReplicaClassBound:
        """The same with other worths of sequences, with mixtures of some ``windows``."""
        every = {side for ways in self.coverings.values() for way in ways for side in way}
        copies = {side: copied(side, measure, self.duals) for side in every}
        ways = {
            place: tuple(tuple(copies[side] for side in way) for way in of) for place, of in self.coverings.items()
        }
        for one in windows:
            begin({side for way in ways[one.length_class] for side in way}, one)
        return ReplicaClassBound.of(measure, classes, ways, windows)


class LongestSequenceBranching:
    """Bounds of a pipeline of several replicas; ``done`` where nothing more is to be had."""

    def __init__(self, filled: ConfigurationBound, time_ns: float) -> None:
        """Beyond ``filled``, of which nothing changes any more; for about a time of a replica."""
        self.configuration_bound, self.done, self.bound_ns = filled, False, filled.loads.workload_bound_ns
        # The least time for which nothing more is to be had.
        self.failed_ns = np.inf
        last, counts = filled.work_bound.stages.last, filled.duals.counts
        # Of what fits.
        number = int(np.flatnonzero(filled.full_pricing.items.fits)[-1]) + 1
        edges = list(_EDGES)
        while ClassAssignments.num_assignments(len(edges) + 2, filled.num_other_replicas + 1) > MAX_ASSIGNMENTS:
            edges.pop()
        starts = {int(np.searchsorted(last[:number], part * last[number - 1])) for part in edges} | {0, number - 1}
        firsts = sorted(starts)
        self.classes: Classes = list(zip(firsts, [*firsts[1:], number], strict=True))
        ways = {place: self._ways(first, end, time_ns) for place, (first, end) in enumerate(self.classes)}
        # By what ``filled`` counts, and by what sequences are worth for a chain; those that were asked for, and by
        # which worths.
        self.class_bounds = [ReplicaClassBound.of(filled.duals, self.classes, ways)]
        self.asked: set[tuple[float, int, bytes]] = set()
        self.assignments = ClassAssignments.of(len(self.classes), filled.num_other_replicas + 1)
        shares = [share * (filled.work_bound.num_stages - 1) for share in filled.work_bound.stages.shares]
        self.min_replicas = MinReplicas.of(np.repeat(last, counts) * _SAFETY, (shares[0], shares[1]))

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine the classes that leave most for a time, until nothing is left of the question or of the time (of
        ``perf_counter``). Where too much is left of a time, and nothing more to be had, for shorter ones."""
        while time.perf_counter() < deadline and not self.done and self.bound_ns < time_ns:
            goal = time_ns if time_ns < self.failed_ns else (self.bound_ns + self.failed_ns) / 2
            closed = self._closed(goal, deadline)
            if closed is None:
                break
            if not closed:
                self.failed_ns = goal
            self.bound_ns = max(self.bound_ns, goal if closed else self._least())
            self.done = self.failed_ns <= self.bound_ns * _NEAR
        self.bound_ns = max(self.bound_ns, self._least())

    def _closed(self, time_ns: float, deadline: float) -> bool | None:
        """Refine until a time is too short (True), nothing more is to be had (False), or the deadline (None)."""
        enough = self.assignments.has_min_replicas(self._fewest(time_ns))
        while time.perf_counter() < deadline:
            beyond = self._beyond(time_ns)
            most = np.where(enough, beyond.min(axis=0), _NONE)
            worst = int(most.argmax())
            if most[worst] < 0.0:
                return True
            if not self._refine(self.assignments.numbers[worst], beyond[:, worst], time_ns):
                return False
        return None

    def is_feasible(self, time_ns: float) -> bool:
        """Whether it is not known that replicas do less than the workload within a time."""
        beyond = self._beyond(time_ns).min(axis=0)
        return bool((beyond[self.assignments.has_min_replicas(self._fewest(time_ns))] >= 0.0).any())

    def _beyond(self, time_ns: float) -> FloatArray:
        """How much more than the workload chains do at most, by all worths, [w, m]."""
        found = []
        for one in self.class_bounds:
            left = np.array([one.max_load(place, time_ns) for place in range(len(self.classes))])
            found.append(self.assignments.excess_load(left, one.above, one.duals.total_load))
        return np.array(found)

    def _refine(self, chain: IntArray, beyond: FloatArray, time_ns: float) -> bool:
        """Know more of the classes of a chain that does so much more than the workload by all worths [w]; whether
        there was any."""
        # By the worths by which least is beyond.
        for number in np.argsort(beyond, kind="stable").tolist():
            if self.refine_class(self.class_bounds[number], chain, time_ns, float(beyond[number])):
                return True
        number = int(beyond.argmin())
        key = time_ns, number, chain.tobytes()
        # First, and when nothing else tells replicas apart.
        if not self.asked and self._ask(key, chain):
            return True
        return self._part(chain, beyond, time_ns) or self._ask(key, chain) or self._tell_smaller(time_ns)

    def _ask(self, key: tuple[float, int, bytes], chain: IntArray) -> bool:
        """``ask`` of the whole workload, a few times, and once of the same."""
        if key in self.asked or len(self.asked) >= _ASKED:
            return False
        self.asked.add(key)
        needed = self.configuration_bound.duals.counts.astype(np.float64)
        return self.add_duals(self.class_bounds[key[1]], chain, needed, key[0], _ASK_S)

    def _part(self, chain: IntArray, beyond: FloatArray, time_ns: float) -> bool:
        """Tell replicas of a class of a chain apart by whether one more micro-batch holds one of its longest;
        whether there was any."""
        for number in np.argsort(beyond, kind="stable").tolist():
            one = self.class_bounds[number]
            for place in one.least_looked_at(chain):
                for side, piece in one.worst(place, time_ns):
                    if piece.divided is not None and len(piece.told) < _MOST_TOLD:
                        side.put(piece, piece.parted)
                        return True
        return False

    def refine_class(
        self, one: ReplicaClassBound, chain: IntArray | FloatArray, time_ns: float, more: float
    ) -> bool:
        """Know more of a class of a chain, which is to do less by so much ``more`` than the load it may; whether
        there was any."""
        for place in one.least_visited(chain):
            for side, piece in one.loosest_nodes(place, time_ns):
                if not piece.done:
                    one.num_visits[place] += 1
                    enough = max(0.0, piece.max_load(time_ns) - more / float(chain[place]))
                    one.duals.refine(side, piece, time_ns, enough)
                    return True
        return False

    def _tell_smaller(self, time_ns: float) -> bool:
        """Tell replicas that short sequences lead apart by a smaller micro-batch; whether there was any."""
        base, filled = self.class_bounds[0], self.configuration_bound
        if not filled.branch_on_smaller(time_ns):
            return False
        base.coverings[0] = ((filled.ordinary, *filled.with_large),)
        for one in self.class_bounds[1:]:
            ((plain, *large),) = one.coverings[0]
            pieces = [piece.reset for piece in plain.nodes]
            plain = replace(plain, pricing=filled.ordinary.pricing, nodes=pieces)
            one.coverings[0] = ((plain, *large, copied(filled.with_large[-1], one.duals, base.duals)),)
        return True

    def add_duals(
        self,
        base: ReplicaClassBound,
        chain: IntArray | FloatArray,
        needed: FloatArray,
        time_ns: float,
        seconds: float,
    ) -> bool:
        """What sequences are worth where a chain does least of what is ``needed`` [n] within a time; whether that
        is less than by the worths there are."""
        measure, windows = base.duals, self.windows(base, chain, time_ns)
        if windows is None:
            return False
        found = restricted_master_duals(
            windows, chain, needed, measure.sequence_loads, time_ns, time.perf_counter() + seconds
        )
        if found is None:
            return False
        each = np.maximum(found[0], _LEAST_WORTH * measure.sequence_loads)
        times = measure.total_load / float(measure.counts @ each)
        begun = tuple(replace(one, flow=one.flow * times) for one in found[1])
        self.class_bounds.append(base.with_duals(measure.with_loads(times * each), self.classes, begun))
        return True

    def windows(
        self, base: ReplicaClassBound, chain: IntArray | FloatArray, time_ns: float
    ) -> tuple[ClassWindow, ...] | None:
        """Windows of the classes of a chain: those by which sequences are worth what they are, and those that do
        most within a time; none where nothing is known of one of them."""
        present = np.flatnonzero(chain).tolist()
        found = [one for one in base.windows if one.length_class in present]
        known = {
            (
                one.length_class,
                one.configuration.window,
                one.configuration.pinned_item,
                one.configuration.decisions,
            )
            for one in found
        }
        for place in present:
            side, piece = base.loosest_nodes(place, time_ns)[0]
            if piece.window is None or piece.start is None:
                return None
            mixture, slope, rows = piece.start
            if (place, piece.window, side.pinned_item, piece.decisions) not in known:
                filling = base.duals.configuration(side, piece)
                found.append(ClassWindow(place, filling, mixture, 1.0 / slope, rows, side.columns))
        return tuple(found)

    def _fewest(self, time_ns: float) -> IntArray:
        """How many replicas what is longer than each class needs at least."""
        counts = self.configuration_bound.duals.counts
        longer = [int(counts[end:].sum()) for _, end in self.classes]
        return np.array([self.min_replicas.min_replicas(one, time_ns) for one in longer])

    def _least(self) -> float:
        """A time within which the replicas do not do the workload, ns."""
        low = high = self.bound_ns
        while not self.is_feasible(high):
            low, high = high, high * _LONGER
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if self.is_feasible(middle) else (middle, high)
        return low

    def _begun(self, box: WindowBound) -> list[WindowNode]:
        """What is known of a box, with windows and mixtures that were found around the longest sequence."""
        known = [
            one
            for one in self.configuration_bound.with_longest.nodes
            if one.window and _inside(one.window, box.window)
        ]
        begun = [replace(one, bounds=box.bounds).reset for one in known]
        return begun or [WindowNode(box.window, box.bounds)]

    def _ways(self, first: int, end: int, time_ns: float) -> tuple[tuple[WindowTree, ...], ...]:
        """Replicas led by one of ``first`` to ``end`` - 1: as one, and where those with a large micro-batch do
        less than the class may, with these apart. What is known of any replica is enough for the shortest ones."""
        filled = self.configuration_bound
        if not first:
            return ((filled.ordinary, *filled.with_large),)
        around = filled.lines.around_long_sequence(first, filled.work_bound.total_load, _EFFORT)
        boxes = [filled.duals.convert_window(box, filled.work_bound.stages.last) for box in around.boxes]
        begun = [piece for box in boxes for piece in self._begun(box)]
        found = WindowTree(
            shorter(filled.full_pricing, end), halved, PinnedItem(first, foremost=True), around.alone, begun
        )
        most = max((one.loosest(time_ns).max_load(time_ns) for one in filled.with_large), default=np.inf)
        if most >= found.loosest(time_ns).max_load(time_ns):
            return ((found,),)
        return (found,), (replace(found, pricing=shorter(filled.ordinary.pricing, end)), *filled.with_large)


def begin(sides: Iterable[WindowTree], one: ClassWindow) -> None:
    """The mixture of a window for the pieces of sides that are of it."""
    start = one.mixture, 1.0 / one.flow, one.rows
    for side in [side for side in sides if side.pinned_item == one.configuration.pinned_item]:
        here = one.configuration.window, one.configuration.decisions
        for piece in [piece for piece in side.nodes if (piece.window, piece.decisions) == here]:
            side.replace_node(piece, [replace(piece, start=start, stale=True)])


def copied(side: WindowTree, measure: Duals, before: Duals) -> WindowTree:
    """What is known of a side, by other worths than those ``before``."""
    # No sequence is worth so many times as much.
    times = float((measure.sequence_loads / before.sequence_loads).max())
    pieces = [
        replace(
            one,
            window=one.window or _MANY,
            bounds=tuple(PathBound(bound.constant, bound.slope / times) for bound in one.bounds),
        ).reset
        for one in side.nodes
    ]
    return replace(side, nodes=pieces)


def _inside(window: Window, other: Window) -> bool:
    """Whether all numbers of a window are numbers of another."""
    sides = zip((window.ahead, window.behind), (other.ahead, other.behind), window.open, other.open, strict=True)
    return all(
        first >= least and (other_open or (last <= most and not is_open))
        for (first, last), (least, most), is_open, other_open in sides
    )


def shorter(contents: MicroBatchPricing, end: int) -> MicroBatchPricing:
    """Those without sequences of length number ``end`` or longer."""
    fits = contents.items.fits & (np.arange(len(contents.items.fits)) < end)
    return replace(contents, items=replace(contents.items, fits=fits))
