"""Schedules for Megatron-LM's hybrid context parallelism: every sequence once, on ranks that find each other."""

from __future__ import annotations

import ast
from itertools import pairwise

import numpy as np
import pytest

from milpplan import Job, Problem, Space, load_hardware, load_model, solve_lengths, workload_of
from milpplan.errors import InvalidInputError
from milpplan.lengths.dispatch import HybridSchedule, check_runtime
from milpplan.lengths.records import LengthsResult
from milpplan.reports import lengths_document, lengths_in


def problem_of(model: str = "llama2-7b", **space: object) -> Problem:
    """A model on 16 A100, without recomputation unless the space says otherwise."""
    return Problem(
        model=load_model(model),
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=16, global_batch_size=1, sequence_length=128),
        space=Space(**{"recompute": ("none",), "memory_margin_fraction": 0.0} | space),
    )


@pytest.fixture(scope="module")
def result() -> LengthsResult:
    """A step for a few long sequences and many short ones."""
    lengths = np.array([700, 1500, 9000] * 20 + [30_000])
    found = solve_lengths(problem_of(), workload_of(lengths, 128), 128, 1, 0.05, 5.0, "highs")
    assert found.is_side_by_side
    return found


@pytest.fixture(scope="module")
def schedule(result: LengthsResult) -> HybridSchedule:
    """Of that step."""
    return HybridSchedule(problem_of(), result)


def drawn(number: int, seed: int) -> list[tuple[int, int]]:
    """Identifiers, which are no indices, and lengths."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(30_000, random.pareto(1.0, number) * 400 + 50).astype(int).tolist()
    return [(100 + 3 * index, length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_runs_once_on_neighbours_that_agree(schedule: HybridSchedule, seed: int) -> None:
    """On a power of two of neighbouring ranks that starts at a multiple of it, the larger teams first; of what is
    left something is always next on all of its ranks."""
    samples = drawn(200, seed)
    ranks = schedule.ranks(samples)
    assert ranks is not None
    assert len(ranks) == schedule.num_ranks == 16
    where: dict[int, list[int]] = {}
    for rank, sequences in enumerate(ranks):
        for sample in sequences:
            where.setdefault(sample, []).append(rank)
    assert sorted(where) == [sample for sample, _ in samples]
    for held in where.values():
        size = len(held)
        assert held == list(range(held[0], held[0] + size))
        assert size & (size - 1) == 0
        assert held[0] % size == 0
    for sequences in ranks:
        sizes = [len(where[sample]) for sample in sequences]
        assert all(first >= second for first, second in pairwise(sizes))
    # No deadlock: run whatever is next on all of its ranks.
    left, done = [list(sequences) for sequences in ranks], 0
    while any(left):
        ready = [s[0] for s in left if s and all(left[rank][0] == s[0] for rank in where[s[0]])]
        assert ready
        for rank in where[ready[0]]:
            left[rank].pop(0)
        done += 1
    assert done == len(samples)
    assert schedule.ranks(samples) == ranks


def test_what_cannot_be_planned_is_left_to_the_runtime(schedule: HybridSchedule) -> None:
    """No sequences, fewer than ranks, one that is too long: its own scheduler takes them."""
    assert schedule.ranks([]) is None
    assert schedule.ranks([(0, 300), (1, 200)]) is None
    assert schedule.ranks([*drawn(100, 1), (7, schedule.batches.longest + 1)]) is None


def test_single_micro_batches_take_longer(schedule: HybridSchedule) -> None:
    """By less than half here."""
    planned_s, alone_s = schedule.times_s([length for _, length in drawn(200, 1)])
    assert planned_s < alone_s < 1.5 * planned_s


def test_the_files_are_those_of_the_step(
    result: LengthsResult, schedule: HybridSchedule, tmp_path: object
) -> None:
    """The program is Python and reads the step; the arguments are those of the family."""
    files = schedule.files(lengths_document(result))
    assert list(files) == ["step.json", "hybrid_cp.py", "arguments.txt"]
    names = {node.name for node in ast.parse(files["hybrid_cp.py"]).body if isinstance(node, ast.ClassDef)}
    assert names == {"PlannedCPScheduler"}
    path = tmp_path / "step.json"  # type: ignore[operator]
    path.write_text(files["step.json"], encoding="utf-8")
    read = lengths_in(path)
    assert read is not None
    again = HybridSchedule(read.problem, read.ran)
    assert again.ranks(drawn(200, 1)) == schedule.ranks(drawn(200, 1))
    words = files["arguments.txt"].split()
    assert "--hybrid-context-parallel" in words
    assert "--recompute-granularity" not in words
    longest = int(words[words.index("--max-seqlen-per-dp-cp-rank") + 1])
    assert all(longest * degree <= again.family.max_quanta(member) * 128
               for member, degree in zip(again.family.members, again.family.degrees, strict=True))  # fmt: skip


def test_what_the_runtime_cannot_run_is_refused() -> None:
    """Latent attention, several recompute settings, and a step of one strategy."""
    with pytest.raises(InvalidInputError, match="multi-head latent attention"):
        check_runtime(problem_of("deepseek-v3"))
    with pytest.raises(InvalidInputError, match="recompute settings none, selective, full"):
        check_runtime(problem_of(recompute=("none", "selective", "full")))
    problem = problem_of()
    short = workload_of(np.full(8, 640), 128)
    result = solve_lengths(problem, short, 128, 1, 0.05, 5.0, "highs", side_by_side=False)
    with pytest.raises(InvalidInputError, match="no degrees side by side"):
        HybridSchedule(problem, result)
