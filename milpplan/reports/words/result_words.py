"""Records and sentences of a result: run totals, price of a launcher, error bars, evidence of measured runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, Final, Protocol

from milpplan.calibration.error_bars import ErrorBar, Rival, Robustness
from milpplan.explain.hardware_choice import RunTotals
from milpplan.optimize import PlanResult
from milpplan.optimize.records import FastestPlan, Regret, TargetPrice
from milpplan.problem import PRIORS, Layout, Plan, Problem
from milpplan.problem.catalog import (
    errors_by_stack,
    launcher_stack,
    overlaid_name,
    stack_provenance,
)
from milpplan.problem.overlay import SHARES
from milpplan.problem.plan import layout_words
from milpplan.reports.blocks import Table
from milpplan.reports.words.plan_words import scope_text
from milpplan.units import (
    count_text,
    counted,
    gib_text,
    lower_bound_text,
    lower_money_text,
    money_text,
    percent_text,
    printable,
    rate_text,
    seconds_text,
    tolerance_text,
)
from milpplan.validation import Evidence
from milpplan.validation.evidence import Outside, TermEvidence

if TYPE_CHECKING:
    from milpplan.explain.records import BreakEvens
    from milpplan.reports.documents.fields import EvidenceDocument, FastestDocument, PriceDocument


def run_text(totals: RunTotals) -> str:
    """Write a line: ``15T tokens in 61.2 days: 1,504,211 GPU-hours, cost 3.76M; proved: not below 3.759M``."""
    days = f"{totals.days:,.3g} days"
    text = f"{count_text(totals.tokens)} tokens in {days}: {rate_text(totals.gpu_hours)} GPU-hours"
    if totals.cost is not None:
        text += f", cost {money_text(totals.cost)}"
    if totals.least_gpu_hours is None:
        return text
    hours, cost = rate_text(math.floor(totals.least_gpu_hours)), totals.least_cost
    return f"{text}; proved: not below {hours if cost is None else lower_money_text(cost)}"


SAME_SHARE = 1e-3
"""Difference up to which the two ends of a price are printed as one value, and below which a price counts as
none."""


def target_price_text(problem: Problem, price: TargetPrice | PriceDocument) -> str:
    """Describe the price of the restriction to a launcher, as an interval where the proofs leave one."""
    least, most = price.least_fraction, price.most_fraction
    more = "slower" if problem.job.objective == "step_time_per_token" else f"more {problem.job.objective}"
    space = f"the same space without --target {problem.space.target}"
    if most <= 0:
        return f"no plan of {space} is better, proved"
    if most <= SAME_SHARE:
        return f"no plan of {space} is more than {percent_text(most, 2)} better, proved"
    if most - least <= SAME_SHARE:
        return f"{percent_text((least + most) / 2)} {more} than the best plan of {space}, proved"
    return f"proved: between {percent_text(least)} and {percent_text(most)} {more} than the best plan of {space}"


def constants_text(problem: Problem, bar: ErrorBar | None, launcher: str | None = None) -> str:
    """Name the fitted constants of each node type with their error; of bare hardware say which steps its stacks
    give. Empty where no shipped stack is for it.

    Args:
        problem: the problem.
        bar: the error bar of the plan's step, with its steps by stack.
        launcher: launcher whose stack matters; None: that of the space.
    """
    launcher = launcher or problem.space.target
    parts = {}
    for hardware in problem.node_types:
        name, errors = overlaid_name(hardware), errors_by_stack(hardware)
        fit = stack_provenance(name)
        if fit is not None:
            left_out = f", left-out error {percent_text(errors[name])}" if errors else ""
            # A class of frameworks is named, the sources of one framework are not.
            of_class, is_class, _ = fit.data.partition(":")
            runs = of_class if is_class else counted(fit.num_measurements, "published run")
            parts[name] = f"{name}, fitted to {runs}{left_out}"
        elif errors:
            ends = dict.fromkeys(percent_text(error, 0) for error in (min(errors.values()), max(errors.values())))
            stack = launcher_stack(launcher, name)
            if launcher:
                fitted = f"{stack} is fitted" if stack else f"no stack is fitted to {launcher}"
            elif bar is not None and bar.by_stack_s:
                fitted = _fitted_steps(bar.by_stack_s)
            else:
                fitted = f"{counted(len(errors), 'fitted stack')} (milpplan list hardware)"
            parts[name] = f"{name} alone: mean errors of {' to '.join(ends)} by framework; {fitted}"
    return "; ".join(parts.values())


def _fitted_steps(steps: Mapping[str, float]) -> str:
    """Name the stacks with the shortest and the longest step."""
    ends = sorted(steps, key=lambda stack: steps[stack])
    shown = [
        f"{seconds_text(steps[stack])} (+{stack.partition('+')[2]})"
        for stack in dict.fromkeys([*ends[:1], *ends[-1:]])
    ]
    give = "gives" if len(steps) == 1 else "give"
    return f"{counted(len(steps), 'fitted stack')} {give} {' to '.join(shown)}"


def margin_text(result: PlanResult) -> str:
    """Describe the margin of memory and its price: ``margin 4.0 GiB (0.1 % slower than without)``."""
    assert result.report is not None
    sizes = [stage.usable_memory_bytes - stage.capacity_bytes for stage in result.report.stages]
    text = f"margin {' or '.join(dict.fromkeys(map(gib_text, sizes)))}"
    price = result.margin_price
    if price is None:
        return text if any(sizes) else ""
    # Rounded outwards, so that nothing unproved is claimed.
    least, most = floor(1e3 * price.least_fraction) / 1e3, ceil(1e3 * price.most_fraction) / 1e3
    more = "slower" if result.problem.job.objective == "step_time_per_token" else "more GPU-hours"
    cost = f"{percent_text(least)} to {percent_text(most)}" if least > 0 else f"at most {percent_text(most)}"
    return f"{text} ({cost} {more} than without)"


def fastest_text(problem: Problem, layout: Layout, other: FastestDocument | FastestPlan) -> str:
    """Describe the fastest plan by the fields in which it differs from a layout: ``0.06 % faster (6.45 s):
    vpp=7``."""
    words = layout_words(layout, other.plan.layout) or "other layers or recomputation of the stages"
    how = "fewer GPU-hours" if problem.job.objective == "gpu_hours" else "faster"
    return f"{percent_text(other.saved_fraction, 2)} {how} ({seconds_text(other.step_time_s)}): {words}"


SHOWN_PARTS = 3


def bar_range_text(bar: ErrorBar) -> str:
    """Write the range of an error bar: ``5.41 s to 6.32 s (one sigma, -5.6 %, +10.3 %; overlay x)``."""
    low, high = bar.step_time_s - bar.below_s, bar.step_time_s + bar.above_s
    below, above = percent_text(bar.below_s / bar.step_time_s), percent_text(bar.above_s / bar.step_time_s)
    origin = "no constant is fitted" if bar.overlay == PRIORS.overlay else f"overlay {bar.overlay}"
    return f"{seconds_text(low)} to {seconds_text(high)} (one sigma, -{below}, +{above}; {origin})"


def error_bar_text(bar: ErrorBar) -> str:
    """Write an error bar with its largest parts: ``...; most from gemm efficiency 4.1 %, ...``."""
    parts = sorted(((max(sides), name) for name, sides in bar.parts_s.items()), reverse=True)
    shares = [
        f"{name.removesuffix('_s').replace('_', ' ')} {percent_text(most / bar.step_time_s)}"
        for most, name in parts[:SHOWN_PARTS]
    ]
    return f"{bar_range_text(bar)}; most from {', '.join(shares)}" if shares else bar_range_text(bar)


def regret_text(regret: Regret) -> str:
    """Describe the two proved bounds of a worst-case regret, each rounded so that it claims no more than its
    proof."""
    loses = "what it loses to the best plans of all scenarios is not proved"
    if regret.at_most is not None:
        loses = f"loses at most {percent_text(math.ceil(regret.at_most * 1e4) / 1e4, 2)} to the best plan of any"
        loses += " scenario"
    promise = "nothing is proved yet of other plans"
    if regret.at_least is not None:
        promise = f"no plan can promise less than {percent_text(math.floor(regret.at_least * 1e4) / 1e4, 2)}"
    return f"{loses}; {promise}"


def regret_sentence(result: PlanResult, tolerance: float) -> str:
    """Describe in a sentence what is proved of a robust plan."""
    assert result.regret is not None
    scope = scope_text(result.problem, result.forbid)
    at_most, at_least = result.regret.at_most, result.regret.at_least
    # Each of the two proofs holds within the tolerance; what is printed is what lies between them.
    width = tolerance if at_most is None or at_least is None else max(tolerance, at_most - at_least)
    shown = math.ceil(width * 1e4 * (1 - 1e-9)) / 1e4 if width > tolerance else width
    within = f"within {tolerance_text(shown)}" if result.status == "optimal" else "stopped early"
    return f"Least worst-case regret, {within}: {regret_text(result.regret)}, for {scope}."


class RegretEntry(Protocol):
    """Plan in one scenario: record or document (``ScenarioRegret``)."""

    @property
    def name(self) -> str:
        """Name of the scenario."""

    @property
    def step_time_s(self) -> float:
        """Step of the plan."""

    @property
    def best_s(self) -> float:
        """Step of the best plan found."""

    @property
    def regret_at_most(self) -> float | None:
        """Proved upper bound of the loss."""

    @property
    def nominal_lost_fraction(self) -> float:
        """Loss of the best nominal plan."""


def regret_table(entries: Sequence[RegretEntry]) -> Table:
    """Compare a robust plan with the best plans of all scenarios, and with the best nominal plan."""
    rows = [
        (
            printable(entry.name),
            seconds_text(entry.step_time_s),
            seconds_text(entry.best_s),
            "-" if entry.regret_at_most is None else percent_text(entry.regret_at_most),
            percent_text(max(0.0, entry.nominal_lost_fraction)),
        )
        for entry in entries
    ]
    return Table("", ("scenario", "step", "best plan", "loses at most", "best nominal plan loses"), rows)


def break_even_text(found: BreakEvens | None) -> str:
    """Say how far doubts may go before another plan is better. Empty without plans to compare with."""
    if found is None or not (found.num_plans and found.doubts):
        return ""
    limits = [text for doubt in found.doubts if doubt.rival is not None for text in _constant_texts(doubt.values)]
    alone = "one doubt at a time, " if len(limits) > 1 else ""
    range_text = (
        f"while {' and '.join(limits)}" if limits else f"at the ends of all {counted(len(found.doubts), 'doubt')}"
    )
    return f"{alone}the best of {counted(found.num_plans + 1, 'plan')} {range_text}"


def break_even_table(plan: Plan, found: BreakEvens) -> Table:
    """Show how far each doubt may go before another plan is better, and which."""
    rows = []
    for doubt in found.doubts:
        values = "; ".join(_constant_texts(doubt.values))
        rival = "none, to the end of the doubt"
        if doubt.rival is not None:
            words = layout_words(plan.layout, doubt.rival.layout)
            rival = printable(words or "the same layout with other stages or recomputation")
        rows.append((printable(doubt.scenario.name), printable(values), rival))
    ends = found.num_plans - found.num_kept
    kept = f"{found.num_kept:,} kept by the search and " if found.num_kept else ""
    others = counted(found.num_plans, "other plan")
    title = f"Break-even among {others} ({kept}{ends:,} best uniform plans at the ends of the doubts)"
    return Table(title, ("doubt", "the plan stays the best while", "then better"), rows, words=(0, 1, 2))


CONSTANT_WORDS: Final[dict[str, tuple[str, float, str]]] = {
    "hidden_gather_fraction": ("at least {} of parameter gathers beside compute hide", 100.0, " %"),
    "hidden_reduce_fraction": ("at least {} of gradient reductions beside compute hide", 100.0, " %"),
    "scale_out_efficiency": ("links between nodes reach {} of their described rate", 100.0, " %"),
    "dispatch_efficiency": ("tokens reach experts at {} of the described rate", 100.0, " %"),
    "congestion_s_per_byte": ("congestion costs at most {} for a GB and node", 1e12, " ms"),
    "layer_launch_s": ("launching a layer takes at most {}", 1e3, " ms"),
    "message_s": ("a message between stages takes the host at most {}", 1e3, " ms"),
}
"""Sentence, scale and unit of constants at their break-even."""


def _constant_texts(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the constants at their break-even; equal shares of gathers and reductions together."""
    shares = {name: values[name] for name in SHARES if name in values}
    if len(shares) == len(SHARES) and len(set(shares.values())) == 1:
        share = math.ceil(next(iter(shares.values())) * 100.0 - 1e-9)
        yield f"at least {share} % of the data-parallel communication beside compute hides"
        values = {name: value for name, value in values.items() if name not in shares}
    for name, value in values.items():
        yield _constant_text(name, value)


def _constant_text(name: str, value: float) -> str:
    """Write a constant at its break-even, rounded to the safe side."""
    if name not in CONSTANT_WORDS:
        return f"{name} is {value:.3g}"
    sentence, scale, unit = CONSTANT_WORDS[name]
    amount = value * scale
    rounded = f"{math.ceil(amount - 1e-9)}" if unit == " %" else f"{math.floor(amount * 100 + 1e-9) / 100:g}"
    return sentence.format(f"{rounded}{unit}")


def robustness_text(robust: Robustness) -> str:
    """Describe the comparison at both ends, and its result."""
    if not robust.solved and not robust.num_plans:
        return (
            "not checked at the ends of the uncertainty: the search simulated this plan only; --check-ends "
            "solves again at both"
        )
    looked = f"the {counted(robust.num_plans, 'other plan')} that the search kept"
    remark = " (what bounds excluded was not simulated; --check-ends solves again)"
    if robust.solved:
        bounds = ", each with its bound" if all(end.lower_bound_s is not None for end in robust.ends) else ""
        looked = f"all plans of the space (solved again at both ends{bounds})"
        remark = " (all constants moved together; --robust moves one doubt at a time)"
    ends = "; ".join(_end_text(end) for end in robust.ends)
    verdict = "still the best at both ends" if robust.still_best else "not the best at both ends"
    return f"{verdict} among {looked}: {ends}{remark}"


def _end_text(end: Rival) -> str:
    text = f"all constants one sigma {'faster' if end.end == 'fast' else 'slower'}: {seconds_text(end.best_s)}"
    if end.rival_s is not None:
        text += f", the next {seconds_text(end.rival_s)}"
        if end.weight != 1:
            text += f" (its step of {seconds_text(end.rival_s / end.weight)}, by GPUs and sequences)"
    if end.lower_bound_s is not None:
        text += f", bound {lower_bound_text(end.lower_bound_s)}"
    return text


MIN_SHOWN = 0.005


def evidence_sentence(evidence: EvidenceDocument) -> str:
    """Describe the evidence for a plan, for readers who do not know the terms."""
    if not evidence.num_runs:
        return f"No measured run on {evidence.generation} is known: nothing of this plan is checked against one."
    runs = f"{counted(evidence.num_runs, 'measured run')} on {evidence.generation}"
    beyond = f" The plan is {evidence.extrapolated}." if evidence.extrapolated else ""
    worst = worst_error(evidence)
    error = "" if worst is None else f", with mean errors of at most {percent_text(worst, 0)}"
    if evidence.unexercised:
        share = f" ({percent_text(evidence.share, 0)} of the step)" if evidence.share else ""
        terms = ", ".join(term.replace("_", " ") for term in evidence.unexercised)
        return f"The cost model was held to {runs}{error}. No measured run covers {terms}{share}.{beyond}"
    return f"The cost model was held to {runs}, which have every part of this plan{error}.{beyond}"


def worst_error(evidence: Evidence | EvidenceDocument) -> float | None:
    """Find the largest mean error that applies: of the runs of any term, and of the hardware's constants on the
    runs of a framework; None where no run has an error."""
    errors = (evidence.constants_error, *(term.mean_abs_error for term in evidence.terms))
    return max((error for error in errors if error is not None), default=None)


def worst_runs(evidence: Evidence) -> str:
    """Name the runs that have the largest mean error; empty where no run has an error."""
    worst = worst_error(evidence)
    if worst is None:
        return ""
    if worst == evidence.constants_error:
        return f"that {evidence.constants_of} is fitted to"
    return f"that have {next(term.words for term in evidence.terms if term.mean_abs_error == worst)}"


MEASURES: Final = {
    "num_gpus": ("more than {} GPUs", "fewer than {} GPUs"),
    "num_nodes": ("more than {} nodes", "fewer than {} nodes"),
    "tp": ("tp above {}", "tp below {}"),
    "micro_batch_size": ("more than {} sequences in a micro-batch", "fewer than {} sequences in a micro-batch"),
    "sequence_length": ("more than {} tokens a sequence", "fewer than {} tokens a sequence"),
}
"""Words for a measure beyond the largest and below the smallest measured value."""


def extrapolated_text(evidence: Evidence, shown: int | None = None) -> str:
    """Name the ranges of measured runs that a plan leaves.

    Args:
        evidence: Evidence for the plan.
        shown: Number of measures to name, those above the largest measured value first; others are counted. None:
            all.

    Returns:
        ``extrapolated: no measured run on Ampere has more than 128 GPUs with ZeRO 3 in every micro-batch``; empty
        where the plan leaves no range.
    """
    furthest: dict[tuple[bool, str], tuple[Outside, TermEvidence]] = {}
    for term in evidence.extrapolated:
        for one in term.outside:
            side = one.value < one.limit, one.measure
            if side not in furthest or one.ratio > furthest[side][0].ratio:
                furthest[side] = one, term
    # A plan beyond the measured numbers of GPUs is beyond those of nodes.
    ordered = sorted(furthest.items(), key=lambda item: (item[0][0], -item[1][0].ratio))
    limits = [
        (term.words, _limit_text(one))
        for (below, measure), (one, term) in ordered
        if measure != "num_nodes" or (below, "num_gpus") not in furthest
    ]
    more = 0 if shown is None else len(limits) - shown
    rest = f" (and {more} more in --verbose)" if more > 0 else ""
    by_term: dict[str, list[str]] = {}
    for words, limit in limits[:shown]:
        by_term.setdefault(words, []).append(limit)
    names = [f"{' or '.join(texts)} with {words}" for words, texts in by_term.items()]
    where = f"extrapolated: no measured run on {evidence.generation} has"
    return f"{where} {', or '.join(names)}{rest}" if names else ""


def _limit_text(outside: Outside) -> str:
    above, below = MEASURES[outside.measure]
    return (above if outside.value > outside.limit else below).format(f"{outside.limit:,}")


def evidence_text(evidence: Evidence) -> str:
    """Describe the evidence for the plan, and whether the choice of the plan depends on unmeasured terms."""
    where = evidence.generation
    if not evidence.num_runs:
        return f"no scored run on {where} ships with milpplan: nothing of this plan is checked there"
    sentences = [_terms_text(evidence)]
    if evidence.elsewhere:
        sentences.append(f"only other plans use {', '.join(evidence.elsewhere)}, which none exercises")
    sentences += _choice_texts(evidence)
    if evidence.extrapolated:
        sentences.append(extrapolated_text(evidence))
    if not evidence.num_memory_runs:
        sentences.append(f"no run on {where} says whether it fitted")
    return "; ".join(sentences)


def _terms_text(evidence: Evidence) -> str:
    missing = sorted(evidence.unexercised, key=lambda term: -(term.share or 0.0))
    worst = worst_error(evidence)
    known = "" if worst is None else f"; mean errors of at most {percent_text(worst, 0)}"
    known += "" if worst is None else f" (of the runs {worst_runs(evidence)})"
    if missing:
        terms = ", ".join(f"{term.words} ({share_text(term)})" for term in missing)
        return f"terms that no scored run on {evidence.generation} exercises: {terms}{known}"
    text = f"scored runs on {evidence.generation} exercise every term of this plan"
    if not evidence.terms:
        return text
    least = min(evidence.terms, key=lambda term: term.num_runs)
    runs, sources = counted(least.num_runs, "run"), counted(least.num_sources, "source")
    return f"{text}; least tested: {least.words} ({runs} of {sources}){known}"


def share_text(term: TermEvidence) -> str:
    """Write the share of a term as ``7 % of the step``: whole per cents, because no run checks it."""
    share = term.share or 0.0
    return f"{percent_text(share, 0)} of the step" if share >= MIN_SHOWN else "below 1 % of the step"


def _choice_texts(evidence: Evidence) -> Iterator[str]:
    """State whether the plan stays ahead of the others without the terms, and with them twice."""
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
