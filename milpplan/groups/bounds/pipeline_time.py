"""The exact time of a 1F1B pipeline whose micro-batches differ in length.

Stage p of P runs min(P - p - 1, v) forwards first, then a forward and a backward in turn. So with F[p, m] and
B[p, m] the ends of micro-batch m's work on stage p, f_m and b_m its durations and l the transfer,

    F[p, m] = f_m + max(F[p-1, m] + l, previous)     previous = F[p, m-1] while m < P - p, else B[p, m-P+p]
    B[p, m] = b_m + max(B[p+1, m] + l, previous)     previous = F[p, m+P-p-1] if that exists, else B[p, m-1]

and the time is B[0, v-1]. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021),
PipeDream-flush; the order of ``milpplan.simulation.pipeline.work_order`` (tested against it).
"""

from __future__ import annotations

import numpy as np

from milpplan.groups.strategies import Int64Array, Pipeline

# A time before the start, so that work that depends on it does not wait.
_NEVER = -(2**62)


def pipeline_times_ns(pipeline: Pipeline, units: Int64Array) -> Int64Array:
    """Compute the times of pipelines with the micro-batch loads ``units`` [..., v], empty micro-batch included.

    All pipelines of the leading dimensions are swept together; without micro-batches the time is 0.
    """
    loads = np.asarray(units, np.int64)
    num_stages, num_micro_batches = pipeline.num_stages, loads.shape[-1]
    if num_micro_batches == 0:
        return np.zeros(loads.shape[:-1], np.int64)
    if num_stages == 1:
        return np.asarray(loads.sum(axis=-1) * pipeline.parts)
    forward, backward = loads * pipeline.forward_parts, loads * pipeline.backward_parts
    # ends[p] is the end of the last work item of stage p; kept forwards [p] and backwards [p] of the last turn.
    shape = loads.shape[:-1]
    ends = [np.zeros(shape, np.int64) for _ in range(num_stages)]
    backward_ends: list[Int64Array] = [np.full(shape, _NEVER)] * (num_stages + 1)
    transfer_ns = pipeline.transfer_ns
    for turn in range(num_micro_batches + num_stages):
        arrival = np.full(shape, _NEVER)
        for stage in range(num_stages):
            backward_of = turn - num_stages + stage
            if 0 <= backward_of < num_micro_batches:
                # The backward of ``done`` on the next stage ended in the turn before.
                start = np.maximum(ends[stage], backward_ends[stage + 1] + transfer_ns)
                ends[stage] = start + backward[..., backward_of]
                backward_ends[stage] = ends[stage]
            if turn < num_micro_batches:
                ends[stage] = np.maximum(ends[stage], arrival + transfer_ns) + forward[..., turn]
                arrival = ends[stage]
    return ends[0]
