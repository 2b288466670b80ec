"""The browser of the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser: CHROMIUM names it, or it is in .browser, or installed."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM")
    own = ROOT / ".browser" / "chromium"
    program = found or (str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome"))
    assert program, "There is no Chromium: see CONTRIBUTING.md, or set CHROMIUM to its path."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
