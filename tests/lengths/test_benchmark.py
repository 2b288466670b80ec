"""The benchmark of lengths: its laws are what they say, and its tables agree with each other."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.batches import HEADER as BATCHES_HEADER
from benchmarks.batches import Solved as SolvedStep
from benchmarks.batches import drawn as batches
from benchmarks.batches import row_of as batches_row
from benchmarks.length_draws import GPUS, HEADER, drawn, far, row, summary
from benchmarks.length_jobs import CASES, Case, LogNormalLaw, ParetoTail, Wikipedia
from benchmarks.lengths import HEADER as LENGTHS_HEADER
from benchmarks.lengths import Solved, solved, with_rows
from benchmarks.lengths import row as lengths_row


@pytest.mark.parametrize(
    ("light", "heavy"), [(ParetoTail(3.0), ParetoTail(0.9)), (LogNormalLaw(0.8), LogNormalLaw(1.5))]
)
def test_heavier_tails_hold_more_tokens(
    light: ParetoTail | LogNormalLaw, heavy: ParetoTail | LogNormalLaw
) -> None:
    """Wikipedia's 512 sequences lie between a lighter and a heavier law of as many, the longest ones included."""
    lengths = [law.lengths() for law in (light, Wikipedia(), heavy)]
    assert [len(one) for one in lengths] == [512] * 3
    assert np.all(np.diff([np.quantile(one, 0.99) for one in lengths]) > 0)


def test_first_sequences_are_the_same_ones() -> None:
    """The 512 sequences are the first of the 2,048, padded to 128 tokens."""
    assert np.array_equal(-(-Wikipedia(2048).lengths()[:512] // 128) * 128, Wikipedia().lengths())


def test_later_sequences_are_others() -> None:
    """From number 513 on."""
    assert np.array_equal(Wikipedia(first=512).lengths(), Wikipedia(2048).lengths()[512:1024])
    assert str(Wikipedia(first=512)) == "Wikipedia from 513 on"


def test_drawn_jobs_are_different_ones_of_what_is_claimed() -> None:
    """The same of a seed, none twice, on numbers of GPUs of their models, all of which occur; every one has a
    workload."""
    jobs = drawn(36, 23)
    assert jobs == drawn(36, 23) != drawn(36, 24)
    assert jobs[:5] == drawn(5, 23)
    assert len(set(jobs)) == 36
    assert all(case.num_gpus in GPUS[case.model] for case in jobs)
    assert {case.model for case in jobs} == set(GPUS)
    assert {case.longest // 1024 for case in jobs} == {8, 16, 32, 64, 128}
    assert all(case.workload.lengths[-1] <= case.longest for case in jobs)
    # The farthest ones are others.
    assert len(set(far())) == 6
    assert not set(far()) & set(jobs)


@pytest.fixture(scope="module")
def small() -> Solved:
    """Solve a job of twelve sequences in every space."""
    return solved(Case("llama2-7b", "dgx-h100", 8, 8192, Wikipedia(12)), 0.5)


@pytest.mark.long
def test_a_drawn_job_has_a_row_and_counts_where_it_is(small: Solved) -> None:
    """Cells as many as the header has; a gap counts for the edges that it is within as it is printed."""
    result = small.whole
    cells = row(small.case, result)
    assert len(cells) == len(HEADER)
    assert cells[2:5] == [f"{result.step_time_s:.3f}", f"{result.lower_bound_s:.3f}", f"{result.gap:.2%}"]
    said = summary([0.01, 0.01004, 0.0101, 0.0199, 0.05])
    assert said == "Of 5 jobs, 2 to 1.0%, 3 to 1.5%, 4 to 2.0% are proved; the largest gap is 5.0%."


def test_jobs_have_every_size_that_is_claimed() -> None:
    """Sizes of models, numbers of GPUs, both kinds, and sequences from 8K to 128K all occur."""
    assert {case.num_gpus for case in CASES} == {16, 32, 64}
    assert {case.hardware for case in CASES} == {"dgx-a100-80", "dgx-h100"}
    assert {case.longest // 1024 for case in CASES} == {8, 16, 32, 64, 128}
    assert {case.model for case in CASES} == {"llama2-7b", "llama2-13b", "llama-33b", "qwen3-32b"}


def test_rows_of_some_jobs_replace_theirs() -> None:
    """By job and lengths; a table of other columns, or without the job, is replaced."""
    head = "| a | b | c |\n| --- | ---: | ---: |"
    old = "\n".join([head, *(f"| x | {number} | old |" for number in range(1, 5))])
    new = f"{head}\n| x | 2 | new |"
    assert with_rows(old, new) == old.replace("| x | 2 | old |", "| x | 2 | new |")
    assert with_rows(old.replace("| a |", "| d |"), new) == new
    assert with_rows("", new) == new


@pytest.mark.long
def test_tables_of_one_run_agree(small: Solved) -> None:
    """No step is below the bound of its space or of a larger one; rows have as many cells as their tables."""
    assert small.turns.lower_bound_s <= small.turns.step_time_s <= small.static.step_time_s
    assert small.whole.lower_bound_s <= min(small.turns.step_time_s, small.whole.step_time_s)
    assert small.whole.step_time_s <= small.whole.static.step_time_s
    assert small.unlike.lower_bound_s <= min(small.unlike.step_time_s, small.whole.step_time_s)
    assert {step.rule for step in small.others} == {"bucketing", "HotSPa", "FlexSP"}
    assert set(small.scenarios) == {"slow links", "hardly hidden"}
    cells = lengths_row(small)
    assert len(cells) == len(LENGTHS_HEADER)
    assert cells[0] == "llama2-7b, 8 x dgx-h100"


def test_batches_of_training_are_drawn() -> None:
    """As many lengths, cut at the longest."""
    found = batches(64, 1000, 2)
    assert [len(one) for one in found] == [64, 64]
    assert max(map(max, found)) == 1000
    assert all(np.isin(one[one < 1000], Wikipedia(2048).lengths()).all() for one in found)


@pytest.mark.long
def test_batches_have_rows() -> None:
    """One for every size, with the strategies of the solved step; no gap is negative."""
    case = Case("llama2-7b", "dgx-h100", 8, 8_192, Wikipedia(2048), context=False)
    found = batches_row(SolvedStep(case, (2,)), (16, 32, 48), 2, 1.0)
    assert len(found) == len(BATCHES_HEADER)
    assert "pp2" in found[0]
    assert all(float(one.split()[2]) >= 0.0 for one in found[3:])
