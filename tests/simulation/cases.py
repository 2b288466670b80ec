"""Problems, hardware and plans that the cost tests share; everything random comes from a seeded generator."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from milpplan.problem import (
    PAIRED_SCHEDULES,
    SCHEDULES,
    V_SCHEDULES,
    Accelerator,
    HardwareSpec,
    Job,
    Layout,
    Lora,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Precision,
    Problem,
    Range,
    Recompute,
    SizeCurve,
    VirtualStage,
    load_hardware,
    load_model,
)
from milpplan.simulation import LayoutColumns

MODEL_HARDWARE = (
    ("gpt3-175b", "dgx-a100-80", "unfused", "bf16"),
    ("megatron-22b", "dgx-a100-40", "flash", "bf16"),
    ("llama3-8b", "dgx-h100", "flash", "fp8"),
    ("gemma-7b", "rtx4090", "flash", "bf16"),
    ("mixtral-8x7b", "dgx-h200", "flash", "bf16"),
    ("qwen3-30b-a3b", "gb200-nvl72", "flash", "mxfp8"),
    ("gpt-oss-120b", "mi300x", "flash", "bf16"),
    ("deepseek-v3", "dgx-h100", "flash", "fp8-blockwise"),
    ("deepseek-v3.2", "dgx-h200", "flash", "bf16"),
    ("qwen3-next-80b", "dgx-b200", "flash", "nvfp4"),
    ("nemotron-3-nano", "gb200-nvl72", "flash", "bf16"),
)
"""One of every kind: dense, MoE, latent attention, window, indexer, recurrence; tied, untied; fused, not;
8 and 4 bits."""

ANY = Range(minimum=1, maximum=2**20)
"""As a number of GPUs or a batch: the costs of a layout do not depend on what else a job admits."""


@cache
def shipped_model(name: str) -> ModelSpec:
    """A shipped model, read once."""
    return load_model(name)


@cache
def shipped_hardware(name: str) -> HardwareSpec:
    """A shipped cluster, read once."""
    return load_hardware(name)


def problem_of(
    model: str | ModelSpec = "gpt3-175b", hardware: str | HardwareSpec = "dgx-a100-80", **job: Any
) -> Problem:
    """A problem; the job's fields have defaults, which admit any number of GPUs and any batch."""
    spec = shipped_model(model) if isinstance(model, str) else model
    defaults = {
        "num_gpus": ANY,
        "global_batch_size": ANY,
        "sequence_length": spec.default_sequence_length,
    }
    gpu = shipped_hardware(hardware) if isinstance(hardware, str) else hardware
    return Problem(model=spec, hardware=gpu, job=Job.model_validate(defaults | job))


def takes_adapters(problem: Problem) -> bool:
    """True if adapters of all layers are priced."""
    return not problem.model.has_indexers and all(kind.has_known_adapters for kind in problem.model.kinds)


def adapted(random: np.random.Generator, problem: Problem) -> Problem:
    """The problem with adapters on some matrices, or with frozen ends (always where adapters are refused)."""
    names = problem.model.linear_modules
    chosen = [name for name in names if random.integers(2)] or [names[0]]
    change: dict[str, Any] = {"lora": Lora(rank=int(random.choice([1, 8, 64])), modules=tuple(chosen))}
    if not takes_adapters(problem) or random.integers(4) == 0:
        change = {"frozen": ("embedding", "head")}
    return problem.model_copy(update={"job": problem.job.model_copy(update=change)})


def columns_of(**fields: Any) -> LayoutColumns:
    """Columns of one layout."""
    return LayoutColumns.of([Layout(**({"global_batch_size": 64} | fields))])


def ideal_hardware() -> HardwareSpec:
    """An A100 that reaches its peak everywhere, with free memory traffic, kernel launches and last tiles."""
    base = shipped_hardware("dgx-a100-80")
    gpu = base.accelerator
    gemm = gpu.bf16.gemm.model_copy(
        update={"m": (1.0,), "n": (1.0,), "k": (1.0,), "efficiency": (((1.0,),),)},
    )
    flat = SizeCurve(size=(1.0,), value=(1.0,))
    ideal = Accelerator.model_validate(
        gpu.model_dump()
        | {
            "memory_bandwidth_bytes_per_s": 1e30,
            "memory_bandwidth_efficiency": 1.0,
            "kernel_latency_s": 0.0,
            "num_processors": 0,
            "bf16": Precision(peak_flops_per_s=gpu.bf16.peak_flops_per_s, gemm=gemm),
            "attention_forward": flat,
            "attention_backward": flat,
        }
    )
    return base.model_copy(update={"accelerator": ideal})


def random_problem(random: np.random.Generator) -> Problem:
    """A shipped model on shipped hardware with a short sequence."""
    model, hardware, kernel, precision = MODEL_HARDWARE[random.integers(len(MODEL_HARDWARE))]
    return problem_of(
        model,
        hardware,
        sequence_length=int(random.choice([512, 1024, 2048])),
        attention_kernel=kernel,
        precision=precision,
        grad_dtype=str(random.choice(["fp32", "bf16"])),
    )


def random_layout(random: np.random.Generator, problem: Problem, max_stages: int = 4) -> Layout:
    """A layout that can run: all degrees powers of two that divide what they must."""
    tp, cp, dp, pp = (int(random.choice([1, 2, 4])) for _ in range(4))
    pp = min(pp, max_stages)
    # Ranks of a linear recurrence exchange whole heads.
    while any(heads % (tp * cp) for kind in problem.model.kinds for heads in kind.exchanged_heads):
        cp //= 2
    moe = [kind.mlp for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    ep = etp = 1
    if moe:
        etp = int(random.choice([1, tp]))
        ep = int(random.choice([e for e in (1, 2, 4, 8) if (tp * cp * dp) % (e * etp) == 0]))
    micro_batch = int(random.choice([1, 2]))
    schedule: Any = str(random.choice(SCHEDULES if pp > 1 else ["gpipe", "1f1b"]))
    vpp = int(random.choice([1, 2, 3])) if schedule == "interleaved" else 2 if schedule in V_SCHEDULES else 1
    micro_batches = int(random.integers(1, 9)) * (pp if vpp > 1 else 1)
    if schedule in PAIRED_SCHEDULES:
        micro_batches += pp
    zero_stage = int(random.integers(0, 4)) if cp * dp > 1 else 0
    overlap_grad = zero_stage >= 2 or bool(random.integers(2))
    heads = problem.model.common_heads
    exchanges = [1, *(u for u in (2, 4) if cp % u == 0 and heads % (tp * u) == 0)]
    return Layout(
        tp=tp,
        cp=cp,
        ulysses=exchanges[micro_batches % len(exchanges)],
        ep=ep,
        etp=etp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * micro_batches * dp,
        sequence_parallel=tp > 1 and (bool(moe) or bool(random.integers(2))),
        zero_stage=zero_stage,
        schedule=schedule,
        overlap_grad_reduce=overlap_grad,
        overlap_param_gather=zero_stage == 3 or (zero_stage > 0 and overlap_grad and bool(random.integers(2))),
    )


def random_plan(random: np.random.Generator, problem: Problem, layout: Layout) -> Plan:
    """Any split of the layers (the first and the last virtual stage may be empty) and any recompute
    counts."""
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    inner = np.sort(random.choice(np.arange(layers + 1), size=stages - 1, replace=False))
    bounds = [0, *inner.tolist(), layers]
    held = []
    for first, last in pairwise(bounds):
        full = int(random.integers(0, last - first + 1))
        selective = int(random.integers(0, last - first - full + 1))
        held.append(VirtualStage(layers=(first, last), recompute=Recompute(full=full, selective=selective)))
    return Plan(layout=layout, virtual_stages=tuple(held))


def even_plan(problem: Problem, layout: Layout, **recompute: int) -> Plan:
    """The same number of layers, and the same recompute counts, in every virtual stage."""
    each, rest = divmod(problem.model.num_layers, layout.num_virtual_stages)
    assert rest == 0, "layers do not divide evenly"
    return Plan(
        layout=layout,
        virtual_stages=tuple(
            VirtualStage(layers=(j * each, (j + 1) * each), recompute=Recompute(**recompute))
            for j in range(layout.num_virtual_stages)
        ),
    )


def random_cases(seed: int, count: int) -> list[tuple[Problem, Plan]]:
    """Random problems with a random plan each."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        problem = random_problem(random)
        layout = random_layout(random, problem)
        found.append((problem, random_plan(random, problem, layout)))
    return found
