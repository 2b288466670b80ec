"""The command ``program``: the answer of a problem as one integer program, in a file for any solver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import command, interrupts
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, say, show_blocks, shown_progress
from milpplan.cli.solve_options import DEFAULTS, SolveWords
from milpplan.optimize import SolveOptions
from milpplan.optimize.context import Deadline
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.milp.whole_program import monolithic_program
from milpplan.optimize.milp.write_program import WRITERS
from milpplan.optimize.solve import solve
from milpplan.problem import Problem
from milpplan.reports.answers.solve import program_fact

EXAMPLES: Final = (
    (
        "The best plan for Llama-3 70B as one program, for a solver of your own",
        "llama3-70b dgx-h100 --gpus 512 --global-batch 512 -o plan.mps",
    ),
    (
        "The same in uniform space, to read",
        "llama3-70b dgx-h100 --gpus 512 --global-batch 512 --space uniform -o plan.lp",
    ),
)
NOT_ASKED: Final = {
    name: DEFAULTS[name]
    for name in ("verbose", "price", "check_ends", "robust", "scenarios", "progress", "as_json")
} | {"price_limit": 0.0, "method": "program", "fastest": True}
"""Values of ``solve``'s options that are no options of the program."""


def program(
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.mps|FILE.lp", help="File to write, in MPS or CPLEX LP."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Rows for every legal layout, no bounds of a search; small problems only."),
    ] = False,
    words: Annotated[SolveWords, NOT_ASKED],
) -> ExitCode:
    """Write the answer of a problem as one integer program: degrees, divisibility, memory, critical paths."""
    file = command.program_file(out, "--out")
    command.positive(words.time_limit, "--time-limit", "number of seconds")
    problem = words.problem(words.hardware)
    if full:
        for path in WRITERS[file.suffix](monolithic_program(problem), file):
            say(f"Written to {path}.")
        return ExitCode.OPTIMAL
    return _written(problem, words.options(problem), file)


def _written(problem: Problem, options: SolveOptions, out: Path) -> ExitCode:
    """Search, solve the program, write it and say how large it is."""
    deadline = Deadline.after(options.time_limit_s)
    options = replace(options, cancelled=interrupts.asked_to_stop, any_chunks=False)
    with shown_progress(problem.job.objective) as callback, within_range():
        result = solve(problem, replace(options, callback=callback))
        if result.plan is None:
            say(f"There is no program: the search ended as {result.status.replace('_', ' ')}.")
            return OF_STATUS[result.status]
        answer = solve_block_program(result, options, deadline.left_s())
    for path in WRITERS[out.suffix](answer.program, out):
        say(f"Written to {path}.")
    show_blocks([program_fact(answer)])
    return ExitCode.OPTIMAL if answer.agrees else ExitCode.STOPPED_WITH_PLAN
