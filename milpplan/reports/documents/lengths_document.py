"""The document of a step of several lengths, field by field: what ``solve --lengths --json`` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milpplan.lengths.records import Beside, MicroBatches, RanGroup, RanStep, SequenceRules
from milpplan.problem.plan import Layout, Recompute
from milpplan.problem.problem import Problem
from milpplan.problem.records import Computed, NonNegativeFloat, PositiveFloat, PositiveInt, Record

Share = Annotated[float, Field(ge=0, le=1)]


class BucketRecord(Record):
    """How many sequences of a length, padded, run under a strategy."""

    tokens: PositiveInt
    sequences: PositiveInt


class LengthGroupRecord(Record):
    """What runs under one strategy: its layout, the lengths of the sequences of every micro-batch of every replica
    (of every team where degrees are side by side), and seconds of all of it and of its reduction."""

    strategy: str
    layout: Layout
    recompute: Recompute
    buckets: tuple[BucketRecord, ...]
    micro_batch_tokens: PositiveInt
    micro_batches: MicroBatches
    time_s: NonNegativeFloat
    reduce_s: NonNegativeFloat


class SwitchRecord(Record):
    """What moves between two strategies."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    what: Literal["parameters", "gradients"]
    bytes: Computed
    time_s: NonNegativeFloat


class EventRecord(Record):
    """What a step of strategies in turn does when; gradients move beside the group after them, or home."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: str
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat


class StaticRecord(Record):
    """The best step of one strategy, and what no such step undercuts."""

    strategy: str
    step_time_s: PositiveFloat
    lower_bound_s: PositiveFloat


class BaselineRecord(Record):
    """What another planner's rule makes of the same sequences; no time, and why, where it has no plan."""

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
    """Degrees side by side: the best step, where one is shorter than every step of one strategy, and its turns."""

    step_time_s: PositiveFloat | None
    lower_bound_s: PositiveFloat | None
    num_families: Computed
    turns: tuple[TurnRecord, ...]


class UnlikeReplicasRecord(Record):
    """Unlike replicas: the best step, where one is shorter than all others, and what each replica runs."""

    step_time_s: PositiveFloat | None
    lower_bound_s: PositiveFloat | None
    num_strategies: Computed
    replicas: tuple[TurnRecord, ...]


class LengthsFile(Record):
    """A step of several lengths: ``groups`` in the order in which they run, ``switches`` between them, the proof
    (``lower_bound_s``, ``gap``, and a sentence: of which cost model and space, within which ``tolerance``), the
    best ``static`` step, and the ``problem``. Seconds, bytes, tokens."""

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
        """What dispatchers take in the place of the result."""
        groups = tuple(
            RanGroup(one.strategy, tuple((b.tokens, b.sequences) for b in one.buckets), one.micro_batches)
            for one in self.groups
        )
        return RanStep(self.alignment, SequenceRules(self.mask, self.padding), self.home, groups, self.beside[0])

    @property
    def beside(self) -> tuple[Beside, tuple[TurnRecord, ...]]:
        """What the step has at the same time, if anything, and who runs what when."""
        unlike, teams = self.unlike_replicas, self.side_by_side
        if unlike is not None and unlike.step_time_s == self.step_time_s:
            return "unlike replicas", unlike.replicas
        if teams is not None and teams.step_time_s == self.step_time_s:
            return "degrees side by side", teams.turns
        return "", ()
