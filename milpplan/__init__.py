"""Proved-best parallel training plans for large language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from milpplan.version import __version__ as __version__

if TYPE_CHECKING:
    from milpplan.communication.records import TrafficReport as TrafficReport
    from milpplan.communication.traffic import traffic as traffic
    from milpplan.errors import MilpplanError as MilpplanError
    from milpplan.explain.explain_plan import explain_plan as explain_plan
    from milpplan.explain.judge.gap import gap as gap
    from milpplan.explain.judge.records import GapReport as GapReport
    from milpplan.explain.overview import plan_overview as plan_overview
    from milpplan.explain.records import Explanation as Explanation
    from milpplan.explain.records import Overview as Overview
    from milpplan.graph import StrategyGraph as StrategyGraph
    from milpplan.lengths.records import LengthsResult as LengthsResult
    from milpplan.lengths.solve_lengths import solve_lengths as solve_lengths
    from milpplan.lengths.workload import Workload as Workload
    from milpplan.lengths.workload import read_lengths as read_lengths
    from milpplan.lengths.workload import workload_of as workload_of
    from milpplan.optimize.records import PlanResult as PlanResult
    from milpplan.optimize.records import Progress as Progress
    from milpplan.optimize.records import SolveOptions as SolveOptions
    from milpplan.optimize.robust import solve_robust as solve_robust
    from milpplan.optimize.solve import fixed as fixed
    from milpplan.optimize.solve import solve as solve
    from milpplan.problem.catalog import load_hardware as load_hardware
    from milpplan.problem.catalog import load_model as load_model
    from milpplan.problem.hardware import HardwareSpec as HardwareSpec
    from milpplan.problem.model import ModelSpec as ModelSpec
    from milpplan.problem.plan import Layout as Layout
    from milpplan.problem.plan import Plan as Plan
    from milpplan.problem.plan import Recompute as Recompute
    from milpplan.problem.plan import VirtualStage as VirtualStage
    from milpplan.problem.problem import Job as Job
    from milpplan.problem.problem import Problem as Problem
    from milpplan.problem.problem import Space as Space
    from milpplan.problem.records import Range as Range
    from milpplan.problem.scenarios import Scenario as Scenario
    from milpplan.simulation.bulk.simulate_many import BulkSteps as BulkSteps
    from milpplan.simulation.bulk.simulate_many import simulate_many as simulate_many
    from milpplan.simulation.pipeline.lanes import step_lanes as step_lanes
    from milpplan.simulation.simulator import simulate as simulate
    from milpplan.simulation.step_report import StepReport as StepReport
    from milpplan.switching.planning import best_order as best_order
    from milpplan.switching.planning import plan_switch as plan_switch
    from milpplan.switching.planning import switch_costs as switch_costs
    from milpplan.switching.records import SwitchCosts as SwitchCosts
    from milpplan.switching.records import SwitchOrder as SwitchOrder
    from milpplan.switching.records import SwitchPlan as SwitchPlan
    from milpplan.switching.routes import Links as Links
else:

    def __getattr__(name: str) -> Any:
        """A public name, from the module that ``milpplan.library`` names.

        NumPy, pydantic and the cost model take most of a second to import: not here, so that the command line
        can say what Ctrl-C means before it waits for them, and only as much as a name needs.

        Raises:
            AttributeError: ``milpplan`` has no such name.
        """
        return import_module("milpplan.library").fetched(name)


def __dir__() -> list[str]:
    """The public names."""
    return [*globals(), *import_module("milpplan.library").NAMES]
