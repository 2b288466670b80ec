"""Base of all records that a user writes: frozen, strict, hashable, without unknown fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


class Range(Record):
    """Inclusive range of integers, in steps."""

    minimum: PositiveInt
    maximum: PositiveInt
    step: PositiveInt = 1

    @model_validator(mode="after")
    def _order(self) -> Range:
        if self.maximum < self.minimum:
            raise ValueError(f"maximum={self.maximum} is below minimum={self.minimum}")
        return self

    @property
    def values(self) -> tuple[int, ...]:
        """All values of the range."""
        return tuple(range(self.minimum, self.maximum + 1, self.step))
