"""Plan as an HTML page: description, parts of time and memory, timeline, matrix, proof, rivals, launch files.

The page fetches nothing, because it contains its own style and script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.explain.overview_records import Missing, Overview
from milpplan.reports.html.page_data import matrix_data, timeline_data
from milpplan.reports.html.page_sections import (
    memory_section,
    near_section,
    rule_section,
    search_section,
    stage_rows,
    tiles,
    time_section,
    traffic_rows,
)
from milpplan.reports.html.page_template import asset, rendered, script_json
from milpplan.reports.words.plan_words import layout_text, plan_sentences

if TYPE_CHECKING:
    from milpplan.reports.documents.document import ResultDocument


def plan_page(overview: Overview, result: ResultDocument | None = None, notes: tuple[str, ...] = ()) -> str:
    """Write the whole page.

    Args:
        overview: the plan and its analysis.
        result: the solve that found the plan, with proof and log.
        notes: sentences at the top.

    Raises:
        InvalidInputError: jinja2 is not installed.
    """
    traffic = None if isinstance(overview.traffic, Missing) else overview.traffic
    return rendered(
        "plan_page.html",
        title=overview.title,
        notes=notes,
        tiles=tiles(overview, result),
        words=plan_sentences(overview.problem, overview.plan, overview.report),
        layout=layout_text(overview.plan),
        stages=stage_rows(overview),
        num_stages=len(overview.report.stages),
        makes=len(overview.plan.layout.replica_micro_batches),
        time=time_section(overview),
        memory=memory_section(overview),
        traffic_rows=traffic_rows(traffic),
        no_traffic=overview.traffic if traffic is None else None,
        search=search_section(result),
        near=near_section(overview),
        rule=rule_section(overview),
        exports=overview.exports,
        data_html=script_json(timeline_data(overview.lanes)),
        matrix_html="" if traffic is None else script_json(matrix_data(traffic)),
        script_html="".join(asset(name) for name in ("page.js", "plan_page.js", "matrix.js")),
    )
