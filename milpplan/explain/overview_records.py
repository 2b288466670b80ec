"""Records of a plan's page."""

from __future__ import annotations

from dataclasses import dataclass

from milpplan.communication.records import TrafficReport
from milpplan.errors import MilpplanError
from milpplan.explain.records import NearBest, RuleOfThumb
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.pipeline.lanes import StepLanes
from milpplan.simulation.report import StepReport
from milpplan.units import counted


@dataclass(frozen=True, slots=True)
class Missing:
    """Reason why a part of the page cannot be shown: values seen, values expected, and advice."""

    seen: str
    expected: str
    do: str

    @staticmethod
    def of(error: MilpplanError) -> Missing:
        """Convert an error."""
        return Missing(error.seen, error.expected, error.do)


@dataclass(frozen=True, slots=True)
class ExportTab:
    """Launcher's files (name to text) and notes for the plan, or the reason why it cannot run the plan."""

    target: str
    name: str
    version: str
    files: dict[str, str]
    notes: tuple[str, ...] = ()
    refusal: Missing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Simulated plan, with the answers to usual questions."""

    problem: Problem
    plan: Plan
    report: StepReport
    lanes: StepLanes
    traffic: TrafficReport | Missing
    near: NearBest | Missing
    rule: RuleOfThumb | Missing
    exports: tuple[ExportTab, ...]

    @property
    def title(self) -> str:
        """Model and number of GPUs."""
        return f"{self.problem.model.name} on {counted(self.plan.layout.num_gpus, 'GPU')}"
