"""Constants of layouts: the same one by one as in columns, and each degree changes what it should."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from milpplan.problem import Layout, Problem
from milpplan.simulation import LayoutColumns, LayoutCosts, usable_memory_bytes
from milpplan.simulation.layers import EXPOSED, Part, Phase
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import collectives
from tests.amounts import long_but
from tests.simulation.cases import MODEL_HARDWARE, problem_of, random_layout

EMBEDDING, HEAD = -2, -1


def one(problem: Problem, **values: Any) -> LayoutCosts:
    """Constants of one layout."""
    layout = Layout(**({"global_batch_size": 64} | values))
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def numbers(costs: LayoutCosts) -> dict[str, Any]:
    """Every constant of a layout by name, with the parts of its times."""
    values = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name != "parts"}
    return values | {f"parts.{name}": getattr(costs.parts, name) for name in ("layer", "embedding", "head")}


@pytest.mark.parametrize("count", long_but((12,), (12, 25)))
@pytest.mark.parametrize("case", MODEL_HARDWARE, ids=lambda case: case[0])
def test_columns_cost_as_one_by_one(count: int, case: tuple[str, str, str, str]) -> None:
    """A layout costs the same alone as among others, to the nanosecond and the byte; so does a taken row."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    random = np.random.default_rng(7)
    layouts = [random_layout(random, problem) for _ in range(count)]
    together = layout_costs(problem, LayoutColumns.of(layouts))
    some = together.take(np.array([3, 11]))
    for row, layout in enumerate(layouts):
        alone = layout_costs(problem, LayoutColumns.of([layout]))
        own = numbers(alone.at(0))
        for name, values in numbers(together.at(row)).items():
            assert np.array_equal(values, own[name]), name
            assert np.issubdtype(values.dtype, np.integer) or name == "exposed_fractions"
            assert np.all(values >= 0), name
            if row == 11:
                assert np.array_equal(values, numbers(some.at(1))[name])


def test_durations_are_the_exposed_parts() -> None:
    """A layer's duration is the sum of its exposed parts; hidden communication is not in it."""
    costs = one(problem_of("llama3-8b", "dgx-h100"), tp=4, cp=2, dp=2, sequence_parallel=True)
    assert np.array_equal(costs.duration_ns, costs.parts.layer[:, EXPOSED].sum(axis=1))
    hidden = costs.parts.layer[:, (Part.TP_HIDDEN, Part.CP_HIDDEN, Part.ZERO_HIDDEN)].sum()
    assert costs.parts.layer.sum() - costs.duration_ns.sum() == hidden > 0


def test_switches_and_schedule_change_no_constant() -> None:
    """Overlap switches, virtual stages, the schedule and the batch are the step graph's business."""
    problem = problem_of("llama3-8b", "dgx-h100")
    base = one(problem, dp=4, pp=4, zero_stage=1)
    for change in (
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "vpp": 2},
        {"global_batch_size": 128},
    ):
        other = numbers(one(problem, **({"dp": 4, "pp": 4, "zero_stage": 1} | change)))
        for name, values in numbers(base).items():
            assert np.array_equal(values, other[name]), name


def test_memory_changes_no_constant() -> None:
    """What a layout costs does not depend on how much memory the device has."""
    problem = problem_of("deepseek-v3", "dgx-h100")
    small = problem.hardware.accelerator.model_copy(update={"memory_bytes": 2**30})
    changes = {"accelerator": small, "reserved_bytes": 0, "fragmentation_fraction": 0.0}
    changes["memory_margin_fraction"] = 0.0
    other = problem.model_copy(update={"hardware": problem.hardware.model_copy(update=changes)})
    assert usable_memory_bytes(other) < usable_memory_bytes(problem)
    values = {"pp": 4, "dp": 8, "ep": 8, "zero_stage": 2}
    found = numbers(one(other, **values))
    for name, expected in numbers(one(problem, **values)).items():
        assert np.array_equal(found[name], expected), name


def test_usable_memory_by_hand() -> None:
    """An H100's 81,559 MiB less 3 % of fragmentation, 2 GiB of reserve and a margin of 5 %."""
    problem = problem_of("llama3-8b", "dgx-h100")
    hardware = problem.hardware
    assert hardware.fragmentation_fraction == 0.03
    usable = int(81_559 * 2**20 * 0.97) - 2 * 2**30
    assert usable_memory_bytes(problem) == usable - int(0.05 * 81_559 * 2**20)
    for share in (0.0, 0.2):
        space = problem.space.model_copy(update={"memory_margin_fraction": share})
        asked = problem.model_copy(update={"space": space})
        assert usable_memory_bytes(asked) == usable - int(share * 81_559 * 2**20)


def test_transfer_by_hand() -> None:
    """Between stages 2 b s h / cp bytes travel, a tp-th of them with sequence parallelism; none without a
    pipeline."""
    problem = problem_of("llama3-8b", "dgx-h100")
    whole = one(problem, tp=2, dp=8, pp=2, micro_batch_size=2)
    split = one(problem, tp=2, dp=8, pp=2, micro_batch_size=2, sequence_parallel=True)
    size = 2 * 2 * 8192 * 4096
    assert whole.transfer_ns == round(float(collectives.p2p_s(problem.hardware, size, 16)) * 1e9)
    assert split.transfer_ns == round(float(collectives.p2p_s(problem.hardware, size / 2, 16)) * 1e9)
    assert one(problem, tp=2, dp=8).transfer_ns == 0


def test_zero_stages_move_communication() -> None:
    """Stages 0 and 1 reduce once a step, 1 and 2 gather once a step, 2 reduces and 3 gathers and reduces in
    every micro-batch, beside compute."""
    problem = problem_of("llama3-8b", "dgx-h100")
    costs = [one(problem, dp=8, zero_stage=stage) for stage in range(4)]
    assert [bool(item.reduce_ns[0]) for item in costs] == [True, True, False, False]
    assert [bool(item.gather_ns[0]) for item in costs] == [False, True, True, False]
    sharding = [
        item.parts.layer[0, (Part.ZERO, Part.ZERO_HIDDEN)].sum(axis=0)[[Phase.FORWARD, Phase.BACKWARD]] > 0
        for item in costs
    ]
    assert [tuple(row.tolist()) for row in sharding] == [
        (False, False),
        (False, False),
        (False, True),
        (True, True),
    ]
    assert all(np.all(item.parts.layer[0, Part.ZERO, (Phase.SELECTIVE, Phase.FULL)] == 0) for item in costs)


def test_tied_embedding_is_copied_to_the_last_stage() -> None:
    """Tied: without a pipeline the matrix exists once; with one the last stage holds a copy, whose gradient
    both ends sum by an all-reduce."""
    problem = problem_of("gpt3-175b", "dgx-a100-80")
    matrix = 51200 * 12288
    alone, piped = one(problem), one(problem, pp=4)
    norm = 2 * 12288
    assert alone.state_bytes[:, HEAD].sum() == 18 * norm
    assert piped.state_bytes[:, HEAD].sum() == 18 * (norm + matrix)
    tie = collectives.all_reduce_s(problem.hardware, 4 * matrix, 2, 3)
    assert piped.reduce_ns[[EMBEDDING, HEAD]].tolist() == [round(float(tie) * 1e9)] * 2
    assert alone.reduce_ns[[EMBEDDING, HEAD]].tolist() == [0, 0]


def test_ends_stay_gathered() -> None:
    """Embedding and head are sharded no further than ZeRO stage 1: the root unit is not resharded."""
    problem = problem_of("llama3-8b", "dgx-h100")
    first, third = one(problem, dp=8, zero_stage=1), one(problem, dp=8, zero_stage=3)
    assert np.array_equal(first.state_bytes[:, -2:], third.state_bytes[:, -2:])
    assert np.array_equal(first.gather_ns[-2:], third.gather_ns[-2:])


def test_barrier_grows_with_the_cluster() -> None:
    """The gradient norm is one small all-reduce over all GPUs; one GPU needs none."""
    problem = problem_of("llama3-8b", "dgx-h100")
    times = [int(one(problem, dp=dp, global_batch_size=dp).barrier_ns) for dp in (1, 8, 64, 512)]
    assert times[0] == 0
    assert times == sorted(times)


def test_memory_of_a_layer_adds_up_over_tensor_ranks() -> None:
    """tp ranks together hold each matrix once: eight times one rank's states are the layer's and seven more
    norms."""
    problem = problem_of("llama3-8b", "dgx-h100")
    alone, split = one(problem), one(problem, tp=8, sequence_parallel=True)
    norms = 2 * 4096
    assert 8 * split.state_bytes[:, 0].sum() == alone.state_bytes[:, 0].sum() + 7 * 18 * norms
