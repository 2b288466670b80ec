"""The command line. stdout is the result, stderr the talk."""

import os
import sys

from milpplan.cli import interrupts

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``milpplan`` program: what takes long to import comes after Ctrl-C has a meaning."""
    interrupts.leave_at_once()
    for name in ("stdout", "stderr"):
        # A stream that the caller has closed is as good as one that nobody reads.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    from milpplan.cli.app import run

    try:
        run()
    except SystemExit as end:
        interrupts.leave_solvers(end.code)
        raise
