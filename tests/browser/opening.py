"""Pages that are opened, and what holds for every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_OPEN_S = 2.0
Opened = tuple[Any, list[str], list[str]]
"""An open page, what its console said, and the addresses that it asked for."""


def open_page(chromium: Any, folder: Path, html: str, width: int, scheme: str) -> Iterator[Opened]:
    """The page in a window of that width, of a reader who wants it light or dark."""
    path = folder / "page.html"
    path.write_text(html)
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda one: asked.append(one.url))
    page.goto(path.as_uri())
    yield page, said, asked
    context.close()


def assert_opens_alone(opened: Opened) -> None:
    """One request, for the file itself; nothing in the console; loaded and drawn in less than two seconds; nothing
    is wider than the screen; dark where the reader wants it dark."""
    page, said, asked = opened
    assert asked == [page.url]
    assert said == []
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < timing < 1000 * MOST_OPEN_S
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(paper) < 200) == dark
