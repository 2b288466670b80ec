"""The commands: each reads its words, calls the library, and prints what it returns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import milpplan
from milpplan.cli import options as o
from milpplan.cli.outcome import Commands, ExitCode, emit, of_error, say, say_error, show, unwritten
from milpplan.errors import InvalidInputError

app = typer.Typer(
    name="milpplan",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Proved-best parallel training plans for large language models. Exit codes: 0 optimal within the "
        "tolerance, 2 wrong usage or bad input, 3 proved infeasible, 4 a plan that is not proved within the "
        "tolerance (its gap is printed), 5 stopped with none, 6 internal failure."
    ),
)


def run() -> None:
    """Run the command of ``sys.argv``."""
    try:
        app()
    except (InvalidInputError, OSError) as error:
        # Outside the commands only --help and --version write.
        refusal = error if isinstance(error, InvalidInputError) else unwritten(error)
        say_error(refusal)
        sys.exit(of_error(refusal))


def _version(wanted: bool) -> None:
    if wanted:
        emit(f"milpplan {milpplan.__version__}\n")
        raise typer.Exit(0)


@app.callback()
def _milpplan(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Options before the command."""


@app.command()
def solve(
    model: o.Model = None,
    hardware: o.Hardware = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    calculon: o.Calculon = None,
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
    objective: o.ObjectiveName = "step_time_per_token",
    deadline_hours: o.DeadlineHours = None,
    tokens: o.Tokens = None,
    backend: o.Backend = "auto",
    time_limit: o.TimeLimit = None,
    gap: o.Gap = 1e-4,
    seed: o.Seed = 1,
    witness: o.Witness = True,
    warm_start: o.WarmStart = None,
    check_ends: o.CheckEnds = False,
    out: o.Out = None,
    as_json: o.AsJson = False,
) -> None:
    """Find the best plan for a model on a cluster, and prove it."""
    from milpplan.cli import arguments, solving
    from milpplan.cli.calculon import problem_of

    job = {
        "gpus": gpus,
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "attention": attention,
        "grad_dtype": grad_dtype,
        "objective": objective,
        "deadline_hours": deadline_hours,
        "tokens": tokens,
        "kind": "inference" if inference else "training",
    }
    named = {"MODEL": model, "HARDWARE": hardware}
    problem = problem_of(calculon, named, job, space, fix or [], allow or [], schedule)
    chosen = milpplan.SolveOptions(
        backend=backend,
        gap=gap,
        time_limit_s=time_limit,
        seed=seed,
        witness=witness,
        warm_start=None if warm_start is None else solving.starting_plan(problem, warm_start),
        forbid=arguments.forbidden_values(forbid or []),
    )
    raise typer.Exit(int(solving.run(problem, chosen, out, as_json, check_ends)))


@app.command()
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


@app.command()
def certify(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What `solve --out` or `--json` wrote.")],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="auto|cpsat|cbc|highs", help="Solver.", show_default="not the result's own"
        ),
    ] = None,
    time_limit: o.TimeLimit = None,
    seed: o.Seed = 1,
    as_json: o.AsJson = False,
) -> None:
    """Prove a result again, by another solver and without trusting the run that made it. Exits with 0 if it is
    certified, 2 if it is refuted or was changed, 4 if the second proof does not come as far."""
    from milpplan.cli import certify as certifying

    raise typer.Exit(int(certifying.run(result, backend, time_limit, seed, as_json)))


@app.command()
def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN.json ...", help="Plan files; the first is the base.")
    ],
    as_json: o.AsJson = False,
) -> None:
    """Set plans side by side: what differs, what each takes, and where the difference comes from."""
    from milpplan.cli import compare as comparing

    raise typer.Exit(int(comparing.run(plans, as_json)))


@app.command()
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


@app.command()
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


@app.command()
def validate(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE",
            help="Measured runs as JSON, plain or gzipped.",
            show_default="published runs",
        ),
    ] = None,
    as_json: o.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Write figures (SVG) into this directory.")
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks/--no-stacks", help="With the constants fitted to each framework, or without.")
    ] = True,
) -> None:
    """Compare the simulator with measured training runs: step time, memory, and the order of layouts."""
    from milpplan.cli import validate as validation

    raise typer.Exit(int(validation.run(runs, as_json, plot, stacks)))


@app.command()
def calibrate(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Measured runs (JSON), nccl-tests output, or a CSV of products."),
    ],
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="from hardware and source"),
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option("--constant", metavar="NAME", help="Fit only this constant. Repeatable.", show_default="all"),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", metavar="N", min=2, help="Ranks of an nccl-tests output that does not say them."
        ),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Fit constants of hardware and software to your own measurements, as an overlay on a description."""
    from milpplan.cli import calibrate as calibration

    code = calibration.run(source, hardware, out, name, constant or [], gpus_per_node, as_json)
    raise typer.Exit(int(code))


@app.command()
def profile(
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="RAW.json", help="Measure nothing: take these raw measurements."),
    ] = None,
    raw: Annotated[
        Path | None,
        typer.Option(
            "--raw", metavar="RAW.json", help="Write the measurements here.", show_default="OVERLAY.raw.json"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cuda|cpu", help="What to measure; cpu only tries it out."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="HARDWARE-profile"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only a coarse part of the measurements.")] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", help="Stop measuring after S seconds.")
    ] = 300.0,
    as_json: o.AsJson = False,
) -> None:
    """Measure this machine's GPUs, as an overlay on a description (needs PyTorch: milpplan[profile])."""
    from milpplan.cli import arguments
    from milpplan.cli import profile as profiling

    arguments.positive(time_limit, "--time-limit", "number of seconds")
    code = profiling.run(hardware, out, source, raw, device, name, quick, time_limit, as_json)
    raise typer.Exit(int(code))


@app.command()
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


@app.command("list")
def list_names(kind: Annotated[str, typer.Argument(metavar="models|hardware")]) -> None:
    """List the models or the hardware that ship with milpplan."""
    from milpplan.cli import arguments
    from milpplan.reports import presets

    tables = {"models": presets.model_table, "hardware": presets.hardware_table}
    show(tables[arguments.choice(kind, "list", tables)]())


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model or hardware, by name or path.")],
) -> None:
    """Print a model or hardware description; a file is checked first, a config.json translated."""
    from milpplan.reports import presets

    emit(presets.description(name))


@app.command()
def schema(
    kind: Annotated[
        str, typer.Argument(metavar="problem|plan|model|hardware|overlay|study|result|explanation")
    ] = "problem",
) -> None:
    """Print the JSON Schema of a file that milpplan reads or writes."""
    import json

    from milpplan.cli import arguments

    emit(json.dumps(arguments.schema_of(kind).model_json_schema(), indent=2) + "\n")


@app.command()
def doctor() -> None:
    """Check the installed solvers on small programs that broken ones have got wrong."""
    from milpplan.optimize.doctor import run_canaries
    from milpplan.reports.canaries import canary_table

    say("Running the canary programs; this takes a few seconds.")
    results = run_canaries()
    show(canary_table(results))
    failed = sum(not result.passed for result in results)
    say(f"{failed} of {len(results)} checks failed." if failed else f"All {len(results)} checks passed.")
    raise typer.Exit(int(ExitCode.INTERNAL_FAILURE if failed else ExitCode.OPTIMAL))
