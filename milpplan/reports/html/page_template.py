"""Pages: blocks of an answer as HTML, and templates with a common frame (``assets/page.html``) and style.

A page fetches nothing, and every text in it is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, Final, assert_never

from milpplan.errors import InvalidInputError
from milpplan.reports.blocks import Block, Cell, Drawing, Fact, Items, Pair, Paragraph, Table
from milpplan.version import __version__


def blocks_html(blocks: Iterable[Block]) -> str:
    """Convert blocks to HTML; consecutive facts share a table."""
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


STYLE: Final = "page.css"


def require_jinja() -> Any:
    """Import the template engine.

    Raises:
        InvalidInputError: it is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise InvalidInputError(
            f"The page needs {error.name}, which is not installed.",
            "Expected jinja2.",
            "Install it: pip install -e '.[report]'.",
        ) from error
    return jinja2


def asset(name: str) -> str:
    """Read a text file that pages contain."""
    return files("milpplan.reports").joinpath("assets", name).read_text(encoding="utf-8")


def rendered(template: str, **values: Any) -> str:
    """Render a template with its values.

    Texts are escaped. The value of a name that ends in ``_html``, at any depth, is a drawing and inserted
    unchanged.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    jinja2 = require_jinja()
    safe = jinja2.utils.markupsafe.Markup
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, loader=jinja2.FunctionLoader(asset))
    shown = {name: _marked(safe, name, value) for name, value in values.items()}
    page = environment.get_template(template)
    return str(page.render(style=safe(asset(STYLE)), version=__version__, **shown))


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page: a title, an introduction, and blocks."""

    title: str
    text: str = ""
    blocks: Sequence[Block] = ()

    @property
    def html(self) -> str:
        """Write introduction and blocks."""
        return blocks_html([Paragraph(self.text), *self.blocks])


def answer_page(
    kind: str, title: str, summary: str, sections: Sequence[Section], data: tuple[str, Any], script: str = ""
) -> str:
    """Write the page of an answer.

    Args:
        kind: The question, above the title.
        title: The subject.
        summary: The answer in a sentence, or the meaning of its words.
        sections: The answer.
        data: Name and JSON data of the script element that holds them; None: no data.
        script: The page's script.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    name, values = data
    return rendered(
        "answer_page.html",
        kind=kind,
        title=title,
        summary=summary,
        sections=[{"title": part.title, "blocks_html": part.html} for part in sections],
        data_name=name,
        data_html="" if values is None else script_json(values),
        script_html=script,
    )


def _marked(safe: Any, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(safe, key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(safe, "", inner) for inner in value]
    return safe(value) if name.endswith("_html") else value


def script_json(data: Any) -> str:
    """Write JSON for a script element, where ``</`` and ``<!`` must be escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
