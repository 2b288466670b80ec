"""The command line: results on stdout, progress and messages on stderr."""

import os
import sys

from milpplan.cli import interrupts

__all__ = ["main"]


def main() -> None:
    """Start the ``milpplan`` program. Ctrl-C is handled before anything that takes long is imported."""
    interrupts.leave_at_once()
    for name in ("stdout", "stderr"):
        # A stream that the caller has closed becomes a stream that nobody reads.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    from milpplan.cli.app import run

    try:
        run()
    except SystemExit as end:
        interrupts.leave_solvers(end.code)
        raise
