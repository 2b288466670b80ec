"""The words of ``milpplan solve`` as a problem, and the solver that suits them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from milpplan.cli import arguments, candidates, solving
from milpplan.cli.calculon import Files, problem_of
from milpplan.cli.length_options import LengthOptions, are_asked
from milpplan.cli.outcome import ExitCode, say
from milpplan.errors import InvalidInputError
from milpplan.optimize.result import SolveOptions
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown

DEFAULT_GAP: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveWords:
    """The command's arguments and options as typer gives them, by the names of its parameters."""

    model: str | None
    hardware: str | None
    ignore: list[str] | None
    gpus: str | None
    global_batch: str | None
    calculon: Files | None
    seq_len: str | None
    precision: str
    attention: str
    grad_dtype: str
    inference: bool
    space: str
    schedule: str | None
    fix: list[str] | None
    allow: list[str] | None
    forbid: list[str] | None
    target: str | None
    target_version: str | None
    price_limit: float
    objective: str
    deadline_hours: float | None
    deadline_days: float | None
    tokens: float | None
    price: str | None
    backend: str
    time_limit: float | None
    gap: float | None
    seed: int
    workers: int | None
    witness: bool
    warm_start: Path | None
    check_ends: bool
    lengths: Path | None
    max_strategies: int | None
    tokens_per_step: int | None
    align: int | None
    padding: bool
    mask: str | None
    buckets: str | None
    bucket_count: int | None
    baselines: bool
    side_by_side: bool | None
    unlike_replicas: bool
    hetu: Path | None
    out: Path | None
    verbose: bool
    as_json: bool

    def problem(self, hardware: str | None) -> Problem:
        """Build the problem on one kind of hardware, with the space that ``--target`` can run."""
        whole = self.whole(hardware)
        if self.target is not None:
            from milpplan.launchers.restriction import restrict

            return restrict(whole, self.target, self.target_version)
        if self.target_version is not None:
            raise InvalidInputError(
                f"--target-version is {shown(self.target_version)}, without --target.",
                "Expected the launcher that it is a version of.",
                "Add --target, or leave --target-version out.",
            )
        return whole

    def whole(self, hardware: str | None) -> Problem:
        """Build the problem on one kind of hardware, for any launcher."""
        named = {"MODEL": self.model, "HARDWARE": hardware}
        fix, allow = self.fix or [], self.allow or []
        return problem_of(self.calculon, named, self.job(), self.space, fix, allow, self.schedule)

    def job(self) -> dict[str, Any]:
        """Collect the options that describe the job."""
        return {
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "precision": self.precision,
            "attention": self.attention,
            "grad_dtype": self.grad_dtype,
            "objective": self.objective,
            "deadline_hours": arguments.deadline_hours(self.deadline_hours, self.deadline_days),
            "tokens": self.tokens,
            "kind": "inference" if self.inference else "training",
            "ignore": self.ignore,
        }

    def lengths_asked(self) -> LengthOptions:
        """Collect the options that describe sequences of several lengths."""
        return LengthOptions(
            path=self.lengths,
            max_strategies=self.max_strategies,
            tokens_per_step=self.tokens_per_step,
            align=self.align,
            padding=self.padding,
            mask=self.mask,
            buckets=self.buckets,
            bucket_count=self.bucket_count,
            baselines=self.baselines,
            side_by_side=self.side_by_side,
            unlike_replicas=self.unlike_replicas,
            hetu=self.hetu,
            seed=self.seed,
        )

    def options(self, problem: Problem) -> SolveOptions:
        """Collect the options of the search."""
        start = None if self.warm_start is None else solving.starting_plan(problem, self.warm_start)
        return SolveOptions(
            backend=self.backend,
            gap=DEFAULT_GAP if self.gap is None else self.gap,
            time_limit_s=self.time_limit,
            seed=self.seed,
            workers=self.workers,
            witness=self.witness,
            warm_start=start,
            forbid=arguments.forbidden_values(self.forbid or []),
        )


def run(words: SolveWords) -> ExitCode:
    """Solve as the words ask, print and write the answer; the exit code says how it ended."""
    if are_asked(words.lengths_asked()):
        return _of_lengths(words)
    names = candidates.names_of(words.hardware)
    price_of = candidates.prices(words.price, names, words.tokens)
    problem = words.problem(names[0] or None)
    options = words.options(problem)
    if len(names) > 1:
        return candidates.run(names, words.problem, price_of, options, words.out, words.as_json, words.verbose)
    whole = words.whole(names[0] or None) if words.target is not None and words.price_limit else None
    asked = solving.Asked(words.check_ends, price_of.get(names[0]), whole, words.price_limit, words.verbose)
    return solving.run(problem, options, words.out, words.as_json, asked)


def _of_lengths(words: SolveWords) -> ExitCode:
    """Solve ``solve --lengths``, the older form of ``solve-lengths``."""
    from milpplan.cli.lengths import refuse
    from milpplan.cli.lengths import solve as solve_lengths

    refuse(
        {
            "--calculon": words.calculon,
            "--allow": words.allow,
            "--forbid": words.forbid,
            "--schedule": words.schedule,
            "--warm-start": words.warm_start,
            "--check-ends": words.check_ends,
            "--price-per-gpu-hour": words.price,
            "--target": words.target,
            "--target-version": words.target_version,
            "--space": words.space != "free",
            "--deadline-hours": words.deadline_hours,
            "--deadline-days": words.deadline_days,
            "--tokens": words.tokens,
            "--no-witness": not words.witness,
        }
    )
    asked = words.lengths_asked()
    named = {"MODEL": words.model, "HARDWARE": words.hardware}
    limits = words.gap, words.time_limit, words.backend, words.workers
    code = solve_lengths(named, words.job(), words.space, words.fix or [], asked, limits, words.out, words.as_json)
    say("`milpplan solve --lengths` is now `milpplan solve-lengths`, with the same options.")
    return code
