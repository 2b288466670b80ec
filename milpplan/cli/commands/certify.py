"""The command ``certify``: a result, built again from its problem and its plan, and a second proof.

Nothing is believed but what a result is about: its problem, plan and forbidden layouts, the tolerance and price
that were asked for, the other plans that it compares with, and its bounds, which the second proof must reach. All
else is built again by what ``solve`` builds it with, and compared field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.calibration import joint_end
from milpplan.calibration.error_bars import ENDS
from milpplan.cli import command, interrupts
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks, shown_progress
from milpplan.cli.solving import compared, evidence_of, interrupted_diagnosis, uncertainty
from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.explain import run_totals
from milpplan.launchers import restrict
from milpplan.optimize import (
    Certification,
    ClaimedResult,
    PlanResult,
    SecondProofs,
    SolveOptions,
    explain,
    objective_weights,
    other_backend,
)
from milpplan.optimize.certify import ROUNDING, listed_problem, objective_of
from milpplan.optimize.certify import certify as certify_claim
from milpplan.optimize.context import Deadline, has_one_step_time, objective_per_second, printed_unit, undisturbed
from milpplan.optimize.milp.backends import AUTO, backend_names
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.write_program import WRITERS, write_mps
from milpplan.optimize.records import Check, FastestPlan, SolverWork, Status, TargetPrice, Verdict
from milpplan.optimize.solve import MARGIN_PRICE_GAP, without_margin
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import check_forbidden
from milpplan.optimize.space.plan_space import in_space
from milpplan.problem import Plan, Problem
from milpplan.problem.reading import shown
from milpplan.reports.answers.solve import program_text
from milpplan.reports.documents.certificate import (
    NOTHING,
    certificate_for,
    certification_blocks,
    certification_document,
    digest,
)
from milpplan.reports.documents.claims import Difference, check_constants, differences, layouts_again, miscounted
from milpplan.reports.documents.document import (
    ResultDocument,
    document_text,
    read_result,
    refuse_unproved,
    result_document,
    with_parts,
)
from milpplan.reports.documents.fields import PriceDocument
from milpplan.reports.words.plan_words import cost_model_text
from milpplan.simulation import LayoutColumns, StepReport, simulate, usable_memory_bytes
from milpplan.units import counted
from milpplan.version import __version__

EXAMPLES: Final = (("Prove a result again with another solver", "plan.json"),)
OF_VERDICT = {
    "certified": ExitCode.OPTIMAL,
    "refuted": ExitCode.BAD_INPUT,
    "unproved": ExitCode.STOPPED_WITH_PLAN,
}
UNCONFIRMED = ("certificate.versions", "infeasible")
"""Fields about the surroundings of the run: different ones do not refute a result, but are not confirmed."""
SHOWN_DIFFERENCES = 3


@dataclass(slots=True)
class Programs:
    """Writer of programs as MPS files into a directory, in the order in which they come."""

    folder: Path
    num_written: int = 0
    num_too_fine: int = 0

    def __call__(self, program: Program) -> None:
        """Write a program."""
        try:
            write_mps(program, self.folder / f"program-{self.num_written + 1:04}.mps")
        except InvalidInputError:
            self.num_too_fine += 1
        else:
            self.num_written += 1

    def words(self) -> str:
        """Say how many files there are, and what to do with them."""
        if not self.num_written + self.num_too_fine:
            return f"No integer program was needed: bounds and relaxations decided all; {self.folder} is empty."
        lost = f" {self.num_too_fine} with numbers above 1e12 were not written." if self.num_too_fine else ""
        return (
            f"{counted(self.num_written, 'integer program')} written to {self.folder}: each says that nothing "
            f"lies below a bound, so every solver must call it infeasible.{lost}"
        )


@dataclass(frozen=True, slots=True)
class Certified:
    """A certification, and the sentence about what it certifies."""

    certification: Certification
    proof: str = NOTHING


def certify(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What `solve --out` or `--json` wrote.")],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="auto|cpsat|cbc|highs|scip", help="Solver.", show_default="not the result's own"
        ),
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option(
            "--programs", metavar="DIR", help="Also write the integer programs as MPS, for any other solver."
        ),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program",
            metavar="FILE.mps|FILE.lp",
            help="Also state the whole answer as one integer program, solve it, and write it.",
        ),
    ] = None,
    time_limit: o.TimeLimit = None,
    seed: o.Seed = 1,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Prove a result again with another solver, without trusting the run that made it. Exits with 0 if it is
    certified, 2 if it is refuted or was changed, 4 if the second proof does not reach the bound."""
    command.positive(time_limit, "--time-limit", "number of seconds")
    deadline = Deadline.after(time_limit)
    document = read_result(result)
    check_constants(document, result)
    file = None if program is None else command.program_file(program, "--program")
    written = None if programs is None else Programs(_folder(programs))
    own = document.solver.backend
    chosen = other_backend(own)
    if backend is not None:
        chosen = command.choice(backend, "--backend", (AUTO, *backend_names()))
    if chosen == own:
        say(f"The result is by {chosen} itself: another --backend would say more.")
    objective = document.problem.job.objective
    ended: list[Certified] = []
    with (
        interrupts.keeping(ended),
        shown_progress(objective) as callback,
        within_range(),
        interrupts.limited(deadline.left_s()),
    ):
        options = SolveOptions(
            backend=chosen,
            time_limit_s=deadline.left_s(),
            seed=seed,
            callback=callback,
            on_program=written,
            cancelled=interrupts.asked_to_stop,
        )
        ended.append(certified(document, str(result), SecondProofs.by(options)))
        if file is not None and ended[0].certification.verdict == "certified":
            ended[0] = _as_one_program(ended[0], options, deadline.left_s(), file)
    answer, done = ended[0], ended[0].certification
    with undisturbed():
        if done.again is not None and done.again.message:
            say(done.again.message)
        if written is not None:
            say(written.words())
        if as_json:
            emit(document_text(certification_document(done, document.gap, answer.proof)))
        else:
            show_blocks(certification_blocks(done, answer.proof))
    return OF_VERDICT[done.verdict]


def _as_one_program(answer: Certified, options: SolveOptions, left_s: float | None, file: Path) -> Certified:
    """State the answer of the second proof as one integer program, write it, and check that its optimum agrees."""
    again = answer.certification.again
    if again is None or again.plan is None:
        raise InvalidInputError(
            "The result has no plan.", "The one program states an answer with a plan.", "Leave out --program."
        )
    solved = solve_block_program(again, options, left_s)
    for path in WRITERS[file.suffix](solved.program, file):
        say(f"Written to {path}.")
    check = Check("the answer as one integer program", solved.agrees, program_text(solved))
    return replace(answer, certification=_with(answer.certification, iter([(check, "unproved")])))


def _folder(path: Path) -> Path:
    """Make an empty directory to write into."""
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


def certified(document: ResultDocument, source: str, proofs: SecondProofs) -> Certified:
    """Build a result again, compare all of it, and prove its bounds again.

    Args:
        document: the result.
        source: names it in messages.
        proofs: second proofs, by the options for them; they may be known already.

    Raises:
        InvalidInputError: it claims nothing, or by another version or cost model than this one.
        IllegalPlanError: its plan is none for its problem.
    """
    _check_claims(document, source)
    claim = claim_of(document, source)
    certificate = document.certificate
    assert certificate is not None
    if certificate.problem_sha256 != digest(document.problem):
        check = Check("digest of the problem", False, "not that of the certificate")
        done = Certification((check,), proofs.options.backend, None, "refuted")
        return Certified(done)
    if claim.plan is not None:
        check_plan_of_file(document.problem, claim.plan)
    try:
        built = rebuilt(document, claim, source)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # A price of 1e300 has an infinite cost, and forbidden layouts may name unknown fields. Whatever
        # a solve wrote can be built again, so a result that cannot be was not written by one.
        check = Check("every field computed again", False, "values that no result has")
        return Certified(Certification((check,), proofs.options.backend, None, "refuted"))
    wrong = differences(document, built)
    unconfirmed = [difference for difference in wrong if difference.field.startswith(UNCONFIRMED)]
    counts = miscounted(document)
    before = (
        _compared([difference for difference in wrong if difference not in unconfirmed]),
        Check("counts of layouts add up", counts is None, counts or counted(document.layouts.legal, "layout")),
    )
    if not all(check.passed for check in before):
        return Certified(Certification(before, proofs.options.backend, None, "refuted"))
    done = certify_claim(document.problem, claim, proofs.options, proofs)
    done = replace(done, checks=(*before, *done.checks))
    if done.verdict == "certified":
        done = _with(done, _others_proved(document, claim, proofs))
    if done.verdict == "certified" and unconfirmed:
        done = _with(done, iter([(_unconfirmed(unconfirmed), "unproved")]))
    return Certified(done, built.proof if done.verdict == "certified" else NOTHING)


def _with(done: Certification, checks_left: Iterator[tuple[Check, Verdict]]) -> Certification:
    """Add checks to a certification, up to the first that fails."""
    for check, failing in checks_left:
        done = replace(done, checks=(*done.checks, check))
        if not check.passed:
            return replace(done, verdict=failing)
    return done


def _compared(wrong: list[Difference]) -> Check:
    named = "; ".join(map(_words_of, wrong[:SHOWN_DIFFERENCES]))
    rest = f"; and {len(wrong) - SHOWN_DIFFERENCES} more" if len(wrong) > SHOWN_DIFFERENCES else ""
    return Check("every field computed again", not wrong, named + rest or "all agree")


def _words_of(difference: Difference) -> str:
    """Describe a difference without the document's own words, which may be forged."""
    number = isinstance(difference.claimed, int | float)
    claimed = f"is {difference.claimed} in the file" if number else "is something else in the file"
    return f"{difference.field} {claimed}, {shown(difference.built)} computed again"


def _unconfirmed(unconfirmed: list[Difference]) -> Check:
    return Check("what the run ran on and advised", False, "; ".join(map(_words_of, unconfirmed)))


def _check_claims(document: ResultDocument, source: str) -> None:
    """Refuse a document that this version cannot prove again."""
    certificate = document.certificate
    assert certificate is not None
    here = cost_model_text(document.problem)
    for seen, expected in ((certificate.cost_model, here), (document.milpplan_version, __version__)):
        if seen != expected:
            raise InvalidInputError(
                f"{source} was proved for the cost model of {shown(seen)}.",
                f"Expected {expected}, which this is.",
                "Install that version, or solve the problem again with this one.",
            )
    refuse_unproved(document, source)
    backend = document.solver.backend
    if backend not in (AUTO, *backend_names()):
        raise InvalidInputError(
            f"{source} is by the backend {shown(backend)}, which is not here.",
            f"Expected one of {', '.join((AUTO, *backend_names()))}.",
            "Install the plug-in that has it, or solve the problem again.",
        )
    check_forbidden(certificate.forbid)


def claim_of(document: ResultDocument, source: str) -> ClaimedResult:
    """Read the claims of a document.

    Raises:
        InvalidInputError: its plan is not well-formed.
    """
    certificate = document.certificate
    assert certificate is not None
    return ClaimedResult(
        status=document.status,
        plan=None if document.plan is None else document.plan.restored(source),
        step_time_s=document.step_time_s,
        value=document.objective.value,
        bound=document.objective.bound,
        tolerance=document.solver.tolerance,
        backend=document.solver.backend,
        legal=document.layouts.legal,
        layouts_sha256=certificate.layouts_sha256,
        forbid=certificate.forbid,
        any_chunks_bound=document.any_chunks.bound if document.any_chunks else None,
        lower_bound_s=document.lower_bound_s,
        strength=document.solver.proof,
    )


def rebuilt(document: ResultDocument, claim: ClaimedResult, source: str) -> ResultDocument:
    """Build a result again from its problem and the bounds that it claims.

    Raises:
        InvalidInputError: one of its other plans is not well-formed.
        IllegalPlanError: one of its other plans is not legal for its problem.
    """
    problem = document.problem
    result = _result_again(document, claim, source)
    space = layout_space(listed_problem(problem, claim.plan), claim.forbid)
    ends = {} if document.robustness is None else {end.end: end for end in document.robustness.ends}

    def claimed_end(there: Problem) -> tuple[Plan | None, float | None]:
        """Return the document's plan and bound for the solve at an end."""
        end = ends[next(name for name, _ in ENDS if joint_end(problem, name) == there)]
        if end.solved is None or (end.lower_bound_s is None and has_one_step_time(problem)):
            raise ValueError("an end that was solved again has a plan and a bound")
        plan, known_s = end.solved.restored(source), (end.best_s, end.rival_s)
        best_s = min(seconds for seconds in known_s if seconds is not None)
        slower = simulate(there, plan).step_time_s > best_s * (1.0 + claim.tolerance)
        if slower and has_one_step_time(problem):
            raise ValueError("the best plan of an end is one of the plans looked at there")
        return plan, end.lower_bound_s

    solved = document.robustness is not None and document.robustness.solved_again and len(ends) == len(ENDS)
    bar, robust = uncertainty(result, claimed_end if solved else None)
    known = None if document.evidence is None else evidence_of(result)
    robust = None if document.robustness is None else robust
    totals = run_totals(result, None if document.run is None else document.run.price_per_gpu_hour)
    built = result_document(
        result,
        claim.tolerance,
        None if document.infeasible is None or result.plan is not None else _explained(document, claim),
        None if document.error_bar is None else bar,
        robust,
        known,
        None if document.run is None else totals,
        compared(result, robust, known) if document.runners_up else (),
    )
    assert document.certificate is not None
    certificate = certificate_for(problem, space.sha256(), claim.forbid)
    built = built.model_copy(
        update={
            "layouts": layouts_again(
                document.layouts, len(space), space.enumerated, dict(space.rejected), result.plan is not None
            ),
            "log": document.log,
            "certificate": certificate.model_copy(update={"sha256": document.certificate.sha256}),
        }
    )
    return with_parts(built)


def _explained(document: ResultDocument, claim: ClaimedResult) -> MilpplanError:
    """Explain why there is no plan; None if the explanation was interrupted."""
    said = document.infeasible
    if said is not None and (said.seen, said.expected, said.do) == _words(interrupted_diagnosis()):
        return interrupted_diagnosis()
    return explain(document.problem, claim.forbid)


def _words(error: MilpplanError) -> tuple[str, str, str]:
    return error.seen, error.expected, error.do


def _result_again(document: ResultDocument, claim: ClaimedResult, source: str) -> PlanResult:
    """Build the result with the claimed plan and bounds; fields that are not certified are the document's."""
    problem, plan = document.problem, claim.plan
    report = None if plan is None else simulate(problem, plan)
    value = None if plan is None or report is None else objective_of(problem, plan, report)
    bound = None if value is None else claim.bound
    gap = None if value is None or bound is None else max(0.0, (value - bound) / value)
    fewest = problem.job.objective == "num_gpus"
    status = _status("infeasible" if plan is None else "feasible", gap, claim.tolerance)
    usable = usable_memory_bytes(problem) if report is None else report.usable_memory_bytes
    made = document.solver
    result = PlanResult(
        status=status,
        problem=problem,
        plan=plan,
        report=report,
        objective_name="num_gpus" if fewest else printed_unit(problem)[1],
        objective=value,
        objective_bound=bound,
        lower_bound_s=_step_bound(problem, claim, report),
        gap=gap,
        rejected={},
        enumerated=0,
        layouts=None,
        log=(),
        work=SolverWork.of(made, made.backend, made.versions, status),
        wall_time_s=document.wall_time_s,
        runners_up=_other_plans(document, claim, source),
        any_chunks_bound=claim.any_chunks_bound if value is not None else None,
        forbid=claim.forbid,
        details={"usable_memory_bytes": usable},
        fastest=_fastest(document, claim, report, source),
    )
    return replace(
        result,
        target_price=_target_price(document, result, claim, source),
        margin_price=_margin_price(document, result, claim, source),
    )


def _status(without: Status, gap: float | None, tolerance: float) -> Status:
    return "optimal" if gap is not None and gap <= tolerance * (1 + ROUNDING) else without


def _step_bound(problem: Problem, claim: ClaimedResult, report: StepReport | None) -> float | None:
    """Bound of the step time: the objective's in seconds, or its own where the number of GPUs is minimised."""
    listed = listed_problem(problem, claim.plan)
    if report is None or claim.bound is None or not has_one_step_time(listed):
        return None
    if problem.job.objective == "num_gpus":
        # A missing bound does not agree with any.
        return 0.0 if claim.lower_bound_s is None else claim.lower_bound_s
    return claim.bound / printed_unit(problem)[0] / objective_per_second(problem)


def _fastest(
    document: ResultDocument, claim: ClaimedResult, report: StepReport | None, source: str
) -> FastestPlan | None:
    """Read the fastest plan of a result and simulate it again.

    Raises:
        InvalidInputError: it is not in the space, does not fit, misses the deadline, or is not faster.
    """
    if document.fastest is None or claim.plan is None or report is None:
        return None
    (plan,) = _plans_of_space(document, claim, (document.fastest.plan.restored(source),), source)
    listed, other = listed_problem(document.problem, claim.plan), simulate(document.problem, plan)
    saved = 1.0 - objective_of(listed, plan, other) / objective_of(listed, claim.plan, report)
    if saved <= 0:
        raise InvalidInputError(
            f"{source} names as the fastest plan one that is not faster than its plan.",
            "Expected a plan with a better objective.",
            "Take the original file, or solve the problem again.",
        )
    return FastestPlan(plan, other.step_time_s, saved)


def _other_plans(document: ResultDocument, claim: ClaimedResult, source: str) -> tuple[Plan, ...]:
    """Read the plans that a result compares with.

    Raises:
        InvalidInputError: a plan is not in the space, does not fit or misses the deadline, or they are not in
            the order of their objectives.
    """
    plans = tuple(other.plan.restored(source) for other in document.runners_up)
    if not plans:
        return ()
    _plans_of_space(document, claim, plans, source)
    problem = document.problem
    listed = listed_problem(problem, claim.plan)
    values = [objective_of(listed, plan, simulate(problem, plan)) for plan in plans]
    if values != sorted(values):
        raise InvalidInputError(
            f"{source} compares its plan with others that are not in the order of their objectives.",
            "Expected the best of them first.",
            "Take the original file, or solve the problem again.",
        )
    return plans


def _plans_of_space(
    document: ResultDocument, claim: ClaimedResult, plans: tuple[Plan, ...], source: str
) -> tuple[Plan, ...]:
    """Return plans after the check that they are in the space, fit and meet the deadline.

    Raises:
        InvalidInputError: a plan does not.
    """
    problem = document.problem
    space = layout_space(listed_problem(problem, claim.plan), claim.forbid)
    for plan in plans:
        check_plan_of_file(problem, plan)
        report, limits_ns = simulate(problem, plan), objective_weights(problem, LayoutColumns.of([plan.layout]))[1]
        sound = report.fits_with_margin and report.step_time_ns <= float(limits_ns[0])
        if not sound or space.find(plan.layout) is None or not in_space(problem, plan):
            raise InvalidInputError(
                f"{source} compares its plan with one that is not in the space, does not fit, or misses the "
                "deadline.",
                "Expected plans that its search has found.",
                "Take the original file, or solve the problem again.",
            )
    return plans


def _target_price(
    document: ResultDocument, result: PlanResult, claim: ClaimedResult, source: str
) -> TargetPrice | None:
    """Price the restriction to a launcher again."""
    problem, target = document.problem, document.target
    if target is None or problem.space.target is None:
        return None
    launcher, version = problem.space.target, problem.space.target_version

    def is_whole(whole: Problem) -> bool:
        return restrict(whole, launcher, version, stack=False) == problem

    return _price(target.price, is_whole, (document, result, claim, source), claim.tolerance)


def _margin_price(
    document: ResultDocument, result: PlanResult, claim: ClaimedResult, source: str
) -> TargetPrice | None:
    """Price the margin of memory again."""

    def is_whole(whole: Problem) -> bool:
        return whole == without_margin(document.problem)

    tolerance = max(claim.tolerance, MARGIN_PRICE_GAP)
    return _price(document.margin_price, is_whole, (document, result, claim, source), tolerance)


def _price(
    claimed: PriceDocument | None,
    is_whole: Callable[[Problem], bool],
    about: tuple[ResultDocument, PlanResult, ClaimedResult, str],
    tolerance: float,
) -> TargetPrice | None:
    """Price a restriction of the space from the plan and the bound that are claimed without it.

    Raises:
        InvalidInputError: the plan is not of the space without the restriction.
    """
    document, result, claim, source = about
    if claimed is None or result.objective is None or result.objective_bound is None:
        return None
    if claimed.space is None or claimed.plan is None:
        return None
    whole = document.problem.model_copy(update={"space": claimed.space})
    plan = claimed.plan.restored(source)
    check_plan_of_file(whole, plan)
    space = layout_space(whole, claim.forbid)
    if not 0 < claimed.objective_bound <= claimed.objective * (1.0 + ROUNDING):
        return None
    known = space.find(plan.layout) is not None and in_space(whole, plan)
    known = known and simulate(whole, plan).fits_with_margin
    if not known or not is_whole(whole):
        raise InvalidInputError(
            f"{source} prices a restriction of its space with a plan or a space that is not without it.",
            "Expected the space of the problem before --target, or before --memory-margin, and a plan of it.",
            "Take the original file, or solve the problem again.",
        )
    best = claimed.space, plan, objective_of(whole, plan, simulate(whole, plan)), claimed.objective_bound
    value, bound = result.objective, result.objective_bound
    return TargetPrice.between(value, bound, best, tolerance, claimed.wall_time_s)


def _others_proved(
    document: ResultDocument, claim: ClaimedResult, proofs: SecondProofs
) -> Iterator[tuple[Check, Verdict]]:
    """Prove the claims about other problems: without the launcher or the margin of memory, and at the ends of the
    uncertainty."""
    problem = document.problem
    prices = {
        "the price of the target": None if document.target is None else document.target.price,
        "the price of the memory margin": document.margin_price,
    }
    for name, price in prices.items():
        if price is not None and price.space is not None:
            whole = problem.model_copy(update={"space": price.space})
            yield _bounded(name, whole, claim, price.objective, price.objective_bound, proofs)
    for end in () if document.robustness is None else document.robustness.ends:
        if end.lower_bound_s is not None and claim.value is not None and claim.step_time_s is not None:
            unit = claim.value / claim.step_time_s
            there = joint_end(problem, end.end)
            best = min(end.best_s, end.best_s if end.rival_s is None else end.rival_s)
            yield _bounded(f"the {end.end} end", there, claim, best * unit, end.lower_bound_s * unit, proofs)


def _bounded(
    name: str, problem: Problem, claim: ClaimedResult, value: float, bound: float, proofs: SecondProofs
) -> tuple[Check, Verdict]:
    """Prove that no plan of a problem is better than a bound."""
    gap = max(claim.tolerance, 1.0 - bound / value)
    again = proofs.of(problem, claim, claim.plan).reaching(lambda result: result.objective_bound, bound, gap)
    proved = again.objective_bound
    seen = "no bound" if proved is None else f"a bound of {proved / value:.2%} of the plan"
    passed = proved is not None and proved >= bound * (1.0 - ROUNDING)
    below = again.objective is not None and again.objective < bound * (1.0 - ROUNDING)
    return Check(f"{name} proved again", passed, seen), "refuted" if below else "unproved"
