"""Commands that find plans and say things about them: words in, a call of the library, and what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import milpplan
from milpplan.cli import options as o
from milpplan.cli.program import command


@command()
def solve(
    model: o.Model = None,
    hardware: o.Hardware = None,
    job: o.JobFile = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    calculon: o.Calculon = None,
    ignore: o.Ignore = None,
    seq_len: o.SeqLen = None,
    precision: o.Precision = "bf16",
    attention: o.Attention = "flash",
    grad_dtype: o.GradDtype = "fp32",
    inference: o.Inference = False,
    space: o.SpaceKind = "free",
    schedule: o.ScheduleNames = None,
    fix: o.Fix = None,
    allow: o.Allow = None,
    forbid: o.Forbid = None,
    target: o.Target = None,
    target_version: o.TargetVersion = None,
    price_limit: o.PriceLimit = 60.0,
    objective: o.ObjectiveName = "step_time_per_token",
    deadline_hours: o.DeadlineHours = None,
    deadline_days: o.DeadlineDays = None,
    tokens: o.Tokens = None,
    price: o.Price = None,
    backend: o.Backend = "auto",
    time_limit: o.TimeLimit = None,
    gap: o.SolveGap = None,
    seed: o.Seed = 1,
    workers: o.Workers = None,
    witness: o.Witness = True,
    warm_start: o.WarmStart = None,
    check_ends: o.CheckEnds = False,
    lengths: o.Lengths = None,
    max_strategies: o.MaxStrategies = None,
    tokens_per_step: o.TokensPerStep = None,
    align: o.Align = None,
    padding: o.Padding = False,
    mask: o.Mask = None,
    buckets: o.Buckets = None,
    bucket_count: o.BucketCount = None,
    baselines: o.Baselines = False,
    side_by_side: o.SideBySide = None,
    unlike_replicas: o.UnlikeReplicas = False,
    hetu: o.Hetu = None,
    out: o.Out = None,
    as_json: o.AsJson = False,
) -> None:
    """Find the best plan for a model on a cluster, and prove it."""
    words = {name: value for name, value in locals().items() if name != "job"}
    from milpplan.cli.solve_command import SolveWords, run

    raise typer.Exit(int(run(SolveWords(**words))))


@command()
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
    as_json: o.AsJson = False,
) -> None:
    """Find the fewest GPUs on which a model trains at all, or in time for a deadline, and prove of every smaller
    number tried (up to a node all, beyond it whole nodes) that it does not suffice."""
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
    raise typer.Exit(int(fewest.run(problem, chosen, gpus is None, out, as_json)))


@command()
def simulate(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")
    ] = None,
    calculon: o.Calculon = None,
    as_json: o.AsJson = False,
) -> None:
    """Simulate one step of a plan. Exits with 3 if the plan does not fit in memory."""
    from milpplan.cli import calculon as calculons

    raise typer.Exit(int(calculons.simulate(calculon, plan, as_json)))


@command()
def certify(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What `solve --out` or `--json` wrote.")],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="auto|cpsat|cbc|highs", help="Solver.", show_default="not the result's own"
        ),
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option(
            "--programs", metavar="DIR", help="Also write the integer programs as MPS, for any other solver."
        ),
    ] = None,
    time_limit: o.TimeLimit = None,
    seed: o.Seed = 1,
    as_json: o.AsJson = False,
) -> None:
    """Prove a result again, by another solver and without trusting the run that made it. Exits with 0 if it is
    certified, 2 if it is refuted or was changed, 4 if the second proof does not come as far."""
    from milpplan.cli import certify as certifying

    raise typer.Exit(int(certifying.run(result, backend, programs, time_limit, seed, as_json)))


@command()
def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN.json ...", help="Plan files; the first is the base.")
    ],
    as_json: o.AsJson = False,
) -> None:
    """Set plans side by side: what differs, what each takes, and where the difference comes from."""
    from milpplan.cli import compare as comparing

    raise typer.Exit(int(comparing.run(plans, as_json)))


@command()
def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            "--wish",
            metavar="NAME=VALUE,...",
            help="A choice to price, as tp=8 or recompute=full. Repeatable.",
            show_default="the plan's neighbours",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds for all questions; more narrows the ranges."),
    ] = 60.0,
    gap: o.Gap = 1e-4,
    as_json: o.AsJson = False,
) -> None:
    """Say what binds a plan, what more of something would be worth, and why not another choice, all proved."""
    from milpplan.cli import explain as explaining

    raise typer.Exit(int(explaining.run(plan, why_not or [], time_limit, gap, as_json)))


@command()
def traffic(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            metavar="ring|tree|hierarchical",
            help="What collectives are made of; tree: all-reduces only.",
        ),
    ] = "ring",
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON here.")] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write heat maps and curves as a page (milpplan[report])."),
    ] = None,
) -> None:
    """Who sends how much to whom in one step of a plan: by parallelism, tier, link and time."""
    from milpplan.cli import traffic as counting

    raise typer.Exit(int(counting.run(plan, algorithm, as_json, out, html)))


@command()
def switch(
    source: Annotated[Path, typer.Argument(metavar="FROM.json", help="A plan file, or the JSON of a solve.")],
    target: Annotated[Path, typer.Argument(metavar="TO.json", help="Another plan for the same model and GPUs.")],
    senders: Annotated[
        str,
        typer.Option(
            "--senders",
            metavar="nearest|exact|relay",
            help="Nearest holders; the fastest direct senders, proved; or with relays inside fast domains.",
        ),
    ] = "relay",
    bandwidths: Annotated[
        str | None,
        typer.Option(
            "--bandwidths",
            metavar="INSIDE,BETWEEN",
            help="Bytes/s of a GPU inside its fast domain and between, as 200e9,25e9; no latencies.",
            show_default="the hardware's",
        ),
    ] = None,
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON here.")] = None,
) -> None:
    """Who sends which states to whom when a job changes from one plan to another, and how long that takes."""
    from milpplan.cli import switch as switching

    raise typer.Exit(int(switching.run(source, target, senders, bandwidths, as_json, out)))


@command()
def sweep(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="A study file; docs/studies.md describes it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Directory of the results.",
            show_default="STUDY-results, beside the study",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=4096, help="Solves at once.", show_default="all CPUs"),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Solve on a Ray cluster (RAY_ADDRESS, else one started here).")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Solve the cells again that failed before.")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Solve every cell of a design study. Stopped or killed, the same command continues where it was."""
    from milpplan.cli import sweep as sweeping

    raise typer.Exit(int(sweeping.run(study, out, workers, ray, retry_failed, as_json)))
