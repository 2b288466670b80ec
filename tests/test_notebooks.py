"""The notebooks run from the first cell to the last, and store what they print."""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook, in order."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """What a cell printed when it was stored."""
    return "".join("".join(output.get("text", ())) for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_executed_and_small(path: Path) -> None:
    """Every cell was run in order without an error, shows at most one result, and needs no script."""
    assert path.stat().st_size < MAX_BYTES
    for number, cell in enumerate(code_cells(path), 1):
        assert cell["execution_count"] == number
        assert all(output["output_type"] in ("stream", "execute_result") for output in cell["outputs"])
        assert sum(output["output_type"] == "execute_result" for output in cell["outputs"]) <= 1
        assert "<script" not in json.dumps(cell["outputs"])


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_store(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in one namespace, a cell tagged ``deterministic`` prints what is stored; results draw themselves."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    compared = 0
    for cell in code_cells(path):
        block, printed = ast.parse("".join(cell["source"])), io.StringIO()
        shown = block.body.pop() if isinstance(block.body[-1], ast.Expr) else None
        with redirect_stdout(printed):
            exec(compile(block, path.name, "exec"), names)
            value = None if shown is None else eval(compile(ast.Expression(shown.value), path.name, "eval"), names)
        if value is not None:
            assert value._repr_html_().startswith("<")
        if "deterministic" in cell["metadata"].get("tags", ()):
            assert printed.getvalue() == stored(cell)
            compared += 1
    assert compared >= 5
