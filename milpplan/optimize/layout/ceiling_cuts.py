"""Peaks: what layers that do not come out even cost an interleaved schedule.

L layers over n inner virtual stages (all but the last chunk of every rank) leave one of them with at least
ceil(L / n), though a linear relaxation gives each of them L / n. Which one that is does not matter: for every
inner stage j there is a path

    forwards of micro-batch 0 down to j, of 0 .. r on j, of r down to virtual stage (v - 1) P + s,
    all that rank s runs from there to its backward of micro-batch m - 1 - q of that virtual stage,
    backwards of m - 1 - q up to j, of m - 1 - q .. m - 1 on j, of m - 1 up to the first virtual stage

so the step takes at least what these paths have in common and r forwards and q backwards of the fullest inner
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
    """A step takes at least ``path``, and so many ``forwards`` and ``backwards`` of the fullest inner virtual
    stage."""

    path: CriticalPath
    forwards: int
    backwards: int


def has_peaks(context: LayoutContext) -> bool:
    """Whether layers are split freely over interleaved chunks."""
    layout = context.layout
    return layout.schedule == "interleaved" and layout.vpp > 1 and context.problem.interleaved_layers == "any"


def num_inner(layout: Layout) -> int:
    """Inner virtual stages: the first so many."""
    return layout.pp * (layout.vpp - 1)


def least_peak(context: LayoutContext) -> int:
    """Layers that the fullest inner virtual stage holds at least."""
    layout = context.layout
    inner, P = num_inner(layout), layout.pp
    least, most = np.array(context.layer_bounds, dtype=np.int64).T
    fewest = np.array(context.rank_bounds, dtype=np.int64)[:, 0]
    on_ranks = -(-(fewest - most[inner:]) // (layout.vpp - 1))
    everywhere = math.ceil((context.problem.model.num_layers - int(most[inner:].sum())) / (P * (layout.vpp - 1)))
    return max(context.peak, everywhere, int(on_ranks.max()), int(least[:inner].max()))


def least_passes(slope: IntArray, modes: Collection[str]) -> IntArray:
    """Least nanoseconds that a layer adds to a forward and to a backward, [2]. ``slope`` [Term, 3, J, K]: what a
    layer adds, and what it adds when it is recomputed wholly or selectively."""
    least = []
    for term in (Term.FORWARD, Term.BACKWARD):
        layers, full, selective = slope[term]
        added = {"none": np.zeros_like(layers), "full": full, "selective": selective}
        least.append(min(int((layers + added[mode]).min()) for mode in modes))
    return np.array(least, dtype=np.int64)


def peak_parts(context: LayoutContext) -> list[LayoutContext]:
    """The part where no inner virtual stage holds more than the least peak, and the part where one does; none
    where the limits say so already."""
    inner, peak = num_inner(context.layout), least_peak(context)
    if all(most <= peak for _, most in context.layer_bounds[:inner]):
        return []
    flat = tuple((least, min(most, peak)) for least, most in context.layer_bounds[:inner])
    return [
        replace(context, layer_bounds=(*flat, *context.layer_bounds[inner:]), peak=peak),
        replace(context, peak=peak + 1),
    ]


def peak_paths(layout: Layout, structure: Structure) -> list[CeilingPath]:
    """The paths of an interleaved layout by s, r and q, as many items on the inner stage as the order of rank s
    allows."""
    walks = _Walks(layout, structure)
    return [path for rank in range(layout.pp) for path in walks.paths_through(rank)]


class _Walks:
    """The items of every rank in order, and paths as lists of them."""

    def __init__(self, layout: Layout, structure: Structure) -> None:
        self.layout, self.structure = layout, structure
        after = {int(before): node for node, before in enumerate(structure.rank_predecessor.tolist())}
        self.place = np.zeros(structure.num_nodes, dtype=np.int64)
        self.order: list[list[int]] = []
        for rank in range(layout.pp):
            items: list[int] = []
            node = after.get(structure.num_nodes + rank)
            while node is not None:
                self.place[node] = len(items)
                items.append(node)
                node = after.get(node)
            self.order.append(items)

    def paths_through(self, rank: int) -> list[CeilingPath]:
        """Of one rank: every number of forwards with the most backwards that come after them."""
        P, m = self.layout.pp, self.layout.num_micro_batches
        stage = num_inner(self.layout) + rank
        entries = self.structure.forward_node[stage, :P].tolist()
        exits = self.structure.backward_node[stage, ::-1][:P].tolist()
        found: list[CeilingPath] = []
        for forwards in reversed(range(min(P, m))):
            later = [q for q, exit_ in enumerate(exits) if self.place[exit_] > self.place[entries[forwards]]]
            backwards = max(later, default=-1)
            if backwards > max((path.backwards for path in found), default=-1):
                walk = self.order[rank][self.place[entries[forwards]] : self.place[exits[backwards]] + 1]
                found.append(CeilingPath(self._path(stage, walk), forwards, backwards))
        return found

    def _path(self, stage: int, walk: Sequence[int]) -> CriticalPath:
        """A forward chain down to a virtual stage, items of its rank, and a backward chain from it."""
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
