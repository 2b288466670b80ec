"""Pages that the site makes of other files: help of the commands, CONTRIBUTING.md, hardware/README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IN_THE_REPOSITORY = re.compile(
    r"\[([^\]]+)\]\(\.\./(?:milpplan|tests|benchmarks|examples|hardware|notebooks|runs)/[^)]*\)"
)
"""Links to files that the site does not have: their text is enough."""
AT_THE_ROOT = re.compile(r"\[([^\]]+)\]\((?!docs/|http)[^)]+\)")
"""Links of CONTRIBUTING.md to files outside docs/."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete the pages that are made from something else."""
    markdown = IN_THE_REPOSITORY.sub(r"\1", markdown)
    if page.file.src_uri == "commands.md":
        return markdown + commands()
    if page.file.src_uri == "contributing.md":
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        return AT_THE_ROOT.sub(r"\1", text).replace("](docs/", "](")
    if page.file.src_uri == "calibration.md":
        text = (ROOT / "hardware" / "README.md").read_text(encoding="utf-8").partition("\n")[2]
        return markdown + IN_THE_REPOSITORY.sub(r"\1", text)
    return markdown


def commands() -> str:
    """Return every command's help as Markdown."""
    import typer
    from typer.testing import CliRunner

    from milpplan.cli.app import app

    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = []
    for name in names:
        told = CliRunner().invoke(app, [name, "--help"], terminal_width=100)
        parts.append(f"\n### {name} --help\n\n```text\n{told.stdout.strip()}\n```\n")
    return "".join(parts)
