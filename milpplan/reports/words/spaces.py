"""Sentences on the cost model and declared space of a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milpplan.plugins import plugin_title
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.problem.plan import RANK_ORDERS
from milpplan.problem.problem import NOT_LISTS, Problem, Space
from milpplan.version import __version__


def cost_model_text(problem: Problem) -> str:
    """Name the cost model of a proof, e.g. ``milpplan 0.1.0``, and the plug-in that times the layers, if there is
    one."""
    names = {hardware.software.cost_model for hardware in problem.node_types} - {OWN_COST_MODEL}
    others = [plugin_title("cost_models", name) for name in sorted(names)]
    return f"milpplan {__version__}" + "".join(f" with layers timed by {other}" for other in others)


def scope_text(problem: Problem, forbid: Sequence[Mapping[str, object]] = ()) -> str:
    """Describe the cost model and the declared space of a proof, without the forbidden layouts."""
    left_out = [
        " and ".join(f"{name} {_value_text(value)}" for name, value in forbidden.items()) for forbidden in forbid
    ]
    without = f" without {', or '.join(left_out)}" if left_out else ""
    return f"cost model {cost_model_text(problem)}, {space_text(problem)}{without}"


def _value_text(value: object) -> str:
    """Write a value as the command line takes it."""
    return "-".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def space_text(problem: Problem) -> str:
    """Describe the kind of the space and its narrowings, e.g. ``space free (interleaved layers even; tp 8)``."""
    space, default = problem.space, Space()
    narrowed = []
    if space.target is not None:
        narrowed.append(f"what {space.target} {space.target_version or ''}".rstrip() + " can run")
    if space.kind == "free" and space.recompute_counts != "any":
        narrowed.append(f"recompute counts {space.recompute_counts}")
    if space.kind == "free":
        narrowed.append(f"interleaved layers {problem.interleaved_layers}")
    if space.vpp is None and space.vpp_values != default.vpp_values:
        narrowed.append(f"vpp {space.vpp_values}")
    narrowed += narrowings(space)
    return f"space {space.kind} ({'; '.join(narrowed)})" if narrowed else f"space {space.kind}"


def narrowings(space: Space) -> list[str]:
    """List the values that a space fixes, e.g. ``tp 8``."""
    default, narrowed = Space(), []
    for name in Space.model_fields:
        if name in NOT_LISTS:
            continue
        value = getattr(space, name)
        if name == "rank_order" and set(value) == set(RANK_ORDERS):
            narrowed.append("any rank_order")
        elif value is not None and value != getattr(default, name):
            narrowed.append(f"{name} {', '.join(str(item) for item in value)}")
    return narrowed
