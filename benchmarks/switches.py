"""New switches and parts, each with a published number, the price of not having it, and its brute-force test.

python -m benchmarks.switches [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import CONFIGS
from benchmarks.tables import markdown_table, replace_section
from milpplan import (
    Job,
    Layout,
    ModelSpec,
    Plan,
    PlanResult,
    Problem,
    Space,
    StepReport,
    load_hardware,
    load_model,
    simulate,
    solve,
)
from milpplan.launchers import restrict
from milpplan.problem import EXPERT_DISPATCHES, Recompute, VirtualStage
from milpplan.simulation import orthogonalization_s
from milpplan.simulation.network import collectives
from milpplan.units import percent_text, seconds_text
from milpplan.validation.comparison import Comparison, compare_run
from milpplan.validation.runs import Run, state
from milpplan.validation.runs.reader import read_runs

RESULTS = Path(__file__).parent / "results" / "switches.md"
OVERLAPS: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
GAP = 1e-3
CORE = "tests/optimize/test_execution.py::"


@dataclass(frozen=True, slots=True)
class Figure:
    """A published number beside that of the model."""

    what: str
    source: str
    measured: float
    ours: Callable[[], float]
    error: float
    """Relative error that the test admits: what there was when the figure was added, rounded up."""
    most: float | None = None
    """Upper end of a published range that begins at ``measured``, and that the test wants met."""

    def row(self) -> tuple[str, ...]:
        """Write the figure as four cells of the table."""
        ours = self.ours()
        measured, error = f"{self.measured:.4g}", percent_text(ours / self.measured - 1)
        if self.most is not None:
            measured = f"{measured} to {self.most:.4g}"
            error = "within" if self.measured <= ours <= self.most else "outside"
        return f"{self.what} ({self.source})", measured, f"{ours:.4g}", error


@dataclass(frozen=True, slots=True)
class Price:
    """A problem with a switch open, beside one where it is closed; or one whose plans may ignore a part of the
    job."""

    what: str
    problem: Problem
    without: Problem
    ignores: bool = False
    """The plan without is simulated in ``problem``, of which it knows nothing."""

    def cells(self) -> tuple[str, ...]:
        """Write the steps with and without, and the price of the second."""
        best, closed = solved(self.problem), solved(self.without)
        step = _step_s(best)
        if closed.plan is None:
            return self.what, seconds_text(step), "no plan fits", "-"
        without = simulate(self.problem, closed.plan) if self.ignores else closed.report
        assert without is not None
        words = seconds_text(without.step_time_s)
        if without.peak_memory_bytes > self.problem.hardware.accelerator.memory_bytes:
            return self.what, seconds_text(step), f"{words}, does not fit", "-"
        return self.what, seconds_text(step), words, percent_text(without.step_time_s / step - 1, 2)


@dataclass(frozen=True, slots=True)
class Part:
    """A switch or a new part of a job."""

    name: str
    figures: tuple[Figure, ...]
    none: str
    """Reason why there is no figure."""
    price: Price
    test: str


def solved(problem: Problem) -> PlanResult:
    """Solve a problem to the gap of the table.

    Raises:
        AssertionError: the solve ended without a proof.
    """
    result = solve(problem, gap=GAP)
    assert result.status in ("optimal", "infeasible"), result.status
    return result


def _step_s(result: PlanResult) -> float:
    assert result.report is not None
    return result.report.step_time_s


def problem_of(
    model: str | ModelSpec, hardware: str, gpus: int, batch: int, tokens: int, **fields: Any
) -> Problem:
    """Build a problem of the uniform space; fields of the job and of the space by name."""
    job = {name: fields.pop(name) for name in tuple(fields) if name in Job.model_fields}
    return Problem(
        model=load_model(model) if isinstance(model, str) else model,
        hardware=load_hardware(hardware),
        job=Job(num_gpus=gpus, global_batch_size=batch, sequence_length=tokens, **job),
        space=Space(**({"kind": "uniform"} | fields)),
    )


def with_job(problem: Problem, **changes: Any) -> Problem:
    """Change fields of a problem's job."""
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


def with_space(problem: Problem, **changes: Any) -> Problem:
    """Change fields of a problem's space."""
    return problem.model_copy(update={"space": problem.space.model_copy(update=changes)})


def opened(what: str, problem: Problem, **values: Any) -> Price:
    """Price a switch of the space, closed in ``problem``."""
    return Price(what, with_space(problem, **values), problem)


def ignored(what: str, problem: Problem, **changes: Any) -> Price:
    """Price a part of the job that a planner may know nothing of."""
    return Price(what, with_job(problem, **changes), problem, ignores=True)


def step_of(problem: Problem, layout: Layout, **recompute: int) -> StepReport:
    """Simulate a plan of one stage."""
    stage = VirtualStage(layers=(0, problem.model.num_layers), recompute=Recompute(**recompute))
    return simulate(problem, Plan(layout=layout, virtual_stages=(stage,)))


@cache
def shipped_runs() -> dict[str, Run]:
    """Read the published runs that ship."""
    return {run.id: run for run in read_runs(None).runs}


@cache
def run_of(name: str, stacks: bool = True) -> Comparison:
    """Simulate a published run, with the constants fitted to its framework or those of the hardware alone."""
    return compare_run(shipped_runs()[name], stacks=stacks)


def measured_s(name: str) -> float:
    """Look up the measured step of a published run."""
    measured = shipped_runs()[name].measured.step_time_s
    assert measured is not None
    return measured


def of_run(what: str, source: str, name: str, error: float) -> Figure:
    """Compare a published run's step in seconds with the predicted one."""
    return Figure(f"{what}: step in s", source, measured_s(name), lambda: run_of(name).report.step_time_s, error)


def of_runs(what: str, source: str, base: str, other: str, error: float) -> Figure:
    """Compare the ratio of two published steps with that of the predicted ones."""
    return Figure(
        f"{what}: ratio of steps",
        source,
        measured_s(other) / measured_s(base),
        lambda: run_of(other).report.step_time_s / run_of(base).report.step_time_s,
        error,
    )


FORMAT_PAIRS = (
    ("bridge-25.09-pretrain-L607", "bridge-25.09-pretrain-L607b", "mxfp8", 0.02),
    ("bridge-25.11-pretrain-L565", "bridge-25.11-pretrain-L565b", "mxfp8", 0.02),
    ("bridge-25.11-pretrain-L552", "bridge-25.11-pretrain-L552b", "mxfp8", 0.02),
    ("bridge-25.09-pretrain-L619", "bridge-25.09-pretrain-L619b", "mxfp8", 0.02),
    ("bridge-25.11-pretrain-L579", "bridge-25.11-pretrain-L579b", "mxfp8", 0.02),
    ("bridge-25.09-pretrain-L611", "bridge-25.09-pretrain-L611b", "mxfp8", 0.06),
    ("bridge-25.09-pretrain-L622", "bridge-25.09-pretrain-L622b", "mxfp8", 0.07),
    ("bridge-26.02-pretrain-L499", "bridge-26.02-pretrain-L495", "nvfp4", 0.13),
    ("bridge-26.02.01-pretrain-L416", "bridge-26.02.01-pretrain-L412", "nvfp4", 0.1),
)
"""Runs of NVIDIA's performance summaries of Megatron-Bridge under one plan: fp8 with a scale a tensor, the other
format, and the error of the ratio of their steps. The first five fitted ``mxfp8``; no run fitted ``nvfp4``."""


def format_steps(base: str, precision: str) -> tuple[float, float]:
    """Predict the step of a published run in fp8 with a scale a tensor, and in another format."""
    stated = state(shipped_runs()[base], stacks=False)
    formats = ("fp8-tensorwise", precision)
    first, second = (
        simulate(with_job(stated.problem, precision=name), stated.plan).step_time_s for name in formats
    )
    return first, second


def of_formats(number: int) -> Figure:
    """Compare the ratio of steps in two formats, of one of ``FORMAT_PAIRS``."""
    base, other, precision, error = FORMAT_PAIRS[number]

    def ratio() -> float:
        first, second = format_steps(base, precision)
        return second / first

    ours = shipped_runs()[base].model.name
    return Figure(
        f"{precision} over fp8 with a scale a tensor, {ours}: ratio of steps",
        "Megatron-Bridge performance summary",
        measured_s(other) / measured_s(base),
        ratio,
        error,
    )


def moonlight() -> ModelSpec:
    """Moonlight-16B-A3B; source: config.json of moonshotai/Moonlight-16B-A3B on the hub."""
    attention: dict[str, Any] = {
        "type": "mla",
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
    }
    attention |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"type": "moe", "num_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 1408}
    dense = {"type": "dense", "intermediate_size": 11264}
    layers = [
        {"count": 1, "attention": attention, "mlp": dense},
        {"count": 26, "attention": attention, "mlp": experts | {"shared_intermediate_size": 2816}},
    ]
    fields = {"name": "moonlight", "hidden_size": 2048, "vocab_size": 163840, "max_position_embeddings": 8192}
    return ModelSpec.model_validate(fields | {"layers": layers})


def ling_mini() -> ModelSpec:
    """Ling-mini-2.0; source: inclusionAI/Ling-V2, examples/pretrain/run_pretrain_4k.sh."""
    attention: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    attention |= {"type": "gqa", "qk_norm": "per_head"}
    experts = {"type": "moe", "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512}
    dense = {"type": "dense", "intermediate_size": 5120}
    layers = [
        {"count": 1, "attention": attention, "mlp": dense},
        {"count": 19, "attention": attention, "mlp": experts | {"shared_intermediate_size": 512}},
    ]
    fields = {
        "name": "ling-mini-2.0",
        "hidden_size": 2048,
        "vocab_size": 157_184,
        "max_position_embeddings": 4096,
    }
    return ModelSpec.model_validate(fields | {"layers": layers})


def mtp_share() -> float:
    """Predict the step of Ling-mini-2.0 with a layer of multi-token prediction over that without."""
    problem = problem_of(ling_mini(), "dgx-h100", 8, 128, 4096, precision="fp8")
    layout = Layout(ep=8, dp=8, global_batch_size=128, zero_stage=1, **OVERLAPS)
    first, second = (
        step_of(case, layout, selective=20).step_time_s for case in (problem, with_job(problem, mtp_layers=1))
    )
    return second / first


def moonlight_step(modules: str | None) -> StepReport:
    """Simulate Moonlight on 8 H100 as Megatron-Bridge#5570 ran it, with a set of modules recomputed.

    Gradients and moments are in bf16. Source: NVIDIA-NeMo/Megatron-Bridge@600d069b,
    recipes/moonlight/h100/moonlight_16b.py.
    """
    hardware = load_hardware("dgx-h100")
    software = hardware.software.model_copy(update={"optimizer_state_bytes": 8})
    job = {"num_gpus": 8, "global_batch_size": 4, "sequence_length": 4096, "grad_dtype": "bf16"}
    problem = Problem(
        model=moonlight(),
        hardware=hardware.model_copy(update={"software": software}),
        job=Job.model_validate(job),
    )
    fields: dict[str, Any] = {"tp": 2, "dp": 4, "ep": 8, "sequence_parallel": True, "zero_stage": 1}
    layout = Layout(**fields, recompute_modules=modules or "default", global_batch_size=4, **OVERLAPS)
    return step_of(problem, layout, selective=27 if modules else 0)


def nemotron_step(modules: str | None) -> StepReport:
    """Simulate Nemotron 3 Nano on 16 H100 as Megatron-Bridge#5570 ran it, with a set of modules recomputed."""
    problem = problem_of("nemotron-3-nano", "dgx-h100", 16, 16, 8192)
    fields: dict[str, Any] = {"dp": 16, "ep": 8, "zero_stage": 1, "recompute_modules": modules or "default"}
    layers = problem.model.num_layers if modules else 0
    return step_of(problem, Layout(**fields, global_batch_size=16, **OVERLAPS), selective=layers)


def muon_share(gpus: int = 128, tp: int = 1) -> float:
    """Predict what Muon exposes over forward and backward of Moonlight on H800: 2,048 sequences of 8K tokens."""
    problem = problem_of(moonlight(), "h800", gpus, 2048, 8192, optimizer="muon")
    fields: dict[str, Any] = {"tp": tp, "dp": gpus // tp, "ep": 8, "sequence_parallel": tp > 1, "zero_stage": 1}
    parts = step_of(problem, Layout(global_batch_size=2048, **fields, **OVERLAPS)).breakdown_s
    spent = ("optimizer", "grad_norm", "param_gather_exposed", "grad_reduce_exposed")
    return sum(parts[name] for name in spent) / sum(
        parts[name] for name in ("compute", "tp_exposed", "ep_exposed")
    )


def muon_adds(model: ModelSpec, gpus: int, stages: tuple[int, ...], **fields: Any) -> float:
    """Predict the percentage that Muon adds to Adam's step, in mxfp8 on GB300; ``stages``: first layers of each.

    Muon's gathers of parameters do not overlap. Source: Megatron-Bridge, recipes/kimi/kimi_k2.py at v0.3.1.
    """
    ends = (*stages[1:], model.num_layers)
    chunks = tuple(VirtualStage(layers=layers) for layers in zip(stages, ends, strict=True))
    steps = []
    for optimizer in ("adam", "muon"):
        overlaps = OVERLAPS | {"overlap_param_gather": optimizer == "adam"}
        layout = Layout(zero_stage=1, **overlaps, **fields)
        job = {"optimizer": optimizer, "precision": "mxfp8"}
        problem = problem_of(model, "gb300-nvl72", gpus, layout.global_batch_size, 4096, **job)
        steps.append(simulate(problem, Plan(layout=layout, virtual_stages=chunks)).step_time_s)
    return 100 * (steps[1] / steps[0] - 1)


def muon_figures() -> tuple[Figure, ...]:
    """List the published times of Muon."""
    blog = "NVIDIA, Advancing Emerging Optimizers, table 1"
    kimi: dict[str, Any] = {"pp": 4, "vpp": 4, "dp": 64, "ep": 64, "schedule": "interleaved"}
    kimi |= {"micro_batch_size": 2, "global_batch_size": 4096}
    qwen = {"dp": 8, "ep": 8, "micro_batch_size": 8, "global_batch_size": 512}
    matrix = problem_of("llama3-8b", "gb300-nvl72", 8, 8, 4096)
    return (
        Figure(
            "Newton-Schulz of a matrix 12,288 x 10,240, GB300: ms",
            "NVIDIA/Megatron-LM#6683",
            23.4,
            lambda: 1000 * float(orthogonalization_s(matrix, 12288.0, 10240.0)),
            0.07,
        ),
        Figure(
            "Kimi-K2, 256 GB300: % that it adds to Adam's step",
            blog,
            100 * (1051 / 1029 - 1),
            lambda: muon_adds(load_model(CONFIGS / "kimi-k2.json"), 256, tuple(range(0, 61, 4)), **kimi),
            0.2,
        ),
        Figure(
            "Qwen3-30B-A3B, 8 GB300: % that it adds to Adam's step, 1,500 small matrices that wait for launches",
            blog,
            100 * (713 / 686 - 1),
            lambda: muon_adds(load_model("qwen3-30b-a3b"), 8, (0,), **qwen),
            0.35,
        ),
        Figure(
            "Moonlight, % of forward and backward that the optimizer takes",
            "Liu et al. 2025, section 2.3",
            1.0,
            lambda: 100 * muon_share(),
            0.0,
            most=3.0,
        ),
    )


DEEPEP = ((2, 8192, 90e9), (4, 8192, 61e9), (8, 4096, 51e9))
"""Nodes of 8 Hopper GPUs, tokens of a rank, and measured bytes/s that reach nodes. Source:
deepseek-ai/DeepEP@0297fc80 README (90 and 61 GB/s) and docs/legacy.md (51 GB/s on 64 ranks)."""


def deepep_rate(nodes: int, tokens: int) -> tuple[float, float]:
    """Predict a dispatch of tokens of 7,168 bytes (fp8) to 8 experts each over nodes of 8 H100, or on 8 H800.

    Returns:
        Bytes that reach nodes (on one node: ranks), the own one included, a second; and the time of an all-to-all
        over DeepEP's.
    """
    hardware, places = load_hardware("dgx-h100" if nodes > 1 else "h800"), nodes if nodes > 1 else 8
    once, every = (
        float(collectives.all_to_all_s(hardware, 8.0 * tokens * 7168, 8 * nodes, 1, copies))
        for copies in (8.0, None)
    )
    reached = tokens * 7168 * places * (1 - (1 - 1 / places) ** 8)
    return reached / once, every / once


def moments_bytes() -> float:
    """Predict the bytes of Adam's moments of Qwen3-30B-A3B on a GPU: TP 2, PP 2, EP 4 on 16 H100.

    A layout's optimizer states are 12 bytes a parameter, of which 8 are moments; the mean over both stages.
    """
    problem = problem_of("qwen3-30b-a3b", "dgx-h100", 16, 32, 4096)
    fields: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "ep": 4, "sequence_parallel": True, "zero_stage": 1}
    layers = problem.model.num_layers // 2
    stages = tuple(VirtualStage(layers=(n * layers, (n + 1) * layers)) for n in range(2))
    report = simulate(problem, Plan(layout=Layout(**fields, global_batch_size=32), virtual_stages=stages))
    return 8 / 12 * float(np.mean([stage.memory.optimizer_bytes for stage in report.stages]))


NOT_FOUND = "no published number found"
EXCHANGE = CORE + "test_exchange_of_heads_is_that_of_brute_force"
DISPATCH = CORE + "test_dispatch_is_that_of_brute_force"
FORMATS = "tests/training/test_quantization.py::test_optimum_is_that_of_brute_force"


def communication_parts() -> tuple[Part, ...]:
    """List the switches of context, expert and data parallelism."""
    ring = problem_of("mixtral-8x7b", "dgx-h100", 64, 16, 131_072)
    both = problem_of("llama3-8b", "l40s", 64, 16, 65_536, cp=(16,), ulysses=(1, 16))
    seen = {"vision_tokens": 98_304, "image_tokens": 2048}
    images = problem_of("qwen3-vl-235b", "dgx-h200", 256, 256, 131_072, **seen)
    torchtitan = restrict(problem_of("llama3-8b", "dgx-h100", 128, 1024, 8192), "torchtitan")
    experts = problem_of("deepseek-v3", "dgx-h100", 1024, 8192, 4096, ep=(32, 64), expert_dispatch=("alltoall",))
    deep = problem_of("deepseek-v3", "dgx-h100", 1024, 8192, 4096)
    tied = problem_of("mixtral-8x22b", "dgx-h100", 64, 256, 4096, tp=(4,), etp=(4,))
    simumax = "simumax-b200-llama3_405b_l4_tp2_cp4_pp1_dp1_seq131072_mbc4_cef"
    return (
        Part(
            "Ulysses beside the ring",
            (
                of_run(
                    "Llama-3.1 405B (4 layers), 131,072 tokens, cp 4 by all-to-alls, 8 B200",
                    "SimuMax",
                    simumax,
                    0.06,
                ),
            ),
            "",
            opened("Mixtral 8x7B, 64 H100, 16 x 131,072", ring, ulysses=None),
            EXCHANGE,
        ),
        Part(
            "hierarchical context parallelism",
            (),
            NOT_FOUND,
            opened("Llama-3 8B, 64 L40S, 16 x 65,536, cp 16", both, ulysses=None),
            EXCHANGE,
        ),
        Part(
            "HSDP",
            (of_run("InternLM 7B, 1,024 A800, shards over 8", "InternEvo", "internevo-tgs-tp1-z8-1024", 0.03),),
            "",
            opened(
                "Llama-3 8B, 1,024 H100, 1,024 x 8,192",
                problem_of("llama3-8b", "dgx-h100", 1024, 1024, 8192),
                dp_replicate=None,
            ),
            CORE + "test_hybrid_sharding_is_that_of_brute_force",
        ),
        Part(
            "images shared by context-parallel ranks",
            (),
            NOT_FOUND,
            opened(
                "Qwen3-VL-235B, 256 H200, 256 x 131,072, of which 98,304 of images of 2,048",
                images,
                vision_data_parallel=(False, True),
            ),
            "tests/training/test_vision.py::test_optimum_with_images_is_that_of_brute_force",
        ),
        Part(
            "ZeRO 3 with kept weights",
            (),
            "none with its number of GPUs (torchtune#2402: 8 %)",
            opened("Llama-3 8B, 128 H100, 1,024 x 8,192, torchtitan", torchtitan, keep_weights=(False, True)),
            CORE + "test_kept_weights_are_those_of_brute_force",
        ),
        Part(
            "dispatch by all-gather, all-to-all, DeepEP",
            (
                *(
                    Figure(
                        f"bytes/s to nodes, {nodes} nodes of 8 Hopper GPUs",
                        "deepseek-ai/DeepEP",
                        rate,
                        lambda nodes=nodes, tokens=tokens: deepep_rate(nodes, tokens)[0],
                        0.05,
                    )
                    for nodes, tokens, rate in DEEPEP
                ),
                Figure(
                    "bytes/s to ranks, 8 H800 of a node, where a copy an expert is priced",
                    "deepseek-ai/DeepEP, docs/legacy.md",
                    153e9,
                    lambda: deepep_rate(1, 4096)[0],
                    0.36,
                ),
            ),
            "",
            opened(
                "DeepSeek-V3, 1,024 H100, 8,192 x 4,096, ep 32 or 64", experts, expert_dispatch=EXPERT_DISPATCHES
            ),
            DISPATCH,
        ),
        Part(
            "overlap of dispatch (`dualpipe-v`)",
            (
                of_runs(
                    "Qwen3 30B, 16 H100, overlap with another micro-batch or none",
                    "Megatron-Bridge",
                    "bridge-skill-qwen30b-3",
                    "bridge-skill-qwen30b-4",
                    0.07,
                ),
            ),
            "",
            opened(
                "DeepSeek-V3, 1,024 H100, 8,192 x 4,096",
                deep,
                schedule=("1f1b", "interleaved", "dualpipe-v"),
            ),
            "tests/optimize/test_dualpipe.py::test_optimum_is_that_of_brute_force",
        ),
        Part(
            "expert tensor parallelism (etp) apart from tp",
            (of_run("Grok-1, 1,024 H100, tp 4, etp 4", "NVIDIA DGXC", "dgxc-v24.11.1-grok1_314b-L66-1024", 0.02),),
            "",
            opened("Mixtral 8x22B, 64 H100, 256 x 4,096, tp 4", tied, etp=None),
            "tests/optimize/test_optimality.py::test_optimum_is_that_of_brute_force",
        ),
    )


def memory_parts() -> tuple[Part, ...]:
    """List the switches of recomputation and offloading."""
    plain, act = moonlight_step(None), moonlight_step("moe_act")
    bridge = "Megatron-Bridge#5570"
    mixtral = problem_of("mixtral-8x22b", "dgx-h100", 128, 512, 8192)
    gb200 = problem_of("llama3-70b", "gb200-nvl72", 32, 64, 32_768)
    small = problem_of("llama3-70b", "dgx-h100", 16, 32, 8192)
    return (
        Part(
            "recompute modules",
            (
                Figure(
                    "Nemotron 3 Nano, 16 H100, `moe_act`: GB saved",
                    bridge,
                    4.194,
                    lambda: (
                        (nemotron_step(None).peak_memory_bytes - nemotron_step("moe_act").peak_memory_bytes) / 1e9
                    ),
                    0.05,
                ),
                Figure("Moonlight, 8 H100: GB", bridge, 36.618, lambda: plain.peak_memory_bytes / 1e9, 0.03),
                Figure(
                    "Moonlight, 8 H100, `moe_act`: GB", bridge, 35.941, lambda: act.peak_memory_bytes / 1e9, 0.02
                ),
                Figure(
                    "Moonlight, 8 H100, `moe_act`: GB saved",
                    f"{bridge}, where another moment becomes the peak",
                    0.677,
                    lambda: (plain.peak_memory_bytes - act.peak_memory_bytes) / 1e9,
                    0.3,
                ),
                Figure(
                    "Moonlight, 8 H100, `moe_act`: % of the step",
                    f"{bridge}, a run that waits for its host",
                    1.99,
                    lambda: 100 * (act.step_time_s / plain.step_time_s - 1),
                    1.0,
                ),
            ),
            "",
            opened("Mixtral 8x22B, 128 H100, 512 x 8,192", mixtral, recompute_modules=None),
            "tests/training/test_recompute_modules.py::test_optimum_is_that_of_brute_force",
        ),
        Part(
            "activations on the host",
            (),
            NOT_FOUND,
            opened("Llama-3 70B, 32 GB200, 64 x 32,768", gb200, offload_activations=(False, True)),
            CORE + "test_optimum_is_that_of_brute_force",
        ),
        Part(
            "activations on the host by module",
            (),
            NOT_FOUND,
            opened("Llama-3 70B, 32 GB200, 64 x 32,768", gb200, offload_modules=None),
            "tests/training/test_offload_modules.py::test_optimum_is_that_of_brute_force",
        ),
        Part(
            "optimizer states on the host",
            (
                Figure(
                    "Qwen3 30B, tp 2, pp 2, ep 4, 16 H100: GB of moments",
                    "Megatron-Bridge, docs/training/cpu-offloading.md; Adam on the CPU is not priced",
                    15.3,
                    lambda: moments_bytes() / 1e9,
                    0.02,
                ),
            ),
            "",
            opened("Llama-3 70B, 16 H100, 32 x 8,192", small, offload_optimizer=(False, True)),
            CORE + "test_optimum_is_that_of_brute_force",
        ),
    )


def job_parts() -> tuple[Part, ...]:
    """List the optimizer, the number formats and what else a job may have."""
    dense = problem_of("llama3-70b", "dgx-h100", 128, 128, 8192, zero_stage=(0, 1))
    blackwell = problem_of("llama3-70b", "gb200-nvl72", 64, 128, 8192)
    deep = problem_of("deepseek-v3", "dgx-h100", 1024, 8192, 4096)
    h100 = problem_of("llama3-70b", "dgx-h100", 64, 128, 8192)

    def formats(name: str, base: Problem, precision: str, where: str, *figures: Figure) -> Part:
        words = f"Llama-3 70B, 64 {where}, 128 x 8,192, bf16 without"
        price = Price(words, with_job(base, precision=precision), base)
        return Part(name, figures, NOT_FOUND, price, FORMATS)

    grok = ("dgxc-v24.11.1-grok1_314b-L66-1024", "dgxc-v24.11.1-grok1_314b-L73-1024")
    return (
        formats(
            "fp8, delayed scaling",
            h100,
            "fp8",
            "H100",
            of_runs("fp8 over bf16, Grok-1, 1,024 H100", "NVIDIA DGXC", *grok, 0.04),
        ),
        formats("fp8, blockwise", h100, "fp8-blockwise", "H100"),
        formats("MXFP8", blackwell, "mxfp8", "GB200", of_formats(5)),
        formats("NVFP4", blackwell, "nvfp4", "GB200", of_formats(8)),
        Part(
            "Muon",
            muon_figures(),
            "",
            ignored("Llama-3 70B, 128 H100, 128 x 8,192, ZeRO 0 or 1, planned for Adam", dense, optimizer="muon"),
            "tests/training/test_muon.py::test_optimum_is_that_of_brute_force",
        ),
        Part(
            "multi-token prediction",
            (
                Figure(
                    "Ling-mini-2.0, 8 GPUs: step with the layer over without",
                    "inclusionAI/Ling-V2",
                    128_298 / 109_532,
                    mtp_share,
                    0.01,
                ),
            ),
            "",
            ignored("DeepSeek-V3, 1,024 H100, 8,192 x 4,096, planned without", deep, mtp_layers=1),
            "tests/training/test_mtp.py::test_optimum_is_that_of_brute_force",
        ),
        Part(
            "imbalance of experts",
            (),
            NOT_FOUND,
            ignored("DeepSeek-V3, 1,024 H100, 8,192 x 4,096, 1.5, planned even", deep, expert_imbalance=1.5),
            "tests/training/test_imbalance.py::test_optimum_is_that_of_brute_force",
        ),
    )


def all_parts() -> tuple[Part, ...]:
    """List all switches and parts in the order of the table."""
    return (*communication_parts(), *memory_parts(), *job_parts())


FIGURE_HEADER = ("switch", "published number (source)", "measured", "milpplan", "error")
PRICE_HEADER = ("switch", "problem", "with", "without", "price of not having it")
TEST_HEADER = ("switch", "brute force")


def tables(chosen: tuple[Part, ...]) -> dict[str, str]:
    """Write the sections of the results page."""
    figures: list[tuple[str, ...]] = []
    for part in chosen:
        figures += [(part.name, *figure.row()) for figure in part.figures]
        figures += [(part.name, part.none, "", "", "")] if not part.figures else []
    return {
        "numbers": markdown_table(FIGURE_HEADER, figures),
        "prices": markdown_table(PRICE_HEADER, [(part.name, *part.price.cells()) for part in chosen]),
        "tests": markdown_table(TEST_HEADER, [(part.name, f"`{part.test}`") for part in chosen]),
    }


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    for name, table in tables(all_parts()).items():
        print(table)
        if asked.write:
            replace_section(RESULTS, name, table)


if __name__ == "__main__":
    main()
