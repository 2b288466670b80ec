"""The work of ``solve-lengths``: a step of sequences of several lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milpplan.cli import arguments, interrupts
from milpplan.cli.calculon import problem_of
from milpplan.cli.length_options import LengthOptions, are_asked
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.cli.solving import within_range
from milpplan.errors import InvalidInputError
from milpplan.groups.workload.workload import Workload, read_lengths, step_of, workload_of
from milpplan.lengths.hotspa_export import check_model, hotspa_step
from milpplan.lengths.records import LengthsResult
from milpplan.lengths.sequences import bucketed, least_padding
from milpplan.lengths.solve_lengths import solve_lengths
from milpplan.optimize.milp.backends import AUTO, backend_names, load_solvers
from milpplan.optimize.milp.solution import undisturbed
from milpplan.problem.model import ModelSpec
from milpplan.problem.problem import MAX_BATCH, MAX_SEQUENCE, Problem
from milpplan.reports.answers.lengths import lengths_blocks, lengths_document
from milpplan.reports.files import check_writable, make_directory, write_whole
from milpplan.units import percent_text

DEFAULT_TIME_LIMIT_S = 60.0
DEFAULT_GAP = 0.01
DEFAULT_STRATEGIES = 2
# Maximum of printed ends of buckets.
_SHOWN_ENDS = 16


def need_file(asked: LengthOptions) -> None:
    """Check the options of ``solve-lengths``.

    Raises:
        InvalidInputError: there is no file of lengths, or an option is no positive number.
    """
    if not are_asked(asked):
        raise InvalidInputError("There is no file of lengths.", "Expected --lengths FILE.", "Add --lengths FILE.")


def refuse(options: Mapping[str, object]) -> None:
    """Refuse, by name, the given options of ``solve`` that do not apply to lengths."""
    given = [name for name, value in options.items() if value]
    if given:
        raise InvalidInputError(
            f"--lengths is given together with {' and '.join(given)}.",
            "Expected lengths with a model, a cluster, formats, --fix, --gap, --time-limit and --backend.",
            "Leave the other options out.",
        )


def workload(options: LengthOptions, model: ModelSpec, batch: str | None, cut: str | None) -> Workload:
    """Read the sequences of the step: the first of the file, or drawn from its histogram or law. Longer sequences
    are ``cut``, and all are padded to their buckets, if there are any."""
    longest = None if cut is None else arguments.whole(cut, "--seq-len", MAX_SEQUENCE)
    number = None if batch is None else arguments.whole(batch, "--global-batch", MAX_BATCH)
    assert options.path is not None
    drawn = read_lengths(options.path, number, options.seed, options.tokens_per_step)
    found = workload_of(step_of(drawn, number, options.tokens_per_step, longest), options.alignment, longest)
    ends = _ends(options, model, found)
    if ends is None:
        return found
    padded = bucketed(found, ends, options.alignment)
    share = percent_text(1.0 - found.num_tokens / padded.num_tokens)
    more = f" and {len(ends) - _SHOWN_ENDS:,} more" if len(ends) > _SHOWN_ENDS else ""
    shown = ", ".join(f"{end:,}" for end in ends[:_SHOWN_ENDS])
    say(f"Buckets end at {shown}{more}: {share} of the tokens are padding.")
    return padded


def _ends(options: LengthOptions, model: ModelSpec, found: Workload) -> list[int] | None:
    """Find the ends of the buckets, given or the best; None without buckets."""
    if options.buckets is not None and options.bucket_count is not None:
        raise InvalidInputError(
            "Both --buckets and --bucket-count are given.", "Expected one of them.", "Leave out the other."
        )
    if options.buckets is not None:
        return [arguments.whole(word, "--buckets", MAX_SEQUENCE) for word in options.buckets.split(",")]
    if options.bucket_count is None:
        return None
    best = least_padding(model, found, options.bucket_count, options.rules.mask)
    return [int(end) for end in best]


def solve(
    named: Mapping[str, str | None],
    job: Mapping[str, Any],
    space: str,
    fix: list[str],
    options: LengthOptions,
    limits: tuple[float | None, float | None, str, int | None],
    out: Path | None,
    as_json: bool,
) -> ExitCode:
    """Solve the step, print and write the answer; ``limits``: gap, seconds, backend, processes."""
    gap, time_limit_s, backend, workers = limits
    gap = DEFAULT_GAP if gap is None else gap
    arguments.positive(time_limit_s, "--time-limit", "number of seconds")
    arguments.choice(backend, "--backend", (AUTO, *backend_names()))
    if not 0 <= gap < 1:
        raise InvalidInputError(f"--gap is {gap}.", "Expected a share from 0 to below 1.", "Correct --gap.")
    problem = problem_of(None, named, {**job, "global_batch": "1", "seq_len": None}, space, fix)
    lengths = workload(options, problem.model, job["global_batch"], job["seq_len"])
    if out is not None:
        check_writable(out)
    if options.hetu is not None:
        _check_hetu(options, problem)
        make_directory(options.hetu, "--hetu")
    strategies = DEFAULT_STRATEGIES if options.max_strategies is None else options.max_strategies
    seconds = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
    with interrupts.leaving():
        load_solvers()
    with within_range():
        result = solve_lengths(
            problem,
            lengths,
            options.alignment,
            strategies,
            gap,
            seconds,
            backend,
            options.baselines,
            rules=options.rules,
            side_by_side=options.side_by_side,
            unlike_replicas=options.unlike_replicas,
            workers=workers,
        )
    with undisturbed():
        return _told(problem, result, options, out, as_json)


def _told(
    problem: Problem, result: LengthsResult, options: LengthOptions, out: Path | None, as_json: bool
) -> ExitCode:
    """Print and write the step."""
    document = lengths_document(result) if as_json or out is not None else ""
    if as_json:
        emit(document)
    else:
        show_blocks(lengths_blocks(result))
    if out is not None:
        write_whole(out, document)
        say(f"Written to {out}.")
    if options.hetu is not None:
        _write_hetu(problem, result, options.hetu)
    return OF_STATUS[result.status]


def _check_hetu(options: LengthOptions, problem: Problem) -> None:
    """Refuse, before the search, a model or a space whose steps HotSPa's runtime cannot run."""
    check_model(problem.model)
    needed = {
        "degrees side by side": ("--turns-only", options.side_by_side is not False),
        "padding": ("no --padding", options.padding),
        "unlike replicas": ("no --unlike-replicas", options.unlike_replicas),
        "context parallelism": ("--fix cp=1", problem.space.cp != (1,)),
    }
    wrong = {what: help_ for what, (help_, is_wrong) in needed.items() if is_wrong}
    if wrong:
        raise InvalidInputError(
            f"--hetu is given, and the space has {' and '.join(wrong)}.",
            "Expected packed strategies in turn of tp, pp and dp: HotSPa's runtime runs nothing else.",
            f"Solve with {', '.join(wrong.values())}.",
        )


def _write_hetu(problem: Problem, result: LengthsResult, folder: Path) -> None:
    """Write the files of HotSPa's runtime, and print what they leave out."""
    step = hotspa_step(problem, result)
    places = {folder / name: text for name, text in step.launch.files.items()}
    for place in places:
        make_directory(place.parent, "--hetu")
        check_writable(place)
    for place, text in places.items():
        write_whole(place, text)
        say(f"Written to {place}.")
    for note in step.notes:
        say(f"Note: {note}")
