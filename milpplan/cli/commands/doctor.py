"""The command ``doctor``."""

from __future__ import annotations

from typing import Final

from milpplan.cli.outcome import ExitCode, say, show_blocks
from milpplan.optimize.milp.solver_self_test import run_canaries
from milpplan.reports.answers.descriptions import doctor_blocks

EXAMPLES: Final = (("Are the solvers sound?", ""),)


def doctor() -> ExitCode:
    """Check the installed solvers on small programs that broken solvers have got wrong. Exits with 6 if a solver
    gives a wrong answer, with 2 if a solver cannot run here and none is wrong."""
    say("Running the canary programs; this takes a few seconds.")
    results = run_canaries()
    show_blocks(doctor_blocks(results))
    wrong = sum(result.answered and not result.passed for result in results)
    unanswered = sum(not result.answered for result in results)
    if wrong:
        say(f"{wrong} of {len(results)} checks failed.")
    if unanswered:
        say(f"{unanswered} of {len(results)} checks could not run here.")
    if not wrong and not unanswered:
        say(f"All {len(results)} checks passed.")
    return ExitCode.INTERNAL_FAILURE if wrong else ExitCode.BAD_INPUT if unanswered else ExitCode.OPTIMAL
