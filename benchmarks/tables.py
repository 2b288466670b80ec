"""Markdown tables, and what the numbers were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from milpplan import __version__


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [" | ".join(header), " | ".join(["---", *["---:"] * (len(header) - 1)])]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def measured_on() -> dict[str, object]:
    """Version and machine."""
    return {
        "milpplan": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
