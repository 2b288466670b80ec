"""What ``import milpplan`` offers says its units and its errors."""

from __future__ import annotations

import inspect
import re

import pytest

import milpplan
from milpplan import errors

EXPORTED = [name for name in milpplan.__all__ if inspect.isclass(getattr(milpplan, name))]
FUNCTIONS = [name for name in milpplan.__all__ if inspect.isfunction(getattr(milpplan, name))]
ERRORS = {name for name, value in vars(errors).items() if inspect.isclass(value)}
UNIT = re.compile(r".*(_s|_bytes|_per_s|_tokens|_gpu_hours?|_fraction|efficiency|mfu|gap|tokens|tolerance)")
"""Ends of names that say a unit, or that what they name has none."""


def documentation(name: str) -> str:
    """The docstring of an exported name."""
    return inspect.getdoc(getattr(milpplan, name)) or ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_raise(name: str) -> None:
    """``Raises:`` names errors that there are, in the docstring of every exported function."""
    _, _, raised = documentation(name).partition("\nRaises:\n")
    named = set(re.findall(r"^ {4}(\w+):", raised, re.MULTILINE))
    assert named
    assert named <= ERRORS


@pytest.mark.parametrize("name", [*EXPORTED, *FUNCTIONS])
def test_numbers_have_units(name: str) -> None:
    """A fractional number says its unit in its name, or the docstring speaks of it by name."""
    exported = getattr(milpplan, name)
    numbers = inspect.get_annotations(exported) | {
        one.name: one.annotation
        for one in (inspect.signature(exported).parameters.values() if name in FUNCTIONS else ())
    }
    told = documentation(name)
    fractional = [one for one, kind in numbers.items() if "float" in str(kind).lower()]
    assert [one for one in fractional if not UNIT.fullmatch(one) and not re.search(rf"\b{one}\b", told)] == []
