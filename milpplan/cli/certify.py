"""Certify as a command: the claim of a file, the second proof, the checks, the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milpplan.cli import arguments
from milpplan.cli.outcome import ExitCode, emit, say, show
from milpplan.cli.progress import shown_progress
from milpplan.cli.solving import check_plan_of_file, within_range
from milpplan.errors import InvalidInputError
from milpplan.optimize.backends import AUTO, backend_names
from milpplan.optimize.certify import certify, other_backend
from milpplan.optimize.claim import Claim
from milpplan.optimize.export import write_mps
from milpplan.optimize.program import Program
from milpplan.optimize.result import SolveOptions
from milpplan.reports.certificate import certification_document, certification_report
from milpplan.reports.claims import check_constants
from milpplan.reports.document import ResultDocument, document_text, read_result
from milpplan.reports.spaces import cost_model_text
from milpplan.specs.reading import shown

OF_VERDICT = {
    "certified": ExitCode.OPTIMAL,
    "refuted": ExitCode.BAD_INPUT,
    "unproved": ExitCode.STOPPED_WITH_PLAN,
}


def run(
    path: Path,
    backend: str | None,
    programs: Path | None,
    time_limit_s: float | None,
    seed: int,
    as_json: bool,
) -> ExitCode:
    """Prove the result of a file again."""
    arguments.positive(time_limit_s, "--time-limit", "number of seconds")
    document = read_result(path)
    check_constants(document, path)
    written = None if programs is None else Programs(_folder(programs))
    claim = claim_of(document, path)
    if claim.plan is not None:
        check_plan_of_file(document.problem, claim.plan)
    chosen = other_backend(claim.backend)
    if backend is not None:
        chosen = arguments.choice(backend, "--backend", (AUTO, *backend_names()))
    if chosen == claim.backend:
        say(f"The result is by {chosen} itself: another --backend would say more.")
    with shown_progress(document.problem.job.objective) as callback, within_range():
        options = SolveOptions(
            backend=chosen, time_limit_s=time_limit_s, seed=seed, callback=callback, on_program=written
        )
        done = certify(document.problem, claim, options)
    if done.again is not None and done.again.message:
        say(done.again.message)
    if written is not None:
        say(written.words())
    if as_json:
        emit(document_text(certification_document(done, claim.gap, document.proof)))
    else:
        show(certification_report(done, document.proof))
    return OF_VERDICT[done.verdict]


def _folder(path: Path) -> Path:
    """An empty directory to write into."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInputError(
            f"--programs is {str(path)!r}, which is not an empty directory.",
            "Expected one that is empty or not there yet.",
            "Name another one.",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be made: {error.strerror}.", "Expected a directory.", "Correct --programs."
        ) from error
    return path


@dataclass(slots=True)
class Programs:
    """Writes programs as MPS files into a directory, as they come."""

    folder: Path
    num_written: int = 0
    num_too_fine: int = 0

    def __call__(self, program: Program) -> None:
        """Write one."""
        try:
            write_mps(program, self.folder / f"program-{self.num_written + 1:04}.mps")
        except InvalidInputError:
            self.num_too_fine += 1
        else:
            self.num_written += 1

    def words(self) -> str:
        """How many there are, and what to do with them."""
        if not self.num_written + self.num_too_fine:
            return f"No integer program was needed: bounds and relaxations decided all; {self.folder} is empty."
        lost = f" {self.num_too_fine} with numbers above 1e12 were not written." if self.num_too_fine else ""
        return (
            f"{self.num_written} integer programs written to {self.folder}: each says that nothing lies below a "
            f"bound, so every solver must call it infeasible.{lost}"
        )


def claim_of(document: ResultDocument, path: Path) -> Claim:
    """What a document claims.

    Raises:
        InvalidInputError: nothing, or by another cost model than this one.
    """
    certificate = document.certificate
    assert certificate is not None
    here = cost_model_text(document.problem)
    if certificate.cost_model != here:
        raise InvalidInputError(
            f"{path} was proved for the cost model of {shown(certificate.cost_model)}.",
            f"Expected {here}, which this is.",
            "Install that version, or solve the problem again with this one.",
        )
    backend = document.solver.get("backend")
    if document.status == "no_solution_found" or backend not in (AUTO, *backend_names()):
        raise InvalidInputError(
            f"{path} claims nothing (status {document.status}, backend {shown(backend)}).",
            "Expected a result with a plan and a bound, or one that is proved infeasible.",
            "Solve the problem with more time.",
        )
    plan = None if document.plan is None else document.plan.restored(str(path))
    return Claim(
        status=document.status,
        plan=plan,
        step_time_s=document.step_time_s,
        value=document.objective.value,
        bound=document.objective.bound,
        tolerance=float(document.solver["tolerance"]),
        backend=str(backend),
        legal=document.layouts.legal,
        layouts_sha256=certificate.layouts_sha256,
        forbid=certificate.forbid,
        any_chunks_bound=document.any_chunks.bound if document.any_chunks else None,
    )
