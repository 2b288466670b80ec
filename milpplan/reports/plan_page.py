"""One plan as one HTML page: in words, where time and memory go, time line, matrix, proof, rivals, launch files.

The page fetches nothing: style and script are in it, and both are its own.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from milpplan.errors import InvalidInputError
from milpplan.overview.records import Missing, Overview
from milpplan.reports.page_data import matrix_data, timeline_data
from milpplan.reports.page_sections import (
    memory_section,
    near_section,
    rule_section,
    search_section,
    stage_rows,
    tiles,
    time_section,
    traffic_rows,
)
from milpplan.reports.plan_words import layout_text, plan_sentences
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.reports.document import ResultDocument

ASSETS: Final = ("plan_page.css", "plan_page.js")


def require_jinja() -> Any:
    """The template engine.

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


def plan_page(overview: Overview, result: ResultDocument | None = None, notes: tuple[str, ...] = ()) -> str:
    """The whole page. ``result`` is the solve that found the plan, whose proof and log are shown; ``notes`` are
    said at the top.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    jinja2 = require_jinja()
    folder = files("milpplan.reports").joinpath("assets")
    template, style, script = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("plan_page.html", *ASSETS)
    )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    safe = jinja2.utils.markupsafe.Markup
    traffic = None if isinstance(overview.traffic, Missing) else overview.traffic
    charts = time_section(overview), memory_section(overview), search_section(result)
    time, memory, search = (_marked(safe, section) for section in charts)
    return str(
        environment.from_string(template).render(
            title=overview.title,
            notes=notes,
            tiles=tiles(overview, result),
            words=plan_sentences(overview.problem, overview.plan, overview.report),
            layout=layout_text(overview.plan),
            stages=stage_rows(overview),
            num_stages=len(overview.report.stages),
            makes=len(overview.plan.layout.replica_micro_batches),
            time=time,
            memory=memory,
            traffic_rows=traffic_rows(traffic),
            no_traffic=overview.traffic if traffic is None else None,
            search=search,
            near=near_section(overview),
            rule=_marked(safe, rule_section(overview)),
            exports=overview.exports,
            data=safe(_json(timeline_data(overview.lanes))),
            matrix=safe(_json(matrix_data(traffic))) if traffic is not None else "",
            style=safe(style),
            script=safe(script),
            version=__version__,
        )
    )


def _marked(safe: Any, section: dict[str, Any]) -> dict[str, Any]:
    """The section with its drawings, whose names end in ``_html``, taken as they are."""
    return {name: safe(value) if name.endswith("_html") else value for name, value in section.items()}


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
