"""Blocks of an answer as HTML, for pages and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import assert_never

from milpplan.reports.blocks import Block, Cell, Drawing, Fact, Items, Pair, Paragraph, Table


def blocks_html(blocks: Iterable[Block]) -> str:
    """Convert blocks to HTML; facts in a row share a table."""
    parts = []
    for is_fact, group in groupby(blocks, key=lambda block: isinstance(block, Fact)):
        inner = "".join(_html(block) for block in group)
        parts.append(f'<table class="facts">{inner}</table>' if is_fact else inner)
    return "".join(parts)


def _html(block: Block) -> str:
    match block:
        case Paragraph(text, style, further):
            inner = _styled(text, style) + "".join(_styled(span.text, f"{style} {span.style}") for span in further)
            return f"<p>{inner}</p>" if inner else ""
        case Fact(label, text, style):
            return f'<tr><th>{escape(label)}</th><td class="text">{_styled(text, style)}</td></tr>'
        case Items(texts):
            return f'<ul class="words">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'
        case Table():
            return _table(block)
        case Pair(left, right):
            return _table(left) + _table(right)
        case Drawing(html, title, text):
            return _title(title) + _html(Paragraph(text)) + html
        case _:
            assert_never(block)


def _table(block: Table) -> str:
    words = {index % len(block.columns) for index in block.words}
    head = _row("th", block.columns, words)
    rows = "".join(_row("td", row, words) for row in block.rows if row)
    return (
        f'{_title(block.title)}<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    )


def _title(title: str) -> str:
    return f"<h3>{escape(title)}</h3>" if title else ""


def _row(tag: str, cells: Iterable[Cell], words: set[int]) -> str:
    parts = []
    for index, cell in enumerate(cells):
        text = escape(cell) if isinstance(cell, str) else _styled(cell.text, cell.style)
        kind = ' class="text"' if index and index in words else ""
        parts.append(f"<{tag}{kind}>{text}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


def _styled(text: str, style: str) -> str:
    """Write a text in bold, where its style says so, and in the style's last colour."""
    inner = escape(text).replace("\n", "<br>")
    words = style.split()
    colour = next((word for word in reversed(words) if word != "bold"), "default")
    inner = inner if colour == "default" or not inner else f'<span class="{colour}">{inner}</span>'
    return f"<b>{inner}</b>" if "bold" in words and inner else inner
