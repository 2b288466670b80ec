"""Uneven experts: time, memory, bounds, proofs, words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Problem
from milpplan.cli.app import app
from milpplan.simulation.layers import Part, Phase, layer_activations, layer_seconds
from tests.amounts import long_but
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import columns_of, problem_of, random_layout
from tests.simulation.test_bulk import switched, with_host


def uneven(problem: Problem, factor: float) -> Problem:
    """The problem whose fullest expert rank receives ``factor`` times the mean."""
    return problem.model_copy(update={"job": problem.job.model_copy(update={"expert_imbalance": factor})})


def test_a_layer_by_hand() -> None:
    """Twice the rows: more than before and at most twice the time, less than with twice the experts a token, which
    also multiply what a token is before it is sent; kept inputs, gate, up and their product by row. A group of one
    rank has no imbalance, and none receives more than all tokens."""
    even = problem_of("mixtral-8x7b", "dgx-h100")
    kind = even.model.kinds[0]
    columns = columns_of(dp=8, ep=8)
    twice = kind.model_copy(update={"mlp": kind.mlp.model_copy(update={"num_experts_per_tok": 4})})
    seconds = [layer_seconds(*case, columns) for case in ((even, kind), (uneven(even, 2), kind), (even, twice))]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        sent = [one[Part.EP, phase, 0] for one in seconds]
        assert sent[0] < sent[1] <= 2 * sent[0]
        compute = [one[Part.COMPUTE, phase, 0] for one in seconds]
        assert compute[0] < compute[1] < compute[2]
    kept = [layer_activations(*case, columns).kept[0] for case in ((even, kind), (uneven(even, 2), kind))]
    rows, width = even.job.sequence_length * 2, 14336
    assert kept[1] - kept[0] == pytest.approx(rows * (2 * 4096 + 2 * 2 * width + 2 * width))
    for ep, factor, same in ((1, 3.0, 1.0), (2, 3.0, 2.0)):
        part = columns_of(dp=8, ep=ep)
        pair = [layer_seconds(uneven(even, one), kind, part) for one in (factor, same)]
        np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize("seed", long_but((1,), range(10)))
def test_bulk_bounds_and_traffic_know_the_imbalance(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = with_host(uneven(problem_of("qwen3-30b-a3b", "dgx-h100", sequence_length=1024), 1.5))
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(12)]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("seed", long_but((2,), range(8)))
def test_optimum_is_that_of_brute_force(backend: str, seed: int) -> None:
    """Random problems with uneven experts, on every backend."""
    family = ("moe", "mixed")[seed % 2]
    check(uneven(random_problem(seed + 100 * BACKENDS.index(backend), family=family), 2.5), backend)


def run(*words: str) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(app, list(words))


def test_the_command_line_answers_with_evidence() -> None:
    """A solve says that no run has the imbalance; a dense model and a factor below 1 are refused."""
    words = ("dgx-h100", "--gpus", "16", "--global-batch", "32", "--fix", "pp=1,cp=1,ep=8", "--expert-imbalance")
    answer = run("solve", "mixtral-8x7b", *words, "1.5", "--verbose", "--space", "uniform")
    assert answer.exit_code == 0
    assert "an imbalance of experts" in " ".join(answer.output.split())
    for model, factor, seen in (("llama3-8b", "1.5", "has no experts"), ("mixtral-8x7b", "0.5", "greater than")):
        refused = run("solve", model, *words, factor)
        assert refused.exit_code == 2
        assert seen in " ".join(refused.output.split())
