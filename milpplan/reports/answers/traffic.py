"""Traffic of a plan: document and blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np

from milpplan.communication.records import Bandwidth, TrafficReport
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.simulation import FloatArray
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
OVERHEADS: Final = ("tp", "cp", "ep", "zero", "param_gather", "grad_reduce")
"""Communication that runs beside compute as far as it can."""


def traffic_document(report: TrafficReport) -> str:
    """Write the JSON document: the whole report, with pairs of GPUs as columns."""
    return json.dumps({"schema_version": 1, "milpplan_version": __version__, **report.to_dict()}) + "\n"


def traffic_blocks(report: TrafficReport) -> list[Block]:
    """Show traffic by parallelism, links, overheads, use of the GPUs and effective bandwidth."""
    headline = (
        f"{bytes_text(sum(report.wire_bytes.values()))} a step on {cluster_words(report)}, "
        f"{seconds_text(report.step_time_s)} a step, {report.algorithm} algorithms"
    )
    types = [_by_type(report)] if len(report.blocks) > 1 else []
    tables = (parallelism_table(report), *types, _links(report), _over_time(report), _overheads(report))
    return [Paragraph(headline), *tables, *_bandwidths(report)]


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
    rows = []
    for sender in report.blocks:
        sent = report.type_bytes[sender.node_type]
        rows.append((sender.name, *(bytes_text(float(sent[block.node_type])) for block in report.blocks)))
    return Table("Bytes a step, by node type", ("from", *(f"to {block.name}" for block in report.blocks)), rows)


def parallelism_table(report: TrafficReport) -> Table:
    """Show the bytes of every parallelism that sends."""
    total = sum(report.wire_bytes.values())
    rows = [
        (
            NAMES[name],
            bytes_text(wire),
            percent_text(wire / total, 1),
            bytes_text(report.tier_bytes[name]["inside"]),
            bytes_text(report.tier_bytes[name]["between"]),
            f"{len(report.pairs[name].sender):,}",
        )
        for name, wire in report.wire_bytes.items()
        if wire
    ]
    return Table("Bytes a step", ("parallelism", "all GPUs", "share", "inside domains", "between", "pairs"), rows)


def _links(report: TrafficReport) -> Table:
    rows = []
    links: tuple[tuple[str, FloatArray, str], ...] = (
        ("GPU to its domain", report.gpu_links.out_inside, "GPU"),
        ("GPU to the network", report.gpu_links.out_between, "GPU"),
        ("node to the network", report.node_links.out_between, "node"),
        ("network to the node", report.node_links.in_between, "node"),
    )
    for name, values, index in links:
        peak = float(values.max())
        where = f"{index} {int(np.argmax(values))}" if peak else "-"
        rate = f"{bytes_text(peak / report.step_time_s)}/s"
        rows.append((name, bytes_text(float(values.mean())), bytes_text(peak), rate, where))
    between = sum(tiers["between"] for tiers in report.tier_bytes.values())
    changes = {
        "changes its place in the domain": report.rail_change_bytes if between else None,
        "changes its pod": report.pod_change_bytes or None,
    }
    rows += [
        (name, percent_text(changed / between, 1), "", "", "of what crosses")
        for name, changed in changes.items()
        if changed is not None
    ]
    return Table("Links", ("link", "mean a step", "most", "rate of the most", "where"), rows)


def _over_time(report: TrafficReport) -> Table:
    """Show the periods with the most traffic."""
    rows = []
    edges = report.timeline.edges_s
    length = edges[1] - edges[0]
    for name, values in (
        ("inside domains", report.timeline.inside_bytes),
        ("between", report.timeline.between_bytes),
    ):
        total = float(values.sum())
        if total:
            tenth = float(np.sort(values)[-max(1, len(values) // 10) :].sum())
            rates = [bytes_text(total / report.step_time_s), bytes_text(float(values.max() / length))]
            busiest = seconds_text(float(edges[int(values.argmax())]))
            rows.append((name, *(f"{rate}/s" for rate in rates), busiest, percent_text(tenth / total, 1)))
    columns = ("tier", "mean rate", "busiest", "at", "bytes in the busiest tenth")
    return Table("Over the step", columns, rows)


def overheads_s(report: TrafficReport) -> dict[str, tuple[float, float]]:
    """Return the exposed and the hidden seconds of every overhead that has any."""
    both = {
        name: (report.exposed_s.get(f"{name}_exposed", 0.0), report.hidden_s.get(f"{name}_hidden", 0.0))
        for name in OVERHEADS
    }
    return {name: seconds for name, seconds in both.items() if any(seconds)}


def _overheads(report: TrafficReport) -> Table:
    step = report.step_time_s
    rows = [
        (name, *(percent_text(seconds / step, 2) for seconds in both))
        for name, both in overheads_s(report).items()
    ]
    rows.append(("gradient norm", percent_text(report.exposed_s["gradient_norm"] / step, 2), ""))
    busy = [use.busy_fraction for use in report.utilisation]
    computing = [use.compute_fraction for use in report.utilisation]
    for name, shares in (("busy", busy), ("computing", computing)):
        rows.append((f"GPUs {name}, from - to", percent_text(min(shares), 1), percent_text(max(shares), 1)))
    return Table("Share of the step", ("", "exposed", "hidden"), rows)


def _bandwidths(report: TrafficReport) -> list[Table]:
    """Show all-reduces by nodes and size of the group; the JSON and the page have every operation."""
    several = len(report.blocks) > 1
    groups: dict[str, list[Bandwidth]] = {}
    for row in report.bandwidths:
        groups.setdefault(row.nodes, []).append(row)
    return [_bandwidth_table(rows, f", {nodes}" if several else "") for nodes, rows in groups.items()]


def _bandwidth_table(bandwidths: Sequence[Bandwidth], nodes: str) -> Table:
    sizes = sorted({row.message_bytes for row in bandwidths})[1::2]
    reduces = [row for row in bandwidths if row.operation == "all_reduce"]
    by_size = {(row.num_gpus, row.stride, row.message_bytes): row for row in reduces}
    rows = []
    for num_gpus, stride, where in dict.fromkeys((row.num_gpus, row.stride, row.where) for row in reduces):
        rates = [f"{bytes_text(by_size[num_gpus, stride, size].bus_bandwidth_bytes_per_s)}/s" for size in sizes]
        rows.append((str(num_gpus), where, *rates))
    title = f"Bus bandwidth of an all-reduce, by message{nodes}"
    return Table(title, ("GPUs", "tier", *(bytes_text(size) for size in sizes)), rows)
