"""JSON documents that ``--json`` prints and ``--out`` writes, in seconds, bytes and rates per second.

Results and simulations carry their problem and their plan, so they are plan files
(``reports.documents.plan_file``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from milpplan.calibration.error_bars import ErrorBar, Robustness
from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.explain.hardware_choice import RunTotals
from milpplan.optimize import PlanResult, Progress
from milpplan.optimize.records import Regret, Status, Strength
from milpplan.optimize.search.closed_layouts import FATES, PruneRecord
from milpplan.problem import Plan, Problem, parse_json, read_text, validated
from milpplan.problem.records import Computed, Record
from milpplan.reports.answers import ExplanationDocument
from milpplan.reports.documents import plan_file
from milpplan.reports.documents.certificate import CertificateDocument, certificate_of, is_sealed, sealed
from milpplan.reports.documents.fields import (
    EvidenceDocument,
    FastestDocument,
    PriceDocument,
    RunDocument,
    TargetDocument,
    document_of,
    evidence_document,
    fastest_document,
    price_document,
    target_document,
)
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.reports.words.plan_words import scope_text
from milpplan.reports.words.result_words import regret_sentence
from milpplan.simulation import StepReport
from milpplan.simulation.step_report import MemoryVerdict
from milpplan.units import percent_text, tolerance_text
from milpplan.validation import Evidence

CLASS_EDGES: Final = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
"""Edges of the classes of bounds, as multiples of the fastest known plan."""
REASON_WORDS: Final = {
    "does_not_fit": "proved not to fit in memory",
    "bounded": "proved slower by a closed-form bound",
    "relaxed": "proved slower by a linear relaxation",
    "solved": "solved",
    "open": "not decided",
}
"""Prune reasons as pages describe them, in order."""
Fates = dict[str, Computed]


class BoundClassDocument(Record):
    """Layouts whose proved bound is at least ``low`` and below ``high`` times the fastest known plan, by prune
    reason; ``high`` is null without an upper limit."""

    low: float
    high: float | None
    fates: Fates

    @property
    def words(self) -> str:
        """Describe the minimum distance of these layouts from the fastest known plan."""
        if self.low < 1.0:
            return "may be as fast"
        if self.high is None:
            return f"{self.low:g} times as long or more"
        if self.high > 2.0:
            return f"{self.low:g} to {self.high:g} times as long"
        low, high = percent_text(self.low - 1.0, 0), percent_text(self.high - 1.0, 0)
        return f"{low.removesuffix(' %')} to {high} longer"


def bound_classes(layouts: PruneRecord, best: float | None) -> tuple[BoundClassDocument, ...]:
    """Count the legal layouts that may fit, by class of their bound.

    Args:
        layouts: outcome of every layout.
        best: the fastest known plan, in the unit of the bounds; None: all classes are empty.
    """
    edges = (0.0, *CLASS_EDGES, math.inf)
    counts = np.zeros((len(FATES), len(edges)), dtype=np.int64)
    for bounds, fates, sizes in layouts.parts:
        finite = np.isfinite(bounds) & (best is not None)
        classes_of = np.searchsorted(np.array(edges), bounds[finite] / (best or 1.0), side="right") - 1
        np.add.at(counts, (fates[finite], classes_of), sizes[finite])
    return tuple(
        BoundClassDocument(
            low=low,
            high=high if math.isfinite(high) else None,
            fates={fate: int(counts[code, number]) for code, fate in enumerate(FATES)},
        )
        for number, (low, high) in enumerate(pairwise(edges))
    )


def empty_classes() -> tuple[BoundClassDocument, ...]:
    """Make the classes without any layout."""
    ends = pairwise((0.0, *CLASS_EDGES, None))
    return tuple(
        BoundClassDocument(low=low or 0.0, high=high, fates=dict.fromkeys(FATES, 0)) for low, high in ends
    )


LINE_WIDTH = 110
OPTIONAL_PARTS = (
    "error_bar",
    "robustness",
    "evidence",
    "any_chunks",
    "infeasible",
    "run",
    "runners_up",
    "fastest",
    "margin_price",
)
"""Parts that a result may lack: they were not requested, the run was interrupted before them, or its plan is the
fastest."""


class LayoutsDocument(Record):
    """Outcome of every layout. ``rejected`` counts (partial) layouts by the rule that refused them.

    ``pruned_fraction``: legal layouts decided with proof and never solved (``does_not_fit``, ``bounded``,
    ``relaxed``) over all legal ones; None where no layout is legal. ``bounds``: the legal layouts that may fit, by
    their proved bound as a multiple of the best plan found; empty without a plan.
    """

    enumerated: Computed
    legal: Computed
    rejected: dict[str, Computed]
    does_not_fit: Computed
    bounded: Computed
    relaxed: Computed
    solved: Computed
    open: Computed
    pruned_fraction: float | None = None
    bounds: tuple[BoundClassDocument, ...] = ()


class ObjectiveDocument(Record):
    """Minimised objective: its name, the plan's value, and the proved lower bound."""

    name: str
    value: float | None
    bound: float | None


class AnyChunksDocument(Record):
    """Proof over interleaved chunks of any size, where the space has only even chunks: a bound of the objective,
    and the maximum share that uneven chunks can gain."""

    bound: float
    gap: float


class InfeasibleDocument(Record):
    """Reason why there is no plan: values seen, values needed, and advice."""

    seen: str
    expected: str
    do: str


class ErrorBarDocument(Record):
    """Uncertainty of a step time by one sigma, in seconds, where the hardware states one (docs/calibration.md)."""

    overlay: str
    below_s: float
    above_s: float
    parts_s: dict[str, tuple[float, float]]
    """Seconds down and up for every uncertain constant, and ``residual`` for the scatter that no constant
    explains."""


class EndDocument(Record):
    """All uncertain constants one sigma to one side: step time of the best plan, and of the best other plan, times
    its ``weight`` where the batches differ, or the GPUs and the objective is GPU-hours."""

    end: Literal["fast", "slow"]
    best_s: float
    rival_s: float | None
    lower_bound_s: float | None
    """Lower bound for every plan of the space at this end; null unless the end was solved again
    (``--check-ends``)."""
    solved: PlanDocument | None = None
    """Best plan of this end's own solve."""
    weight: float = 1.0
    still_best: bool


class RobustnessDocument(Record):
    """Comparison of the best plan with other plans at both ends of the uncertainty."""

    still_best: bool
    num_plans: Computed
    """Number of other plans of the search that were simulated at both ends."""
    solved_again: bool
    ends: tuple[EndDocument, ...]


class ScenarioRegretDocument(Record):
    """The plan in one scenario. Losses are fractions of the step of the best plan there."""

    name: str
    reason: str = ""
    constants: dict[str, float | bool] = {}
    """Constants that differ from the nominal ones, in the words of overlays: efficiencies are factors."""
    step_time_s: float
    best_s: float
    """Step of the best plan found."""
    lower_bound_s: float | None
    """Proved lower bound of the steps of all plans."""
    regret_at_most: float | None
    """Proved upper bound of the plan's loss."""
    nominal_lost_fraction: float
    """Loss of the best nominal plan to the best plan found."""


class RegretDocument(Record):
    """Worst-case regret over scenarios, of the plan and of all plans."""

    at_most: float | None
    """Proved: the plan loses no more than this to the best plan of any scenario."""
    at_least: float | None
    """Proved: every plan loses at least this in some scenario."""
    nominal_lost_fraction: float
    """Worst loss of the best nominal plan to the best plan found in a scenario."""
    scenarios: tuple[ScenarioRegretDocument, ...]


class OtherPlanDocument(Record):
    """Plan that the search simulated beside the best one, with its step time."""

    step_time_s: float
    plan: PlanDocument


class SolverDocument(Record):
    """Solvers, tolerance and effort.

    ``proof``: ``exact`` where no deciding bound relies on a solver's claim, ``tolerance`` where some rely on
    integer programs, ``none`` where nothing is proved to the tolerance.
    """

    backend: str
    versions: str
    relaxations: Computed
    integer_programs: Computed
    witnessed: Computed
    paths: Computed
    simulations: Computed
    proof: Strength
    tolerance: Annotated[float, Field(ge=0, lt=1)]


class ResultDocument(Record):
    """Result of a solve. Fields without a value are null: there is no plan, or no single step time to bound."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    status: Literal["optimal", "feasible", "infeasible", "no_solution_found"]
    step_time_s: float | None
    error_bar: ErrorBarDocument | None = None
    robustness: RobustnessDocument | None = None
    evidence: EvidenceDocument | None = None
    lower_bound_s: float | None
    gap: float | None
    any_chunks: AnyChunksDocument | None = None
    regret: RegretDocument | None = None
    """Of a robust plan (``solve --robust``); ``status`` and ``proof`` are about it, bound and gap are nominal."""
    target: TargetDocument | None = None
    margin_price: PriceDocument | None = None
    """Price of the margin of memory; null without a margin, or where the space without it was not solved."""
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: Computed | None
    usable_memory_bytes: int
    context_bytes: Computed | None = None
    """Reserve for context, libraries and communicators."""
    fragmentation_bytes: Computed | None = None
    """Reserve for losses of the caching allocator."""
    memory_margin_bytes: int | None = None
    """Usable memory minus the peak."""
    host_memory_bytes: Computed = 0
    """Maximum that an accelerator keeps in host memory, of ``host_capacity_bytes``."""
    host_capacity_bytes: Computed = 0
    memory_verdict: MemoryVerdict | None = None
    """Verdict on memory. ``safe``: every rank leaves ``hardware.memory_margin_fraction``. ``tight``: the plan
    fits, but a rank leaves less."""
    wall_time_s: float
    proof: str
    """Sentence with the cost model, the declared space and the tolerance that the status refers to."""
    infeasible: InfeasibleDocument | None
    objective: ObjectiveDocument
    run: RunDocument | None = None
    plan: PlanDocument | None
    runners_up: tuple[OtherPlanDocument, ...] = ()
    """Plans that ``evidence`` and ``robustness`` compare with this one."""
    fastest: FastestDocument | None = None
    """Fastest plan found; null where it is ``plan``, the simplest plan within the tolerance."""
    breakdown: dict[str, float] | None
    """Seconds, averaged over the stages; they add up to the step time."""
    hidden: dict[str, float] | None
    """Seconds of communication hidden behind compute."""
    layouts: LayoutsDocument
    solver: SolverDocument
    log: tuple[Progress, ...]
    certificate: CertificateDocument | None = None
    problem: Problem


class SimulationDocument(Record):
    """Simulated step of a plan."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    step_time_s: float
    error_bar: ErrorBarDocument | None = None
    evidence: EvidenceDocument | None = None
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: Computed
    usable_memory_bytes: int
    context_bytes: Computed = 0
    fragmentation_bytes: Computed = 0
    fits: bool
    memory_margin_bytes: int = 0
    """Usable memory minus the peak; negative where the plan does not fit."""
    host_memory_bytes: Computed = 0
    """Maximum that an accelerator keeps in host memory, of ``host_capacity_bytes``."""
    host_capacity_bytes: Computed = 0
    memory_verdict: MemoryVerdict | None = None
    plan: PlanDocument
    breakdown: dict[str, float]
    hidden: dict[str, float]
    problem: Problem


def result_document(
    result: PlanResult,
    tolerance: float,
    infeasible: MilpplanError | None = None,
    bar: ErrorBar | None = None,
    robust: Robustness | None = None,
    evidence: Evidence | None = None,
    totals: RunTotals | None = None,
    others: Sequence[tuple[Plan, float]] = (),
) -> ResultDocument:
    """Make the document of a result.

    Args:
        result: of the solve.
        tolerance: relative, of the proof.
        infeasible: explains why there is no plan, where that is proved.
        bar: error bar of the step time.
        robust: comparison with other plans at both ends of the hardware's uncertainty.
        evidence: measured runs that support the plan.
        totals: time and cost of the whole run.
        others: plans that the plan was compared with, and their step times.
    """
    report = result.report
    document = document_of(
        ResultDocument,
        result,
        report,
        error_bar=bar,
        robustness=_robustness(robust),
        evidence=evidence_document(evidence, result.step_time_s),
        any_chunks=_any_chunks(result),
        regret=_regret(result.regret),
        target=target_document(result),
        margin_price=price_document(result.problem, result.margin_price),
        usable_memory_bytes=result.details["usable_memory_bytes"],
        proof=(
            proof_sentence(
                result.status, result.problem, tolerance, result.forbid, result.gap, result.objective_bound
            )
            if result.regret is None
            else regret_sentence(result, tolerance)
        ),
        infeasible=infeasible,
        objective=ObjectiveDocument(
            name=result.objective_name, value=result.objective, bound=result.objective_bound
        ),
        run=totals,
        plan=None if result.plan is None else plan_document(result.plan, report),
        runners_up=tuple(
            OtherPlanDocument(step_time_s=seconds, plan=plan_document(plan)) for plan, seconds in others
        ),
        fastest=fastest_document(result),
        breakdown=None if report is None else report.breakdown_s,
        hidden=None if report is None else report.hidden_s,
        layouts=layouts_document(result),
        solver=document_of(SolverDocument, result.work, tolerance=tolerance),
        certificate=certificate_of(result),
    )
    return sealed(with_parts(document))


def with_parts(document: ResultDocument) -> ResultDocument:
    """List in the certificate, if there is one, the optional parts that the document has."""
    certificate = document.certificate
    if certificate is None:
        return document
    named = {name: getattr(document, name) for name in OPTIONAL_PARTS}
    named["target.price"] = None if document.target is None else document.target.price
    parts = tuple(name for name, part in named.items() if part)
    return document.model_copy(update={"certificate": certificate.model_copy(update={"parts": parts})})


def layouts_document(result: PlanResult) -> LayoutsDocument:
    """Make the record of the outcome of every layout."""
    fates = result.layouts
    counts = {fate: fates.count(fate) if fates else 0 for fate in FATES}
    return LayoutsDocument(
        enumerated=result.enumerated,
        legal=len(fates.space) if fates else 0,
        rejected=result.rejected,
        pruned_fraction=fates.pruned_fraction if fates else None,
        bounds=bound_classes(fates, fates.best) if fates and fates.best is not None else (),
        **counts,
    )


def _robustness(robust: Robustness | None) -> RobustnessDocument | None:
    if robust is None:
        return None
    ends = tuple(
        document_of(EndDocument, end, solved=None if end.solved is None else plan_document(end.solved))
        for end in robust.ends
    )
    return document_of(RobustnessDocument, robust, solved_again=robust.solved, ends=ends)


def _regret(regret: Regret | None) -> RegretDocument | None:
    if regret is None:
        return None
    scenarios = []
    for entry in regret.scenarios:
        constants: dict[str, float | bool] = {}
        if entry.scenario is not None:
            parts = dict(entry.scenario.constants)
            constants = {name: part.value for name, part in parts.items() if part is not None}
        reason = "" if entry.scenario is None else entry.scenario.reason
        scenarios.append(document_of(ScenarioRegretDocument, entry, reason=reason, constants=constants))
    return document_of(RegretDocument, regret, nominal_lost_fraction=regret.nominal, scenarios=tuple(scenarios))


def _any_chunks(result: PlanResult) -> AnyChunksDocument | None:
    bound, gap = result.any_chunks_bound, result.any_chunks_gap
    return None if bound is None or gap is None else AnyChunksDocument(bound=bound, gap=gap)


def simulation_document(
    problem: Problem,
    plan: Plan,
    report: StepReport,
    bar: ErrorBar | None = None,
    evidence: Evidence | None = None,
) -> SimulationDocument:
    """Make the document of a simulated plan."""
    return document_of(
        SimulationDocument,
        report,
        error_bar=bar,
        evidence=evidence_document(evidence, report.step_time_s),
        plan=plan_document(plan, report),
        breakdown=report.breakdown_s,
        hidden=report.hidden_s,
        problem=problem,
    )


def read_plan(path: Path) -> tuple[Problem, Plan]:
    """Read the problem and the plan of a plan file or of any document here; other fields are ignored."""
    kinds = (ResultDocument, SimulationDocument, ExplanationDocument)
    return plan_file.read_plan_file(path, frozenset().union(*(document.model_fields for document in kinds)))


OTHER_KINDS: Final = (
    ({"num_gpus", "refused", "result"}, "the answer of `milpplan min-gpus --json`", "what its --out wrote"),
    ({"measure", "candidates"}, "a choice among several kinds of hardware", "what its --out wrote"),
    ({"plans", "failed"}, "the gaps of some plans", "a result of `milpplan solve` for one of the problems"),
    ({"verdict", "checks"}, "a certification itself", "the result that it is about"),
    ({"fits", "plan"}, "one simulated plan, without a proof", "a result of `milpplan solve`"),
    ({"above_best", "is_outside"}, "an explanation of a plan", "a result of `milpplan solve`"),
    ({"plans", "same_problem"}, "a comparison of plans", "a result of `milpplan solve`"),
    ({"study", "num_cells"}, "the summary of a sweep", "a result of `milpplan solve`"),
    ({"problem"}, "a plan without a proof", "what `milpplan solve` writes, with this plan as --warm-start"),
    ({"milpplan_version"}, "a document of milpplan without a proof", "a result of `milpplan solve`"),
)
"""Documents that have no proof to repeat, recognised by keys, with their name and the document to certify
instead."""


def _refuse_other_kinds(data: Mapping[str, Any], path: Path) -> None:
    plan_file.refuse_lengths(data, path)
    if "status" in data:
        return
    for keys, kind, instead in OTHER_KINDS:
        if keys <= set(data):
            raise InvalidInputError(
                f"{path} is {kind}.", "Expected the result of one solve, with its certificate.", f"Give {instead}."
            )


def read_result(path: Path) -> ResultDocument:
    """Read the unchanged result in a file.

    Raises:
        InvalidInputError: the file is not a result, has no certificate, or was changed since it was sealed.
    """
    text = read_text(path)
    data = parse_json(text, str(path))
    _refuse_other_kinds(data, path)
    document = validated(ResultDocument, data, str(path))
    if document.certificate is None:
        refuse_unproved(document, str(path))
        raise InvalidInputError(
            f"{path} has no certificate.",
            "Expected the result of `milpplan solve --out` or `--json`.",
            "Solve the problem again and write the result to a file.",
        )
    if not is_sealed(document, text):
        raise InvalidInputError(
            f"{path} is not as it was written: its contents do not match the digest of its certificate.",
            "Expected a result that nobody has changed.",
            "Take the original file, or solve again; a plan of your own needs no certificate: delete that field.",
        )
    return document


def refuse_unproved(document: ResultDocument, source: str) -> None:
    """Refuse a result whose search was stopped before it proved anything about other plans, and a robust plan.

    Raises:
        InvalidInputError: nothing is proved, or nothing that can be repeated.
    """
    if document.regret is not None:
        raise InvalidInputError(
            f"{source} is a robust plan: its proof is about several scenarios.",
            "Expected the result of a solve without --robust.",
            "Solve it again with the same --scenarios; `milpplan simulate` checks the plan alone.",
        )
    if document.status == "no_solution_found":
        raise InvalidInputError(
            f"{source} has neither a plan nor a proof that there is none: its search was stopped before.",
            "Expected a result with a plan and a bound, or one that is proved infeasible.",
            "Solve the problem again with more time (--time-limit), then certify that result.",
        )
    if document.status == "feasible" and document.objective.bound is None:
        raise InvalidInputError(
            f"{source} proves nothing: its search was stopped before it had a bound, so no plan is ruled out.",
            "Expected a result with a plan and a bound, or one that is proved infeasible.",
            "Solve the problem again with more time (--time-limit), with this file as --warm-start, then certify "
            "that result; `milpplan simulate` checks the plan alone.",
        )


def proof_sentence(
    status: Status,
    problem: Problem,
    tolerance: float,
    forbid: Sequence[Mapping[str, object]] = (),
    gap: float | None = None,
    bound: float | None = None,
) -> str:
    """Describe the status in a sentence, with its cost model, space and tolerance."""
    model = scope_text(problem, forbid)
    if status == "optimal":
        return f"Optimal within {tolerance_text(tolerance)} (relative) for {model}."
    if status == "infeasible":
        return f"Infeasible: proved that no plan satisfies the request for {model}."
    if status == "feasible" and gap is None:
        return (
            f"Feasible: the plan fits. The search stopped before anything was proved of better ones, for {model}."
        )
    if status == "feasible":
        return f"Feasible: proved within the gap given, not within {tolerance_text(tolerance)}, for {model}."
    proved = "nothing was proved" if bound is None else "no plan is below the bound: proved"
    return f"No plan was found before the search stopped; {proved}, for {model}."


def document_text(document: Record) -> str:
    """Write a JSON document in ASCII with a final newline; a value that fits on a line stays on it."""
    return _pretty(document.model_dump(mode="json"), "") + "\n"


def _pretty(value: Any, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or not value or len(indent) + len(flat) <= LINE_WIDTH:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        opening, closing = "{}"
    else:
        items = [inner + _pretty(item, inner) for item in value]
        opening, closing = "[]"
    return f"{opening}\n" + ",\n".join(items) + f"\n{indent}{closing}"
