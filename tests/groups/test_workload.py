"""Lengths of a step: files, histograms, distributions, buckets, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from milpplan.errors import InvalidInputError
from milpplan.groups.buckets import optimal_buckets, padded
from milpplan.groups.distributions import LogNormal, Mixture, Pareto, fitted_mixture
from milpplan.groups.workload import read_lengths, step_of, workload_of


def written(path: Path, text: str) -> Path:
    """The file with the text."""
    file = path / "lengths"
    file.write_text(text, encoding="utf-8")
    return file


def test_lengths_are_truncated_aligned_and_counted() -> None:
    """130 and 256 share the aligned length 256; 5,000 is cut at 1,024."""
    workload = workload_of([130, 256, 1, 5000], alignment=128, max_length=1024)
    assert workload.lengths.tolist() == [128, 256, 1024]
    assert workload.counts.tolist() == [1, 2, 1]
    assert (workload.num_sequences, workload.num_tokens) == (4, 128 + 512 + 1024)


def test_a_step_is_a_number_of_sequences_or_tokens() -> None:
    """The first sequences that fit into the tokens, at least one; truncated lengths count."""
    lengths = np.array([5, 100, 3, 4])
    assert step_of(lengths, num_sequences=2).tolist() == [5, 100]
    assert step_of(lengths, num_tokens=18, max_length=10).tolist() == [5, 100, 3]
    assert step_of(lengths, num_tokens=1).tolist() == [5]


def test_a_file_of_lines_is_read_in_order(tmp_path: Path) -> None:
    """One number a line."""
    assert read_lengths(written(tmp_path, "3\n1\n2\n\n")).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("3\n1.5\n", "Line 2 of"),
        ("3\n-4\n", "Line 2 of"),
        ("3\n1_000\n", "'1_000'"),
        ("3\n\n4\n", "Line 2 of"),
        ("0\n", "Line 1 of"),
        ("99999999999999999999\n", "Line 1 of"),
        ("9999999999\n", "1 to 1000000000"),
        ("{", "is no JSON"),
        ('{"bin_edges": [0, 5], "counts": [0]}', "not all zero"),
        ('{"bin_edges": [5, 5], "counts": [1]}', "Ascending"),
        ('{"bin_edges": [0, 5], "counts": [1.5]}', "whole"),
        ('{"distribution": "normal"}', "'normal'"),
        ('{"distribution": "lognormal", "mean_log": 1}', "sigma_log = None"),
        ('{"distribution": "pareto", "shortest": 1, "tail": 1, "x": 1}', "'x'"),
        ('{"distribution": "mixture", "parts": []}', "has no parts"),
    ],
)
def test_bad_files_are_refused_with_what_was_seen(tmp_path: Path, text: str, seen: str) -> None:
    """Every message names the line or the field, and what was expected."""
    with pytest.raises(InvalidInputError) as error:
        read_lengths(written(tmp_path, text), 5)
    assert seen in str(error.value)
    assert error.value.expected


def test_a_million_lines_are_read(tmp_path: Path) -> None:
    """Without a line by line loop in the way: the sum is right."""
    lengths = np.random.default_rng(1).integers(1, 2000, 1_000_000)
    read = read_lengths(written(tmp_path, "\n".join(map(str, lengths.tolist()))))
    assert int(read.sum()) == int(lengths.sum())


def test_draws_follow_the_histogram(tmp_path: Path) -> None:
    """A third in (0, 10], two thirds in (10, 12], nothing elsewhere."""
    file = written(tmp_path, json.dumps({"bin_edges": [0, 10, 12, 50], "counts": [100, 200, 0]}))
    drawn = read_lengths(file, 30_000)
    assert drawn.min() >= 1
    assert drawn.max() == 12
    assert (drawn > 10).mean() == pytest.approx(2 / 3, abs=0.01)
    with pytest.raises(InvalidInputError, match="How many to draw"):
        read_lengths(file)


def test_fits_recover_what_was_drawn() -> None:
    """A log-normal's and a Pareto's parameters come back from large samples; a mixture keeps mean and tail."""
    random = np.random.default_rng(3)
    log_normal = Mixture(((1.0, LogNormal(6.0, 1.2)),)).draw(100_000, random)
    fitted = LogNormal.fitted(log_normal)
    assert (fitted.mean_log, fitted.sigma_log) == pytest.approx((6.0, 1.2), abs=0.02)
    tail = Mixture(((1.0, Pareto(1000.0, 1.5)),)).draw(100_000, random)
    assert Pareto.fitted(tail, 1000.0).tail == pytest.approx(1.5, abs=0.02)
    again = fitted_mixture(log_normal).draw(100_000, random)
    assert np.median(again) == pytest.approx(np.median(log_normal), rel=0.1)
    # A Pareto tail is heavier than a log-normal's.
    assert np.quantile(again, 0.99) == pytest.approx(np.quantile(log_normal, 0.99), rel=0.15)


def test_buckets_are_the_best_of_all() -> None:
    """Against every choice of ends, for work that is linear and work that is quadratic."""
    random = np.random.default_rng(4)
    for _ in range(30):
        lengths = np.sort(random.choice(np.arange(1, 60), 7, replace=False))
        counts = random.integers(1, 9, 7)
        for work in (lengths.astype(float), lengths.astype(float) ** 2):
            for number in (1, 2, 3, 7, 9):
                ends = optimal_buckets(lengths, counts, work, number)
                spent = counts @ work[np.searchsorted(lengths, padded(lengths, ends))]
                choices = itertools.combinations(range(6), min(number, 7) - 1)
                best = min(
                    counts @ work[np.array([*chosen, 6])[np.searchsorted([*chosen, 6], range(7))]]
                    for chosen in choices
                )
                assert spent == best
                assert len(ends) <= number


def test_a_sequence_beyond_the_last_bucket_is_refused() -> None:
    """Padding never cuts."""
    with pytest.raises(InvalidInputError, match="9 tokens"):
        padded(np.array([9]), np.array([4, 8]))
