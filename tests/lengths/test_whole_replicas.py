"""One replica of few lengths as an integer program: closed just where no replica is done in time."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import solve_lengths
from milpplan.lengths import StrategyTables, workload_of
from milpplan.lengths.deadline import PASSED, Deadline
from milpplan.lengths.single.replica_feasibility import MOST, ReplicaFeasibility
from tests.lengths.all_turns import AllTurns
from tests.lengths.cases import GRAIN, pool_of
from tests.small import small_model, small_problem


def pipelines(lengths: list[int], num_layers: int = 8) -> tuple[StrategyTables, list[int]]:
    """A pool of up to four stages, and its pipelines."""
    problem = small_problem(num_gpus=4, memory_gib=60, space={"cp": (1,)})
    found = pool_of(problem.model_copy(update={"model": small_model(num_layers)}), workload_of(lengths, GRAIN))
    return found, [one for one in range(len(found.members)) if found.num_stages(one) > 1]


def closed(one: ReplicaFeasibility, time_ns: float, backend: str) -> bool:
    """Whether no replica is done within a time, as far as the programs say."""
    end = Deadline.after(60.0)
    while not one.done(time_ns):
        one.run(time_ns, backend, end, end)
    return not one.open_numbers(time_ns)


@pytest.mark.parametrize("backend", ["cpsat", "highs"])
@pytest.mark.parametrize("lengths", [[2_048] * 6, [1_280] * 5])
def test_equal_sequences_are_proved_to_a_thousandth(lengths: list[int], backend: str) -> None:
    """The best packing of all on every pipeline: a little less time is closed, a little more is not, and what is
    found then is a packing of all sequences in that time."""
    found, members = pipelines(lengths)
    turns, checked = AllTurns(found), 0
    for member in members[:: 1 if backend == "cpsat" else 3]:
        grains = found.max_quanta(member, shared_memory=False)
        layout = found.members[member].candidate.layout
        best_ns = turns.group(member, grains, tuple(found.load.counts.tolist()), layout.dp)
        one = ReplicaFeasibility.of(found, member)
        assert one is not None
        assert closed(one, best_ns * 0.999, backend)
        assert one.open_numbers(best_ns * 1.001)
        end = Deadline.after(60.0)
        replicas = one.run(best_ns * 1.001, backend, end, end)
        assert replicas is not None
        assert sum(int(held.sum()) for held in replicas) == len(lengths)
        assert best_ns <= found.time_packing(member, replicas, grains).time_ns <= best_ns * 1.002
        checked += 1
    assert checked > (2 if backend == "cpsat" else 0)


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 3, 4, 5))])
def test_no_packing_of_few_lengths_is_below_what_is_closed(seed: int) -> None:
    """Two and three lengths, contents all of them or one of every number of grains: what is closed is below the
    best packing of all, and something is."""
    random = np.random.default_rng(seed)
    lengths = random.choice([640, 1_280, 2_560, 5_120], 2 + seed % 2, replace=False)
    found, members = pipelines(random.choice(lengths, 5).tolist())
    turns, shares = AllTurns(found), []
    for member in members[:6]:
        grains, dp = found.max_quanta(member, shared_memory=False), found.members[member].candidate.layout.dp
        best_ns = turns.group(member, grains, tuple(found.load.counts.tolist()), dp)
        one = ReplicaFeasibility.of(found, member)
        assert one is not None
        proved = [share for share in (0.5, 0.8, 0.9, 0.95, 1.001) if closed(one, best_ns * share, "cpsat")]
        assert 1.001 not in proved
        shares.append(max(proved, default=0.0))
    assert max(shares) >= 0.8, shares


def test_what_can_be_too_many_things_is_left_out() -> None:
    """Many lengths, one stage, and more micro-batches than programs are made for."""
    found, members = pipelines((np.arange(1, 40) * 128).tolist())
    assert all(ReplicaFeasibility.of(found, member) is None for member in members)
    found, members = pipelines([2_048] * 6)
    flat = next(one for one in range(len(found.members)) if found.num_stages(one) == 1)
    assert ReplicaFeasibility.of(found, flat) is None
    one = ReplicaFeasibility.of(found, members[0])
    assert one is not None
    assert MOST + 1 in one.open_numbers(1e15)
    assert one.run(1e15, "cpsat", PASSED, PASSED) is None


def test_a_step_of_equal_sequences_on_pipelines_is_proved() -> None:
    """Sixteen equal sequences on four stages: other bounds leave 4 %."""
    problem = small_problem(num_gpus=4, memory_gib=60, space={"pp": (4,)})
    problem = problem.model_copy(update={"model": small_model(8)})
    result = solve_lengths(problem, workload_of([2_048] * 16, GRAIN), GRAIN, 1, 0.002, 30.0)
    assert result.status == "optimal"
