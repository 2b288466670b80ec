"""Launch files of training frameworks: export of plans, import of existing files, and each launcher's limits.

A folder has one launcher: a class in its ``launcher.py`` with the members of ``targets.Launcher``. The registry
``targets.TARGETS`` lists the launchers. The modules here and the folder ``shell`` are shared.
"""
