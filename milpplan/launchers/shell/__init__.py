"""Reader of shell scripts: the training command of a launch script, without running the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.launchers.shell.launch_text import pairs_of
    from milpplan.launchers.shell.script import script_commands
    from milpplan.launchers.shell.tree import is_mark, readable, unknown_in
else:
    __getattr__ = lazy_exports(__name__, __file__)
