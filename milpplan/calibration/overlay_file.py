"""Overlays as TOML files, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milpplan.problem.overlay import Overlay
from milpplan.reports.files import write_whole

COMMENT = "# Fitted by `milpplan calibrate` or `profile`; docs/calibration.md describes every field. SI units.\n"


def overlay_text(overlay: Overlay) -> str:
    """Write an overlay as TOML; reading it gives an equal overlay."""
    data = overlay.model_dump(mode="json", exclude_none=True)
    return COMMENT + "\n".join(_lines(data, "")) + "\n"


def write_overlay(path: Path, overlay: Overlay) -> None:
    """Write the file.

    Raises:
        InvalidInputError: it cannot be written; nothing of it remains.
    """
    write_whole(path, overlay_text(overlay))


def _lines(table: dict[str, Any], name: str) -> Iterator[str]:
    """Write values first, then the tables inside, as TOML requires."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if name and len(inner) < len(table):
        yield f"\n[{name}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        yield from _lines(value, f"{name}.{key}" if name else key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"  {_value(row)},\n" for row in value).rstrip("\n") + "\n]"
        return "[" + ", ".join(_value(element) for element in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        clean = value.encode("utf-8", "replace").decode("utf-8")
        return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
