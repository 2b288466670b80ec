"""Answer of ``solve``: a first screen of at most 25 lines, and everything else after it.

The first screen says what the plan is, how long a step takes and how far that can be wrong, whether it fits, what
is proved, the doubt that matters most, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from milpplan.calibration.error_bars import ErrorBar, Robustness
from milpplan.explain.hardware_choice import RunTotals
from milpplan.optimize import PlanResult
from milpplan.optimize.records import ProgramAnswer
from milpplan.problem import Layout, Plan, Problem, Schedule
from milpplan.problem.plan import layout_words
from milpplan.reports.answers.step import (
    accuracy_blocks,
    execution_words,
    ignored_keys_blocks,
    memory_text,
    nodes_text,
    plan_blocks,
    step_headline,
)
from milpplan.reports.blocks import Block, Fact, Paragraph, Span
from milpplan.reports.words.plan_words import hybrid_text, images_text, mtp_text, rollout_text, scope_text
from milpplan.reports.words.result_words import (
    bar_range_text,
    break_even_table,
    break_even_text,
    constants_text,
    extrapolated_text,
    fastest_text,
    margin_text,
    regret_sentence,
    regret_table,
    robustness_text,
    run_text,
    share_text,
    target_price_text,
    worst_error,
    worst_runs,
)
from milpplan.simulation import StepReport
from milpplan.units import (
    NS_PER_S,
    counted,
    gap_text,
    lower_bound_text,
    percent_text,
    printable,
    rate_text,
    seconds_text,
    tolerance_text,
)
from milpplan.validation import Evidence

if TYPE_CHECKING:
    from milpplan.explain.records import BreakEvens

SHOWN_RULES: Final = 3
"""Rules that are named of all that refused layouts."""
SHOWN_TERMS: Final = 2
"""Terms without a measured run that the first screen names."""
SHOWN_RANGES: Final = 1
"""Ranges of measured runs that the plan leaves and the first screen names."""
SCHEDULE_NAMES: Final[dict[Schedule, str]] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipeV",
}
SHARDED: Final = (
    "",
    "optimizer states",
    "gradients and optimizer states",
    "weights, gradients and optimizer states",
)
"""Tensors that the replicas shard at each stage of ZeRO."""


def solve_blocks(
    result: PlanResult,
    tolerance: float,
    bar: ErrorBar | None = None,
    robust: Robustness | None = None,
    evidence: Evidence | None = None,
    totals: RunTotals | None = None,
    break_even: BreakEvens | None = None,
    *,
    verbose: bool = False,
    next_steps: Sequence[str] = (),
) -> list[Block]:
    """Show the answer of a solve.

    Args:
        result: What the search found.
        tolerance: Relative tolerance of the proof.
        bar: Uncertainty of the step time from the hardware's constants.
        robust: Comparison with other plans at both ends of that uncertainty.
        evidence: What measured runs say about the plan.
        totals: Days, GPU-hours and cost of the whole run.
        break_even: How far each doubt may go before another plan is better.
        verbose: Add stages, where time and memory go, all evidence and the search.
        next_steps: What to do next, a line each.
    """
    parts: list[Block] = []
    if result.plan is None or result.report is None:
        parts = [_without_plan(result)]
    else:
        parts = [
            _title(result.problem, result.plan, result.report),
            *plan_lines(result.problem, result.plan, result.report),
            *_trust(result, tolerance, bar, robust, evidence, break_even),
            *_asked(result, robust, totals),
        ]
        if verbose:
            parts += _details(result, tolerance, bar, robust, evidence)
            if break_even is not None and break_even.doubts:
                parts += [Paragraph(), break_even_table(result.plan, break_even)]
    if verbose or result.plan is None:
        parts += _search(result)
    if next_steps:
        parts.append(Fact("next", "\n".join(next_steps)))
    return parts


def _without_plan(result: PlanResult) -> Paragraph:
    """Say that there is no plan, or that none was found in time."""
    scope = scope_text(result.problem, result.forbid)
    if result.status == "infeasible":
        return Paragraph(f"infeasible: proved for {scope}", "bold red")
    headline = Paragraph(f"stopped before any plan was found ({scope})", "bold yellow")
    if result.lower_bound_s is None:
        return headline
    return headline.extended(f"\nno plan takes less than {lower_bound_text(result.lower_bound_s)} a step: proved")


def _title(problem: Problem, plan: Plan, report: StepReport) -> Paragraph:
    title = step_headline(problem, plan, report)
    rates = f", {rate_text(report.tokens_per_s)} tokens/s, MFU {percent_text(report.mfu)}"
    return replace(title, further=(*title.further, Span(rates, "default")))


def plan_lines(problem: Problem, plan: Plan, report: StepReport) -> Iterator[Block]:
    """Describe a plan by its degrees, in words, and by the nodes of its stages."""
    layout = plan.layout
    degrees = {name: getattr(layout, name) for name in ("tp", "cp", "ep", "etp", "pp", "vpp", "dp")}
    typed = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
    typed += [f"micro_batch_size={layout.micro_batch_size}", f"zero_stage={layout.zero_stage}"]
    typed += [f"dp_replicate={layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    typed += [f"schedule={layout.schedule}"] if layout.pp > 1 else []
    if layout.rank_order != Layout.model_fields["rank_order"].default:
        typed.append(f"rank_order={layout.rank_order}")
    yield Fact("plan", f"{' '.join(typed)} ({counted(layout.num_gpus, 'GPU')})")
    yield Fact("in words", printable(f"{'; '.join(_words(problem, plan))}."))
    further = "; ".join(execution_words(plan))
    if further:
        yield Fact("execution", further)
    nodes = nodes_text(problem, plan, report)
    if nodes:
        yield Fact("nodes", printable(nodes))


def _words(problem: Problem, plan: Plan) -> Iterator[str]:
    """Describe what is split over which GPUs, from the layer to the batch, then what is recomputed."""
    layout, layers = plan.layout, problem.model.num_layers
    if layout.tp > 1:
        also = ", with sequence parallelism" if layout.sequence_parallel else ""
        yield f"every layer on {layout.tp} GPUs (tensor parallel{also})"
    if layout.cp > 1:
        exchange = f", {layout.ulysses} exchange heads" if layout.ulysses > 1 else ""
        yield f"every sequence on {layout.cp} GPUs (context parallel{exchange})"
    if layout.ep > 1 or layout.etp > 1:
        cut = f", each on {layout.etp} GPUs" if layout.etp > 1 else ""
        yield f"experts in {counted(layout.ep, 'group')}{cut} (expert parallel)"
    if layout.pp > 1:
        held = {stage.num_layers for stage in plan.virtual_stages}
        each = counted(" to ".join(str(number) for number in sorted({min(held), max(held)})), "layer")
        pieces = f", each of {layout.vpp} virtual stages with {each}" if layout.vpp > 1 else ""
        yield f"{layers} layers in {layout.pp} pipeline stages ({SCHEDULE_NAMES[layout.schedule]}){pieces}"
    number = " or ".join(f"{each:,}" for each in layout.replica_micro_batches or (layout.num_micro_batches,))
    batches = counted(number, "micro-batch", "micro-batches")
    length = counted(problem.job.sequence_length, "token")
    each = f"{batches} of {counted(layout.micro_batch_size, 'sequence')} of {length}{images_text(problem)}"
    replicas = f"{counted(layout.dp, 'replica')}, each with {each}" if layout.dp > 1 else f"1 replica with {each}"
    sharded = f", which shard {SHARDED[layout.zero_stage]} (ZeRO {layout.zero_stage}){hybrid_text(layout)}"
    yield replicas + (sharded if layout.zero_stage and layout.dp > 1 else "")
    if not problem.inference:
        yield _recomputed(plan, layers)
    if mtp := mtp_text(problem):
        yield mtp
    if aligned := problem.job.alignment_text:
        yield aligned
    if problem.job.rollout is not None:
        yield rollout_text(problem.job.rollout)


def _recomputed(plan: Plan, layers: int) -> str:
    used: dict[str, int] = {}
    for stage in plan.virtual_stages:
        for mode, count in (("selective", stage.recompute.selective), ("full", stage.recompute.full)):
            if count:
                used[mode] = used.get(mode, 0) + count
    if not used:
        return "no recomputation"
    if list(used.values()) == [layers]:
        return f"all {layers} layers use {next(iter(used))} recomputation"
    return " and ".join(f"{count} of {layers} layers use {mode} recomputation" for mode, count in used.items())


def _trust(
    result: PlanResult,
    tolerance: float,
    bar: ErrorBar | None,
    robust: Robustness | None,
    evidence: Evidence | None,
    break_even: BreakEvens | None,
) -> Iterator[Block]:
    """Step time with its error, memory with its margin, the proof, and the doubt that matters most."""
    assert result.plan is not None
    assert result.report is not None
    yield Fact("step", printable(_step(result, bar, evidence)))
    constants = constants_text(result.problem, bar)
    if constants:
        yield Fact("constants", printable(constants))
    margin = margin_text(result)
    memory = memory_text(result.report) + (f"; {margin}" if margin else "")
    if result.report.memory_verdict == "tight":
        memory += "; try it before you rely on it"
    elif evidence is not None and evidence.num_runs and not evidence.num_memory_runs:
        memory += f"; no measured run on {evidence.generation} says whether it fitted"
    yield Fact("memory", printable(memory))
    style = "bold green" if result.status == "optimal" else "bold yellow"
    if result.regret is None:
        yield Fact("proof", _proof(result, tolerance), style)
    else:
        yield Fact("proof", printable(regret_sentence(result, tolerance)), style)
        yield regret_table(result.regret.scenarios)
    if result.fastest is not None:
        saved = fastest_text(result.problem, result.plan.layout, result.fastest)
        yield Fact("fastest", printable(f"{saved}; the plan above is simpler (--fastest prints the fastest)"))
    # One way for another plan to win is enough on the first screen.
    settled = evidence is None or all(one.still_best for one in evidence.ablations)
    doubts = [_doubt(result, robust, evidence), break_even_text(break_even) if settled else ""]
    if any(doubts):
        yield Fact("doubt", printable("; ".join(filter(None, doubts))))
    yield from ignored_keys_blocks(result.problem)


def _step(result: PlanResult, bar: ErrorBar | None, evidence: Evidence | None) -> str:
    """The step time with its error: no less than the hardware's uncertainty and the errors of measured runs, and
    where the plan leaves the range of these runs."""
    parts = [seconds_text(result.step_time_s or 0.0)]
    if bar is not None:
        parts.append(f"error bar {bar_range_text(bar)}")
    worst = None if evidence is None else worst_error(evidence)
    if evidence is not None and worst is not None:
        rest = "; none has all that this plan has" if evidence.unexercised else ""
        runs = f"{worst_runs(evidence)}{rest}"
        parts.append(f"mean error up to {percent_text(worst, 0)} (in the measured runs {runs})")
    elif evidence is not None or result.problem.inference:
        parts.append("not measured")
    beyond = "" if evidence is None else extrapolated_text(evidence, SHOWN_RANGES)
    return f"{', '.join(parts)}; {beyond}" if beyond else ", ".join(parts)


def _proof(result: PlanResult, tolerance: float) -> str:
    """State what is proved, for which cost model and which declared space."""
    scope = scope_text(result.problem, result.forbid)
    within = f"within {tolerance_text(tolerance)} for {scope}"
    start = f"optimal {within}" if result.status == "optimal" else f"best plan so far, not proved {within}"
    facts = []
    if result.lower_bound_s is not None:
        job = result.problem.job
        fixed = isinstance(job.num_gpus, int) and isinstance(job.global_batch_size, int)
        bound = lower_bound_text(result.lower_bound_s)
        facts.append(f"no plan takes less than {bound} a step" if fixed else f"bound {bound} a step")
    if result.objective is not None and result.objective_name == "gpu_hours":
        facts.append(f"{rate_text(result.objective)} GPU-hours")
    if result.objective is not None and result.objective_name == "num_gpus":
        facts.append(counted(rate_text(result.objective), "GPU"))
    if result.gap is not None:
        facts.append(f"gap {gap_text(result.gap)}")
    elif result.objective_name != "num_gpus":
        facts.append("nothing is proved yet of better plans")
    return f"{start}: {', '.join(facts)}" if facts else start


def _doubt(result: PlanResult, robust: Robustness | None, evidence: Evidence | None) -> str:
    """The doubt that matters most: another plan may be faster, then the step may be wrong."""
    if robust is not None and not robust.still_best:
        lost = next(end for end in robust.ends if not end.still_best)
        side = "faster" if lost.end == "fast" else "slower"
        shorter = 1.0 - (lost.rival_s or 0.0) / lost.best_s
        differs = (
            ""
            if lost.rival is None or result.plan is None
            else layout_words(result.plan.layout, lost.rival.layout)
        )
        other = f"the plan with {differs}" if differs else "one with other layers or recomputation"
        hours = result.problem.job.objective == "gpu_hours"
        saves = f"takes {percent_text(shorter)} fewer GPU-hours" if hours else f"is {percent_text(shorter)} faster"
        return f"with all constants one sigma {side} {other} {saves}"
    if evidence is None:
        alone = "no measured run is of a forward pass alone: nothing of this plan is checked"
        return alone if result.problem.inference else ""
    if not evidence.num_runs:
        return f"no measured run on {evidence.generation} is known: nothing of this plan is checked there"
    if evidence.unexercised or evidence.elsewhere:
        return _unmeasured(evidence)
    if evidence.terms:
        least = min(evidence.terms, key=lambda term: term.num_runs)
        runs, sources = counted(least.num_runs, "measured run"), counted(least.num_sources, "source")
        return f"least tested: {least.words} ({runs} of {sources})"
    return ""


def _unmeasured(evidence: Evidence) -> str:
    """Name what no measured run covers, and whether the choice depends on it."""
    terms = sorted(evidence.unexercised, key=lambda term: -(term.share or 0.0))
    names = [f"{term.words} ({share_text(term)})" for term in terms] or list(evidence.elsewhere)
    shown = ", ".join(names[:SHOWN_TERMS])
    shown += f" and {len(names) - SHOWN_TERMS} more" if len(names) > SHOWN_TERMS else ""
    whose = "" if terms else ", which only other plans use"
    text = f"no measured run on {evidence.generation} covers {shown}{whose}"
    for one in sorted(evidence.ablations, key=lambda ablation: -ablation.times):
        if not one.still_best and one.rival_s is not None:
            cost = "2x as much" if one.times else "nothing"
            times = f"{seconds_text(one.rival_s)} against {seconds_text(one.best_s)}"
            return f"{text}. If that costs {cost}, another plan wins ({times})"
    return text


def _asked(result: PlanResult, robust: Robustness | None, totals: RunTotals | None) -> Iterator[Block]:
    """Answers to what an option asked for."""
    if robust is not None and robust.solved:
        yield Fact("choice", robustness_text(robust))
    if result.target_price is not None:
        yield Fact("launcher", printable(target_price_text(result.problem, result.target_price)))
    if totals is not None:
        yield Fact("whole run", run_text(totals))


def _details(
    result: PlanResult,
    tolerance: float,
    bar: ErrorBar | None,
    robust: Robustness | None,
    evidence: Evidence | None,
) -> Iterator[Block]:
    """All evidence, then layout, stages, and where the time and the memory go."""
    assert result.plan is not None
    assert result.report is not None
    yield Paragraph()
    if result.any_chunks_gap is not None and result.any_chunks_gap > max(tolerance, result.gap or 0.0):
        saved = f"uneven interleaving could save at most {percent_text(result.any_chunks_gap)}"
        yield Fact("splits", f"{saved} (proved; --space any looks for it)")
    yield from accuracy_blocks(bar, None)
    if robust is not None and not robust.solved:
        yield Fact("choice", robustness_text(robust))
    yield from accuracy_blocks(None, evidence)
    yield Paragraph()
    yield from plan_blocks(result.problem, result.plan, result.report)


def _search(result: PlanResult) -> Iterator[Block]:
    """Count the outcomes of the layouts, and the work of the solvers."""
    if result.layouts is not None:
        yield from _fates(result)
    work = result.work
    yield Fact(
        "solver",
        f"backend {work.backend}{f' ({work.versions})' if work.versions else ''}: {work.simulations:,} "
        f"simulations, {work.relaxations:,} relaxations, {work.integer_programs:,} integer programs "
        f"({work.witnessed:,} witnessed); {seconds_text(result.wall_time_s)}",
    )


def _fates(result: PlanResult) -> Iterator[Block]:
    """Count the outcomes of the layouts, and name the rules that refused most."""
    # The first screen does without documents, whose classes take longer to make than a small solve.
    from milpplan.reports.documents.document import layouts_document

    layouts = layouts_document(result)
    fates = (
        f"{layouts.does_not_fit:,} do not fit, {layouts.bounded:,} decided by bounds, {layouts.relaxed:,} by "
        f"relaxations, {layouts.solved:,} solved, {layouts.open:,} open"
    )
    yield Fact("layouts", f"{layouts.legal:,} legal of {layouts.enumerated:,} enumerated: {fates}")
    if layouts.pruned_fraction is not None:
        # Rounded down, so that 100 % means all of them.
        share = percent_text(math.floor(layouts.pruned_fraction * 1e5) / 1e5, 3)
        left = layouts.solved + layouts.open
        yield Fact("pruned", f"{share} of the legal layouts, with proof: all but {left:,}")
    refused = sorted(((count, name) for name, count in layouts.rejected.items() if count), reverse=True)
    if refused:
        top = ", ".join(f"{name} ({count:,})" for count, name in refused[:SHOWN_RULES])
        more = f" and {len(refused) - SHOWN_RULES} more rules" if len(refused) > SHOWN_RULES else ""
        yield Fact("refused", f"by {top}{more}")


def program_fact(answer: ProgramAnswer) -> Fact:
    """Write the answer of the program over blocks as a fact."""
    return Fact("program", program_text(answer))


def program_text(answer: ProgramAnswer) -> str:
    """Write size, solver and optimum of the program over blocks in a line."""
    size = f"{counted(answer.program.num_rows, 'row')}, {counted(answer.program.num_variables, 'column')}"
    layouts = f"{counted(answer.num_blocks, 'block')}, {counted(answer.num_open, 'open layout')}"
    solved = f"{answer.backend} in {seconds_text(answer.solver_s)}"
    if not answer.proved:
        return f"{size}, {layouts}; {solved}: stopped, optimum at least {_ns_text(answer.optimum_ns)}"
    agrees = "equal to the search's answer" if answer.agrees else "NOT the search's answer"
    saved = 1.0 - answer.step_time_ns / answer.searched_ns
    if answer.agrees and saved > 0:
        agrees = f"{percent_text(saved)} faster than the search's plan, as its tolerance allows"
    rounding = gap_text(max(0.0, 1.0 - answer.optimum_ns / answer.step_time_ns))
    optimum = f"optimum {_ns_text(answer.optimum_ns)}, its plan within {rounding}"
    return f"{size}, {layouts}; {solved}: {optimum}, {agrees}"


def _ns_text(nanoseconds: float) -> str:
    return f"{nanoseconds / NS_PER_S:.6f} s"
