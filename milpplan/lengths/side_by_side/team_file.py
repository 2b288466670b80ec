"""JSON document of a batch on degrees side by side, for a loader of any framework."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milpplan.problem.records import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Record


class TeamTurnRecord(Record):
    """Micro-batches, as indices of the batch's sequences, that one strategy runs one after another on ``num_gpus``
    GPUs from ``first_gpu`` on (as Megatron ranks count), with their times in seconds of the step."""

    strategy: str
    first_gpu: Count
    num_gpus: PositiveInt
    start_s: NonNegativeFloat
    end_s: NonNegativeFloat
    micro_batches: tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...]


class TeamDispatchFile(Record):
    """One batch on degrees side by side: its padded ``lengths``, its turns in the order of their starts, the exact
    step and the lower bound of all steps of these degrees."""

    schema_version: Literal[1] = 1
    lengths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    turns: Annotated[tuple[TeamTurnRecord, ...], Field(min_length=1)]
    step_time_s: PositiveFloat
    lower_bound_s: NonNegativeFloat
