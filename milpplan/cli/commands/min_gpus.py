"""The command ``min-gpus``: the fewest accelerators that a job needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import checks, interrupts
from milpplan.cli import options as o
from milpplan.cli.answer import evidence_of, next_steps, shown_progress
from milpplan.cli.arguments import deadline_hours as hours_of
from milpplan.cli.arguments import forbidden_values, problem_of, within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.explain import Fewest, fewest_gpus
from milpplan.optimize import DEFAULT_GAP, SolveOptions
from milpplan.optimize.milp.solution import undisturbed
from milpplan.problem import Problem
from milpplan.reports import write_whole
from milpplan.reports.answers.hardware_choice import fewest_blocks, fewest_document
from milpplan.reports.documents.document import document_text
from milpplan.reports.files import check_writable

EXAMPLES: Final = (
    ("As few H100 as Llama-3 70B trains on", "llama3-70b dgx-h100 --global-batch 512"),
    (
        "As few as finish in 90 days",
        "llama3-70b dgx-h100 --global-batch 1024 --tokens 1e12 --deadline-days 90 --gpus 64:1024:64",
    ),
)

FIXED = {"attention": "flash", "grad_dtype": "fp32", "objective": "num_gpus", "kind": "training"}
"""Fields of every job here, as arguments name them."""

GIVEN = (
    *("global_batch", "seq_len", "precision", "tokens", "lora_rank", "lora_modules", "freeze", "mtp_layers"),
    *("optimizer", "muon_tp_mode", "vision_tokens", "image_tokens", "alignment", "reference", "rollout_seconds"),
    *("rollout_tokens_per_s", "rollout_memory", "rollout_apart", "ignore", "memory_margin"),
)
"""Fields of a job that options give as they are."""


def min_gpus(
    model: o.Model,
    hardware: o.Hardware,
    global_batch: o.GlobalBatch = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="LO:HI[:STEP]", help="Numbers to try.", show_default="1 to a node, then whole nodes"
        ),
    ] = None,
    ignore: o.Ignore = None,
    seq_len: o.SeqLen = None,
    precision: o.Precision = "bf16",
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
    space: o.SpaceKind = "free",
    schedule: o.ScheduleNames = None,
    fix: o.Fix = None,
    allow: o.Allow = None,
    forbid: o.Forbid = None,
    memory_margin: o.MemoryMargin = None,
    deadline_hours: o.DeadlineHours = None,
    deadline_days: o.DeadlineDays = None,
    tokens: o.Tokens = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds; more refuses more of the smaller numbers."),
    ] = 60.0,
    gap: o.Gap = DEFAULT_GAP,
    fastest: o.Fastest = False,
    out: o.Out = None,
    verbose: o.Verbose = False,
    progress: o.ShowProgress = False,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Find the fewest GPUs on which a model trains at all, or in time for a deadline, and prove that every smaller
    number does not suffice (up to a node every number is tried, beyond it whole nodes)."""
    given = locals()
    job = FIXED | {name: given[name] for name in GIVEN}
    job |= {"gpus": gpus or "1", "deadline_hours": hours_of(deadline_hours, deadline_days)}
    problem = problem_of(model, hardware, job, space, fix or [], allow or [], schedule)
    forbidden = forbidden_values(forbid or [])
    chosen = SolveOptions(gap=gap, simplest=not fastest, time_limit_s=time_limit, forbid=forbidden)
    checks.positive(time_limit, "--time-limit", "number of seconds")
    if out is not None:
        check_writable(out)
    fewest = _fewest(problem, chosen, gpus is None, progress)
    with undisturbed():
        return _print(fewest, gap, out, as_json, verbose)


def _fewest(problem: Problem, options: SolveOptions, widen: bool, progress: bool) -> Fewest:
    """Find the minimum number of GPUs."""
    options = replace(options, cancelled=interrupts.asked_to_stop)
    limit_s = options.time_limit_s
    answers: list[Fewest] = []
    with (
        interrupts.keeping(answers),
        shown_progress("step_time_per_token", progress) as callback,
        within_range(),
        interrupts.limited(limit_s),
    ):
        answers.append(fewest_gpus(problem, replace(options, callback=callback), widen=widen))
    return answers[0]


def _print(fewest: Fewest, gap: float, out: Path | None, as_json: bool, verbose: bool) -> ExitCode:
    """Print the minimum with its plan and with what smaller numbers lack, and write the file."""
    if fewest.result.message:
        say(fewest.result.message)
    document = fewest_document(fewest, gap)
    if as_json:
        emit(document_text(document))
    else:
        steps = tuple(next_steps(fewest.result, out, verbose))
        show_blocks(fewest_blocks(fewest, gap, evidence_of(fewest.result), verbose, steps))
    if out is not None and fewest.result.plan is not None:
        write_whole(out, document_text(document.result))
        say(f"Written to {out}.")
    return OF_STATUS[fewest.result.status]
