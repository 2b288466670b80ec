"""The command ``schema``."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer
from pydantic import BaseModel

from milpplan.cli.command import choice
from milpplan.cli.outcome import emit
from milpplan.lengths import (
    DispatchFile,
    GroupedPlanFile,
)
from milpplan.lengths.workload import WorkloadFile
from milpplan.problem import HardwareSpec, ModelSpec, Overlay, Problem
from milpplan.problem.scenarios import ScenarioFile
from milpplan.reports.answers import ChoiceDocument, ExplanationDocument, FewestDocument, GapDocument, LengthsFile
from milpplan.reports.documents.document import ResultDocument
from milpplan.reports.documents.plan_file import PlanFile
from milpplan.studies.grid import Study

EXAMPLES: Final = (("The JSON Schema of plan files", "plan"),)
SCHEMAS: Final[dict[str, type[BaseModel]]] = {
    "problem": Problem,
    "plan": PlanFile,
    "model": ModelSpec,
    "hardware": HardwareSpec,
    "overlay": Overlay,
    "scenarios": ScenarioFile,
    "study": Study,
    "result": ResultDocument,
    "explanation": ExplanationDocument,
    "grouped-plan": GroupedPlanFile,
    "dispatch": DispatchFile,
    "gap": GapDocument,
    "choice": ChoiceDocument,
    "fewest": FewestDocument,
    "lengths": LengthsFile,
    "workload": WorkloadFile,
}
"""Records that users write or read, by the words of the command."""


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="problem|plan|model|hardware|overlay|scenarios|study|result|explanation|grouped-plan|dispatch|gap|choice"
            "|fewest|lengths|workload"
        ),
    ] = "problem",
) -> None:
    """Print the JSON Schema of a file that milpplan reads or writes."""
    emit(json.dumps(SCHEMAS[choice(kind, "schema", SCHEMAS)].model_json_schema(), indent=2) + "\n")
