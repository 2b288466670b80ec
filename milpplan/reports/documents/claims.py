"""Claims of a result file: its proof, valid if this version wrote the file and it is unchanged, and its
differences from a result rebuilt from its problem and plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.optimize.search.closed_layouts import FATES, PRUNED
from milpplan.problem import Problem, parse_json, read_text
from milpplan.problem.reading import shown
from milpplan.reports.documents.certificate import NOT_CERTIFIED, lacks_constants
from milpplan.reports.documents.document import (
    BoundClassDocument,
    LayoutsDocument,
    ResultDocument,
    empty_classes,
    proof_sentence,
    read_result,
)
from milpplan.reports.documents.fields import digest
from milpplan.reports.words.plan_words import cost_model_text
from milpplan.version import __version__


def result_in(path: Path) -> ResultDocument | None:
    """Read the unchanged result in a file that may be a bare plan.

    Returns:
        The result; None where the file has no proof about the problem with this version's constants.

    Raises:
        InvalidInputError: the result has a certificate and was changed since it was sealed.
    """
    if not parse_json(read_text(path), str(path)).get("certificate"):
        return None
    result = read_result(path)
    if _is_of_other_constants(result, path):
        return None
    _check_itself(result, path)
    return result


def _check_itself(document: ResultDocument, path: Path) -> None:
    """Refuse a result of this version whose numbers contradict each other, even if its seal is intact.

    Only ``milpplan certify`` checks that the numbers are true.

    Raises:
        InvalidInputError: numbers contradict each other.
    """
    certificate, objective = document.certificate, document.objective
    assert certificate is not None
    if document.milpplan_version != __version__ or certificate.cost_model != cost_model_text(document.problem):
        return
    problem, tolerance = document.problem, document.solver.tolerance
    gap = None
    if objective.value is not None and objective.bound is not None:
        gap = max(0.0, (objective.value - objective.bound) / objective.value)
    pairs = ((objective.bound, objective.value), (document.lower_bound_s, document.step_time_s))
    sound = {
        "problem_sha256": certificate.problem_sha256 == digest(problem),
        "gap": _agree("gap", document.gap, gap),
        "status": document.status != "optimal" or (gap is not None and gap <= tolerance * (1 + ROUNDING)),
        "proof": document.proof
        == proof_sentence(document.status, problem, tolerance, certificate.forbid, document.gap, objective.bound),
        "a lower bound": all(not bound or (value and bound <= value * (1 + ROUNDING)) for bound, value in pairs),
    }
    wrong = [name for name, right in sound.items() if not right]
    if wrong:
        raise InvalidInputError(
            f"{path} contradicts itself: {' and '.join(wrong)} cannot be what the rest of it says.",
            "Expected a result that nobody has changed.",
            "Take the original file, or solve again; `milpplan certify` checks all of it.",
        )


def written_by_another(path: Path) -> str | None:
    """Return the version of milpplan that wrote a document, if it is another or had fewer constants.

    Returns:
        The version; None for a bare plan or a document of this version.

    Raises:
        InvalidInputError: this version wrote the document, and it was changed since.
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
    """Refuse the proof of a result whose problem lacks constants that this version has.

    Raises:
        InvalidInputError: constants are missing.
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
    """Return the lower bound of the step time in a file, if the file holds an unchanged result."""
    result = result_in(path)
    return None if result is None else result.lower_bound_s


def bound_for(path: Path, problem: Problem) -> float | None:
    """Return the lower bound of the step time that a file proves for the whole space of a problem.

    The bound holds for this version's cost model. None where the file proves no bound, or was changed.
    """
    try:
        result = result_in(path)
    except InvalidInputError:
        return None
    certificate = None if result is None else result.certificate
    if result is None or certificate is None or certificate.forbid or result.problem != problem:
        return None
    return result.lower_bound_s if certificate.cost_model == cost_model_text(problem) else None


ROUNDING: Final = 1e-9
"""Relative tolerance. A rebuilt number is equal to the last bit on the same version and machine; other processors
round differently."""
SHARE_ROUNDING: Final = 1e-15
"""Absolute tolerance of shares that are small differences from one."""
SHARES: Final = frozenset(
    (
        "gap",
        "any_chunks.gap",
        "fastest.saved_fraction",
        "target.price.least_fraction",
        "target.price.most_fraction",
        "margin_price.least_fraction",
        "margin_price.most_fraction",
    )
)
NOT_BUILT: Final = frozenset(field for fields, _ in NOT_CERTIFIED for field in fields)


@dataclass(frozen=True, slots=True)
class Difference:
    """Field of a result that differs from the rebuilt result."""

    field: str
    claimed: object
    built: object


def differences(claimed: ResultDocument, built: ResultDocument) -> tuple[Difference, ...]:
    """List the fields in which a result differs from the rebuilt one, except those in ``NOT_CERTIFIED``."""
    return tuple(_differences("", claimed.model_dump(mode="json"), built.model_dump(mode="json")))


def _differences(field: str, claimed: Any, built: Any) -> Iterator[Difference]:
    if isinstance(claimed, dict) and isinstance(built, dict):
        for name in dict.fromkeys((*claimed, *built)):
            inner = f"{field}.{name}" if field else name
            if name not in claimed or name not in built:
                yield Difference(inner, claimed.get(name, "nothing"), built.get(name, "nothing"))
            else:
                yield from _differences(inner, claimed[name], built[name])
    elif isinstance(claimed, list) and isinstance(built, list) and len(claimed) == len(built):
        for number, pair in enumerate(zip(claimed, built, strict=True)):
            yield from _differences(f"{field}[{number}]", *pair)
    elif not (_is_left_out(field) or _agree(field, claimed, built)):
        yield Difference(field, claimed, built)


def _is_left_out(field: str) -> bool:
    """Test whether a field, or a field that contains it, is excluded from certification."""
    whole = re.sub(r"\[\d+\]", "[]", field)
    return any(whole == part or whole.startswith((f"{part}.", f"{part}[")) for part in NOT_BUILT)


def _agree(field: str, claimed: object, built: object) -> bool:
    numbers = [
        value for value in (claimed, built) if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if len(numbers) < 2 or not any(isinstance(value, float) for value in numbers):
        return type(claimed) is type(built) and claimed == built
    first, second = numbers
    tolerance = SHARE_ROUNDING if field in SHARES else 0.0
    return abs(first - second) <= max(ROUNDING * max(abs(first), abs(second)), tolerance)


def layouts_again(
    claimed: LayoutsDocument, legal: int, enumerated: int, rejected: dict[str, int], has_plan: bool
) -> LayoutsDocument:
    """Build the layout counts of a result from newly listed layouts and their prune reasons."""
    pruned = sum(getattr(claimed, fate) for fate in PRUNED)
    classes = empty_classes() if has_plan and legal else ()
    fates_by_class = (
        [bound_class.fates for bound_class in claimed.bounds]
        if len(claimed.bounds) == len(classes)
        else [{} for _ in classes]
    )
    return claimed.model_copy(
        update={
            "enumerated": enumerated,
            "legal": legal,
            "rejected": rejected,
            "pruned_fraction": pruned / legal if legal else None,
            "bounds": tuple(
                BoundClassDocument(
                    low=bound_class.low, high=bound_class.high, fates=dict.fromkeys(FATES, 0) | fates
                )
                for bound_class, fates in zip(classes, fates_by_class, strict=True)
            ),
        }
    )


def miscounted(document: ResultDocument) -> str | None:
    """Describe the counts of layouts that do not add up; None where all do."""
    layouts, legal = document.layouts, document.layouts.legal
    counts = {fate: getattr(layouts, fate) for fate in FATES}
    if sum(counts.values()) != legal:
        return f"{sum(counts.values()):,} layouts decided and open, of {legal:,}"
    for fate, count in counts.items():
        bounded = sum(bound_class.fates.get(fate, 0) for bound_class in layouts.bounds)
        if bounded > count:
            return f"{bounded:,} bounds of {count:,} layouts ({fate})"
    proved = document.status in ("optimal", "infeasible") and document.problem.job.objective != "num_gpus"
    return f"{layouts.open:,} layouts open" if proved and layouts.open else None
