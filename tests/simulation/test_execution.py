"""Switches of the execution: communication in tiles, gathers that are saved, transfers that are shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.switches import DEEPEP, deepep_rate
from milpplan import traffic
from milpplan.problem import EXPERT_DISPATCHES, Layout, Problem
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import EXPOSED, Part, Phase, kernels, layer_seconds
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import collectives
from tests.simulation.cases import (
    MODEL_HARDWARE,
    columns_of,
    even_plan,
    problem_of,
    random_layout,
    shipped_hardware,
)

SP: dict[str, Any] = {"tp": 4, "sequence_parallel": True}
SHARE = 0.1


def seconds_of(problem: Problem, kind: int = 0, **fields: Any) -> np.ndarray[Any, Any]:
    """[Part, Phase] of one layer."""
    return layer_seconds(problem, problem.model.kinds[kind], columns_of(**fields))[..., 0]


def with_share(problem: Problem, share: float = SHARE) -> Problem:
    """Collectives inside a domain take a share of the processors."""
    scale_up = problem.hardware.scale_up.model_copy(update={"processor_fraction": share})
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"scale_up": scale_up})})


def tiled(seconds: float, product: float, tiles: int, share: float, pipelined: bool) -> tuple[float, float]:
    """``tiled_overlap_s`` of numbers."""
    arrays = (np.array([value]) for value in (seconds, product, float(tiles), share))
    exposed, hidden = collectives.tiled_overlap_s(*arrays, np.array([pipelined]))
    return float(exposed[0]), float(hidden[0])


def test_tiles_by_hand() -> None:
    """8 s beside a product of 12 s in 4 tiles: a ring hides it behind 9 s, a pipeline 6 s of it and leaves a tile
    of 2 s; what is hidden costs a tenth. A product of 4 s covers 3 s only."""
    assert tiled(8.0, 12.0, 4, 0.1, False) == pytest.approx((0.8, 8.0))
    assert tiled(8.0, 12.0, 4, 0.1, True) == pytest.approx((2.6, 6.0))
    assert tiled(8.0, 4.0, 4, 0.1, False) == pytest.approx((5.3, 3.0))
    assert tiled(8.0, 12.0, 1, 0.1, False) == tiled(8.0, 12.0, 1, 0.1, True) == (8.0, 0.0)


@given(
    st.floats(0, 1e3), st.floats(0, 1e3), st.integers(1, 64), st.floats(0, 0.99)
)  # fmt: skip
def test_tiles_expose_no_more_than_the_collective(
    seconds: float, product: float, tiles: int, share: float
) -> None:
    """Exposed with a ring <= pipelined <= all of it; what is exposed and hidden is the collective, and what it
    takes from the processors."""
    ring, pipelined = (tiled(seconds, product, tiles, share, kind) for kind in (False, True))
    margin = 1e-9 * (seconds + 1)
    assert ring[0] <= pipelined[0] + margin
    assert pipelined[0] <= seconds + margin
    for exposed, hidden in (ring, pipelined):
        assert exposed + (1 - share) * hidden == pytest.approx(seconds, abs=margin)


def test_ring_of_a_dense_layer_by_hand() -> None:
    """Llama-3 8B on 4 GPUs with sequence parallelism: the gather before and the scatter after both blocks hide
    behind three quarters of their products, which now run in four launches of a quarter of the tokens."""
    problem = with_share(problem_of("llama3-8b", "dgx-h100"))
    gpu, tokens, hidden = problem.hardware.accelerator, 8192.0, 4096.0
    plain, ring = seconds_of(problem, **SP), seconds_of(problem, **SP, tp_overlap="ring")
    gather = float(collectives.all_gather_s(problem.hardware, 2 * tokens * hidden, 4, 1))
    scatter = float(collectives.reduce_scatter_s(problem.hardware, 2 * tokens * hidden, 4, 1))
    pairs = (((4096 + 2048) / 4, gather), (2 * 14336 / 4, gather)), ((4096 / 4, scatter), (14336 / 4, scatter))
    exposed = added = 0.0
    for width, size in pairs[0]:
        exposed += beside(gpu, size, (tokens, width, hidden))
        added += 4 * product(gpu, tokens / 4, width, hidden) - product(gpu, tokens, width, hidden)
    for width, size in pairs[1]:
        exposed += beside(gpu, size, (tokens, hidden, width))
        added += 4 * product(gpu, tokens / 4, hidden, width) - product(gpu, tokens, hidden, width)
    assert ring[Part.TP, Phase.FORWARD] == pytest.approx(exposed)
    assert plain[Part.TP, Phase.FORWARD] == pytest.approx(2 * (gather + scatter))
    assert ring[Part.COMPUTE, Phase.FORWARD] - plain[Part.COMPUTE, Phase.FORWARD] == pytest.approx(added)
    assert np.array_equal(ring[:, Phase.FULL], ring[:, Phase.FORWARD])


def product(gpu: Any, m: float, n: float, k: float) -> float:
    """Seconds of a bf16 product."""
    return float(kernels.gemm_s(gpu, "bf16", m, n, k))


def beside(gpu: Any, seconds: float, size: tuple[float, float, float]) -> float:
    """Exposed seconds of a collective of 4 ranks beside its product in 4 tiles."""
    m, n, k = size
    cover = 0.75 * 4 * product(gpu, m / 4, n, k)
    hidden = min(seconds, cover)
    return seconds - hidden + SHARE * hidden


@pytest.mark.parametrize("case", MODEL_HARDWARE, ids=lambda case: case[0])
def test_tiles_change_communication_and_products_only(case: tuple[str, str, str, str]) -> None:
    """In every kind of layer tiles expose no more communication than without, and what they hide and expose is the
    same collective; a single tensor rank and other parts are as before."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    for kind in range(len(problem.model.kinds)):
        plain = seconds_of(problem, kind, **SP)
        for overlap in ("ring", "pipelined"):
            found = seconds_of(problem, kind, **SP, tp_overlap=overlap)
            assert np.all(found[Part.TP] <= plain[Part.TP] + 1e-12)
            assert np.all(found[Part.COMPUTE] >= plain[Part.COMPUTE] - 1e-12)
            both = [part[Part.TP] + part[Part.TP_HIDDEN] for part in (found, plain)]
            share = float(collectives.processor_fraction(problem.hardware, 4, 1))
            assert both[0] - share * found[Part.TP_HIDDEN] == pytest.approx(
                both[1] - share * plain[Part.TP_HIDDEN]
            )
            assert np.array_equal(found[(Part.CP, Part.EP, Part.ZERO), :], plain[(Part.CP, Part.EP, Part.ZERO), :])
            alone = seconds_of(problem, kind, tp=1, tp_overlap=overlap)
            assert np.array_equal(alone, seconds_of(problem, kind, tp=1))


def test_all_reduce_in_tiles() -> None:
    """Without sequence parallelism the forward's all-reduce hides behind the row-parallel product."""
    problem = with_share(problem_of("llama3-8b", "dgx-h100"))
    gpu, size = problem.hardware.accelerator, 2 * 8192.0 * 4096.0
    reduce = float(collectives.all_reduce_s(problem.hardware, size, 4, 1))
    expected = sum(beside(gpu, reduce, (8192.0, 4096.0, width)) for width in (1024.0, 3584.0))
    assert seconds_of(problem, tp=4, tp_overlap="ring")[Part.TP, Phase.FORWARD] == pytest.approx(expected)


def test_kept_gathered_saves_a_gather_and_takes_its_bytes() -> None:
    """Llama-3 8B, tp=4: both norms' outputs take 2 * 2 u h * 3/4 bytes more, and the two gathers beside the input
    gradients are gone; selective recomputation drops the inputs, and gathers again."""
    problem = with_share(problem_of("llama3-8b", "dgx-h100"))
    again, kept = seconds_of(problem, **SP), seconds_of(problem, **SP, gather_again=False)
    gather = float(collectives.all_gather_s(problem.hardware, 2 * 8192.0 * 4096.0, 4, 1))
    saved = again[:, Phase.BACKWARD] - kept[:, Phase.BACKWARD]
    assert saved[Part.TP] + (1 - SHARE) * saved[Part.TP_HIDDEN] == pytest.approx(2 * gather)
    assert saved[Part.TP_HIDDEN] > 1.5 * gather
    assert kept[(Part.TP, Part.TP_HIDDEN), Phase.SELECTIVE] == pytest.approx(saved[[Part.TP, Part.TP_HIDDEN]])
    assert np.array_equal(again[:, Phase.FORWARD], kept[:, Phase.FORWARD])
    costs = [bytes_of(problem, **SP, gather_again=switch) for switch in (True, False)]
    more = 2 * 2 * 8192 * 4096 * 3 / 4
    assert costs[1].kept_bytes[0] - costs[0].kept_bytes[0] == more
    assert costs[1].dropped_selective_bytes[0] - costs[0].dropped_selective_bytes[0] == more
    left = costs[1].kept_bytes - costs[1].dropped_full_bytes
    assert np.array_equal(left, costs[0].kept_bytes - costs[0].dropped_full_bytes)


def test_one_formula_of_gathered_inputs() -> None:
    """A framework that always keeps inputs gathered holds the same bytes as a layout that decides to."""
    hardware = shipped_hardware("dgx-h100")
    software = hardware.software.model_copy(update={"gathered_inputs": True})
    always = problem_of("llama3-8b", hardware.model_copy(update={"software": software}))
    decided = bytes_of(problem_of("llama3-8b", hardware), **SP, gather_again=False)
    for name in ("kept_bytes", "dropped_selective_bytes", "dropped_full_bytes"):
        assert np.array_equal(getattr(bytes_of(always, **SP), name), getattr(decided, name))


def bytes_of(problem: Problem, **fields: Any) -> Any:
    """Constants of one layout."""
    return layout_costs(problem, columns_of(**fields)).at(0)


def test_mixed_experts_gather_only_what_they_gather() -> None:
    """Routed experts take tokens that are split, so only the attention's input is gathered: 2 u h (1 - 1/t)."""
    problem = problem_of("mixtral-8x7b", "dgx-h200")
    tokens, hidden = problem.job.sequence_length, problem.model.hidden_size
    costs = [bytes_of(problem, **SP, gather_again=switch) for switch in (True, False)]
    assert costs[1].kept_bytes[0] - costs[0].kept_bytes[0] == 2 * tokens * hidden * 3 / 4


def test_scattered_transfer_by_hand() -> None:
    """GPT-3 175B over nodes of 8: a rank sends an 8th of 2 u h bytes, and 8 ranks gather them; a layout with
    sequence parallelism sends an 8th anyway."""
    problem = problem_of("gpt3-175b", "dgx-a100-80")
    size = 2 * 2048 * 12288
    share = float(collectives.p2p_s(problem.hardware, size / 8, 8)) * 1e9
    gather = float(collectives.all_gather_s(problem.hardware, size, 8, 1)) * 1e9
    assert bytes_of(problem, tp=8, pp=8, pp_scatter_gather=True).transfer_ns == round(share + gather)
    split = {"tp": 8, "pp": 8, "sequence_parallel": True}
    assert bytes_of(problem, **split, pp_scatter_gather=True).transfer_ns == bytes_of(problem, **split).transfer_ns
    assert bytes_of(problem, tp=8, pp_scatter_gather=True).transfer_ns == 0


def test_exchange_of_heads_by_hand() -> None:
    """Llama-3 8B with 8,192 tokens on 4 ranks: all-to-alls of 2,048 tokens of 4,096 query and output numbers and
    twice 1,024 key and value numbers, two bytes each, forwards and backwards; each tensor is copied twice. Two
    groups of two pass keys and values on once, the ring of four three times. A second output is kept."""
    problem = with_share(problem_of("llama3-8b", "dgx-h100", sequence_length=8192), 0.0)
    hardware, gpu = problem.hardware, problem.hardware.accelerator
    widths = (4096, 1024, 1024, 4096)
    alone, two_levels, ring = (seconds_of(problem, cp=4, ulysses=number) for number in (4, 2, 1))
    for ranks, seconds in ((4, alone), (2, two_levels)):
        sent = sum(float(collectives.all_to_all_s(hardware, 2 * 2048 * width, ranks, 1)) for width in widths)
        steps = 4 // ranks - 1
        for phase, times in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
            passed = steps * float(collectives.p2p_s(hardware, times * 2 * 2048 * 2 * 1024, ranks))
            assert seconds[[Part.CP, Part.CP_HIDDEN], phase].sum() == pytest.approx(sent + passed)
    assert alone[Part.CP_HIDDEN].sum() == 0
    assert ring[Part.CP_HIDDEN, Phase.FORWARD] == pytest.approx(3 * two_levels[Part.CP_HIDDEN, Phase.FORWARD])
    # One kernel on 8,192 tokens of 8 heads in place of four kernels on 2,048 tokens of 32 heads.
    flops = kernels.flash_attention_flops(gpu, 8192, 4096, 8, 256, (1, 8192))[0]
    whole = float(kernels.attention_forward_s(gpu, flops, 8192))
    copies = sum(2 * float(kernels.memory_bound_s(gpu, 2 * 2 * 2048 * width)) for width in widths)
    without = layer_seconds(problem, problem.model.kinds[0], columns_of(cp=4), (np.zeros(1), np.zeros(1)))[..., 0]
    merges = 3 * (float(kernels.memory_bound_s(gpu, 10 * 2048 * 4096)) + gpu.kernel_latency_s)
    assert alone[Part.COMPUTE, Phase.FORWARD] == pytest.approx(
        without[Part.COMPUTE, Phase.FORWARD] - merges + whole + copies
    )
    exchanged, passed = (bytes_of(problem, cp=4, ulysses=number) for number in (4, 1))
    assert exchanged.kept_bytes[0] - passed.kept_bytes[0] == 2 * 2048 * 4096


def test_kept_weights_by_hand() -> None:
    """Llama-2 7B at ZeRO 3 on 64 ranks: a layer's 202,383,360 parameters are gathered once a micro-batch in place
    of twice; each of 32 layers keeps two bytes a parameter, and the two layers that pass through need none. With
    16-bit gradients messages are 3/2 of those without ZeRO, and with kept weights as many (Rajbhandari et al.
    2020, ZeRO, section 7)."""
    problem, layer = problem_of("llama2-7b", "dgx-a100-80", grad_dtype="bf16"), 202_383_360
    freed, kept = (bytes_of(problem, dp=64, zero_stage=3, keep_weights=switch) for switch in (False, True))
    assert kept.duration_ns[0, Phase.FORWARD] == freed.duration_ns[0, Phase.FORWARD]
    assert kept.duration_ns[0, Phase.BACKWARD] < freed.duration_ns[0, Phase.BACKWARD]
    assert kept.state_bytes[0, 0] - freed.state_bytes[0, 0] == 2 * layer
    assert freed.buffer_bytes - kept.buffer_bytes == 2 * 2 * layer
    data = {"dp": 64, "global_batch_size": 64, "overlap_grad_reduce": True}
    plain = Layout(**data)
    again = Layout(**data, zero_stage=3, overlap_param_gather=True)
    once = again.model_copy(update={"keep_weights": True})
    # Embedding, head and last norm, which are sharded as with ZeRO 1 and gathered once a step, send alike.
    sent = [traffic(problem, even_plan(problem, layout)).wire_bytes for layout in (plain, again, once)]
    total = [sum(wires[name] for name in ("parameter_gather", "gradient_reduce")) for wires in sent]
    assert total[1] - total[0] == pytest.approx(32 * 2 * 63 * layer)
    assert total[2] == pytest.approx(total[0])


@pytest.mark.parametrize(("nodes", "tokens", "measured"), DEEPEP)
def test_deepep_has_its_published_bandwidth(nodes: int, tokens: int, measured: float) -> None:
    """Bytes that reach nodes a second are the published ones. An all-to-all sends a token to a node as often as it
    has experts there, and takes 1.5 to 4 times as long."""
    rate, longer = deepep_rate(nodes, tokens)
    assert rate == pytest.approx(measured, rel=0.1)
    assert 1.4 < longer < 4.1


def test_gathered_tokens_by_hand() -> None:
    """Qwen3 30B on 4 ranks of 4,096 tokens: all gather 4 x 4,096 tokens of 2,048 bf16 numbers and scatter sums of
    as many forward and backward; 128 probabilities with a map of bytes are gathered, and their gradients are
    scattered. Experts chosen a token do not count. Results are added up in a tensor of all tokens."""
    problem = problem_of("qwen3-30b-a3b", "dgx-h100")
    gathered = seconds_of(problem, ep=4, dp=4, expert_dispatch="allgather")
    tokens = 4 * 4096
    gather, scatter = (
        [float(call(problem.hardware, tokens * size, 4, 1)) for size in (2 * 2048, extra * 128)]
        for call, extra in ((collectives.all_gather_s, 3), (collectives.reduce_scatter_s, 2))
    )
    assert gathered[Part.EP, Phase.FORWARD] == pytest.approx(sum(gather) + scatter[0])
    assert gathered[Part.EP, Phase.BACKWARD] == pytest.approx(gather[0] + sum(scatter))
    sizes = [bytes_of(problem, ep=4, dp=4, expert_dispatch=name) for name in ("alltoall", "allgather")]
    assert sizes[1].workspace_bytes[0] - sizes[0].workspace_bytes[0] == 2 * tokens * 2048
    every = problem.hardware.software.model_copy(update={"deduplicated_dispatch": False})
    plain = problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"software": every})})
    for ep in (4, 16):
        wide = {"ep": ep, "dp": ep}
        named = [seconds_of(problem, **wide, expert_dispatch=name) for name in ("deepep", "alltoall")]
        for one, own in zip(named, (seconds_of(problem, **wide), seconds_of(plain, **wide)), strict=True):
            assert np.array_equal(one, own)


def test_columns_with_switches_cost_as_one_by_one() -> None:
    """A layout with any switches costs the same alone as among others."""
    random = np.random.default_rng(11)
    for model, hardware in (("llama3-8b", "dgx-h100"), ("mixtral-8x7b", "dgx-h200")):
        problem = problem_of(model, hardware)
        layouts = [with_switches(random, random_layout(random, problem)) for _ in range(10)]
        together = layout_costs(problem, LayoutColumns.of(layouts))
        for row, layout in enumerate(layouts):
            alone, among = layout_costs(problem, LayoutColumns.of([layout])).at(0), together.at(row)
            assert np.array_equal(among.parts.offload, alone.parts.offload)
            for name in type(alone).__slots__:
                if name != "parts":
                    assert np.array_equal(getattr(among, name), getattr(alone, name)), name


def with_switches(random: np.random.Generator, layout: Layout) -> Layout:
    """The layout with random switches of the execution."""
    tp_overlap = str(random.choice(["none", "ring", "pipelined"]))
    names = ("pp_scatter_gather", "gather_again", "offload_weights", "offload_activations", "offload_optimizer")
    names_of = EXPERT_DISPATCHES if layout.ep > 1 and layout.etp == 1 else ("default",)
    tp_overlap = {"tp_overlap": tp_overlap, "expert_dispatch": str(random.choice(names_of))}
    return layout.model_copy(update=tp_overlap | {name: bool(random.integers(2)) for name in names})


def test_constant_columns_stay_constant() -> None:
    """Columns that nobody asks for are one number, also after rows are taken, and mean the same as full ones."""
    columns = columns_of(tp=4)
    wide = LayoutColumns.from_mapping(
        {name: np.repeat(getattr(columns, name), 5) for name in Layout.model_fields}
        | {"offload_weights": np.broadcast_to(np.array(False), 5)}
    )
    part = wide.take(np.array([1, 3]))
    assert part.offload_weights.strides == (0,)
    assert part.offload_weights.tolist() == [False, False]
    assert wide.take(np.array([True, False, True, True, False])).offload_weights.shape == (3,)
    assert not part.any_of("offload_weights", "tp_overlap")
    assert replace(part, tp_overlap=np.array([0, 1])).any_of("tp_overlap")
    assert part.at(1) == Layout(tp=4, global_batch_size=64)


def test_durations_count_what_is_exposed() -> None:
    """With tiles and kept inputs a layer's duration is still the sum of its exposed parts."""
    costs = bytes_of(problem_of("llama3-8b", "dgx-h100"), **SP, dp=2, tp_overlap="pipelined", gather_again=False)
    assert np.array_equal(costs.duration_ns, costs.parts.layer[:, EXPOSED].sum(axis=1))
