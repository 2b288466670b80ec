"""Prove a result again without trusting the run that made it.

The layouts are listed and bounded again, what bounds do not decide is solved again by another backend than the one
that the result names, and the plan is simulated again. Nothing of the result enters the proof but its plan, which
only says from where on a layout need not be looked at: a plan that does not fit or is slower than claimed is found
out before, and a bound that was claimed too high is found out by the faster plan or by the proof that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from milpplan.optimize.certificate import Certification, Check, ClaimedResult, Verdict
from milpplan.optimize.objective import objective_weights, on_gpus, printed_unit
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import solve
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.layout_table import layout_space
from milpplan.optimize.space.membership import in_space
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.mixed_costs import RankCosts, costs_of
from milpplan.simulation.pipeline.critical_path import CriticalPath, critical_path
from milpplan.simulation.pipeline.step_graph import StepGraph
from milpplan.simulation.replica_costs import costs_of_replicas, view_plans
from milpplan.simulation.report import StepReport
from milpplan.simulation.simulator import simulate
from milpplan.simulation.stages import durations, plan_stages
from milpplan.units import NS_PER_S, counted, gap_text, seconds_text

ROUNDING = 1e-9
"""Seconds and objectives in files are rounded to doubles, and so are their ratios."""


def other_backend(name: str) -> str:
    """Name the backend that solves again what a backend has solved."""
    return "cbc" if name == "cpsat" else "cpsat"


@dataclass(slots=True)
class SecondProof:
    """Second solves of one problem from one plan, each tolerance solved for once.

    ``options`` hold everything but the tolerance and the time limit; ``until`` (``time.monotonic``) ends them all.
    """

    problem: Problem
    options: SolveOptions
    until: float | None = None
    found: dict[float, PlanResult] = field(default_factory=dict)

    def within(self, gap: float) -> PlanResult:
        """Solve to a tolerance."""
        if gap not in self.found:
            left_s = None if self.until is None else max(self.until - time.monotonic(), 1e-3)
            self.found[gap] = solve(self.problem, replace(self.options, gap=gap, time_limit_s=left_s))
        return self.found[gap]

    def reaching(self, bound: Callable[[PlanResult], float | None], wanted: float, gap: float) -> PlanResult:
        """Solve to a tolerance, and further where a bound has not come as far as is wanted by then.

        Args:
            bound: the bound of a result that is asked for.
            wanted: how high it shall be, in the unit of the objective.
            gap: the tolerance.
        """
        gap = min(gap, 0.999)
        again = self.within(gap)
        while again.status == "optimal" and again.objective is not None:
            seen = bound(again)
            if seen is not None and _reached(seen, wanted):
                break
            # A better plan than the claimed one may have been found on the way, so the share left is another.
            closer = max(1.0 - wanted / again.objective, 0.0)
            further = self.within(closer) if closer < gap else again
            if closer >= gap or further.objective_bound is None:
                break
            gap, again = closer, further
        return again


@dataclass(slots=True)
class SecondProofs:
    """All second proofs of a session: those of equal problems, plans and forbidden layouts are shared."""

    options: SolveOptions
    until: float | None
    known: dict[tuple[Problem, Plan | None, str], SecondProof] = field(default_factory=dict)

    @staticmethod
    def by(options: SolveOptions) -> SecondProofs:
        """Start a session that ends with the options' time limit."""
        limit = options.time_limit_s
        return SecondProofs(options, None if limit is None else time.monotonic() + limit)

    def of(self, problem: Problem, claim: ClaimedResult, plan: Plan | None) -> SecondProof:
        """Return the proof of a problem from a plan, without the layouts that the claim leaves out."""
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
        problem: the problem that the claim is about.
        claim: what a result says.
        options: time limit, seed, callback and, unless it is the claim's own, the backend of the second proof;
            tolerance, start and forbidden layouts are the claim's.
        proofs: second proofs by these options that may be known already.

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
    """Return the problem whose layouts a result lists: where the fewest GPUs are sought, that on the GPUs of the
    plan, or on the most that were tried."""
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
    """Check: an optimum has a gap within the tolerance, and bounds lie between nothing and the plan."""
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
    """The legal layouts are those that the result was proved over."""
    same = len(space) == claim.legal and space.sha256() == claim.layouts_sha256
    seen = counted(len(space), "legal layout") + ("" if same else f", not the {claim.legal:,} that were claimed")
    return Check("layouts listed again", same, seen)


def _plan_again(problem: Problem, space: LayoutSpace, claim: ClaimedResult) -> Check:
    """The plan is one of the space, fits, meets the deadline, and takes as long as claimed."""
    plan = claim.plan
    assert plan is not None
    report = simulate(problem, plan)
    claimed, least = claim.step_time_s, claim.lower_bound_s
    _, limit_ns = objective_weights(problem, LayoutColumns.of([plan.layout]))
    faults = {
        "not a plan of the space": space.find(plan.layout) is None or not in_space(problem, plan),
        "does not fit": not report.fits,
        "misses the deadline": report.step_time_ns > float(limit_ns[0]),
        f"not {'claimed' if claimed is None else seconds_text(claimed)}": not _same(report.step_time_s, claimed),
        "shorter than the bound of its step": least is not None and least > report.step_time_s * (1.0 + ROUNDING),
        "another objective": not _same(objective_of(problem, plan, report), claim.value),
    }
    found = [words for words, wrong in faults.items() if wrong]
    seen = ", ".join([seconds_text(report.step_time_s), *(found or ["fits in memory"])])
    return Check("plan simulated again", not found, seen)


def _same(value: float, claimed: float | None) -> bool:
    return claimed is not None and abs(value - claimed) <= ROUNDING * abs(value)


def _path_again(problem: Problem, plan: Plan) -> Check:
    """The longest path through the plan's step, summed from the durations that it passes, is the step."""
    if plan.layout.replica_micro_batches:
        views = zip(costs_of_replicas(problem, plan.layout).views, view_plans(problem, plan), strict=True)
        path, length = max(
            (_critical(view.problem, own, view.costs) for view, (_, own) in views), key=lambda found: found[1]
        )
    else:
        path, length = _critical(problem, plan, costs_of(problem, plan.layout))
    step = simulate(problem, plan).step_time_ns
    passed = f"{counted(int(path.counts.sum()), 'duration')} and {counted(int(path.num_transfers), 'transfer')}"
    return Check("critical path summed", length == step, f"{passed}: {seconds_text(length / NS_PER_S)}")


def _critical(problem: Problem, plan: Plan, costs: RankCosts) -> tuple[CriticalPath, int]:
    """The longest path of a plan and its length in nanoseconds."""
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    path = critical_path(graph, matrix)
    return path, int(path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns))


Step = tuple[Check, Verdict, PlanResult]
"""A check, the verdict where it fails, and the second result that it rests on."""


def _proofs_again(problem: Problem, claim: ClaimedResult, proofs: SecondProofs) -> Iterator[Step]:
    """Prove every bound of a claim again; the first check that fails decides."""
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
        results = [result for proof in used for result in proof.found.values()]
        programs = sum(result.work.integer_programs for result in results)
        seen = f"{counted(programs, 'integer program')} decided" if programs else "no integer program decided"
        yield Check("proof is exact", not programs, seen), "unproved", results[-1]


def _none_again(count: int, again: PlanResult) -> Step:
    """No plan on fewer GPUs."""
    name, none = "fewer GPUs have no plan", again.status == "infeasible"
    seen = f"{counted(count, 'GPU')}: {again.status.replace('_', ' ')}"
    return Check(name, none, seen), "refuted" if again.plan is not None else "unproved", again


def _on_its_gpus(problem: Problem, claim: ClaimedResult) -> tuple[Problem, ClaimedResult]:
    """The claim about the shortest step on the fewest GPUs."""
    there, least = listed_problem(problem, claim.plan), claim.lower_bound_s
    tokens = max(problem.job.global_batch_values) * problem.job.sequence_length
    value = None if claim.step_time_s is None else claim.step_time_s / tokens
    return there, replace(claim, value=value, bound=None if least is None else least / tokens)


def _proved_again(claim: ClaimedResult, proof: SecondProof) -> Step:
    """No plan is faster than the claimed bound, by a proof that comes as far."""
    infeasible = claim.status == "infeasible"
    name = "no plan exists, proved again" if infeasible else "bound proved again"
    tolerance = claim.tolerance if claim.gap is None else max(claim.tolerance, claim.gap)
    wanted = 0.0 if claim.bound is None else claim.bound
    again = proof.reaching(lambda result: result.objective_bound, wanted, tolerance)
    if again.status == "no_solution_found":
        return Check(name, False, "stopped with nothing proved"), "unproved", again
    if infeasible or again.status == "infeasible":
        return Check(name, claim.status == again.status, again.status), "refuted", again
    assert again.objective is not None
    assert claim.value is not None
    if again.objective < wanted * (1.0 - ROUNDING):
        share = 1.0 - again.objective / claim.value
        seen = f"a plan is {share:.2%} below the claimed one, below its bound"
        return Check(name, False, seen), "refuted", again
    seen = "no bound" if again.gap is None else f"the plan is within {gap_text(again.gap)} of the optimum"
    if again.objective_bound is not None and _reached(again.objective_bound, wanted):
        return Check(name, True, seen), "certified", again
    return Check(name, False, f"{seen}, claimed {gap_text(claim.gap or 0.0)}"), "unproved", again


def _reached(bound: float, wanted: float) -> bool:
    """Tell whether a second bound is as high as a claimed one."""
    return bound >= wanted * (1.0 - ROUNDING)


def _any_chunks_again(claim: ClaimedResult, proof: SecondProof) -> Step:
    """No plan with interleaved chunks of any size is faster than the bound claimed for these."""
    name, wanted = "chunks of any size bounded again", claim.any_chunks_bound
    assert wanted is not None
    tolerance = claim.tolerance if claim.gap is None else max(claim.tolerance, claim.gap)
    again = proof.reaching(lambda result: result.any_chunks_bound, wanted, tolerance)
    bound = again.any_chunks_bound
    seen = "no bound" if again.any_chunks_gap is None else f"they gain at most {again.any_chunks_gap:.2%}"
    verdict: Verdict = "unproved" if again.message or again.status != "optimal" else "refuted"
    return Check(name, bound is not None and _reached(bound, wanted), seen), verdict, again
