"""What a shell offers after Tab: names of models and hardware. Files it completes by itself."""

from __future__ import annotations


def models_like(incomplete: str) -> list[str]:
    """Shipped models that begin so."""
    from milpplan.problem.catalog import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def hardware_like(incomplete: str) -> list[str]:
    """Shipped hardware and software stacks that begin so; after a comma, for the next of several."""
    from milpplan.problem.catalog import hardware_names, stack_names

    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*hardware_names(), *stack_names()) if name.startswith(word)]


def presets_like(incomplete: str) -> list[str]:
    """Both."""
    return [*models_like(incomplete), *hardware_like(incomplete)]
