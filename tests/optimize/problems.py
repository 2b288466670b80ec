"""Random problems small enough to enumerate every plan, and random plans of any problem.

The models, clusters and spaces are drawn so that the hard cases are common: unequal layers, memory that
binds, hardly any plan or none that fits, tied layouts, odd numbers of GPUs.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from hypothesis import strategies as st

from milpplan import HardwareSpec, Layout, ModelSpec, Plan, Recompute, VirtualStage, load_hardware
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import (
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    Job,
    LatentAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    NoBlock,
    Problem,
    Range,
    Space,
)
from tests.optimize.brute_force import constants, is_even, layer_range, num_plans, time_and_peak

MOST_PLANS = 20_000
MOST_LAYOUTS = 16
RECOMPUTE_SETS: tuple[Any, ...] = (
    ("none", "selective", "full"),
    ("none", "full"),
    ("none", "selective"),
    ("full",),
    ("none",),
)


@cache
def preset(name: str) -> HardwareSpec:
    """A shipped cluster, read once."""
    return load_hardware(name)


def random_problem(
    seed: int,
    kind: Any = "free",
    family: str | None = None,
    schedules: Any = ("gpipe", "1f1b", "interleaved"),
    **job: Any,
) -> Problem:
    """The problem of a seed; ``family`` is one of ``FAMILIES``, ``job`` replaces fields of the job; the space has
    one to three of the ``schedules``."""
    rng = random.Random(seed)
    model = random_model(rng, family or rng.choice(FAMILIES))
    hardware = random_hardware(rng)
    for attempt in range(200):
        values = _job(rng) | job
        space = _space(rng, kind, model, attempt, schedules)
        problem = Problem(model=model, hardware=hardware, job=Job(**values), space=space)
        layouts = layout_space(problem).columns
        if not 1 <= len(layouts) <= MOST_LAYOUTS:
            continue
        if num_plans(problem, [layouts.at(row) for row in range(len(layouts))]) <= MOST_PLANS:
            return with_tight_memory(rng, problem, layouts.at(rng.randrange(len(layouts))))
    raise AssertionError(f"seed {seed} gives no small problem")


def problems(**options: Any) -> st.SearchStrategy[Problem]:
    """Small problems for hypothesis."""
    return st.integers(0, 10**6).map(lambda seed: random_problem(seed, **options))


FAMILIES = ("dense", "moe", "mla", "mixed", "window")


def random_model(rng: random.Random, family: str) -> ModelSpec:
    """A tiny model: one kind of layer, a dense layer before experts, attention windows, or a hybrid."""
    hidden, heads = rng.choice((128, 256, 512, 1024)), rng.choice((2, 4, 8))
    attention: Any = GroupedQueryAttention(
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([k for k in (1, 2, 4, 8) if heads % k == 0]),
        head_dim=rng.choice((32, 64, 128)),
    )
    dense = DenseMlp(intermediate_size=hidden * rng.choice((2, 4, 6)), gated=rng.random() < 0.7)
    if family in ("mla", "sparse", "shared"):
        attention = LatentAttention(
            num_attention_heads=heads, q_lora_rank=rng.choice((None, 64)), kv_lora_rank=64,
            qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        )  # fmt: skip
    if family in ("sparse", "shared"):
        selecting = Indexer(index_n_heads=rng.choice((2, 8)), index_head_dim=32, index_topk=rng.choice((64, 512)))
        attention = attention.model_copy(update={"q_lora_rank": 64, "indexer": selecting})
    first = LayerRun(count=rng.randint(2, 7), attention=attention, mlp=dense)
    runs = [first]
    if family == "shared":
        runs = _sharing_runs(rng, attention, dense)
    if family in ("moe", "mixed"):
        experts = LayerRun(count=rng.randint(2, 5), attention=attention, mlp=_experts(rng, hidden))
        runs = [experts] if family == "moe" else [first.model_copy(update={"count": 1}), experts]
    elif family == "hybrid":
        runs = _hybrid_runs(rng, attention, dense, _experts(rng, hidden))
    elif family == "compressed":
        runs = _compressed_runs(rng, _experts(rng, hidden))
    elif family == "window":
        near = attention.model_copy(update={"sliding_window": 128})
        runs = [
            LayerRun(count=rng.randint(1, 2), attention=(near, attention)[i % 2], mlp=dense)
            for i in range(rng.randint(2, 4))
        ]
    return ModelSpec(
        name=family,
        hidden_size=hidden,
        vocab_size=rng.choice((512, 2000, 32000)),
        max_position_embeddings=8192,
        layers=tuple(runs),
        tie_word_embeddings=rng.random() < 0.4,
        residual_streams=4 if family == "compressed" else 1,
    )


def _sharing_runs(rng: random.Random, attention: Any, dense: DenseMlp) -> list[LayerRun]:
    """Layers that select keys of their own, each followed by up to two that take them."""
    takers = [rng.choice((0, 1, 1, 2)) for _ in range(rng.randint(2, 4))]
    names = [name for number in takers for name in (*(("gives",) if number else ("none",)), *["takes"] * number)]
    indexers = [attention.indexer.model_copy(update={"sharing": name}) for name in names]
    mixers = [attention.model_copy(update={"indexer": indexer}) for indexer in indexers]
    return [LayerRun(count=1, attention=mixer, mlp=dense) for mixer in mixers]


def _compressed_runs(rng: random.Random, experts: MixtureOfExperts) -> list[LayerRun]:
    """Attention to a window, and to a few or all compressed keys beside it."""
    plain = CompressedAttention(
        num_attention_heads=rng.choice((4, 64)), head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=32,
        sliding_window=64,
    )  # fmt: skip
    indexer = Indexer(index_n_heads=4, index_head_dim=32, index_topk=rng.choice((32, 256)))
    heavy = plain.model_copy(update={"compress_rate": 64})
    sparse = plain.model_copy(update={"compress_rate": 4, "indexer": indexer})
    chosen = rng.sample((plain, heavy, sparse), rng.randint(2, 3))
    return [LayerRun(count=rng.randint(1, 2), attention=mixer, mlp=experts) for mixer in chosen]


def _hybrid_runs(rng: random.Random, attention: Any, dense: DenseMlp, experts: MixtureOfExperts) -> list[LayerRun]:
    """Two to four kinds of layers: gated delta net or Kimi delta attention, gated attention, lightning attention,
    and Mamba-2 or a feed-forward block alone."""
    heads, groups = attention.num_attention_heads, attention.num_key_value_heads
    delta, ssm = (
        LinearRecurrence(
            update=update, num_key_heads=groups, num_value_heads=heads, key_head_dim=32, value_head_dim=size
        )
        for update, size in (("delta", 64), ("ssm", attention.head_dim))
    )
    law = random.Random(repr(rng.getstate()))
    if law.random() < 0.5:
        delta = delta.model_copy(update={"update": "kda", "gate_rank": law.choice((None, 16))})
    sizes = {"update": "lightning", "num_key_heads": heads, "conv_kernel": 0}
    lightning = delta.model_copy(update=sizes | {"gate_rank": None})
    sizes = {"index_n_heads": groups, "index_head_dim": 16, "index_block_size": 64, "index_topk_blocks": 4}
    parts: tuple[dict[str, Any], ...] = ({"output_gate": True}, {"head_gate": True}, {"blocks": sizes})
    gated = type(attention)(**attention.model_dump() | law.choice(parts))
    kinds: list[tuple[Any, Any]] = [(delta, dense), (gated, experts), (ssm, NoBlock()), (NoBlock(), dense)]
    kinds.append((lightning, experts))
    return [
        LayerRun(
            count=rng.randint(1, 2),
            attention=mixer,
            mlp=mlp,
            num_norms=1 if "none" in (mixer.type, mlp.type) else 2,
        )
        for mixer, mlp in rng.sample(kinds, rng.randint(2, 4))
    ]


def _experts(rng: random.Random, hidden: int) -> MixtureOfExperts:
    number = rng.choice((2, 4, 6, 8))
    return MixtureOfExperts(
        num_experts=number,
        num_experts_per_tok=rng.randint(1, 2),
        intermediate_size=hidden * rng.choice((1, 2)),
        shared_intermediate_size=rng.choice((0, hidden)),
    )


def random_hardware(rng: random.Random) -> HardwareSpec:
    """A preset with small fast domains, slower or faster arithmetic, and no reserve.

    Two in three hide only a part of the communication of sharded states, on a network with congestion.
    """
    law = random.Random(repr(rng.getstate()))
    base = preset(rng.choice(("dgx-a100-80", "dgx-h100", "l40s", "mi300x")))
    domain = rng.choice((2, 4, 8))
    gpu = base.accelerator
    speed = gpu.bf16.peak_flops_per_s * rng.choice((1.0, 0.2, 0.02))
    accelerator = gpu.model_copy(
        update={
            "bf16": gpu.bf16.model_copy(update={"peak_flops_per_s": speed}),
            "kernel_latency_s": gpu.kernel_latency_s * rng.choice((0.0, 0.1, 1.0)),
        }
    )
    return base.model_copy(
        update={
            "gpus_per_node": domain,
            "scale_up": base.scale_up.model_copy(update={"num_gpus": domain}),
            "accelerator": accelerator,
            "scale_out": base.scale_out.model_copy(
                update={"congestion_s_per_byte": law.choice((0.0, 1e-13, 1e-12, 1e-11))}
            ),
            "software": base.software.model_copy(
                update={
                    "hidden_gather_fraction": law.choice((1.0, law.random(), 0.0)),
                    "hidden_reduce_fraction": law.choice((1.0, law.random(), 0.0)),
                }
            ),
            "reserved_bytes": 0,
            "fragmentation_fraction": rng.choice((0.0, 0.03)),
        }
    )


def with_memory(problem: Problem, usable_bytes: int) -> Problem:
    """The problem on devices where plans may fill exactly ``usable_bytes``."""
    accelerator = problem.hardware.accelerator.model_copy(update={"memory_bytes": usable_bytes})
    hardware = problem.hardware.model_copy(
        update={
            "accelerator": accelerator,
            "reserved_bytes": 0,
            "fragmentation_fraction": 0.0,
            "memory_margin_fraction": 0.0,
        }
    )
    return problem.model_copy(update={"hardware": hardware})


def with_margin(problem: Problem, share: float, of_space: bool) -> Problem:
    """The problem on larger devices, of which plans leave a share: what they may fill hardly changes.

    ``of_space``: the space asks for the margin, and the hardware for another one.
    """
    installed = int(problem.hardware.usable_bytes / (1 - share))
    accelerator = problem.hardware.accelerator.model_copy(update={"memory_bytes": installed})
    own = 0.4 if of_space else share
    hardware = problem.hardware.model_copy(update={"accelerator": accelerator, "memory_margin_fraction": own})
    space = problem.space.model_copy(update={"memory_margin_fraction": share if of_space else None})
    return problem.model_copy(update={"hardware": hardware, "space": space})


def with_tight_memory(rng: random.Random, problem: Problem, layout: Layout) -> Problem:
    """Memory between the peaks of a random plan of the layout without and with full recomputation; one in
    eight times hardly enough for any plan, and as often enough for all."""
    plans = [random_plan(rng, problem, layout, recompute=share) for share in (0.0, 1.0)]
    costs = constants(problem, layout)
    most, least = (time_and_peak(problem, costs, plan)[1] for plan in plans)
    chance = rng.random()
    if chance < 1 / 8:
        return with_memory(problem, int(least * rng.uniform(0.3, 1.0)))
    if chance > 7 / 8:
        return with_memory(problem, 64 * most)
    low, high = min(least, most), max(least, most)
    return with_memory(problem, int(low + (high - low) * rng.uniform(-0.1, 1.1)))


def _job(rng: random.Random) -> dict[str, Any]:
    return {
        "num_gpus": rng.choice((2, 3, 4, 4, 6, 8, 8, 12, 16)),
        "global_batch_size": rng.choice((2, 3, 4, 6, 8, 8, 12, 16)),
        "sequence_length": rng.choice((512, 1024, 4096)),
    }


def _space(rng: random.Random, kind: Any, model: ModelSpec, attempt: int, schedules: Any) -> Space:
    """Random restrictions, more of them the more attempts failed."""
    fixed: dict[str, Any] = {"kind": kind, "recompute": RECOMPUTE_SETS[min(4, int(rng.expovariate(1.0)))]}
    for name in ("tp", "cp", "ep", "etp", "pp", "dp", "vpp", "micro_batch_size"):
        if rng.random() < min(0.75, 0.3 + 0.02 * attempt):
            choices = (1, 1, 1, 2, 2, 3, 4) if name != "pp" else (1, 2, 2, 3, 4)
            fixed[name] = tuple(sorted({rng.choice(choices) for _ in range(rng.randint(1, 2))}))
    if all(run.mlp.type == "dense" for run in model.layers):
        fixed["ep"] = fixed["etp"] = None
    fixed["schedule"] = tuple(rng.sample(schedules, min(len(schedules), rng.choice((1, 2, 2, 3)))))
    fixed["zero_stage"] = tuple(sorted(rng.sample(range(4), rng.choice((1, 1, 2)))))
    for name in ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather"):
        fixed[name] = rng.choice(((False, True), (False, True), (False,), (True,)))
    fixed["zero_pipeline"] = True
    fixed["interleaved_layers"] = rng.choice(("even", "any"))
    fixed["vpp_values"] = rng.choice(("distinct", "all"))
    if 1 in fixed["zero_stage"] and rng.random() < 0.5:
        fixed["overlap_grad_reduce"] = fixed["overlap_param_gather"] = (False,)
    return Space(**fixed)


def batch_range(rng: random.Random) -> Range:
    """A few batch sizes."""
    step = rng.choice((1, 2))
    low = step * rng.randint(1, 3)
    return Range(minimum=low, maximum=low + step * rng.randint(1, 3), step=step)


def random_split(rng: random.Random, num_layers: int, stages: int, even: bool) -> list[int]:
    """Layers of each virtual stage: balanced, random, or nearly all in one or two; the ends may be empty."""
    ranges = [layer_range(num_layers, stages, j, even) for j in range(stages)]
    held = [least for least, _ in ranges]
    style = rng.choice(("balanced", "random", "one", "two"))
    favoured = [rng.randrange(stages) for _ in range(1 if style == "one" else 2)]
    for number in range(num_layers - sum(held)):
        open_stages = [j for j in range(stages) if held[j] < ranges[j][1]]
        wanted = favoured[number % len(favoured)]
        if style == "balanced":
            wanted = min(open_stages, key=lambda j: held[j])
        elif style == "random" or wanted not in open_stages:
            wanted = rng.choice(open_stages)
        held[wanted] += 1
    return held


def random_plan(rng: random.Random, problem: Problem, layout: Layout, recompute: float | None = None) -> Plan:
    """A plan of the free space; ``recompute`` is the share of layers recomputed wholly (None: at random)."""
    modes = problem.space.recompute
    stages, start = [], 0
    even = is_even(problem, layout)
    for count in random_split(rng, problem.model.num_layers, layout.num_virtual_stages, even):
        if recompute is not None:
            full, selective = round(recompute * count), 0
        else:
            full = rng.choice((0, count, rng.randint(0, count))) if "full" in modes else 0
            rest = count - full
            selective = rng.choice((0, rest, rng.randint(0, rest))) if "selective" in modes else 0
            if "none" not in modes:
                full, selective = (full, rest) if "selective" in modes else (count, 0)
        stages.append(
            VirtualStage(layers=(start, start + count), recompute=Recompute(full=full, selective=selective))
        )
        start += count
    return Plan(layout=layout, virtual_stages=tuple(stages))
