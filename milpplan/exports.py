"""Public names of folders: what a folder offers to others, imported when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

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
