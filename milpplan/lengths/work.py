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

**The longest sequence** (``longest``). On q <= D replicas in use q Z >= sum of their times. Each is no less than a
line c + a Y_r below h, and that of the replica with the longest sequence k more, for all loads that a replica may
have: so Z >= c + a Y + k / D. No replica has a load that takes longer than the group may: what is so proved holds
for groups within that time, hence for steps shorter than the best one known, and no other bound is asked for.

**Replicas.** On q <= D replicas in use q Z >= sum of their times, so constants of each count in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from milpplan.costs.columns import FloatArray
from milpplan.lengths.candidates import Sized
from milpplan.lengths.longest import LongBound, long_bound
from milpplan.lengths.tables import Tables, hull_below, line_of, stage_loads
from milpplan.lengths.unequal import LoadBound, StageLoads, load_bound

# Shares of the capacity at which lines are highest, and of the ring that shorter sequences expose.
_LOADS = (1.0, 0.25)
_THETAS = (0.0, 0.3, 0.6, 0.85)
# Parts of an even micro-batch at which lines of pipelines are highest.
_EVEN = (1.0, 3.0, 12.0)
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """``shares`` [T, n] and ``constants`` [T] ns, with the longest sequence ``longest`` [T] ns more; infinite
    shares where a length does not fit."""

    shares: FloatArray
    constants: FloatArray
    longest: FloatArray

    def at(self, counts: FloatArray) -> float:
        """The highest bound of so many sequences of every length, ns."""
        held = counts > 0
        constants = self.constants + (self.longest if held[-1] else 0.0)
        return float((self.shares[:, held] @ counts[held] + constants).max()) if held.any() else 0.0


@dataclass(frozen=True, slots=True)
class Loads:
    """A pipeline's ``bound`` by the mean load of its last stages, to which a sequence adds ``each`` [n] ns;
    ``full`` is the load of the whole workload. ``long`` is what is known of the replica with the longest sequence,
    each highest at another load; where there is any, groups are of at most ``most_ns``, and no replica has a load
    above ``most``."""

    bound: LoadBound
    each: FloatArray
    full: float
    stages: StageLoads
    num_stages: int
    num_replicas: int
    most: float = float("inf")
    most_ns: float = float("inf")
    long: tuple[LongBound, ...] = ()

    @staticmethod
    def of(tables: Tables, one: Sized, most_grains: int, *, exact: bool = False) -> Loads:
        """Under the line that proves most of the whole workload, of those highest at some micro-batches."""
        layout, load = one.candidate.layout, tables.load
        mean = load.grains / layout.dp
        even = mean / max(1, -(-mean // most_grains))
        ramp_ns = ramp(tables, layout.pp, most_grains)
        found: Loads | None = None
        for part in _EVEN:
            stages = stage_loads(tables, layout.pp, most_grains, max(1.0, even / part))
            each = stages.last / layout.dp
            full = float(load.counts @ each)
            bound = load_bound(stages, layout.pp, ramp_ns, full)
            mine = Loads(bound, each, full, stages, layout.pp, layout.dp)
            if found is None or mine.highest > found.highest:
                found = mine
        assert found is not None
        if not exact:
            return found
        return replace(found, bound=load_bound(found.stages, layout.pp, ramp_ns, found.full, exact=True))

    def lengthened(self, most_ns: float, parts: tuple[float, ...] = (1.0,)) -> Loads:
        """With bounds of the replica with the longest sequence, for groups of at most ``most_ns``; highest at
        ``parts`` of the largest load."""
        most = min(self.num_replicas * self.full, self.bound.most_within(most_ns))
        least = float(self.stages.last[-1])
        if most < least:
            # Nothing within this time holds it; any bound will do.
            return self
        # One replica that takes so long is in no step that counts; of several all are averaged.
        enough_ns = most_ns if self.num_replicas == 1 else float("inf")
        found = [
            long_bound(self.stages, self.num_stages, self.bound, least, part * most, enough_ns)
            for part in parts
            if part * most >= least
        ]
        return replace(self, most=most, most_ns=most_ns, long=tuple(found))

    @property
    def highest(self) -> float:
        """The bound of the whole workload, ns: a group takes at least ``most_ns``, or what is proved within it."""
        constant, slope, more = self._with_longest(0.0, 1.0)
        found = [constant + slope * self.full + more]
        found += [one.at(self.full) for one in self.long] if self.num_replicas == 1 else []
        return max(self.bound.at(self.full), min(self.most_ns, max(found)))

    def _with_longest(self, low: float, high: float) -> tuple[float, float, float]:
        """A line (constant, slope) of the mean load, and what the longest sequence adds to it, ns."""
        if not self.long:
            return 0.0, 0.0, 0.0
        # One replica's load is the mean; of several each may have any load.
        alone = self.num_replicas == 1
        most = min(self.most, self.num_replicas * high * self.full)
        least = min(low * self.full, 0.9 * most) if alone else 0.0
        line = self.bound.chord(least, most)
        return *line, max(one.beyond(line, least, most) for one in self.long) / self.num_replicas

    def within(self, bounds: WorkBounds, low: float = 0.0, high: float = 1.0) -> WorkBounds:
        """``bounds`` and those of groups with between two shares of the full load."""
        constant, slope = self.bound.chord(low * self.full, high * self.full)
        rows = [(slope, constant)]
        rows += [(slope - 1.0, constant + low * self.full)] if low > 0 else []
        rows += [(slope + 1.0, constant - high * self.full)] if high < 1 else []
        constant, slope, more = self._with_longest(low, high)
        rows += [(slope, constant)] if self.long else []
        shares = np.array([row[0] for row in rows])[:, None] * self.each
        shares[:, ~np.isfinite(bounds.shares[0])] = np.inf
        longest = [0.0] * len(rows)
        longest[-1] = more
        return WorkBounds(
            np.concatenate([bounds.shares, shares]),
            np.concatenate([bounds.constants, [row[1] for row in rows]]),
            np.concatenate([bounds.longest, longest]),
        )


def work_bounds(tables: Tables, one: Sized, most_grains: int) -> WorkBounds:
    """The bounds of a strategy with micro-batches of up to ``most_grains``."""
    layout, load = one.candidate.layout, tables.load
    grains = load.lengths / load.grain
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
    table = np.array(shares) * _SAFETY
    table[:, grains > most_grains] = np.inf
    return WorkBounds(table, np.array(constants) * _SAFETY, np.zeros(len(constants)))


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
    beyond = (1.0 - sigma) * attention - slope * tables.load.lengths / tables.load.grain
    kept = np.where(beyond < 0, beyond, np.maximum(0.0, beyond - kappa))
    return bare, sigma * attention + kept


def ramp(tables: Tables, num_stages: int, most_grains: int) -> float:
    """What runs before the last stage starts and after it ends, at least, ns."""
    return 0.0 if num_stages == 1 else float(passages(tables, list(range(num_stages - 1)), most_grains)[0])


def passages(tables: Tables, stages: list[int], most_grains: int) -> FloatArray:
    """Least time of a micro-batch that holds a sequence, forward and back through ``stages`` and over the links
    after each, [n] ns; infinite where it does not fit."""
    load = tables.load
    grains = load.lengths // load.grain
    fits = grains <= most_grains
    place = np.minimum(grains, most_grains) - 1
    links = 2 * np.minimum.accumulate(tables.bare.transfer[:most_grains][::-1])[::-1][place]
    total = (links * len(stages)).astype(np.float64)
    for stage in stages:
        for phase in (0, 1):
            attention = tables.attention([stage], phase, most_grains)
            ways = zip(tables.slopes, tables.values([stage], phase, most_grains), strict=True)
            # A longer micro-batch may be shorter by a tile.
            total += np.max(
                [np.minimum.accumulate(base[::-1])[::-1][place] + slope * attention for slope, base in ways],
                axis=0,
            )
    return np.asarray(np.where(fits, total * _SAFETY, np.inf))


def serial_times(tables: Tables, one: Sized, most_grains: int) -> FloatArray:
    """Least time of a group that holds a sequence of each length, [n] ns: it passes all stages and back."""
    stages = one.candidate.layout.pp
    total = passages(tables, [stages - 1], most_grains)
    links = 2.0 * float(tables.bare.transfer[:most_grains].max())
    total = total - links
    return total + passages(tables, list(range(stages - 1)), most_grains) if stages > 1 else total
