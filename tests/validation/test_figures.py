"""Figures: every point and label has its place, whatever the runs."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.units import GIB, gib_text, seconds_text
from milpplan.validation.figures import MARGIN, SIZE, scatter

WIDTH = 0.64
"""Of a character of a sans-serif font over its size; that of a digit in DejaVu Sans."""
Box = tuple[float, float, float, float]


def boxes(root: ElementTree.Element) -> list[Box]:
    """Left, right, top and bottom of every text, in pixels."""
    found = []
    for node in (node for node in root.iter() if node.tag.endswith("text")):
        size = float(node.get("font-size", "12"))
        long, high = WIDTH * size * len(node.text or ""), size
        if (turned := node.get("transform")) is not None:
            x, y = map(float, turned.removeprefix("translate(").split(")")[0].split())
            found.append((x - high, x, y - long / 2, y + long / 2))
            continue
        x, y = float(node.attrib["x"]), float(node.attrib["y"])
        left = x - long * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0.0)
        found.append((left, left + long, y - high, y))
    return found


def drawn(values: list[tuple[float, float]], num_groups: int, unit: float) -> ElementTree.Element:
    """The figure of these pairs, dealt to so many sources."""
    points = [(f"source-{index % num_groups}", f"run-{index}", *pair) for index, pair in enumerate(values)]
    words = gib_text if unit == GIB else seconds_text
    return ElementTree.fromstring(scatter(points, "A title", words, unit=unit))


def marked(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The points, which tell what they are."""
    return [node for node in root.iter() if len(node) and node.tag.endswith("path")]


def test_thirty_sources_are_told_apart() -> None:
    """By colour, then by shape."""
    points = marked(drawn([(1.0, 1.0 + one) for one in range(30)], 30, 1.0))
    assert len({(node.attrib["d"], node.attrib["fill"]) for node in points}) == 30


@given(
    st.lists(st.tuples(st.floats(0.05, 900.0), st.floats(0.05, 900.0)), min_size=1, max_size=60),
    st.integers(1, 60),
    st.sampled_from([1.0, GIB]),
)
@settings(max_examples=25, deadline=None)
def test_everything_has_its_place(pairs: list[tuple[float, float]], num_groups: int, unit: float) -> None:
    """Points lie within the frame, texts on the page and on no other text."""
    root = drawn([(unit * one, unit * other) for one, other in pairs], num_groups, unit)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    points = marked(root)
    assert len(points) == len(pairs)
    for node in points:
        x, y = map(float, node.attrib["transform"].removeprefix("translate(").split(")")[0].split())
        assert MARGIN <= x <= SIZE - MARGIN
        assert MARGIN <= y <= SIZE - MARGIN
    texts = boxes(root)
    for left, right, top, bottom in texts:
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
    for one, other in combinations(texts, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart, (one, other)


@pytest.mark.parametrize("unit", [1.0, GIB])
@pytest.mark.parametrize(("low", "high"), [(1.7, 1.7), (8.0, 9.0), (0.3, 4.0), (0.1, 20.0), (0.05, 900.0)])
def test_axes_have_labels(low: float, high: float, unit: float) -> None:
    """Two labels at least on every axis, all of them round numbers of the unit, also where no power of ten is in
    sight."""
    root = drawn([(unit * low, unit * high)], 1, unit)
    labels = [node.text or "" for node in root.iter() if node.get("text-anchor") == "end"]
    assert len(labels) >= 2
    assert all(len(label.split()[0].strip("0.,")) <= 3 for label in labels), labels
