"""The command ``gap``: plans from any file, each judged, the report and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import arguments, command, interrupts
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.commands.compare import short_names
from milpplan.cli.launcher_text import launcher_text
from milpplan.cli.outcome import ExitCode, emit, say, say_error, show_blocks, shown_progress
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.explain.judge.gap import Solves, widened
from milpplan.explain.judge.gap import gap as judge
from milpplan.explain.judge.records import GapReport
from milpplan.launchers import ImportRequest, restrict, target_named
from milpplan.launchers.targets import Launcher
from milpplan.optimize import DEFAULT_GAP
from milpplan.optimize.context import Deadline, undisturbed
from milpplan.problem import HardwareSpec, ModelSpec, Plan, Problem, load_hardware, load_model
from milpplan.problem.calculon.translation import CalculonFiles, calculon_run, notes, read_calculon
from milpplan.problem.catalog import fitted_hardware
from milpplan.problem.problem import SPACES
from milpplan.reports.answers import Failed, Judged, gap_document
from milpplan.reports.answers.gap import gap_blocks, gaps_blocks
from milpplan.reports.documents.document import document_text, read_plan
from milpplan.reports.documents.plan_file import PlanFile, plan_document
from milpplan.reports.files import check_writable, write_whole
from milpplan.reports.html.gap_page import gap_page
from milpplan.reports.html.page_template import require_jinja
from milpplan.reports.words.result_words import constants_text
from milpplan.units import counted

EXAMPLES: Final = (
    ("How far your script is from the best", "run.sh --from megatron --hardware dgx-h100"),
    ("From a pipe, such as a job's command line", "- --from megatron --hardware dgx-h100 < run.sh"),
    ("In money, for a run of 15 trillion tokens", "plan.json --tokens 15e12 --price-per-gpu-hour 2.5"),
)
DECLARED = "declared"
"""Word of ``--space`` for the space that the plan file declares."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE ...",
        help="Plan files; with --from files of a launcher, - for standard input. Several: a table.",
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar=o.LAUNCHERS, help="The launcher whose files these are.")
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar=o.LAUNCHERS,
        help="Also judge by the best that this launcher can run.",
        show_default="that of --from",
    ),
]
Hardware = Annotated[
    str | None, typer.Option("--hardware", metavar="NAME", help="The cluster of a launcher's files.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Their model, checked against them.", show_default="theirs"),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="Their processes.", show_default="theirs")
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", min=1, help="Their vocabulary.", show_default="theirs"),
]
Whole = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="free|uniform|any|declared",
        help="The whole space, as of solve, and the plan's own switches; declared: that of the plan file.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="S", help="Seconds for all plans; more narrows the gaps.")
]
Tokens = Annotated[
    float | None,
    typer.Option("--tokens", metavar="T", help="Tokens of the run, for GPU-hours.", show_default="1e12"),
]
Price = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", metavar="P", help="For amounts of money, in any currency."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Also write a page of figures (milpplan[report])."),
]
Best = Annotated[
    Path | None,
    typer.Option("--out", metavar="PLAN.json", help="Write the best plan known that the launcher can run."),
]


@dataclass(frozen=True, slots=True)
class Source:
    """Options about how the files of the plans are read."""

    launcher: str | None
    target: str | None
    hardware: str | None
    model: str | None
    gpus: int | None
    vocab_size: int | None
    ignore: tuple[str, ...]
    calculon: tuple[Path, Path, Path] | None
    settings: tuple[str, ...] = ()
    arguments: str | None = None
    stack: bool = True


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options about the judgement of every plan, and where the answers go."""

    space: str
    schedule: str | None
    allow: tuple[str, ...]
    time_limit_s: float
    tolerance: float
    tokens: float | None
    price_per_gpu_hour: float | None
    report: Path | None
    out: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A plan to be judged, with the flags and notes of its file.

    ``launched``: it is a launcher's file, so that the problem has the bytes that the launcher's program keeps.
    """

    problem: Problem
    plan: Plan
    unknown_flags: tuple[str, ...] = ()
    ignored_flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    launched: bool = False


def gap(
    files: Files = None,
    source: From = None,
    target: Target = None,
    calculon: o.Calculon = None,
    hardware: Hardware = None,
    model: Model = None,
    gpus: Gpus = None,
    vocab_size: VocabSize = None,
    ignore: o.IgnoreFlag = None,
    settings: o.Settings = None,
    arguments: o.Arguments = None,
    stack: o.Stack = True,
    space: Whole = "free",
    schedule: o.ScheduleNames = None,
    allow: o.Allow = None,
    time_limit: TimeLimit = 60.0,
    tolerance: o.Gap = DEFAULT_GAP,
    tokens: Tokens = None,
    price: Price = None,
    report: Report = None,
    out: Best = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Judge plans that anybody made: how far they are from the proved best, what closes the gap, what it costs.
    Exits with 0 if every gap is proved to the tolerance, 3 if a plan does not fit, 4 if a gap is only proved to a
    range."""
    where = Source(
        source,
        target,
        hardware,
        model,
        gpus,
        vocab_size,
        tuple(ignore or ()),
        calculon,
        tuple(settings or ()),
        arguments,
        stack,
    )
    wanted = Wanted(
        space, schedule, tuple(allow or ()), time_limit, tolerance, tokens, price, report, out, as_json
    )
    return _answer(files or [], where, wanted)


def _answer(files: Sequence[Path], source: Source, wanted: Wanted) -> ExitCode:
    """Judge the plans of files, print and write the answers."""
    _check(files, source, wanted)
    runs_on = source.target or source.launcher
    if runs_on is not None:
        target_named(runs_on, "--target" if source.target else "--from")
    judged: list[Judged] = []
    failed: list[Failed] = []
    solves = Solves(wanted.tolerance)
    deadline, readers = Deadline.after(wanted.time_limit_s), list(_readers(files, source))
    try:
        with (
            shown_progress("step_time_per_token") as solves.callback,
            within_range(),
            interrupts.limited(wanted.time_limit_s),
        ):
            for number, (name, read) in enumerate(readers):
                if number and deadline.passed:
                    break
                # Plans share what is left of the time.
                left_s = deadline.left_s(wanted.time_limit_s) or wanted.time_limit_s
                limited = replace(wanted, time_limit_s=left_s / (len(readers) - number))
                try:
                    judged.append(_judged(name, read(), runs_on, limited, solves))
                except MilpplanError as error:
                    if len(files) < 2:
                        raise
                    failed.append(Failed(name, error))
                if interrupts.asked_to_stop() or (judged and judged[-1].gap.interrupted):
                    say(interrupts.STOPPED)
                    break
    except KeyboardInterrupt:
        if not judged:
            raise
        say(interrupts.STOPPED)
    with undisturbed():
        _print(judged, failed, wanted)
        left = [name for name, _ in readers[len(judged) + len(failed) :]]
        if left:
            say(f"Not judged, for lack of time: {', '.join(left)}.")
    return _exit_code([case.gap for case in judged], bool(failed), bool(left))


def _check(files: Sequence[Path], source: Source, wanted: Wanted) -> None:
    command.positive(wanted.time_limit_s, "--time-limit", "number of seconds")
    command.positive(wanted.tokens, "--tokens", "number of tokens")
    command.positive(wanted.price_per_gpu_hour, "--price-per-gpu-hour", "price")
    command.choice(wanted.space, "--space", (*SPACES, DECLARED))
    if bool(files) == (source.calculon is not None):
        raise InvalidInputError(
            "Plan files are given together with --calculon." if files else "No plan is given.",
            "Expected plan files, a launcher's files with --from, or --calculon with three files.",
            "Name one of them.",
        )
    if len(files) > 1 and wanted.out is not None:
        raise InvalidInputError(
            f"--out is given with {counted(len(files), 'plan')}.",
            "Expected one plan.",
            "Judge the plan by itself.",
        )
    if source.launcher is not None and source.hardware is None:
        raise InvalidInputError(
            "--from is given without --hardware.",
            "Expected the cluster: a launcher's files do not say it.",
            "Add --hardware NAME.",
        )
    named: dict[str, object] = {"--hardware": source.hardware, "--model": source.model, "--gpus": source.gpus}
    named |= {"--vocab-size": source.vocab_size, "--ignore": source.ignore or None}
    named |= {"--set": source.settings or None, "--args": source.arguments}
    beside = [option for option, value in named.items() if value is not None]
    if source.launcher is None and beside:
        raise InvalidInputError(
            f"{' and '.join(beside)} without --from.",
            "Expected such options with a launcher's files only: a plan file says all of it.",
            "Name the launcher with --from, or leave them out.",
        )
    if wanted.report is not None:
        require_jinja()
    for path in (wanted.report, wanted.out):
        if path is not None:
            check_writable(path)


@dataclass(frozen=True, slots=True)
class _Launches:
    """Files of a launcher, all for the same cluster."""

    target: Launcher
    hardware: HardwareSpec
    model: ModelSpec | None
    source: Source

    def read(self, path: Path) -> Case:
        """Read the plan of a file."""
        options = (self.source.gpus, self.model, self.source.vocab_size, list(self.source.ignore))
        text, name, given = launcher_text(path, self.source.settings, self.source.arguments)
        imported = self.target.read(ImportRequest(text, name, self.hardware, *options, given))
        return Case(
            imported.problem,
            imported.plan,
            imported.unknown_flags,
            imported.ignored_flags,
            imported.notes,
            launched=True,
        )


def _readers(files: Sequence[Path], source: Source) -> Iterator[tuple[str, _Reader]]:
    """Pair every plan's name with a function that reads it."""
    if source.calculon is not None:
        yield source.calculon[1].stem, _Reader(None, None, source.calculon)
        return
    launches = None
    if source.launcher is not None:
        target = target_named(source.launcher, "--from")
        model = None if source.model is None else load_model(source.model)
        hardware = load_hardware(str(source.hardware))
        hardware = fitted_hardware(source.launcher, hardware) if source.stack else hardware
        launches = _Launches(target, hardware, model, source)
    for path, name in zip(files, short_names(files), strict=True):
        yield name, _Reader(path, launches, None)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Make the function that reads a plan when its turn comes."""

    path: Path | None
    launches: _Launches | None
    calculon: tuple[Path, Path, Path] | None

    def __call__(self) -> Case:
        if self.calculon is not None:
            return _calculon_case(read_calculon(*self.calculon))
        assert self.path is not None
        if self.launches is not None:
            return self.launches.read(self.path)
        return Case(*_plan_file(self.path))


def _calculon_case(read: CalculonFiles) -> Case:
    """Read an execution of Calculon. GPUs of its networks that it leaves unused are not there for other plans
    either, and a note says so."""
    problem, plan = calculon_run(read)
    remarks, hardware = notes(read), problem.hardware
    pod = 0 if hardware.pods is None else hardware.pods.num_gpus
    joined = (("Domains", hardware.scale_up.num_gpus), ("Pods", pod))
    size = 1
    for (word, used), network in zip(joined, read.system.networks[:-1], strict=False):
        size *= network.size
        if 0 < used < size:
            remarks += (
                f"{word} have {used} processors, as the execution uses networks for {size}: a plan that would use "
                "more of them may be better than the bound says.",
            )
    return Case(problem, plan, notes=remarks)


def _plan_file(path: Path) -> tuple[Problem, Plan]:
    try:
        return read_plan(path)
    except InvalidInputError as error:
        hint = f"{error.do} A launcher's file needs --from.".strip()
        raise InvalidInputError(error.seen, error.expected, hint) from error


def _judged(name: str, case: Case, runs_on: str | None, wanted: Wanted, solves: Solves) -> Judged:
    for what, flags in (("Not known to the launcher", case.unknown_flags), ("Ignored", case.ignored_flags)):
        for flag in flags:
            say(f"{name}: {what}: {flag}")
    for note in case.notes:
        say(f"{name}: Note: {note}")
    check_plan_of_file(case.problem, case.plan)
    if case.plan.layout.replica_micro_batches:
        raise IllegalPlanError(
            "The plan has replicas of different make.",
            "Expected replicas that are alike: single changes of others are not known here.",
            "Ask `milpplan solve --allow replicas --warm-start` for something better.",
        )
    constants = constants_text(case.problem, None, runs_on)
    if constants:
        say(f"{name}: Constants: {constants}.")
    problem = case.problem
    if wanted.space != DECLARED:
        problem = problem.model_copy(update={"space": SPACES[wanted.space]})
    problem = arguments.narrowed(problem, [], wanted.allow, wanted.schedule)
    # A launcher's space has those of the plan's own switches that the launcher has.
    whole = problem.model_copy(update={"space": widened(problem.space, case.plan.layout)})
    runnable = None
    if runs_on is not None:
        # Both spaces, and the plan, are judged on one hardware: that of the launcher's program.
        restricted = restrict(whole, runs_on, stack=False)
        there = problem.hardware if case.launched else restricted.hardware
        problem = problem.model_copy(update={"hardware": there})
        runnable = f"what {runs_on} can run", restricted.model_copy(update={"hardware": there})
    judgement = judge(
        problem,
        case.plan,
        runnable=runnable,
        time_limit_s=wanted.time_limit_s,
        tolerance=wanted.tolerance,
        tokens=wanted.tokens or case.problem.job.training_tokens,
        price_per_gpu_hour=wanted.price_per_gpu_hour,
        solves=solves,
    )
    return Judged(name, judgement, runs_on, case.unknown_flags, case.ignored_flags, case.notes)


def _print(judged: Sequence[Judged], failed: Sequence[Failed], wanted: Wanted) -> None:
    """Print the report, and write the page and the best plan."""
    document = gap_document(judged, failed)
    if wanted.as_json:
        emit(document_text(document))
    elif len(judged) == 1 and not failed:
        show_blocks(gap_blocks(judged[0].gap))
    else:
        show_blocks(gaps_blocks(judged, failed))
    for lost in failed:
        say_error(replace_seen(lost))
    if wanted.out is not None and judged:
        _write_best(judged[0], wanted.out)
    if wanted.report is not None:
        write_whole(wanted.report, gap_page(document, judged))
        say(f"Written to {wanted.report}.")


def replace_seen(lost: Failed) -> MilpplanError:
    """Add the file's name to an error, where there are several files."""
    error = lost.error
    seen = error.seen if lost.name in error.seen else f"{lost.name}: {error.seen}"
    return InvalidInputError(seen, error.expected, error.do)


def _write_best(judged: Judged, out: Path) -> None:
    """Write the fastest known plan that the launcher can run, or of the whole space, as a plan file."""
    space = judged.gap.spaces[0]
    if space.best is None:
        raise IllegalPlanError(
            f"No plan of {space.name} is known.", "Expected one to write.", "Give more time with --time-limit."
        )
    write_whole(out, document_text(PlanFile(plan=plan_document(space.best), problem=space.problem)))
    say(f"Written to {out}.")


def _exit_code(gaps: Sequence[GapReport], any_failed: bool, any_left: bool) -> ExitCode:
    """Combine the exit codes of all plans into the worst: bad input, does not fit, not proved or not judged."""
    if any_failed:
        return ExitCode.BAD_INPUT
    if any(not gap.report.fits for gap in gaps):
        return ExitCode.INFEASIBLE
    return ExitCode.OPTIMAL if all(gap.proved for gap in gaps) and not any_left else ExitCode.STOPPED_WITH_PLAN
