"""Base of all records that a user writes: frozen, strict, hashable, without unknown fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Frozen value object; unknown fields are refused, so that a typo is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0, le=10**15)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Computed = Annotated[int, Field(ge=0)]
"""Number of bytes or items in an answer; the limits of inputs do not apply to it."""
PositiveFloat = Annotated[float, Field(gt=0, le=1e30)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(gt=0, le=1)]
