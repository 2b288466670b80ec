"""Prove a result again without trusting the run that made it.

The layouts are listed and bounded again, what bounds do not decide is solved again by another backend than the one
that the result names, and the plan is simulated again. Nothing of the result enters the proof but its plan, which
only says from where on a layout need not be looked at: a plan that does not fit or is slower than claimed is found
out before, and a bound that was claimed too high is found out by the faster plan or by the proof that fails.
"""

from __future__ import annotations

from dataclasses import replace

from milpplan.costs.critical_path import CriticalPath, critical_path
from milpplan.costs.mixed_costs import RankCosts, costs_of
from milpplan.costs.pipeline import StepGraph
from milpplan.costs.replica_costs import costs_of_replicas, view_plans
from milpplan.costs.simulator import simulate
from milpplan.costs.stages import durations, plan_stages
from milpplan.optimize.claim import Certification, Check, Claim, Verdict
from milpplan.optimize.layouts import layout_space
from milpplan.optimize.planner import solve
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.specs.plan import Plan
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S, gap_text, seconds_text

ROUNDING = 1e-9
"""Seconds and objectives in files are rounded to doubles, and so are their ratios."""
BOUND_SLACK = 1e-6
"""By how much less than the claimed bound the second proof may reach: solvers stop at their own tolerances."""


def other_backend(name: str) -> str:
    """Who solves again what a backend has solved."""
    return "cbc" if name == "cpsat" else "cpsat"


def certify(problem: Problem, claim: Claim, options: SolveOptions | None = None) -> Certification:
    """Prove a claim about a problem again.

    Args:
        problem: the problem that the claim is about.
        claim: what a result says.
        options: time limit, seed, callback and, unless it is the claim's own, the backend of the second proof;
            tolerance, start and forbidden layouts are the claim's.

    Returns:
        The checks and the verdict.

    Raises:
        InvalidInputError: options that make no sense.
        IllegalPlanError: the plan is none for this problem.
    """
    options = options or SolveOptions(backend=other_backend(claim.backend))
    checks = [_makes_sense(claim), _layouts_again(problem, claim)]
    if claim.plan is not None:
        checks += [_plan_again(problem, claim), _path_again(problem, claim.plan)]
    if not all(check.passed for check in checks):
        return Certification(tuple(checks), options.backend, None, "refuted")
    tolerance = claim.tolerance if claim.gap is None else max(claim.tolerance, claim.gap)
    again = solve(problem, replace(options, gap=min(tolerance, 0.999), warm_start=claim.plan, forbid=claim.forbid))
    if again.status == "optimal" and not _reaches(claim, again):
        again = _further(problem, claim, again, options)
    last, verdict = _proof_again(claim, again)
    checks.append(last)
    if verdict == "certified" and claim.any_chunks_bound is not None:
        checks.append(_any_chunks_again(claim, again))
        verdict = "certified" if checks[-1].passed else "refuted"
    return Certification(tuple(checks), options.backend, again, verdict)


def _makes_sense(claim: Claim) -> Check:
    """What is called optimal has a gap within the tolerance, and a bound that is not above the plan."""
    gap, optimal = claim.gap, claim.status == "optimal"
    above = claim.value is not None and claim.bound is not None and claim.bound > claim.value * (1.0 + ROUNDING)
    sound = not above and (not optimal or (gap is not None and gap <= claim.tolerance + ROUNDING))
    seen = claim.status if gap is None else f"{claim.status}, gap {gap_text(gap)}"
    return Check("claim makes sense", sound, seen + (", bound above the plan" if above else ""))


def _layouts_again(problem: Problem, claim: Claim) -> Check:
    """The legal layouts are those that the result was proved over."""
    space = layout_space(problem, claim.forbid)
    same = len(space) == claim.legal and space.sha256() == claim.layouts_sha256
    seen = f"{len(space):,} legal layouts" + ("" if same else f", not the {claim.legal:,} that were claimed")
    return Check("layouts listed again", same, seen)


def _plan_again(problem: Problem, claim: Claim) -> Check:
    """The plan fits and takes as long as claimed."""
    assert claim.plan is not None
    report = simulate(problem, claim.plan)
    claimed = claim.step_time_s
    same = claimed is not None and abs(report.step_time_s - claimed) <= ROUNDING * report.step_time_s
    seen = f"{seconds_text(report.step_time_s)}, {'fits' if report.fits else 'does not fit'}"
    if not same:
        seen += ", not " + ("claimed" if claimed is None else seconds_text(claimed))
    return Check("plan simulated again", same and report.fits, seen)


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
    passed = f"{int(path.counts.sum()):,} durations and {path.num_transfers:,} transfers"
    return Check("critical path summed", length == step, f"{passed}: {seconds_text(length / NS_PER_S)}")


def _critical(problem: Problem, plan: Plan, costs: RankCosts) -> tuple[CriticalPath, int]:
    """The longest path of a plan and its length in nanoseconds."""
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    graph = StepGraph.of(plan.layout, costs.transfer_ns, costs.barrier_ns)
    path = critical_path(graph, matrix)
    return path, int(path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns))


def _proof_again(claim: Claim, again: PlanResult) -> tuple[Check, Verdict]:
    """No plan is faster than the claimed bound, by a proof that comes as far."""
    name = "proved again"
    if again.status == "no_solution_found":
        return Check(name, False, "stopped with nothing proved"), "unproved"
    if claim.status == "infeasible" or again.status == "infeasible":
        same = claim.status == again.status
        return Check(name, same, again.status), "certified" if same else "refuted"
    assert again.objective is not None
    assert claim.value is not None
    if claim.bound is not None and again.objective < claim.bound * (1.0 - ROUNDING):
        share = 1.0 - again.objective / claim.value
        return Check(name, False, f"a plan is {share:.2%} below the claimed one, below its bound"), "refuted"
    seen = f"within {gap_text(again.gap or 0.0)}" if again.gap is not None else "no bound"
    if _reaches(claim, again):
        return Check(name, True, seen), "certified"
    return Check(name, False, f"{seen}, claimed {gap_text(claim.gap or 0.0)}"), "unproved"


def _further(problem: Problem, claim: Claim, again: PlanResult, options: SolveOptions) -> PlanResult:
    """The second proof to the claimed bound, where its tolerance let it stop below that."""
    assert again.objective is not None
    assert claim.bound is not None
    gap = max(1.0 - claim.bound / again.objective, BOUND_SLACK)
    left_s = options.time_limit_s
    if left_s is not None:
        left_s = max(left_s - again.wall_time_s, 1e-3)
    asked = replace(options, gap=gap, warm_start=again.plan, forbid=claim.forbid, time_limit_s=left_s)
    further = solve(problem, asked)
    return again if further.objective_bound is None else further


def _reaches(claim: Claim, again: PlanResult) -> bool:
    """Whether the second proof's bound is as high as the claimed one."""
    if claim.bound is None:
        return True
    return again.objective_bound is not None and again.objective_bound >= claim.bound * (1.0 - BOUND_SLACK)


def _any_chunks_again(claim: Claim, again: PlanResult) -> Check:
    """What is proved over interleaved chunks of any size; its tolerance is that of the proof over even ones."""
    name, bound = "chunks of any size bounded again", again.any_chunks_bound
    assert claim.any_chunks_bound is not None
    tolerance = claim.tolerance + ROUNDING
    same = bound is not None and bound >= claim.any_chunks_bound * (1.0 - tolerance)
    seen = "no bound" if again.any_chunks_gap is None else f"at most {again.any_chunks_gap:.2%} to gain"
    return Check(name, same, seen)
