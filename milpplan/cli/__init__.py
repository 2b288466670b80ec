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
    from milpplan.cli.app import app
    from milpplan.cli.outcome import of_error, say_error, unwritten
    from milpplan.errors import InvalidInputError

    try:
        app()
    except SystemExit as end:
        interrupts.leave_solvers(end.code)
        raise
    except (InvalidInputError, OSError) as error:
        # Errors of the commands are handled there; only --help and --version can raise here.
        refusal = error if isinstance(error, InvalidInputError) else unwritten(error)
        say_error(refusal)
        sys.exit(of_error(refusal))
