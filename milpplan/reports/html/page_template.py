"""Rendering of pages from templates with a common frame (``assets/page.html``) and style; nothing to fetch, and
every text escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.reports.blocks import Block, Paragraph
from milpplan.reports.html.fragments import blocks_html
from milpplan.version import __version__

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
            "Install it: pip install 'milpplan[report]'.",
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
