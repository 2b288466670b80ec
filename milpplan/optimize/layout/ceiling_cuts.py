"""Ceiling cuts: bounds that use the integrality of layers in an interleaved schedule.

L layers over n inner virtual stages (all but the last chunk of every rank) leave one of the stages with at least
ceil(L / n) layers, though a linear relaxation gives each of them L / n. It does not matter which stage this is.
For every inner stage j there is a path

    forwards of micro-batch 0 down to j, of 0 .. r on j, of r down to virtual stage (v - 1) P + s,
    all that rank s runs from there to its backward of micro-batch m - 1 - q of that virtual stage,
    backwards of m - 1 - q up to j, of m - 1 - q .. m - 1 on j, of m - 1 up to the first virtual stage

so the step takes at least the common part of these paths, plus r forwards and q backwards of the fullest inner
stage. On a rank's way from the first to the last of the items on j other items may run, which make it longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.layout.warm_start import add_ends
from milpplan.problem.plan import Layout
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.schedule import Structure
from milpplan.simulation.pipeline.step_graph import Term


@dataclass(frozen=True, slots=True)
class CeilingPath:
    """Lower bound of a step: ``path``, plus ``forwards`` and ``backwards`` (counts) of the fullest inner virtual
    stage."""

    path: CriticalPath
    forwards: int
    backwards: int


def has_ceiling_cuts(context: LayoutContext) -> bool:
    """Return True if layers are split freely over interleaved chunks."""
    layout = context.layout
    return layout.schedule == "interleaved" and layout.vpp > 1 and context.problem.interleaved_layers == "any"


def num_inner(layout: Layout) -> int:
    """Return the number of inner virtual stages, which come first."""
    return layout.pp * (layout.vpp - 1)


def fullest_stage_bound(context: LayoutContext) -> int:
    """Return the minimum number of layers of the fullest inner virtual stage."""
    layout = context.layout
    inner, P = num_inner(layout), layout.pp
    stage_min, stage_max = np.array(context.layer_bounds, dtype=np.int64).T
    rank_min = np.array(context.rank_bounds, dtype=np.int64)[:, 0]
    on_ranks = -(-(rank_min - stage_max[inner:]) // (layout.vpp - 1))
    everywhere = math.ceil(
        (context.problem.model.num_layers - int(stage_max[inner:].sum())) / (P * (layout.vpp - 1))
    )
    return max(context.min_fullest_stage, everywhere, int(on_ranks.max()), int(stage_min[:inner].max()))


def min_passes(slope: IntArray, modes: Collection[str]) -> IntArray:
    """Return the minimum nanoseconds that a layer adds to a forward and to a backward, [2].

    ``slope`` [Term, 3, J, K]: nanoseconds that a layer adds, and that its full or selective recomputation adds.
    """
    minima = []
    for term in (Term.FORWARD, Term.BACKWARD):
        layers, full, selective = slope[term]
        added = {"none": np.zeros_like(layers), "full": full, "selective": selective}
        minima.append(min(int((layers + added[mode]).min()) for mode in modes))
    return np.array(minima, dtype=np.int64)


def fullest_stage_branching(context: LayoutContext) -> list[LayoutContext]:
    """Return two parts: no inner virtual stage exceeds the minimum of the fullest stage, or some stage does. Empty
    where the limits decide this already."""
    inner, peak = num_inner(context.layout), fullest_stage_bound(context)
    if all(high <= peak for _, high in context.layer_bounds[:inner]):
        return []
    flat = tuple((low, min(high, peak)) for low, high in context.layer_bounds[:inner])
    return [
        replace(context, layer_bounds=(*flat, *context.layer_bounds[inner:]), min_fullest_stage=peak),
        replace(context, min_fullest_stage=peak + 1),
    ]


def ceiling_paths(layout: Layout, structure: Structure) -> list[CeilingPath]:
    """Return the paths of an interleaved layout by s, r and q, with as many items on the inner stage as the order
    of rank s allows."""
    walks = _Walks(layout, structure)
    return [path for rank in range(layout.pp) for path in walks.paths_through(rank)]


class _Walks:
    """Items of every rank in order, and paths made of them."""

    def __init__(self, layout: Layout, structure: Structure) -> None:
        self.layout, self.structure = layout, structure
        after = {int(before): node for node, before in enumerate(structure.rank_predecessor.tolist())}
        self.position = np.zeros(structure.num_nodes, dtype=np.int64)
        self.order: list[list[int]] = []
        for rank in range(layout.pp):
            items: list[int] = []
            node = after.get(structure.num_nodes + rank)
            while node is not None:
                self.position[node] = len(items)
                items.append(node)
                node = after.get(node)
            self.order.append(items)

    def paths_through(self, rank: int) -> list[CeilingPath]:
        """Return the paths of one rank: for each number of forwards the maximum number of backwards after them."""
        P, m = self.layout.pp, self.layout.num_micro_batches
        stage = num_inner(self.layout) + rank
        entries = self.structure.forward_node[stage, :P].tolist()
        exits = self.structure.backward_node[stage, ::-1][:P].tolist()
        paths: list[CeilingPath] = []
        for forwards in reversed(range(min(P, m))):
            reachable = [
                q for q, exit_ in enumerate(exits) if self.position[exit_] > self.position[entries[forwards]]
            ]
            backwards = max(reachable, default=-1)
            if backwards > max((path.backwards for path in paths), default=-1):
                walk = self.order[rank][self.position[entries[forwards]] : self.position[exits[backwards]] + 1]
                paths.append(CeilingPath(self._path(stage, walk), forwards, backwards))
        return paths

    def _path(self, stage: int, walk: Sequence[int]) -> CriticalPath:
        """Return the path of a forward chain down to a virtual stage, items of its rank, and a backward chain from
        it."""
        structure, J = self.structure, self.layout.num_virtual_stages
        counts = np.zeros((len(Term), J), dtype=np.int64)
        counts += np.bincount(structure.duration_index[list(walk)], minlength=counts.size).reshape(counts.shape)
        counts[Term.FORWARD, :stage] += 1
        counts[Term.BACKWARD, :stage] += 1
        # Each of the borders before the virtual stage is passed twice.
        counts[Term.CROSSING, :stage] += 2
        by_chunk = counts.reshape(len(Term), self.layout.vpp, self.layout.pp)
        add_ends(self.layout, by_chunk, 0)
        return CriticalPath(counts, 2 * stage)
