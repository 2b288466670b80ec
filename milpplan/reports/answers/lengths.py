"""Step with sequences of several lengths (``solve --lengths``): document and blocks."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from milpplan.lengths import LengthsResult, SequenceRules
from milpplan.lengths.records import Beside, LengthGroup, MicroBatches, RanGroup, RanStep, TeamTurn
from milpplan.problem import Layout, Problem, Recompute, parse_json
from milpplan.problem.records import Computed, NonNegativeFloat, PositiveFloat, PositiveInt, Record
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.reports.documents.fields import json_digest
from milpplan.reports.words.plan_words import cost_model_text, narrowings
from milpplan.units import (
    bytes_text,
    counted,
    gap_text,
    lower_bound_text,
    percent_text,
    seconds_text,
    tolerance_text,
)
from milpplan.version import __version__

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
    step. ``sha256`` is the digest of the file with an empty one. Units are seconds, bytes and tokens.
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
    sha256: str = ""

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


MAX_TURNS = 40
"""Maximum number of team turns in a table."""


def lengths_document(result: LengthsResult) -> str:
    """Write the JSON document of a result: step, proof and problem."""
    about = {"schema_version": 1, "milpplan_version": __version__, "proof": proof_sentence(result)}
    document = {**about, **result.to_dict(), "sha256": ""}
    # The digest of what a reader finds, who takes 3.0 for 3.
    found = parse_json(json.dumps(document), "the result")
    return json.dumps(document | {"sha256": json_digest(found)}) + "\n"


def proof_sentence(result: LengthsResult) -> str:
    """Describe the status in a sentence, with its cost model, space and tolerance."""
    within = f"within {tolerance_text(result.tolerance)}"
    proved = f"Optimal {within}" if result.status == "optimal" else f"Best step so far, not proved {within},"
    return f"{proved} for cost model {cost_model_text(result.problem)}, {_space(result)}."


def _space(result: LengthsResult) -> str:
    """Describe the declared space of the steps."""
    options = ["one strategy"]
    if result.max_strategies > 1:
        options.append(f"at most {result.max_strategies} in turn")
    if result.side_by_side is not None and result.side_by_side.num_families:
        options.append("degrees of context parallelism side by side")
    if result.unlike_replicas is not None:
        options.append("unlike replicas")
    space = result.problem.space
    same = [f"{counted(result.num_candidates, 'strategy', 'strategies')}", "equal stages", "1f1b"]
    # Where both are allowed, one of them is always used (``lengths.candidates``).
    same += ["ZeRO 1"] if len(space.zero_stage) > 1 else []
    same += ["sequence parallelism"] if len(space.sequence_parallel) > 1 else []
    return f"steps of {_either(options)} ({'; '.join(same + narrowings(space))})"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def lengths_blocks(result: LengthsResult) -> list[Block]:
    """Show the step, its groups and its switches."""
    static = result.static
    proof = Paragraph(proof_sentence(result), "bold green" if result.status == "optimal" else "bold yellow")
    step = (
        f"Step {seconds_text(result.step_time_s)}, proved at least {lower_bound_text(result.lower_bound_s)} "
        f"(gap {gap_text(result.gap)}): {counted(result.num_sequences, 'sequence')}, "
        f"{counted(result.num_tokens, 'token')} "
        f"(lengths in steps of {result.alignment}{_rules(result)})"
    )
    single = (
        f"Best single strategy: {static.strategy}, {seconds_text(static.step_time_s)}, proved at least "
        f"{lower_bound_text(static.lower_bound_s)}"
    )
    blocks: list[Block] = [Paragraph("Interrupted: the best step so far.")] if result.interrupted else []
    blocks += [proof, Paragraph(step), Paragraph(single), Paragraph(_verdict(result)), _groups(result)]
    blocks += [table for table in (_turns(result), _switches(result), _baselines(result)) if table.rows]
    return blocks


def _verdict(result: LengthsResult) -> str:
    """Describe the gain over the best single strategy, and its cause."""
    saved = percent_text(result.speedup - 1.0)
    if result.is_unlike:
        return f"Unlike replicas gain {saved}"
    if result.is_side_by_side:
        return f"Degrees side by side gain {saved}"
    return f"Switching gains {saved}" if len(result.groups) > 1 else "Nothing found is shorter than one strategy"


def _rules(result: LengthsResult) -> str:
    """Describe the options that differ from their defaults."""
    padded = ", padded, not packed" if result.rules.padded else ""
    return f"{padded}{', attention without a causal mask' if result.rules.mask == 'full' else ''}"


def _groups(result: LengthsResult) -> Table:
    rows = [
        (
            group.strategy,
            f"{group.buckets[0][0]:,} to {group.buckets[-1][0]:,}",
            f"{sum(count for _, count in group.buckets):,}",
            f"{sum(length * count for length, count in group.buckets):,}",
            _micro_batches(group),
            seconds_text(group.time_s),
            seconds_text(group.reduce_s),
        )
        for group in result.groups
    ]
    rows.append((f"update at {result.home}", "", "", "", "", seconds_text(result.finish_s), ""))
    columns = ("strategy", "lengths", "sequences", "tokens", "micro-batches", "time", "reduction")
    return Table("Groups at the same time" if result.turns else "Groups in order", columns, rows)


def _micro_batches(group: LengthGroup) -> str:
    """Write the minimum and the maximum number of micro-batches of a replica."""
    numbers = [len(replica) for replica in group.micro_batches]
    least, most = min(numbers), max(numbers)
    spread = str(most) if least == most else f"{least} to {most}"
    return f"{len(numbers)} x {spread}"


def _turns(result: LengthsResult) -> Table:
    """Show the first turns: GPUs, work and times."""
    rows = [
        (
            _gpus(turn),
            turn.strategy,
            str(len(turn.micro_batches)),
            f"{sum(map(sum, turn.micro_batches)):,}",
            f"{max(map(max, turn.micro_batches)):,}",
            seconds_text(turn.start_s),
            seconds_text(turn.end_s),
        )
        for turn in result.turns[:MAX_TURNS]
    ]
    if len(result.turns) > MAX_TURNS:
        rows.append((f"{len(result.turns) - MAX_TURNS} more: --json", "", "", "", "", "", ""))
    columns = ("GPUs", "strategy", "micro-batches", "tokens", "longest", "start", "end")
    title = "Replicas" if result.is_unlike else "Degrees side by side, in the order of their starts"
    return Table(title, columns, rows)


def _gpus(turn: TeamTurn) -> str:
    """Write the first and the last GPU of a turn."""
    last = turn.first_gpu + turn.num_gpus - 1
    return str(last) if turn.num_gpus == 1 else f"{turn.first_gpu} to {last}"


def _switches(result: LengthsResult) -> Table:
    rows = [
        (switch.source, switch.target, switch.what, bytes_text(switch.num_bytes), seconds_text(switch.time_s))
        for switch in result.switches
    ]
    return Table("Switches", ("from", "to", "what", "bytes", "time"), rows)


def _baselines(result: LengthsResult) -> Table:
    rows = []
    for baseline in result.baselines:
        if baseline.step_time_s is None:
            rows.append((baseline.rule, "none", "", baseline.why))
        else:
            longer = percent_text(baseline.step_time_s / result.step_time_s - 1.0)
            strategies = " -> ".join(baseline.strategies)
            rows.append((baseline.rule, seconds_text(baseline.step_time_s), longer, strategies))
    columns = ("rule", "step", "longer by", "strategies")
    return Table("Others' rules on the same sequences and times", columns, rows)
