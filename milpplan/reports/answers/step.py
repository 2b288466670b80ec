"""A plan and its simulated step: layout, stages, time and memory.

Numbers get their units here, through ``milpplan.units``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from typing import Final

from milpplan.calibration.error_bars import ErrorBar
from milpplan.problem import NO_MODULES, Layout, Plan, Problem, VirtualStage
from milpplan.reports.blocks import Block, Cell, Fact, Pair, Paragraph, Span, Table
from milpplan.reports.words.plan_words import cluster_text, hybrid_text, node_types_text, replicas_text
from milpplan.reports.words.result_words import error_bar_text, evidence_text
from milpplan.simulation import StepReport
from milpplan.units import counted, gib_text, percent_text, printable, rate_text, seconds_text
from milpplan.validation import Evidence

MAX_STAGE_ROWS: Final = 16
"""With more pipeline ranks, equal neighbours share a row."""
RULE: Final = ()
"""Row of a table that is a rule."""


def accuracy_blocks(bar: ErrorBar | None, evidence: Evidence | None) -> Iterator[Block]:
    """Show the step's error bar, which a cluster of several node types has not, and the evidence of runs."""
    if bar is not None:
        yield Fact("error bar", printable(error_bar_text(bar)))
    if evidence is not None:
        yield Fact("evidence", printable(evidence_text(evidence)))


def simulation_blocks(
    problem: Problem,
    plan: Plan,
    report: StepReport,
    bar: ErrorBar | None = None,
    evidence: Evidence | None = None,
) -> list[Block]:
    """Show everything about one simulated plan."""
    headline = step_headline(problem, plan, report)
    if not report.fits:
        tiers = (
            ("", report.peak_memory_bytes, report.usable_memory_bytes),
            (" on the host", report.host_memory_bytes, report.host_capacity_bytes),
        )
        over = [f"{gib_text(size)} of {gib_text(room)}{where}" for where, size, room in tiers if size > room]
        headline = headline.extended(f"; does not fit: {', '.join(over)}", "bold red")
    doubts = (*accuracy_blocks(bar, evidence), *ignored_keys_blocks(problem))
    return [headline, _rates(report), *doubts, Paragraph(), *plan_blocks(problem, plan, report)]


def ignored_keys_blocks(problem: Problem) -> Iterator[Block]:
    """Name the keys of the model's config that the user ignored, whose cost is not in the answer, and the stored
    format of its weights, which costs nothing."""
    if problem.model.stored_weights:
        trained = f"trained in {problem.job.precision}"
        yield Fact(
            "weights", printable(f"{problem.model.stored_weights} in the checkpoint; {trained}, as the job says")
        )
    if problem.model.ignored_keys:
        keys = ", ".join(problem.model.ignored_keys)
        yield Fact("ignored", printable(f"{keys} of the model's config: what they add is not priced"))


def step_headline(problem: Problem, plan: Plan, report: StepReport) -> Paragraph:
    """Name the model, the cluster and the time of a step."""
    where = printable(f"{problem.model.name} on {cluster_text(problem, plan.layout.num_gpus)}: ")
    return Paragraph(where, "bold", (Span(f"{seconds_text(report.step_time_s)} a step", "bold green"),))


def would_be_headline(problem: Problem, plan: Plan, report: StepReport) -> Paragraph:
    """Name model, cluster and step time of a plan that may not fit, and say so."""
    line = step_headline(problem, plan, report)
    if report.fits:
        return line
    return line.extended("; does not fit in memory, so the step is only what it would be", "bold red")


def plan_blocks(problem: Problem, plan: Plan, report: StepReport) -> Iterator[Block]:
    """Show the layout, the stages, and where the time and the memory go."""
    yield from _layout_lines(plan)
    nodes = nodes_text(problem, plan, report)
    if nodes:
        yield Fact("nodes", printable(nodes))
    yield Paragraph()
    yield from _stage_tables(plan, report)
    yield Pair(_time_table(report), _memory_table(report, plan.layout.pp))


def nodes_text(problem: Problem, plan: Plan, report: StepReport) -> str:
    """Name the stages or replicas on each node type; empty on a cluster of one type."""
    if not problem.other_hardware:
        return ""
    return replicas_text(problem, plan, report) or node_types_text(report)


def _rates(report: StepReport) -> Paragraph:
    return Paragraph(
        f"{rate_text(report.tokens_per_s)} tokens/s, MFU {percent_text(report.mfu)}, peak memory "
        f"{memory_text(report)}"
    )


def memory_text(report: StepReport) -> str:
    """Write peak, usable memory, verdict and margin: ``67.9 GiB of 75.3 GiB usable: safe, 7.3 GiB left``."""
    peak, usable = gib_text(report.peak_memory_bytes), gib_text(report.usable_memory_bytes)
    return f"{peak} of {usable} usable: {_verdict(report)}"


def _verdict(report: StepReport) -> str:
    """Verdict on the memory, with what is left or lacking."""
    margin = gib_text(abs(report.memory_margin_bytes))
    if report.memory_margin_bytes < 0:
        return f"does not fit, {margin} too much"
    if not report.fits:
        missing = gib_text(report.host_memory_bytes - report.host_capacity_bytes)
        return f"does not fit, {missing} too much on the host"
    return f"{report.memory_verdict}, {margin} left"


def _layout_lines(plan: Plan) -> Iterator[Block]:
    layout = plan.layout
    degrees = " ".join(f"{name}={getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "vpp"))
    if layout.ep > 1 or layout.etp > 1:
        degrees += f" ep={layout.ep} etp={layout.etp}"
    if layout.rank_order != Layout.model_fields["rank_order"].default:
        degrees += f" order={layout.rank_order}"
    yield Fact("layout", f"{degrees} ({counted(layout.num_gpus, 'GPU')})")
    shares = " or ".join(f"{share:,}" for share in layout.replica_micro_batches or (layout.num_micro_batches,))
    yield Fact(
        "batch",
        f"{counted(layout.global_batch_size, 'sequence')}: {counted(shares, 'micro-batch', 'micro-batches')} of "
        f"{layout.micro_batch_size} on each of {counted(layout.dp, 'replica')}, schedule {layout.schedule}",
    )
    switches = {
        "sequence parallel": layout.sequence_parallel,
        "overlap of gradient reduction": layout.overlap_grad_reduce,
        "of parameter gather": layout.overlap_param_gather,
    }
    chosen = ", ".join(f"{name}: {'yes' if on else 'no'}" for name, on in switches.items())
    yield Fact("sharding", f"ZeRO {layout.zero_stage}{hybrid_text(layout)}; {chosen}")
    further = list(execution_words(plan))
    if further:
        yield Fact("execution", "; ".join(further))


def execution_words(plan: Plan) -> Iterator[str]:
    """Name the switches of a plan that are off by default and on here."""
    layout = plan.layout
    if layout.tp_overlap != "none":
        yield f"tensor-parallel overlap: {layout.tp_overlap}"
    if layout.pp_scatter_gather:
        yield "stages scatter and gather"
    if not layout.gather_again:
        yield "inputs stay gathered"
    if layout.recompute_vision:
        yield "the vision encoder recomputes its layers"
    if layout.vision_data_parallel:
        yield "context-parallel ranks share the images"
    if layout.recompute_modules != NO_MODULES and plan.selects:
        yield f"selective recomputation replays {layout.recompute_modules.replace('+', ', ')}"
    if layout.ulysses > 1:
        yield f"heads exchanged by all-to-alls: ulysses={layout.ulysses}"
    if layout.expert_dispatch != "default":
        yield f"tokens reach experts by {layout.expert_dispatch}"
    if layout.keep_weights:
        yield "weights stay gathered until the backward"
    parts = [name for name in ("weights", "activations", "optimizer") if getattr(layout, f"offload_{name}")]
    if layout.offload_modules != NO_MODULES:
        parts.append(f"inputs of {layout.offload_modules.replace('+', ', ')}")
    if parts:
        yield f"on the host: {', '.join(parts)}"


def _runs(values: Iterable[int]) -> str:
    """Write 5, 5, 5, 4 as ``3x5 4``, and nothing but zeros as ``0``."""
    lengths = [(value, len(list(same))) for value, same in groupby(values)]
    if len(lengths) == 1 and not lengths[0][0]:
        return "0"
    return " ".join(f"{times}x{value}" if times > 1 else str(value) for value, times in lengths)


def _held(stages: tuple[VirtualStage, ...]) -> tuple[str, ...]:
    """Write layers and recompute counts of a rank, for each of its virtual stages."""
    return (
        _runs(stage.num_layers for stage in stages),
        _runs(stage.recompute.full for stage in stages),
        _runs(stage.recompute.selective for stage in stages),
    )


def _stage_tables(plan: Plan, report: StepReport) -> Iterator[Table]:
    """One table, or with heterogeneous replicas a table of a replica on each node type."""
    pp, layout = plan.layout.pp, plan.layout.model_copy(update={"replica_micro_batches": ()})
    if not plan.layout.replica_micro_batches:
        yield _stage_table(plan, report)
        return
    for node_type in range(len(report.stages) // pp):
        stages = report.stages[pp * node_type : pp * (node_type + 1)]
        table = _stage_table(plan.of_replicas(node_type, layout), replace(report, stages=stages))
        yield replace(table, title=f"{table.title} on {stages[0].node_type}")


def _stage_table(plan: Plan, report: StepReport) -> Table:
    pp, vpp = plan.layout.pp, plan.layout.vpp
    contents = [_held(tuple(plan.virtual_stages[j] for j in own)) for own in plan.layout.rank_stages]
    alike = [contents[rank] if pp > MAX_STAGE_ROWS else (str(rank),) for rank in range(pp)]
    rows = []
    for _, same in groupby(range(pp), key=lambda rank: alike[rank]):
        group = list(same)
        first, last = group[0], group[-1]
        number = str(first) if first == last else f"{first}-{last}"
        memory = [gib_text(report.stages[rank].memory.peak_bytes) for rank in group]
        bubble = [seconds_text(report.stages[rank].breakdown_s["bubble"]) for rank in group]
        span = _spans(plan, first, last)
        rows.append((number, span, *contents[first], _range_text(memory), _range_text(bubble)))
    title = "Stages" if vpp == 1 else f"Stages (of {counted(vpp, 'virtual stage')} each, in order)"
    return Table(title, ("stage", "layers", "number", "full recompute", "selective", "memory", "bubble"), rows)


def _spans(plan: Plan, first: int, last: int) -> str:
    """Write the layers of ranks ``first`` to ``last``; of several virtual stages the first one's, then dots."""
    start, end = plan.virtual_stages[first].layers[0], plan.virtual_stages[last].layers[1]
    text = f"{start}-{end - 1}" if end > start else "none"
    return text if plan.layout.vpp == 1 else f"{text}, ..."


def _range_text(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} - {texts[-1]}"


def _time_table(report: StepReport) -> Table:
    whole = report.step_time_s
    rows: list[tuple[Cell, ...]] = [
        (_part_label(name), seconds_text(seconds), percent_text(seconds / whole))
        for name, seconds in report.breakdown_s.items()
        if seconds
    ]
    rows += [RULE, ("step", seconds_text(whole), percent_text(1.0)), RULE]
    rows += [
        (_part_label(name), seconds_text(seconds), "") for name, seconds in report.hidden_s.items() if seconds
    ]
    return Table("Time (mean of the stages)", ("part", "time", "share"), rows)


def _part_label(name: str) -> str:
    """Label of a part of the step."""
    part, _, kind = name.rpartition("_")
    return f"ZeRO communication ({kind})" if part == "zero" else name.replace("_", " ")


def _memory_table(report: StepReport, pp: int) -> Table:
    fullest = report.tightest_stage
    where = f" on {report.stages[fullest].node_type}" if len(report.stages) > pp else ""
    parts = asdict(report.stages[fullest].memory)
    peak, host = parts.pop("peak_bytes"), parts.pop("host_bytes")
    usable, reserved = report.usable_memory_bytes, report.context_bytes + report.fragmentation_bytes
    rows: list[tuple[Cell, ...]] = [
        (name.removesuffix("_bytes"), gib_text(size), _share(size, usable)) for name, size in parts.items() if size
    ]
    rows += [
        RULE,
        ("peak", gib_text(peak), _share(peak, usable)),
        ("usable", gib_text(usable), _share(usable, usable)),
        ("context, NCCL", gib_text(report.context_bytes), ""),
        ("fragmentation", gib_text(report.fragmentation_bytes), ""),
        ("installed", gib_text(usable + reserved), ""),
    ]
    if report.host_memory_bytes:
        most, capacity = report.host_memory_bytes, report.host_capacity_bytes
        rows += [
            RULE,
            ("on the host", gib_text(host), _share(host, capacity)),
            ("host, maximum", gib_text(most), _share(most, capacity)),
            ("host, usable", gib_text(capacity), ""),
        ]
    return Table(f"Memory (stage {fullest % pp}{where}, the fullest)", ("part", "size", "share"), rows)


def _share(size: int, usable: int) -> str:
    return percent_text(size / usable) if usable > 0 else "-"
