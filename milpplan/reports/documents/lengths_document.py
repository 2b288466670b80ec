"""Document of a step with sequences of several lengths, as ``solve --lengths --json`` prints it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milpplan.lengths.records import Beside, MicroBatches, RanGroup, RanStep, SequenceRules
from milpplan.problem.plan import Layout, Recompute
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, NonNegativeFloat, PositiveFloat, PositiveInt, Record

Share = Annotated[float, Field(ge=0, le=1)]


class BucketRecord(Record):
    """Number of sequences of a padded length that run under a strategy."""

    tokens: PositiveInt
    sequences: PositiveInt


class LengthGroupRecord(Record):
    """Part of the step that runs under one strategy.

    It holds the layout, the lengths of the sequences by replica and micro-batch (by team where degrees run side by
    side), and the seconds of the whole part and of its reduction.
    """

    strategy: str
    layout: Layout
    recompute: Recompute
    buckets: tuple[BucketRecord, ...]
    micro_batch_tokens: PositiveInt
    micro_batches: MicroBatches
    time_s: NonNegativeFloat
    reduce_s: NonNegativeFloat


class SwitchRecord(Record):
    """Transfers between two strategies."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    what: Literal["parameters", "gradients"]
    bytes: Computed
    time_s: NonNegativeFloat


class EventRecord(Record):
    """Event of a step of strategies in turn. Gradients move beside the following group, or home."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: str
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat


class StaticRecord(Record):
    """Best step of a single strategy, and a lower bound of such steps."""

    strategy: str
    step_time_s: PositiveFloat
    lower_bound_s: PositiveFloat


class BaselineRecord(Record):
    """Step by another planner's rule for the same sequences; without a plan it has a reason and no time."""

    rule: str
    strategies: tuple[str, ...]
    step_time_s: PositiveFloat | None
    why: str


class TurnRecord(Record):
    """Micro-batches, as lengths, that run one after another on neighbouring GPUs."""

    strategy: str
    first_gpu: Computed
    num_gpus: PositiveInt
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat
    micro_batches: tuple[tuple[PositiveInt, ...], ...]


class SideBySideRecord(Record):
    """Degrees side by side: the best such step, where it beats every single-strategy step, and its turns."""

    step_time_s: PositiveFloat | None
    lower_bound_s: PositiveFloat | None
    num_families: Computed
    turns: tuple[TurnRecord, ...]


class UnlikeReplicasRecord(Record):
    """Heterogeneous replicas: the best such step, where it beats all other steps, and the work of each replica."""

    step_time_s: PositiveFloat | None
    lower_bound_s: PositiveFloat | None
    num_strategies: Computed
    replicas: tuple[TurnRecord, ...]


class LengthsFile(Record):
    """Step of several lengths.

    ``groups`` are in the order in which they run, with ``switches`` between them. The proof is ``lower_bound_s``,
    ``gap``, and a sentence on cost model and space, within ``tolerance``. ``static`` is the best single-strategy
    step. Units are seconds, bytes and tokens.
    """

    schema_version: Literal[1]
    milpplan_version: str
    proof: str = ""
    status: Literal["optimal", "feasible"]
    tolerance: Share | None = None
    interrupted: bool = False
    step_time_s: PositiveFloat
    lower_bound_s: NonNegativeFloat
    gap: Share
    num_sequences: PositiveInt
    num_tokens: PositiveInt
    alignment: PositiveInt
    mask: Literal["causal", "full"]
    padding: bool
    groups: tuple[LengthGroupRecord, ...]
    order: tuple[str, ...]
    home: str
    switches: tuple[SwitchRecord, ...]
    finish_s: NonNegativeFloat
    timeline: tuple[EventRecord, ...]
    static: StaticRecord
    speedup: PositiveFloat
    max_strategies: PositiveInt | None = None
    num_candidates: Computed
    num_sets: Computed
    cpu_time_s: NonNegativeFloat
    wall_time_s: NonNegativeFloat
    baselines: tuple[BaselineRecord, ...] = ()
    side_by_side: SideBySideRecord | None = None
    unlike_replicas: UnlikeReplicasRecord | None = None
    problem: Problem | None = None

    @property
    def ran(self) -> RanStep:
        """Convert to the record that dispatchers accept in place of a result."""
        groups = tuple(
            RanGroup(group.strategy, tuple((b.tokens, b.sequences) for b in group.buckets), group.micro_batches)
            for group in self.groups
        )
        return RanStep(self.alignment, SequenceRules(self.mask, self.padding), self.home, groups, self.beside[0])

    @property
    def beside(self) -> tuple[Beside, tuple[TurnRecord, ...]]:
        """Return the concurrent part of the step, if any, and its turns."""
        unlike, teams = self.unlike_replicas, self.side_by_side
        if unlike is not None and unlike.step_time_s == self.step_time_s:
            return "unlike replicas", unlike.replicas
        if teams is not None and teams.step_time_s == self.step_time_s:
            return "degrees side by side", teams.turns
        return "", ()
