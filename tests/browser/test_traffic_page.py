"""The page of a plan's traffic in headless Chromium (see ``test_plan_page``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from milpplan import traffic
from milpplan.reports.html.traffic_page import traffic_page
from tests.browser.opening import Opened, assert_opens_alone, open_page
from tests.reports.pages import piped

pytestmark = pytest.mark.browser


@cache
def html() -> str:
    """A pipeline of Llama-3 8B on 16 GPUs."""
    return traffic_page(traffic(*piped()), "llama3-8b on 16 GPUs")


@pytest.fixture(params=list(product((1280, 390), ("light", "dark"))), ids=lambda case: "-".join(map(str, case)))
def opened(request: pytest.FixtureRequest, chromium: Any, tmp_path: Path) -> Iterator[Opened]:
    """The page, opened."""
    yield from open_page(chromium, tmp_path, html(), *request.param)


def test_it_opens_alone_and_at_once(opened: Opened) -> None:
    """Like the page of a plan."""
    assert_opens_alone(opened)


def test_the_matrix_is_read_and_chosen(opened: Opened) -> None:
    """Every parallelism has its map, and a cell says who sends what to whom."""
    page, said, _ = opened
    choice, canvas = page.locator("#maps"), page.locator("#matrix")
    canvas.scroll_into_view_if_needed()
    drawn = set()
    for option in range(choice.locator("option").count()):
        choice.select_option(index=option)
        drawn.add(canvas.screenshot())
    assert len(drawn) > 2
    canvas.hover(position={"x": 30, "y": 10})
    assert "GPU" in page.locator("#cell").text_content()
    assert said == []
