"""The glossary defines every word once, and the names that it gives are in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house import modules, tree

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))[1:]


def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Names of classes, functions, constants and fields, those of a class behind its name and a dot."""
    for part in body:
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            yield prefix + part.name
        if isinstance(part, ast.ClassDef):
            yield from defined(part.body, f"{part.name}.")
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_every_name_is_in_the_code() -> None:
    """A class, function, field or constant of the package has each name of the second column."""
    names = {name for path in modules().values() for name in defined(tree(path).body)}
    assert len(ROWS) > 80
    for term, code, _ in ROWS:
        given = re.findall(r"`([^`]+)`", code)
        assert given, term
        assert set(given) <= names, term


def test_every_word_has_one_meaning() -> None:
    """No term is defined twice, and the terms are in the order of the alphabet."""
    terms = [word for term, _, _ in ROWS for word in term.split(", ")]
    assert len(terms) == len(set(terms))
    first = [term.lower() for term, _, _ in ROWS]
    assert first == sorted(first)
