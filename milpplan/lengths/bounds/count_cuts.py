"""Lower bounds of the time of one kind of pipeline, by number of micro-batches, that hold for every load.

For a replica with v micro-batches of loads t_m = c + y_m that hold W = sum y_m units, ``time >= cut(W)`` for each
cut of the slot v (f and b the parts of a unit's forward and backward, l the transfer):

 - *last stage*: (f + b) (W + c v) + (P - 1) ((f + b) c + 2 l).
   Proof. The last stage does all the work; before it the first micro-batch, no shorter than c, runs forward
   through P - 1 stages, and after it the last one runs backward through them.
 - *drain*: (f + b) (W + c v) + (P - 1) (f c + max(0, b - f) (c + W / v) + 2 l).
   Proof. Follow the first micro-batch forward to the last stage, all work there up to the backward of the longest
   micro-batch M, that backward to the first stage, and all work there after it. Under 1F1B these are the backwards
   of all m > M and the forwards of all m >= M + P, so the path lacks the forwards of at most P - 1 micro-batches,
   none longer than M: it takes at least (f + b) sum t + (P - 1) f c + (P - 1) (b - f) t_M + 2 (P - 1) l, and t_M
   is at least the mean c + W / v. (With b < f the *last stage* cut takes its place.)
 - *profile*: ``Cut``, the best real loads, at the load of all sequences that fit, at a half and at a
   quarter of it, for the numbers of micro-batches that the other cuts leave open there.

The last slot also stands for all larger numbers (unless there are fewer sequences): its only cut, *last stage*,
grows with v.

A slot of v micro-batches holds at most the densest sequences that fit into v times the tokens of one (the last
slot, if open: any load). For pipelines of one stage there are no other cuts: they take their load and v c.

**From one replica to D.** The largest load of D equal replicas is at least W / D, and every cut grows with the
load, so the time of the slowest is at least the minimum over v of the greatest cut of v at W / D.

**Best loads** of v micro-batches that hold W units, none more than some cap, are a linear program
(``long_sequence``), and its dual a mixture of paths that proves the cut for every load.

**Idle time** (``IdleTimeBound``): the capacity of the replicas of one kind within a time, reduced by the idle time
around their longest sequence.

A pipeline waits around a micro-batch that is longer than the others. ``long_sequence.long_bound`` bounds the time
of a replica for a load if one of its micro-batches holds a sequence of some length, whatever their numbers: by one
of several lines in the load. So within a time Z it does at most F_k(Z), the largest load that one of these lines
allows, if it holds length k or a longer one, and at most H(Z), that of the cuts or 0,
anyway; D replicas, one of them with such a sequence, do at most F_k(Z) + (D - 1) H(Z).

**For times from lo to hi** the assignment program needs one row for all times. With A the slope of the chord of H,
every line W <= (Z - constant) / slope is at most A Z + b on the interval for b = the larger of its excesses over
A Z at both ends. H takes the best of its cuts in each slot and the worst slot, F_k its worst line. So for every
group with a time between lo and hi that holds length k, W <= D A Z + b_k + (D - 1) b_0, with b_0 that of H and b_k
that of F_k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from milpplan.lengths.bounds.long_sequence import (
    MAX_MICRO_BATCHES,
    LoadBound,
    LongSequenceBound,
    MicroBatchCountRange,
    long_bound,
    solved_window,
)
from milpplan.lengths.bounds.pipeline_bounds import PathBound, StageLoads, Window
from milpplan.lengths.deadline import counted_cache
from milpplan.lengths.search_parameters import PARAMETERS, SAFETY
from milpplan.lengths.tabled import FloatArray, Kind, Pipeline

SCALE_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class Cut:
    """``2**SCALE_BITS * time_ns >= slope * W + constant`` for every packing of W units into v micro-batches."""

    num_micro_batches: int
    slope: int
    constant: int

    def at(self, units: float) -> float:
        """Return the bound in ns at a load of ``units``."""
        return float(self.slope * units + self.constant) / 2.0**SCALE_BITS

    @staticmethod
    def of(num_micro_batches: int, bound: PathBound, parts: int) -> Cut:
        """Round a bound by the load in ns of a stage down to a cut; a unit has so many ``parts``."""
        constant, slope = bound.constant - abs(bound.constant) * (1.0 - SAFETY), bound.slope * parts * SAFETY
        return Cut(num_micro_batches, int(slope * 2.0**SCALE_BITS), int(np.floor(constant * 2.0**SCALE_BITS)))


@dataclass(frozen=True, slots=True, eq=False)
class BestLoads:
    """Best real loads [v] in units, without the empty micro-batch, their time, and what proves it."""

    units: FloatArray
    time_ns: float
    cut: Cut


def equal_stages(pipeline: Pipeline, most_units: FloatArray) -> StageLoads:
    """Return the equal stages of a pipeline; loads in ns of a stage. Any j micro-batches hold at most the sum of
    the first j entries of ``most_units``."""
    empty, parts = float(pipeline.micro_batch_units), pipeline.parts
    return StageLoads(
        np.zeros(0),
        empty * parts,
        (pipeline.forward_parts / parts, pipeline.backward_parts / parts),
        (empty * pipeline.forward_parts, empty * pipeline.backward_parts),
        pipeline.transfer_ns,
        most_units * parts,
    )


@counted_cache
def best_profile(pipeline: Pipeline, num_micro_batches: int, units: int, cap_units: int) -> BestLoads | None:
    """Find the best real loads of ``num_micro_batches`` micro-batches that hold ``units`` together.

    Args:
        pipeline: the pipeline.
        num_micro_batches: number of micro-batches of the replica.
        units: the sum of their loads.
        cap_units: upper bound of each load.

    Returns:
        The loads and their cut; None if the loads do not fit.
    """
    parts, number = pipeline.parts, num_micro_batches
    if units > number * cap_units:
        return None
    stages = equal_stages(pipeline, np.full(number, float(max(cap_units, 1))))
    load = float(max(1, units) * parts)
    answer = solved_window(stages, pipeline.num_stages, Window((0, 0), (number - 1,) * 2), load)
    if answer is None:
        return None
    time_ns, loads, mixture = answer
    return BestLoads(loads / parts, time_ns, Cut.of(number, mixture.bound(stages, load), parts))


def last_stage_cut(kind: Kind, num_micro_batches: int) -> Cut:
    """Return the *last stage* cut of the module."""
    pipeline = kind.pipeline
    empty = pipeline.parts * pipeline.micro_batch_units
    ramp = (pipeline.num_stages - 1) * (empty + 2 * pipeline.transfer_ns)
    return Cut(num_micro_batches, pipeline.parts << SCALE_BITS, (empty * num_micro_batches + ramp) << SCALE_BITS)


def drain_cut(kind: Kind, num_micro_batches: int) -> Cut:
    """Return the *drain* cut of the module; its slope is rounded down."""
    pipeline, others = kind.pipeline, kind.pipeline.num_stages - 1
    backward_excess = max(0, pipeline.backward_parts - pipeline.forward_parts)
    slope = (pipeline.parts << SCALE_BITS) + (others * backward_excess << SCALE_BITS) // num_micro_batches
    empty = pipeline.micro_batch_units
    drain = pipeline.forward_parts * empty + backward_excess * empty + 2 * pipeline.transfer_ns
    return Cut(
        num_micro_batches, slope, (pipeline.parts * empty * num_micro_batches + others * drain) << SCALE_BITS
    )


@dataclass(frozen=True, slots=True)
class CountCuts:
    """Cuts of one number of micro-batches; an ``open_ended`` slot also stands for larger numbers."""

    num_micro_batches: int
    cuts: tuple[Cut, ...]
    open_ended: bool = False

    def at(self, units: float) -> float:
        """Return the lower bound of the time of a replica with this load, ns."""
        return max(cut.at(units) for cut in self.cuts)


class PipelineCuts:
    """Cuts of one kind by number of micro-batches, cached: ``rough`` without profiles, ``slots`` with them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    @cached_property
    def rough(self) -> tuple[CountCuts, ...]:
        """A slot for every number of micro-batches that could be best, and one for all larger numbers."""
        kind = self.kind
        sequences = int(kind.counts[kind.fits].sum())
        most = 400
        limit = min(kind.pipeline.max_micro_batches or most, max(1, sequences), most)
        load = kind.total_units / kind.num_replicas
        slots: list[CountCuts] = []
        best = float("inf")
        for number in range(1, limit + 1):
            last = last_stage_cut(kind, number)
            # Numbers whose last-stage cut is far above the best drain cut are not listed.
            if last.at(load) > best * 1.04 or number == most:
                return (*slots, CountCuts(number, (last,), True))
            slots.append(CountCuts(number, (last, drain_cut(kind, number))))
            if kind.most_units(number) >= load:
                best = min(best, slots[-1].at(load))
        return tuple(slots)

    @cached_property
    def slots(self) -> tuple[CountCuts, ...]:
        """``rough`` with profiles where they can raise the bound."""
        if self.kind.pipeline.num_stages == 1:
            return self.rough
        whole = self.kind.total_units / self.kind.num_replicas
        return self._with_profiles((share * whole for share in (1.0, 0.5, 0.25)), self.rough)

    def near(self, load: float) -> tuple[CountCuts, ...]:
        """Return ``slots`` with profiles at one more ``load`` of a replica."""
        return self._with_profiles((load,), self.slots)

    def _with_profiles(self, loads: Iterable[float], slots: tuple[CountCuts, ...]) -> tuple[CountCuts, ...]:
        """Add the cuts of profiles at several loads to slots."""
        extra: dict[int, list[Cut]] = {}
        for load in loads:
            self._add_profiles(load, extra)
        return tuple(replace(slot, cuts=(*slot.cuts, *extra.get(slot.num_micro_batches, ()))) for slot in slots)

    def _add_profiles(self, load: float, extra: dict[int, list[Cut]]) -> None:
        """Add profiles at ``load``, best rough cut first, until the other numbers' rough cuts are above."""
        kind = self.kind
        best = float("inf")
        # A profile holds for one number of micro-batches only.
        closed = [slot for slot in self.rough if not slot.open_ended]
        for slot in sorted(closed, key=lambda slot: slot.at(load)):
            number = slot.num_micro_batches
            profile_cuts = extra.setdefault(number, [])
            bound = max([slot.at(load), *(cut.at(load) for cut in profile_cuts)])
            if slot.at(load) >= best:
                return
            if bound >= best:
                continue
            full = min(int(load), int(0.97 * number * kind.cap_units))
            profile = best_profile(kind.pipeline, number, full, kind.cap_units)
            if profile is None:
                continue
            profile_cuts.append(profile.cut)
            if number * kind.cap_units >= load:
                best = min(best, max(bound, profile.cut.at(load)))

    def most_units(self, slot: CountCuts) -> float:
        """Return the maximum load of a replica in the slot."""
        return float("inf") if slot.open_ended else self.kind.most_units(slot.num_micro_batches)

    def at(self, units: float) -> float:
        """Return the lower bound of the slowest replica when all hold ``units`` together, ns."""
        load = units / self.kind.num_replicas
        return min(slot.at(load) for slot in self.slots if self.most_units(slot) >= load)

    @cached_property
    def inflation(self) -> float:
        """The largest r such that the rough cuts give ``time >= r * parts * W / D`` for every load W that fits.

        A rough cut's ratio to W falls with W, so in each slot it is smallest at the slot's maximum load.
        """
        highest_load = self.kind.total_units / self.kind.num_replicas
        if not highest_load:
            return 1.0
        loads = [min(highest_load, self.most_units(slot)) for slot in self.rough]
        ratios = [slot.at(load) / load for slot, load in zip(self.rough, loads, strict=True)]
        return min(ratios) / self.kind.pipeline.parts


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """Row ``W <= slope * Z + capacity`` for the work W (ns of a stage, all replicas) of a kind.

    ``capacities`` are pairs (index of a length, capacity), ascending, for replicas that hold the length or a
    longer one; ``capacity_of_any`` is the capacity whatever they hold.
    """

    slope: float
    capacity_of_any: float
    capacities: tuple[tuple[int, float], ...]


class IdleTimeBound:
    """Bounds of one kind of pipeline: its slots, and idle time around sequences of the learned lengths."""

    def __init__(self, kind: Kind, cuts: PipelineCuts) -> None:
        self._kind = kind
        self._cuts = cuts
        self._stages = stage_loads(kind)
        self._slots = cuts.slots
        self._long: dict[int, LongSequenceBound] = {}

    def learn(self, length: int, low_ns: float, high_ns: float) -> bool:
        """Solve programs around the length of this index for times in the interval.

        Returns:
            False if the length was learned before.
        """
        if length in self._long:
            return False
        kind, middle = self._kind, (low_ns + high_ns) / 2
        if not self._long and kind.num_replicas > 1:
            # Beside a replica with a long sequence, the other replicas' cuts count, at the load that they have.
            self._slots = self._cuts.near(_largest_load(self._slots, high_ns, kind.total_units))
        longest_ns = float(kind.units[length] * kind.pipeline.parts)
        load = _largest_load(self._slots, middle, kind.total_units) * kind.pipeline.parts
        # First at the load of the other replicas, then at the load that this bound allows.
        for effort in PARAMETERS.learned_programs:
            load = max(load, longest_ns, 1.0)
            plain = _plain(kind, self._slots, load)
            # Programs stop a little beyond the interval of times.
            cutoff_ns = 1.05 * high_ns
            long = long_bound(self._stages, kind.pipeline.num_stages, plain, longest_ns, load, cutoff_ns, effort)
            whole = float(kind.total_units * kind.pipeline.parts)
            load = min(whole, float(_lines_of(long, np.array([middle]), whole).max()))
        self._long[length] = long
        return True

    def capacity_row(self, low_ns: float, high_ns: float) -> CapacityRow:
        """Return the module's row for times in the interval."""
        kind, ends = self._kind, np.array([low_ns, high_ns])
        whole = float(kind.total_units * kind.pipeline.parts)
        slots = [_loads_of(slot, ends, kind.total_units) * kind.pipeline.parts for slot in self._slots]
        largest_loads = np.max([lines.min(axis=0) for lines in slots], axis=0)
        # Any slope gives a valid row, the chord's the best; with few sequences the chord may be degenerate.
        slope = float(largest_loads[1] - largest_loads[0]) / max(1.0, high_ns - low_ns)
        slope = slope if 0.1 < slope < 10.0 else 1.0
        # A replica may also stay empty, and does no work then.
        capacity_of_any = max(
            -slope * low_ns, *(float((lines - slope * ends).max(axis=1).min()) for lines in slots)
        )
        capacities, last = [], capacity_of_any
        for length, long in sorted(self._long.items()):
            lines = _lines_of(long, ends, whole)
            # A longer sequence leaves at most the capacity that a shorter one leaves.
            last = min(last, float((lines - slope * ends).max()))
            capacities.append((length, last + (kind.num_replicas - 1) * capacity_of_any))
        return CapacityRow(kind.num_replicas * slope, kind.num_replicas * capacity_of_any, tuple(capacities))


def stage_loads(kind: Kind) -> StageLoads:
    """Return the kind's equal stages as ``StageLoads``; loads in ns of a stage."""
    unit_increments = np.diff([0.0, *(float(kind.most_units(number)) for number in range(1, MAX_MICRO_BATCHES))])
    return equal_stages(kind.pipeline, np.maximum.accumulate(unit_increments[::-1])[::-1])


def _loads_of(slot: CountCuts, times: FloatArray, whole: float) -> FloatArray:
    """Return the loads, at most ``whole`` units, that every cut of a slot allows at ``times`` [n], [cuts, n]."""
    lines = [(cut.constant / 2.0**SCALE_BITS, cut.slope / 2.0**SCALE_BITS) for cut in slot.cuts]
    return _allowed(lines, times, whole)


def _lines_of(long: LongSequenceBound, times: FloatArray, whole: float) -> FloatArray:
    """Return the loads in ns, at most ``whole``, that every line allows at ``times`` [n], [lines, n]."""
    return _allowed([(bound.constant, bound.slope) for bound in long.bounds], times, whole)


def _allowed(lines: Sequence[tuple[float, float]], times: FloatArray, whole: float) -> FloatArray:
    """Return the loads for which lines (constant, slope) stay within ``times`` [n], [lines, n].

    A line without a slope allows ``whole`` at all times if at any, else a negative load.
    """
    constants, slopes = np.array(lines).T[..., None]
    slack = times / SAFETY - constants
    flat = np.where(slack.max(axis=1, keepdims=True) >= 0.0, whole, -whole)
    return np.where(slopes > 0.0, slack / np.where(slopes > 0.0, slopes, 1.0), flat)


def _largest_load(slots: tuple[CountCuts, ...], time_ns: float, whole: float) -> float:
    """Return the largest load of a replica within a time, units."""
    return max(0.0, *(float(_loads_of(slot, np.array([time_ns]), whole).min()) for slot in slots))


def _plain(kind: Kind, slots: tuple[CountCuts, ...], load: float) -> LoadBound:
    """Return the slots' highest cuts at a load (ns), as lines in it."""
    parts, ranges = kind.pipeline.parts, []
    for slot in slots:
        cut = max(slot.cuts, key=lambda slot_cut: slot_cut.at(load / parts))
        bound = PathBound(cut.constant / 2.0**SCALE_BITS, cut.slope / 2.0**SCALE_BITS / parts)
        number = slot.num_micro_batches
        ranges.append(MicroBatchCountRange(number, None if slot.open_ended else number, bound, True))
    if not slots[-1].open_ended:
        # No replica has more micro-batches, but windows of more still need a bound.
        ranges.append(MicroBatchCountRange(number + 1, None, bound, True))
    return LoadBound(tuple(ranges))
