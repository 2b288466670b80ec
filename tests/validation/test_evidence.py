"""Evidence: the table that ships is of the runs that ship, and a plan is told what it rests on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.exercised_terms import counted, table_of
from milpplan import Plan, Problem, simulate
from milpplan.cli.app import app
from milpplan.problem import NodeGroup, Range, load_hardware
from milpplan.problem.catalog import errors_by_stack, stacks_on
from milpplan.reports.documents import document_text, evidence_document, simulation_document
from milpplan.reports.words.result_words import (
    evidence_sentence,
    evidence_text,
    extrapolated_text,
    worst_error,
)
from milpplan.validation import BY_NAME, UNSCORED_FLAGS, Evidence, compare, used_terms
from milpplan.validation.evidence import (
    Exercise,
    ExercisedTerms,
    Generation,
    evidence,
    exercised_terms,
    generation_name,
    measures,
    ranges,
    scored_runs,
)
from milpplan.validation.runs import (
    SIBLINGS,
    Run,
    Statement,
    UnstatedError,
    is_scored,
    read_runs,
    state,
    step_measure,
)
from tests.amounts import first
from tests.validation.cases import record, shipped_runs, written
from tests.validation.test_terms import case

WIDE = {
    "num_gpus": (8, 64),
    "num_nodes": (1, 8),
    "tp": (1, 8),
    "micro_batch_size": (1, 4),
    "sequence_length": (1, 8192),
}
ONE = Exercise(num_runs=3, num_sources=2, error_with_stacks=0.04, error_without_stacks=0.2, ranges=WIDE)


def table(*terms: str, name: str = "Hopper") -> ExercisedTerms:
    """A table in which three runs of two sources exercise these terms in bf16."""
    generation = Generation(runs={"bf16": 7}, memory_runs=9, terms={"bf16": dict.fromkeys(terms, ONE)})
    return ExercisedTerms(made_by="a test", milpplan_version="0", generations={name: generation})


def told(problem: Problem, plan: Plan, others: tuple[Plan, ...], known: ExercisedTerms) -> Evidence:
    """The evidence of a plan."""
    return evidence(problem, plan, simulate(problem, plan).step_time_s, others, known)


@cache
def shipped_scored() -> list[tuple[Run, Statement]]:
    """The scored runs that ship, stated anew."""
    scored = []
    for run in shipped_runs().runs:
        if run.grade != "A" or UNSCORED_FLAGS & set(run.flags):
            continue
        try:
            statement = state(run, stacks=False)
            measure = step_measure(run, statement)
        except UnstatedError:
            continue
        if measure is not None and is_scored(statement.problem.hardware.name):
            scored.append((run, statement))
    return scored


def test_the_shipped_table_counts_the_shipped_runs() -> None:
    """Runs and sources of every term are those of the scored runs that ship. If this fails, make the table again:
    python -m benchmarks.validation_tables."""
    scored = shipped_scored()
    shipped = {
        (name, precision, term): (one.num_runs, one.num_sources)
        for name, generation in exercised_terms().generations.items()
        for precision, terms in generation.terms.items()
        for term, one in terms.items()
    }
    assert shipped == counted(scored)
    runs = sum(sum(generation.runs.values()) for generation in exercised_terms().generations.values())
    assert runs == len(scored)


@pytest.mark.long
def test_the_shipped_table_has_the_errors_of_this_version() -> None:
    """Errors of the step times are those of a validation now, to a tenth of a per cent."""
    runs = shipped_runs()
    now = table_of(compare(runs).comparisons, compare(runs, stacks=False).comparisons, "", "")
    for name, generation in exercised_terms().generations.items():
        assert generation.memory_runs == now.generations[name].memory_runs
        for precision, terms in generation.terms.items():
            for term, one in terms.items():
                again = now.generations[name].terms[precision][term]
                assert one.error_with_stacks == pytest.approx(again.error_with_stacks, abs=1e-3)
                assert one.error_without_stacks == pytest.approx(again.error_without_stacks, abs=1e-3)


def test_a_table_is_made_of_scored_runs(tmp_path: Path) -> None:
    """Two layouts, an unscored run and one out of memory: each term counts its runs (2 x 4 GPUs of a stage are in
    one node, 2 x 8 are not), its error is their mean."""
    records = [
        record(id="a", measured={"status": "ok", "step_time_s": 1.0}),
        record(id="b", parallel__pp=1, parallel__dp=8, measured={"status": "ok", "step_time_s": 1.0}),
        record(id="c", grade="B"),
        record(id="d", measured={"status": "oom"}),
    ]
    found = compare(read_runs(written(tmp_path / "runs.json", records))).comparisons
    made = table_of(found, found, "a test", "0").generations["Hopper"]
    assert (made.runs, made.memory_runs) == ({"bf16": 2}, 4)
    terms = made.terms["bf16"]
    assert {name: one.num_runs for name, one in terms.items()} == {
        "tensor_parallel_inside": 2,
        "gradient_reduction_inside": 1,
        "gradient_reduction_across": 1,
        "parameter_gather": 2,
        "pipeline": 1,
    }
    errors = [abs(one.error_fraction or 0.0) for one in found[:2]]
    assert terms["pipeline"].error_with_stacks == pytest.approx(errors[0], abs=1e-4)
    assert terms["tensor_parallel_inside"].error_without_stacks == pytest.approx(sum(errors) / 2, abs=1e-4)


def test_the_error_of_a_term_is_the_largest_over_number_formats() -> None:
    """Runs in another format that are predicted better do not make the printed error smaller."""
    problem, plan = case(tp=8)
    known = table("tensor_parallel_inside", "gradient_reduction_across", "parameter_gather")
    better = ONE.model_copy(update={"error_without_stacks": 0.01, "num_sources": 9})
    known.generations["Hopper"].terms["fp8"] = {"tensor_parallel_inside": better}
    (term,) = [one for one in told(problem, plan, (), known).terms if one.name == "tensor_parallel_inside"]
    assert (term.mean_abs_error, term.num_sources) == (0.2, 9)


@pytest.mark.parametrize("name", first(1, sorted(SIBLINGS, reverse=True)))
def test_hardware_with_constants_of_another_has_no_scored_run(name: str) -> None:
    """A model is solved on it, and its evidence says that nothing is checked."""
    options = "--gpus 16 --global-batch 64 --space uniform --fix pp=1 --json"
    answer = CliRunner().invoke(app, ["solve", "llama3-8b", name, *options.split()])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)["evidence"]
    assert (found["num_runs"], scored_runs(load_hardware(name))) == (0, 0)
    assert found["generation"] == generation_name(load_hardware(name))


def test_hardware_of_ones_own_belongs_to_its_accelerator() -> None:
    """A description under another name is of the generation of its GPU; an unknown GPU is one of its own."""
    own = load_hardware("dgx-h100").model_copy(update={"name": "our cluster"})
    assert generation_name(own) == "Hopper"
    other = own.model_copy(update={"accelerator": own.accelerator.model_copy(update={"name": "X1"})})
    assert generation_name(other) == "our cluster"


def test_terms_that_runs_exercise_have_their_error() -> None:
    """Nothing is ablated; the error is that with stacks only where the hardware has one; the text names the least
    exercised term."""
    problem, plan = case(tp=8)
    known = table("tensor_parallel_inside", "gradient_reduction_across", "parameter_gather")
    found = told(problem, plan, (), known)
    assert (found.unexercised, found.ablations, found.elsewhere) == ((), (), ())
    assert [one.mean_abs_error for one in found.terms] == [0.2] * 3
    fitted = problem.model_copy(update={"hardware": load_hardware("dgx-h100+composer")})
    assert [one.mean_abs_error for one in told(fitted, plan, (), known).terms] == [0.04] * 3
    text = evidence_text(found)
    assert "scored runs on Hopper exercise every term" in text
    assert "least tested: tensor parallelism inside a domain (3 runs of 2 sources)" in text
    assert "mean errors of at most 50 % (of the runs that dgx-h100+nanotron is fitted to)" in text


def ranged(**ranges: tuple[int, int]) -> ExercisedTerms:
    """A table of the terms of a plan with tp=8, whose runs have these ranges and wide ones."""
    known = table("tensor_parallel_inside", "gradient_reduction_across", "parameter_gather")
    (terms,) = known.generations["Hopper"].terms.values()
    terms["tensor_parallel_inside"] = ONE.model_copy(update={"ranges": WIDE | ranges})
    return known


def test_a_plan_outside_the_range_of_measured_runs_says_so() -> None:
    """Above and below are told apart, and the furthest above comes first; JSON and page have the same sentence.
    Within the ranges nothing is said."""
    problem, plan = case(tp=8)
    layout, length = plan.layout, problem.job.sequence_length
    assert extrapolated_text(told(problem, plan, (), ranged())) == ""
    found = told(
        problem,
        plan,
        (),
        ranged(
            num_gpus=(1, layout.num_gpus - 1),
            num_nodes=(9, 9),
            tp=(1, 2),
            sequence_length=(length + 1, 9 * length),
        ),
    )
    (term,) = found.extrapolated
    assert term.name == "tensor_parallel_inside"
    assert {one.measure: one.limit for one in term.outside} == {
        "num_gpus": layout.num_gpus - 1,
        "num_nodes": 9,
        "tp": 2,
        "sequence_length": length + 1,
    }
    text = extrapolated_text(found)
    assert text == (
        f"extrapolated: no measured run on Hopper has tp above 2 or more than {layout.num_gpus - 1} GPUs or fewer "
        f"than 9 nodes or fewer than {length + 1:,} tokens a sequence with tensor parallelism inside a domain"
    )
    first = "extrapolated: no measured run on Hopper has tp above 2 with tensor parallelism inside a domain"
    assert extrapolated_text(found, 1) == f"{first} (and 3 more in --verbose)"
    assert text in evidence_text(found)
    document = evidence_document(found, 1.0)
    assert document is not None
    assert document.extrapolated == text
    assert [one.limit for one in document.terms[0].outside] == [one.limit for one in term.outside]
    assert f"The plan is {text}." in evidence_sentence(document)
    document = evidence_document(replace(found, constants_error=None), 1.0)
    assert document is not None
    assert "mean errors of at most 20 %" in evidence_sentence(document)


def test_a_run_more_never_narrows_a_range() -> None:
    """Ranges are the minimum and maximum over runs, number formats together."""
    first, second = {"tp": 4, "num_gpus": 8}, {"tp": 2, "num_gpus": 64}
    assert ranges([first]) == {"tp": (4, 4), "num_gpus": (8, 8)}
    assert ranges([first, second]) == {"tp": (2, 4), "num_gpus": (8, 64)}
    problem, plan = case(tp=8)
    known = ranged(tp=(1, 4))
    assert told(problem, plan, (), known).extrapolated
    other = ONE.model_copy(update={"ranges": WIDE | {"tp": (8, 8)}})
    known.generations["Hopper"].terms["fp8"] = {"tensor_parallel_inside": other}
    found = told(problem, plan, (), known)
    assert not found.extrapolated
    assert next(term for term in found.terms if term.num_runs == 6).ranges["tp"] == (1, 8)


def test_the_shipped_ranges_hold_every_scored_run() -> None:
    """No scored run of the shipped file is outside the range of a term that it has."""
    shipped = exercised_terms().generations
    for run, statement in shipped_scored():
        problem, plan = statement.problem, statement.plan
        formats = shipped[generation_name(problem.hardware)].terms[problem.job.precision]
        sizes = measures(problem, plan)
        for term in used_terms(problem, plan):
            for name, (low, high) in formats[term.name].ranges.items():
                assert low <= sizes[name] <= high, run.id


def test_terminal_and_page_name_the_error_of_the_worst_term() -> None:
    """With runs of every term, 34 % for the worst and 8 % for the term of the fewest runs, both say 34 %."""
    problem, plan = case(tp=8)
    found = told(
        problem, plan, (), table("tensor_parallel_inside", "gradient_reduction_across", "parameter_gather")
    )
    errors = {"tensor_parallel_inside": 0.08, "gradient_reduction_across": 0.34}
    terms = tuple(replace(one, mean_abs_error=errors.get(one.name, 0.01)) for one in found.terms)
    found = replace(found, terms=terms, constants_error=None)
    text = evidence_text(found)
    assert "least tested: tensor parallelism inside a domain" in text
    worst = next(one.words for one in terms if one.name == "gradient_reduction_across")
    assert f"mean errors of at most 34 % (of the runs that have {worst})" in text
    assert "8 %" not in text
    document = evidence_document(found, 1.0)
    assert document is not None
    assert "with mean errors of at most 34 %" in evidence_sentence(document)
    stacked = replace(found, constants_error=0.41, constants_of="dgx-h100+slow")
    assert "mean errors of at most 41 % (of the runs that dgx-h100+slow is fitted to)" in evidence_text(stacked)
    document = evidence_document(stacked, 1.0)
    assert document is not None
    assert "with mean errors of at most 41 %" in evidence_sentence(document)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-h100+nemo", "dgx-a100-80", "dgx-b200", "mi300x"])
def test_no_error_of_the_constants_is_above_the_printed_error(name: str) -> None:
    """The evidence has the largest error of the stacks on bare hardware, and a stack's own on left-out runs."""
    problem, plan = case(tp=8)
    hardware = load_hardware(name)
    errors = errors_by_stack(hardware)
    found = evidence(problem.model_copy(update={"hardware": hardware}), plan, 1.0)
    assert found.constants_error == max(errors.values(), default=None)
    assert all(error <= (worst_error(found) or 0.0) for error in errors.values())
    assert set(errors) == ({name} if "+" in name else set(stacks_on(name)))


def test_a_term_that_no_run_exercises_is_told_with_its_share() -> None:
    """The share is what the breakdown says: the ring's exposed time."""
    problem, plan = case(cp=4)
    found = told(problem, plan, (), table("gradient_reduction_across", "parameter_gather"))
    (ring,) = found.unexercised
    report = simulate(problem, plan)
    assert ring.share == pytest.approx(report.breakdown_s["cp_exposed"] / report.step_time_s, abs=1e-6)
    small = evidence_text(replace(found, terms=(replace(ring, share=0.004),)))
    assert "no scored run on Hopper exercises: the ring of context parallelism (below 1 % of the step)" in small
    larger = replace(found, terms=(replace(ring, share=0.0712),))
    assert "the ring of context parallelism (7 % of the step)" in evidence_text(larger)
    assert found.num_plans == 0
    assert "other plan" not in evidence_text(found)


def test_the_choice_is_looked_at_without_and_with_twice_what_no_run_exercises() -> None:
    """A plan without the term against one with it: the first is ahead or behind as its simulated step is against
    the ablated one of the other."""
    problem, plan = case(tp=8)
    _, other = case(cp=8)
    known = table("tensor_parallel_inside", "gradient_reduction_across", "parameter_gather")
    found = told(problem, plan, (other,), known)
    assert found.unexercised == ()
    assert found.elsewhere == ("the ring of context parallelism",)
    base, rival = (simulate(problem, one) for one in (plan, other))
    factor = plan.layout.global_batch_size / other.layout.global_batch_size
    without, doubled = found.ablations
    assert (without.times, doubled.times) == (0, 2)
    assert without.best_s == doubled.best_s == base.step_time_s
    ring = rival.breakdown_s["cp_exposed"]
    assert without.rival_s == pytest.approx(factor * (rival.step_time_s - ring), abs=1e-7)
    more = ring + rival.hidden_s["cp_hidden"]
    assert doubled.rival_s == pytest.approx(factor * (rival.step_time_s + more), abs=1e-7)
    assert without.still_best == (base.step_time_s <= (without.rival_s or 0.0))
    text = evidence_text(found)
    assert "only other plans use the ring of context parallelism, which none exercises" in text
    ahead, behind = replace(without, rival_s=without.best_s * 2), replace(doubled, rival_s=doubled.best_s / 2)
    text = evidence_text(replace(found, ablations=(ahead, behind), num_plans=3))
    assert "if these terms cost nothing, this plan still beats the 3 other plans of the search (" in text
    assert "if these terms cost 2x as much, one of the 3 other plans of the search wins (" in text
    single = evidence_text(replace(found, ablations=(behind,), num_plans=1))
    assert "if these terms cost 2x as much, the other plan of the search wins (" in single


def test_plans_are_compared_in_what_was_minimised() -> None:
    """GPU-hours weigh a step with its GPUs; where the number of GPUs is minimised, times are not compared."""
    problem, plan = case(cp=8)
    _, half = case(cp=4, dp=4)
    job = problem.job.model_copy(
        update={"num_gpus": Range(minimum=16, maximum=32), "global_batch_size": Range(minimum=32, maximum=64)}
    )
    wide = problem.model_copy(update={"job": job})
    hours = wide.model_copy(update={"job": job.model_copy(update={"objective": "gpu_hours"})})
    known = table("gradient_reduction_across", "parameter_gather")
    by_time, by_hours = (told(one, plan, (half,), known).ablations[0].rival_s for one in (wide, hours))
    assert by_time is not None
    assert by_hours == pytest.approx(by_time * half.layout.num_gpus / plan.layout.num_gpus)
    fewest = wide.model_copy(update={"job": job.model_copy(update={"objective": "num_gpus"})})
    found = told(fewest, plan, (half,), known)
    assert found.num_plans == 0
    assert found.ablations[0].rival_s is None


def test_hardware_without_runs_is_told() -> None:
    """Every term of the plan is then unexercised, and no choice is looked at."""
    problem, plan = case(tp=8)
    found = told(problem, plan, (plan,), table("tensor_parallel_inside", name="Ampere"))
    assert (found.num_runs, len(found.unexercised), found.ablations) == (0, 3, ())
    assert "no scored run on Hopper ships with milpplan" in evidence_text(found)


def test_a_cluster_of_several_types_is_told_that_nothing_checks_it() -> None:
    """No measured run is on two types of accelerators: nothing is looked up, and the names of both are said."""
    problem, plan = case(tp=8)
    step_s = simulate(problem, plan).step_time_s
    other = NodeGroup(hardware=load_hardware("dgx-a100-80"), num_gpus=8)
    found = evidence(problem.model_copy(update={"other_hardware": (other,)}), plan, step_s)
    assert (found.num_runs, found.terms, found.ablations) == (0, (), ())
    assert "no scored run on Hopper with Ampere ships with milpplan" in evidence_text(found)


def test_documents_carry_the_evidence() -> None:
    """The record has every term, names what is missing, and the share of all of it at once."""
    problem, plan = case(cp=4)
    report = simulate(problem, plan)
    found = told(problem, plan, (), table("gradient_reduction_across", "parameter_gather"))
    document = json.loads(document_text(simulation_document(problem, plan, report, None, found)))["evidence"]
    assert document["unexercised"] == ["context_parallel"]
    assert {term["term"] for term in document["terms"]} <= set(BY_NAME)
    assert document["share"] == pytest.approx(found.unexercised[0].share)
    assert [one["times"] for one in document["ablations"]] == [0, 2]
    assert evidence_document(None, 1.0) is None


@pytest.mark.long
def test_the_command_says_what_the_plan_rests_on(tmp_path: Path) -> None:
    """The first screen of solve says that no run with experts is measured on Hopper and that the error is not
    known; --verbose says it of every term, and the document has the record."""
    words = ["solve", "mixtral-8x7b", "dgx-h100", "--gpus", "32", "--global-batch", "64", "--space", "uniform"]
    file = tmp_path / "result.json"
    plain = CliRunner().invoke(app, [*words, "--out", str(file)])
    assert plain.exit_code == 0
    line = " ".join(plain.stdout.split())
    assert "doubt no measured run on Hopper covers routing and products of experts (" in line
    assert "none has all that this plan has" in line
    line = " ".join(CliRunner().invoke(app, [*words, "--verbose"]).stdout.split())
    assert "terms that no scored run on Hopper exercises:" in line
    assert "routing and products of experts (" in line
    document = json.loads(file.read_text())["evidence"]
    assert document["generation"] == "Hopper"
    assert "experts" in document["unexercised"]
    assert document["num_runs"] > 0
