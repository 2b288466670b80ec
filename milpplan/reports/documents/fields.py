"""Fields of documents, and the way in which records fill them."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator

from milpplan.optimize import PlanResult
from milpplan.optimize.records import TargetPrice
from milpplan.problem import Problem, Space
from milpplan.problem.records import Computed, Record
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.reports.words.result_words import extrapolated_text
from milpplan.validation import Evidence
from milpplan.version import __version__

Document = TypeVar("Document", bound=BaseModel)


class _Header:
    """Field that no record has."""

    milpplan_version = __version__


def document_of(kind: type[Document], *records: object, **further: object) -> Document:
    """Fill a document with the equally named attributes of records, and its parts likewise.

    Args:
        kind: Class of the document.
        records: Sources, of which the first with an attribute gives it; None has no attributes.
        further: Fields that no record gives, or gives otherwise.

    Returns:
        The document. A required field that no record has is None.
    """
    values = dict(further)
    for name, field in kind.model_fields.items():
        source = next((record for record in (*records, _Header) if hasattr(record, name)), None)
        if name not in values and source is not None:
            values[name] = getattr(source, name)
        elif field.is_required():
            values.setdefault(name, None)
    return kind.model_validate(values, from_attributes=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]
"""Number that is null where it is infinite."""


class IntervalDocument(Record):
    """Proved interval that contains the true value; an end is null where no bound is known."""

    low: Finite
    high: Finite


def digest(record: BaseModel) -> str:
    """Compute the SHA-256 of a record's JSON with its fields in order."""
    return json_digest(record.model_dump(mode="json"))


def json_digest(data: object) -> str:
    """Compute the SHA-256 of plain data, as sorted JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()


class RunDocument(Record):
    """Totals of the whole run. ``least_gpu_hours`` and ``least_cost`` are lower bounds over the declared space."""

    tokens: float
    days: float
    gpu_hours: float
    least_gpu_hours: float | None
    price_per_gpu_hour: float | None
    cost: float | None
    least_cost: float | None


class PriceDocument(Record):
    """Price of a restriction of the space: to a launcher's plans, or by the margin of memory.

    It holds the best of the whole space and its proved bound, in the objective's unit, and the minimum and maximum
    share by which the best of the restricted space exceeds it. ``space`` is the whole space, ``plan`` its best,
    ``problem_sha256`` the digest of the problem with that space; a price without these cannot be certified.
    """

    objective: float
    objective_bound: float
    least_fraction: float
    most_fraction: float
    status: Literal["optimal", "feasible", "infeasible", "no_solution_found"]
    wall_time_s: float
    space: Space | None = None
    plan: PlanDocument | None = None
    problem_sha256: str | None = None


class TargetDocument(Record):
    """Launcher that the space is restricted to; ``price`` is null where the whole space was not solved."""

    name: str
    version: str | None
    price: PriceDocument | None


def price_document(problem: Problem, price: TargetPrice | None) -> PriceDocument | None:
    """Make the record of the price of a restriction of a problem's space; None without a price."""
    if price is None:
        return None
    whole = problem.model_copy(update={"space": price.space})
    return document_of(PriceDocument, price, plan=plan_document(price.plan), problem_sha256=digest(whole))


def target_document(result: PlanResult) -> TargetDocument | None:
    """Make the record of the launcher that a result is restricted to; None without a launcher."""
    space = result.problem.space
    if space.target is None:
        return None
    price = price_document(result.problem, result.target_price)
    return TargetDocument(name=space.target, version=space.target_version, price=price)


class FastestDocument(Record):
    """Fastest plan found, where a simpler plan within the tolerance is the result.

    ``saved_fraction``: share of the result's objective that it saves; where the number of GPUs is minimised, share
    of its step.
    """

    step_time_s: float
    saved_fraction: float
    plan: PlanDocument


def fastest_document(result: PlanResult) -> FastestDocument | None:
    """Make the document of the fastest plan; None where it is the result's plan."""
    if result.fastest is None:
        return None
    return document_of(FastestDocument, result.fastest, plan=plan_document(result.fastest.plan))


class OutsideDocument(Record):
    """Measure of the plan outside the range of a term's runs: its value, and the limit next to it."""

    measure: str
    value: int
    limit: int


class TermDocument(Record):
    """Term of the plan, and the scored runs that use it (docs/accuracy.md lists the terms)."""

    term: str
    num_runs: Computed
    num_sources: Computed
    mean_abs_error: float | None
    """Mean absolute error of the step times of these runs, as a fraction; null without runs."""
    share: float | None
    """Reduction of the step without the term, as a fraction of it; null where runs use the term."""
    share_doubled: float | None
    """Increase of the step with the term doubled."""
    ranges: dict[str, tuple[int, int]] = {}
    """Minimum and maximum over these runs of GPUs, nodes, tensor parallelism, micro-batch and sequence length."""
    outside: tuple[OutsideDocument, ...] = ()
    """Measures of the plan that are not in these ranges."""


class AblationDocument(Record):
    """Comparison of the plan with the fastest other plan, with every unmeasured term scaled by ``times`` in all
    plans."""

    times: Computed
    best_s: float
    rival_s: float | None
    still_best: bool


class EvidenceDocument(Record):
    """Scored runs on the hardware's generation, by term of the plan."""

    generation: str
    num_runs: Computed
    num_memory_runs: Computed
    """Number of runs that state whether they fitted in memory."""
    terms: tuple[TermDocument, ...]
    constants_error: float | None = None
    """Mean error of the hardware's constants on the runs of a framework: the largest over frameworks for bare
    hardware, that of runs left out of the fit for a stack; null without a shipped stack."""
    constants_of: str | None = None
    """Stack that is fitted to these runs."""
    unexercised: tuple[str, ...]
    """Terms of the plan that no run uses."""
    extrapolated: str | None = None
    """Sentence on the ranges of measured runs that the plan leaves; null where it leaves none."""
    share: float | None
    """Reduction of the step without all these terms, as a fraction of it; null where there are none."""
    elsewhere: tuple[str, ...]
    """Terms that no run uses and only other plans of the search use."""
    num_plans: Computed
    """Number of other plans of the search that were compared."""
    ablations: tuple[AblationDocument, ...]


def evidence_document(evidence: Evidence | None, step_time_s: float | None) -> EvidenceDocument | None:
    """Make the record of the evidence for a plan of ``step_time_s`` seconds."""
    if evidence is None or step_time_s is None:
        return None
    missing = tuple(term.name for term in evidence.unexercised)
    without = next((ablated.best_s for ablated in evidence.ablations if ablated.times == 0), None)
    return document_of(
        EvidenceDocument,
        evidence,
        terms=tuple(document_of(TermDocument, term, term=term.name) for term in evidence.terms),
        unexercised=missing,
        extrapolated=extrapolated_text(evidence) or None,
        share=None if without is None or not missing else 1 - without / step_time_s,
    )
