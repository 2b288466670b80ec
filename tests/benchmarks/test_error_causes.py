"""The tables of what the error is made of: points add up, and rows of an earlier engine are told from others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.error_causes import CLASSES, cause_of, order_table, share_table, shares, with_earlier_engine
from milpplan.validation import Comparison, compare_run, grouped
from milpplan.validation.runs import StepMeasure
from tests.validation.cases import run, shipped_runs


def measured(factor: float, **changes: object) -> Comparison:
    """A small run that took ``factor`` times as long as predicted."""
    one = compare_run(run(**changes))
    return replace(one, step=StepMeasure(one.report.step_time_s * factor, "step time"))


def test_points_add_up_to_the_error_of_a_generation() -> None:
    """Two sources weigh the same; what like runs have in common and what scatters around it are the whole."""
    found = [measured(1 / (1 + error), id=f"a{error}") for error in (0.1, 0.2, -0.25)]
    found += [measured(1 / 1.08, id="b", group="zero-bubble")]
    error = grouped(found)
    assert error is not None
    parts = shares(found)
    assert sum(one.points for one in parts) == pytest.approx(100 * error.mean_abs_error)
    own = next(one for one in parts if one.source == "simumax-b200")
    # Medians of like runs: 0.1; what is left: 0, 0.1, 0.35 of three runs, half the weight.
    assert own.points == pytest.approx(100 * 0.55 / 3 / 2)
    assert own.scatter == pytest.approx(100 * 0.45 / 3 / 2)
    assert f"{100 * error.mean_abs_error:.2f}" in share_table(parts)


def test_a_row_of_the_earlier_engine_is_told_from_one_of_the_present() -> None:
    """Of two neighbours in nanotron's list one took ten times as long as predicted, which the constant of the
    earlier engine explains; no flag marks it. Without a pipeline, or where a run has that constant already, it
    explains nothing."""
    runs = {one.id: one for one in shipped_runs().runs if one.group == "nanotron-bench"}
    late, good, marked, alone = (
        compare_run(runs[f"nanotron-{name}"]) for name in ("14099236", "14099232", "14098949", "13438552")
    )
    assert cause_of(late) == CLASSES[0][0]
    assert cause_of(marked) == CLASSES[1][0]
    assert cause_of(good) != CLASSES[0][0]
    other = with_earlier_engine(late)
    assert other is not None
    assert late.error_fraction is not None
    assert late.error_fraction < -0.8
    assert abs(other) < 0.1
    assert with_earlier_engine(marked) is with_earlier_engine(alone) is None


def test_pairs_in_the_wrong_order_are_counted_by_their_distance() -> None:
    """Of three layouts measured at 1, 1.03 and 1.5 times the fastest, the second and the first are predicted the
    other way round: one of one pair within 5 %, none of the two others, a regret of 3 %."""
    layouts = ({"parallel__micro_batch": 1}, {"parallel__micro_batch": 2}, {"parallel__micro_batch": 4})
    found = [compare_run(run(id=f"r{number}", **words)) for number, words in enumerate(layouts)]
    found.sort(key=lambda one: one.report.step_time_s)
    times = (1.03, 1.0, 1.5)
    found = [replace(one, step=StepMeasure(time, "step time")) for one, time in zip(found, times, strict=True)]
    text = order_table(found)
    assert "| 0% to 5% | 1 | 1 | 100% | 0 |" in text
    assert "| more than 20% | 2 | 0 | 0% | 0 |" in text
    assert "| 3.0% | 3.00 | " in text
