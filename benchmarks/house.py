"""Measure how much of the package a newcomer has to read: files, hops, names, words.

    python -m benchmarks.house              print the table
    python -m benchmarks.house --json

A default solve is traced in a process of its own: every call of a function that is written in the package counts,
comprehensions and generator expressions too (Python 3.12 inlines most of them, 3.11 none); class bodies do not.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "milpplan"
SOLVE: Final = ("solve", "llama3-8b", "dgx-h100", "--gpus", "16", "--global-batch", "64")
OPENINGS: Final = re.compile(r"\s*(What|Whether|The same|More|How)\b")
TRACE: Final = """
import json, sys
files, functions, depth, deepest = set(), set(), 0, 0
root = sys.argv.pop(1)

def profile(frame, event, argument):
    global depth, deepest
    code = frame.f_code
    if not code.co_filename.startswith(root) or not code.co_flags & 1:
        return
    if event == "call":
        files.add(code.co_filename)
        functions.add((code.co_filename, code.co_qualname))
        depth += 1
        deepest = max(deepest, depth)
    elif event == "return":
        depth = max(0, depth - 1)

from milpplan.cli import main
sys.setprofile(profile)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
loaded = sum(name.startswith("milpplan.") for name in sys.modules)
print(json.dumps([len(files), len(functions), deepest, loaded]), file=sys.stderr)
"""


@cache
def modules() -> dict[str, Path]:
    """List the modules of the package by their dotted names."""
    return {
        ".".join(("milpplan", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def tree(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """List a file's module, statements and clauses, wherever in it, without their expressions."""
    return tuple(blocks(tree(path)))


def blocks(node: ast.AST) -> Iterator[ast.AST]:
    """List a node and the statements and clauses inside it: expressions, most of a tree, hold no import."""
    yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            yield from blocks(inner)


def is_for_typing(node: ast.AST) -> bool:
    """Tell whether a statement is the condition under which type checkers read on."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def exported(folder: str) -> dict[str, str]:
    """List the public names of a folder, which its ``__init__`` imports for type checkers, and their modules."""
    path = modules().get(f"{folder}.__init__")
    return {
        alias.name: inner.module
        for node in (tree(path).body if path and folder != "milpplan" else ())
        if is_for_typing(node)
        for inner in node.body
        if isinstance(inner, ast.ImportFrom) and inner.module
        for alias in inner.names
    }


def imported(path: Path, through_folders: bool = True) -> Iterator[str]:
    """List the modules of the package that a file imports, wherever in it, but not those for type checkers.

    Args:
        path: A file with Python code.
        through_folders: Whether a public name of a folder counts as an import of the module that has it.
    """
    typing_only = {inner for node in statements(path) if is_for_typing(node) for inner in blocks(node)}
    for node in statements(path):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner_names = [f"{node.module}.{alias.name}" for alias in node.names]
            homes = exported(node.module) if through_folders else {}
            yield from (homes[alias.name] for alias in node.names if alias.name in homes)
            found = [name for name in inner_names if name in modules()]
            yield from found
            if len(found) < len(inner_names) and node.module in modules():
                yield node.module


def circles() -> list[list[str]]:
    """Find the import circles.

    Returns:
        The strongly connected sets of two or more modules (Tarjan 1972).
    """
    edges = {name: sorted(set(imported(path))) for name, path in modules().items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in edges[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for name in edges:
        if name not in number:
            visit(name)
    return found


def docstrings() -> Iterator[str]:
    """List all docstrings, those of attributes and constants included."""
    for path in modules().values():
        for node in statements(path):
            for statement in getattr(node, "body", ()):
                text = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def largest_folder() -> tuple[str, int]:
    """Find the folder with most files; that of the command line has a file a command and does not count."""
    cli = PACKAGE / "cli"
    count = Counter(path.parent for path in modules().values() if not path.is_relative_to(cli))
    folder, number = count.most_common(1)[0]
    return str(folder.relative_to(ROOT)), number


def words(*paths: Path) -> int:
    """Count the words of text files."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def tested_modules() -> int:
    """Count the modules of the package that tests import by their own names, not as public names of a folder."""
    public = {"milpplan.__init__", "milpplan.graph.__init__", "milpplan.errors", "milpplan.cli.app"}
    paths = (ROOT / "tests").rglob("*.py")
    return len({name for path in paths for name in imported(path, through_folders=False)} - public)


def static_measures() -> dict[str, int]:
    """Measure what needs no run of the package.

    Returns:
        Numbers by their names in the table.
    """
    lines = [path.read_text(encoding="utf-8").count("\n") for path in modules().values()]
    return {
        "modules": len(lines),
        "lines": sum(lines),
        "files in the largest folder": largest_folder()[1],
        "import circles": len(circles()),
        "docstrings that open with What, Whether, The same, More or How": sum(
            bool(OPENINGS.match(text)) for text in docstrings()
        ),
        "words of README.md": words(ROOT / "README.md"),
        "words of docs": words(*(ROOT / "docs").rglob("*.md")),
        "words of CHANGELOG.md": words(ROOT / "CHANGELOG.md"),
        "internal modules that tests import": tested_modules(),
    }


def traced_measures() -> dict[str, int | float]:
    """Trace a default solve and time `milpplan list models`.

    Returns:
        Numbers by their names in the table; the time in seconds of CPU.
    """
    command = [sys.executable, "-c", TRACE, f"{PACKAGE}{os.sep}", *SOLVE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    files, functions, depth, loaded = json.loads(done.stderr.splitlines()[-1])
    before = os.times()
    listing = [sys.executable, "-c", "from milpplan.cli import main; main()", "list", "models"]
    subprocess.run(listing, capture_output=True, check=True, cwd=ROOT)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "files of a default solve": files,
        "functions of a default solve": functions,
        "depth of a default solve": depth,
        "modules loaded by it": loaded,
        "CPU seconds of `milpplan list models`": round(spent, 2),
    }


def stems() -> dict[str, list[str]]:
    """Group modules whose files have the same name.

    Returns:
        The modules by stem, where there are several.
    """
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.stem != "__init__":
            grouped[path.stem].append(name)
    return {stem: names for stem, names in grouped.items() if len(names) > 1}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--stems", action="store_true", help="also list files of one name, and the import circles")
    given = parser.parse_args()
    measures = traced_measures() | static_measures()
    if given.json:
        print(json.dumps(measures, indent=1))
        return
    print("| measure | value |\n|---|---:|")
    for name, value in measures.items():
        print(f"| {name} | {value:,} |")
    if given.stems:
        for stem, names in stems().items():
            print(f"{stem}: {', '.join(names)}")
        for circle in circles():
            print("circle:", ", ".join(circle))


if __name__ == "__main__":
    main()
