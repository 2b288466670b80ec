"""Sources left out: a source is predicted by what is fitted to the others of its stack; what cannot be is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import coverage, fifths, fit_plain, fit_stacks, validation_tables
from benchmarks.leave_out import errors, figures, left_out, tables
from benchmarks.tables import replace_section
from milpplan.calibration import Coverage, Observation, fit, observations
from milpplan.problem import with_constants
from milpplan.simulation import simulate
from milpplan.units import percent_text
from milpplan.validation import TERMS, compare
from milpplan.validation.evidence import exercised_terms
from milpplan.validation.runs import Run, RunFile, read_runs
from tests.amounts import first
from tests.validation.cases import exact_record, record, written

CONSTANTS = ("gemm_efficiency",)
SLOWER = 0.8
SLOWER_MEMORY = 0.4


def runs_of(group: str, count: int, gpu: str = "H100") -> list[Observation]:
    """Runs of a source whose products reach 0.8 of the description's rate."""
    records: list[dict[str, Any]] = [
        record(
            id=f"{group}-{gpu}-{number}",
            group=group,
            hardware__gpu=gpu,
            hardware__gpu_mem_GB=None,
            model__hidden=1024 * (1 + number % 3),
            parallel__global_batch=64 * (1 + number),
            parallel__grad_accum=None,
        )
        for number in range(count)
    ]
    found, _ = observations(
        RunFile(tuple(Run.model_validate_json(json.dumps(one), strict=True) for one in records), {}, ())
    )
    return [replace(run, step_time_s=slow_step_s(run)) for run in found]


def slow_step_s(run: Observation) -> float:
    """Seconds of the run's step with the slower products."""
    hardware = with_constants(run.problem.hardware, {"gemm_efficiency": SLOWER}, {})
    return simulate(run.problem.model_copy(update={"hardware": hardware}), run.plan).step_time_s


def test_a_source_is_predicted_by_the_others() -> None:
    """NeMo's two sources on H100 share their constants, so that either predicts the other; too fast without them.
    The single source of Composer and the single run of another framework are impossible."""
    found = [
        *runs_of("dgxc-benchmarking", 5),
        *runs_of("nemo-docs", 4),
        *runs_of("llm-foundry", 4),
        *runs_of("nemo-automodel", 1),
    ]
    rows = list(left_out(found, lambda stack: CONSTANTS, least=4, most=60, seed=0))
    done = [row for row in rows if row.possible]
    assert [(row.generation, row.stack, row.source) for row in done] == [
        ("Hopper", "nemo", "dgxc-benchmarking"),
        ("Hopper", "nemo", "nemo-docs"),
    ]
    assert [row.others for row in done] == [{"nemo-docs": 4}, {"dgxc-benchmarking": 5}]
    for row in done:
        assert np.all(row.without < -0.05)
        assert np.abs(row.left_out).max() < 0.01
        assert np.abs(row.fitted).max() < 0.01
    text = tables(rows, 4)
    assert "| Hopper | nemo | nemo-docs | 4 | 5 of dgxc-benchmarking |" in text
    assert "| Hopper | composer | llm-foundry | 4 | the only source of this framework on this generation |" in text
    assert "| nemo-automodel | 1 | its framework has no stack |" in text
    assert "Mean of these 2 rows' mean absolute errors: " in text


def test_too_few_runs_are_not_fitted_to() -> None:
    """Three runs are fewer than a fit needs: the source that has only them to be predicted by is impossible."""
    found = [*runs_of("dgxc-benchmarking", 4), *runs_of("nemo-docs", 3)]
    rows = {row.source: row for row in left_out(found, lambda stack: CONSTANTS, least=4, most=60, seed=0)}
    assert rows["nemo-docs"].possible
    assert not rows["dgxc-benchmarking"].possible
    assert "the others have 3 runs, fewer than 4" in tables(list(rows.values()), 4)


def test_errors_are_those_of_the_simulator() -> None:
    """Measured with the slower products, predicted without: simulated over measured, minus 1."""
    (run,) = runs_of("nemo-docs", 1)
    expected = simulate(run.problem, run.plan).step_time_s / run.step_time_s - 1
    assert errors([run], None) == pytest.approx([expected])


@pytest.mark.long
def test_the_command_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--leave-out source prints the tables and puts them where the document has their section; no stack is
    written."""
    found = [*runs_of("dgxc-benchmarking", 4), *runs_of("nemo-docs", 4)]
    monkeypatch.setattr(fit_stacks, "observations", lambda file: (found, []))
    monkeypatch.setattr(fit_stacks, "CHOSEN", {"nemo": CONSTANTS})
    monkeypatch.setattr(fit_stacks, "write_overlay", lambda *words: pytest.fail("a stack was written"))
    document = tmp_path / "page.md"
    document.write_text(
        "# A page\n\n<!-- sources left out: generated -->\nold\n<!-- sources left out: end -->\nend\n"
    )
    monkeypatch.setattr("sys.argv", ["fit_stacks", "--leave-out", "source", "--write", str(document)])
    fit_stacks.main()
    text = document.read_text(encoding="utf-8")
    assert text.startswith("# A page\n\n<!-- sources left out: generated -->\n\n| generation |")
    assert text.endswith("<!-- sources left out: end -->\nend\n")
    assert "old" not in text


def test_a_page_without_the_section_stays(tmp_path: Path) -> None:
    """Nothing is written where the comments are missing."""
    page = tmp_path / "page.md"
    page.write_text("no comments\n")
    with pytest.raises(ValueError, match="no section 'sources left out'"):
        replace_section(page, "sources left out", "text")
    assert page.read_text(encoding="utf-8") == "no comments\n"


def test_the_table_of_terms_has_a_row_a_term() -> None:
    """And a column a generation and number format; a term without runs says so."""
    lines = validation_tables.term_table(exercised_terms()).splitlines()
    assert len(lines) == 4 + len(TERMS)
    assert "Hopper bf16" in lines[0]
    (experts,) = [line for line in lines if line.startswith("| routing and products of experts |")]
    assert "none" in experts
    assert " of 2, " in experts


def test_the_table_of_lines_has_a_row_a_source(tmp_path: Path) -> None:
    """Three numbers of micro-batches of one source, twice as slow as simulated: half the slope and half the start
    are predicted, with and without stacks."""
    records = []
    for batch in (64, 128, 256):
        one = exact_record(id=f"m-{batch}", parallel__global_batch=batch)
        one["measured"]["step_time_s"] *= 2
        records.append(one)
    found = compare(read_runs(written(tmp_path / "runs.json", records))).comparisons
    (row,) = validation_tables.line_table(found, found).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["micro-batches", "simumax-b200", "1", "3", "50.0 %"]
    assert cells[6] == "50.0 %"
    assert cells[4:8] == cells[8:]


@pytest.mark.long
def test_a_plain_source_is_predicted_by_the_others() -> None:
    """Two sources whose memory is as much slower as each other's predict each other exactly; one common factor
    is fitted, and the table says what it was."""
    found = [
        replace(run, step_time_s=slow_memory_s(run))
        for run in (*runs_of("a", 8, "A100"), *runs_of("b", 8, "A100"))
    ]
    result = fit(found, constants=(fit_plain.CONSTANT,), num_folds=1, hops=False)
    fits = fit_plain.fits_without(found)
    rows = list(fit_plain.left_out(found, result, fits))
    assert [(row.generation, row.source, row.others) for row in rows] == [("Ampere", "a", 8), ("Ampere", "b", 8)]
    for row in rows:
        assert np.all(row.without < -0.02)
        assert np.abs(row.left_out).max() < 0.01
        assert row.factor == pytest.approx(SLOWER_MEMORY, rel=0.1)
    text = fit_plain.table(rows)
    assert "| Ampere | b | 8 | 8 runs of the others | 0.4" in text
    assert "Mean of these 2 rows' mean absolute errors: " in text
    text = fit_plain.class_tables(found, frozenset(run.id for run in found if run.group == "a"), fits)
    fitted, bare = rows[0].left_out, rows[1].without
    assert f"| Ampere | a | plain | 8 | {figures(fitted)} |" in text
    assert f"| Ampere | b | fused | 8 | {figures(bare)} |" in text
    mean = percent_text(float(np.mean([bare.mean(), fitted.mean()])))
    assert f"Means of sources: Ampere {mean} (mean absolute" in text
    assert "Mean of these 0 rows' mean absolute errors: none." in text


def slow_memory_s(run: Observation) -> float:
    """Seconds of the run's step with slower memory."""
    hardware = with_constants(run.problem.hardware, {fit_plain.CONSTANT: SLOWER_MEMORY}, {})
    return simulate(run.problem.model_copy(update={"hardware": hardware}), run.plan).step_time_s


def test_sweeps_are_held_out_whole() -> None:
    """Runs of a sweep have one label, others that of their model; where that is one label for all, layouts."""
    found = runs_of("nemo-docs", 4)
    sweeps = {found[0].id: "a", found[1].id: "a", found[2].id: "b"}
    assert fifths.labels(found, sweeps) == ["a", "a", "b", found[3].problem.model.name]
    layouts = fifths.labels(found, dict.fromkeys(sweeps, "a") | {found[3].id: "a"})
    assert layouts == [str(run.plan.layout) for run in found]


def test_the_stacks_that_are_held_out() -> None:
    """All of one framework and of runs without flags, nanotron's, which take longest, first."""
    names = fifths.stacks()
    assert names[0].startswith("dgx-h100+nanotron")
    assert "dgx-h100+nemo" in names
    assert not {"dgx-h100+plain", "dgx-h100+nanotron-earlier-engine"} & set(names)


def test_the_table_of_runs_held_out(tmp_path: Path) -> None:
    """Two sources, twice as slow as simulated: one with an error of its own where it is held out."""
    records = []
    for name, gpu in (("a", "H100"), ("b", "H100")):
        one = exact_record(id=name, group=f"new-{name}", hardware__gpu=gpu, sweep_id=None)
        one["measured"]["step_time_s"] *= 2
        records.append(one)
    found = compare(read_runs(written(tmp_path / "runs.json", records))).comparisons
    lines = fifths.table(found, {"a": -0.3}).splitlines()[2:]
    assert lines[0].startswith("| Hopper | new-a | 1 | 1 | -50.0 / 50.0 / 50.0 % | -30.0 / 30.0 / 30.0 % |")
    assert lines[1].startswith("| Hopper | new-b | 1 | 0 | -50.0 / 50.0 / 50.0 % | -50.0 / 50.0 / 50.0 % |")
    assert lines[2].endswith("| 50.0 % | 40.0 % |")


@pytest.mark.long
@pytest.mark.parametrize(("number", "of_others"), first(1, [(3, 3), (5, 6)]))
def test_coverage_by_framework(number: int, of_others: int) -> None:
    """Runs whose products are 0.8 of the description's rate are within the priors' sigma of it (0.78), and half as
    fast ones are not; constants fitted to the other source cover them. Means weigh sources alike."""
    own, others = runs_of("dgxc-benchmarking", number), runs_of("nemo-docs", of_others)
    assert coverage.without_constants(own) == Coverage("dgxc-benchmarking", number, number)
    slow = [replace(run, step_time_s=3 * run.step_time_s) for run in own]
    assert coverage.without_constants(slow).num_within == 0
    left_out = coverage.source_left_out(own, others)
    assert left_out == Coverage("dgxc-benchmarking", number, number)
    rows = [("nemo", coverage.KINDS[0], Coverage("a", 4, 1)), ("nemo", coverage.KINDS[0], Coverage("b", 8, 6))]
    lines = coverage.table([*rows, ("nemo", coverage.KINDS[2], left_out)]).splitlines()
    assert lines[2:] == [
        f"| nemo | 7 of 12 | - | {number} of {number} |",
        "| **mean of sources** | 50 % | - | 100 % |",
    ]
