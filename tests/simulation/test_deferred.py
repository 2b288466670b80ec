"""What a split backward keeps for its weight gradients, and what it takes, against the published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from milpplan.problem import SCHEDULES
from milpplan.simulation.layers import (
    EXPOSED,
    ONCE,
    Part,
    Phase,
    head_deferred_bytes,
    layer_activations,
    layer_deferred_bytes,
    layer_seconds,
)
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import long_but
from tests.simulation.cases import MODEL_HARDWARE, columns_of, ideal_hardware, problem_of

PEAK_FLOPS_PER_S = 312e12


def both(fields: dict[str, Any]) -> Any:
    """Columns of the same layout with fused and with split backwards."""
    columns = columns_of(**fields)
    return columns, replace(columns, schedule=np.array([SCHEDULES.index("zb-h1")]))


def test_bytes_of_a_gpt_layer_are_the_published_ones() -> None:
    """32 s b h wait for weight gradients, of 34 s b h + 5 a s^2 b that were kept (Qi et al. 2023, section 2.1)."""
    problem = problem_of("gpt3-175b", attention_kernel="unfused")
    fused, split = both({"pp": 2, "micro_batch_size": 2})
    s, b, h, a = problem.job.sequence_length, 2, 12288, 96
    kind = problem.model.kinds[0]
    assert layer_deferred_bytes(problem, kind, split)[0] == 32 * s * b * h
    assert layer_activations(problem, kind, split).kept[0] == 34 * s * b * h + 5 * a * s * s * b
    assert layer_deferred_bytes(problem, kind, fused)[0] == head_deferred_bytes(problem, fused)[0] == 0


def test_tensor_parallel_bytes_by_hand() -> None:
    """With tp = t and sequence parallelism of a GPT layer's 32 s b h only the two gathered output gradients are
    whole, 4 s b h; the rest is a t-th."""
    problem = problem_of("gpt3-175b")
    _, split = both({"tp": 4, "sequence_parallel": True})
    unit = problem.job.sequence_length * 12288
    assert layer_deferred_bytes(problem, problem.model.kinds[0], split)[0] == pytest.approx((4 + 28 / 4) * unit)


def test_inputs_that_stay_gathered_wait_whole() -> None:
    """Kept gathered, a layer's two column-parallel inputs wait whole, 4 s b h (1 - 1/t) bytes more, and nothing is
    gathered for the weight gradients, which else have one such gather each beside them."""
    problem = problem_of("gpt3-175b")
    kind, unit = problem.model.kinds[0], problem.job.sequence_length * 12288
    sharded, whole = (
        both({"tp": 4, "sequence_parallel": True, "gather_again": again})[1] for again in (True, False)
    )
    bytes_, seconds = (
        [function(problem, kind, columns) for columns in (sharded, whole)]
        for function in (layer_deferred_bytes, layer_seconds)
    )
    assert bytes_[1][0] - bytes_[0][0] == pytest.approx(4 * unit * (1 - 1 / 4))
    parts = [Part.TP, Part.TP_HIDDEN]
    assert seconds[0][parts, Phase.WEIGHT].sum() > 0
    assert seconds[1][parts, Phase.WEIGHT].sum() == 0
    assert np.array_equal(seconds[0][:, Phase.BACKWARD], seconds[1][:, Phase.BACKWARD])


def test_head_keeps_its_input_and_the_gradient_of_the_logits() -> None:
    """2 s h and 2 s V bytes of a micro-batch of one sequence."""
    problem = problem_of("llama3-8b", "dgx-h100")
    _, split = both({})
    s = problem.job.sequence_length
    assert head_deferred_bytes(problem, split)[0] == 2 * s * (4096 + 128256)


def test_weight_gradients_take_the_published_flops() -> None:
    """On an ideal accelerator forward, input and weight gradients of a GPT layer take s b h (24 h + 4 s),
    s b h (24 h + 8 s) and 24 s b h^2 (Qi et al. 2023, section 2.1)."""
    problem = problem_of("gpt3-175b", ideal_hardware(), attention_kernel="unfused")
    _, split = both({})
    found = layer_seconds(problem, problem.model.kinds[0], split)[Part.COMPUTE, :, 0] * PEAK_FLOPS_PER_S
    s, h = problem.job.sequence_length, 12288
    assert found[Phase.FORWARD] == pytest.approx(s * h * (24 * h + 4 * s))
    assert found[Phase.BACKWARD] == pytest.approx(s * h * (24 * h + 8 * s))
    assert found[Phase.WEIGHT] == pytest.approx(24 * s * h * h)


@pytest.mark.parametrize("case", long_but(MODEL_HARDWARE[1::2], MODEL_HARDWARE), ids=lambda case: case[0])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "gather_again": False, "tp_overlap": "ring"},
        {"cp": 2, "dp": 2, "zero_stage": 3},
    ],
    ids=str,
)
def test_splitting_loses_no_compute(case: tuple[str, str, str, str], fields: dict[str, Any]) -> None:
    """Forward, recomputation and the compute of all gradients together are the same; communication that a weight
    gradient hid may become exposed, never less."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    costs = [layout_costs(problem, columns).at(0) for columns in both({"pp": 4} | fields)]
    fused, split = (one.parts.layer for one in costs)
    for phase in (Phase.FORWARD, Phase.SELECTIVE, Phase.FULL):
        assert np.array_equal(fused[:, :, phase], split[:, :, phase])
    assert np.all(fused[:, :, Phase.WEIGHT] == 0)
    compute = [layer[:, Part.COMPUTE][:, ONCE].sum(axis=1) for layer in (fused, split)]
    assert np.all(np.abs(compute[0] - compute[1]) <= 1)
    assert np.all(split[:, EXPOSED].sum(axis=(1, 2)) >= fused[:, EXPOSED].sum(axis=(1, 2)) - 8)
    assert np.all(split[:, Part.COMPUTE, Phase.WEIGHT] > 0)
    assert costs[0].head_ns.sum() == pytest.approx(costs[1].head_ns.sum(), abs=2)
    assert np.all(costs[1].deferred_bytes > 0)


def test_tied_ends_on_one_rank_are_one_matrix() -> None:
    """Where the first rank holds both ends, a tied embedding has no copy and no exchange."""
    problem = problem_of("gemma-7b", "rtx4090")
    columns = columns_of(pp=4, vpp=2, schedule="interleaved")
    turned = replace(columns, schedule=np.array([SCHEDULES.index("zb-v")]))
    apart, together = (layout_costs(problem, one).at(0) for one in (columns, turned))
    assert together.state_bytes[:, -1].sum() < apart.state_bytes[:, -1].sum() / 1000
    assert together.reduce_ns[-2] < apart.reduce_ns[-2]
    assert np.array_equal(together.state_bytes[:, -2], apart.state_bytes[:, -2])
