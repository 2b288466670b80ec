"""What of a file may be believed: its proof, where this version wrote it and nobody has changed it since."""

from __future__ import annotations

from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.reports.document import ResultDocument, read_result
from milpplan.reports.spaces import cost_model_text
from milpplan.specs.problem import Problem
from milpplan.specs.reading import parse_json, read_text, shown
from milpplan.version import __version__


def result_in(path: Path) -> ResultDocument | None:
    """The result in a file that may be a bare plan, as it was when it was written; None where there is no proof.

    Raises:
        InvalidInputError: it has a certificate, and was changed since.
    """
    data = parse_json(read_text(path), str(path))
    return read_result(path) if data.get("certificate") else None


def written_by_another(path: Path) -> str | None:
    """The version of milpplan that wrote a document, where it is not this one; None for a bare plan."""
    version = parse_json(read_text(path), str(path)).get("milpplan_version")
    return None if version is None or version == __version__ else shown(version)


def proved_bound_s(path: Path) -> float | None:
    """The lower bound of the step time in a file, where it is a result as it was written."""
    found = result_in(path)
    return None if found is None else found.lower_bound_s


def bound_for(path: Path, problem: Problem) -> float | None:
    """The lower bound of the step time that a file proves for the whole space of this problem, by the cost model
    that is here; None where it proves none, or was changed."""
    try:
        found = result_in(path)
    except InvalidInputError:
        return None
    certificate = None if found is None else found.certificate
    if found is None or certificate is None or certificate.forbid or found.problem != problem:
        return None
    return found.lower_bound_s if certificate.cost_model == cost_model_text(problem) else None
