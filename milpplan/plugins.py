"""Additions of other installed packages to milpplan, found by entry points (`docs/backend.md`).

Nothing of a plug-in is imported before its name is asked for, and a plug-in that fails says so by its name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal

from milpplan.errors import MilpplanError, UnknownNameError

Kind = Literal["solvers", "cost_models", "hardware", "exporters"]
KINDS: Final[tuple[Kind, ...]] = ("solvers", "cost_models", "hardware", "exporters")


class PluginError(MilpplanError):
    """A plug-in cannot be loaded, or does not keep to what its kind promises."""


@cache
def _entries(kind: Kind) -> dict[str, EntryPoint]:
    """Entry points of the group ``milpplan.<kind>`` by name, sorted; of two with one name the first by package."""
    found = sorted(entry_points(group=f"milpplan.{kind}"), key=lambda entry: (entry.name, _package(entry)))
    return {entry.name: entry for entry in reversed(found)}


def plugin_names(kind: Kind) -> tuple[str, ...]:
    """Names of the installed plug-ins of a kind, sorted."""
    return tuple(sorted(_entries(kind)))


def plugin(kind: Kind, name: str) -> Any:
    """What a plug-in's entry point names.

    Raises:
        UnknownNameError: no installed package has it.
        PluginError: importing it fails.
    """
    if name not in _entries(kind):
        known = ", ".join(_entries(kind)) or "none"
        raise UnknownNameError(
            f"No installed package offers {name!r} among milpplan.{kind}.",
            f"Installed: {known}.",
            "Install the package that offers it.",
        )
    entry = _entries(kind)[name]
    try:
        return entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit, too: that is not for a plug-in to say.
        raise PluginError(
            f"The plug-in {plugin_title(kind, name)} cannot be loaded: {type(error).__name__}: {error}.",
            f"Its entry point is {entry.value}.",
            "Repair or uninstall its package.",
        ) from error


def plugin_title(kind: Kind, name: str) -> str:
    """A plug-in with its package and version, for certificates and messages."""
    return f"{name} ({_package(_entries(kind)[name])})" if name in _entries(kind) else name


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
