"""What is known of a replica by windows: *pieces* that cover all numbers of micro-batches, and how more comes to
be known of one.

A piece begins with the bound of real loads. Then the mixture that gives it is looked at for whole sequences
(``filling``), by which its bound may be higher; windows of several numbers are halved; where one number is left,
or one pair around a micro-batch, mixtures are improved by programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from milpplan.groups.bounds.last_stage import LoadBound, best_mixture
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.long_sequence import WindowBound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import Mixture, StageLoads
from milpplan.lengths.bounds.configuration_columns import Columns, improved
from milpplan.lengths.bounds.configuration_lp import ConfigurationLP, Told
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Numbers in the tables of one window that are too many.
_LARGEST = 4e8
# Kinds of sequences in programs of real loads.
_KINDS = 2


@dataclass(frozen=True, eq=False)
class WindowNode:
    """What is known of a window (none: of any more micro-batches), of which mixture, slope and contents; ``stale``
    where they were others' contents or worths, ``done`` where nothing more is to be had; ``tried``: which mixture
    of another window was; what is ``told`` of micro-batches behind, and which one programs ``divided``."""

    window: Window | None
    bounds: tuple[PathBound, ...]
    start: tuple[Mixture, float, IntArray] | None = None
    tried_mixture: Mixture | None = None
    stale: bool = False
    done: bool = False
    decisions: Told = ()
    branch_candidate: int | None = None

    def max_load(self, time_ns: float) -> float:
        """The largest load that it leaves for a time."""
        return max(one.within(time_ns) for one in self.bounds)

    @property
    def reset(self) -> WindowNode:
        """For other contents, or other worths."""
        return replace(self, stale=self.start is not None, done=False, branch_candidate=None)

    @property
    def children(self) -> list[WindowNode]:
        """One for whether the micro-batch that programs divided holds a core, one for whether it does not."""
        assert self.branch_candidate is not None
        return [replace(self.reset, decisions=(*self.decisions, (self.branch_candidate, holds))) for holds in (True, False)]

    def better(self, found: PathBound, time_ns: float) -> WindowNode:
        """With another bound, where that leaves less for a time."""
        return replace(self, bounds=(found,)) if found.within(time_ns) < self.max_load(time_ns) else self


@dataclass(eq=False)
class WindowTree:
    """Pieces that cover all numbers of micro-batches of a replica with ``contents``, and how one is halved;
    ``core`` as in ``ConfigurationLP``, with the load of such a micro-batch, ``least``; ``columns`` that did most
    in the last one that was improved."""

    pricing: MicroBatchPricing
    split_window: Callable[[Window], Sequence[Window]]
    pinned_item: PinnedItem | None = None
    min_load: float = 0.0
    nodes: list[WindowNode] = field(default_factory=list)
    columns: Columns | None = None
    # The worst of which pieces for a time: asked for more often than pieces change.
    _worst: tuple[list[WindowNode], float, WindowNode] | None = field(default=None, init=False)

    def loosest(self, time_ns: float) -> WindowNode:
        """The piece that leaves most."""
        known = self._worst
        if known is None or known[0] is not self.nodes or known[1] != time_ns:
            known = self._worst = self.nodes, time_ns, max(self.nodes, key=lambda one: one.max_load(time_ns))
        return known[2]

    def replace_node(self, piece: WindowNode, others: Sequence[WindowNode]) -> None:
        """Others in the place of a piece."""
        self.nodes = [one for one in self.nodes if one is not piece] + list(others)


@dataclass(frozen=True, eq=False)
class Duals:
    """How pieces of a pipeline are measured: its ``stages`` (and what programs of real loads have of them), and
    what each of ``counts`` [n] sequences is worth as a load, ``each`` [n]. ``improved``: the mixture and the slope
    that a program found last for so many micro-batches, around whatever."""

    stages: StageLoads
    rounded_stages: StageLoads
    num_stages: int
    counts: IntArray
    sequence_loads: FloatArray
    last_mixtures: dict[int, tuple[Mixture, float]] = field(default_factory=dict)

    @staticmethod
    def of(loads: PipelineWorkBound, counts: IntArray) -> Duals:
        """That of ``loads`` of a workload."""
        programmed, each = loads.stages.with_kinds(_KINDS), loads.sequence_loads * loads.num_replicas
        return Duals(loads.stages, programmed, loads.num_stages, counts, each)

    @property
    def total_load(self) -> float:
        """Of the workload."""
        return float(self.counts @ self.sequence_loads)

    def with_loads(self, each: FloatArray) -> Duals:
        """With another worth of every sequence."""
        return replace(self, sequence_loads=each, last_mixtures={})

    def convert(self, bound: PathBound, before: FloatArray) -> PathBound:
        """A bound by what sequences were worth ``before`` as one by what they are worth here, for parts of the
        workload: what is missing was worth so many times as much at most."""
        times = float((before / self.sequence_loads).max())
        beyond = float(self.counts @ before) - times * self.total_load
        return PathBound(bound.constant + bound.slope * beyond, bound.slope * times)

    def convert_bound(self, known: LoadBound, before: FloatArray) -> LoadBound:
        """The same of all ranges."""
        return LoadBound(tuple(replace(one, bound=self.convert(one.bound, before)) for one in known.ranges))

    def convert_window(self, box: WindowBound, before: FloatArray) -> WindowBound:
        """The same of a box."""
        return replace(box, bounds=tuple(self.convert(one, before) for one in box.bounds))

    def configuration(self, side: WindowTree, piece: WindowNode) -> ConfigurationLP:
        """The window of a piece of a side, for whole sequences."""
        assert piece.window is not None
        given = side.pricing, self.sequence_loads, self.stages.last, self.num_stages
        return ConfigurationLP(*given, piece.window, side.pinned_item, piece.decisions)

    def refine(self, side: WindowTree, piece: WindowNode, time_ns: float, enough: float) -> None:
        """Know more of a piece of a side, no better than that it leaves less than ``enough`` for the time."""
        side.replace_node(piece, self._refined(side, piece, time_ns, enough))

    def _refined(self, side: WindowTree, piece: WindowNode, time_ns: float, enough: float) -> list[WindowNode]:
        """The piece with more known of it, or its halves."""
        window = piece.window
        if window is None:
            return [replace(piece, done=True)]
        filling = self.configuration(side, piece)
        size = float(side.pricing.entries * window.number)
        if piece.start is None and size <= _LARGEST:
            return [self._looked_at(filling, piece, time_ns, side.min_load)]
        if piece.stale and piece.start is not None:
            mixture, slope, _ = piece.start
            return [replace(piece, stale=False).better(filling.prove_load_bound(mixture, slope)[0], time_ns)]
        if window.fewest < window.number or any(window.open):
            halves = side.split_window(window)
            if halves or piece.start is None:
                return [WindowNode(one, piece.bounds) for one in halves] or [replace(piece, done=True)]
        if piece.start is None:
            return [replace(piece, done=True)]
        return [self._tried(filling, piece, time_ns) or self._improved(filling, side, piece, time_ns, enough)]

    def _tried(self, filling: ConfigurationLP, piece: WindowNode, time_ns: float) -> WindowNode | None:
        """With the mixture of another window of as many micro-batches, which is one of this window, too, and
        spares most of a program; none where there is no other, or nothing is gained."""
        mixture, slope = self.last_mixtures.get(filling.window.number, (None, 0.0))
        if mixture is None or mixture is piece.tried_mixture or piece.start is None or mixture is piece.start[0]:
            return None
        moved = replace(mixture, window=filling.window)
        found, rows = filling.prove_load_bound(moved, slope)
        if found.within(time_ns) >= piece.max_load(time_ns):
            return None
        return replace(piece, bounds=(found,), start=(moved, slope, rows), tried_mixture=mixture)

    def _improved(
        self, filling: ConfigurationLP, side: WindowTree, piece: WindowNode, time_ns: float, enough: float
    ) -> WindowNode:
        """With the bound of a program."""
        assert piece.start is not None
        mixture, slope, rows = piece.start
        given = mixture, slope, rows, side.columns, time_ns, enough
        found, mixture, side.columns = improved(filling, *given)
        self.last_mixtures[filling.window.number] = mixture, found.slope
        # What is enough now may not be for a longer time.
        done, divided = found.within(time_ns) > enough, side.columns.branch_candidate
        known = replace(piece, start=(mixture, found.slope, rows), done=done, branch_candidate=divided)
        return known.better(found, time_ns)

    def _looked_at(self, filling: ConfigurationLP, piece: WindowNode, time_ns: float, least: float) -> WindowNode:
        """With the better bound of the mixture that real loads give: by lines, or by contents."""
        stages = self.stages
        load = max(piece.max_load(time_ns), least)
        mixture = best_mixture(self.rounded_stages, filling.num_stages, filling.window, load, least)
        line = mixture.bound(stages, load, least)
        found, rows = filling.prove_load_bound(mixture, line.slope)
        known = replace(piece, start=(mixture, line.slope, rows))
        return known.better(self.convert(line, stages.last), time_ns).better(found, time_ns)


def halves(window: Window) -> tuple[Window, ...]:
    """Two ranges of numbers of micro-batches."""
    first, last = window.fewest, window.number
    middle = (first + last) // 2
    return (Window.of(first, middle), Window.of(middle + 1, last)) if first < last else ()
