"""The command ``program``: the answer of a problem as one integer program, in a file for any solver."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from milpplan.cli import checks, interrupts
from milpplan.cli import options as o
from milpplan.cli.answer import shown_progress
from milpplan.cli.arguments import within_range
from milpplan.cli.command import pick
from milpplan.cli.commands.solve import SolveWords
from milpplan.cli.outcome import OF_STATUS, ExitCode, say, show_blocks
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
NOT_ASKED: Final[dict[str, Any]] = {field.name: field.default for field in fields(SolveWords)} | {
    "price_limit": 0.0,
    "method": "program",
    "fastest": True,
}
"""Values of ``solve``'s options that are no options of the program."""


def program(
    model: o.Model = None,
    hardware: o.Hardware = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.mps|FILE.lp", help="File to write, in MPS or CPLEX LP."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Rows for every legal layout, no bounds of a search; small problems only."),
    ] = False,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    seq_len: o.SeqLen = None,
    precision: o.Precision = "bf16",
    target: o.Target = None,
    space: o.SpaceKind = "free",
    fix: o.Fix = None,
    time_limit: o.TimeLimit = None,
    job: o.JobFile = None,
    calculon: o.Calculon = None,
    ignore: o.Ignore = None,
    attention: o.Attention = "flash",
    grad_dtype: o.GradDtype = "fp32",
    inference: o.Inference = False,
    lora_rank: o.LoraRank = None,
    lora_modules: o.LoraModules = None,
    freeze: o.Freeze = None,
    mtp_layers: o.MtpLayers = 0,
    optimizer: o.Optimizer = "adam",
    muon_tp_mode: o.MuonTpMode = None,
    vision_tokens: o.VisionTokens = None,
    image_tokens: o.ImageTokens = None,
    alignment: o.AlignmentName = None,
    reference: o.ReferenceName = None,
    rollout_seconds: o.RolloutSeconds = None,
    rollout_tokens_per_s: o.RolloutRate = None,
    rollout_memory: o.RolloutMemory = None,
    rollout_apart: o.RolloutApart = False,
    schedule: o.ScheduleNames = None,
    allow: o.Allow = None,
    forbid: o.Forbid = None,
    memory_margin: o.MemoryMargin = None,
    target_version: o.TargetVersion = None,
    stack: o.Stack = True,
    objective: o.ObjectiveName = "step_time_per_token",
    deadline_hours: o.DeadlineHours = None,
    deadline_days: o.DeadlineDays = None,
    tokens: o.Tokens = None,
    gap: o.SolveGap = None,
    backend: o.Backend = "auto",
    seed: o.Seed = 1,
    workers: o.Workers = None,
    witness: o.Witness = True,
    warm_start: o.WarmStart = None,
) -> ExitCode:
    """Write the answer of a problem as one integer program: degrees, divisibility, memory, critical paths."""
    words = pick(SolveWords, {**NOT_ASKED, **locals()})
    file = checks.program_file(words.out, "--out")
    checks.positive(words.time_limit, "--time-limit", "number of seconds")
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
