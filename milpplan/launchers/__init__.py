"""Launch files of training frameworks: export of plans, import of existing files, and each launcher's limits.

A folder has one launcher: a class in its ``launcher.py`` with the members of ``targets.Launcher``. The registry
``targets.TARGETS`` lists the launchers. The modules here and the folder ``shell`` are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, Launch
    from milpplan.launchers.scripts import job_files
    from milpplan.launchers.settings import Code, Known, flat, is_quiet, known_settings
    from milpplan.launchers.targets import TARGETS, restrict, run_by, target_named, target_names
else:
    __getattr__ = lazy_exports(__name__, __file__)
