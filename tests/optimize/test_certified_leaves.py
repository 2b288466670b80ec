"""Every leaf of a result is certified: changed in any way and sealed again, the result is not."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from milpplan import Problem, SolveOptions, solve
from milpplan.calibration import write_overlay
from milpplan.cli.arguments import within_range
from milpplan.cli.commands.certify import certified
from milpplan.cli.solving import compared, evidence_of, uncertainty
from milpplan.errors import MilpplanError
from milpplan.optimize import SecondProofs, other_backend
from milpplan.problem import Constants, Factor, parse_json, validated
from milpplan.reports.documents import (
    NOT_CERTIFIED,
    ResultDocument,
    document_text,
    read_result,
    result_document,
    sealed,
)
from tests.amounts import long_but
from tests.calibration.test_overlays import overlay
from tests.cli.test_cli import run
from tests.optimize.mixed_problems import mixed_problem
from tests.optimize.problems import random_problem
from tests.optimize.replica_problems import replica_problem
from tests.small import small_problem

SMALL = ("solve", "llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "16")
FREE = frozenset(field for fields, _ in NOT_CERTIFIED for field in fields)
WEAKER = {"fewest GPUs": "lower_bound_s", "both ends": "robustness.ends[].lower_bound_s"}
"""By kind, a bound that no other field repeats (``BOUNDS_ONLY``): a lower one than was proved is true as well."""


def by_command(*words: str) -> Callable[[Path], str]:
    """The file that a command writes."""

    def written(folder: Path) -> str:
        path = folder / "result.json"
        done = run(*words, "--out", str(path))
        assert done.exit_code in (0, 3), done.output
        return path.read_text()

    return written


def by_library(problem: Problem, tolerance: float = 1e-3, backend: str = "auto") -> Callable[[Path], str]:
    """The document of a solve in Python, with all that is known beside it."""

    def written(folder: Path) -> str:
        with within_range():
            result = solve(problem, gap=tolerance, backend=backend)
            bar, robust = uncertainty(result, None)
            known = evidence_of(result)
            others = compared(result, robust, known)
        return document_text(result_document(result, tolerance, None, bar, robust, known, None, others))

    return written


def with_a_gap(folder: Path) -> str:
    """A result that stopped before the tolerance: what was proved to one, said of a smaller."""
    for seed in range(100):
        result = solve(random_problem(seed), gap=0.05, simplest=False)
        if result.gap is not None and result.gap > 1e-3 and result.plan is not None:
            early = replace(result, status="feasible", work=replace(result.work, proof="none"))
            known = evidence_of(early)
            others = compared(early, None, known)
            return document_text(result_document(early, 1e-3, None, None, None, known, None, others))
    raise AssertionError("every result is optimal")


def at_both_ends(folder: Path) -> str:
    """A result on hardware with an uncertainty, solved again at both ends."""
    path = folder / "overlay.toml"
    write_overlay(path, overlay(constants=Constants(gemm_efficiency=Factor(value=0.9, one_sigma=0.05))))
    words = ["solve", "llama3-8b", str(path), *SMALL[3:], "--space", "uniform", "--fix", "tp=1", "--check-ends"]
    return by_command(*words)(folder)


KINDS: Mapping[str, Callable[[Path], str]] = {
    "uniform, forbidden": by_command(*SMALL, "--space", "uniform", "--fix", "zero_stage=1", "--forbid", "tp=8"),
    "free, even chunks": by_command(*SMALL, "--fix", "pp=2", "--fix", "tp=2", "--schedule", "interleaved"),
    "integer programs": by_library(random_problem(14), 1e-4),
    "another backend": by_library(random_problem(14), 1e-4, backend="cpsat"),
    "chunks of any size": by_library(random_problem(9)),
    "simpler than the fastest": by_library(random_problem(0, kind="uniform"), 0.05),
    "mixed cluster": by_library(mixed_problem(3)),
    "unlike replicas": by_library(replica_problem(2)),
    "cost of a run": by_command(
        *(*SMALL[:3], "--gpus", "8:16:8", "--global-batch", "16:32:16", "--space", "uniform", "--fix", "tp=1"),
        *("--objective", "gpu_hours", "--tokens", "1e12", "--price-per-gpu-hour", "2.5"),
    ),
    "deadline": by_command(
        *(*SMALL, "--space", "uniform", "--fix", "tp=1", "--tokens", "1e9", "--deadline-hours", "1000"),
    ),
    "infeasible": by_command(*SMALL, "--fix", "tp=1", "--fix", "pp=3"),
    "too large": by_command("solve", "llama3-70b", "dgx-h100", "--gpus", "8", "--global-batch", "8"),
    "a gap": with_a_gap,
    "fewest GPUs": by_command(
        *("min-gpus", "llama3-8b", "dgx-h100", "--global-batch", "8", "--space", "uniform", "--fix", "tp=1")
    ),
    "a launcher's": by_command(*SMALL, "--target", "accelerate", "--space", "uniform"),
    "both ends": at_both_ends,
    "inference": by_command(*SMALL, "--space", "uniform", "--inference", "--fix", "tp=2"),
    "bare": lambda _: document_text(result_document(solve(small_problem()), 1e-3)),
}


OFTEN = ("simpler than the fastest", "mixed cluster", "infeasible")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The text of a result of each kind, made once."""

    @cache
    def text(kind: str) -> str:
        return KINDS[kind](tmp_path_factory.mktemp("leaves"))

    return text


def leaves(data: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Places of all values in a JSON document, the lists and objects too."""
    if place:
        yield place
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        yield from leaves(value, (*place, name))


def changes(value: Any) -> Iterator[Any]:
    """Other values in the place of one: by a hair, by a factor, null, of another type."""
    if isinstance(value, bool):
        yield from (not value, int(value), None, "true")
    elif isinstance(value, int | float):
        # Differences of shares below 1e-15 are rounding.
        hair = 1 if isinstance(value, int) else max(1e-8 * abs(value), 1e-14)
        yield from (
            value + hair,
            value - hair,
            1.125 * value + 0.125,
            2 * value,
            value / 2,
            -value,
            0,
            None,
            str(value),
            True,
            [value],
            1e300,
        )
    elif isinstance(value, str):
        yield from (value + "x", value[:-1], "", None, 1, [value])
    elif value is None:
        yield from (0, 1.5, "x", [], {}, True)
    elif isinstance(value, list):
        yield from (value[:-1], [*value, *value[-1:]], [*value, None], [], None, 1, {})
        yield list(reversed(value))
    else:
        yield from (value | {"extra": 1}, {}, None, 1, [])
        yield from ({name: item for name, item in value.items() if name != left} for left in value)


def name_of(place: tuple[str | int, ...]) -> str:
    """A place as certificates name fields."""
    return re.sub(r"\.\[", "[", ".".join("[]" if isinstance(part, int) else part for part in place))


def with_value(data: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """The document with another value in a place."""
    changed = copy.deepcopy(data)
    inner = changed
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return changed


def verdict(data: Any, path: Path, proofs: SecondProofs, original: ResultDocument) -> str:
    """What the certifier says of a document that was sealed again; ``same`` where it is only written otherwise."""
    text = json.dumps(data)
    try:
        document = validated(ResultDocument, parse_json(text, "changed"), "changed")
    except MilpplanError:
        path.write_text(text)
        with pytest.raises(MilpplanError):
            read_result(path)
        return "refused"
    if original in (document, sealed(document)):
        return "same"
    document = sealed(document)
    path.write_text(document_text(document))
    try:
        with within_range():
            return certified(read_result(path), str(path), proofs).certification.verdict
    except MilpplanError:
        return "refused"


def mutations(text: str) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """All changes of all leaves, but for those of the seal, which is made anew."""
    data = json.loads(text)
    for place in leaves(data):
        value = data
        for part in place:
            value = value[part]
        if place != ("certificate", "sha256"):
            yield from ((place, other) for other in changes(value))


def passing(kind: str, text: str, path: Path, number: int | None = None) -> list[Any]:
    """List the changes of certified fields that pass, of ``number`` random ones or of all."""
    path.write_text(text)
    original = read_result(path)
    rng, data = random.Random(kind), json.loads(text)
    proofs = SecondProofs.by(SolveOptions(backend=other_backend(original.solver.backend)))
    with within_range():
        assert certified(original, kind, proofs).certification.verdict == "certified"
    passed = []
    # Most leaves are the problem's, which is refused or solved again as a whole.
    tried = [change for change in mutations(text) if change[0][0] != "problem" or rng.random() < 0.1]
    assert len(tried) > 500
    for place, other in tried if number is None else rng.sample(tried, number):
        name = name_of(place)
        if verdict(with_value(data, place, other), path, proofs, original) == "certified":
            allowed = any(name == free or name.startswith((f"{free}.", f"{free}[")) for free in FREE)
            number = isinstance(other, int | float) and not isinstance(other, bool)
            lower = name == WEAKER.get(kind) and number and other < original_value(data, place)
            if not allowed and not lower:
                passed.append((name, original_value(data, place), other))
    return passed


def original_value(data: Any, place: tuple[str | int, ...]) -> Any:
    """What was in a place."""
    for part in place:
        data = data[part]
    return data


@pytest.mark.parametrize("kind", long_but(OFTEN, KINDS))
def test_some_changes_of_each_kind_are_found(kind: str, texts: Callable[[str], str], tmp_path: Path) -> None:
    """The result as it was written is certified; of all changes, some are tried and none passes."""
    assert passing(kind, texts(kind), tmp_path / "changed.json", number=10) == []


def test_order_of_compared_plans_is_certified(texts: Callable[[str], str], tmp_path: Path) -> None:
    """Compared plans are in the order of their objectives; no other order is certified."""
    data, path = json.loads(texts("integer programs")), tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    original = read_result(path)
    plans = data["runners_up"]
    assert len(plans) > 1
    proofs = SecondProofs.by(SolveOptions(backend=other_backend(original.solver.backend)))
    assert verdict(with_value(data, ("runners_up",), plans[::-1]), path, proofs, original) == "refused"


def test_a_result_read_from_its_file_has_the_same_seal(texts: Callable[[str], str], tmp_path: Path) -> None:
    """No number of a result, a negative zero for one, reads otherwise than it was sealed."""
    path = tmp_path / "result.json"
    path.write_text(texts("uniform, forbidden"))
    assert sealed(read_result(path)) == read_result(path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_all_changes_of_each_kind_are_found(kind: str, texts: Callable[[str], str], tmp_path: Path) -> None:
    """Every leaf, changed in every way."""
    assert passing(kind, texts(kind), tmp_path / "changed.json") == []
