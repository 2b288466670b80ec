"""Completion after Tab: names of models and hardware. The shell completes files by itself."""

from __future__ import annotations


def models_like(incomplete: str) -> list[str]:
    """List the shipped models that start with a text."""
    from milpplan.problem.catalog import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def hardware_like(incomplete: str) -> list[str]:
    """List the shipped hardware and stacks that start with a text, or with the part after its last comma."""
    from milpplan.problem.catalog import hardware_names, stack_names

    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*hardware_names(), *stack_names()) if name.startswith(word)]


def presets_like(incomplete: str) -> list[str]:
    """List the shipped models and hardware that start with a text."""
    return [*models_like(incomplete), *hardware_like(incomplete)]
