"""The base of every record a user can write: frozen, strict, nothing extra, hashable."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A frozen value object; unknown fields are refused so that a typo cannot pass silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0, le=10**15)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Computed = Annotated[int, Field(ge=0)]
"""A number of bytes or of things in an answer: what comes out is not held to the limits of what goes in."""
PositiveFloat = Annotated[float, Field(gt=0, le=1e30)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(gt=0, le=1)]
