"""Documents, tables, launch files and pages of a result: the methods of ``PlanResult`` that need other folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milpplan.errors import InvalidInputError
from milpplan.optimize import DEFAULT_GAP, PlanResult
from milpplan.problem import Plan
from milpplan.reports import write_whole
from milpplan.reports.files import check_writable, make_directory, write_all
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.reports.documents.document import ResultDocument


def plain_document(result: PlanResult) -> ResultDocument:
    """Make the document that `milpplan solve --json` prints, without what it adds from measured runs.

    Args:
        result: Of ``solve``. An optimal result is stated within the default tolerance, or its own larger gap.
    """
    from milpplan.reports.documents.document import result_document

    proved = result.gap if result.status == "optimal" and result.gap is not None else 0.0
    return result_document(result, max(DEFAULT_GAP, proved))


def to_dict(result: PlanResult) -> dict[str, Any]:
    """Convert a result to plain dictionaries, lists, numbers and texts."""
    from milpplan.reports.documents.document import document_text

    document: dict[str, Any] = json.loads(document_text(plain_document(result)))
    return document


def to_dataframe(result: PlanResult) -> Any:
    """Convert the pipeline ranks of a result's plan to a pandas ``DataFrame``, one row a rank.

    Raises:
        InvalidInputError: there is no plan, or pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InvalidInputError(
            "A data frame needs pandas, which is not installed.",
            "Expected pandas.",
            "Install it, or use to_dict().",
        ) from error
    _plan_of(result)
    stages = to_dict(result)["plan"]["stages"]
    rows = [{"rank": rank, **_flat(stage)} for rank, stage in enumerate(stages)]
    return pandas.DataFrame(rows).set_index("rank")


def export(result: PlanResult, launcher: str, path: str | Path, version: str | None = None) -> list[Path]:
    """Write the files that start a result's plan with a launcher into a directory.

    Args:
        result: Of ``solve``.
        launcher: A name as of `milpplan export --to`.
        path: The directory; it is made if its parent exists.
        version: Of the launcher; None: the newest known.

    Returns:
        The files; the first one is enough to start the run.

    Raises:
        UnknownNameError: there is no such launcher or version.
        IllegalPlanError: the launcher cannot run the plan.
        InvalidInputError: there is no plan, or the files cannot be written.
    """
    from milpplan.launchers import target_named
    from milpplan.launchers.scripts import job_files
    from milpplan.launchers.targets import version_of

    plan, target, folder = _plan_of(result), target_named(launcher, "launcher"), Path(path)
    launch = target.export(result.problem, plan, version_of(target.capability, version))
    make_directory(folder, "path", parents=False)
    texts = target.files(launch, __version__)
    texts |= job_files("slurm", launch, __version__, texts, result.problem.hardware.name)
    files = {folder / name: text for name, text in texts.items()}
    write_all(files)
    return list(files)


def write_report(result: PlanResult, path: str | Path, time_limit_s: float = 10.0) -> Path:
    """Write the page of a result: one HTML file that needs no network.

    Args:
        result: Of ``solve``.
        path: The file.
        time_limit_s: Seconds to look for other layouts that do nearly as well.

    Returns:
        The file.

    Raises:
        InvalidInputError: there is no plan, jinja2 is not installed, or the file cannot be written.
    """
    from milpplan.explain.overview import plan_overview
    from milpplan.reports.html.page_template import require_jinja
    from milpplan.reports.html.plan_page import plan_page

    require_jinja()
    plan, file = _plan_of(result), Path(path)
    check_writable(file)
    overview = plan_overview(result.problem, plan, time_limit_s=time_limit_s, forbid=result.forbid)
    write_whole(file, plan_page(overview, plain_document(result), ()))
    return file


def _plan_of(result: PlanResult) -> Plan:
    if result.plan is None:
        raise InvalidInputError(
            f"The result has no plan: its status is {result.status}.",
            "Expected a result with a plan.",
            "See its message and `milpplan solve`, which explains what would help.",
        )
    return result.plan


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: the inner names follow the outer ones after a point."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
