"""The notebooks run from the first cell to the last, and store what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.notebooks import FOLDER, code_cells, outputs

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000


def read(path: Path) -> dict[str, Any]:
    """A notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_executed_and_small(path: Path) -> None:
    """Every cell was run in order without an error, shows at most one result, and needs no script."""
    assert path.stat().st_size < MAX_BYTES
    for number, cell in enumerate(code_cells(read(path)), 1):
        assert cell["execution_count"] == number
        assert all(output["output_type"] in ("stream", "execute_result") for output in cell["outputs"])
        assert sum(output["output_type"] == "execute_result" for output in cell["outputs"]) <= 1
        assert "<script" not in json.dumps(cell["outputs"])


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_store(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells tagged ``deterministic`` print what is stored; a stale one: ``python -m benchmarks.notebooks``."""
    monkeypatch.chdir(tmp_path)
    compared = 0
    for cell, printed, value in outputs(read(path)):
        if "deterministic" in cell["metadata"].get("tags", ()):
            assert printed == "".join("".join(output["text"]) for output in cell["outputs"])
            compared += 1
        assert value is None or value._repr_html_().startswith("<")
    assert compared >= 5
