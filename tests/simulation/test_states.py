"""Weights, gradients and optimizer states: ZeRO's published bytes a parameter, communication, update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.problem import Problem, Software
from milpplan.simulation import LayoutColumns, LocalParameters
from milpplan.simulation.layers import layer_parameters
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import collectives
from milpplan.simulation.states import (
    gather_s,
    local_layer_parameters,
    optimizer_s,
    reduce_s,
    single_calls_s,
    state_bytes,
    unsharded_buffer_bytes,
)
from tests.amounts import few_or_many
from tests.simulation.cases import columns_of, problem_of

NUM_PARAMETERS = 1_000_000.0


def of(columns: LayoutColumns, dense: float = NUM_PARAMETERS, expert: float = 0.0) -> LocalParameters:
    """The same number of parameters under every layout."""
    return LocalParameters(np.full(len(columns), dense), np.full(len(columns), expert))


def a_parameter(problem: Problem, **fields: Any) -> float:
    """Bytes of all states a parameter."""
    columns = columns_of(**fields)
    return float(state_bytes(problem, columns, of(columns)).sum() / NUM_PARAMETERS)


@pytest.mark.parametrize("replicas", [1, 4, 64])
def test_published_bytes_a_parameter(replicas: int) -> None:
    """bf16 with fp32 gradients: 18 bytes; 6 + 12/d with sharded optimizer states (Megatron-LM's table); 2 +
    16/d with sharded gradients too, 18/d with everything sharded (Rajbhandari et al. 2020, figure 1)."""
    problem = problem_of("llama3-8b")
    expected = {0: 18, 1: 6 + 12 / replicas, 2: 2 + 16 / replicas, 3: 18 / replicas}
    for stage, size in expected.items():
        assert a_parameter(problem, dp=replicas, zero_stage=stage) == pytest.approx(size)


def test_context_ranks_are_replicas() -> None:
    """States are sharded over the cp * dp ranks that hold the same weights."""
    problem = problem_of("llama3-8b")
    sizes = [a_parameter(problem, dp=16 // cp, cp=cp, zero_stage=1) for cp in (1, 2, 16)]
    assert sizes == pytest.approx([6 + 12 / 16] * 3)


def test_number_formats() -> None:
    """bf16 gradients save two bytes; fp8 adds an fp8 copy of the weights and its transpose."""
    assert a_parameter(problem_of("llama3-8b", grad_dtype="bf16")) == 16
    assert a_parameter(problem_of("llama3-8b", "dgx-h100", precision="fp8")) == 20


def test_fp8_is_for_layers() -> None:
    """In fp8 the layers' weights take two bytes more, those of the embedding and the head do not."""
    columns = columns_of(dp=8, zero_stage=0)
    bf16, fp8 = (
        layout_costs(problem_of("llama3-8b", "dgx-h100", precision=name), columns).at(0).state_bytes  # [3, kinds]
        for name in ("bf16", "fp8")
    )
    per_layer = bf16[2, 0] / 12
    assert (fp8 - bf16)[0] == pytest.approx([2 * per_layer, 0, 0])
    assert (fp8[1:] == bf16[1:]).all()


def with_software(problem: Problem, **software: Any) -> Problem:
    """The problem under a framework's habits."""
    spec = problem.hardware.model_copy(update={"software": Software.model_validate(software)})
    return problem.model_copy(update={"hardware": spec})


def test_buckets_of_the_reduction() -> None:
    """Two bytes a parameter where there are replicas and whole gradients."""
    problem = with_software(problem_of("llama3-8b"), gradient_bucket_bytes=2.0)
    assert a_parameter(problem, dp=1) == 18
    assert a_parameter(problem, dp=4) == 20
    assert a_parameter(problem, dp=4, zero_stage=1) == 8 + 12 / 4
    assert a_parameter(problem, dp=4, zero_stage=2) == 2 + 16 / 4


def test_shards_of_master_weights_alone() -> None:
    """FSDP shards the fp32 weights, gradients and moments: 16 bytes; below stage 3 the 16-bit weights stay."""
    problem = with_software(problem_of("llama3-8b"), master_shards_only=True)
    assert a_parameter(problem, dp=8, zero_stage=3) == 16 / 8
    assert a_parameter(problem, dp=8, zero_stage=2) == 2 + 16 / 8


def test_fp8_weights_alone() -> None:
    """fp8 weights and their transpose take the two bytes of bf16 ones; bf16 jobs do not change."""
    fp8 = problem_of("llama3-8b", "dgx-h100", precision="fp8")
    assert a_parameter(with_software(fp8, fp8_weights_only=True)) == 18
    assert a_parameter(with_software(problem_of("llama3-8b"), fp8_weights_only=True)) == 18


def test_experts_have_fewer_replicas() -> None:
    """Expert states are sharded over tp * cp * dp / (ep * etp) ranks only."""
    problem, columns = problem_of("mixtral-8x7b"), columns_of(dp=8, ep=4, zero_stage=1)
    parts = state_bytes(problem, columns, of(columns, 0.0, NUM_PARAMETERS))
    assert parts.sum() / NUM_PARAMETERS == pytest.approx(6 + 12 / 2)


def test_local_parameters_of_a_layer() -> None:
    """Matrices are divided by tp, experts by ep * etp, norms not at all; key/value heads are copied beyond
    their number."""
    problem = problem_of("mixtral-8x7b")
    kind = problem.model.kinds[0]
    counts = layer_parameters(problem.model, kind)
    local = local_layer_parameters(problem, kind, columns_of(tp=4, dp=4, ep=4, etp=2))
    assert local.dense == counts.tensor_parallel / 4 + counts.replicated
    assert local.expert == counts.experts / 8
    sixteen = local_layer_parameters(problem, kind, columns_of(tp=16))
    half_a_head = 2 * 4096 * 128 * (1 - 8 / 16)
    assert sixteen.dense == counts.tensor_parallel / 16 + counts.replicated + half_a_head


def test_whole_layer_buffers() -> None:
    """Stage 2 holds one layer's gradients whole, stage 3 two layers' weights as well."""
    problem = problem_of("llama3-8b")
    sizes = []
    for stage in range(4):
        columns = columns_of(dp=8, zero_stage=stage)
        sizes.append(unsharded_buffer_bytes(problem, columns, of(columns)).item() / NUM_PARAMETERS)
    assert sizes == [0, 0, 4, 4 + 2 * 2]


def test_reduction_by_hand() -> None:
    """Unsharded gradients are all-reduced, sharded ones reduce-scattered, fp32, over the replicas."""
    problem = problem_of("llama3-8b", "dgx-h100")
    fields = {"tp": 2, "cp": 2, "dp": 4}
    whole, sharded = columns_of(**fields), columns_of(**fields, zero_stage=1)
    message = 4 * NUM_PARAMETERS
    hardware = problem.hardware
    assert reduce_s(problem, whole, of(whole)) == collectives.all_reduce_s(hardware, message, 8, 2)
    assert reduce_s(problem, sharded, of(sharded)) == collectives.reduce_scatter_s(hardware, message, 8, 2)


CALL_BYTES = 25 * 2**20


def host_s(columns: LayoutColumns, dense: float, expert: float = 0.0, **software: float) -> float:
    """Seconds that the calls of a reduction take from the host: what it costs beyond its messages."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    local = of(columns, dense, expert)
    plain = reduce_s(problem, columns, local)
    return float((reduce_s(with_software(problem, **software), columns, local) - plain).item())


@few_or_many(
    40,
    100,
    st.floats(1e3, 1e10),
    st.floats(0.0, 1e10),
    st.sampled_from([1, 2, 4, 8, 64]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.floats(1e-6, 1e-3),
)
def test_calls_of_an_unsharded_reduction(
    dense: float, expert: float, dp: int, ep: int, zero_stage: int, rank_s: float
) -> None:
    """The calls of a layer cost the host a time for each other rank of their group: one for every so many bytes,
    four at most, of dense weights and of experts each; none by default, where the gradients are sharded or on one
    rank."""
    columns = columns_of(dp=max(dp, ep), ep=ep, zero_stage=zero_stage)
    assert host_s(columns, dense, expert) == 0
    assert host_s(columns, dense, expert, collective_rank_s=rank_s) == 0
    assert host_s(columns, dense, expert, reduce_call_bytes=CALL_BYTES) == 0

    expected = 0.0
    if zero_stage == 0:
        for parameters, ranks in ((dense, max(dp, ep)), (expert, max(dp, ep) // ep)):
            calls = min(2 * parameters / CALL_BYTES, 4)
            expected += rank_s * calls * (ranks - 1)
            assert expected <= 2 * 4 * rank_s * max(dp, ep)
    habits = {"collective_rank_s": rank_s, "reduce_call_bytes": CALL_BYTES}
    assert host_s(columns, dense, expert, **habits) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.floats(1e3, 1e10), st.floats(1e-6, 1e-3), st.integers(1, 512), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_calls_of_a_reduction_grow_with_ranks(dense: float, rank_s: float, dp: int, cp: int) -> None:
    """One rank more never costs less, context ranks count as replicas, and a second rank is the first to cost."""
    habits = {"collective_rank_s": rank_s, "reduce_call_bytes": CALL_BYTES}
    times = [host_s(columns_of(dp=n, cp=cp), dense, **habits) for n in (dp, dp + 1)]
    ranks = [cp * n - 1 for n in (dp, dp + 1)]
    assert (times[0] == 0) == (dp * cp == 1)
    assert times[1] * ranks[0] == pytest.approx(times[0] * ranks[1], rel=1e-4, abs=1e-9)
    assert times[1] >= times[0]


def test_sharding_within_groups() -> None:
    """With ZeRO 1 over groups of 8 of 32 replicas a rank holds an eighth of the optimizer's 12 bytes, gathers
    among 8, reduces among them and then its eighth among the 4 groups."""
    problem, columns = problem_of("llama3-8b", "dgx-h100"), columns_of(dp=32, zero_stage=1, dp_replicate=4)
    local = of(columns)
    assert state_bytes(problem, columns, local)[2] == pytest.approx(12 * NUM_PARAMETERS / 8)
    assert gather_s(problem, columns, local) == collectives.all_gather_s(
        problem.hardware, 2 * NUM_PARAMETERS, 8, 1
    )
    expected = collectives.reduce_scatter_s(problem.hardware, 4 * NUM_PARAMETERS, 8, 1)
    expected = expected + collectives.all_reduce_s(problem.hardware, 4 * NUM_PARAMETERS / 8, 4, 8)
    assert reduce_s(problem, columns, local) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_is_between_replication_and_sharding(stage: int) -> None:
    """The more groups, the more bytes a rank holds: those of ZeRO s with one group, below those of ZeRO 0 with
    half as many groups as replicas; the gather gets no slower."""
    problem, local = problem_of("llama3-8b", "dgx-h100"), of(columns_of(dp=64))
    groups = [columns_of(dp=64, zero_stage=stage, dp_replicate=n) for n in (1, 2, 8, 32)]
    held = [float(state_bytes(problem, columns, local).sum()) for columns in groups]
    whole = float(state_bytes(problem, columns_of(dp=64, zero_stage=0), local).sum())
    assert held == sorted(held)
    assert held[0] < held[-1] < whole
    gathers = [float(gather_s(problem, columns, local)[0]) for columns in groups]
    assert gathers == sorted(gathers, reverse=True)


def test_groups_of_one_replica_reduce_as_zero_0() -> None:
    """With as many groups as replicas, which no plan has, the reduction is the all-reduce of ZeRO 0."""
    problem, local = problem_of("llama3-8b", "dgx-h100"), of(columns_of(dp=64))
    alone, plain = columns_of(dp=64, zero_stage=1, dp_replicate=64), columns_of(dp=64, zero_stage=0)
    assert reduce_s(problem, alone, local) == reduce_s(problem, plain, local)
    assert (state_bytes(problem, alone, local) == state_bytes(problem, plain, local)).all()


def test_gather_by_hand() -> None:
    """Updated weights are gathered in bf16; experts over their own, wider spaced, replicas."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    columns = columns_of(dp=32, ep=8, zero_stage=1)
    expected = collectives.all_gather_s(problem.hardware, 2 * NUM_PARAMETERS, 32, 1)
    expected = expected + collectives.all_gather_s(problem.hardware, 2 * 5 * NUM_PARAMETERS, 4, 8)
    assert gather_s(problem, columns, of(columns, NUM_PARAMETERS, 5 * NUM_PARAMETERS)) == expected


def test_one_replica_sends_nothing() -> None:
    """dp = cp = 1: nothing to reduce, nothing to gather."""
    problem, columns = problem_of("llama3-8b"), columns_of(tp=4)
    assert reduce_s(problem, columns, of(columns)) == 0
    assert gather_s(problem, columns, of(columns)) == 0


def test_update_is_bound_by_memory() -> None:
    """Adam moves 38 bytes a parameter; a sharded update takes 1/d of the time."""
    problem = problem_of("llama3-8b", "dgx-a100-80")
    gpu = problem.hardware.accelerator
    rate = gpu.memory_bandwidth_bytes_per_s * gpu.memory_bandwidth_efficiency
    whole, sharded = columns_of(dp=8), columns_of(dp=8, zero_stage=1)
    assert optimizer_s(problem, whole, of(whole)) == pytest.approx(38 * NUM_PARAMETERS / rate)
    assert optimizer_s(problem, sharded, of(sharded)) == pytest.approx(38 * NUM_PARAMETERS / rate / 8)


def test_sharding_more_never_needs_more_states() -> None:
    """Each ZeRO stage keeps at most the states of the stage before."""
    problem = problem_of("mixtral-8x7b")
    columns = [columns_of(tp=2, dp=8, ep=2, zero_stage=stage, sequence_parallel=True) for stage in range(4)]
    together = LayoutColumns.concatenate(columns)
    local = local_layer_parameters(problem, problem.model.kinds[0], together)
    assert np.all(np.diff(state_bytes(problem, together, local), axis=1) <= 0)


def test_zero_1_in_two_calls_by_hand() -> None:
    """Llama-3 8B's 32 layers share one reduction and one gather, each of six tensors' slices is copied on its
    own, and 31 other ranks are called twice a step; ZeRO 0 and 2 have no such calls."""
    habits = {"single_calls": True, "all_reduces_gradients": True, "slice_copy_s": 1e-4, "collective_rank_s": 1e-3}
    problem = with_software(problem_of("llama3-8b", "dgx-h100"), **habits)
    columns, layers = columns_of(dp=32, zero_stage=1), problem.model.num_layers
    parameters = layers * NUM_PARAMETERS
    whole = float(collectives.all_reduce_s(problem.hardware, 4 * parameters, 32, 1))
    gathered = float(collectives.all_gather_s(problem.hardware, 2 * parameters, 32, 1))
    copies = layers * 6 * 32 * 1e-4
    assert layers * reduce_s(problem, columns, of(columns)).item() == pytest.approx(whole)
    assert layers * gather_s(problem, columns, of(columns)).item() == pytest.approx(gathered + copies)
    assert single_calls_s(problem, columns).item() == pytest.approx(2 * 31 * 1e-3)
    plain = with_software(problem, **(habits | {"single_calls": False}))
    for stage in (0, 2):
        other = columns_of(dp=32, zero_stage=stage)
        assert single_calls_s(problem, other) == 0
        assert reduce_s(problem, other, of(other)) == reduce_s(plain, other, of(other))
        assert gather_s(problem, other, of(other)) == gather_s(plain, other, of(other))
