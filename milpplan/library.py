"""What ``import milpplan`` offers; the package fetches it from here when it is first asked for."""

from milpplan.communication.records import TrafficReport
from milpplan.communication.traffic import traffic
from milpplan.costs.bulk import BulkSteps, simulate_many
from milpplan.costs.report import StepReport
from milpplan.costs.simulator import simulate
from milpplan.costs.step_lanes import step_lanes
from milpplan.errors import MilpplanError
from milpplan.groups.workload import Workload, read_lengths, workload_of
from milpplan.insight.explaining import explain_plan
from milpplan.insight.gap import gap
from milpplan.insight.gap_records import GapReport
from milpplan.insight.records import Explanation
from milpplan.lengths.records import LengthsResult
from milpplan.lengths.solving import solve_lengths
from milpplan.optimize.planner import fixed, solve
from milpplan.optimize.result import PlanResult, Progress, SolveOptions
from milpplan.overview.gathering import plan_overview
from milpplan.overview.records import Overview
from milpplan.presets.catalog import load_hardware, load_model
from milpplan.reports.notebook import plan_html, result_html, step_html
from milpplan.reports.notebook_text import SHOWN
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.specs.problem import Job, Problem, Range, Space
from milpplan.switching.links import Links
from milpplan.switching.order import best_order, switch_costs
from milpplan.switching.planning import plan_switch
from milpplan.switching.records import SwitchCosts, SwitchOrder, SwitchPlan
from milpplan.version import __version__

__all__ = [
    "BulkSteps",
    "Explanation",
    "GapReport",
    "HardwareSpec",
    "Job",
    "Layout",
    "LengthsResult",
    "Links",
    "MilpplanError",
    "ModelSpec",
    "Overview",
    "Plan",
    "PlanResult",
    "Problem",
    "Progress",
    "Range",
    "Recompute",
    "SolveOptions",
    "Space",
    "StepReport",
    "SwitchCosts",
    "SwitchOrder",
    "SwitchPlan",
    "TrafficReport",
    "VirtualStage",
    "Workload",
    "__version__",
    "best_order",
    "explain_plan",
    "fixed",
    "gap",
    "load_hardware",
    "load_model",
    "plan_overview",
    "plan_switch",
    "read_lengths",
    "simulate",
    "simulate_many",
    "solve",
    "solve_lengths",
    "step_lanes",
    "switch_costs",
    "traffic",
    "workload_of",
]

# Records know nothing of reports; who imports the library sees them drawn in a notebook.
PlanResult._repr_html_ = result_html  # type: ignore[attr-defined]
StepReport._repr_html_ = step_html  # type: ignore[attr-defined]
Plan._repr_html_ = plan_html  # type: ignore[attr-defined]
for _kind, _draw in SHOWN.items():
    _kind._repr_html_ = _draw
