"""Answer of ``milpplan tune``: the proposed trial, the trials so far, and what the measured steps prove."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, exp
from typing import Literal

from milpplan.calibration.trials import Played, Trial, TuneState, best_trial
from milpplan.problem import Plan
from milpplan.problem.records import Count, Record
from milpplan.reports.blocks import Block, Fact, Paragraph, Table
from milpplan.reports.words.plan_words import layout_text, scope_text
from milpplan.units import counted, percent_text, printable, seconds_text, signed_percent_text


class TuneDocument(Record):
    """Answer of ``milpplan tune``. ``proved_regret`` and ``expected_regret`` are fractions."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    sentence: str
    """Statement that is proved, or the reason why nothing is."""
    is_proved: bool
    """True if the proved regret is within the limit."""
    proved_regret: float | None
    scenarios_left: tuple[str, ...]
    best_plan: Plan | None
    """Best measured plan."""
    best_step_time_s: float | None
    trials: tuple[Trial, ...]
    pending: Count | None
    """Index of the plan to try; None where no trial is proposed."""
    pending_plan: Plan | None
    expected_regret: float | None
    """Regret that is expected after that trial."""
    files: tuple[str, ...]
    """Launch files of that trial."""


def tune_document(state: TuneState, files: Sequence[str]) -> TuneDocument:
    """Make the document of a state; ``files`` are the launch files of the pending trial."""
    model, best = state.model, best_trial(state.trials)
    proposal = None if state.pending is None else model.propose(state.trials)
    left = model.posterior(state.trials).left
    return TuneDocument(
        milpplan_version=state.milpplan_version,
        sentence=tune_sentence(state),
        is_proved=state.is_proved,
        proved_regret=state.proved_regret,
        scenarios_left=tuple(entry.name for entry, kept in zip(state.scenarios, left, strict=True) if kept),
        best_plan=None if best is None else state.candidates[best.candidate].plan,
        best_step_time_s=None if best is None else best.step_time_s,
        trials=state.trials,
        pending=state.pending,
        pending_plan=None if state.pending is None else state.candidates[state.pending].plan,
        expected_regret=None if proposal is None else proposal.expected_regret,
        files=tuple(files),
    )


def tune_sentence(state: TuneState) -> str:
    """State what the measured steps prove, with the cost model and the space."""
    posterior, regret = state.model.posterior(state.trials), state.proved_regret
    scope = scope_text(state.problem)
    if best_trial(state.trials) is None:
        return f"No step is measured: nothing is proved, for {scope}."
    if not posterior.explained:
        return (
            "No scenario explains the measured steps within three sigma: nothing is proved. Give scenarios that "
            f"do, or calibrate the hardware with these logs. ({scope})"
        )
    if regret is None:
        return f"One measured step tests no scenario: nothing is proved, for {scope}."
    # Rounded up, so that it claims no more than its proof.
    share = percent_text(ceil(regret * 1e4) / 1e4, 2)
    number = counted(int(posterior.left.sum()), "scenario")
    return (
        f"The best measured plan is at most {share} slower than the best plan of the space, in each of the "
        f"{number} left, for {scope}."
    )


def tune_blocks(state: TuneState, files: Sequence[str], next_steps: Sequence[str]) -> Iterator[Block]:
    """Show the proposed trial, all trials, the scenarios and the proof.

    Args:
        state: the state.
        files: launch files of the pending trial.
        next_steps: commands that help from here.
    """
    best = best_trial(state.trials)
    if state.pending is not None:
        document = tune_document(state, files)
        plan = printable(layout_text(state.candidates[state.pending].plan))
        yield Paragraph(f"Trial {len(state.trials) + 1}: {plan}", "bold")
        if document.expected_regret is not None:
            proved = "proved " if best is not None else ""
            later = "" if best is not None else ", proved once a second step is measured"
            share = percent_text(document.expected_regret, 2)
            yield Fact("expected", f"a {proved}regret of {share} after it{later}")
        yield Fact("files", printable(", ".join(files)))
    elif best is not None:
        plan = printable(layout_text(state.candidates[best.candidate].plan))
        yield Paragraph(f"Best measured plan: {plan}, {seconds_text(best.step_time_s or 0.0)} a step", "bold")
    else:
        yield Paragraph("Every trial failed.", "bold")
    yield Fact("proof", printable(tune_sentence(state)))
    limit = f"a proved regret of at most {percent_text(state.max_regret)}"
    if state.is_proved:
        yield Fact("stop", f"{limit} is reached after {counted(len(state.trials), 'trial')}")
    elif state.pending is None:
        yield Fact("stop", f"all {counted(len(state.candidates), 'candidate')} were tried; {limit} is not reached")
    if state.trials:
        yield _trials_table(state)
    yield _scenario_table(state)
    for index, step in enumerate(next_steps):
        yield Fact("next" if index == 0 else "", step)


def _trials_table(state: TuneState) -> Table:
    """List the trials with their measured and nominal steps."""
    rows = []
    for number, trial in enumerate(state.trials, start=1):
        candidate = state.candidates[trial.candidate]
        measured = "failed" if trial.step_time_s is None else seconds_text(trial.step_time_s)
        row = str(number), printable(layout_text(candidate.plan)), measured, seconds_text(candidate.steps_s[0])
        rows.append((*row, percent_text(trial.one_sigma), printable(trial.source)))
    return Table("", ("trial", "plan", "measured", "nominal", "one sigma", "source"), rows, words=(0, 1, -1))


def _scenario_table(state: TuneState) -> Table:
    """List the scenarios with their weights, the factor that all plans share, and the regret of the best plan."""
    posterior, best = state.model.posterior(state.trials), best_trial(state.trials)
    rows = []
    for index, scenario in enumerate(state.scenarios):
        kept, regret = bool(posterior.left[index]), "-"
        if best is not None and kept:
            ratio = state.candidates[best.candidate].steps_s[index] / scenario.lower_bound_s
            regret = percent_text(max(0.0, ratio - 1.0), 2)
        weight = percent_text(float(posterior.weights[index]), 0) if kept else "dropped"
        shared = signed_percent_text(exp(float(posterior.shared[index])) - 1.0)
        rows.append((printable(scenario.name), weight, shared, regret))
    return Table("", ("scenario", "weight", "all steps", "best measured plan loses at most"), rows)


def play_blocks(name: str, layouts: Sequence[str], played: Played) -> Iterator[Block]:
    """Show the trials of a sweep that was played, up to the stop.

    Args:
        name: of the sweep.
        layouts: layout of every run.
        played: order of its trials.
    """
    steps = [trial.step_time_s for trial in played.trials if trial.step_time_s is not None]
    best, shortest, rows = min(steps), float("inf"), []
    for number, trial in enumerate(played.trials[: played.num_until_stop]):
        shortest = min(shortest, trial.step_time_s or float("inf"))
        proved = played.regrets[number]
        rows.append(
            (
                str(number + 1),
                printable(layouts[trial.candidate]),
                "failed" if trial.step_time_s is None else seconds_text(trial.step_time_s),
                "-" if proved is None else percent_text(proved, 2),
                "-" if shortest == float("inf") else percent_text(shortest / best - 1.0, 2),
            )
        )
    title = f"{printable(name)}: {counted(len(played.trials), 'run')}, stopped after {counted(len(rows), 'trial')}"
    yield Paragraph(title, "bold")
    yield Table("", ("trial", "layout", "measured", "proved", "true regret"), rows, words=(0, 1))
