"""Linear lower bounds of the time of one strategy's group, and bounds of pipelines by their work.

``cost_tables`` gives ``tabled`` one table per strategy, chosen for the whole workload. A group of few long
sequences differs from a group of many short ones, so here are many linear bounds, all valid for any sequences.
With x_k sequences of length k on D replicas (at least one sequence),

    Z >= sum_k x_k share_tk + constant_t        for every t,

and ``screening`` seeks the best mixture of them for every set of strategies.

**One micro-batch** of T quanta with S nanoseconds of attention takes, on the last stage and in one phase, at
least, with rho = bare - hidden,

    max(bare[T] + sigma S, hidden[T] + S) = bare[T] + sigma S + max(0, (1 - sigma) S - rho[T])

(``cost_tables``: the ring is exposed, or hidden behind attention). There are three ways to add it up over
sequences:

 - *hidden*: hidden[T] + S.
 - *exposed*, and with theta in [0, 1] *shared*: rho[T] <= kappa + theta r T for all T up to the capacity, so
   attention exceeds the ring by at least max(0, sum v_k - kappa) with v_k = (1 - sigma) S_k - theta r T_k. That is
   at least sum psi(v_k) with psi(v) = v for v < 0 and max(0, v - kappa) else: if some v_k exceeds kappa, the sum
   of the positive ones less one kappa is no less than the sum of all (v_k - kappa); if none does, psi adds nothing
   positive. So a long sequence keeps the attention that the rings of others cannot use.

bare and hidden become lines c + a T below them (``cost_tables.line_below``) that are highest at several T. The
constant counts once a micro-batch, of which there are at least sum T / capacity, or once on every replica in use.

**The ramp.** Before the last stage starts, the first micro-batch has run forward through the others, and after it
ends, the last one runs backward through them. Neither takes less than the shortest sequence by itself.

**Pipelines** (``bounds.long_sequence``). The slowest replica takes at least h(Y) for the mean work Y = sum
x_k y_k / D of the last stages, h concave. So from Y_0 to Y_1 the group takes at least the chord of h; and as Y_0
<= Y <= Y_1 there, also the chord + (Y_0 - Y), and the chord + (Y - Y_1): ``chords_between``.

**Long sequences** (``bounds.long_sequence``). A group that holds the longest sequence takes at least a concave
function H(Y) of its mean work, above h.

**Replicas.** On q <= D replicas in use q Z >= the sum of their times, so constants of each replica count in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths import Load, line_below
from milpplan.lengths.bounds import StageLoads, chord, group_ns, load_bound, long_bound
from milpplan.lengths.bounds.long_sequence import MAX_MICRO_BATCHES, LoadBound, LongSequenceBound
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables, hull_below, line_of, turns_down
from milpplan.lengths.deadline import spend
from milpplan.lengths.search_parameters import PARAMETERS, ROUNDED_UP, SAFETY
from milpplan.simulation import FloatArray

MOST_STAGES = 8
"""Number of stages from which programs of all stages are expensive. Of deeper pipelines the last stages suffice,
as they form a pipeline of the same schedule."""


def stage_loads(tables: Tables, num_stages: int, max_quanta: int, at: float) -> StageLoads:
    """Return the minimum times of a pipeline's stages under the lines that are highest at ``at`` quanta."""
    ahead, back = tables.stage([num_stages - 1], max_quanta, at)
    others = tables.stage(list(range(num_stages - 1)), max_quanta, at)
    last = ahead + back
    # Only fitting sequences: longer ones may have smaller shares.
    fits = tables.load.lengths <= max_quanta * tables.load.token_quantum
    pairs = np.stack([line.sequence / last.sequence for line in others])[:, fits]
    shares = pairs.min(axis=1).tolist()
    # Transfers and the extra time of the first stage grow with the quanta, of which a unit of work has at least so
    # many.
    quanta_per_ns = float((tables.load.lengths / last.sequence)[fits].min()) / tables.load.token_quantum
    transfer, *extras = tolls(tables, max_quanta)
    transfer_ns, slope = line_below(transfer, at)
    slopes = slope, *(float((extra / np.arange(1, max_quanta + 1)).min()) for extra in extras)
    return StageLoads(
        last.sequence,
        last.constant,
        (shares[0], shares[1]),
        (others[0].constant, others[1].constant),
        transfer_ns,
        heaviest(last.sequence, tables.load, max_quanta),
        corners(pairs),
        (slopes[0] * quanta_per_ns, slopes[1] * quanta_per_ns, slopes[2] * quanta_per_ns),
    )


def corners(pairs: FloatArray) -> FloatArray:
    """Return the ``pairs`` [2, n] that are not above a mixture of others, [c, 2], the first entry ascending."""
    kept: list[tuple[float, float]] = []
    for pair in sorted(set(zip(*pairs.tolist(), strict=True))):
        if kept and pair[1] >= kept[-1][1]:
            continue
        while len(kept) > 1 and turns_down(kept[-2], kept[-1], pair):
            kept.pop()
        kept.append(pair)
    return np.array(kept)


def heaviest(sequence_weights: FloatArray, load: Load, max_quanta: int) -> FloatArray:
    """Return how much more j micro-batches can hold than j - 1, [MAX_MICRO_BATCHES], descending.

    The weights are ``sequence_weights`` [n] of the workload's sequences. The fractional knapsack of the heaviest
    fitting sequences per token, in j times the capacity, limits any contents.
    """
    quanta = load.lengths / load.token_quantum
    fits = quanta <= max_quanta
    order = np.argsort(-(sequence_weights / quanta)[fits], kind="stable")
    quanta_held = (load.counts * quanta)[fits][order]
    weights = (load.counts * sequence_weights)[fits][order]
    capacities = np.arange(MAX_MICRO_BATCHES + 1.0) * max_quanta
    sums = np.interp(capacities, np.append(0.0, np.cumsum(quanta_held)), np.append(0.0, np.cumsum(weights)))
    return np.asarray(np.diff(sums) * ROUNDED_UP)


def tolls(tables: Tables, max_quanta: int) -> FloatArray:
    """Return the transfer terms of micro-batches by quanta, [3, max_quanta] ns.

    They are the transfers between stages, and the extra time of the first stage over the minimum of all stages
    before the last one, forward and backward; 0 if programs may have the last stages only.
    """
    num_stages, extras = tables.candidate.layout.pp, []
    others = list(range(num_stages - 1 if num_stages <= MOST_STAGES else 1))
    for phase in (0, 1):
        pairs = zip(tables.values([0], phase, max_quanta), tables.values(others, phase, max_quanta), strict=True)
        # The maximum of both cases exceeds the other's maximum by at least the smaller excess.
        extras.append(np.minimum(*(first - other for first, other in pairs)))
    return np.array([tables.bare.transfer[:max_quanta], *extras], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LinearBounds:
    """Linear bounds: ``shares`` [T, n] ns per sequence and ``constants`` [T] ns; infinite shares for lengths that
    do not fit."""

    shares: FloatArray
    constants: FloatArray

    def at(self, counts: FloatArray) -> float:
        """Return the highest bound of ``counts`` [n] sequences in ns."""
        is_held = counts > 0
        return float((self.shares[:, is_held] @ counts[is_held] + self.constants).max()) if is_held.any() else 0.0

    def with_bounds(self, others: LinearBounds) -> LinearBounds:
        """Return the bounds with further bounds of the same groups, which hold no other lengths."""
        shares = np.concatenate([self.shares, others.shares])
        shares[:, ~np.isfinite(self.shares[0])] = np.inf
        return LinearBounds(shares, np.concatenate([self.constants, others.constants]))


@dataclass(frozen=True, slots=True)
class PipelineWorkBound:
    """Bounds of a pipeline's group by the mean work of its last stages."""

    bounds: tuple[LoadBound, ...]
    """Concave bounds, each tight at another work."""
    sequence_loads: FloatArray
    """Mean work that a sequence adds, [n] ns."""
    total_load: float
    """Mean work of the whole workload, ns."""
    stages: StageLoads
    num_stages: int
    num_replicas: int
    ramp_ns: float
    long_bounds: tuple[LongSequenceBound, ...] = ()
    """Bounds of the replica with the workload's longest sequence."""

    @staticmethod
    def of(
        tables: Tables, strategy: SizedCandidate, max_quanta: int, share: float = 1.0, *, exact: bool = False
    ) -> PipelineWorkBound:
        """Build the bound under the line that proves most at a ``share`` of the workload.

        With shared memory only the last stages of deep pipelines have programs: they form a pipeline of the same
        schedule, and the stages before them only add time.

        Args:
            tables: cost tables of the strategy.
            strategy: the strategy.
            max_quanta: capacity of a micro-batch in quanta.
            share: share of the workload; 1: the strategy has the memory to itself.
            exact: whether programs are exact.
        """
        layout, load = strategy.candidate.layout, tables.load
        mean = load.num_quanta / layout.dp
        even = mean / max(1, -(-mean // max_quanta))
        ramp_ns = ramp(tables, layout.pp, max_quanta)
        own_memory = share == 1.0
        num_stages = layout.pp if own_memory else min(layout.pp, MOST_STAGES)
        # With shared memory groups hold parts of the workload.
        shares = (1.0,) if own_memory else (1.0, PARAMETERS.shared_memory_share)
        effort = PARAMETERS.alone_programs if own_memory else PARAMETERS.shared_programs
        by_load: dict[float, PipelineWorkBound] = {}
        # Lines are highest at parts of an even micro-batch's load.
        for divisor in (1.0, 3.0, 12.0):
            stages = stage_loads(tables, layout.pp, max_quanta, max(1.0, even / divisor))
            sequence_loads = stages.last / layout.dp
            total_load = float(load.counts @ sequence_loads)
            if total_load not in by_load:
                # Coarser where programs are expensive.
                step = PARAMETERS.share_step * (1 if num_stages < MOST_STAGES else 4)
                unbounded = PipelineWorkBound(
                    (), sequence_loads, total_load, stages, num_stages, layout.dp, ramp_ns
                )
                # Half of the programs suffice to compare.
                by_load[total_load] = unbounded.with_bounds_at((share,), effort // 2, step)
        best = max(by_load.values(), key=lambda bound: bound.at(share * bound.total_load))
        best = best.with_bounds_at(shares, effort, step)
        if not exact:
            return best
        effort = PARAMETERS.exact_programs
        exact_bound = load_bound(best.stages, num_stages, ramp_ns, best.total_load, effort, exact=True)
        return replace(best, bounds=(exact_bound,))

    def with_bounds_at(
        self, shares: Sequence[float], effort: int, step: float, *, capped: bool = False
    ) -> PipelineWorkBound:
        """Return the bound with programs that are tight at ``shares`` of the whole work; ``capped`` programs limit
        what micro-batches hold, others are shared by more pipelines."""
        stages = self.stages if capped else replace(self.stages, most=np.zeros(0))
        bounds = []
        for load in (share * self.total_load for share in shares):
            earlier = self.bound_near(load) if self.bounds else None
            bounds.append(
                load_bound(stages, self.num_stages, self.ramp_ns, load, effort, step=step, known=earlier)
            )
        return replace(self, bounds=tuple(bounds))

    def bound_near(self, load: float) -> LoadBound:
        """Return the bound that is highest at a work."""
        return max(self.bounds, key=lambda bound: bound.at(load))

    def at(self, load: float) -> float:
        """Return the minimum time of a replica with a work, ns."""
        return self.bound_near(load).at(load)

    def with_longest(self, cutoff_ns: float) -> PipelineWorkBound:
        """Return the bound with the term of the workload's longest sequence, tight for the whole workload."""
        # A single replica beyond the cutoff needs no better bound; of several replicas the others take less.
        cutoff_ns = cutoff_ns if self.num_replicas == 1 else float("inf")
        return self._with_longest((1.0,), PARAMETERS.longest_programs, cutoff_ns)

    def refined(self, *, holds_longest: bool) -> PipelineWorkBound:
        """Return the bound with programs that are tight for parts of the work, with the term of the workload's
        longest sequence if the pipeline holds it."""
        step, programs = PARAMETERS.share_step / 2, PARAMETERS.refined_programs
        bound = self.with_bounds_at((0.6, 0.25), programs[0], step, capped=True)
        return bound._with_longest((0.7, 0.4), programs[1]) if holds_longest else bound

    def _with_longest(
        self, shares: Sequence[float], effort: int, cutoff_ns: float = float("inf")
    ) -> PipelineWorkBound:
        """Return the bound with the term of the longest sequence, tight at ``shares`` of the whole work."""
        min_load = float(self.stages.last[-1])
        bounds = []
        for share in shares:
            # The bound is tight at no less than a little more than the longest sequence.
            load = max(share * self.total_load, 1.2 * min_load)
            plain = self.bound_near(load)
            bounds.append(long_bound(self.stages, self.num_stages, plain, min_load, load, cutoff_ns, effort))
        return replace(self, long_bounds=tuple(bounds))

    @property
    def workload_bound_ns(self) -> float:
        """Lower bound of the whole workload, ns."""
        bound, load = self.bound_near(self.total_load), np.array([self.total_load])
        groups = [group_ns(long, bound, self.num_replicas, load) for long in self.long_bounds]
        return max([bound.at(self.total_load), *(float(group[0]) for group in groups)])

    def chords_between(
        self, bounds: LinearBounds, low: float = 0.0, high: float = 1.0, *, with_longest: bool | None = None
    ) -> LinearBounds:
        """Add linear bounds of groups with between two shares of the whole work.

        Args:
            bounds: linear bounds of the same groups.
            low: smallest share.
            high: largest share.
            with_longest: whether the groups hold the workload's longest sequence; None: any groups.
        """
        ends = low * self.total_load, high * self.total_load
        bound = self.bound_near(sum(ends) / 2)
        rows = _chord_rows(ends, [bound.at(ends[0]), bound.at(ends[1])])
        for long in self.long_bounds if with_longest else ():
            rows += _chord_rows(ends, group_ns(long, bound, self.num_replicas, np.array(ends)).tolist())
        shares = np.array([slope for slope, _ in rows])[:, None] * self.sequence_loads
        shares[:, ~np.isfinite(bounds.shares[0])] = np.inf
        shares = np.concatenate([bounds.shares, shares])
        if with_longest is False:
            shares[:, -1] = np.inf
        return LinearBounds(shares, np.concatenate([bounds.constants, [constant for _, constant in rows]]))


def _chord_rows(ends: tuple[float, float], values: list[float]) -> list[tuple[float, float]]:
    """Return (slope, constant) of the chord of a concave function between two amounts of work, and of a flatter
    and a steeper line below it there."""
    (low, high), (slope, constant) = ends, chord(ends, values)
    rows = [(slope, constant)]
    rows += [(slope - 1.0, constant + low)] if low > 0 else []
    return [*rows, (slope + 1.0, constant - high)]


def work_bounds(tables: Tables, strategy: SizedCandidate, max_quanta: int) -> LinearBounds:
    """Return the linear bounds of a strategy with micro-batches of up to ``max_quanta`` quanta."""
    spend(2.8e-3)
    layout, load = strategy.candidate.layout, tables.load
    quanta = load.lengths / load.token_quantum
    last = [layout.pp - 1]
    shares, constants = [], []
    ramp_ns = ramp(tables, layout.pp, max_quanta)
    # Shares of the ring that shorter sequences expose.
    thetas = (0.0, 0.3, 0.6, 0.85) if tables.slopes[0] < tables.slopes[1] else ()
    for theta in (None, *thetas):
        phases = [_phase(tables, last, phase, max_quanta, theta) for phase in (0, 1)]
        extra = sum(phase_parts[1] for phase_parts in phases)
        hulls = [hull_below(phase_parts[0]) for phase_parts in phases]
        # Lines are highest at a full micro-batch, and at a small one.
        for at in (1.0, 0.25):
            lines = [line_of(hull, max(1.0, at * max_quanta)) for hull in hulls]
            constant, slope = (sum(line[index] for line in lines) for index in (0, 1))
            sequence_ns = extra + slope * quanta
            shares.append((sequence_ns + constant * quanta / max_quanta) / layout.dp)
            constants.append(ramp_ns)
            if constant > 0 and at < 1.0:
                shares.append(sequence_ns / layout.dp)
                constants.append(ramp_ns + constant)
    # Any group holds a sequence, which passes all stages.
    shares.append(np.zeros(len(quanta)))
    constants.append(float(latencies(tables, strategy, max_quanta).min()))
    table = np.array(shares) * SAFETY
    table[:, quanta > max_quanta] = np.inf
    return LinearBounds(table, np.array(constants) * SAFETY)


def _phase(
    tables: Tables, stages: list[int], phase: int, max_quanta: int, theta: float | None
) -> tuple[FloatArray, FloatArray]:
    """Return the values by quanta [G] that need a line, and the ns that attention adds for every sequence [n]."""
    bare, hidden = tables.values(stages, phase, max_quanta)
    attention = tables.attention(stages, phase, max_quanta)
    if theta is None:
        return hidden, attention
    sigma = tables.slopes[0]
    quanta = np.arange(1, max_quanta + 1)
    ring = np.maximum(0.0, bare - hidden)
    slope = theta * float(ring[-1]) / max_quanta
    kappa = max(0.0, float((ring - slope * quanta).max()))
    excess = (1.0 - sigma) * attention - slope * tables.load.lengths / tables.load.token_quantum
    kept = np.where(excess < 0, excess, np.maximum(0.0, excess - kappa))
    return bare, sigma * attention + kept


def ramp(tables: Tables, num_stages: int, max_quanta: int) -> float:
    """Return the minimum time before the last stage starts and after it ends, ns."""
    return 0.0 if num_stages == 1 else float(passages(tables, list(range(num_stages - 1)), max_quanta)[0])


def passages(tables: Tables, stages: list[int], max_quanta: int, num_links: int | None = None) -> FloatArray:
    """Return the minimum latency of a micro-batch with a sequence of each length, [n] ns; infinite if it does not
    fit.

    Args:
        tables: cost tables of the strategy.
        stages: stages that it passes forward and backward.
        max_quanta: capacity of a micro-batch in quanta.
        num_links: number of transfers in each direction; None: one per stage.
    """
    load = tables.load
    quanta = load.lengths // load.token_quantum
    fits = quanta <= max_quanta
    index = np.minimum(quanta, max_quanta) - 1
    links = 2 * np.minimum.accumulate(tables.bare.transfer[:max_quanta][::-1])[::-1][index]
    total = (links * (len(stages) if num_links is None else num_links)).astype(np.float64)
    for stage in stages:
        for phase in (0, 1):
            # Last tiles are those of this sequence or of a longer one.
            attention = tables.kernels([stage], phase).sum(axis=0)
            options = zip(tables.slopes, tables.values([stage], phase, max_quanta), strict=True)
            # A longer micro-batch may be faster by a tile.
            total += np.max(
                [np.minimum.accumulate(base[::-1])[::-1][index] + slope * attention for slope, base in options],
                axis=0,
            )
    return np.asarray(np.where(fits, total * SAFETY, np.inf))


def latencies(tables: Tables, strategy: SizedCandidate, max_quanta: int) -> FloatArray:
    """Return the minimum time of a group that holds a sequence of each length, [n] ns: it passes all stages and
    back."""
    num_stages = strategy.candidate.layout.pp
    return passages(tables, list(range(num_stages)), max_quanta, num_stages - 1)
