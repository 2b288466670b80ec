"""Upper bounds of the work that the replicas of one kind do within a time, for batches that come later.

``PipelineTable`` is built once, with the plan: mixtures of paths for the numbers of
micro-batches that are good near the plan's load. ``BatchKind`` adds one batch's lengths, and solves no program.

**Work.** A sequence of length l counts w = u + theta c phi(l) units: its own, and a share of its micro-batch's c.
phi is a dual feasible function, so that sequences of one micro-batch have sum phi <= 1: for an e <= 1/2, with
x = l / C, phi is 1 for x > 1 - e, 0 for x < e, x between (Fekete and Schepers 2001). theta is 0 or 1, whichever
suits the batch; the bound holds for both.

**Envelope.** For a replica with v micro-batches that holds w in work and y in units, y >= w - theta c v, and each
cut ``time >= slope y + constant`` of the slot v with a slope of at least zero gives
``time >= slope (w - theta c v) + constant``; and w <= v (cap + theta c). The largest replica of D holds at least
the mean, so all D hold ``g(Z) = D max_v min over cuts`` at most within the time Z. For one stage the time is
parts (y + c v) >= parts max(w, w + (1 - theta) c), whatever v.

For a mixture of paths with weights w_m and any alpha >= 0, ``time >= lags + c sum w_m + alpha y
- sum max(0, alpha - w_m) cap`` (proof in ``pipeline_bounds``), for the cap of the batch at hand.

**Best loads** around a sequence that is longer than the best loads without it. The pipeline waits around such a
sequence unless the micro-batches before and after it are nearly as long, so fewer and larger micro-batches than
elsewhere are best: they rise to it and fall from it. Their shares of the total depend on little but the share of
the sequence, so they are computed once for some shares (``best_profile`` with a floor) and used for
every batch whose longest sequence has a share near one of them. Heuristics only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.lengths.bounds.count_cuts import BestLoads, PipelineCuts, best_profile, equal_stages
from milpplan.lengths.search_parameters import SAFETY
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    Kind,
    Pipeline,
)

# Loads, as multiples of the plan's, at which mixtures of paths are computed, and maximum numbers tried at each.
_NEAR = (1.0, 0.6, 1.5)
_MAX_TRIES = 40
# Numbers of micro-batches with slots of their own; larger numbers share the last slot.
_MAX_SLOTS = 256
# Numbers have no slots if their last stage alone exceeds the best rough bound by this factor.
_BEYOND = 1.04
# Maximum number of cuts of one mixture, for its best alphas at several loads.
_MAX_ALPHAS = 4
# Values of e in phi.
_EDGES = (0.0, 0.125, 0.25, 0.375, 0.5)


# Shares of the longest sequence that are computed: from the largest share without it times _FIRST, rising by the
# factor _TIMES, up to _LAST.
_FIRST, _TIMES, _LAST = 1.15, 1.35, 0.7
# Numbers of micro-batches tried, as multiples of the total over the longest sequence; the divisor that gives the
# position of the sequence; and the number up to which all positions are tried, since small programs are cheap.
_NUMBERS, _BEFORE, _FEW = (1.1, 1.25, 1.5, 1.8, 2.2), 3, 10
# Loads below this share of the total are dropped; factor by which the longest sequence may exceed a shape's peak.
_NOTHING, _CLOSE = 1e-5, 1.02


def peaks(pipeline: Pipeline, longest_units: int, share: float) -> tuple[FloatArray, ...]:
    """Compute best loads around a long sequence, for shares of the sequence above ``share``.

    Args:
        pipeline: the pipeline.
        longest_units: work of the sequence.
        share: largest share of a micro-batch in best loads without the sequence.

    Returns:
        Loads [v] as shares of the total, in ascending order of the sequence's share.
    """
    shapes: list[FloatArray] = []
    share *= _FIRST
    while share < _LAST:
        units = int(longest_units / share)
        numbers = {max(2, int(part / share)) for part in _NUMBERS}
        profiles = [
            best_profile(pipeline, number, units, longest_units, position, longest_units)
            for number in sorted(numbers)
            for position in (range(number) if number <= _FEW else (number // _BEFORE,))
        ]
        best = min(
            (profile for profile in profiles if profile is not None),
            key=lambda profile: profile.time_ns,
            default=None,
        )
        if best is not None:
            shares = best.units / best.units.sum()
            shares = shares[shares > _NOTHING]
            shapes.append(shares / shares.sum())
        share *= _TIMES
    return tuple(shapes)


def around(shapes: Sequence[FloatArray], share: float) -> list[FloatArray]:
    """Select the shapes for a longest sequence with this share of the total, most likely first.

    The next lower shape comes first, since no other sequence should make the pipeline wait. Returns no shape if
    the share is below all.
    """
    below = [shape for shape in shapes if shape.max() * _CLOSE < share]
    above = shapes[len(below) : len(below) + 1]
    return [*below[-1:], *above] if below else []


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """Cuts of one number of micro-batches, for any cap: ``time >= slope y + base - spare cap``, [cuts]."""

    slope: FloatArray
    base: FloatArray
    spare: FloatArray

    def at(self, units: float, cap_units: float) -> float:
        """Return the highest cut at a load, ns."""
        return float((self.slope * units + self.base - self.spare * cap_units).max())


@dataclass(frozen=True, eq=False)
class PipelineTable:
    """One kind of pipeline of a strategy as a dispatcher keeps it.

    ``slots`` are the cuts by number of micro-batches; ``shapes`` are best loads as shares [v], by a replica's load
    in units and number of micro-batches; ``peaks`` are best loads around a long sequence.
    """

    strategy: int
    first_replica: int
    num_replicas: int
    pipeline: Pipeline
    slots: dict[int, SlotTable]
    shapes: dict[int, dict[int, FloatArray]]
    peaks: tuple[FloatArray, ...]

    @staticmethod
    def of(kind: Kind, first_replica: int, planned_units: int) -> PipelineTable:
        """Build the table near a load of ``planned_units`` on all replicas (0: half of the total that fits)."""
        slots: dict[int, SlotTable] = {}
        shapes: dict[int, dict[int, FloatArray]] = {}
        peak_shapes: tuple[FloatArray, ...] = ()
        if kind.pipeline.num_stages > 1 and kind.total_units:
            load = (planned_units or kind.total_units // 2) / kind.num_replicas
            for share in _NEAR:
                near = max(1, int(load * share))
                shapes[near] = _learn(kind, near, slots)
            if any(shapes.values()):
                largest = min(
                    float(shares.max()) for by_number in shapes.values() for shares in by_number.values()
                )
                peak_shapes = peaks(kind.pipeline, int(kind.units.max()), largest)
        return PipelineTable(
            kind.strategy, first_replica, kind.num_replicas, kind.pipeline, slots, shapes, peak_shapes
        )

    def shape(self, number: int, load: float) -> FloatArray:
        """Stretch the nearest known shape to ``number`` micro-batches: best loads as shares of the total.

        Larger numbers than known get equal loads between the rise and the fall.
        """
        nearest = sorted(self.shapes, key=lambda known_load: abs(math.log(known_load / max(1.0, load))))
        by_number = next((self.shapes[known_load] for known_load in nearest if self.shapes[known_load]), None)
        if by_number is None:
            return np.full(number, 1.0 / number)
        size = min(by_number, key=lambda known: (abs(known - number), known))
        shares = by_number[size]
        if size < number:
            top = int(shares.argmax())
            shares = np.concatenate([shares[:top], np.full(number - size, shares[top]), shares[top:]])
        elif size > number:
            middles = (np.arange(number) + 0.5) / number
            shares = np.interp(middles, (np.arange(size) + 0.5) / size, shares)
        return np.asarray(shares / shares.sum())


def _learn(kind: Kind, load: int, slots: dict[int, SlotTable]) -> dict[int, FloatArray]:
    """Compute profiles at ``load``, best rough cut first, until the other numbers' rough cuts are above.

    Their cuts are added to ``slots``.

    Returns:
        Their shapes by number of micro-batches.
    """
    best = float("inf")
    shapes: dict[int, FloatArray] = {}
    for slot in sorted(PipelineCuts(kind).rough, key=lambda slot: slot.at(load)):
        number = slot.num_micro_batches
        if slot.at(load) >= best or len(shapes) == _MAX_TRIES:
            break
        slot_table = slots.get(number)
        bound = slot.at(load) if slot_table is None else max(slot.at(load), slot_table.at(load, kind.cap_units))
        if slot.open_ended or (bound >= best and shapes):
            continue
        full = min(load, int(0.97 * number * kind.cap_units))
        profile = best_profile(kind.pipeline, number, full, kind.cap_units) if full else None
        if profile is None:
            continue
        shapes[number] = profile.units / profile.units.sum()
        if slot_table is None:
            slots[number] = _slot_table(kind, profile, full)
        if number * kind.cap_units >= load:
            best = min(best, max(bound, profile.cut.at(load)))
    return shapes


def _slot_table(kind: Kind, profile: BestLoads, load: int) -> SlotTable:
    """Build the cuts of a mixture at several loads around ``load``."""
    stages = equal_stages(kind.pipeline, np.zeros(0))
    # The mixture's weight on a unit of every micro-batch, and on what none of them holds.
    weights = np.sort((stages.kinds @ profile.mixture.weights)[0]) * kind.pipeline.parts * SAFETY
    base = float((stages.constants @ profile.mixture.weights).sum()) * SAFETY
    # Alpha is the weight at which the cheapest micro-batches hold the load, for several loads and caps.
    indices = np.unique([min(weights.size, int(load * f / kind.cap_units) + 1) for f in (0.5, 1.0, 2.0, 8.0)])
    alphas = np.unique(weights[indices - 1])[-_MAX_ALPHAS:]
    spare = np.maximum(0.0, alphas[:, None] - weights).sum(axis=1)
    return SlotTable(alphas, np.full(alphas.size, base), spare)


@dataclass(frozen=True, slots=True, eq=False)
class WorkEnvelope:
    """Cuts ``time >= slope w + constant`` [slots, cuts] of a replica's work w, and the maximum work [slots]."""

    slope: FloatArray
    constant: FloatArray
    max_work: FloatArray

    def max_work_within(self, time_ns: float) -> float:
        """Return the maximum work of a replica within a time; 0 if none."""
        slack = time_ns - self.constant
        # A cut without a slope allows any work, or none.
        flat_limits = np.where(slack >= 0.0, np.inf, -np.inf)
        slot_limits = np.divide(slack, self.slope, out=flat_limits, where=self.slope > 0.0).min(axis=1)
        return max(0.0, float(np.minimum(slot_limits, self.max_work).max()))

    def time_at(self, work: float) -> float:
        """Return the minimum time of a replica with this work; infinite if no slot holds it."""
        times = (self.slope * work + self.constant).max(axis=1)
        return float(np.where(self.max_work >= work, times, np.inf).min())

    def points(self) -> tuple[FloatArray, FloatArray]:
        """Return times and works of all corners of the slots' envelopes, and further points below them."""
        num_slots, num_cuts = self.slope.shape
        first, second = np.triu_indices(num_cuts, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            works = (self.constant[:, second] - self.constant[:, first]) / (
                self.slope[:, first] - self.slope[:, second]
            )
        ends = np.where(np.isfinite(self.max_work), self.max_work, 0.0)[:, None]
        works = np.concatenate([works, ends, np.zeros((num_slots, 1))], axis=1)
        works = np.where(np.isfinite(works) & (works >= 0) & (works <= self.max_work[:, None]), works, 0.0)
        times = (self.slope[:, None, :] * works[:, :, None] + self.constant[:, None, :]).max(axis=2)
        return times.ravel(), works.ravel()


class BatchKind:
    """One kind with a batch's distinct ``lengths`` [K] and ``counts`` [K]."""

    def __init__(self, table: PipelineTable, lengths: Int64Array, counts: Int64Array) -> None:
        self.table = table
        pipeline = table.pipeline
        self.fits: npt.NDArray[np.bool_] = pipeline.holds(lengths)
        self.units: Int64Array = pipeline.units(lengths)
        lag = 2 * (pipeline.num_stages - 1) * pipeline.transfer_ns
        # A replica with this sequence is not done before the sequence has passed all stages forward and back.
        self.alone_ns = (
            (self.units + pipeline.micro_batch_units) * (pipeline.num_stages * pipeline.parts) + lag
        ).astype(np.float64)
        fitting_units, fitting_counts = self.units[self.fits], counts[self.fits]
        self.total_units = int(fitting_units @ fitting_counts)
        density = float((fitting_units / lengths[self.fits]).max(initial=0.0))
        self.cap_units = float(min(self.total_units, np.ceil(density * pipeline.micro_batch_tokens) + 1))
        phi = _phi(lengths / pipeline.micro_batch_tokens, counts * self.fits)
        shared_work: FloatArray = self.units + pipeline.micro_batch_units * phi
        plain_envelope = self._envelope(int(fitting_counts.sum()), False)
        shared_envelope = self._envelope(int(fitting_counts.sum()), True)
        # Both envelopes are valid; the higher one for the whole batch is likely to be higher for its parts.
        times_of_batch = [
            envelope.time_at(float((work * counts)[self.fits].sum()) / table.num_replicas)
            for envelope, work in ((plain_envelope, self.units), (shared_envelope, shared_work))
        ]
        self.envelope, self.work = (
            (shared_envelope, shared_work)
            if times_of_batch[1] > times_of_batch[0]
            else (plain_envelope, self.units.astype(np.float64))
        )
        self.points = self.envelope.points()

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the kind."""
        return self.table.num_replicas

    def time_with(self, number: int, units: float) -> float:
        """Return the minimum time of a replica that holds ``units`` in ``number`` micro-batches, ns."""
        slope, constant = self._rough_cuts(np.array([float(number)]))
        bound = float((slope * units + constant).max())
        slot_table = self.table.slots.get(number)
        if slot_table is not None:
            bound = max(bound, slot_table.at(units, self.cap_units))
        return bound

    def _envelope(self, num_sequences: int, shared: bool) -> WorkEnvelope:
        """Build the envelope of the module, with theta = 1 if the micro-batches' share counts as work."""
        pipeline = self.table.pipeline
        parts, empty = pipeline.parts, pipeline.micro_batch_units
        if pipeline.num_stages == 1:
            ramp = 0.0 if shared else float(parts * empty)
            limit_units = np.inf
            if pipeline.max_micro_batches is not None:
                limit_units = pipeline.max_micro_batches * (self.cap_units + empty * shared)
            return WorkEnvelope(np.full((1, 1), float(parts)), np.full((1, 1), ramp), np.full(1, limit_units))
        limit = max(1, min(num_sequences, pipeline.max_micro_batches or _MAX_SLOTS, _MAX_SLOTS))
        numbers, slope, constant = self._promising_numbers(limit)
        # The last slot also stands for all larger numbers, unless there are none.
        open_ended = numbers.size < limit or limit == _MAX_SLOTS
        limit = numbers.size
        slot_tables = {number: table for number, table in self.table.slots.items() if number <= limit}
        width = max((table.slope.size for table in slot_tables.values()), default=0)
        # Slots without a mixture repeat their first cut.
        slopes = np.concatenate([slope, np.repeat(slope[:, :1], width, axis=1)], axis=1)
        constants = np.concatenate([constant, np.repeat(constant[:, :1], width, axis=1)], axis=1)
        for number, table in slot_tables.items():
            size = table.slope.size
            slopes[number - 1, 2 : 2 + size] = table.slope
            constants[number - 1, 2 : 2 + size] = table.base - table.spare * self.cap_units
        max_work = numbers * self.cap_units
        if open_ended:
            # Only the last stage's cut grows with the number.
            slopes[-1], constants[-1], max_work[-1] = slopes[-1, 0], constants[-1, 0], np.inf
        if shared:
            constants -= slopes * (empty * numbers)[:, None]
            max_work += empty * numbers
            if open_ended:
                # For larger numbers parts (w - c v) + parts c v does not depend on v.
                max_work[-1] = np.inf
        return WorkEnvelope(slopes, constants, max_work)

    def _promising_numbers(self, limit: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """List numbers of micro-batches up to ``limit`` that can be best, with their rough cuts."""
        numbers = np.arange(1, limit + 1, dtype=np.float64)
        slope, constant = self._rough_cuts(numbers)
        load = self.total_units / self.num_replicas
        times = slope * load + constant
        best = np.minimum.accumulate(np.where(numbers * self.cap_units >= load, times.max(axis=1), np.inf))
        beyond = np.flatnonzero(times[:, 0] > best * _BEYOND)
        end = int(beyond[0]) + 1 if beyond.size else limit
        return numbers[:end], slope[:end], constant[:end]

    def _rough_cuts(self, numbers: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return slopes and constants [v, 2] of the *last stage* and *drain* cuts of ``pipeline_bounds``."""
        pipeline = self.table.pipeline
        parts, empty, others = pipeline.parts, pipeline.micro_batch_units, pipeline.num_stages - 1
        backward_excess = max(0, pipeline.backward_parts - pipeline.forward_parts)
        ramp = others * (parts * empty + 2 * pipeline.transfer_ns)
        drain = others * ((pipeline.forward_parts + backward_excess) * empty + 2 * pipeline.transfer_ns)
        slope = np.stack([np.full(numbers.size, float(parts)), parts + others * backward_excess / numbers], axis=1)
        constant = np.stack([parts * empty * numbers + ramp, parts * empty * numbers + drain], axis=1)
        return slope, constant


def _phi(shares: FloatArray, counts: Int64Array) -> FloatArray:
    """Return the dual feasible function with the largest sum over the batch, [K]; shares above 1 count as 1."""
    best = shares
    for edge in _EDGES[1:]:
        rounded = np.where(shares > 1.0 - edge, 1.0, np.where(shares < edge, 0.0, shares))
        if float(rounded @ counts) > float(best @ counts):
            best = rounded
    return np.minimum(best, 1.0)
