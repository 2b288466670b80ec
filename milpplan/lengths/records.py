"""What is known about a step of several lengths: records only. Seconds, bytes, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

Status = Literal["optimal", "feasible"]
MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]
"""Lengths of the sequences of every micro-batch of every replica."""


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """How sequences are attended to and put together: a causal or a full mask; packed (sequences of any lengths in
    a micro-batch, one after another) or ``padded`` (all of a micro-batch have one length, their bucket's end)."""

    mask: Literal["causal", "full"] = "causal"
    padded: bool = False


PACKED = SequenceRules()
"""Packed, under a causal mask."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """The sequences that run under one strategy: its plan (micro-batches of one grain), how many sequences of
    which length, which micro-batches on which replica, and seconds of all of it and of its reduction."""

    strategy: str
    plan: Plan
    buckets: tuple[tuple[int, int], ...]
    micro_batches: MicroBatches
    micro_batch_tokens: int
    time_s: float
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
    """What moves between two strategies of the step: parameters before the second one's group, gradients beside it
    (or at the end on the way home)."""

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
    """What a step of strategies in turn does from ``start_s`` to ``end_s``; gradients move beside the group after
    them, or home at the end."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: str
    start_s: float
    end_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"kind": self.kind, "strategy": self.strategy, "start_s": self.start_s, "end_s": self.end_s}


@dataclass(frozen=True, slots=True)
class StaticStep:
    """The best step of one strategy, and what no such step undercuts."""

    strategy: str
    plan: Plan
    step_time_s: float
    lower_bound_s: float


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """What another planner's rule makes of the same sequences (``baselines``): its strategies in order and the
    exact time; no time, and why, where the rule has no plan."""

    rule: str
    strategies: tuple[str, ...]
    step_time_s: float | None
    why: str

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
    """Micro-batches that a team or a replica runs on ``num_gpus`` GPUs from ``first_gpu`` on, and when: lengths of
    the sequences of each."""

    strategy: str
    first_gpu: int
    num_gpus: int
    start_s: float
    end_s: float
    micro_batches: tuple[tuple[int, ...], ...]

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
    """What is known of steps of several degrees side by side (``teams``): the best one found that is shorter than
    every step of one strategy, None without one, and its turns in the order in which they start; no such step of
    any of ``num_families`` takes less than ``lower_bound_s`` (None without a family)."""

    step_time_s: float | None
    lower_bound_s: float | None
    num_families: int
    turns: tuple[TeamTurn, ...]

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
    """What is known of steps of unlike replicas (``unlike``): the best one found that is shorter than all others,
    None without one, and what each of its replicas runs; no such step of any of ``num_strategies`` takes less than
    ``lower_bound_s`` (None without a strategy)."""

    step_time_s: float | None
    lower_bound_s: float | None
    num_strategies: int
    turns: tuple[TeamTurn, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "step_time_s": self.step_time_s,
            "lower_bound_s": self.lower_bound_s,
            "num_strategies": self.num_strategies,
            "replicas": [turn.to_dict() for turn in self.turns],
        }


Beside = Literal["", "degrees side by side", "unlike replicas"]
"""What a step has at the same time."""


@dataclass(frozen=True, slots=True)
class RanGroup:
    """What runs under one strategy, as in ``LengthGroup``."""

    strategy: str
    buckets: tuple[tuple[int, int], ...]
    micro_batches: MicroBatches


@dataclass(frozen=True, slots=True)
class RanStep:
    """What dispatchers need to know of a step: that of ``LengthsResult``, from a file of it."""

    alignment: int
    rules: SequenceRules
    home: str
    groups: tuple[RanGroup, ...]
    beside: Beside = ""


@dataclass(frozen=True, slots=True)
class LengthsResult:
    """The best step found of a problem, and the proved bound of all of them; ``optimal`` where the gap is within
    the ``tolerance`` that was asked for.

    ``groups`` in the order in which they run; the optimizer's states are at ``home``, whose ``finish_s`` (norm of
    the gradients, update, gather) ends the step. The bound is of all steps of at most ``max_strategies`` in turn,
    of ``num_candidates`` that fit some sequence; ``num_sets`` sets of several were not ruled out before switches
    were priced. ``baselines``, ``side_by_side`` and ``unlike_replicas`` where they were asked for; where the step
    ``is_side_by_side`` or ``is_unlike`` its groups overlap, and ``turns`` has who runs what when. ``interrupted``:
    by Ctrl-C, so step and bound are what was known by then.
    """

    problem: Problem
    status: Status
    tolerance: float
    step_time_s: float
    lower_bound_s: float
    home: str
    groups: tuple[LengthGroup, ...]
    switches: tuple[LengthSwitch, ...]
    finish_s: float
    static: StaticStep
    num_sequences: int
    num_tokens: int
    alignment: int
    max_strategies: int
    num_candidates: int
    num_sets: int
    cpu_time_s: float
    wall_time_s: float
    baselines: tuple[BaselineStep, ...] = ()
    rules: SequenceRules = PACKED
    side_by_side: SideBySide | None = None
    interrupted: bool = False
    unlike_replicas: HeterogeneousReplicas | None = None

    @property
    def is_side_by_side(self) -> bool:
        """Whether the step has degrees side by side."""
        return self.side_by_side is not None and self.side_by_side.step_time_s == self.step_time_s

    @property
    def is_unlike(self) -> bool:
        """Whether the step has unlike replicas."""
        return self.unlike_replicas is not None and self.unlike_replicas.step_time_s == self.step_time_s

    @property
    def beside(self) -> Beside:
        """What the step has at the same time, if anything."""
        return "unlike replicas" if self.is_unlike else "degrees side by side" if self.turns else ""

    @property
    def turns(self) -> tuple[TeamTurn, ...]:
        """Who runs what when, where groups overlap."""
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
        """What runs when, by the formula of ``groups.tours``; groups at the same time overlap, and
        ``turns`` say where."""
        if self.turns:
            return self._beside(self.turns)
        moves = {(one.source, one.target, one.what): one.time_s for one in self.switches}
        events: list[LengthEvent] = []
        now, before = 0.0, self.home
        for group in self.groups:
            name, starts = group.strategy, now + moves.get((before, group.strategy, "parameters"), 0.0)
            # Nothing is accumulated before the first group.
            gradients = moves.get((before, name, "gradients"), 0.0) if group is not self.groups[0] else 0.0
            done = starts + max(group.time_s, gradients)
            events += [
                LengthEvent("parameters", name, now, starts),
                LengthEvent("gradients", name, starts, starts + gradients),
                LengthEvent("group", name, starts, starts + group.time_s),
                LengthEvent("reduce", name, done, done + group.reduce_s),
            ]
            now, before = done + group.reduce_s, name
        back = now + moves.get((before, self.home, "gradients"), 0.0)
        events.append(LengthEvent("gradients", self.home, now, back))
        events.append(LengthEvent("finish", self.home, back, back + self.finish_s))
        return tuple(event for event in events if event.end_s > event.start_s)

    def _beside(self, turns: tuple[TeamTurn, ...]) -> tuple[LengthEvent, ...]:
        """Groups from the start of their first turn to the end of their last one; then one reduction."""
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
        """The best static step over this one."""
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
            **({"baselines": [one.to_dict() for one in self.baselines]} if self.baselines else {}),
            **({} if self.side_by_side is None else {"side_by_side": self.side_by_side.to_dict()}),
            **({} if self.unlike_replicas is None else {"unlike_replicas": self.unlike_replicas.to_dict()}),
            "problem": self.problem.model_dump(mode="json"),
        }
