"""Switch between two plans: document and blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from milpplan.problem import Layout, Plan
from milpplan.reports.blocks import Block, Paragraph, Table
from milpplan.switching.records import SwitchPlan
from milpplan.units import bytes_text, counted, lower_bound_text, percent_text, seconds_text, size_text
from milpplan.version import __version__

NAMES = {"parameters": "parameters (bf16)", "gradients": "reduced gradients", "optimizer": "optimizer states"}


def switch_document(source: Plan, target: Plan, switches: Sequence[SwitchPlan]) -> str:
    """Write the JSON document: both plans' layouts, and each kind of state with its messages."""
    data = {
        "schema_version": 1,
        "milpplan_version": __version__,
        "num_gpus": source.layout.num_gpus,
        "from": source.layout.model_dump(mode="json"),
        "to": target.layout.model_dump(mode="json"),
        "switches": {switch.what: switch.to_dict() for switch in switches},
    }
    return json.dumps(data) + "\n"


def switch_blocks(source: Plan, target: Plan, switches: Sequence[SwitchPlan]) -> list[Block]:
    """Show the moved state, the time of the switch, and the memory that it needs."""
    first = switches[0]
    headline = (
        f"{_degrees(source.layout)} to {_degrees(target.layout)} on {counted(first.num_gpus, 'GPU')} "
        f"({first.gpus_per_domain} in a fast domain), {first.senders} senders"
    )
    return [Paragraph(headline), _moved(switches), _times(switches), _memory(switches)]


def _degrees(layout: Layout) -> str:
    names = ("tp", "cp", "ep", "etp", "pp", "dp", "vpp")
    shown = [f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    shown += [f"zero={layout.zero_stage}"]
    shown += [f"dp_replicate={layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    return " ".join(shown)


def _moved(switches: Sequence[SwitchPlan]) -> Table:
    rows = []
    for switch in switches:
        inside, between = (int(part) for part in switch.sent_bytes.sum(axis=0))
        kept = int(switch.kept_bytes.sum()) / max(int(switch.new_bytes.sum()), 1)
        tiers = (bytes_text(inside), bytes_text(between))
        counts = (f"{switch.num_messages:,}", f"{len(switch.deliveries):,}")
        rows.append((NAMES[switch.what], bytes_text(switch.total_bytes), percent_text(kept), *tiers, *counts))
    columns = ("state", "all GPUs", "kept", "inside domains", "between", "messages", "slices")
    return Table("What moves", columns, rows)


def _times(switches: Sequence[SwitchPlan]) -> Table:
    rows = [
        (
            NAMES[switch.what],
            seconds_text(switch.time_s),
            lower_bound_text(switch.lower_bound_s) if switch.lower_bound_s else "-",
            *(seconds_text(seconds) for seconds in switch.tier_s),
            seconds_text(switch.first_layers_s) if switch.what == "parameters" else "",
        )
        for switch in switches
    ]
    columns = ("state", "time", "no senders below", "links", "network", "first layers")
    return Table("How long", columns, rows)


def _memory(switches: Sequence[SwitchPlan]) -> Table:
    rows = [
        (
            NAMES[switch.what],
            *(size_text(float(held.max())) for held in (switch.old_bytes, switch.new_bytes, switch.peak_bytes)),
            *(bytes_text(float(moved.sum(axis=1).max())) for moved in (switch.sent_bytes, switch.received_bytes)),
        )
        for switch in switches
    ]
    columns = ("state", "before", "after", "most while it moves", "sent by one", "received by one")
    return Table("Fullest GPU", columns, rows)
