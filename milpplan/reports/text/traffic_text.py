"""Traffic of a plan: tables for the terminal, and the JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.communication.records import Bandwidth, TrafficReport
from milpplan.reports.text.terminal import report_table
from milpplan.simulation.layout_columns import FloatArray
from milpplan.units import bytes_text, counted, percent_text, seconds_text
from milpplan.version import __version__

NAMES = {
    "tp": "tensor (all-reduce)",
    "sp": "tensor (sequence parallel)",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "gradient_reduce": "gradient reduction",
    "parameter_gather": "parameter gather",
    "tied_embedding": "tied embedding",
    "gradient_norm": "gradient norm",
}
"""Names of the parallelisms in tables and figures."""


def traffic_document(report: TrafficReport) -> str:
    """Write the JSON document: the whole report, with pairs of GPUs as columns."""
    return json.dumps({"schema_version": 1, "milpplan_version": __version__, **report.to_dict()}) + "\n"


def traffic_tables(report: TrafficReport) -> RenderableType:
    """Show traffic by parallelism, links, overheads, use of the GPUs and effective bandwidth."""
    return Group(*_parts(report))


def _parts(report: TrafficReport) -> Iterator[RenderableType]:
    total = sum(report.wire_bytes.values())
    yield Text(
        f"{bytes_text(total)} a step on {cluster_words(report)}, "
        f"{seconds_text(report.step_time_s)} a step, {report.algorithm} algorithms"
    )
    yield _by_parallelism(report, total)
    if len(report.blocks) > 1:
        yield _by_type(report)
    yield _links(report)
    yield _over_time(report)
    yield _overheads(report)
    for nodes in dict.fromkeys(row.nodes for row in report.bandwidths):
        yield _bandwidths([row for row in report.bandwidths if row.nodes == nodes], len(report.blocks) > 1)


def cluster_words(report: TrafficReport) -> str:
    """Describe the cluster: ``32 GPUs (8 in a fast domain)``; several node types in the order of their ranks."""
    whole = f"{counted(report.num_gpus, 'GPU')}"
    if len(report.blocks) == 1:
        return f"{whole} ({report.gpus_per_domain} in a fast domain)"
    parts = [
        f"{block.first_gpu}-{block.first_gpu + block.num_gpus - 1}: {block.name}, "
        f"{block.gpus_per_domain} in a fast domain"
        for block in report.blocks
    ]
    return f"{whole} ({'; '.join(parts)})"


def _by_type(report: TrafficReport) -> Table:
    """Show bytes from nodes of each type to nodes of each type."""
    table = report_table("Bytes a step, by node type", "from", *(f"to {block.name}" for block in report.blocks))
    for sender in report.blocks:
        row = report.type_bytes[sender.node_type]
        table.add_row(sender.name, *(bytes_text(float(row[block.node_type])) for block in report.blocks))
    return table


def _by_parallelism(report: TrafficReport, total: float) -> Table:
    table = report_table("Bytes a step", "parallelism", "all GPUs", "share", "inside domains", "between", "pairs")
    for name, wire in report.wire_bytes.items():
        tiers = report.tier_bytes[name]
        if wire:
            table.add_row(
                NAMES[name],
                bytes_text(wire),
                percent_text(wire / total, 1),
                bytes_text(tiers["inside"]),
                bytes_text(tiers["between"]),
                f"{len(report.pairs[name].sender):,}",
            )
    return table


def _links(report: TrafficReport) -> Table:
    table = report_table("Links", "link", "mean a step", "most", "rate of the most", "where")
    step = report.step_time_s
    rows: tuple[tuple[str, FloatArray, str], ...] = (
        ("GPU to its domain", report.gpu_links.out_inside, "GPU"),
        ("GPU to the network", report.gpu_links.out_between, "GPU"),
        ("node to the network", report.node_links.out_between, "node"),
        ("network to the node", report.node_links.in_between, "node"),
    )
    for name, values, index in rows:
        peak = float(values.max())
        where = f"{index} {int(np.argmax(values))}" if peak else "-"
        table.add_row(
            name, bytes_text(float(values.mean())), bytes_text(peak), f"{bytes_text(peak / step)}/s", where
        )
    between = sum(tiers["between"] for tiers in report.tier_bytes.values())
    if between:
        changed = percent_text(report.rail_change_bytes / between, 1)
        table.add_row("changes its place in the domain", changed, "", "", "of what crosses")
    if report.pod_change_bytes:
        changed = percent_text(report.pod_change_bytes / between, 1)
        table.add_row("changes its pod", changed, "", "", "of what crosses")
    return table


def _over_time(report: TrafficReport) -> Table:
    """Show the periods with the most traffic."""
    table = report_table("Over the step", "tier", "mean rate", "busiest", "at", "bytes in the busiest tenth")
    edges = report.timeline.edges_s
    length = edges[1] - edges[0]
    for name, values in (
        ("inside domains", report.timeline.inside_bytes),
        ("between", report.timeline.between_bytes),
    ):
        total = float(values.sum())
        if total:
            tenth = np.sort(values)[-max(1, len(values) // 10) :].sum()
            table.add_row(
                name,
                f"{bytes_text(total / report.step_time_s)}/s",
                f"{bytes_text(float(values.max() / length))}/s",
                seconds_text(float(edges[int(values.argmax())])),
                percent_text(float(tenth) / total, 1),
            )
    return table


def _overheads(report: TrafficReport) -> Table:
    table = report_table("Share of the step", "", "exposed", "hidden")
    step = report.step_time_s
    for name in ("tp", "cp", "ep", "zero", "param_gather", "grad_reduce"):
        exposed, hidden = (
            values.get(f"{name}_{kind}", 0.0)
            for values, kind in ((report.exposed_s, "exposed"), (report.hidden_s, "hidden"))
        )
        if exposed or hidden:
            table.add_row(name, percent_text(exposed / step, 2), percent_text(hidden / step, 2))
    table.add_row("gradient norm", percent_text(report.exposed_s["gradient_norm"] / step, 2), "")
    busy = [use.busy_fraction for use in report.utilisation]
    computing = [use.compute_fraction for use in report.utilisation]
    table.add_row("GPUs busy, from - to", percent_text(min(busy), 1), percent_text(max(busy), 1))
    table.add_row("GPUs computing, from - to", percent_text(min(computing), 1), percent_text(max(computing), 1))
    return table


def _bandwidths(rows: list[Bandwidth], named: bool) -> Table:
    """Show all-reduces by size of the group; the JSON and the page have every operation. ``named``: name the
    nodes."""
    sizes = sorted({row.message_bytes for row in rows})[1::2]
    title = "Bus bandwidth of an all-reduce, by message" + (f", {rows[0].nodes}" if named else "")
    table = report_table(title, "GPUs", "tier", *(bytes_text(size) for size in sizes))
    shapes = dict.fromkeys((row.num_gpus, row.stride, row.where) for row in rows if row.operation == "all_reduce")
    by_size = {(row.num_gpus, row.stride, row.message_bytes): row for row in rows if row.operation == "all_reduce"}
    for num_gpus, stride, where in shapes:
        rates = [f"{bytes_text(by_size[num_gpus, stride, size].bus_bandwidth_bytes_per_s)}/s" for size in sizes]
        table.add_row(str(num_gpus), where, *rates)
    return table
