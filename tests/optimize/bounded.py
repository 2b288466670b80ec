"""Bounds of layouts held to every plan of a small problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from milpplan.optimize.bounds import SAFETY, compute_bounds, layout_bounds
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Layout, Problem
from milpplan.simulation import LayoutCosts, least_held_bytes, usable_memory_bytes
from milpplan.simulation.layout_costs import layout_costs
from tests.optimize.brute_force import costed_plans


@dataclass(frozen=True)
class Bounded:
    """A layout whose bounds hold. ``share``: its bound over its fastest plan that fits; None if none fits."""

    layout: Layout
    costs: LayoutCosts
    share: float | None


def bounded_layouts(problem: Problem) -> Iterator[Bounded]:
    """Every layout, once it is seen that no plan of it that fits is faster, and none smaller, than its bounds."""
    columns = layout_space(problem).columns
    costs, compute_ns = layout_costs(problem, columns), compute_bounds(problem, columns)
    bounds, held = layout_bounds(problem, columns, costs), least_held_bytes(problem, columns) * SAFETY
    for row in range(len(columns)):
        plans = costed_plans(problem, columns.at(row), costs.at(row))
        assert compute_ns[row] <= plans.step_time_ns.min()
        assert max(bounds.memory_bytes[row], held[row]) <= plans.peak_bytes.min()
        fits, share = plans.peak_bytes <= usable_memory_bytes(problem), None
        if fits.any():
            least = plans.step_time_ns[fits].min()
            assert bounds.step_time_ns[row] <= least
            share = bounds.step_time_ns[row] / least
        yield Bounded(columns.at(row), costs.at(row), share)
