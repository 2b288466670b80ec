"""Blocks of an answer: paragraphs, facts, lists, tables and drawings.

An answer is a list of blocks. ``reports.terminal`` writes blocks for a terminal, ``reports.html.fragments`` writes
HTML for pages and notebooks. A style is in rich's words, such as ``bold green``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """Piece of text with its own style."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text on its own lines, then pieces that add their styles to the paragraph's; without text an empty line."""

    text: str = ""
    style: str = ""
    further: tuple[Span, ...] = ()

    def extended(self, text: str, style: str = "") -> Paragraph:
        """Append a piece of text."""
        return replace(self, further=(*self.further, Span(text, style)))


@dataclass(frozen=True, slots=True)
class Fact:
    """Text with a short label in front of it."""

    label: str
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """Sentences of a list."""

    texts: tuple[str, ...]


Cell = str | Span


@dataclass(frozen=True, slots=True)
class Table:
    """Table of numbers with their units.

    ``words``: indices of the columns that hold words and are left-justified. ``fixed``: only the last column may
    wrap. An empty row is a rule between the rows around it.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    words: tuple[int, ...] = (0,)
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tables side by side, where there is space."""

    left: Table
    right: Table


@dataclass(frozen=True, slots=True)
class Drawing:
    """Chart in HTML under a title and a text; terminals leave it out."""

    html: str
    title: str = ""
    text: str = ""


Block = Paragraph | Fact | Items | Table | Pair | Drawing
