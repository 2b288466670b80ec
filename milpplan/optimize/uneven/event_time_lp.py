"""Event-time relaxation of a layout: an LP with the step graph in it, whose variables are the ends of all work
items.

    end_i >= end_h + duration_i(x) (+ transfer)                 for every item i and what it waits for, h
    end_i >= bucket(x) + duration_i(x)                          for first forwards, and what they wait for
    reduced_j, ready, updated                                   the tail of the step, likewise
    z = ready + barrier + updated

It has the bound of ``CompactRelaxation`` with all paths of the graph at once, without searching for paths: much
cheaper where the graph is small, more expensive where it is large. With free interleaved splits the chains of
``ceiling_cuts`` join the graph: down_j, the forwards of micro-batch 0 to virtual stage j, and up_j, the backwards
from it,

    end of forward r of j >= down_j + r forwards of the fullest stage
    ready >= end of backward m - 1 - q of j + q backwards of the fullest stage + up_j

for all virtual stages j of the last chunks. These rows are stronger than ``CompactRelaxation.ceiling_rows``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.layout.ceiling_cuts import fullest_stage_bound, num_inner
from milpplan.optimize.layout.compact_relaxation import CompactRelaxation
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import INFINITY, Program, Rows
from milpplan.simulation.layout_columns import FloatArray, IntArray, ascending
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, borders
from milpplan.simulation.stages import EDGES

FINENESS = 2**28
"""Units between zero and the cutoff: the duration of every item is rounded down separately."""
MOST, UNPLACED_PRICE = 4 * FINENESS, 64 * FINENESS

Waits = tuple[int | None, Iterable[tuple[Term, int]], int]
"""(earlier moment, durations (term, virtual stage) that follow it, nanoseconds)."""


@dataclass(slots=True)
class EventTimeRelaxation:
    """Event-time relaxation of one layout. ``compact`` gives the columns and all rows but those of paths. Narrower
    limits change only the sides of rows."""

    compact: CompactRelaxation
    graph: StepGraph
    unit: int = field(init=False)
    relaxation: Relaxation = field(init=False)
    iterations: int = 0
    """Simplex iterations of the last solution."""
    _moments: int = field(init=False)
    """First column of the moments: ends of all items, then of reductions, ready, updated, down, up."""
    _entries: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, column, coefficient)"""
    _sides: list[int] = field(default_factory=list)
    """Lower sides of the rows, nanoseconds."""
    _edges: list[tuple[int, Term, int]] = field(default_factory=list)
    """(row, term, end of the model) of the parts of sides that depend on whether the end holds a layer."""
    _ceilings: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, forwards, backwards) of the fullest stage in a row's side."""

    def __post_init__(self) -> None:
        compact = self.compact
        self.unit = max(1, compact.cutoff_ns // FINENESS)
        plain = compact.program
        self._moments = plain.num_variables
        structure = self.graph.structure
        count = structure.num_nodes + 3 * structure.num_virtual_stages + 2
        self._items()
        self._tail()
        self._chains()
        entries = np.array(self._entries, dtype=np.int64)
        row, column, value = entries[np.lexsort((entries[:, 1], entries[:, 0]))].T
        starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(self._sides)))])
        names = tuple(f"waits[{index}]" for index in range(len(self._sides)))
        sides = np.array(self._sides, dtype=np.int64) // self.unit
        waits = Rows(names, starts.astype(np.int64), column, value, sides, np.full(len(sides), INFINITY))
        upper = np.concatenate([plain.upper, np.full(count, MOST)])
        objective = np.concatenate([plain.objective, np.zeros(count, dtype=np.int64)])
        z = compact.num_counts
        upper[z] = MOST
        objective[z + 1 : self._moments] = UNPLACED_PRICE
        self.relaxation = Relaxation(
            Program(
                "timed",
                (*plain.variable_names, *(f"moment[{index}]" for index in range(count))),
                np.zeros(len(upper), dtype=np.int64),
                upper,
                np.zeros(len(upper), dtype=np.bool_),
                Rows.concatenate([plain.rows, waits]),
                objective,
            )
        )

    def solve(self, context: LayoutContext) -> tuple[int, FloatArray | None]:
        """Solve under the limits of ``context``.

        Returns:
            The proved bound in nanoseconds (0: none), and the layers of every virtual stage, [J].
        """
        self.relaxation.set_sides(*self.compact.limits(context))
        self.relaxation.set_sides(*self._limits(context))
        solution = self.relaxation.solve()
        if solution.status != "optimal":
            # A solver that gives up often succeeds from the point it has reached.
            solution = self.relaxation.solve()
        self.iterations = solution.iterations
        proved = self.relaxation.proved_bound(solution)
        layers = self.compact.layers(solution.values) if solution.status == "optimal" else None
        return (0 if proved is None else proved * self.unit), layers

    def _limits(self, context: LayoutContext) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of the rows whose sides depend on the limits."""
        ceilings = np.array(self._ceilings, dtype=np.int64).reshape(-1, 3)
        row, term, stage = np.array(self._edges, dtype=np.int64).reshape(-1, 3).T
        sides = np.array(self._sides, dtype=np.int64)
        sides[ceilings[:, 0]] += fullest_stage_bound(context) * (ceilings[:, 1:] @ self.compact.min_passes_ns)
        np.add.at(sides, row, (self.compact.narrowed(context).empty - self.compact.empty)[term, stage])
        rows = ascending(np.concatenate([ceilings[:, 0], row]))
        lower = sides[rows] // self.unit
        return self.compact.program.num_rows + rows, lower, np.full(len(rows), INFINITY)

    def _edge(self, row: int, term: Term, stage: int) -> None:
        """Record a row whose side depends on an end of the model."""
        if term in EDGES and stage in (0, self.graph.structure.num_virtual_stages - 1):
            self._edges.append((row, term, stage))

    def _add_waits(self, moment: int, *parts: Waits, backwards: int = 0, forwards: int = 0) -> None:
        """Add rows: a moment is no earlier than other moments plus the durations that follow them."""
        for other, durations, nanoseconds in parts:
            row, side = len(self._sides), nanoseconds
            self._entries.append((row, self._moments + moment if moment >= 0 else self.compact.num_counts, 1))
            if other is not None:
                self._entries.append((row, self._moments + other, -1))
            counts = np.zeros(self.compact.slope.shape[1:], dtype=np.int64)
            for term, stage in durations:
                counts[:, stage] += self.compact.slope[term, :, stage]
                side += int(self.compact.empty[term, stage])
                self._edge(row, term, stage)
            flat = counts.reshape(-1)
            # Rounded so that the row is weaker.
            used = np.flatnonzero(flat)
            self._entries += zip(
                [row] * len(used), used.tolist(), (-(flat[used] // self.unit)).tolist(), strict=True
            )
            self._sides.append(side)
            if forwards or backwards:
                self._ceilings.append((row, forwards, backwards))

    def _items(self) -> None:
        """Add the rows of items: each waits for its predecessor on its rank and for its input, first forwards for
        parameters."""
        graph, structure = self.graph, self.graph.structure
        J, P, N = structure.num_virtual_stages, structure.num_stages, structure.num_nodes
        border = borders(structure)
        crossing = self.compact.empty[Term.CROSSING]
        for node in range(N):
            term, stage = divmod(int(structure.duration_index[node]), J)
            duration = [(Term(term), stage)]
            rank_predecessor, sender = (
                int(structure.rank_predecessor[node]),
                int(structure.transfer_predecessor[node]),
            )
            if rank_predecessor < N:
                self._add_waits(node, (rank_predecessor, duration, 0))
            else:
                gathers = [] if graph.overlap_param_gather else self._of_rank(Term.GATHER, rank_predecessor - N)
                self._add_waits(node, (None, duration + gathers, 0))
            if sender < N:
                self._add_waits(node, (sender, duration, graph.transfer_ns + int(crossing[border[node]])))
        for index in range(J if graph.overlap_param_gather else 0):
            chunk, rank = divmod(index, P)
            stage = int(structure.placement[chunk, rank])
            earlier = [(Term.GATHER, int(other)) for other in structure.placement[:chunk, rank]]
            self._add_waits(
                int(structure.forward_node[stage, 0]),
                (None, [*earlier, (Term.FIRST, stage), (Term.FORWARD, stage)], 0),
                (None, [*earlier, (Term.GATHER, stage), (Term.LAST, stage)], 0),
            )

    def _of_rank(self, term: Term, rank: int) -> list[tuple[Term, int]]:
        """Return a duration of all chunks of a rank."""
        return [(term, int(stage)) for stage in self.graph.structure.placement[:, rank]]

    @property
    def _reduced(self) -> int:
        return self.graph.structure.num_nodes

    @property
    def _ready(self) -> int:
        return self._reduced + self.graph.structure.num_virtual_stages

    def _tail(self) -> None:
        """Add the rows of the tail: reductions after, or beside, the last backwards; the barrier; the updates."""
        graph, structure = self.graph, self.graph.structure
        ready, updated = self._ready, self._ready + 1
        for rank in range(structure.num_stages):
            self._add_waits(updated, (None, self._of_rank(Term.OPTIMIZER, rank), 0))
            if not graph.overlap_grad_reduce:
                self._add_waits(ready, (int(structure.last_node[rank]), self._of_rank(Term.REDUCE, rank), 0))
                continue
            stages = structure.placement[:, rank].tolist()
            for chunk, stage in enumerate(stages):
                last = int(structure.release_node[chunk, rank])
                self._start_reducing(self._reduced + stage, last, stage)
                if chunk + 1 < len(stages):
                    self._add_waits(
                        self._reduced + stage, (self._reduced + stages[chunk + 1], [(Term.REDUCE, stage)], 0)
                    )
                self._add_waits(ready, (self._reduced + stage, [], 0), (last, [(Term.TRAIL, stage)], 0))
        self._add_waits(-1, (ready, [], graph.barrier_ns))
        self._entries.append((len(self._sides) - 1, self._moments + updated, -1))

    def _start_reducing(self, moment: int, last: int, stage: int) -> None:
        """Add the row reduced_j >= the last item's end - its duration + LEAD + REDUCE."""
        compact, release = self.compact, self.graph.structure.release_term
        row, unit = len(self._sides), self.unit
        counts = (compact.slope[Term.LEAD] + compact.slope[Term.REDUCE] - compact.slope[release])[
            :, stage
        ].reshape(-1)
        columns = np.arange(compact.num_counts).reshape(compact.slope.shape[1:])[:, stage].reshape(-1)
        self._entries += [(row, self._moments + moment, 1), (row, self._moments + last, -1)]
        self._entries += [
            (row, column, -(value // unit))
            for column, value in zip(columns.tolist(), counts.tolist(), strict=True)
        ]
        empty = compact.empty[:, stage]
        self._edge(row, Term.LEAD, stage)
        self._sides.append(int(empty[Term.LEAD] + empty[Term.REDUCE] - empty[release]))

    def _chains(self) -> None:
        """Add the chains of the ceiling cuts: see the head of this module."""
        graph, structure, layout = self.graph, self.graph.structure, self.compact.context.layout
        J, P, m = structure.num_virtual_stages, structure.num_stages, structure.num_micro_batches
        down = self._ready + 2
        up = down + J
        crossing = self.compact.empty[Term.CROSSING]
        start = [(Term.FIRST, 0)] if graph.overlap_param_gather else self._of_rank(Term.GATHER, 0)
        end = [(Term.TRAIL, 0)] if graph.overlap_grad_reduce else self._of_rank(Term.REDUCE, 0)
        self._add_waits(down, (None, [*start, (Term.FORWARD, 0)], 0))
        self._add_waits(up, (None, end, 0))
        for stage in range(1, J):
            transfer = graph.transfer_ns + int(crossing[stage - 1])
            self._add_waits(down + stage, (down + stage - 1, [(Term.FORWARD, stage)], transfer))
            self._add_waits(up + stage, (up + stage - 1, [(Term.BACKWARD, stage - 1)], transfer))
        for stage in range(num_inner(layout), J):
            for passes in range(1, min(P, m)):
                entry = int(structure.forward_node[stage, passes])
                self._add_waits(entry, (down + stage, [], 0), forwards=passes)
                exit_ = int(structure.backward_node[stage, m - 1 - passes])
                self._add_waits(self._ready, (exit_, [], 0), backwards=passes)
                self._entries.append((len(self._sides) - 1, self._moments + up + stage, -1))
