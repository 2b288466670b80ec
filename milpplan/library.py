"""Public names of the package and of its folders, whose modules are imported when a name is first asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

HOMES: Final[dict[str, tuple[str, ...]]] = {
    "milpplan.communication.records": ("TrafficReport",),
    "milpplan.communication.traffic": ("traffic",),
    "milpplan.simulation.bulk.simulate_many": (
        "BulkSteps",
        "simulate_many",
    ),
    "milpplan.simulation.step_report": ("StepReport",),
    "milpplan.simulation.simulator": ("simulate",),
    "milpplan.simulation.pipeline.lanes": ("step_lanes",),
    "milpplan.errors": ("MilpplanError",),
    "milpplan.graph": ("StrategyGraph",),
    "milpplan.lengths.workload": (
        "Workload",
        "read_lengths",
        "workload_of",
    ),
    "milpplan.explain.explain_plan": ("explain_plan",),
    "milpplan.explain.judge.gap": ("gap",),
    "milpplan.explain.judge.records": ("GapReport",),
    "milpplan.explain.records": (
        "Explanation",
        "Overview",
    ),
    "milpplan.lengths.records": ("LengthsResult",),
    "milpplan.lengths.solve_lengths": ("solve_lengths",),
    "milpplan.optimize.solve": (
        "fixed",
        "solve",
    ),
    "milpplan.optimize.robust": ("solve_robust",),
    "milpplan.problem.scenarios": ("Scenario",),
    "milpplan.optimize.records": (
        "PlanResult",
        "Progress",
        "SolveOptions",
    ),
    "milpplan.explain.overview": ("plan_overview",),
    "milpplan.problem.catalog": (
        "load_hardware",
        "load_model",
    ),
    "milpplan.problem.hardware": ("HardwareSpec",),
    "milpplan.problem.model": ("ModelSpec",),
    "milpplan.problem.plan": (
        "Layout",
        "Plan",
        "Recompute",
        "VirtualStage",
    ),
    "milpplan.problem.problem": (
        "Job",
        "Problem",
        "Space",
    ),
    "milpplan.problem.records": ("Range",),
    "milpplan.switching.routes": ("Links",),
    "milpplan.switching.planning": (
        "best_order",
        "plan_switch",
        "switch_costs",
    ),
    "milpplan.switching.records": (
        "SwitchCosts",
        "SwitchOrder",
        "SwitchPlan",
    ),
}
"""Modules, and their public names; the same as type checkers read in ``milpplan/__init__.py``."""
NAMES: Final = sorted([*(name for names in HOMES.values() for name in names), "__version__"])

# Records know nothing of reports; who imports the library sees them drawn in a notebook.
DRAWN: Final[dict[str, dict[str, str]]] = {
    "milpplan.simulation.step_report": {"StepReport": "milpplan.reports.notebook.html.step_blocks"},
    "milpplan.optimize.records": {"PlanResult": "milpplan.reports.notebook.html.result_blocks"},
    "milpplan.problem.plan": {"Plan": "milpplan.reports.notebook.html.plan_blocks"},
    "milpplan.communication.records": {"TrafficReport": "milpplan.reports.answers.traffic.traffic_blocks"},
    "milpplan.explain.hardware_choice": {
        "Choice": "milpplan.reports.answers.hardware_choice.choice_blocks",
        "Fewest": "milpplan.reports.notebook.html.fewest_blocks",
    },
    "milpplan.explain.judge.records": {"GapReport": "milpplan.reports.answers.gap.gap_blocks"},
    "milpplan.explain.records": {"Explanation": "milpplan.reports.answers.explain.explanation_blocks"},
    "milpplan.lengths.records": {"LengthsResult": "milpplan.reports.answers.lengths.lengths_blocks"},
}
"""Modules, their records, and the functions that make the blocks of these."""


def fetched(name: str) -> Any:
    """A public name of ``milpplan``.

    Raises:
        AttributeError: there is no such name.
    """
    if name == "__all__":
        return NAMES
    home = next((module for module, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'milpplan' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    for module, kinds in DRAWN.items():
        for kind, drawing in kinds.items():
            # Not there: not imported, or another thread is importing it and will come by here itself.
            record = getattr(sys.modules.get(module), kind, None)
            if record is not None:
                record._repr_html_ = _drawn_by(drawing)
    return value


def _drawn_by(drawing: str) -> Callable[[Any], str]:
    """A method that draws a record by its blocks; modules are imported when they are needed."""
    module, _, function = drawing.rpartition(".")

    def drawn(record: Any) -> str:
        from milpplan.reports.notebook.html import notebook_html

        return notebook_html(getattr(import_module(module), function)(record))

    return drawn


IMPORT: Final = re.compile(r"^    from (\S+) import (\([^)]*\)|.*)", re.MULTILINE)
"""An import for type checkers in the ``__init__`` module of a folder."""


def lazy_exports(folder: str, file: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a folder that offers the names that it imports for type checkers.

    A name is imported when it is first asked for: most users of a folder need few of its modules.

    Args:
        folder: The folder's dotted name.
        file: Its ``__init__`` module, which is read for the names.
    """
    homes = {
        name: module
        for module, names in IMPORT.findall(Path(file).read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", names)
    }

    def exported(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return exported
