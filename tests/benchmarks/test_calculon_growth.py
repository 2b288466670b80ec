"""The growth benchmark, as far as it goes without a checkout of Calculon."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import calculon_growth as sut
from benchmarks.calculon_growth_figure import growth_figure
from benchmarks.calculon_space import Cost

SAVED = Path(__file__).parents[2] / "benchmarks" / "data" / "calculon_growth.json"


def point(procs: int, ours_s: float, estimated: int, legal: int) -> sut.Point:
    """A case in which two proofs scatter by a tenth, and an estimate takes a second."""
    theirs = Cost((estimated, 0), (1.0, 0.0), (0.02, 0.0))
    runs = (0.95 * ours_s, 1.05 * ours_s)
    return sut.Point("model", procs, procs, "optimal", legal, runs, ours_s, theirs, float(estimated))


def test_exponents_of_power_laws() -> None:
    """Costs of 3 p^0.5 and 7 p^-0.25 have these exponents; a twentieth of error on both of two points, four
    doublings apart, is one of sqrt(2) / 20 over log 16."""
    procs = (64, 256, 1024)
    points = [point(p, 3 * p**0.5, 0, p**2) for p in procs]
    assert sut.slope(procs, [one.mean_s for one in points])[0] == pytest.approx(0.5)
    assert sut.slope(procs, [7 * p**-0.25 for p in procs])[0] == pytest.approx(-0.25)
    value, error = sut.slope((1, 16), (2.0, 8.0), (0.1, 0.4))
    assert (value, error) == pytest.approx((0.5, math.sqrt(2) / 20 / math.log(16)))
    assert points[0].error_s == pytest.approx(0.05 * points[0].mean_s)


def test_growth_with_the_size_of_the_space() -> None:
    """In two series of different level our cost is the root of the layouts, Calculon's the estimates."""
    found = {
        "one": [point(p, p**0.5, 4 * p, p) for p in (64, 256, 1024)],
        "two": [point(p, 9 * p**0.5, p, p) for p in (64, 512)],
    }
    assert sut.elasticity(found) == pytest.approx((0.5, 1.0))
    own = sut.exponents(found["one"])
    assert (own.ours[0], own.theirs[0], own.slower[0]) == pytest.approx((0.5, 1.0, 0.5))
    assert own.slower[1] == pytest.approx(math.hypot(own.ours[1], own.theirs[1]))


def test_saved_points_give_tables_and_a_figure() -> None:
    """What was measured can be read again: every series on all numbers of processors, all proved, and a figure
    with two lines for each."""
    found = sut.read_points(SAVED)
    assert list(found) == list(sut.series())
    for name, points in found.items():
        assert [(one.model, one.procs, one.batch) for one in points] == sut.series()[name]
        assert {one.status for one in points} == {"optimal"}
    for table in (sut.cost_table(found), sut.exponent_table(found)):
        assert len(table.splitlines()) == 2 + len(found)
    lines = {name: ([(64, 1.0, 0.1), (256, 2.0, 0.1)], [(64, 5.0, 0.0), (256, 4.0, 0.0)]) for name in found}
    tree = ElementTree.fromstring(growth_figure(lines))
    assert sum(part.tag.endswith("polyline") for part in tree.iter()) == 2 * len(found)


def test_the_sum_of_the_weak_series() -> None:
    """Costs are added at each number of processors; other series do not count."""
    found = {f"weak {model}": [point(p, 1.0, p, p) for p in sut.GROWTH] for model in sut.MODELS[:3]}
    found["ladder"] = [point(p, 5.0 * p, 9 * p, p) for p in sut.GROWTH]
    *_, row, _, said = sut.total_table(found).splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[0] == "sum of 3 weak series"
    assert cells[1].startswith("3 s, ")
    assert cells[-2:] == ["1.00", "256.00"]
    assert said == "exponents +0.000 (milpplan) and +1.000 (Calculon)"
