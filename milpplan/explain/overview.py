"""Contents of a plan's page. A part that cannot be computed gets a reason, and the others are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from milpplan.communication.traffic import traffic
from milpplan.errors import MilpplanError
from milpplan.explain.judge.rule_of_thumb import rule_of_thumb
from milpplan.explain.near_best import DEFAULT_LIMIT_S, WITHIN, near_best
from milpplan.explain.overview_records import ExportTab, Missing, Overview
from milpplan.explain.records import NearBest, RuleOfThumb
from milpplan.optimize.nearby_problems import with_job
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.pipeline.step_lanes import step_lanes
from milpplan.simulation.simulator import simulate
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.launchers.targets import Target

Answer = TypeVar("Answer")


def plan_overview(
    problem: Problem,
    plan: Plan,
    *,
    time_limit_s: float = DEFAULT_LIMIT_S,
    within: float = WITHIN,
    forbid: Sequence[Mapping[str, object]] = (),
) -> Overview:
    """Analyse a plan: its step, its traffic, its rivals and its launch files.

    Args:
        problem, plan: the plan to show.
        time_limit_s: seconds for other layouts that do nearly as well; with 0 only bounds are used.
        within: relative distance up to which such layouts are listed.
        forbid: layouts that count as illegal, as in ``solve``.

    Raises:
        IllegalPlanError: the plan cannot run.
    """
    return Overview(
        problem=problem,
        plan=plan,
        report=simulate(problem, plan),
        lanes=step_lanes(problem, plan),
        traffic=_or_missing(lambda: traffic(problem, plan)),
        near=_or_missing(lambda: _near(problem, plan, within, time_limit_s, forbid)),
        rule=_rule(problem, plan),
        exports=_exports(problem, plan),
    )


def _near(
    problem: Problem, plan: Plan, within: float, time_limit_s: float, forbid: Sequence[Mapping[str, object]]
) -> NearBest | Missing:
    """Find other layouts that do nearly as well, within a time limit because the rest of the page waits for
    them."""
    try:
        return near_best(problem, plan, within, time_limit_s, forbid)
    except KeyboardInterrupt:
        return Missing(
            "The search for other layouts that do nearly as well was interrupted.",
            "It takes as long as --time-limit says.",
            "Make the page again, or with --time-limit 0.",
        )


def _or_missing(question: Callable[[], Answer]) -> Answer | Missing:
    try:
        return question()
    except MilpplanError as error:
        return Missing.of(error)


def _rule(problem: Problem, plan: Plan) -> RuleOfThumb | Missing:
    """Apply the rule of thumb to the plan's own number of GPUs and batch."""
    if problem.inference or problem.other_hardware:
        what = "inference" if problem.inference else "a cluster of several node types"
        return Missing(
            f"The job is {what}.",
            "The published rule of thumb is for training on nodes of one type.",
            "Compare with a plan of your own: milpplan compare A.json B.json.",
        )
    layout = plan.layout
    asked = with_job(problem, num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size)
    rule = rule_of_thumb(asked)
    if rule is None:
        return Missing(
            "The rule of thumb has no plan that fits here, even with more pipeline stages than its table says.",
            "It needs degrees that divide this number of GPUs and this batch, and memory for its choices.",
            "Compare with a plan of your own: milpplan compare A.json B.json.",
        )
    return rule


def _exports(problem: Problem, plan: Plan) -> tuple[ExportTab, ...]:
    # Imported late: launchers load hundreds of arguments, which mere imports of the library do not need.
    from milpplan.launchers.targets import target_named, target_names

    return tuple(_export(name, target_named(name, "target"), problem, plan) for name in target_names())


def _export(name: str, target: Target, problem: Problem, plan: Plan) -> ExportTab:
    version = target.capability.versions[0]
    title = target.capability.name
    try:
        launch = target.export(problem, plan, version)
        files = target.files(launch, __version__)
    except MilpplanError as error:
        return ExportTab(name, title, version, {}, refusal=Missing.of(error))
    return ExportTab(name, title, version, files, tuple(launch.notes))
