"""The command ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file
from milpplan.cli.outcome import ExitCode, emit, say
from milpplan.errors import IllegalPlanError
from milpplan.launchers import target_named
from milpplan.launchers.scripts import JOBS, job_files
from milpplan.launchers.targets import launch_document, restrict, run_by, version_of
from milpplan.problem import Plan, Problem
from milpplan.reports.documents.claims import result_in
from milpplan.reports.documents.document import read_plan
from milpplan.reports.files import make_directory, write_all
from milpplan.simulation import simulate
from milpplan.units import GIB
from milpplan.version import __version__

EXAMPLES: Final = (
    ("Scripts for torchrun and Slurm in the directory launch", "plan.json --to megatron -o launch"),
    ("A job of Kubeflow instead of Slurm", "plan.json --to megatron --job kubeflow -o launch"),
    ("An older release", "plan.json --to torchtitan --target-version 0.2.2 -o launch"),
)


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    to: Annotated[str, typer.Option("--to", metavar=o.LAUNCHERS, help="The launcher.")],
    target_version: Annotated[
        str | None,
        typer.Option("--target-version", metavar="V", help="Its version.", show_default="the newest known"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE|DIR",
            help="Write the script here; into a directory (a name without suffix) all.",
        ),
    ] = None,
    job: Annotated[
        str, typer.Option("--job", metavar="|".join(JOBS), help="Scheduler that the job file is for.")
    ] = "slurm",
    job_minutes: Annotated[
        int | None,
        typer.Option("--job-minutes", metavar="N", min=1, help="Time limit of the job.", show_default="none"),
    ] = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Write the files that start a plan with a launcher, checked against the launcher's own rules."""
    target = target_named(to, "--to")
    version = version_of(target.capability, target_version)
    problem, decided = read_plan(plan)
    check_plan_of_file(problem, decided)
    # A script that somebody launches for weeks is not made from a result that somebody has changed.
    result_in(plan)
    try:
        launch = target.export(problem, decided, version)
    except IllegalPlanError as error:
        if not target.capability.complete or not _can_run(problem, to, version):
            raise
        whole = f"{error.do} Or solve with --target {to} for the best plan that it can run."
        raise IllegalPlanError(error.seen, error.expected, whole.strip()) from error
    files = target.files(launch, __version__)
    files |= job_files(job, launch, __version__, files, problem.hardware.name, job_minutes)
    if out is not None:
        _write(files, out)
    if as_json:
        emit(launch_document(launch))
    elif out is None:
        emit(next(iter(files.values())))
    for note in (*_own_bytes(to, version, problem, decided), *launch.notes):
        say(f"Note: {note}")
    return ExitCode.OPTIMAL


def _can_run(problem: Problem, to: str, version: str) -> bool:
    """Return True unless the launcher can run no plan of the problem."""
    try:
        restrict(problem, to, version)
    except IllegalPlanError:
        return False
    return True


def _own_bytes(to: str, version: str, problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Say that a plan does not fit where its layers keep what those of the launcher's program do."""
    own = target_named(to, "--to").capability.program(version)
    if not own or (report := simulate(run_by(to, version, problem), plan)).fits:
        return ()
    words = ", ".join(f"{name} {value}" for name, value in own.items())
    peak, usable = (number / GIB for number in (report.peak_memory_bytes, report.usable_memory_bytes))
    return (
        f"It does not fit: this program keeps more of a layer than the plan counts ({words}), and its peak is "
        f"{peak:.1f} GiB of {usable:.1f}. Solve with --target {to}.",
    )


def _write(files: dict[str, str], out: Path) -> None:
    """Write all files into a directory, or the first file to a path; write nothing unless all can be written."""
    into = out.is_dir() or not (out.suffix or out.exists())
    texts = {out / name: text for name, text in files.items()} if into else {out: next(iter(files.values()))}
    if into:
        make_directory(out, "--out", parents=False)
    write_all(texts)
    for path in texts:
        say(f"Written to {path}.")
