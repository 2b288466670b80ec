"""The command ``init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli.outcome import say

EXAMPLES: Final = (("Answer a few questions; then milpplan solve --job job.toml", "job.toml"),)


def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The file to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Ask a few questions and write a job file for `solve --job`."""
    from milpplan.cli.job_file import ask
    from milpplan.reports.files import write_whole

    write_whole(path, ask(path, force))
    say(f"Written to {path}. Now: milpplan solve --job {path}")
