"""The work of ``traffic``: the bytes of a step of a plan."""

from __future__ import annotations

from pathlib import Path

from milpplan.cli import arguments
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.cli.solving import check_plan_of_file, within_range
from milpplan.communication.traffic import traffic
from milpplan.communication.wires import ALGORITHMS
from milpplan.reports.answers.traffic import traffic_blocks, traffic_document
from milpplan.reports.documents.document import read_plan
from milpplan.reports.files import check_writable, write_whole
from milpplan.reports.html.page_template import require_jinja
from milpplan.reports.html.traffic_page import traffic_page
from milpplan.units import counted


def run(path: Path, algorithm: str, as_json: bool, out: Path | None, html: Path | None) -> ExitCode:
    """Count the traffic, print it, write the document and the page."""
    chosen = next(one for one in ALGORITHMS if one == arguments.choice(algorithm, "--algorithm", ALGORITHMS))
    if html is not None:
        require_jinja()
    for target in (out, html):
        if target is not None:
            check_writable(target)
    problem, plan = read_plan(path)
    check_plan_of_file(problem, plan)
    with within_range():
        report = traffic(problem, plan, chosen)
    document = traffic_document(report) if as_json or out is not None else ""
    if as_json:
        emit(document)
    else:
        show_blocks(traffic_blocks(report))
    if out is not None:
        write_whole(out, document)
        say(f"Written to {out}.")
    if html is not None:
        write_whole(html, traffic_page(report, f"{problem.model.name} on {counted(plan.layout.num_gpus, 'GPU')}"))
        say(f"Written to {html}.")
    return ExitCode.OPTIMAL
