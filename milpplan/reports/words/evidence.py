"""Evidence of measured runs for a plan: record and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from milpplan.problem.records import Computed, Record
from milpplan.units import counted, percent_text, seconds_text
from milpplan.validation.evidence import Evidence, TermEvidence

MIN_SHOWN = 0.005


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
    unexercised: tuple[str, ...]
    """Terms of the plan that no run uses."""
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
    return EvidenceDocument(
        generation=evidence.generation,
        num_runs=evidence.num_runs,
        num_memory_runs=evidence.num_memory_runs,
        terms=tuple(_term(term) for term in evidence.terms),
        unexercised=missing,
        share=None if without is None or not missing else 1 - without / step_time_s,
        elsewhere=evidence.elsewhere,
        num_plans=evidence.num_plans,
        ablations=tuple(
            AblationDocument(**asdict(ablated), still_best=ablated.still_best) for ablated in evidence.ablations
        ),
    )


def _term(term: TermEvidence) -> TermDocument:
    values = asdict(term)
    del values["words"]
    return TermDocument(term=values.pop("name"), **values)


def evidence_sentence(evidence: EvidenceDocument) -> str:
    """Describe the evidence for a plan, for readers who do not know the terms."""
    if not evidence.num_runs:
        return f"No measured run on {evidence.generation} is known: nothing of this plan is checked against one."
    runs = f"{counted(evidence.num_runs, 'measured run')} on {evidence.generation}"
    if evidence.unexercised:
        share = f" ({percent_text(evidence.share, 0)} of the step)" if evidence.share else ""
        terms = ", ".join(term.replace("_", " ") for term in evidence.unexercised)
        return f"The cost model was held to {runs}. No measured run covers {terms}{share}."
    worst = worst_error(evidence.terms)
    error = "" if worst is None else f", with mean errors of at most {percent_text(worst, 0)}"
    return f"The cost model was held to {runs}, which have every part of this plan{error}."


def worst_error(terms: Sequence[TermDocument] | Sequence[TermEvidence]) -> float | None:
    """Find the largest mean error of the runs of any term, as a fraction; None where no run has an error."""
    return max((term.mean_abs_error for term in terms if term.mean_abs_error is not None), default=None)


def worst_term(terms: Sequence[TermEvidence]) -> TermEvidence | None:
    """Find the term whose runs have the largest mean error; None where no run has an error."""
    worst = worst_error(terms)
    return next((term for term in terms if worst is not None and term.mean_abs_error == worst), None)


def evidence_text(evidence: Evidence) -> str:
    """Describe the evidence for the plan, and whether the choice of the plan depends on unmeasured terms."""
    where = evidence.generation
    if not evidence.num_runs:
        return f"no scored run on {where} ships with milpplan: nothing of this plan is checked there"
    sentences = [_terms_text(evidence)]
    if evidence.elsewhere:
        sentences.append(f"only other plans use {', '.join(evidence.elsewhere)}, which none exercises")
    sentences += _choice_texts(evidence)
    if not evidence.num_memory_runs:
        sentences.append(f"no run on {where} says whether it fitted")
    return "; ".join(sentences)


def _terms_text(evidence: Evidence) -> str:
    missing = sorted(evidence.unexercised, key=lambda term: -(term.share or 0.0))
    if missing:
        terms = ", ".join(f"{term.words} ({share_text(term)})" for term in missing)
        return f"terms that no scored run on {evidence.generation} exercises: {terms}"
    text = f"scored runs on {evidence.generation} exercise every term of this plan"
    if not evidence.terms:
        return text
    least = min(evidence.terms, key=lambda term: term.num_runs)
    runs, sources = counted(least.num_runs, "run"), counted(least.num_sources, "source")
    text = f"{text}; least tested: {least.words} ({runs} of {sources})"
    worst = worst_term(evidence.terms)
    if worst is None:
        return text
    error = percent_text(worst.mean_abs_error or 0.0, 0)
    return f"{text}; mean errors of at most {error} (of the runs that have {worst.words})"


def share_text(term: TermEvidence) -> str:
    """Write the share of a term as ``7 % of the step``: whole per cents, because no run checks it."""
    share = term.share or 0.0
    return f"{percent_text(share, 0)} of the step" if share >= MIN_SHOWN else "below 1 % of the step"


def _choice_texts(evidence: Evidence) -> Iterator[str]:
    """Whether the plan stays ahead of the others without the terms, and with them twice."""
    others = f"the {counted(evidence.num_plans, 'other plan')} of the search"
    beaten, winner = others, f"one of {others}"
    if evidence.num_plans == 1:
        beaten = winner = "the other plan of the search"
    for one in evidence.ablations:
        if one.rival_s is None:
            continue
        cost = "nothing" if one.times == 0 else "2x as much"
        verdict = f"this plan still beats {beaten}" if one.still_best else f"{winner} wins"
        times = f"{seconds_text(one.best_s)} against {seconds_text(one.rival_s)}"
        yield f"if these terms cost {cost}, {verdict} ({times})"
