"""The time of a training step: a longest path through a fixed graph, in whole nanoseconds.

A step gathers parameters, runs the forwards and backwards of a schedule (``schedule.py``), reduces gradients,
meets at a barrier (the global gradient norm) and updates the parameters. The schedule fixes the graph; only
durations vary. So the step time is a maximum of path sums. Each path sum

    sum over (term, j) of counts[term, j] * durations[term, j] + num_transfers * transfer_ns + barrier_ns

is a lower bound of the step time for ALL durations with the same structure and overlap switches, and equal to the
step time for the durations that the path was found with (``critical_path``).

Durations are non-negative integers, ``durations`` [..., Term, J] with rows named by ``Term``. Leading dimensions
are a batch of plans; a single sweep over the levels of the graph evaluates the whole batch.

 - Gather: chunks 0, 1, ... of a rank in turn from time 0. Without overlap the rank waits for all gathers. With
   ``overlap_param_gather`` buckets arrive while layers run: the first forward on j starts no sooner than FIRST_j
   after the gather of the previous chunk, and ends no sooner than LAST_j after its own gather.
 - Reduce: without overlap, all reductions of a rank follow its last work item. With ``overlap_grad_reduce`` they
   run on a stream of the rank, chunk v - 1 first. The reduction of j starts no sooner than LEAD_j after the START
   of the last item on j that adds to its gradients (a backward, or a weight gradient where the backward is split),
   and the rank is not done before the END of that item + TRAIL_j.
 - Barrier of all ranks, ``barrier_ns``; then each rank runs OPTIMIZER for its chunks.

Source: the order of work is that of ``schedule.py``; overlap is Megatron-LM's ``overlap_grad_reduce`` and
``overlap_param_gather`` (core/distributed) with one communication stream per rank.

**Critical paths** are the durations that add up to a step time. The critical path of a plan bounds the step time
of every plan with the same structure and overlap switches from below. Therefore it is a row of the integer
program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsInt

import numpy as np
import numpy.typing as npt

from milpplan.problem import Layout
from milpplan.simulation.layers import Term
from milpplan.simulation.pipeline.work_orders import Int64Array, Structure, structure

__all__ = [
    "StepGraph",
    "Structure",
    "Sweep",
    "Term",
    "Timeline",
    "first_starts",
    "simulate_times",
    "step_time_ns",
    "structure",
    "sweeps",
]

IntegerArray = npt.NDArray[np.integer]

_MAX_BATCH_NODES = 2**22
"""Maximum number of work items times plans in a sweep: two int64 arrays of 32 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """Graph of a layout's step. All plans of the layout share it; only their durations differ."""

    structure: Structure
    transfer_ns: int = 0
    """Transfer of activations, or of their gradients, between neighbouring stages."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    barrier_ns: int = 0
    """Norm of the gradients over all ranks."""

    @staticmethod
    def of(layout: Layout, transfer_ns: SupportsInt, barrier_ns: SupportsInt) -> StepGraph:
        """Build the graph of a layout.

        Raises:
            ValueError: the layout's schedule does not exist for its degrees.
        """
        return StepGraph(
            structure(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp),
            int(transfer_ns),
            layout.overlap_grad_reduce,
            layout.overlap_param_gather,
            int(barrier_ns),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Event times of a step, in nanoseconds from its start.

    Work items are [J, m]; weight gradients are [J, 0] where the backwards hold them. Gathers and reductions are
    [J] and start at their end minus their duration. Of each rank, [P]: ``gradients_ready_ns`` (before the
    barrier), ``busy_ns`` (sum of all work items) and ``finish_ns`` (after the optimizer).
    """

    forward_start_ns: Int64Array
    forward_end_ns: Int64Array
    backward_start_ns: Int64Array
    backward_end_ns: Int64Array
    weight_start_ns: Int64Array
    weight_end_ns: Int64Array
    gather_end_ns: Int64Array
    reduce_end_ns: Int64Array
    gradients_ready_ns: Int64Array
    optimizer_start_ns: int
    busy_ns: Int64Array
    finish_ns: Int64Array
    step_time_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Longest paths of a batch of B plans: the ends of all nodes and the tail of the step, in nanoseconds."""

    durations: Int64Array
    """[Term, v, P, B], so that a chunk of all ranks is a slice."""
    node_durations: Int64Array
    """[N, B]."""
    end: Int64Array
    """[N + P + 1, B] end of every node."""
    gather_end: Int64Array
    """[v, P, B]."""
    reduce_end: Int64Array
    """[v, P, B]."""
    ready: Int64Array
    """[P, B] time at which all gradients of a rank are reduced."""
    optimizer: Int64Array
    """[P, B] duration of a rank's update."""
    crossing: Int64Array | None = None
    """[N, B] time beyond ``StepGraph.transfer_ns`` of the transfer that each node waits for; None: all 0."""

    def step_time(self, barrier_ns: int) -> Int64Array:
        """Add the slowest rank's gradients, the barrier and the slowest update; shape [B]."""
        return np.asarray(self.ready.max(axis=0) + barrier_ns + self.optimizer.max(axis=0))


def _sweep(graph: StepGraph, durations: Int64Array) -> Sweep:
    """Find the longest path to the end of every node for ``durations`` [B, Term, J], level by level."""
    structure = graph.structure
    num_nodes, num_stages, vpp = structure.num_nodes, structure.num_stages, structure.vpp
    # A single plan drops the batch axis inside the loop: one-dimensional takes are faster.
    batch = (len(durations),) if len(durations) != 1 else ()
    by_term = np.ascontiguousarray(durations.reshape(len(durations), -1).T)
    node_durations = by_term.reshape(-1, *batch).take(structure.duration_index, axis=0)
    by_stage = by_term.reshape(len(Term), structure.num_virtual_stages, -1)
    if not structure.in_order:
        by_stage = by_stage[:, structure.chunk_stages.reshape(-1)]
    matrix = by_stage.reshape(len(Term), vpp, num_stages, -1)
    gather_end = np.cumsum(matrix[Term.GATHER], axis=0)

    # A node holds its earliest start until its level turns it into its end.
    end = np.zeros((num_nodes + num_stages + 1, *batch), dtype=np.int64)
    if graph.overlap_param_gather:
        first = structure.forward_node[structure.chunk_stages.reshape(-1), 0]
        end[first] = np.maximum(*first_starts(matrix)).reshape(-1, *batch)
    else:
        end[num_nodes:-1] = gather_end[-1].reshape(-1, *batch)
    # "No predecessor" ends a transfer before time 0, so that a transfer from it delays no node.
    end[-1] = -graph.transfer_ns

    crossing = _crossing(structure, by_term.reshape(len(Term), -1, *batch)[Term.CROSSING])
    by_rank = structure.rank_predecessor.astype(np.intp)
    by_transfer = structure.transfer_predecessor.astype(np.intp)
    offsets = structure.level_offsets
    for low, high in pairwise(offsets):
        arrival = end.take(by_transfer[low:high], axis=0)
        arrival += graph.transfer_ns
        if crossing is not None:
            arrival += crossing[low:high]
        level = end[low:high]
        np.maximum(level, arrival, out=level)
        np.maximum(level, end.take(by_rank[low:high], axis=0), out=level)
        level += node_durations[low:high]

    end = end.reshape(len(end), -1)
    node_durations = node_durations.reshape(num_nodes, -1)
    reduce_end, ready = _reduce(graph, matrix, node_durations, end)
    optimizer = matrix[Term.OPTIMIZER].sum(axis=0)
    if crossing is not None:
        crossing = crossing.reshape(num_nodes, -1)
    return Sweep(matrix, node_durations, end, gather_end, reduce_end, ready, optimizer, crossing)


def borders(structure: Structure) -> Int64Array:
    """Find the border j, j + 1 that the transfer to each node passes: j [N], or -1 without a transfer."""
    term, stage = np.divmod(structure.duration_index.astype(np.int64), structure.num_virtual_stages)
    waits = structure.transfer_predecessor < structure.num_nodes
    # A pair's backward waits for a transfer between the same two ranks.
    forward = (term == Term.FORWARD) | (term == Term.PAIRED_FORWARD)
    return np.where(waits, np.where(forward, stage - 1, stage), -1)


def _crossing(structure: Structure, by_stage: Int64Array) -> Int64Array | None:
    """Compute ``Sweep.crossing`` from the row CROSSING, [J, ...]."""
    if not by_stage.any():
        return None
    border = borders(structure)
    crossing = by_stage.take(border, axis=0)
    crossing[border < 0] = 0
    return crossing


def first_starts(matrix: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Find the earliest starts of the first forwards when gathers overlap.

    Returns:
        Two bounds [v, P, B]: the first bucket is there, and the forward ends LAST after the last bucket. A forward
        that stalls inside counts as a later start.
    """
    gather_end = np.cumsum(matrix[Term.GATHER], axis=0)
    first = gather_end - matrix[Term.GATHER] + matrix[Term.FIRST]
    return first, gather_end + matrix[Term.LAST] - matrix[Term.FORWARD]


def _reduce(
    graph: StepGraph, matrix: Int64Array, node_durations: Int64Array, end: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Find the ends of the gradient reductions [v, P, B] and the times of ready gradients [P, B]."""
    structure = graph.structure
    reduce_ns = matrix[Term.REDUCE]
    if not graph.overlap_grad_reduce:
        after_work = np.cumsum(reduce_ns[::-1], axis=0)[::-1]
        reduce_end = end[structure.last_node] + after_work
        return reduce_end, reduce_end[0]
    last = structure.release_node
    last_end = end[last]
    return overlapped_reductions(matrix, last_end - node_durations[last], last_end)


def overlapped_reductions(
    matrix: Int64Array, last_start: Int64Array, last_end: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Find the ends of gradient reductions that overlap with the backwards.

    Args:
        matrix: durations [Term, v, P, B].
        last_start, last_end: [v, P, B] of the last item of every virtual stage that adds to its gradients.

    Returns:
        Ends of the reductions [v, P, B], and the times at which each rank's gradients are ready [P, B].
    """
    reduce_ns = matrix[Term.REDUCE]
    reduce_end = last_start + matrix[Term.LEAD] + reduce_ns
    for chunk in range(len(reduce_end) - 2, -1, -1):
        np.maximum(reduce_end[chunk], reduce_end[chunk + 1] + reduce_ns[chunk], out=reduce_end[chunk])
    ready = np.maximum(reduce_end, last_end + matrix[Term.TRAIL]).max(axis=0)
    return reduce_end, ready


def checked(graph: StepGraph, durations: IntegerArray) -> Int64Array:
    """Flatten ``durations`` [..., Term, J] to int64 [B, Term, J].

    Raises:
        ValueError: wrong shape or type, or negative durations.
    """
    shape = (len(Term), graph.structure.num_virtual_stages)
    if durations.shape[-2:] != shape or not np.issubdtype(durations.dtype, np.integer):
        raise ValueError(
            f"durations must be integers of shape [..., {shape[0]}, {shape[1]}], "
            f"got {durations.dtype} {list(durations.shape)}"
        )
    shortest_ns = min(graph.transfer_ns, durations.min(initial=0))
    if shortest_ns < 0:
        raise ValueError(f"durations and transfers must not be negative, got {shortest_ns} ns")
    return durations.astype(np.int64, copy=False).reshape(-1, *shape)


def sweeps(graph: StepGraph, durations: IntegerArray) -> Iterator[Sweep]:
    """Sweep a batch in parts of bounded memory, in order."""
    plans = checked(graph, durations)
    part = max(1, _MAX_BATCH_NODES // graph.structure.num_nodes)
    for first in range(0, len(plans), part):
        yield _sweep(graph, plans[first : first + part])


def step_time_ns(graph: StepGraph, durations: IntegerArray) -> Int64Array:
    """Compute the exact step times of a batch of plans: ``durations`` [..., Term, J] gives shape [...]."""
    times = [sweep.step_time(graph.barrier_ns) for sweep in sweeps(graph, durations)]
    flat = np.concatenate(times) if times else np.empty(0, dtype=np.int64)
    return flat.reshape(durations.shape[:-2])


def simulate_times(graph: StepGraph, durations: IntegerArray) -> Timeline:
    """Compute all event times of one plan, ``durations`` [Term, J]."""
    structure = graph.structure
    plan = checked(graph, durations)
    if len(plan) != 1:
        raise ValueError(f"a timeline is of one plan, got {len(plan)}")
    sweep = _sweep(graph, plan)
    forward_end = sweep.end[structure.forward_node, 0]
    backward_end = sweep.end[structure.backward_node, 0]
    weight_end = sweep.end[structure.weight_node, 0]
    node_durations = sweep.node_durations[:, 0]
    forward, backward, weight = (
        node_durations[nodes] for nodes in (structure.forward_node, structure.backward_node, structure.weight_node)
    )
    busy_ns = sum(part.sum(axis=1) for part in (forward, backward, weight))
    optimizer_start = int(sweep.ready.max()) + graph.barrier_ns
    return Timeline(
        forward_start_ns=forward_end - forward,
        forward_end_ns=forward_end,
        backward_start_ns=backward_end - backward,
        backward_end_ns=backward_end,
        weight_start_ns=weight_end - weight,
        weight_end_ns=weight_end,
        gather_end_ns=structure.swapped(sweep.gather_end.reshape(-1)),
        reduce_end_ns=structure.swapped(sweep.reduce_end.reshape(-1)),
        gradients_ready_ns=sweep.ready[:, 0],
        optimizer_start_ns=optimizer_start,
        busy_ns=np.asarray(busy_ns)[structure.chunk_stages].sum(axis=0),
        finish_ns=optimizer_start + sweep.optimizer[:, 0],
        step_time_ns=int(sweep.step_time(graph.barrier_ns)[0]),
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
