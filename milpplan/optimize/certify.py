"""Certification: prove a result again without trusting the run that made it.

The layouts are listed and bounded again, layouts left by the bounds are solved by another backend than the
result's, and the plan is simulated again. The proof uses only the plan of the result, as a cutoff for layouts. A
plan that does not fit or is slower than claimed is detected before. A bound claimed too high is detected by a
faster plan, or by the proof that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from milpplan.optimize.context import objective_weights, on_gpus, printed_unit
from milpplan.optimize.records import Certification, Check, ClaimedResult, PlanResult, SolveOptions, Verdict
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.plan_space import in_space
from milpplan.problem import Plan, Problem
from milpplan.simulation import (
    LayoutColumns,
    RankCosts,
    StepReport,
    costs_of,
    costs_of_replicas,
    durations,
    plan_stages,
    simulate,
    view_plans,
)
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, critical_path
from milpplan.units import NS_PER_S, counted, gap_text, seconds_text

ROUNDING = 1e-9
"""Relative rounding of seconds and objectives in files, and of their ratios."""


def other_backend(name: str) -> str:
    """Return the name of the backend that checks results of the given backend."""
    return "cbc" if name == "cpsat" else "cpsat"


@dataclass(slots=True)
class SecondProof:
    """Second solves of one problem from one plan; each tolerance is solved for once.

    ``options``: all but tolerance and time limit. ``until`` (``time.monotonic``) ends all solves.
    """

    problem: Problem
    options: SolveOptions
    until: float | None = None
    found: dict[float, PlanResult] = field(default_factory=dict)

    def within(self, gap: float) -> PlanResult:
        """Solve to a relative gap."""
        if gap not in self.found:
            left_s = None if self.until is None else max(self.until - time.monotonic(), 1e-3)
            options = replace(self.options, gap=gap, time_limit_s=left_s, simplest=False)
            self.found[gap] = solve(self.problem, options)
        return self.found[gap]

    def reaching(self, bound: Callable[[PlanResult], float | None], wanted: float, gap: float) -> PlanResult:
        """Solve to a relative gap, and to smaller gaps until a bound reaches a value.

        Args:
            bound: returns the bound of a result.
            wanted: value that the bound should reach, in the unit of the objective.
            gap: the first gap.
        """
        gap = min(gap, 0.999)
        result = self.within(gap)
        while result.status == "optimal" and result.objective is not None:
            reached = bound(result)
            if reached is not None and _reached(reached, wanted):
                break
            # The solve may have found a better plan than the claimed plan, which changes the relative distance.
            closer = max(1.0 - wanted / result.objective, 0.0)
            further = self.within(closer) if closer < gap else result
            if closer >= gap or further.objective_bound is None:
                break
            gap, result = closer, further
        return result


@dataclass(slots=True)
class SecondProofs:
    """All second proofs of a session, shared by equal problems, plans and forbidden layouts."""

    options: SolveOptions
    until: float | None
    known: dict[tuple[Problem, Plan | None, str], SecondProof] = field(default_factory=dict)

    @staticmethod
    def by(options: SolveOptions) -> SecondProofs:
        """Start a session that ends with the options' time limit."""
        limit = options.time_limit_s
        return SecondProofs(options, None if limit is None else time.monotonic() + limit)

    def of(self, problem: Problem, claim: ClaimedResult, plan: Plan | None) -> SecondProof:
        """Return the proof of a problem from a plan, without the layouts that the claim excludes."""
        key = problem, plan, repr([sorted(partial.items()) for partial in claim.forbid])
        if key not in self.known:
            options = replace(self.options, warm_start=plan, forbid=claim.forbid)
            self.known[key] = SecondProof(problem, options, self.until)
        return self.known[key]


def certify(
    problem: Problem, claim: ClaimedResult, options: SolveOptions | None = None, proofs: SecondProofs | None = None
) -> Certification:
    """Prove a claim about a problem again.

    Args:
        problem: the problem of the claim.
        claim: the claim of a result.
        options: time limit, seed, callback and, unless it is the claim's own, the backend of the second proof;
            tolerance, start and forbidden layouts are the claim's.
        proofs: second proofs by these options from the same session.

    Returns:
        The checks and the verdict.

    Raises:
        InvalidInputError: options that make no sense.
        IllegalPlanError: the plan is none for this problem.
    """
    options = options or SolveOptions(backend=other_backend(claim.backend))
    listed = listed_problem(problem, claim.plan)
    space = layout_space(listed, claim.forbid)
    checks = [_makes_sense(claim), _layouts_again(space, claim)]
    if claim.plan is not None:
        checks += [_plan_again(problem, space, claim), _path_again(listed, claim.plan)]
    if not all(check.passed for check in checks):
        return Certification(tuple(checks), options.backend, None, "refuted")
    again = None
    verdict: Verdict = "certified"
    for check, failing, found in _proofs_again(problem, claim, proofs or SecondProofs.by(options)):
        checks.append(check)
        again = found
        if not check.passed:
            verdict = failing
            break
    return Certification(tuple(checks), options.backend, again, verdict)


def listed_problem(problem: Problem, plan: Plan | None) -> Problem:
    """Return the problem whose layouts a result lists: where the fewest GPUs are sought, the problem on the plan's
    number of GPUs, or on the largest number that was tried."""
    if problem.job.objective != "num_gpus":
        return problem
    return on_gpus(problem, max(problem.job.num_gpus_values) if plan is None else plan.layout.num_gpus)


def objective_of(problem: Problem, plan: Plan, report: StepReport) -> float:
    """Return the objective of a plan as results print it."""
    if problem.job.objective == "num_gpus":
        return float(plan.layout.num_gpus)
    weight = float(objective_weights(problem, LayoutColumns.of([plan.layout]))[0][0])
    return report.step_time_ns * weight * printed_unit(problem)[0]


def _makes_sense(claim: ClaimedResult) -> Check:
    """Check that status, gap, bounds and plan agree."""
    gap, optimal = claim.gap, claim.status == "optimal"
    bounds = [bound for bound in (claim.bound, claim.any_chunks_bound) if bound is not None]
    above = claim.value is not None and any(bound > claim.value * (1.0 + ROUNDING) for bound in bounds)
    below = any(bound < 0 for bound in bounds)
    sound = not above and not below and (not optimal or (gap is not None and gap <= claim.tolerance + ROUNDING))
    seen = claim.status if gap is None else f"{claim.status}, gap {gap_text(gap)}"
    return Check(
        "status, bound and plan agree",
        sound,
        seen + (", bound above the plan" if above else ", bound below nothing" if below else ""),
    )


def _layouts_again(space: LayoutSpace, claim: ClaimedResult) -> Check:
    """Check that the legal layouts are those of the claim."""
    equal = len(space) == claim.legal and space.sha256() == claim.layouts_sha256
    seen = counted(len(space), "legal layout") + ("" if equal else f", not the {claim.legal:,} that were claimed")
    return Check("layouts listed again", equal, seen)


def _plan_again(problem: Problem, space: LayoutSpace, claim: ClaimedResult) -> Check:
    """Check that the plan is in the space, fits, meets the deadline, and has the claimed step."""
    plan = claim.plan
    assert plan is not None
    report = simulate(problem, plan)
    claimed, lower_bound = claim.step_time_s, claim.lower_bound_s
    _, limit_ns = objective_weights(problem, LayoutColumns.of([plan.layout]))
    faults = {
        "not a plan of the space": space.find(plan.layout) is None or not in_space(problem, plan),
        "does not fit": not report.fits,
        "leaves less memory than the space asks for": report.fits and not report.fits_with_margin,
        "misses the deadline": report.step_time_ns > float(limit_ns[0]),
        f"not {'claimed' if claimed is None else seconds_text(claimed)}": not _same(report.step_time_s, claimed),
        "shorter than the bound of its step": lower_bound is not None
        and lower_bound > report.step_time_s * (1.0 + ROUNDING),
        "another objective": not _same(objective_of(problem, plan, report), claim.value),
    }
    wrong_points = [words for words, wrong in faults.items() if wrong]
    seen = ", ".join([seconds_text(report.step_time_s), *(wrong_points or ["fits in memory"])])
    return Check("plan simulated again", not wrong_points, seen)


def _same(value: float, claimed: float | None) -> bool:
    return claimed is not None and abs(value - claimed) <= ROUNDING * abs(value)


def _path_again(problem: Problem, plan: Plan) -> Check:
    """Check that the longest path of the plan's step, summed from its durations, equals the step."""
    if plan.layout.replica_micro_batches:
        views = zip(costs_of_replicas(problem, plan.layout).views, view_plans(problem, plan), strict=True)
        path, length = max(
            (_critical(view.problem, view_plan, view.costs) for view, (_, view_plan) in views),
            key=lambda entry: entry[1],
        )
    else:
        path, length = _critical(problem, plan, costs_of(problem, plan.layout))
    step = simulate(problem, plan).step_time_ns
    passed = f"{counted(int(path.counts.sum()), 'duration')} and {counted(int(path.num_transfers), 'transfer')}"
    return Check("critical path summed", length == step, f"{passed}: {seconds_text(length / NS_PER_S)}")


def _critical(problem: Problem, plan: Plan, costs: RankCosts) -> tuple[CriticalPath, int]:
    """Return the longest path of a plan and its length in nanoseconds."""
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    path = critical_path(graph, matrix)
    return path, int(path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns))


Step = tuple[Check, Verdict, PlanResult]
"""(check, verdict where it fails, second result that it rests on)."""


def _proofs_again(problem: Problem, claim: ClaimedResult, proofs: SecondProofs) -> Iterator[Step]:
    """Prove every bound of a claim again; the first failing check decides."""
    used: list[SecondProof] = []
    if problem.job.objective == "num_gpus":
        for count in problem.job.num_gpus_values:
            if claim.bound is not None and count >= claim.bound:
                break
            used.append(proofs.of(on_gpus(problem, count), claim, None))
            yield _none_again(count, used[-1].within(claim.tolerance))
        problem, claim = _on_its_gpus(problem, claim)
    if claim.plan is None and used:
        pass
    elif claim.plan is None or claim.bound is not None:
        used.append(proofs.of(problem, claim, claim.plan))
        yield _proved_again(claim, used[-1])
    if claim.any_chunks_bound is not None:
        yield _any_chunks_again(claim, used[-1])
    if claim.strength == "exact":
        # Of the statement within the tolerance: the last digits of a bound may take programs in another search.
        results = [max(proof.found.items())[1] for proof in used]
        programs = sum(result.work.integer_programs for result in results)
        seen = f"{counted(programs, 'integer program')} decided" if programs else "no integer program decided"
        yield Check("proof is exact", not programs, seen), "unproved", [*used[-1].found.values()][-1]


def _none_again(count: int, result: PlanResult) -> Step:
    """Check that fewer GPUs have no plan."""
    name, infeasible = "fewer GPUs have no plan", result.status == "infeasible"
    seen = f"{counted(count, 'GPU')}: {result.status.replace('_', ' ')}"
    return Check(name, infeasible, seen), "refuted" if result.plan is not None else "unproved", result


def _on_its_gpus(problem: Problem, claim: ClaimedResult) -> tuple[Problem, ClaimedResult]:
    """Return the claim about the shortest step on the fewest GPUs, with its problem."""
    listed, lower_bound = listed_problem(problem, claim.plan), claim.lower_bound_s
    tokens = max(problem.job.global_batch_values) * problem.job.sequence_length
    value = None if claim.step_time_s is None else claim.step_time_s / tokens
    return listed, replace(claim, value=value, bound=None if lower_bound is None else lower_bound / tokens)


def _proved_again(claim: ClaimedResult, proof: SecondProof) -> Step:
    """Check the claimed bound by a second proof."""
    infeasible = claim.status == "infeasible"
    name = "no plan exists, proved again" if infeasible else "bound proved again"
    tolerance = claim.tolerance if claim.gap is None else max(claim.tolerance, claim.gap)
    wanted = 0.0 if claim.bound is None else claim.bound
    result = proof.reaching(lambda result: result.objective_bound, wanted, tolerance)
    if result.status == "no_solution_found":
        return Check(name, False, "stopped with nothing proved"), "unproved", result
    if infeasible or result.status == "infeasible":
        return Check(name, claim.status == result.status, result.status), "refuted", result
    assert result.objective is not None
    assert claim.value is not None
    if result.objective < wanted * (1.0 - ROUNDING):
        share = 1.0 - result.objective / claim.value
        seen = f"a plan is {share:.2%} below the claimed one, below its bound"
        return Check(name, False, seen), "refuted", result
    seen = "no bound" if result.gap is None else f"the plan is within {gap_text(result.gap)} of the optimum"
    if result.objective_bound is not None and _reached(result.objective_bound, wanted):
        return Check(name, True, seen), "certified", result
    return Check(name, False, f"{seen}, claimed {gap_text(claim.gap or 0.0)}"), "unproved", result


def _reached(bound: float, wanted: float) -> bool:
    """Return True if a second bound is as high as the claimed bound."""
    return bound >= wanted * (1.0 - ROUNDING)


def _any_chunks_again(claim: ClaimedResult, proof: SecondProof) -> Step:
    """Check the bound claimed for interleaved chunks of any size."""
    name, wanted = "chunks of any size bounded again", claim.any_chunks_bound
    assert wanted is not None
    tolerance = claim.tolerance if claim.gap is None else max(claim.tolerance, claim.gap)
    result = proof.reaching(lambda result: result.any_chunks_bound, wanted, tolerance)
    bound = result.any_chunks_bound
    seen = "no bound" if result.any_chunks_gap is None else f"they gain at most {result.any_chunks_gap:.2%}"
    verdict: Verdict = "unproved" if result.message or result.status != "optimal" else "refuted"
    return Check(name, bound is not None and _reached(bound, wanted), seen), verdict, result
