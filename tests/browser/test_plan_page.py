"""The page of a plan in headless Chromium, wide and narrow, light and dark: it works and fetches nothing.

Run with ``pytest -m browser``; CONTRIBUTING.md says where the browser comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from milpplan import Layout, plan_overview
from milpplan.launchers import TARGETS
from milpplan.reports.html.plan_page import plan_page
from tests.browser.opening import Opened, assert_opens_alone, open_page
from tests.reports.pages import piped
from tests.simulation.cases import even_plan, problem_of

pytestmark = pytest.mark.browser

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
MOST_BYTES = 3_000_000


@cache
def pages() -> dict[str, str]:
    """A pipeline that Megatron-LM can run, and a large one with 16 stages on 1,024 GPUs."""
    small = plan_overview(*piped(), time_limit_s=0.0)
    problem = problem_of("gpt3-175b", "dgx-h100", num_gpus=1024, global_batch_size=4096)
    layout = Layout(
        tp=8, pp=16, dp=8, vpp=6, schedule="interleaved", zero_stage=1, global_batch_size=4096,
        sequence_parallel=True, overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    large = plan_overview(problem, even_plan(problem, layout), time_limit_s=0.0)
    return {"small": plan_page(small), "large": plan_page(large)}


CASES = list(product(("small", "large"), WIDTHS, SCHEMES))


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def opened(request: pytest.FixtureRequest, chromium: Any, tmp_path: Path) -> Iterator[Opened]:
    """An open page, what its console said, and the addresses that it asked for."""
    name, width, scheme = request.param
    yield from open_page(chromium, tmp_path, pages()[name], width, scheme)


def test_it_opens_alone_and_at_once(opened: Opened) -> None:
    """One request, for the file itself; nothing in the console; loaded and drawn in less than two seconds; nothing
    is wider than the screen; dark where the reader wants it dark."""
    assert_opens_alone(opened)
    page, _, _ = opened
    assert len(page.content().encode()) < MOST_BYTES


def test_every_tab_shows_its_panel(opened: Opened) -> None:
    """A tab a launcher; clicked, its panel alone is shown; arrow keys walk on, from the last to the first."""
    page, said, _ = opened
    tabs = page.locator('[role="tab"]')
    assert tabs.count() == len(TARGETS)
    panels = page.locator('[role="tabpanel"]:visible')
    for number in range(len(TARGETS)):
        tabs.nth(number).click()
        assert panels.count() == 1
        assert panels.get_attribute("aria-labelledby") == tabs.nth(number).get_attribute("id")
        assert page.locator('[aria-selected="true"]').count() == 1
    tabs.nth(len(TARGETS) - 1).press("ArrowRight")
    assert tabs.first.get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == tabs.first.get_attribute("id")
    assert said == []


def test_files_can_be_copied(opened: Opened) -> None:
    """The button says so, and what it copied or selected is the whole file."""
    page, said, _ = opened
    head = page.locator('[role="tabpanel"]:visible .file').first
    whole = head.locator("pre").text_content()
    button = head.locator(".copy")
    button.click()
    page.wait_for_function("button => button.textContent !== 'Copy'", arg=button.element_handle())
    copied = button.text_content() == "Copied"
    got = page.evaluate("navigator.clipboard ? navigator.clipboard.readText() : getSelection().toString()")
    assert (got if copied else page.evaluate("getSelection().toString()")).strip() == whole.strip()
    assert said == []


def test_the_time_line_zooms(opened: Opened) -> None:
    """Buttons, double click, Ctrl and the wheel, and keys change what is shown, and the whole step comes back."""
    page, said, _ = opened
    canvas, span = page.locator("#timeline"), page.locator("#span")
    canvas.scroll_into_view_if_needed()
    whole, drawn = span.text_content(), canvas.screenshot()
    assert whole.startswith("whole step")

    def changed(act: Any) -> str:
        before = span.text_content()
        act()
        page.wait_for_function("old => document.getElementById('span').textContent !== old", arg=before)
        return str(span.text_content())

    assert "from" in changed(lambda: page.click('[data-zoom="in"]'))
    assert canvas.screenshot() != drawn
    assert changed(lambda: page.click('[data-zoom="all"]')) == whole
    assert changed(lambda: page.click('[data-zoom="start"]')).startswith("the first")
    changed(lambda: page.click('[data-zoom="end"]'))
    changed(lambda: canvas.press("Home"))
    changed(lambda: canvas.press("-"))
    changed(lambda: canvas.dblclick(position={"x": 150, "y": 20}))
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 20)
    page.keyboard.down("Control")
    changed(lambda: page.mouse.wheel(0, -120))
    page.keyboard.up("Control")
    assert "stage 0" in page.locator("#item").text_content()
    assert changed(lambda: page.click('[data-zoom="all"]')) == whole
    assert said == []


def test_the_matrix_is_read_and_chosen(opened: Opened) -> None:
    """Every parallelism has its map, and a cell says who sends what to whom."""
    page, said, _ = opened
    choice, canvas = page.locator("#maps"), page.locator("#matrix")
    canvas.scroll_into_view_if_needed()
    number = choice.locator("option").count()
    assert number > 2
    drawn = set()
    for option in range(number):
        choice.select_option(index=option)
        drawn.add(canvas.screenshot())
    assert len(drawn) >= number - 1
    canvas.hover(position={"x": 30, "y": 10})
    assert "Point at" not in page.locator("#cell").text_content()
    assert said == []
