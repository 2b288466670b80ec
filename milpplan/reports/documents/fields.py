"""Fields of documents, and the way in which records fill them."""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator

from milpplan.problem.records import Record
from milpplan.version import __version__

Document = TypeVar("Document", bound=BaseModel)


class _Header:
    """Field that no record has."""

    milpplan_version = __version__


def document_of(kind: type[Document], *records: object, **further: object) -> Document:
    """Fill a document with the equally named attributes of records, and its parts likewise.

    Args:
        kind: Class of the document.
        records: Sources, of which the first with an attribute gives it; None has no attributes.
        further: Fields that no record gives, or gives otherwise.

    Returns:
        The document. A required field that no record has is None.
    """
    values = dict(further)
    for name, field in kind.model_fields.items():
        source = next((record for record in (*records, _Header) if hasattr(record, name)), None)
        if name not in values and source is not None:
            values[name] = getattr(source, name)
        elif field.is_required():
            values.setdefault(name, None)
    return kind.model_validate(values, from_attributes=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]
"""Number that is null where it is infinite."""


class IntervalDocument(Record):
    """Proved interval that contains the true value; an end is null where no bound is known."""

    low: Finite
    high: Finite
