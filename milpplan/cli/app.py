"""The program with all its commands, in the order and the sections of ``milpplan --help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from milpplan.cli.command import Command
from milpplan.cli.commands.calibrate import calibrate
from milpplan.cli.commands.certify import certify
from milpplan.cli.commands.compare import compare
from milpplan.cli.commands.doctor import doctor
from milpplan.cli.commands.explain import explain
from milpplan.cli.commands.export import export
from milpplan.cli.commands.gap import gap
from milpplan.cli.commands.import_plan import import_plan
from milpplan.cli.commands.init import init
from milpplan.cli.commands.list_names import list_names
from milpplan.cli.commands.min_gpus import min_gpus
from milpplan.cli.commands.profile import profile
from milpplan.cli.commands.report import report
from milpplan.cli.commands.schema import schema
from milpplan.cli.commands.show_preset import show_preset
from milpplan.cli.commands.simulate import simulate
from milpplan.cli.commands.solve import solve
from milpplan.cli.commands.solve_lengths import solve_lengths
from milpplan.cli.commands.sweep import sweep
from milpplan.cli.commands.switch import switch
from milpplan.cli.commands.traffic import traffic
from milpplan.cli.commands.validate import validate
from milpplan.cli.program import app, run

__all__ = ["COMMANDS", "app", "run"]

COMMANDS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "Find plans": {
        "solve": solve,
        "solve-lengths": solve_lengths,
        "min-gpus": min_gpus,
        "sweep": sweep,
    },
    "Understand and check plans": {
        "simulate": simulate,
        "explain": explain,
        "compare": compare,
        "report": report,
        "traffic": traffic,
        "switch": switch,
        "certify": certify,
    },
    "Launchers": {"export": export, "import": import_plan, "gap": gap},
    "Measurements": {"validate": validate, "calibrate": calibrate, "profile": profile},
    "Files and set-up": {
        "list": list_names,
        "show": show_preset,
        "schema": schema,
        "init": init,
        "doctor": doctor,
    },
}
"""Functions of the commands, by section and name."""

for panel, functions in COMMANDS.items():
    for name, function in functions.items():
        app.command(name, cls=Command, rich_help_panel=panel)(function)
