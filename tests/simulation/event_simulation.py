"""A slow, obviously correct simulation of a training step, for tests only.

Plain dictionaries, one work item at a time, written from the definition of the schedules and of the step and
sharing no code with ``milpplan.simulation``. A work item is ``(kind, virtual stage, micro-batch)`` with kind "F",
"B" or, where weight gradients run by themselves, "W"; durations are ``durations[row][j]`` with the rows named
below. A block is some items that run as one: it starts when everything is there that any of them needs, runs them
one after another, and nobody gets what one of them puts out before the last is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORWARD, BACKWARD, GATHER, REDUCE, OPTIMIZER, LEAD, TRAIL, FIRST, LAST, WEIGHT, CROSSING = range(11)
PAIRED_FORWARD, PAIRED_BACKWARD = 11, 12
ROW = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
PAIRED_ROW = {"F": PAIRED_FORWARD, "B": PAIRED_BACKWARD, "W": WEIGHT}
SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
V_SHAPED = ("zb-v", "dualpipe-v")

Item = tuple[str, int, int]
Case = tuple[str, int, int, int]


@dataclass
class Step:
    """Everything that happened in one step."""

    start: dict[Item, int] = field(default_factory=dict)
    end: dict[Item, int] = field(default_factory=dict)
    output: dict[Item, int] = field(default_factory=dict)
    gather_end: dict[int, int] = field(default_factory=dict)
    reduce_end: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)

    @property
    def step_time(self) -> int:
        """When the slowest rank has finished."""
        return max(self.finish.values())


def stages_of(case: Case) -> list[list[int]]:
    """The virtual stages of every rank, first chunk first. Under V schedules the second chunks run back from the
    last rank to the first."""
    schedule, P, _, v = case
    if schedule in V_SHAPED:
        return [[rank, P + (P - 1 - rank)] for rank in range(P)]
    return [list(range(rank, P * v, P)) for rank in range(P)]


def rank_order(schedule: str, num_stages: int, num_micro_batches: int, vpp: int, rank: int) -> list[Item]:
    """Work items of a rank in the order they run, straight from the definition of the schedule."""
    P, m, v = num_stages, num_micro_batches, vpp
    if schedule == "zb-v":
        return zb_v_order(P, m, rank)
    if schedule == "dualpipe-v":
        return [item for block in dualpipe_v_blocks(P, m, rank) for item in block]
    forwards: list[Item] = []
    backwards: list[Item] = []
    if schedule == "interleaved" and v > 1:
        for k in range(m * v):
            chunk = (k % (P * v)) // P
            micro_batch = (k // (P * v)) * P + k % P
            forwards.append(("F", chunk * P + rank, micro_batch))
            backwards.append(("B", (v - 1 - chunk) * P + rank, micro_batch))
    else:
        forwards = [("F", rank, i) for i in range(m)]
        backwards = [("B", rank, i) for i in range(m)]
    if P == 1:
        warmup = 0
    elif schedule == "gpipe":
        warmup = m
    elif schedule in ("1f1b", "zb-h1"):
        warmup = min(m, P - 1 - rank)
    else:
        warmup = min(m * v, 2 * (P - rank - 1) + (v - 1) * P)
    order = forwards[:warmup]
    waiting = forwards[warmup:]
    while waiting:
        order.append(waiting.pop(0))
        order.append(backwards.pop(0))
    order += backwards
    return with_weights(order, rank) if schedule == "zb-h1" else order


def with_weights(order: list[Item], rank: int) -> list[Item]:
    """ZB-H1: once more than ``rank`` micro-batches wait for their weight gradients, the oldest gets them."""
    found: list[Item] = []
    waiting: list[Item] = []
    for item in order:
        found.append(item)
        if item[0] == "B":
            waiting.append(("W", *item[1:]))
            if len(waiting) > rank:
                found.append(waiting.pop(0))
    return found + waiting


def zb_v_order(P: int, m: int, rank: int) -> list[Item]:
    """ZB-V, phase by phase, as a row of letters for at least 2 P - 1 micro-batches: f, b, w of the first chunk and
    F, B, W of the second one."""
    most = max(m, 2 * P - 1)
    down, up = rank, P - rank
    letters = "f" * (2 * up - 1) + "Ff" * down + "FBW" * up
    while letters.count("f") < most:
        letters += "fbwFBW"
    while letters.count("F") < most:
        letters += "bwFBW"
    letters += "bB" * down + "bw" * up
    letters += "W" * (most - letters.count("W"))
    letters += "w" * (most - letters.count("w"))
    seen = dict.fromkeys("fbwFBW", 0)
    order: list[Item] = []
    for letter in letters:
        stage = rank if letter.islower() else 2 * P - 1 - rank
        if seen[letter] < m:
            order.append((letter.upper(), stage, seen[letter]))
        seen[letter] += 1
    return order


def dualpipe_v_blocks(P: int, m: int, rank: int) -> list[list[Item]]:
    """DualPipeV, step by step, as words of letters: f, b, w of the first chunk, F, B, W of the second one; the
    letters of a word run as one. A weight gradient that comes later than its backward is a "?", whose letter is
    the oldest one that waits."""
    words = ["f"] * (2 * (P - rank - 1))
    words += ["f", "F"] * (rank + 1)
    words += ["B", "?", "F"] * (P - rank - 1)
    main = ["fBW", "Fbw"] * (m - 2 * P + rank + 1)
    if rank == P - 1:
        main[:1] = ["f", "BW"]
    words += main + ["BW", "Fbw"] * (P - rank - 1)
    whole, split = ["BW", "bw"] * (rank + 1), ["B", "b"] * (rank + 1)
    words += whole[: rank + 1] + split[rank + 1 :]
    words += ["?", "b"] * (P - rank - 1) + ["?"] * (rank + 1)
    seen = dict.fromkeys("fbwFBW", 0)
    waiting: list[str] = []
    blocks: list[list[Item]] = []
    for word in words:
        if word in ("b", "B"):
            waiting.append({"b": "w", "B": "W"}[word])
        block: list[Item] = []
        for letter in waiting.pop(0) if word == "?" else word:
            stage = rank if letter.islower() else 2 * P - 1 - rank
            block.append((letter.upper(), stage, seen[letter]))
            seen[letter] += 1
        blocks.append(block)
    assert not waiting
    assert set(seen.values()) == {m}
    return blocks


def rank_blocks(case: Case, rank: int) -> list[list[Item]]:
    """The items of a rank in its order, those together that run as one."""
    schedule, P, m, _ = case
    if schedule == "dualpipe-v":
        return dualpipe_v_blocks(P, m, rank)
    return [[item] for item in rank_order(*case, rank)]


def needs(item: Item, case: Case) -> tuple[Item | None, bool]:
    """The work item whose output an item needs, and whether it comes over the network."""
    kind, stage, micro_batch = item
    home = {own: rank for rank, held in enumerate(stages_of(case)) for own in held}
    if kind == "W":
        return ("B", stage, micro_batch), False
    if kind == "F":
        return (("F", stage - 1, micro_batch), home[stage] != home[stage - 1]) if stage > 0 else (None, False)
    if stage == max(home):
        return ("F", stage, micro_batch), False
    return ("B", stage + 1, micro_batch), home[stage] != home[stage + 1]


def border(item: Item) -> int:
    """The virtual stage before the border to the next one that an item's input passes."""
    kind, stage, _ = item
    return stage - 1 if kind == "F" else stage


def simulate(
    case: Case,
    durations: list[list[int]],
    transfer: int,
    overlap_reduce: bool,
    overlap_gather: bool,
    barrier: int,
) -> Step:
    """Run the step: again and again the next item of any rank whose needs are met."""
    schedule, P, m, v = case
    orders = {rank: rank_order(schedule, P, m, v, rank) for rank in range(P)}
    step = Step()
    free = {}
    for rank in range(P):
        clock = 0
        for stage in stages_of(case)[rank]:
            clock += durations[GATHER][stage]
            step.gather_end[stage] = clock
        free[rank] = 0 if overlap_gather else clock
    todo = {rank: rank_blocks(case, rank) for rank in range(P)}
    while any(todo.values()):
        ran = [
            rank
            for rank in range(P)
            if run_next(step, todo[rank], free, rank, case, durations, transfer, overlap_gather)
        ]
        assert ran, "deadlock"
    for rank in range(P):
        adds = "W" if schedule in SPLIT else "B"
        finish_gradients(step, orders[rank], rank, durations, overlap_reduce, adds)
    everyone = max(step.ready.values()) + barrier
    for rank in range(P):
        step.finish[rank] = everyone + sum(durations[OPTIMIZER][stage] for stage in stages_of(case)[rank])
    return step


def run_next(
    step: Step,
    todo: list[list[Item]],
    free: dict[int, int],
    rank: int,
    case: Case,
    durations: list[list[int]],
    transfer: int,
    overlap_gather: bool,
) -> bool:
    """Run the next block of a rank if what it needs is there; whether it ran."""
    if not todo:
        return False
    block = todo[0]
    start, arrives = free[rank], 0
    for item in block:
        needed, over_network = needs(item, case)
        if needed is None or needed in block:
            continue
        if needed not in step.output:
            return False
        sent = transfer + durations[CROSSING][border(item)] if over_network else 0
        start = max(start, step.output[needed] + sent)
    kind, stage, micro_batch = block[0]
    if overlap_gather and (kind, micro_batch) == ("F", 0):
        # The first bucket must be there to start; the last one arrives LAST before the earliest end.
        before = step.gather_end[stage] - durations[GATHER][stage]
        start = max(start, before + durations[FIRST][stage])
        arrives = step.gather_end[stage] + durations[LAST][stage]
    row = PAIRED_ROW if "".join(kind for kind, _, _ in block) == "FBW" else ROW
    for item in block:
        took = durations[row[item[0]]][item[1]]
        step.end[item] = start = max(start + took, arrives)
        step.start[item] = step.end[item] - took
    free[rank] = start
    step.output |= dict.fromkeys(block, start)
    todo.pop(0)
    return True


def finish_gradients(
    step: Step, order: list[Item], rank: int, durations: list[list[int]], overlap_reduce: bool, adds: str
) -> None:
    """Reduce the gradients of a rank, after its work or beside it; ``adds`` is the kind of item that adds to
    them."""
    last: dict[int, Item] = {}
    for item in order:
        if item[0] == adds:
            last.pop(item[1], None)
            last[item[1]] = item
    clock = 0 if overlap_reduce else step.end[order[-1]]
    ready = clock
    for stage, item in last.items():
        if overlap_reduce:
            clock = max(clock, step.start[item] + durations[LEAD][stage])
            ready = max(ready, step.end[item] + durations[TRAIL][stage])
        clock += durations[REDUCE][stage]
        step.reduce_end[stage] = clock
    step.ready[rank] = max(ready, clock)


def live_profiles(case: Case) -> list[set[tuple[int, tuple[int, ...]]]]:
    """Per rank the Pareto-maximal (chunk in backward, micro-batches live per chunk), counted item by item; with
    split backwards, then those that wait for weight gradients per chunk, at both ends of a backward."""
    schedule, P, m, v = case
    profiles = []
    for rank in range(P):
        chunk_of = {stage: chunk for chunk, stage in enumerate(stages_of(case)[rank])}
        live, waiting = [0] * v, [0] * v
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for kind, stage, _ in rank_order(schedule, P, m, v, rank):
            chunk = chunk_of[stage]
            if kind == "F":
                live[chunk] += 1
            elif kind == "W":
                waiting[chunk] -= 1
            else:
                seen.add((chunk, (*live, *waiting) if schedule in SPLIT else tuple(live)))
                live[chunk] -= 1
                if schedule in SPLIT:
                    waiting[chunk] += 1
                    seen.add((chunk, (*live, *waiting)))
        assert live == waiting == [0] * v
        profiles.append({row for row in seen if not any(dominates(other, row) for other in seen)})
    return profiles


def dominates(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    """Whether ``one`` holds at least as much of every chunk in the same backward, and more of some."""
    return one != other and one[0] == other[0] and all(a >= b for a, b in zip(one[1], other[1], strict=True))
