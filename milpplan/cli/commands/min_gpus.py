"""The command ``min-gpus``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

import milpplan
from milpplan.cli import options as o

EXAMPLES: Final = (
    ("As few H100 as Llama-3 70B trains on", "llama3-70b dgx-h100 --global-batch 512"),
    (
        "As few as finish in 90 days",
        "llama3-70b dgx-h100 --global-batch 1024 --tokens 1e12 --deadline-days 90 --gpus 64:1024:64",
    ),
)


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
    space: o.SpaceKind = "free",
    schedule: o.ScheduleNames = None,
    fix: o.Fix = None,
    allow: o.Allow = None,
    forbid: o.Forbid = None,
    deadline_hours: o.DeadlineHours = None,
    deadline_days: o.DeadlineDays = None,
    tokens: o.Tokens = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds; more refuses more of the smaller numbers."),
    ] = 60.0,
    gap: o.Gap = 1e-4,
    out: o.Out = None,
    verbose: o.Verbose = False,
    as_json: o.AsJson = False,
) -> None:
    """Find the fewest GPUs on which a model trains at all, or in time for a deadline, and prove that every smaller
    number does not suffice (up to a node every number is tried, beyond it whole nodes)."""
    from milpplan.cli import arguments, fewest
    from milpplan.cli.calculon import problem_of

    job = {
        "gpus": gpus or "1",
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "attention": "flash",
        "grad_dtype": "fp32",
        "objective": "num_gpus",
        "deadline_hours": arguments.deadline_hours(deadline_hours, deadline_days),
        "tokens": tokens,
        "kind": "training",
        "ignore": ignore,
    }
    named = {"MODEL": model, "HARDWARE": hardware}
    problem = problem_of(None, named, job, space, fix or [], allow or [], schedule)
    forbidden = arguments.forbidden_values(forbid or [])
    chosen = milpplan.SolveOptions(gap=gap, time_limit_s=time_limit, forbid=forbidden)
    raise typer.Exit(int(fewest.run(problem, chosen, gpus is None, out, as_json, verbose)))
