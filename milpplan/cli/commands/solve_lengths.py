"""The command ``solve-lengths``: a step of sequences of several lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from milpplan.cli import command, interrupts
from milpplan.cli import options as o
from milpplan.cli.arguments import problem_of, within_range
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show_blocks
from milpplan.cli.solve_options import DEFAULTS, LengthOptions, SolveWords, are_asked
from milpplan.errors import InvalidInputError
from milpplan.lengths import LengthsResult, bucketed, check_model, least_padding
from milpplan.lengths.dispatch import HybridSchedule, check_runtime
from milpplan.lengths.hotspa_export import hotspa_step
from milpplan.lengths.solve_lengths import solve_lengths as solve_step
from milpplan.lengths.workload import (
    Workload,
    read_lengths,
    step_of,
    workload_of,
)
from milpplan.optimize.context import undisturbed
from milpplan.optimize.milp.backends import AUTO, backend_names, load_solvers
from milpplan.problem import ModelSpec, Problem
from milpplan.problem.problem import MAX_BATCH, MAX_SEQUENCE
from milpplan.reports import write_whole
from milpplan.reports.answers.lengths import lengths_blocks, lengths_document
from milpplan.reports.files import check_writable, make_directory
from milpplan.units import percent_text

EXAMPLES: Final = (
    (
        "The best step for sequences of several lengths",
        "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt",
    ),
    (
        "With one strategy, beside the rules of HotSPa and FlexSP",
        "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt --max-strategies 1 --baselines",
    ),
)
DEFAULT_TIME_LIMIT_S = 60.0
DEFAULT_GAP = 0.01
DEFAULT_STRATEGIES = 2
SHOWN_ENDS = 16
"""Maximum of printed ends of buckets."""


NOT_ASKED: Final = {
    name: value
    for name, value in DEFAULTS.items()
    if name
    not in (
        *("model", "hardware", "gpus", "global_batch", "seq_len", "precision", "fix", "time_limit", "out", "job"),
        *("ignore", "attention", "grad_dtype", "memory_margin", "gap", "backend", "seed", "as_json"),
    )
}
"""Values of ``solve``'s options that are no options of a step of several lengths."""


def solve_lengths(
    *,
    time_limit: o.LengthsTimeLimit = None,
    lengths: LengthOptions,
    gap: o.LengthsGap = None,
    words: Annotated[SolveWords, NOT_ASKED],
) -> ExitCode:
    """Find the best step for sequences of several lengths: which strategies run which sequences, in turn or side
    by side, with a proved bound."""
    if not are_asked(lengths):
        raise InvalidInputError("There is no file of lengths.", "Expected --lengths FILE.", "Add --lengths FILE.")
    return answer_lengths(words, lengths)


def workload(options: LengthOptions, model: ModelSpec, batch: str | None, cut: str | None) -> Workload:
    """Read the sequences of the step: the first of the file, or drawn from its histogram or law. Longer sequences
    are ``cut``, and all are padded to their buckets, if there are any."""
    longest = None if cut is None else command.whole(cut, "--seq-len", MAX_SEQUENCE)
    number = None if batch is None else command.whole(batch, "--global-batch", MAX_BATCH)
    assert options.lengths is not None
    drawn = read_lengths(options.lengths, number, options.seed, options.tokens_per_step)
    sequences = workload_of(step_of(drawn, number, options.tokens_per_step, longest), options.alignment, longest)
    ends = _ends(options, model, sequences)
    if ends is None:
        return sequences
    padded = bucketed(sequences, ends, options.alignment)
    share = percent_text(1.0 - sequences.num_tokens / padded.num_tokens)
    rest = f" and {len(ends) - SHOWN_ENDS:,} more" if len(ends) > SHOWN_ENDS else ""
    shown = ", ".join(f"{end:,}" for end in ends[:SHOWN_ENDS])
    say(f"Buckets end at {shown}{rest}: {share} of the tokens are padding.")
    return padded


def _ends(options: LengthOptions, model: ModelSpec, sequences: Workload) -> list[int] | None:
    """Find the ends of the buckets, given or the best; None without buckets."""
    if options.buckets is not None and options.bucket_count is not None:
        raise InvalidInputError(
            "Both --buckets and --bucket-count are given.", "Expected one of them.", "Leave out the other."
        )
    if options.buckets is not None:
        return [command.whole(word, "--buckets", MAX_SEQUENCE) for word in options.buckets.split(",")]
    if options.bucket_count is None:
        return None
    best = least_padding(model, sequences, options.bucket_count, options.rules.mask)
    return [int(end) for end in best]


def answer_lengths(words: SolveWords, options: LengthOptions) -> ExitCode:
    """Solve the step, print and write the answer."""
    gap = DEFAULT_GAP if words.gap is None else words.gap
    command.positive(words.time_limit, "--time-limit", "number of seconds")
    command.choice(words.backend, "--backend", (AUTO, *backend_names()))
    if not 0 <= gap < 1:
        raise InvalidInputError(f"--gap is {gap}.", "Expected a share from 0 to below 1.", "Correct --gap.")
    job = words.job_words() | {"global_batch": "1", "seq_len": None}
    problem = problem_of(words.model, words.hardware, job, words.space, words.fix or [])
    lengths = workload(options, problem.model, words.global_batch, words.seq_len)
    if words.out is not None:
        check_writable(words.out)
    if options.hetu is not None:
        _check_hetu(options, problem)
        make_directory(options.hetu, "--hetu")
    if options.megatron is not None:
        _check_megatron(options, problem)
        make_directory(options.megatron, "--megatron")
    strategies = DEFAULT_STRATEGIES if options.max_strategies is None else options.max_strategies
    seconds = DEFAULT_TIME_LIMIT_S if words.time_limit is None else words.time_limit
    with interrupts.leaving():
        load_solvers()
    with within_range():
        result = solve_step(
            problem,
            lengths,
            options.alignment,
            strategies,
            gap,
            seconds,
            words.backend,
            options.baselines,
            rules=options.rules,
            side_by_side=options.side_by_side,
            unlike_replicas=options.unlike_replicas,
        )
    with undisturbed():
        return _print(problem, result, options, words.out, words.as_json)


def _print(
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
    if options.megatron is not None:
        _write_megatron(problem, result, options.megatron)
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
    _refuse_space(
        "--hetu", needed, "packed strategies in turn of tp, pp and dp: HotSPa's runtime runs nothing else"
    )


def _refuse_space(option: str, needed: dict[str, tuple[str, bool]], expected: str) -> None:
    """Refuse a space with something that the runtime of an option does not know; ``needed`` has what would narrow
    it, and whether that is missing."""
    wrong = {what: help_ for what, (help_, is_wrong) in needed.items() if is_wrong}
    if wrong:
        raise InvalidInputError(
            f"{option} is given, and the space has {' and '.join(wrong)}.",
            f"Expected {expected}.",
            f"Solve with {', '.join(wrong.values())}.",
        )


def _write_hetu(problem: Problem, result: LengthsResult, folder: Path) -> None:
    """Write the files of HotSPa's runtime, and print what they leave out."""
    step = hotspa_step(problem, result)
    files = {folder / name: text for name, text in step.launch.files.items()}
    for path in files:
        make_directory(path.parent, "--hetu")
        check_writable(path)
    for path, text in files.items():
        write_whole(path, text)
        say(f"Written to {path}.")
    for note in step.notes:
        say(f"Note: {note}")


def _check_megatron(options: LengthOptions, problem: Problem) -> None:
    """Refuse, before the search, a space whose steps Megatron-LM's hybrid context parallelism cannot run."""
    check_runtime(problem)
    needed = {
        "strategies in turn only": ("no --turns-only", options.side_by_side is False),
        "padding": ("no --padding", options.padding),
        "unlike replicas": ("no --unlike-replicas", options.unlike_replicas),
    }
    _refuse_space("--megatron", needed, "packed degrees side by side: the runtime runs nothing else")


def _write_megatron(problem: Problem, result: LengthsResult, folder: Path) -> None:
    """Write the scheduler for Megatron-LM, and print what its micro-batches cost."""
    if not result.is_side_by_side:
        say("Note: the best step has no degrees side by side, so nothing is written for Megatron-LM.")
        return
    schedule = HybridSchedule(problem, result)
    lengths = [length for group in result.groups for length, count in group.buckets for _ in range(count)]
    files = {folder / name: text for name, text in schedule.files(lengths_document(result)).items()}
    for path in files:
        check_writable(path)
    for path, text in files.items():
        write_whole(path, text)
        say(f"Written to {path}.")
    planned_s, alone_s = schedule.times_s(lengths)
    say(
        f"Note: Megatron-LM runs every sequence as a micro-batch of its own: {alone_s:.3f} s for these sequences. "
        f"A dispatcher with larger micro-batches takes {planned_s:.3f} s."
    )
