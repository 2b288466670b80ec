"""DualPipe itself, with micro-batches from both ends, against DualPipeV on half the ranks: why it is no choice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.simulation.pipeline import step_graph as sut
from milpplan.simulation.pipeline.step_graph import StepGraph, Term
from tests.simulation import event_simulation as events

Item = tuple[str, int, str, int]
"""(kind, virtual stage, direction, micro-batch of the direction)."""


def blocks(P: int, m: int, rank: int) -> list[list[Item]]:
    """DualPipe on an even number of ranks P with m micro-batches, half of them down from rank 0, half up from rank
    P - 1. Ranks s and P - 1 - s both hold the stages s and P - 1 - s, and run the same; the stage nearer to the
    start of the model has the letters of the first chunk. Direction down passes stage j on rank j, up on rank
    P - 1 - j."""
    half = min(rank, P - 1 - rank)
    found = []
    for block in events.dualpipe_v_blocks(P // 2, m // 2, half):
        named = [(kind, stage, "down" if stage == rank else "up", i) for kind, stage, i in block]
        found.append(named)
    return found


def needs(item: Item, P: int) -> list[Item]:
    """What an item needs; from another rank where the stage is another one."""
    kind, stage, direction, i = item
    if kind == "W":
        return [("B", stage, direction, i)]
    if kind == "F":
        return [("F", stage - 1, direction, i)] if stage else []
    return [("B", stage + 1, direction, i) if stage < P - 1 else ("F", stage, direction, i)]


def step_time(P: int, m: int, durations: list[list[int]], transfer: int) -> int:
    """The last item's end, without sharding and updates."""
    todo = {rank: blocks(P, m, rank) for rank in range(P)}
    free, output = dict.fromkeys(todo, 0), dict[Item, int]()
    while any(todo.values()):
        before = len(output)
        for rank, left in todo.items():
            needed = [(item, other) for item in left[0] for other in needs(item, P)] if left else []
            needed = [(item, other) for item, other in needed if other not in left[0]]
            if not left or any(other not in output for _, other in needed):
                continue
            arrivals = [output[other] + transfer * (item[1] != other[1]) for item, other in needed]
            block = left.pop(0)
            row = events.PAIRED_ROW if len(block) == 3 else events.ROW
            end = max([free[rank], *arrivals]) + sum(durations[row[item[0]]][item[1]] for item in block)
            free[rank] = end
            output |= dict.fromkeys(block, end)
        assert len(output) > before, "deadlock"
    return max(free.values())


@settings(max_examples=60)
@given(st.integers(2, 4), st.integers(0, 4), st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 50]))
def test_dualpipe_takes_no_less_than_dualpipe_v_on_half_the_ranks(
    half: int, more: int, seed: int, transfer: int
) -> None:
    """With the same stages DualPipe on 2 P ranks and 2 m micro-batches takes as long as DualPipeV on P ranks and m
    micro-batches (twice the replicas) where transfers take no time, and no less where they do."""
    m = 2 * half + more
    durations = np.random.default_rng(seed).integers(0, 30, (len(Term), 2 * half))
    work = [Term.FORWARD, Term.BACKWARD, Term.WEIGHT, Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD]
    durations[[term for term in Term if term not in work]] = 0
    both = step_time(2 * half, 2 * m, durations.tolist(), transfer)
    one = int(sut.step_time_ns(StepGraph(sut.structure("dualpipe-v", half, m, 2), transfer), durations))
    assert both == one if transfer == 0 else both >= one


def test_dualpipe_has_the_published_bubble() -> None:
    """(PP / 2 - 1)(F&B + B - 3 W) on PP = 8 ranks with 20 micro-batches: F = 10, B = 20, W = 10, F&B = 26."""
    durations = np.zeros((len(Term), 8), dtype=np.int64)
    durations[[Term.FORWARD, Term.BACKWARD, Term.WEIGHT]] = 10
    durations[[Term.PAIRED_FORWARD, Term.PAIRED_BACKWARD]] = 8
    # The middle ranks run 10 micro-batches of both chunks, 11 of these 20 forwards in pairs.
    pairs = (10 - 2 * 4 + 3 + 1 - 1) + (10 - 4)
    work = (20 - pairs) * (10 + 20) + pairs * 26
    assert step_time(8, 20, durations.tolist(), 0) - work == (8 // 2 - 1) * (26 + 20 - 3 * 10)
