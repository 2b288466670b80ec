"""Sentences on a proof: its cost model, its declared space, and proved intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from milpplan.explain.records import Interval
from milpplan.plugins import plugin_title
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.problem.plan import RANK_ORDERS
from milpplan.problem.problem import NOT_LISTS, Problem, Space
from milpplan.units import percent_text, signed_percent_text
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


def range_text(interval: Interval, signed: bool = False) -> str:
    """Write an interval of shares in per cent, with the digits that it supports."""
    low, high = interval.low, interval.high
    width = high - low
    digits = 2 if math.isinf(width) or width < 0.01 else 1
    text = signed_percent_text if signed else percent_text
    if math.isinf(low) and math.isinf(high):
        return "unknown"
    if math.isinf(high):
        return f"at least {text(low, digits)}"
    if math.isinf(low):
        return f"at most {text(high, digits)}"
    # Rounded outwards, so that the printed interval is proved.
    unit = 10.0 ** -(digits + 2)
    ends = text(math.floor(low / unit) * unit, digits), text(math.ceil(high / unit) * unit, digits)
    return joined(*ends)


def joined(low: str, high: str) -> str:
    """Write two amounts as a range, with a common unit once: ``1.2 to 1.3 %``."""
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if unit == high.rpartition(" ")[2] else f"{low} to {high}"
