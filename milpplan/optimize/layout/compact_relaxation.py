"""Compact relaxation: layer and recompute counts as continuous variables, with few columns per virtual stage.

    n_jk layers of kind k in stage j, of which f_jk are recomputed fully and s_jk selectively; z above ``base``

    minimise z + price * unplaced
    kinds_are_placed     sum_j n_jk + unplaced_k = N_k                                     for every kind
    recompute_is_held    f_jk + s_jk <= n_jk                                               for every j, k
    stage_holds_layers   layers of a virtual stage                <= max_j
    stage_holds_enough   layers of a virtual stage + unplaced     >= min_j
    rank_holds_layers    layers of all chunks of a rank           <= max_s                            (v > 1)
    rank_holds_enough    layers of all chunks of a rank + unplaced >= min_s                           (v > 1)
    kinds_begin          layers of kind k up to virtual stage j + unplaced_k >= of the first layers   (K > 1)
    kinds_end            layers of kind k from virtual stage j on + unplaced_k >= of the last layers  (K > 1)
    rank_holds_kind      layers of a kind in all chunks of a rank <= what counting allows  (v > 1)
    rank_fits            bytes at every live vector of every rank <= capacity
    rank_fits_on_host    bytes on the host <= capacity, where something is offloaded
    rank_recomputes_enough  a rank's recomputation >= the minimum that fits, where the layers are fixed
    stage_recomputes_block  min(n, max_j) / max_j * sum_k n_jk <= sum_k f_jk <= n, where the first n layers of
                         every virtual stage are recomputed
    fullest_stage        z >= path(x) + forwards and backwards of the minimum layers of the fullest inner stage,
                         where splits are free and interleaved (ceiling cuts)             for every ceiling path
    critical_path        z >= path(x)                                                      for every path

It ignores integrality, most of the order of kinds, and all but the mean of the replayed bytes, so its optimum
bounds every plan of the layout from below; ``Relaxation.proved_bound`` makes that exact. It is solved before any
menu is built.

With unplaced layers there is always an optimum, and so always a dual that proves a bound. Narrower limits only
move the sides of the rows on layers. The relaxation ignores the order of the layers, but the virtual stages up to
j hold the model's first layers, at least ``layers_up_to`` of them, with all layers of a kind among those. Without
these rows the three dense layers of DeepSeek-V3, which only the first four virtual stages can hold, balance its
last ranks.

Ceiling cuts: bounds that use the integrality of layers in an interleaved schedule.

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
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from milpplan.optimize.bounds.closed_form import max_layers_on_ranks
from milpplan.optimize.layout.rounding import add_ends
from milpplan.optimize.layout.stage_options import FLOOR_UNITS, LayoutContext
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Program, Rows
from milpplan.optimize.space.plan_space import layers_up_to
from milpplan.problem import Layout
from milpplan.simulation import FloatArray, IntArray, LayoutCosts, host_capacity_bytes, stage_options
from milpplan.simulation.layers import Phase
from milpplan.simulation.layers.shard import PAIRED
from milpplan.simulation.pipeline.step_graph import CriticalPath, Term
from milpplan.simulation.pipeline.work_orders import Structure
from milpplan.simulation.stages import EMBEDDING, HEAD, least_edges, least_slope


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


RESOLUTION = 2_000_000
"""Units between the base and the cutoff."""
MEMORY_UNITS = 2**20
MOST_UNITS = 4 * RESOLUTION
"""Upper side of z. No plan below the cutoff is near it, and layers may always stay unplaced. The smaller it is,
the less an inexact dual costs the bound that it proves."""
UNPLACED_PRICE = 64 * RESOLUTION
PRICE_MARGIN = 1.0
COUNTS = ("layers", "full", "selective")


@dataclass
class CompactRelaxation:
    """Relaxation of one layout. Columns: (count, stage, kind) in this order, then z, then unplaced layers of each
    kind."""

    context: LayoutContext
    cutoff_ns: int
    ceiling_paths: Sequence[CeilingPath] = ()
    empty: IntArray = field(init=False)
    """Duration matrix of stages without layers, [Term, J]."""
    slope: IntArray = field(init=False)
    """Nanoseconds of one unit of each count, [Term, 3, J, K]."""

    def __post_init__(self) -> None:
        context = self.context
        J, K = context.num_stages, len(context.problem.model.kinds)
        zero = np.zeros(1, dtype=np.int64)
        self.slope = np.zeros((len(Term), 3, J, K), dtype=np.int64)
        empty = []
        for j in range(J):
            costs, crossing_ns = self._costs_of(j), context.costs.crossing_ns(j)
            duration = costs.duration_ns
            self.slope[Term.FORWARD, 0, j] = duration[:, Phase.FORWARD]
            self.slope[Term.FORWARD, 1, j] = costs.replayed_forward_ns[1]
            self.slope[Term.FORWARD, 2, j] = costs.replayed_forward_ns[0]
            self.slope[Term.BACKWARD, 0, j] = duration[:, Phase.BACKWARD]
            self.slope[Term.BACKWARD, 1, j] = duration[:, Phase.FULL]
            self.slope[Term.BACKWARD, 2, j] = duration[:, Phase.SELECTIVE]
            self.slope[Term.WEIGHT, 0, j] = duration[:, Phase.WEIGHT]
            if costs.runs_pairs:
                self.slope[Term.PAIRED_BACKWARD, :, j] = self.slope[Term.BACKWARD, :, j]
                self.slope[PAIRED, 0, j] = costs.paired_ns.T
            for term, values in (
                (Term.GATHER, costs.gather_ns),
                (Term.REDUCE, costs.reduce_ns),
                (Term.OPTIMIZER, costs.optimizer_ns),
            ):
                self.slope[term, 0, j] = values[:-2]
            least_slope(costs, self.slope[:, :, j])
            ends = {"is_first": j == 0, "is_last": j == J - 1}
            empty.append(stage_options(costs, [], zero, zero, crossing_ns=crossing_ns, **ends).terms[:, 0])
        self.empty = np.stack(empty, axis=1)
        for j in range(J):
            self._edges(j, J > 1 and context.min_layers(j) == 0)

    def _costs_of(self, stage: int) -> LayoutCosts:
        """Return the cost constants of a virtual stage's rank."""
        return self.context.costs.of_rank(self.context.layout.rank_of(stage))

    def _edges(self, j: int, may_be_empty: bool) -> None:
        """Set the buckets at a stage's edges, which are not sums over its layers, to their minimum."""
        min_edges = least_edges(self._costs_of(j), j == 0, j == self.context.num_stages - 1)
        for term, value in min_edges.items():
            self.empty[term, j] = min(value, int(self.empty[term, j])) if may_be_empty else value

    def narrowed(self, context: LayoutContext) -> CompactRelaxation:
        """Return the relaxation for narrower limits.

        Its program is shared. An end of the model that must hold a layer under these limits has the edges of a
        stage with layers, where this relaxation has those of an empty stage.
        """
        ends = [j for j in (0, context.num_stages - 1) if context.min_layers(j) > self.context.min_layers(j) == 0]
        if not ends:
            return self
        other = copy(self)
        other.program, other.empty = self.program, self.empty.copy()
        for j in ends:
            other._edges(j, False)
        return other

    @property
    def num_counts(self) -> int:
        """Number of columns before z."""
        return int(self.slope[0].size)

    def layers(self, values: FloatArray) -> FloatArray:
        """Return the layers of every virtual stage at a fractional point, [J]."""
        counts = values[: self.num_counts].reshape(self.slope.shape[1:])
        return np.asarray(counts[0].sum(axis=1))

    def durations(self, values: FloatArray) -> IntArray:
        """Return the duration matrix [Term, J] of a fractional point."""
        counts = values[: self.num_counts].reshape(self.slope.shape[1:])
        return np.asarray(self.empty + np.rint((self.slope * counts).sum(axis=(1, 3))).astype(np.int64))

    def ceiling_rows(self, base: int, unit: int) -> Rows:
        """Return the rows fullest_stage: rows of paths, plus the passes of the fullest stage's minimum layers."""
        rows = self.path_rows([peak.path for peak in self.ceiling_paths], base, unit)
        names = [f"fullest_stage[{index}]" for index in range(len(rows))]
        return replace(rows, names=tuple(names), lower=self.ceiling_sides(self.context, base, unit))

    def ceiling_sides(self, context: LayoutContext, base: int, unit: int) -> IntArray:
        """Return the lower sides of ``ceiling_rows`` under narrower limits."""
        paths = np.array([self._constant(peak.path) for peak in self.ceiling_paths], dtype=np.int64)
        return np.asarray((paths + self.ceiling_passes_ns(context) - base) // unit)

    def ceiling_passes_ns(self, context: LayoutContext) -> IntArray:
        """Return the minimum time that the fullest inner virtual stage adds to every ceiling path."""
        passes = np.array(
            [(peak.forwards, peak.backwards) for peak in self.ceiling_paths], dtype=np.int64
        ).reshape(-1, 2)
        return np.asarray(fullest_stage_bound(context) * (passes @ self.min_passes_ns))

    @cached_property
    def min_passes_ns(self) -> IntArray:
        """Minimum time of a forward and a backward of a layer, over kinds and recompute modes, [2]."""
        return min_passes(self.slope, self.context.problem.recompute_modes)

    def base_ns(self, paths: list[CriticalPath]) -> int:
        """Return the largest path of the empty stages, where z starts."""
        return max(map(self._constant, paths))

    def _constant(self, path: CriticalPath) -> int:
        costs = self.context.costs
        return int(path.length_ns(self.empty, int(costs.transfer_ns), int(costs.barrier_ns)))

    def path_rows(self, paths: list[CriticalPath], base: int, unit: int) -> Rows:
        """Return the rows z * unit - path >= constant - base, coefficients in units rounded down."""
        matrix = np.zeros((len(paths), self.num_counts + 1), dtype=np.int64)
        lower = np.zeros(len(paths), dtype=np.int64)
        for row, path in enumerate(paths):
            counts = np.einsum("tj,tcjk->cjk", path.counts, self.slope)
            matrix[row, :-1] = -(counts.ravel() // unit)
            matrix[row, -1] = 1
            lower[row] = (self._constant(path) - base) // unit
        names = [f"critical_path[{index}]" for index in range(len(paths))]
        return Rows.dense(names, matrix, lower)

    @cached_property
    def program(self) -> Program:
        """All rows but those of paths and ceiling cuts."""
        context, modes = self.context, self.context.problem.recompute_modes
        J, K, width = context.num_stages, self.slope.shape[3], self.num_counts
        total = np.bincount(np.array(context.problem.model.layer_kinds), minlength=K)
        upper = np.zeros((3, J, K), dtype=np.int64)
        for index, name in enumerate(COUNTS):
            upper[index] = total if name == "layers" or name in modes else 0
        max_layers = np.array(context.layer_bounds, dtype=np.int64)[:, 1]
        upper = np.minimum(upper, max_layers[None, :, None])
        columns = np.concatenate([upper.ravel(), [MOST_UNITS], total])
        names = [f"{name}[{j},{k}]" for name in COUNTS for j in range(J) for k in range(K)]
        objective = np.zeros(len(columns), dtype=np.int64)
        objective[width] = 1
        objective[width + 1 :] = UNPLACED_PRICE
        rows = [
            self._placed(total),
            self._recompute_rows(),
            *self._layers(),
            self._memory(),
            *self._host(),
            self._recomputed(),
            *self._blocks(),
        ]
        return Program(
            "compact",
            (*names, "z", *(f"unplaced[{k}]" for k in range(K))),
            np.zeros(len(columns), dtype=np.int64),
            columns,
            np.zeros(len(columns), dtype=np.bool_),
            Rows.concatenate([part for part in rows if len(part)]),
            objective,
        )

    def limits(self, context: LayoutContext) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of the rows that depend on the limits of ``context``."""
        _, J, K = self.slope.shape[1:]
        (held_lower, held_upper), (order_lower, order_upper) = held_sides(context), order_sides(context)
        lower = np.concatenate([held_lower, order_lower])
        upper = np.concatenate([held_upper, order_upper])
        return K + J * K + np.arange(len(lower)), lower, upper

    def narrow(self, relaxation: Relaxation, context: LayoutContext) -> None:
        """Narrow the program's rows in a relaxation to the limits of ``context``."""
        relaxation.set_sides(*self.limits(context))

    def path_limits(
        self, context: LayoutContext, paths: Sequence[CriticalPath], base: int, unit: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of ``ceiling_rows``, which follow the program's rows, and of
        ``path_rows`` after them."""
        constants = np.array([self._constant(path) for path in paths], dtype=np.int64)
        lower = np.concatenate([self.ceiling_sides(context, base, unit), (constants - base) // unit])
        return self.program.num_rows + np.arange(len(lower)), lower, np.full(len(lower), INFINITY)

    def _placed(self, total: IntArray) -> Rows:
        """kinds_are_placed: sum_j n_jk + unplaced_k = N_k."""
        _, J, K = self.slope.shape[1:]
        matrix = np.zeros((K, self.num_counts + 1 + K), dtype=np.int64)
        for k in range(K):
            matrix[k, k : J * K : K] = 1
            matrix[k, self.num_counts + 1 + k] = 1
        return Rows.dense([f"kinds_are_placed[{k}]" for k in range(K)], matrix, total, total)

    def _recompute_rows(self) -> Rows:
        """recompute_is_held: f_jk + s_jk - n_jk <= 0, = 0 where every layer must be recomputed."""
        size = self.num_counts // 3
        eye = np.eye(size, dtype=np.int64)
        lower = MINUS_INFINITY if "none" in self.context.problem.recompute_modes else 0
        names = [f"recompute_is_held[{row}]" for row in range(size)]
        return Rows.dense(names, np.hstack([-eye, eye, eye]), lower, 0)

    def _layers(self) -> list[Rows]:
        """Return the rows of ``limits``, with their sides."""
        _, J, K = self.slope.shape[1:]
        kinds = np.zeros((J, K, self.num_counts + 1 + K), dtype=np.int64)
        kinds[:, :, : J * K] = np.eye(J * K, dtype=np.int64).reshape(J, K, J * K)
        unplaced = np.zeros((K, self.num_counts + 1 + K), dtype=np.int64)
        unplaced[:, self.num_counts + 1 :] = np.eye(K, dtype=np.int64)
        held = held_rows(self.context, kinds.sum(axis=1), unplaced.sum(axis=0))
        rows = Rows.concatenate([*held, *order_rows(kinds, unplaced)])
        _, lower, upper = self.limits(self.context)
        return [replace(rows, lower=lower, upper=upper), *self._of_kinds(kinds)]

    def _of_kinds(self, kinds: IntArray) -> list[Rows]:
        """rank_holds_kind (interleaved): layers of each kind that a plan at or below the cutoff can hold;
        ``kinds`` [J, K, columns]."""
        if self.context.layout.vpp == 1:
            return []
        matrix = kinds[self.context.stage_grid].sum(axis=0).swapaxes(0, 1)
        names = [f"rank_holds_kind[{rank},{kind}]" for kind, rank in np.ndindex(matrix.shape[:2])]
        max_held = np.maximum(max_layers_on_ranks(self.context, self.cutoff_ns), 0).reshape(-1)
        return [Rows.dense(names, matrix.reshape(len(names), -1), MINUS_INFINITY, max_held)]

    def _memory(self) -> Rows:
        """rank_fits: bytes in units, coefficients rounded down (dropped bytes away from zero): a relaxation.

        Bytes that wait for weight gradients count like states, whatever is recomputed.
        """
        context = self.context
        unit = max(1, context.capacity_bytes // MEMORY_UNITS)
        v, J = context.layout.vpp, context.num_stages
        flat = [(rank, running, live) for rank, rows in enumerate(context.profiles) for running, live in rows]
        matrix = np.zeros((len(flat), *self.slope.shape[1:]), dtype=np.int64)
        capacity = np.zeros(len(flat), dtype=np.int64)
        for row, (rank, running, live) in enumerate(flat):
            costs = context.costs.of_rank(rank)
            states = costs.state_bytes.sum(axis=0)
            stages = list(context.layout.rank_stages[rank])
            count = np.array(live[:v], dtype=np.int64)[:, None]
            waiting = np.array(live[v:] or (0,) * v, dtype=np.int64)[:, None]
            coefficients = np.zeros((3, v, len(context.problem.model.kinds)), dtype=np.int64)
            coefficients[0] = (states[:-2] + count * costs.kept_bytes + waiting * costs.deferred_bytes) // unit
            # The running stage replays one layer: with f + s of at most n layers recomputed, the largest replay
            # is at least their mean, (f dropped_full + s dropped_selective) / n.
            min_layers, max_layers = context.layer_bounds[stages[running]]
            max_layers = max(1, max_layers)
            replay = np.zeros_like(count)
            replay[running] = 1
            for mode, dropped in ((1, costs.dropped_full_bytes), (2, costs.dropped_selective_bytes)):
                coefficients[mode] = (-count * dropped + replay * (dropped // max_layers)) // unit
            matrix[row][:, stages] = coefficients
            fixed, last = int(costs.buffer_bytes), stages[running] == J - 1
            if rank == 0:
                fixed += int(states[EMBEDDING]) + live[0] * int(costs.embedding_kept_bytes)
            if stages[-1] == J - 1:
                fixed += int(states[HEAD]) + live[v - 1] * int(costs.head_kept_bytes)
                fixed += int(waiting[-1, 0]) * int(costs.head_deferred_bytes)
            workspace = int(costs.workspace_bytes.min()) if min_layers else 0
            workspace = max(workspace, int(costs.head_workspace_bytes) * last)
            capacity[row] = (context.capacity_of(rank) - fixed - workspace) // unit
        names = [f"rank_fits[{rank},{number}]" for number, (rank, _, _) in enumerate(flat)]
        return Rows.dense(names, matrix.reshape(len(flat), -1), MINUS_INFINITY, capacity)

    def _host(self) -> list[Rows]:
        """rank_fits_on_host: bytes on the host, rounded like those of the device."""
        context = self.context
        if not context.costs.offloads:
            return []
        unit = max(1, host_capacity_bytes(context.problem) // MEMORY_UNITS)
        flat = [(rank, live) for rank, rows in enumerate(context.profiles) for live in {live for _, live in rows}]
        matrix = np.zeros((len(flat), *self.slope.shape[1:]), dtype=np.int64)
        capacity = np.zeros(len(flat), dtype=np.int64)
        for row, (rank, live) in enumerate(flat):
            costs = context.costs.of_rank(rank)
            kept = costs.host_kept_bytes
            count = np.array(live, dtype=np.int64)[:, None]
            stages = list(context.layout.rank_stages[rank])
            matrix[row, 0, stages] = (costs.host_state_bytes[:-2] + count * kept[0]) // unit
            # (layers, full, selective), of which the last two keep less.
            matrix[row, 1, stages] = (count * (kept[2] - kept[0])) // unit
            matrix[row, 2, stages] = (count * (kept[1] - kept[0])) // unit
            ends = int(costs.host_state_bytes[EMBEDDING]) * (rank == 0)
            ends += int(costs.host_state_bytes[HEAD]) * (rank == context.layout.stage_ranks[-1])
            capacity[row] = (context.host_capacity_of(rank) - ends) // unit
        names = [f"rank_fits_on_host[{rank},{number}]" for number, (rank, _) in enumerate(flat)]
        return [Rows.dense(names, matrix.reshape(len(flat), -1), MINUS_INFINITY, capacity)]

    def _recomputed(self) -> Rows:
        """rank_recomputes_enough (fixed layers): a rank's recomputation is at least the minimum that fits.

        Coefficients and side are in units, rounded up: all counts are integers in a plan.
        """
        context, P = self.context, self.context.layout.pp
        if not context.min_backward_ns:
            return Rows.dense([], np.zeros((0, self.num_counts), dtype=np.int64), MINUS_INFINITY, INFINITY)
        matrix = np.zeros((P, *self.slope.shape[1:]), dtype=np.int64)
        lower = np.zeros(P, dtype=np.int64)
        for rank, min_backward_ns in enumerate(context.min_backward_ns):
            stages = list(context.layout.rank_stages[rank])
            backward = self.slope[Term.BACKWARD][:, stages]
            unit = max(1, int(backward.max()) // FLOOR_UNITS)
            matrix[rank][:, stages] = -(-backward // unit)
            lower[rank] = -(-(min_backward_ns - int(self.empty[Term.BACKWARD, stages].sum())) // unit)
        return Rows.dense([f"rank_recomputes_enough[{rank}]" for rank in range(P)], matrix.reshape(P, -1), lower)

    def _blocks(self) -> list[Rows]:
        """stage_recomputes_block: the first min(n, n_j) of n_j <= max_j layers are recomputed, which is at least
        the chord between zero and max_j layers."""
        block = self.context.first_full
        if block is None:
            return []
        _, J, K = self.slope.shape[1:]
        at_least = np.zeros((J, 3, J, K), dtype=np.int64)
        at_most = np.zeros_like(at_least)
        for j in range(J):
            max_layers = max(1, self.context.max_layers(j))
            at_least[j, 1, j], at_least[j, 0, j] = max_layers, -min(block, max_layers)
            at_most[j, 1, j] = 1
        stages = range(J)
        return [
            Rows.dense([f"stage_recomputes_block[{j}]" for j in stages], at_least.reshape(J, -1), 0, INFINITY),
            Rows.dense(
                [f"stage_recomputes_no_more[{j}]" for j in stages], at_most.reshape(J, -1), MINUS_INFINITY, block
            ),
        ]

    def item_prices(self, program: Program, duals: FloatArray) -> tuple[float, FloatArray]:
        """Return (bound, prices [3, J, K]) in units: every plan of the layout has z >= bound + sum prices *
        counts.

        Any duals of the right signs are valid: z >= y b + (c - A' y) x. Negative prices enter the bound at their
        worst (all layers). Sums are of doubles of at most 1e7 with 1e-15 relative error, so a margin of
        ``PRICE_MARGIN`` units covers their rounding.
        """
        rows = program.rows
        y = np.where(rows.lower == MINUS_INFINITY, np.minimum(duals, 0.0), duals)
        y = np.where(rows.upper == INFINITY, np.maximum(y, 0.0), y)
        side = np.where(y > 0, rows.lower, rows.upper).astype(np.float64)
        reduced = program.objective.astype(np.float64)
        np.subtract.at(reduced, rows.columns, rows.coefficients * y[rows.entry_rows()])
        bound = float(np.sum(np.where(y != 0.0, y * side, 0.0)))
        bound += float(np.sum(np.minimum(reduced, 0.0) * program.upper)) - PRICE_MARGIN
        return bound, np.maximum(reduced[: self.num_counts], 0.0).reshape(self.slope.shape[1:])


Sides = tuple[IntArray, IntArray]


def held_rows(context: LayoutContext, layers: IntArray, unplaced: IntArray) -> list[Rows]:
    """Return rows of stages and ranks from ``layers`` [J, columns] of every virtual stage and ``unplaced``
    [columns]."""
    parts = [("stage", layers)]
    if context.layout.vpp > 1:
        parts.append(("rank", layers[context.stage_grid].sum(axis=0)))
    rows = []
    for name, matrix in parts:
        count = range(len(matrix))
        rows.append(Rows.dense([f"{name}_holds_layers[{n}]" for n in count], matrix, MINUS_INFINITY))
        rows.append(Rows.dense([f"{name}_holds_enough[{n}]" for n in count], matrix + unplaced, MINUS_INFINITY))
    return rows


def held_sides(context: LayoutContext) -> Sides:
    """Return lower and upper sides of ``held_rows``."""
    lower, upper = [], []
    for bounds in (context.layer_bounds, context.rank_bounds if context.layout.vpp > 1 else ()):
        low, high = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        lower += [np.full(len(high), MINUS_INFINITY), low]
        upper += [high, np.full(len(low), INFINITY)]
    return np.concatenate(lower), np.concatenate(upper)


def order_rows(kinds: IntArray, unplaced: IntArray) -> list[Rows]:
    """Return rows on the order of kinds from ``kinds`` [J, K, columns] of every virtual stage and ``unplaced`` [K,
    columns]."""
    J, K, width = kinds.shape
    if K == 1:
        return []
    names = [f"{name}[{j},{k}]" for name in ("kinds_begin", "kinds_end") for j, k in np.ndindex(J, K)]
    matrix = np.stack([kinds.cumsum(axis=0), kinds[::-1].cumsum(axis=0)[::-1]]) + unplaced
    return [Rows.dense(names, matrix.reshape(2 * J * K, width), MINUS_INFINITY)]


def order_sides(context: LayoutContext) -> Sides:
    """Return lower and upper sides of ``order_rows``."""
    model = context.problem.model
    K = len(model.kinds)
    if K == 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    is_kind = np.array(model.layer_kinds)[:, None] == np.arange(K)
    before = np.concatenate([np.zeros((1, K), dtype=np.int64), is_kind.cumsum(axis=0)])
    first, last = layers_up_to(context.layer_bounds, model.num_layers)
    lower = np.concatenate([before[first], before[-1] - before[model.num_layers - last]]).reshape(-1)
    return lower, np.full(len(lower), INFINITY)
