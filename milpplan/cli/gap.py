"""The work of ``gap``: plans from any file, each judged, the report, the page, the exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from milpplan.cli import arguments, interrupts
from milpplan.cli.compare import short_names
from milpplan.cli.launcher_text import launcher_text
from milpplan.cli.outcome import ExitCode, emit, say, say_error, show_blocks
from milpplan.cli.progress import shown_progress
from milpplan.cli.solving import check_plan_of_file, within_range
from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.explain.judge.gap import Solves, gap, widened
from milpplan.explain.judge.records import GapReport
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.restriction import restrict
from milpplan.launchers.targets import Launcher, target_named
from milpplan.optimize.milp.solution import undisturbed
from milpplan.problem.calculon.translation import CalculonFiles, calculon_run, notes, read_calculon
from milpplan.problem.catalog import load_hardware, load_model
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Plan
from milpplan.problem.problem import SPACES, Problem
from milpplan.reports.answers.gap import Failed, Judged, gap_blocks, gap_document, gaps_blocks
from milpplan.reports.documents.document import document_text, read_plan
from milpplan.reports.documents.plan_file import PlanFile, plan_document
from milpplan.reports.files import check_writable, write_whole
from milpplan.reports.html.gap_page import gap_page
from milpplan.reports.html.page_template import require_jinja
from milpplan.units import counted

DECLARED = "declared"
"""Word of ``--space`` for the space that the plan file declares."""


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
    """A plan to be judged, with the flags and notes of its file."""

    problem: Problem
    plan: Plan
    unknown_flags: tuple[str, ...] = ()
    ignored_flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def run(files: Sequence[Path], source: Source, wanted: Wanted) -> ExitCode:
    """Judge the plans of files, print and write the answers."""
    _check(files, source, wanted)
    runs_on = source.target or source.launcher
    if runs_on is not None:
        target_named(runs_on, "--target" if source.target else "--from")
    judged: list[Judged] = []
    failed: list[Failed] = []
    solves = Solves(wanted.tolerance)
    try:
        with shown_progress("step_time_per_token") as solves.callback, within_range():
            for name, read in _readers(files, source):
                try:
                    # The time limit is for each plan.
                    with interrupts.limited(wanted.time_limit_s):
                        judged.append(_judged(name, read(), runs_on, wanted, solves))
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
        _told(judged, failed, wanted)
    return _exit_code([one.gap for one in judged], bool(failed))


def _check(files: Sequence[Path], source: Source, wanted: Wanted) -> None:
    arguments.positive(wanted.time_limit_s, "--time-limit", "number of seconds")
    arguments.positive(wanted.tokens, "--tokens", "number of tokens")
    arguments.positive(wanted.price_per_gpu_hour, "--price-per-gpu-hour", "price")
    arguments.choice(wanted.space, "--space", (*SPACES, DECLARED))
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
        text, name = launcher_text(path, self.source.settings, self.source.arguments)
        found = self.target.read(ImportRequest(text, name, self.hardware, *options))
        return Case(found.problem, found.plan, found.unknown_flags, found.ignored_flags, found.notes)


def _readers(files: Sequence[Path], source: Source) -> Iterator[tuple[str, _Reader]]:
    """Pair every plan's name with a function that reads it."""
    if source.calculon is not None:
        yield source.calculon[1].stem, _Reader(None, None, source.calculon)
        return
    launches = None
    if source.launcher is not None:
        target = target_named(source.launcher, "--from")
        model = None if source.model is None else load_model(source.model)
        launches = _Launches(target, load_hardware(str(source.hardware)), model, source)
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
    told, hardware = notes(read), problem.hardware
    pod = 0 if hardware.pods is None else hardware.pods.num_gpus
    joined = (("Domains", hardware.scale_up.num_gpus), ("Pods", pod))
    size = 1
    for (word, used), network in zip(joined, read.system.networks[:-1], strict=False):
        size *= network.size
        if 0 < used < size:
            told += (
                f"{word} have {used} processors, as the execution uses networks for {size}: a plan that would use "
                "more of them may be better than the bound says.",
            )
    return Case(problem, plan, notes=told)


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
    problem = case.problem
    if wanted.space != DECLARED:
        problem = problem.model_copy(update={"space": SPACES[wanted.space]})
    problem = arguments.narrowed(problem, [], wanted.allow, wanted.schedule)
    # A launcher's space has those of the plan's own switches that the launcher has.
    whole = problem.model_copy(update={"space": widened(problem.space, case.plan.layout)})
    told = gap(
        problem,
        case.plan,
        runnable=None if runs_on is None else (f"what {runs_on} can run", restrict(whole, runs_on)),
        time_limit_s=wanted.time_limit_s,
        tolerance=wanted.tolerance,
        tokens=wanted.tokens or case.problem.job.training_tokens,
        price_per_gpu_hour=wanted.price_per_gpu_hour,
        solves=solves,
    )
    return Judged(name, told, runs_on, case.unknown_flags, case.ignored_flags, case.notes)


def _told(judged: Sequence[Judged], failed: Sequence[Failed], wanted: Wanted) -> None:
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


def _write_best(one: Judged, out: Path) -> None:
    """Write the fastest known plan that the launcher can run, or of the whole space, as a plan file."""
    space = one.gap.spaces[0]
    if space.best is None:
        raise IllegalPlanError(
            f"No plan of {space.name} is known.", "Expected one to write.", "Give more time with --time-limit."
        )
    write_whole(out, document_text(PlanFile(plan=plan_document(space.best), problem=space.problem)))
    say(f"Written to {out}.")


def _exit_code(gaps: Sequence[GapReport], any_failed: bool) -> ExitCode:
    """Combine the exit codes of all plans into the worst: bad input, does not fit, not proved."""
    if any_failed:
        return ExitCode.BAD_INPUT
    if any(not told.report.fits for told in gaps):
        return ExitCode.INFEASIBLE
    return ExitCode.OPTIMAL if all(told.proved for told in gaps) else ExitCode.STOPPED_WITH_PLAN
