"""Markdown tables, and what the numbers were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from milpplan import Plan, __version__
from milpplan.reports.files import write_whole


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [" | ".join(header), " | ".join(["---", *["---:"] * (len(header) - 1)])]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def layout_text(plan: Plan) -> str:
    """The degrees in a table's cell, those of one left out."""
    layout = plan.layout
    names = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp")
    degrees = [f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    held = {stage.recompute for stage in plan.virtual_stages}
    modes = [mode for mode in ("full", "selective") if any(getattr(r, mode) for r in held)] or ["no"]
    recompute = " and ".join(modes)
    return f"{' '.join(degrees)} mbs{layout.micro_batch_size} zero{layout.zero_stage}, {recompute} recompute"


def section(document: Path, name: str) -> str:
    """What stands between the two comments of a Markdown file that name a generated section."""
    _, _, rest = document.read_text(encoding="utf-8").partition(f"<!-- {name}: generated -->\n")
    return rest.partition(f"<!-- {name}: end -->\n")[0].strip()


def replace_section(document: Path, name: str, text: str) -> None:
    """Put ``text`` between the two comments of a Markdown file that name a generated section."""
    first, last = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->\n"
    before, opening, rest = document.read_text(encoding="utf-8").partition(first)
    _, closing, after = rest.partition(last)
    if not opening or not closing:
        raise ValueError(f"{document} has no section {name!r} between {first.strip()} and {last.strip()}")
    write_whole(document, f"{before}{first}\n{text}\n\n{last}{after}")


def measured_on() -> dict[str, object]:
    """Version and machine."""
    return {
        "milpplan": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
