"""The shipped constants of software stacks: every file is one, belongs to a framework, and helps runs left out."""

from __future__ import annotations

import pytest

from milpplan.presets.catalog import hardware_names, load_hardware, load_overlay, stack_names
from milpplan.validation.comparison import compare_run
from milpplan.validation.frameworks import FRAMEWORKS
from milpplan.validation.reading import read_runs


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_is_hardware_and_a_framework(name: str) -> None:
    """Its name says which; it loads wherever a hardware name does, and its software is named after it."""
    base, stack = name.split("+")
    assert base in hardware_names()
    assert stack in {framework.stack for framework in FRAMEWORKS.values()}
    overlay = load_overlay(name)
    assert overlay is not None
    assert (overlay.base, overlay.name) == (base, name)
    assert load_hardware(name).software.name == name


@pytest.mark.parametrize("name", stack_names())
def test_constants_predict_runs_they_were_not_fitted_to(name: str) -> None:
    """Runs left out of the fit are predicted better than without it."""
    overlay = load_overlay(name)
    assert overlay is not None
    provenance = overlay.provenance
    assert provenance.error_before is not None
    assert provenance.error_left_out is not None
    assert provenance.error_left_out < provenance.error_before


def test_runs_say_whose_constants_they_use() -> None:
    """With stacks a run names its constants; without them nothing is fitted."""
    file = read_runs(None)
    used = {name.split("+")[1] for name in stack_names()}
    run = next(run for run in file.runs if run.id == "foundry-L176")
    assert "composer" in used
    fitted, plain = compare_run(run), compare_run(run, stacks=False)
    assert any("constants dgx-a100-80+composer" in told for told in fitted.statement.assumptions)
    assert any("no constants fitted" in told for told in plain.statement.assumptions)
    assert fitted.report.step_time_ns != plain.report.step_time_ns
