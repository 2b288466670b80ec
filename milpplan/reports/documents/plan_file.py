"""Plan files: a problem and a plan for it, in one self-contained JSON document.

A stage of the file is a pipeline rank: rank s holds the virtual stages of ``Layout.rank_stages`` (s, s + pp, s + 2
pp, ..., or s and 2 pp - 1 - s), so with vpp > 1 ``layers`` and ``recompute`` are lists with an entry per virtual
stage. Nothing else is needed to restore the plan; memory and times in the file are for people and are ignored when
the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from milpplan.errors import InvalidInputError
from milpplan.problem import Layout, Plan, Problem, Recompute, parse_json, read_text, validated
from milpplan.problem.reading import shown
from milpplan.problem.records import Computed, Count, Record
from milpplan.simulation import StepReport
from milpplan.simulation.step_report import StageMemory, StageReport
from milpplan.units import counted

Span = tuple[Count, Count]


class StageDocument(Record):
    """Pipeline rank. ``layers``: [first, last + 1], or a list of such pairs with an entry per virtual stage."""

    layers: Span | tuple[Span, ...]
    recompute: Recompute | tuple[Recompute, ...] = Recompute()
    memory_bytes: Computed | None = None
    memory: StageMemory | None = None
    breakdown: dict[str, float] | None = None
    """Seconds of the step; they add up to the step time."""
    hidden: dict[str, float] | None = None
    """Seconds of communication hidden behind compute."""
    node_type: str | None = None
    """Name of the hardware that the rank runs on."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return [first, last + 1] of every virtual stage of the rank."""
        spans = self.layers
        return (spans,) if spans and isinstance(spans[0], int) else spans

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Return the recomputation of every virtual stage of the rank; a single entry without recomputation stands
        for all."""
        if not isinstance(self.recompute, Recompute):
            return self.recompute
        return (self.recompute,) * (len(self.spans) if self.recompute == Recompute() else 1)


class PlanDocument(Record):
    """Layout, and the contents of every pipeline rank."""

    layout: Layout
    stages: Annotated[tuple[StageDocument, ...], Field(min_length=1)]
    other_stages: tuple[StageDocument, ...] = ()
    """Ranks of heterogeneous replicas on the second node type, then on the third; ``stages`` are those on the
    first. All hold the same layers."""

    def restored(self, source: str) -> Plan:
        """Restore the plan; ``source`` names the file in messages.

        Raises:
            InvalidInputError: the stages do not fit the layout, or do not cover the layers in order.
        """
        pp, vpp = self.layout.pp, self.layout.vpp
        stages = _by_virtual_stage(self.layout, self.stages, source)
        data = {"layout": self.layout.model_dump(), "virtual_stages": [stages[j] for j in range(pp * vpp)]}
        others = [
            _by_virtual_stage(self.layout, self.other_stages[first : first + pp], source)
            for first in range(0, len(self.other_stages), pp)
        ]
        if any(other[j]["layers"] != stages[j]["layers"] for other in others for j in range(pp * vpp)):
            raise InvalidInputError(
                f"{source}: plan.other_stages holds other layers than plan.stages.",
                "Replicas of different make hold the same layers in the same stages.",
                "Correct one of them; their recomputation may differ.",
            )
        data["other_recompute"] = [other[j]["recompute"] for other in others for j in range(pp * vpp)]
        return validated(Plan, data, f"{source}: plan")


def _by_virtual_stage(layout: Layout, given: tuple[StageDocument, ...], source: str) -> dict[int, dict[str, Any]]:
    """Map every virtual stage to its layers and recomputation."""
    pp, vpp = layout.pp, layout.vpp
    held = [(len(stage.spans), len(stage.recomputes)) for stage in given]
    if len(held) != pp or any(counts != (vpp, vpp) for counts in held):
        raise InvalidInputError(
            f"{source}: plan.stages has {counted(len(held), 'stage')} with {sorted({n for n, _ in held})} virtual "
            f"stages and {sorted({n for _, n in held})} recompute entries each.",
            f"pp={shown(pp)} and vpp={shown(vpp)} need {shown(pp)} stages with {shown(vpp)} of both.",
            "Correct the stages or the layout.",
        )
    return {
        j: {"layers": list(stage.spans[chunk]), "recompute": stage.recomputes[chunk].model_dump()}
        for stage, own in zip(given, layout.rank_stages, strict=True)
        for chunk, j in enumerate(own)
    }


class PlanFile(Record):
    """Problem and plan, the input of ``milpplan simulate``."""

    schema_version: Literal[1] = 1
    plan: PlanDocument
    problem: Problem


class ImportedFile(PlanFile):
    """Plan file of a plan that was read from a launcher's files, with the flags that were not read."""

    unknown_flags: tuple[str, ...] = ()
    """Flags that the launcher does not know."""
    ignored_flags: tuple[str, ...] = ()
    """Settings whose effect on the cost the caller ignores."""
    notes: tuple[str, ...] = ()


def plan_document(plan: Plan, report: StepReport | None = None) -> PlanDocument:
    """Write a plan by pipeline rank, with each rank's memory and times where a report is given."""
    ranks = () if report is None else report.stages
    stages = _stage_documents(plan, ranks[: plan.layout.pp])
    if not plan.layout.replica_micro_batches:
        return PlanDocument(layout=plan.layout, stages=stages)
    alike = plan.layout.model_copy(update={"replica_micro_batches": ()})
    pp, others = plan.layout.pp, range(1, len(plan.layout.replica_micro_batches))
    other = [
        _stage_documents(plan.of_replicas(number, alike), ranks[pp * number : pp * (number + 1)])
        for number in others
    ]
    return PlanDocument(layout=plan.layout, stages=stages, other_stages=tuple(chain.from_iterable(other)))


def _stage_documents(plan: Plan, ranks: Sequence[StageReport]) -> tuple[StageDocument, ...]:
    """Write the ranks of a pipeline; ``ranks`` are their reports, if there are any."""
    layout = plan.layout
    stages = []
    for rank in range(layout.pp):
        own = [plan.virtual_stages[j] for j in layout.rank_stages[rank]]
        spans = tuple(stage.layers for stage in own)
        recomputes = tuple(stage.recompute for stage in own)
        details: dict[str, Any] = {}
        if ranks:
            stage = ranks[rank]
            details = {
                "memory_bytes": stage.memory.peak_bytes,
                "memory": stage.memory,
                "breakdown": stage.breakdown_s,
                "hidden": stage.hidden_s,
                "node_type": stage.node_type,
            }
        single = layout.vpp == 1
        stages.append(
            StageDocument(
                layers=spans[0] if single else spans,
                recompute=recomputes[0] if single else recomputes,
                **details,
            )
        )
    return tuple(stages)


def refuse_lengths(data: Mapping[str, Any], path: Path) -> None:
    """Refuse the document of a step of several lengths, which has no plan of its own.

    Raises:
        InvalidInputError: the document is such a step.
    """
    if {"groups", "switches", "static"} <= set(data):
        raise InvalidInputError(
            f"{path} is the result of a solve with --lengths: a step of several lengths, not one plan.",
            "Expected a file with one plan.",
            "Solve for one sequence length (--seq-len) to simulate, export, certify or report that plan; "
            "`milpplan report FILE --trace OUT.json` writes the time line of this one.",
        )


def read_plan_file(path: Path, known: frozenset[str]) -> tuple[Problem, Plan]:
    """Read the problem and the plan of a plan file, or of the document that solve or simulate prints.

    Args:
        path: the JSON file.
        known: fields that such a document may have in addition to those of a plan file; they are not read.

    Raises:
        InvalidInputError: lists the errors of the file, field by field.
    """
    data = parse_json(read_text(path), str(path))
    own = tuple(PlanFile.model_fields)
    refuse_lengths(data, path)
    unknown = sorted(set(data) - known - set(ImportedFile.model_fields))
    if unknown:
        raise InvalidInputError(
            f"{path} has the unknown field {shown(unknown[0])}.",
            f"Expected a plan file with {', '.join(own)}, or a result of milpplan.",
            "Correct or delete the field; `milpplan schema plan` lists those of a plan file.",
        )
    if "plan" in data and data["plan"] is None:
        raise InvalidInputError(
            f"{path} is a result without a plan (status {shown(data.get('status'))}).",
            "Expected a plan.",
            "Give the file of a solve that found one.",
        )
    file = validated(PlanFile, {name: data[name] for name in own if name in data}, str(path))
    return file.problem, file.plan.restored(str(path))
