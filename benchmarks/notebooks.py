"""Run the cells of the notebooks and store their outputs again.

    python -m benchmarks.notebooks [NAME...]

Without a kernel: cells run with ``exec`` in one namespace, in a temporary folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
MAX_TEXT = 2_000
"""Longest text form that is stored beside an HTML form, in characters."""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """List the code cells of a notebook, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Run the code cells in one namespace, in the current folder.

    Yields:
        The cell, what it prints, and the value of its last expression (None without any).
    """
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in code_cells(notebook):
        block, printed = ast.parse("".join(cell["source"])), io.StringIO()
        last = block.body.pop() if isinstance(block.body[-1], ast.Expr) else None
        with redirect_stdout(printed):
            exec(compile(block, "cell", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        yield cell, printed.getvalue(), value


def store(path: Path) -> None:
    """Run a notebook and write its outputs into the file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for number, (cell, printed, value) in enumerate(outputs(notebook), 1):
            cell["execution_count"], cell["outputs"] = number, []
            if printed:
                lines = printed.splitlines(keepends=True)
                cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
            if value is not None:
                cell["outputs"].append(shown(value, number))
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def shown(value: Any, number: int) -> dict[str, Any]:
    """Make the output of a value that draws itself."""
    text = repr(value)
    forms = {
        "text/html": value._repr_html_().splitlines(keepends=True),
        "text/plain": (text if len(text) <= MAX_TEXT else f"{type(value).__name__}(...)").splitlines(
            keepends=True
        ),
    }
    return {"data": forms, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def main() -> None:
    """Store the outputs of the notebooks that the command line names, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in FOLDER.glob("*.ipynb")))
    for name in parser.parse_args().names:
        store(FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
