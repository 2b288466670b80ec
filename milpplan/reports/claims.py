"""What of a file may be believed: its proof, where this version wrote it and nobody has changed it since."""

from __future__ import annotations

from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.reports.certificate import lacks_constants
from milpplan.reports.document import ResultDocument, read_result
from milpplan.reports.spaces import cost_model_text
from milpplan.specs.problem import Problem
from milpplan.specs.reading import parse_json, read_text, shown
from milpplan.version import __version__


def result_in(path: Path) -> ResultDocument | None:
    """The result in a file that may be a bare plan, as it was when it was written; None where there is no proof
    about what the problem is here.

    Raises:
        InvalidInputError: it has a certificate, and was changed since.
    """
    if not parse_json(read_text(path), str(path)).get("certificate"):
        return None
    found = read_result(path)
    return None if _is_of_other_constants(found, path) else found


def written_by_another(path: Path) -> str | None:
    """The version of milpplan that wrote a document, where it is not this one or had fewer constants; None for a
    bare plan.

    Raises:
        InvalidInputError: this version wrote it, and somebody has changed it since.
    """
    data = parse_json(read_text(path), str(path))
    version = data.get("milpplan_version")
    if version is None:
        return None
    if version != __version__:
        return shown(version)
    if data.get("certificate") and _is_of_other_constants(read_result(path), path):
        return f"{shown(version)}, with fewer constants"
    return None


def check_constants(document: ResultDocument, path: Path) -> None:
    """Refuse the proof of a result whose problem lacks constants that it has here.

    Raises:
        InvalidInputError: it does.
    """
    if _is_of_other_constants(document, path):
        raise InvalidInputError(
            f"{path} was proved for a cost model without some of the constants that this one has.",
            f"Expected a result of this state of milpplan {__version__}.",
            "Solve the problem again; `milpplan simulate` reads the plan.",
        )


def _is_of_other_constants(document: ResultDocument, path: Path) -> bool:
    certificate = document.certificate
    return certificate is not None and lacks_constants(document.problem, certificate, read_text(path))


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
