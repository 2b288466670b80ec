"""Records of a step for sequences of several lengths. Units: seconds, bytes, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from milpplan.problem import Plan, Problem

Status = Literal["optimal", "feasible"]
MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]
"""Lengths of the sequences of every micro-batch of every replica."""


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Attention mask and packing of sequences.

    Packed micro-batches hold sequences of any lengths, one after another; all sequences of a ``padded``
    micro-batch have one length, the end of their bucket.
    """

    mask: Literal["causal", "full"] = "causal"
    padded: bool = False


PACKED = SequenceRules()
"""Packed, under a causal mask."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """The group of sequences that run under one strategy."""

    strategy: str
    plan: Plan
    """Plan of the strategy, with micro-batches of one token quantum."""
    buckets: tuple[tuple[int, int], ...]
    """(length in tokens, number of sequences)."""
    micro_batches: MicroBatches
    micro_batch_tokens: int
    """Capacity of a micro-batch in tokens."""
    time_s: float
    """Time of the group without its reduction."""
    reduce_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "strategy": self.strategy,
            "layout": self.plan.layout.model_dump(mode="json"),
            "recompute": self.plan.virtual_stages[0].recompute.model_dump(mode="json"),
            "buckets": [{"tokens": length, "sequences": count} for length, count in self.buckets],
            "micro_batch_tokens": self.micro_batch_tokens,
            "micro_batches": self.micro_batches,
            "time_s": self.time_s,
            "reduce_s": self.reduce_s,
        }


@dataclass(frozen=True, slots=True)
class LengthSwitch:
    """Transfer between two strategies of the step: parameters before the second one's group, gradients beside that
    group or at the end on the way home."""

    source: str
    target: str
    what: Literal["parameters", "gradients"]
    num_bytes: int
    time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "from": self.source,
            "to": self.target,
            "what": self.what,
            "bytes": self.num_bytes,
            "time_s": self.time_s,
        }


@dataclass(frozen=True, slots=True)
class LengthEvent:
    """Event on the timeline of a step; gradients move beside the group that follows them, or home at the end."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: str
    start_s: float
    end_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"kind": self.kind, "strategy": self.strategy, "start_s": self.start_s, "end_s": self.end_s}


@dataclass(frozen=True, slots=True)
class StaticStep:
    """The best step of a single strategy and the lower bound of all such steps."""

    strategy: str
    plan: Plan
    step_time_s: float
    lower_bound_s: float


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """Step that another planner's published rule makes of the same sequences (``baselines``)."""

    rule: str
    strategies: tuple[str, ...]
    step_time_s: float | None
    """Exact time; None if the rule has no plan."""
    why: str
    """Reason for a missing plan."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "rule": self.rule,
            "strategies": list(self.strategies),
            "step_time_s": self.step_time_s,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class TeamTurn:
    """Micro-batches that a team or a replica runs on ``num_gpus`` GPUs from ``first_gpu`` on."""

    strategy: str
    first_gpu: int
    num_gpus: int
    start_s: float
    end_s: float
    micro_batches: tuple[tuple[int, ...], ...]
    """Lengths of the sequences of each micro-batch."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "strategy": self.strategy,
            "first_gpu": self.first_gpu,
            "num_gpus": self.num_gpus,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "micro_batches": self.micro_batches,
        }


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Result of the search over several degrees of context parallelism side by side (``side_by_side``)."""

    step_time_s: float | None
    """Best step found that is shorter than every step of one strategy; None without one."""
    lower_bound_s: float | None
    """Lower bound of all steps of the ``num_families`` families; None without a family."""
    num_families: int
    turns: tuple[TeamTurn, ...]
    """Turns of the step in the order of their starts."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "step_time_s": self.step_time_s,
            "lower_bound_s": self.lower_bound_s,
            "num_families": self.num_families,
            "turns": [turn.to_dict() for turn in self.turns],
        }


@dataclass(frozen=True, slots=True)
class HeterogeneousReplicas:
    """Result of the search over heterogeneous replicas (``heterogeneous``)."""

    step_time_s: float | None
    """Best step found that is shorter than all others; None without one."""
    lower_bound_s: float | None
    """Lower bound of all steps of the ``num_strategies`` strategies; None without a strategy."""
    num_strategies: int
    turns: tuple[TeamTurn, ...]
    """Micro-batches of each replica."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "step_time_s": self.step_time_s,
            "lower_bound_s": self.lower_bound_s,
            "num_strategies": self.num_strategies,
            "replicas": [turn.to_dict() for turn in self.turns],
        }


Beside = Literal["", "degrees side by side", "unlike replicas"]
"""Kind of steps whose groups overlap; empty for strategies in turn."""


@dataclass(frozen=True, slots=True)
class RanGroup:
    """Sequences of one strategy in a step that was read from a file; fields as in ``LengthGroup``."""

    strategy: str
    buckets: tuple[tuple[int, int], ...]
    micro_batches: MicroBatches


@dataclass(frozen=True, slots=True)
class RanStep:
    """Step that was read from a file of a ``LengthsResult``: what dispatchers need of it."""

    alignment: int
    rules: SequenceRules
    home: str
    groups: tuple[RanGroup, ...]
    beside: Beside = ""


@dataclass(frozen=True, slots=True)
class LengthsResult:
    """The best step found for a problem and the proved lower bound of all steps."""

    problem: Problem
    status: Status
    """``optimal`` if the gap is within the ``tolerance``."""
    tolerance: float
    step_time_s: float
    lower_bound_s: float
    """Bound of all steps of at most ``max_strategies`` in turn of the ``num_candidates`` that fit some
    sequence."""
    home: str
    """Strategy whose layout holds the optimizer's states."""
    groups: tuple[LengthGroup, ...]
    """Groups in the order in which they run; they overlap if the step ``is_side_by_side`` or ``is_unlike``."""
    switches: tuple[LengthSwitch, ...]
    finish_s: float
    """End of the step at home: gradient norm, update, gather."""
    static: StaticStep
    num_sequences: int
    num_tokens: int
    alignment: int
    max_strategies: int
    num_candidates: int
    num_sets: int
    """Sets of several strategies that were open before switches were priced."""
    cpu_time_s: float
    wall_time_s: float
    baselines: tuple[BaselineStep, ...] = ()
    rules: SequenceRules = PACKED
    side_by_side: SideBySide | None = None
    interrupted: bool = False
    """True if Ctrl-C ended the search; step and bound are those known by then."""
    unlike_replicas: HeterogeneousReplicas | None = None

    @property
    def is_side_by_side(self) -> bool:
        """True if the step has several degrees of context parallelism at the same time."""
        return self.side_by_side is not None and self.side_by_side.step_time_s == self.step_time_s

    @property
    def is_unlike(self) -> bool:
        """True if the step has heterogeneous replicas."""
        return self.unlike_replicas is not None and self.unlike_replicas.step_time_s == self.step_time_s

    @property
    def beside(self) -> Beside:
        """Kind of the step if its groups overlap."""
        return "unlike replicas" if self.is_unlike else "degrees side by side" if self.turns else ""

    @property
    def turns(self) -> tuple[TeamTurn, ...]:
        """Turns of a step whose groups overlap; empty for others."""
        if self.unlike_replicas is not None and self.is_unlike:
            return self.unlike_replicas.turns
        return self.side_by_side.turns if self.side_by_side is not None and self.is_side_by_side else ()

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s

    @property
    def order(self) -> tuple[str, ...]:
        """Strategies in the order in which they run."""
        return tuple(group.strategy for group in self.groups)

    @property
    def timeline(self) -> tuple[LengthEvent, ...]:
        """Events of the step, by the formula of ``tabled.step_plan``; groups of a step with ``turns`` overlap."""
        if self.turns:
            return self._beside(self.turns)
        move_times = {(switch.source, switch.target, switch.what): switch.time_s for switch in self.switches}
        events: list[LengthEvent] = []
        now, previous = 0.0, self.home
        for group in self.groups:
            name, starts = group.strategy, now + move_times.get((previous, group.strategy, "parameters"), 0.0)
            # The first group has no gradients to move yet.
            gradients = move_times.get((previous, name, "gradients"), 0.0) if group is not self.groups[0] else 0.0
            done = starts + max(group.time_s, gradients)
            events += [
                LengthEvent("parameters", name, now, starts),
                LengthEvent("gradients", name, starts, starts + gradients),
                LengthEvent("group", name, starts, starts + group.time_s),
                LengthEvent("reduce", name, done, done + group.reduce_s),
            ]
            now, previous = done + group.reduce_s, name
        home_again = now + move_times.get((previous, self.home, "gradients"), 0.0)
        events.append(LengthEvent("gradients", self.home, now, home_again))
        events.append(LengthEvent("finish", self.home, home_again, home_again + self.finish_s))
        return tuple(event for event in events if event.end_s > event.start_s)

    def _beside(self, turns: tuple[TeamTurn, ...]) -> tuple[LengthEvent, ...]:
        """Events of overlapping groups, each from its first turn's start to its last turn's end, and one
        reduction."""
        events = []
        for name in self.order:
            mine = [turn for turn in turns if turn.strategy == name]
            starts, ends = min(turn.start_s for turn in mine), max(turn.end_s for turn in mine)
            events.append(LengthEvent("group", name, starts, ends))
        last = max(event.end_s for event in events)
        reduced = last + sum(group.reduce_s for group in self.groups)
        events.append(LengthEvent("reduce", self.home, last, reduced))
        events.append(LengthEvent("finish", self.home, reduced, reduced + self.finish_s))
        return tuple(event for event in events if event.end_s > event.start_s)

    @property
    def speedup(self) -> float:
        """Time of the best single-strategy step over the time of this step."""
        return self.static.step_time_s / self.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "status": self.status,
            **({"interrupted": True} if self.interrupted else {}),
            "step_time_s": self.step_time_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "tolerance": self.tolerance,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "alignment": self.alignment,
            "mask": self.rules.mask,
            "padding": self.rules.padded,
            "groups": [group.to_dict() for group in self.groups],
            "order": list(self.order),
            "home": self.home,
            "switches": [switch.to_dict() for switch in self.switches],
            "finish_s": self.finish_s,
            "timeline": [event.to_dict() for event in self.timeline],
            "static": {
                "strategy": self.static.strategy,
                "step_time_s": self.static.step_time_s,
                "lower_bound_s": self.static.lower_bound_s,
            },
            "speedup": self.speedup,
            "max_strategies": self.max_strategies,
            "num_candidates": self.num_candidates,
            "num_sets": self.num_sets,
            "cpu_time_s": self.cpu_time_s,
            "wall_time_s": self.wall_time_s,
            **({"baselines": [baseline.to_dict() for baseline in self.baselines]} if self.baselines else {}),
            **({} if self.side_by_side is None else {"side_by_side": self.side_by_side.to_dict()}),
            **({} if self.unlike_replicas is None else {"unlike_replicas": self.unlike_replicas.to_dict()}),
            "problem": self.problem.model_dump(mode="json"),
        }
