"""What the site makes by itself: the page of commands from their own help, hardware from its README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IN_THE_REPOSITORY = re.compile(r"\[([^\]]+)\]\(\.\./(?:milpplan|tests|benchmarks|examples)/[^)]+\)")
"""Links to files that the site does not have: their text is enough."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the pages that are made from something else."""
    if page.file.src_uri == "commands.md":
        return markdown + commands()
    if page.file.src_uri == "hardware.md":
        return markdown + (ROOT / "hardware" / "README.md").read_text(encoding="utf-8").partition("\n")[2]
    return IN_THE_REPOSITORY.sub(r"\1", markdown)


def commands() -> str:
    """Every command's help."""
    import typer
    from typer.testing import CliRunner

    from milpplan.cli.app import app

    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = []
    for name in names:
        told = CliRunner().invoke(app, [name, "--help"], terminal_width=100)
        parts.append(f"\n## {name}\n\n```text\n{told.stdout.strip()}\n```\n")
    return "".join(parts)
