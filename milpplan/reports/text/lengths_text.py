"""Step of sequences of several lengths: text and JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.lengths.records import LengthGroup, LengthsResult, TeamTurn
from milpplan.reports.documents.document import tolerance_text
from milpplan.reports.text.terminal import report_table
from milpplan.reports.words.proof_words import cost_model_text, narrowings
from milpplan.units import bytes_text, counted, gap_text, percent_text, seconds_text
from milpplan.version import __version__

MAX_TURNS = 40
"""Maximum number of team turns in a table."""


def lengths_document(result: LengthsResult) -> str:
    """Write the JSON document of a result: step, proof and problem."""
    about = {"schema_version": 1, "milpplan_version": __version__, "proof": proof_sentence(result)}
    return json.dumps({**about, **result.to_dict()}) + "\n"


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


def lengths_tables(result: LengthsResult) -> RenderableType:
    """Show the step, its groups and its switches."""
    return Group(*_parts(result))


def _parts(result: LengthsResult) -> Iterator[RenderableType]:
    static = result.static
    if result.interrupted:
        yield Text("Interrupted: the best step so far.")
    yield Text(proof_sentence(result), "bold green" if result.status == "optimal" else "bold yellow")
    yield Text(
        f"Step {seconds_text(result.step_time_s)}, proved at least {seconds_text(result.lower_bound_s)} "
        f"(gap {gap_text(result.gap)}): {counted(result.num_sequences, 'sequence')}, "
        f"{counted(result.num_tokens, 'token')} "
        f"(lengths in steps of {result.alignment}{_rules(result)})"
    )
    yield Text(
        f"Best single strategy: {static.strategy}, {seconds_text(static.step_time_s)}, proved at least "
        f"{seconds_text(static.lower_bound_s)}"
    )
    yield Text(_verdict(result))
    yield _groups(result)
    if result.turns:
        what = "Replicas" if result.is_unlike else "Degrees side by side, in the order of their starts"
        yield _turns(result.turns, what)
    if result.switches:
        yield _switches(result)
    if result.baselines:
        yield _baselines(result)


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
    columns = ("strategy", "lengths", "sequences", "tokens", "micro-batches", "time", "reduction")
    table = report_table("Groups at the same time" if result.turns else "Groups in order", *columns)
    for group in result.groups:
        table.add_row(
            group.strategy,
            f"{group.buckets[0][0]:,} to {group.buckets[-1][0]:,}",
            f"{sum(count for _, count in group.buckets):,}",
            f"{sum(length * count for length, count in group.buckets):,}",
            _micro_batches(group),
            seconds_text(group.time_s),
            seconds_text(group.reduce_s),
        )
    table.add_row(f"update at {result.home}", "", "", "", "", seconds_text(result.finish_s), "")
    return table


def _micro_batches(group: LengthGroup) -> str:
    """Write the minimum and the maximum number of micro-batches of a replica."""
    numbers = [len(replica) for replica in group.micro_batches]
    least, most = min(numbers), max(numbers)
    spread = str(most) if least == most else f"{least} to {most}"
    return f"{len(numbers)} x {spread}"


def _turns(turns: tuple[TeamTurn, ...], title: str) -> Table:
    """Show the first turns: GPUs, work and times."""
    columns = ("GPUs", "strategy", "micro-batches", "tokens", "longest", "start", "end")
    table = report_table(title, *columns)
    for turn in turns[:MAX_TURNS]:
        table.add_row(
            _gpus(turn),
            turn.strategy,
            str(len(turn.micro_batches)),
            f"{sum(map(sum, turn.micro_batches)):,}",
            f"{max(map(max, turn.micro_batches)):,}",
            seconds_text(turn.start_s),
            seconds_text(turn.end_s),
        )
    if len(turns) > MAX_TURNS:
        table.add_row(f"{len(turns) - MAX_TURNS} more: --json", "", "", "", "", "", "")
    return table


def _gpus(turn: TeamTurn) -> str:
    """Write the first and the last GPU of a turn."""
    last = turn.first_gpu + turn.num_gpus - 1
    return str(last) if turn.num_gpus == 1 else f"{turn.first_gpu} to {last}"


def _baselines(result: LengthsResult) -> Table:
    table = report_table(
        "Others' rules on the same sequences and times", "rule", "step", "longer by", "strategies"
    )
    for baseline in result.baselines:
        if baseline.step_time_s is None:
            table.add_row(baseline.rule, "none", "", baseline.why)
        else:
            longer = percent_text(baseline.step_time_s / result.step_time_s - 1.0)
            table.add_row(
                baseline.rule, seconds_text(baseline.step_time_s), longer, " -> ".join(baseline.strategies)
            )
    return table


def _switches(result: LengthsResult) -> Table:
    table = report_table("Switches", "from", "to", "what", "bytes", "time")
    for switch in result.switches:
        table.add_row(
            switch.source, switch.target, switch.what, bytes_text(switch.num_bytes), seconds_text(switch.time_s)
        )
    return table
