"""Several linear bounds of the time of one strategy's group: no packing of any sequences is below any of them.

``tables`` gives ``groups`` one table a strategy, chosen for the whole workload. A group of few long sequences is
another thing than one of many short ones, so here are many tables, all of them valid for whatever a group holds:
with x_k sequences of length k on D replicas (at least one of them),

    Z >= sum_k x_k share_tk + constant_t        for every t,

and the best mixture of them is sought for every set of strategies (``screening``).

**One micro-batch** of T grains with S nanoseconds of attention takes, on the last stage and in one phase, at
least, with rho = bare - hidden,

    max(bare[T] + sigma S, hidden[T] + S) = bare[T] + sigma S + max(0, (1 - sigma) S - rho[T])

(``tables``: the ring exposed, or hidden behind attention). Three ways to add it up over sequences:

 - *hidden*: hidden[T] + S.
 - *exposed*, and with theta in [0, 1] *shared*: rho[T] <= kappa + theta r T for all T up to the capacity, so what
   attention exceeds the ring by is at least max(0, sum v_k - kappa) with v_k = (1 - sigma) S_k - theta r T_k. That
   is at least sum psi(v_k) with psi(v) = v for v < 0 and max(0, v - kappa) else: if some v_k exceeds kappa, the
   sum of the positive ones less one kappa is no less than the sum of all (v_k - kappa); if none does, psi adds
   what is not positive. So a long sequence keeps the attention that no ring of others can use.

bare and hidden become lines c + a T below them (``tables.line_below``) that are highest at several T. The constant
counts once a micro-batch, of which there are at least sum T / capacity; or once on every replica in use.

**The ramp.** Before the last stage starts, the first micro-batch has run forward through the others, and after it
ends, the last one runs backward through them: neither takes less than the shortest sequence by itself.

**Pipelines** (``unequal``). The slowest replica takes at least h(Y) for the mean load Y = sum x_k y_k / D of the
last stages, h concave. So from Y_0 to Y_1 the group takes at least the chord of h; and as Y_0 <= Y <= Y_1 there,
also the chord + (Y_0 - Y), and the chord + (Y - Y_1): ``within``.

**Long sequences** (``longest``). A group whose longest sequence is one of some length or more takes at least a
concave function H(Y) of its mean load, above h: the same rows with H in the place of h. Groups are told apart by
their longest sequence (``PipelineWorkBound.classes``): one that holds a long one is bounded by H, one that does
not leaves it to others.

**Replicas.** On q <= D replicas in use q Z >= sum of their times, so constants of each count in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds.last_stage import LoadBound, load_bound
from milpplan.groups.bounds.linear_bounds import chord
from milpplan.groups.bounds.long_sequence import LongSequenceBound, group_ns, long_bound
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.lengths.bounds.stage_lines import MOST_STAGES, stage_loads
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables, hull_below, line_of
from milpplan.simulation.layout_columns import FloatArray

# Shares of the capacity at which lines are highest, and of the ring that shorter sequences expose.
_LOADS = (1.0, 0.25)
_THETAS = (0.0, 0.3, 0.6, 0.85)
# Shares of a pipeline's whole load near which its bound is high, and programs for each; and with more effort:
# groups of sets hold parts of the workload.
BESIDE_SHARE = 0.3
_ALONE, _BESIDE, _EXACT_EFFORT = ((1.0,), 18), ((1.0, BESIDE_SHARE), 7), 40
# Shares of stages are rounded to this in programs: to more in the first ones of pipelines of so many stages, which
# are dear, and to less in the finer ones.
DEEP = 8
_STEP, _DEEP_STEP = 0.01, 0.04
# Shares, programs and steps of finer ones.
_FINER, _DEEP_FINER = ((0.6, 0.25), 28, 0.005), ((0.5, 0.25), 12, _DEEP_STEP)
# Classes of groups by their longest sequence begin at these parts of the load of the longest that fits.
_CLASSES = (0.1, 0.2, 0.4, 0.7)
# Where their bounds are high: at these shares of the full load, or at so many times the sequence; for so many
# programs each. The class of the longest of all has more: one that holds it holds little else.
_CLASS_SHARES, _LONGEST_SHARES, _CLASS_LEAST = (BESIDE_SHARE,), (0.7, 0.4), 1.2
_CLASS_EFFORT, _LONGEST_EFFORT, _LENGTHENED_EFFORT, _STAGES_EFFORT = 24, 48, 60, 160
# Parts of an even micro-batch at which lines of pipelines are highest.
_EVEN = (1.0, 3.0, 12.0)
# All of these lines are tried with so many times fewer programs.
_TRY = 2
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class LinearBounds:
    """``shares`` [T, n] and ``constants`` [T] ns; infinite shares where a length does not fit."""

    shares: FloatArray
    constants: FloatArray

    def at(self, counts: FloatArray) -> float:
        """The highest bound of so many sequences of every length, ns."""
        held = counts > 0
        return float((self.shares[:, held] @ counts[held] + self.constants).max()) if held.any() else 0.0

    def with_bounds(self, more: LinearBounds) -> LinearBounds:
        """With more bounds of the same groups, which hold no lengths that these do not."""
        shares = np.concatenate([self.shares, more.shares])
        shares[:, ~np.isfinite(self.shares[0])] = np.inf
        return LinearBounds(shares, np.concatenate([self.constants, more.constants]))


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Groups whose longest sequence is one of ``first`` to ``end`` - 1; ``long``: what is known of the replica
    that holds it, each highest at another load."""

    first: int
    end: int
    long_bounds: tuple[LongSequenceBound, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineWorkBound:
    """A pipeline's ``bounds`` by the mean load of its last stages, each highest at another load, to which a
    sequence adds ``each`` [n] ns; ``full`` is the load of the whole workload. ``classes``: what is known of groups
    with long sequences."""

    bounds: tuple[LoadBound, ...]
    sequence_loads: FloatArray
    total_load: float
    stages: StageLoads
    num_stages: int
    num_replicas: int
    ramp_ns: float
    classes: tuple[LengthClass, ...] = ()

    @staticmethod
    def of(
        tables: Tables, one: SizedCandidate, most_grains: int, share: float = 1.0, *, exact: bool = False
    ) -> PipelineWorkBound:
        """Under the line that proves most of a ``share`` of the workload, of those highest at some numbers.

        Beside other strategies only the last stages of deep pipelines have programs: alone they are a pipeline of
        the same schedule, and what comes before and after only adds to its time.
        """
        layout, load = one.candidate.layout, tables.load
        mean = load.num_quanta / layout.dp
        even = mean / max(1, -(-mean // most_grains))
        ramp_ns = ramp(tables, layout.pp, most_grains)
        alone = share == 1.0
        num_stages = layout.pp if alone else min(layout.pp, MOST_STAGES)
        shares, effort = _ALONE if alone else _BESIDE
        tried: dict[float, PipelineWorkBound] = {}
        for part in _EVEN:
            stages = stage_loads(tables, layout.pp, most_grains, max(1.0, even / part))
            each = stages.last / layout.dp
            full = float(load.counts @ each)
            if full not in tried:
                step = _STEP if num_stages < DEEP else _DEEP_STEP
                plain = PipelineWorkBound((), each, full, stages, num_stages, layout.dp, ramp_ns)
                tried[full] = plain.with_bounds_at((share,), effort // _TRY, step, capped=False)
        found = max(tried.values(), key=lambda one: one.at(share * one.total_load))
        found = found.with_bounds_at(shares, effort, step, capped=False)
        if not exact:
            return found
        bound = load_bound(found.stages, num_stages, ramp_ns, found.total_load, _EXACT_EFFORT, exact=True)
        return replace(found, bounds=(bound,))

    def with_bounds_at(self, shares: Sequence[float], effort: int, step: float, *, capped: bool) -> PipelineWorkBound:
        """With bounds that are high at these shares of the full load; whether they know what micro-batches hold
        at most: programs without are shared by more pipelines."""
        stages = self.stages if capped else replace(self.stages, most=np.zeros(0))
        bounds = []
        for load in (share * self.total_load for share in shares):
            known = self.bound_near(load) if self.bounds else None
            bounds.append(load_bound(stages, self.num_stages, self.ramp_ns, load, effort, step=step, known=known))
        return replace(self, bounds=tuple(bounds))

    def bound_near(self, load: float) -> LoadBound:
        """The bound that is highest for a load."""
        return max(self.bounds, key=lambda one: one.at(load))

    def at(self, load: float) -> float:
        """What a replica takes at least for a load, ns."""
        return self.bound_near(load).at(load)

    def refined(self) -> PipelineWorkBound:
        """With a bound that is high for parts of the load, too."""
        return self.with_bounds_at(*(_DEEP_FINER if self.num_stages >= DEEP else _FINER), capped=True)

    def with_longest(self, enough_ns: float) -> PipelineWorkBound:
        """With what the longest sequence of the workload adds, highest for the whole of it."""
        last = len(self.sequence_loads)
        # One replica that takes so long is in no step that counts; of several the others take less.
        enough_ns = enough_ns if self.num_replicas == 1 else float("inf")
        long = self.around_long_sequence(last - 1, self.total_load, _LENGTHENED_EFFORT, enough_ns)
        return replace(self, classes=(LengthClass(last - 1, last, (long,)),))

    def around_long_sequence(self, first: int, load: float, effort: int, enough_ns: float = float("inf")) -> LongSequenceBound:
        """What is known of a replica with a sequence of length number ``first`` or longer, highest near a load."""
        least = float(self.stages.last[first])
        load = max(load, _CLASS_LEAST * least)
        return long_bound(self.stages, self.num_stages, self.bound_near(load), least, load, enough_ns, effort)

    def with_classes(self, fitting: int, *, only_longest: bool = False) -> PipelineWorkBound:
        """With groups told apart by the longest sequence that they hold, of the first ``fitting`` lengths; or only
        by whether that is the longest of all."""
        last, number = self.stages.last[:fitting], len(self.sequence_loads)
        parts = () if only_longest else _CLASSES
        ends = [int(np.searchsorted(last, part * last[-1])) for part in parts]
        ends += [fitting - 1] if fitting == number else []
        edges = sorted({0, *(end for end in ends if end > 0), fitting})
        classes = [LengthClass(0, edges[1])]
        for first, end in pairwise(edges[1:]):
            longest = first == number - 1
            shares, effort = (_LONGEST_SHARES, _LONGEST_EFFORT) if longest else (_CLASS_SHARES, _CLASS_EFFORT)
            # Programs grow with the stages.
            effort = min(effort, _STAGES_EFFORT // self.num_stages)
            long = tuple(self.around_long_sequence(first, share * self.total_load, effort) for share in shares)
            classes.append(LengthClass(first, end, long))
        return replace(self, classes=tuple(classes))

    @property
    def workload_bound_ns(self) -> float:
        """The bound of the whole workload, ns."""
        found = [self.at(self.total_load)]
        for one in self.classes:
            if one.end == len(self.sequence_loads):
                found += [values[0] for values in self._ends(one, (self.total_load, self.total_load))]
        return max(found)

    def _ends(self, one: LengthClass, ends: tuple[float, float]) -> list[list[float]]:
        """Bounds of a group of the class at two loads, ns."""
        loads, near = np.array(ends), self.bound_near(sum(ends) / 2)
        return [group_ns(long, near, self.num_replicas, loads).tolist() for long in one.long_bounds]

    def chords_between(
        self, bounds: LinearBounds, low: float = 0.0, high: float = 1.0, one: LengthClass | None = None
    ) -> LinearBounds:
        """``bounds`` and those of groups with between two shares of the full load, of one class if it is given."""
        ends = low * self.total_load, high * self.total_load
        near = self.bound_near(sum(ends) / 2)
        rows = _chord_rows(ends, [near.at(ends[0]), near.at(ends[1])])
        if one is not None:
            rows += [row for values in self._ends(one, ends) for row in _chord_rows(ends, values)]
        shares = np.array([slope for slope, _ in rows])[:, None] * self.sequence_loads
        shares[:, ~np.isfinite(bounds.shares[0])] = np.inf
        shares = np.concatenate([bounds.shares, shares])
        if one is not None:
            shares[:, one.end :] = np.inf
        return LinearBounds(shares, np.concatenate([bounds.constants, [constant for _, constant in rows]]))


def _chord_rows(ends: tuple[float, float], values: list[float]) -> list[tuple[float, float]]:
    """(slope, constant) of the chord of a concave function between two loads, and of a flatter and a steeper line
    below it there."""
    (low, high), (slope, constant) = ends, chord(ends, values)
    rows = [(slope, constant)]
    rows += [(slope - 1.0, constant + low)] if low > 0 else []
    return [*rows, (slope + 1.0, constant - high)]


def work_bounds(tables: Tables, one: SizedCandidate, most_grains: int) -> LinearBounds:
    """The bounds of a strategy with micro-batches of up to ``most_grains``."""
    layout, load = one.candidate.layout, tables.load
    grains = load.lengths / load.token_quantum
    last = [layout.pp - 1]
    shares, constants = [], []
    ramp_ns = ramp(tables, layout.pp, most_grains)
    for theta in (None, *(_THETAS if tables.slopes[0] < tables.slopes[1] else ())):
        phases = [_phase(tables, last, phase, most_grains, theta) for phase in (0, 1)]
        extra = sum(one_[1] for one_ in phases)
        hulls = [hull_below(one_[0]) for one_ in phases]
        for at in _LOADS:
            lines = [line_of(hull, max(1.0, at * most_grains)) for hull in hulls]
            constant, slope = (sum(line[place] for line in lines) for place in (0, 1))
            each = extra + slope * grains
            shares.append((each + constant * grains / most_grains) / layout.dp)
            constants.append(ramp_ns)
            if constant > 0 and at < 1.0:
                shares.append(each / layout.dp)
                constants.append(ramp_ns + constant)
    # Any group holds a sequence, which passes all stages.
    shares.append(np.zeros(len(grains)))
    constants.append(float(serial_times(tables, one, most_grains).min()))
    table = np.array(shares) * _SAFETY
    table[:, grains > most_grains] = np.inf
    return LinearBounds(table, np.array(constants) * _SAFETY)


def _phase(
    tables: Tables, stages: list[int], phase: int, most_grains: int, theta: float | None
) -> tuple[FloatArray, FloatArray]:
    """Values by grains [G] that need a line, and what attention adds to it for every sequence [n], ns."""
    bare, hidden = tables.values(stages, phase, most_grains)
    attention = tables.attention(stages, phase, most_grains)
    if theta is None:
        return hidden, attention
    sigma = tables.slopes[0]
    number = np.arange(1, most_grains + 1)
    ring = np.maximum(0.0, bare - hidden)
    slope = theta * float(ring[-1]) / most_grains
    kappa = max(0.0, float((ring - slope * number).max()))
    beyond = (1.0 - sigma) * attention - slope * tables.load.lengths / tables.load.token_quantum
    kept = np.where(beyond < 0, beyond, np.maximum(0.0, beyond - kappa))
    return bare, sigma * attention + kept


def ramp(tables: Tables, num_stages: int, most_grains: int) -> float:
    """What runs before the last stage starts and after it ends, at least, ns."""
    return 0.0 if num_stages == 1 else float(passages(tables, list(range(num_stages - 1)), most_grains)[0])


def passages(tables: Tables, stages: list[int], most_grains: int, num_links: int | None = None) -> FloatArray:
    """Least time of a micro-batch that holds a sequence, forward and back through ``stages`` and over so many
    links, one after each stage unless told otherwise, [n] ns; infinite where it does not fit."""
    load = tables.load
    grains = load.lengths // load.token_quantum
    fits = grains <= most_grains
    place = np.minimum(grains, most_grains) - 1
    links = 2 * np.minimum.accumulate(tables.bare.transfer[:most_grains][::-1])[::-1][place]
    total = (links * (len(stages) if num_links is None else num_links)).astype(np.float64)
    for stage in stages:
        for phase in (0, 1):
            # Last tiles are those of this sequence or of a longer one.
            attention = tables.kernels([stage], phase).sum(axis=0)
            ways = zip(tables.slopes, tables.values([stage], phase, most_grains), strict=True)
            # A longer micro-batch may be shorter by a tile.
            total += np.max(
                [np.minimum.accumulate(base[::-1])[::-1][place] + slope * attention for slope, base in ways],
                axis=0,
            )
    return np.asarray(np.where(fits, total * _SAFETY, np.inf))


def serial_times(tables: Tables, one: SizedCandidate, most_grains: int) -> FloatArray:
    """Least time of a group that holds a sequence of each length, [n] ns: it passes all stages and back."""
    stages = one.candidate.layout.pp
    return passages(tables, list(range(stages)), most_grains, stages - 1)
