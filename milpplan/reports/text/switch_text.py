"""Switch between two plans: text and JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.problem.plan import Layout, Plan
from milpplan.reports.text.terminal import report_table
from milpplan.switching.records import SwitchPlan
from milpplan.units import bytes_text, counted, percent_text, seconds_text, size_text
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


def switch_tables(source: Plan, target: Plan, switches: Sequence[SwitchPlan]) -> RenderableType:
    """Show the moved state, the time of the switch, and the memory that it needs."""
    return Group(*_parts(source, target, switches))


def _degrees(layout: Layout) -> str:
    names = ("tp", "cp", "ep", "etp", "pp", "dp", "vpp")
    shown = [f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " ".join([*shown, f"zero={layout.zero_stage}"])


def _parts(source: Plan, target: Plan, switches: Sequence[SwitchPlan]) -> Iterator[RenderableType]:
    first = switches[0]
    yield Text(
        f"{_degrees(source.layout)} to {_degrees(target.layout)} on {counted(first.num_gpus, 'GPU')} "
        f"({first.gpus_per_domain} in a fast domain), {first.senders} senders"
    )
    yield _moved(switches)
    yield _times(switches)
    yield _memory(switches)


def _moved(switches: Sequence[SwitchPlan]) -> Table:
    table = report_table(
        "What moves", "state", "all GPUs", "kept", "inside domains", "between", "messages", "slices"
    )
    for switch in switches:
        inside, between = (int(part) for part in switch.sent_bytes.sum(axis=0))
        kept = int(switch.kept_bytes.sum()) / max(int(switch.new_bytes.sum()), 1)
        table.add_row(
            NAMES[switch.what],
            bytes_text(switch.total_bytes),
            percent_text(kept),
            bytes_text(inside),
            bytes_text(between),
            f"{switch.num_messages:,}",
            f"{len(switch.deliveries):,}",
        )
    return table


def _times(switches: Sequence[SwitchPlan]) -> Table:
    columns = ("state", "time", "no senders below", "links", "network", "first layers")
    table = report_table("How long", *columns)
    for switch in switches:
        table.add_row(
            NAMES[switch.what],
            seconds_text(switch.time_s),
            seconds_text(switch.lower_bound_s) if switch.lower_bound_s else "-",
            *(seconds_text(seconds) for seconds in switch.tier_s),
            seconds_text(switch.first_layers_s) if switch.what == "parameters" else "",
        )
    return table


def _memory(switches: Sequence[SwitchPlan]) -> Table:
    columns = ("state", "before", "after", "most while it moves", "sent by one", "received by one")
    table = report_table("Fullest GPU", *columns)
    for switch in switches:
        table.add_row(
            NAMES[switch.what],
            size_text(float(switch.old_bytes.max())),
            size_text(float(switch.new_bytes.max())),
            size_text(float(switch.peak_bytes.max())),
            bytes_text(float(switch.sent_bytes.sum(axis=1).max())),
            bytes_text(float(switch.received_bytes.sum(axis=1).max())),
        )
    return table
