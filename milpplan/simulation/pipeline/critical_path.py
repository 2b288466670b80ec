"""Critical paths of the step graph: the durations that add up to a step time.

The critical path of a plan bounds the step time of every plan with the same structure and overlap switches from
below. Therefore it is a row of the integer program.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.simulation.pipeline.schedule import Int64Array, Structure
from milpplan.simulation.pipeline.step_graph import (
    IntegerArray,
    StepGraph,
    Sweep,
    Term,
    borders,
    first_starts,
    sweeps,
)


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """Path through the step graph, as counts of the durations that it passes."""

    counts: Int64Array
    """[Term, J] how often the path passes each duration."""
    num_transfers: int
    barrier_count: int = 1

    def length_ns(self, durations: IntegerArray, transfer_ns: int, barrier_ns: int) -> Int64Array:
        """Sum the path for ``durations`` [..., Term, J]: a lower bound of their step times, shape [...]."""
        fixed_ns = self.num_transfers * transfer_ns + self.barrier_count * barrier_ns
        return np.asarray((self.counts * durations).sum(axis=(-2, -1)) + fixed_ns, dtype=np.int64)


def critical_paths(graph: StepGraph, durations: IntegerArray) -> tuple[CriticalPath, ...]:
    """Find a longest path of every plan of a batch.

    Among equally long predecessors a path prefers the predecessor on its own rank.

    Args:
        graph: the step graph that all plans share.
        durations: [..., Term, J] nanoseconds.

    Returns:
        A path for each plan of the flattened batch; its sum is asserted to be the step time.
    """
    paths: list[CriticalPath] = []
    for sweep in sweeps(graph, durations):
        step_times = sweep.step_time(graph.barrier_ns)
        for plan, predecessors in enumerate(_binding_predecessors(graph, sweep).T):
            path = _backtrack(graph, sweep, plan, predecessors)
            matrix = graph.structure.swapped(sweep.durations[..., plan].reshape(path.counts.shape))
            length_ns = path.length_ns(matrix, graph.transfer_ns, graph.barrier_ns)
            assert length_ns == step_times[plan], "path is not the step"
            paths.append(path)
    return tuple(paths)


def critical_path(graph: StepGraph, durations: IntegerArray) -> CriticalPath:
    """Find a longest path of one plan, ``durations`` [Term, J] (see ``critical_paths``)."""
    (path,) = critical_paths(graph, durations)
    return path


def _binding_predecessors(graph: StepGraph, sweep: Sweep) -> Int64Array:
    """Find the predecessor that each node's start waits for, [N, B].

    Item p of the same rank is p, a transfer from item p is -2 - p, a gather is -1.
    """
    structure = graph.structure
    start = sweep.end[: structure.num_nodes] - sweep.node_durations
    by_rank, by_transfer = structure.rank_predecessor[:, None], structure.transfer_predecessor[:, None]
    on_rank = start == sweep.end.take(structure.rank_predecessor, axis=0)
    arrival = sweep.end.take(structure.transfer_predecessor, axis=0) + graph.transfer_ns
    transferred = start == (arrival if sweep.crossing is None else arrival + sweep.crossing)
    return np.where(on_rank, by_rank, np.where(transferred, -2 - by_transfer, -1)).astype(np.int64)


def _backtrack(graph: StepGraph, sweep: Sweep, plan: int, predecessors: Int64Array) -> CriticalPath:
    """Walk from the end of the slowest rank back to time 0 along the binding predecessors."""
    structure = graph.structure
    num_stages, num_nodes = structure.num_stages, structure.num_nodes
    counts = np.zeros((len(Term), structure.vpp, num_stages), dtype=np.int64)
    counts[Term.OPTIMIZER, :, sweep.optimizer[:, plan].argmax()] = 1
    rank = int(sweep.ready[:, plan].argmax())
    if graph.overlap_grad_reduce:
        node, skip_node = _backtrack_stream(structure, sweep, plan, rank, counts)
    else:
        counts[Term.REDUCE, :, rank] = 1
        node, skip_node = int(structure.last_node[rank]), False

    predecessor_of = predecessors.tolist()
    visited: list[int] = []
    receivers: list[int] = []
    source = node
    while 0 <= source < num_nodes:
        visited.append(source)
        source = predecessor_of[source]
        if source < -1:
            source = -2 - source
            receivers.append(visited[-1])
    if source == -1:
        _count_gather(structure, sweep, plan, visited[-1], counts)
    elif not graph.overlap_param_gather:
        counts[Term.GATHER, :, source - num_nodes] = 1
    by_stage = structure.swapped(counts.reshape(len(Term), -1))
    durations_passed = structure.duration_index[visited[skip_node:]]
    by_stage += np.bincount(durations_passed, minlength=by_stage.size).reshape(by_stage.shape)
    if sweep.crossing is not None and sweep.crossing[:, plan].any():
        by_stage[Term.CROSSING] += np.bincount(
            borders(structure)[receivers], minlength=structure.num_virtual_stages
        )
    return CriticalPath(by_stage, len(receivers))


def _backtrack_stream(
    structure: Structure, sweep: Sweep, plan: int, rank: int, counts: Int64Array
) -> tuple[int, bool]:
    """Count the reductions that a rank's gradients wait for on its communication stream.

    Returns:
        The work item that the reductions wait for, and True if they wait for its start only.
    """
    last = structure.release_node[:, rank]
    durations = sweep.durations[:, :, rank, plan]
    last_end = sweep.end[last, plan]
    reduce_end = sweep.reduce_end[:, rank, plan]
    ready = sweep.ready[rank, plan]
    by_trail = np.flatnonzero(last_end + durations[Term.TRAIL] == ready)
    if len(by_trail):
        counts[Term.TRAIL, by_trail[0], rank] = 1
        return int(last[by_trail[0]]), False
    chunk = int(np.flatnonzero(reduce_end == ready)[0])
    start = last_end - durations[structure.release_term]
    released = start + durations[Term.LEAD] + durations[Term.REDUCE]
    counts[Term.REDUCE, chunk, rank] = 1
    while reduce_end[chunk] != released[chunk]:
        chunk += 1
        counts[Term.REDUCE, chunk, rank] = 1
    counts[Term.LEAD, chunk, rank] = 1
    return int(last[chunk]), True


def _count_gather(structure: Structure, sweep: Sweep, plan: int, node: int, counts: Int64Array) -> None:
    """Count the gathers that a first forward waits for: up to its first bucket, or up to its last bucket."""
    stage = int(structure.duration_index[node])
    chunk, rank = divmod(int(structure.chunk_stages.reshape(-1)[stage]), structure.num_stages)
    first, _ = first_starts(sweep.durations[..., plan : plan + 1])
    counts[Term.GATHER, :chunk, rank] = 1
    if int(first[chunk, rank, 0]) == int(sweep.end[node, plan] - sweep.node_durations[node, plan]):
        counts[Term.FIRST, chunk, rank] = 1
        return
    counts[Term.GATHER, chunk, rank] = 1
    counts[Term.LAST, chunk, rank] = 1
    counts[Term.FORWARD, chunk, rank] -= 1
