"""The benchmark of published gaps: what it says of a run, and what its tables make of known gaps."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published_gaps import (
    FROM_ONE,
    PublishedGap,
    best_runs,
    choices_of,
    judged_run,
    largest_gaps,
    section,
    summary_table,
    sweep_table,
)
from milpplan.explain.judge import Solves
from milpplan.validation import compare_run
from tests.validation.cases import run


def a_gap(number: int, gap: float, measured_s: float, **changes: object) -> PublishedGap:
    """A run of a sweep with this gap, by both spaces, and this measured time."""
    one = PublishedGap(
        run=f"run-{number}",
        group="a source",
        model="a model",
        hardware="dgx-h100",
        num_gpus=8,
        global_batch=8,
        sequence_length=2048,
        layout="tp8",
        step_s=1.0,
        fits=True,
        scored=True,
        measured_s=measured_s,
        status="optimal",
        saved_low=gap,
        saved_high=gap,
        is_outside=False,
        best_s=1.0 - gap,
        best="dp8",
        own_low=gap,
        own_high=gap,
        own_s=1.0 - gap,
        own="dp8",
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def test_a_run_is_judged_by_both_spaces() -> None:
    """A source's choices are a part of the uniform space, so they save no more; its own runs are inside."""
    compared = [compare_run(run()), compare_run(run(parallel__recompute="full", parallel__zero=0))]
    own = choices_of(compared)
    assert own.zero_stage == (0, 1)
    assert own.recompute == ("none", "full")
    assert own.vpp == (1,)
    solves = Solves()
    gaps = [judged_run(one, own, solves, 20.0) for one in compared]
    for one in gaps:
        assert one.status == "optimal"
        assert one.own_low is not None
        assert one.saved_low is not None
        assert 0 <= one.own_low <= one.saved_low
    # One problem: a solve of each space for both runs.
    assert len(solves.found) == 2


def test_tables_of_known_gaps() -> None:
    """Where every larger gap is a longer measured time, tau is 1 and the classes grow; reversed it is -1."""
    gaps = [a_gap(number, share, 1.0 + share) for number, share in enumerate((0.02, 0.12, 0.25, 0.6))]
    straight = [(one, one.measured_s or 0.0) for one in gaps]
    turned = [(one, 3.0 - measured) for one, measured in straight]
    first, second = sweep_table([straight])
    assert "| all | 1 | 4 | 1.00 | 1.00 | 1 |" in first
    assert "| below 5 % | 1 | +0 %" in second
    assert "| 50 % and more | 1 | +57 %" in second
    assert "| all | 1 | 4 | -1.00 | -1.00 | 0 |" in sweep_table([turned])[0]
    assert "| 20 % to 30 % | 1 | 1 |" in summary_table(gaps)
    assert "4 runs; the bounds of 4 are" in section(gaps, [straight], "")


def test_which_runs_are_shown() -> None:
    """The largest gap and the fastest run of every job; few of one source, none that is not scored."""
    slow, fast = a_gap(1, 0.5, 1.4), a_gap(2, 0.1, 0.9)
    assert [one.run for one in largest_gaps([slow, fast])] == ["run-1"]
    assert [one.run for one in best_runs([slow, fast])] == ["run-2"]
    assert largest_gaps([replace(slow, scored=False)]) == []
    assert largest_gaps([replace(slow, measured_s=10.0)]) == []
    many = [a_gap(number, 0.5, 1.0, num_gpus=number) for number in range(1, 30)]
    assert len(largest_gaps(many)) == FROM_ONE
