"""Proved-best parallel training plans for large language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from milpplan.version import __version__ as __version__

if TYPE_CHECKING:
    from milpplan.library import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """A public name, from ``milpplan.library``.

        NumPy, pydantic and the cost model take most of a second to import: not here, so that the command line
        can say what Ctrl-C means before it waits for them.

        Raises:
            AttributeError: ``milpplan`` has no such name.
        """
        library = import_module("milpplan.library")
        if name != "__all__" and name not in library.__all__:
            raise AttributeError(f"module 'milpplan' has no attribute {name!r}")
        return getattr(library, name)


def __dir__() -> list[str]:
    """The public names."""
    return [*globals(), *import_module("milpplan.library").__all__]
