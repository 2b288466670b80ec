"""Lengths of a step: files, histograms, distributions, buckets, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from milpplan.errors import InvalidInputError
from milpplan.lengths import (
    LogNormal,
    Mixture,
    Pareto,
    described,
    fitted_mixture,
    optimal_buckets,
    padded,
    read_lengths,
    step_of,
    workload_of,
)


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
        ("{", "is not valid JSON"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": 1}', "describes no lengths"),
        ('{"bin_edges": [0, 5], "counts": [0]}', "all counts are zero"),
        ('{"bin_edges": [5, 5], "counts": [1]}', "edges do not rise"),
        ('{"bin_edges": [0, 5, 9], "counts": [1]}', "3 edges need 2 counts, not 1"),
        ('{"bin_edges": [0, 5], "counts": [1.5]}', "counts[0]"),
        ('{"bin_edges": [0, 5], "counts": [-1]}', "counts[0]"),
        ('{"bin_edges": [-1, 5], "counts": [1]}', "bin_edges[0]"),
        ('{"bin_edges": [0, 5.5], "counts": [1]}', "bin_edges[1]"),
        ('{"bin_edges": "05", "counts": [1]}', "bin_edges"),
        ('{"bin_edges": [0, 5]}', "counts is missing"),
        ('{"counts": [5]}', "bin_edges is missing"),
        ('{"bin_edges": [0, 5], "counts": [1], "count": 1}', "count is not known"),
        ('{"distribution": "normal"}', "'normal'"),
        ('{"distribution": ["lognormal"]}', "['lognormal']"),
        ('{"distribution": "lognormal", "mean_log": 1}', "sigma_log is missing"),
        ('{"distribution": "lognormal", "mean_log": NaN, "sigma_log": 1}', "mean_log"),
        ('{"distribution": "lognormal", "mean_log": 1' + "0" * 400 + ', "sigma_log": 1}', "mean_log"),
        ('{"distribution": "pareto", "shortest": 1, "tail": 1, "x": 1}', "x is not known"),
        ('{"distribution": "pareto", "shortest": "1", "tail": 1}', "shortest"),
        ('{"distribution": "mixture", "parts": []}', "parts"),
        ('{"distribution": "mixture", "parts": [{"distribution": "pareto", "shortest": 1, "tail": 1}]}', "share"),
    ],
)
def test_bad_files_are_refused_with_what_was_seen(tmp_path: Path, text: str, seen: str) -> None:
    """Every message names the line or the field, what was expected, and what to do."""
    with pytest.raises(InvalidInputError) as error:
        read_lengths(written(tmp_path, text), 5)
    assert seen in error.value.seen + error.value.expected
    assert error.value.expected
    assert error.value.do


@pytest.mark.parametrize("content", [b"\xff\xfe1\n", b"1\n" * (2**24 + 1)], ids=["bytes", "too much"])
def test_what_is_no_text_or_too_much_is_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no UTF-8, and more than 32 MiB (a device never ends); nor is a folder a file."""
    file = tmp_path / "lengths"
    file.write_bytes(content)
    for path in (file, tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(InvalidInputError) as error:
            read_lengths(path)
        assert error.value.do


def test_a_byte_order_mark_and_carriage_returns_are_passed_over(tmp_path: Path) -> None:
    """What spreadsheets write."""
    file = tmp_path / "lengths"
    file.write_bytes(b"\xef\xbb\xbf100\r\n200\r\n")
    assert read_lengths(file).tolist() == [100, 200]


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


def test_a_fit_is_written_and_drawn_from(tmp_path: Path) -> None:
    """A fitted mixture as a file gives the lengths that the mixture itself gives; or so many tokens."""
    lengths = np.random.default_rng(5).lognormal(6.0, 1.2, 2000).astype(np.int64) + 1
    fitted = fitted_mixture(lengths)
    file = written(tmp_path, described(fitted, "the test's own").model_dump_json())
    assert read_lengths(file, 50, seed=7).tolist() == fitted.draw(50, np.random.default_rng(7)).tolist()
    step = step_of(read_lengths(file, num_tokens=100_000), num_tokens=100_000)
    assert 80_000 < step.sum() <= 100_000
    # Equal lengths are a distribution, too.
    same = Mixture(((1.0, LogNormal.fitted(np.full(9, 300))),))
    alone = written(tmp_path, described(same).model_dump_json())
    assert set(read_lengths(alone, 5).tolist()) <= {300, 301}


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
