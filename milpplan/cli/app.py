"""The command line: the program with all its commands, in the order that --help lists them."""

from milpplan.cli import planning

# isort: split
from milpplan.cli import showing

# isort: split
from milpplan.cli import judging

# isort: split
from milpplan.cli import launching

# isort: split
from milpplan.cli import measuring

# isort: split
from milpplan.cli import describing
from milpplan.cli.program import app, run

__all__ = ["app", "describing", "judging", "launching", "measuring", "planning", "run", "showing"]
