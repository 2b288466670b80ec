"""torchtitan's rules, restated: runs that its configuration, its meshes or PyTorch's schedules refuse.

Each rule has a name, its source and a function that describes the violation, if there is one. Sources are in
pytorch/torchtitan at b5bcd76c, or at 0.2.2 where stated; S is PyTorch's distributed/pipelining/schedules.py
(2.13). ``TORCHTITAN`` declares the layouts that torchtitan can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError
from milpplan.launchers.capabilities import (
    NO_STREAMS,
    NO_TILES,
    ONE_F_ONE_B,
    WHOLE_NODES,
    Capability,
    Columns,
    Limit,
    RowRule,
    own_orders,
    piped_states,
    whole_kv_heads,
    whole_words,
)
from milpplan.launchers.torchtitan.run import V022, Run, flavors
from milpplan.problem.model import GroupedQueryAttention, LatentAttention
from milpplan.problem.problem import Problem

NO_PIPELINE_022 = ("qwen3", "gpt_oss")
"""Models whose ``pipelining_fn`` is None in 0.2.2 (models/*/__init__.py, train.py:255)."""

Check = Callable[[Run], str]


def _experts(run: Run) -> str:
    if not run.experts:
        return f"ep={run.ep} and no experts" if run.ep > 1 else ""
    if run.ep > 1 and run.version == V022 and run.etp not in (1, run.tp):
        return f"etp={run.etp} is neither 1 nor tp={run.tp}"
    ranks = run.shard * run.cp * run.tp
    if run.ep > 1 and ranks % (run.ep * run.etp):
        return f"ep * etp = {run.ep * run.etp} does not divide dp_shard * cp * tp = {ranks}"
    return ""


def _sequence(run: Run) -> str:
    divisor = (run.tp if run.sequence_parallel else 1) * (2 * run.cp if run.cp > 1 else 1)
    tokens = run.sequence_length * (1 if run.version == V022 else run.micro_batch_size)
    return f"{tokens} tokens are no multiple of {divisor}" if tokens % divisor else ""


def _heads(run: Run) -> str:
    for kind in flavors()[run.flavor].kinds:
        attention = kind.attention
        counts = [attention.num_attention_heads]
        if isinstance(attention, GroupedQueryAttention):
            counts.append(attention.num_key_value_heads)
        for count in counts:
            if count % run.tp:
                return f"{count} heads over tp={run.tp}"
    return ""


def _widths(run: Run) -> str:
    spec = flavors()[run.flavor]
    for kind in spec.kinds:
        width, by = kind.mlp.intermediate_size, run.tp
        if kind.mlp.type == "moe":
            by = run.expert_tensor
            if run.ep > 1 and kind.mlp.num_experts % run.ep:
                return f"{kind.mlp.num_experts} experts over ep={run.ep}"
        if width % by:
            return f"a width of {width} over {by} ranks"
    return f"{spec.vocab_size} words over tp={run.tp}" if spec.vocab_size % run.tp else ""


def _stages(run: Run) -> str:
    count, layers = len(run.stages), flavors()[run.flavor].num_layers
    if sum(run.stages) != layers:
        return f"the stages hold {sum(run.stages)} layers of {layers}"
    if any(size == 0 for size in run.stages[1:-1]):
        return "a stage between the first and the last holds no layer"
    if run.pp == 1:
        return "" if count == 1 else f"{count} stages without a pipeline"
    if count % run.pp:
        return f"{count} stages are no multiple of pp={run.pp}"
    single = run.schedule in ("1F1B", "GPipe")
    if single != (count == run.pp):
        return f"{run.schedule} with {count // run.pp} stage(s) a rank"
    return ""


def _micro_batches(run: Run) -> str:
    if run.pp == 1:
        return ""
    if run.schedule == "1F1B" and run.micro_batches < run.pp:
        return f"{run.micro_batches} micro-batches are fewer than {run.pp} stages"
    rounds = max(1, run.micro_batches // run.pp)
    if run.schedule == "Interleaved1F1B" and run.micro_batches % rounds:
        return f"{run.micro_batches} micro-batches are no multiple of {rounds} rounds"
    return ""


def _number_format(run: Run) -> str:
    """Check the number format. In 0.2.2 only FSDP or, on unsharded replicas, autocast gives bf16."""
    if run.version != V022 or run.shard * run.cp > 1 or run.tp * run.pp * run.ep == 1:
        return ""
    return f"tp={run.tp}, pp={run.pp} without sharded replicas computes in fp32"


def _replicas(run: Run) -> str:
    parts = run.version == V022 and run.shard * run.cp == 1 and run.replicate > 1 and run.tp * run.pp > 1
    return "replicas that are not sharded, beside another parallelism" if parts else ""


def _pipelines(run: Run) -> str:
    lacks = run.version == V022 and run.pp > 1 and run.flavor[0] in NO_PIPELINE_022
    return f"{run.flavor[0]} has no pipeline in {V022}" if lacks else ""


def _dispatcher(run: Run) -> str:
    if run.version != V022 or not run.deduplicated or (run.flavor[0] == "deepseek_v3" and run.etp == 1):
        return ""
    return f"deepep with {run.flavor[0]} and etp={run.etp} (software.deduplicated_dispatch = true)"


def _latent(run: Run) -> str:
    latent = any(isinstance(kind.attention, LatentAttention) for kind in flavors()[run.flavor].kinds)
    return "FlexAttention of deepseek_v3 with context parallelism" if latent and run.cp > 1 else ""


RULES: Mapping[str, tuple[str, Check]] = {
    "experts_divide": ("distributed/parallel_dims.py:187-192, 0.2.2: :63-64", _experts),
    "sequence_divides": ("trainer.py:296-309, 0.2.2: models/llama3/infra/parallelize.py:67", _sequence),
    "heads_divide": ("models/common/attention.py: heads of a rank are whole", _heads),
    "widths_divide": ("torch DTensor shards of products are even here", _widths),
    "stages": ("distributed/pipeline_parallel.py:233-254", _stages),
    "micro_batches": ("S: Schedule1F1B and ScheduleInterleaved1F1B", _micro_batches),
    "mixed_precision_needs_fsdp": ("0.2.2: distributed/utils.py, maybe_enable_amp", _number_format),
    "replicas_stand_alone": ("0.2.2: models/llama3/infra/parallelize.py, DDP has not supported > 1D", _replicas),
    "model_has_pipeline": ("0.2.2: train.py, does not support pipelining", _pipelines),
    "deepep_has_the_model": ("0.2.2: models/deepseek_v3/infra/parallelize.py:99-113 alone", _dispatcher),
    "flex_attention_is_not_split": ("0.2.2: models/*/infra/parallelize.py", _latent),
}
"""Rules by name, with source and check."""


def broken_rules(run: Run) -> dict[str, str]:
    """List the rules that a run breaks, with descriptions."""
    violations = {name: check(run) for name, (_, check) in RULES.items()}
    return {name: text for name, text in violations.items() if text}


def check_rules(run: Run, do: str) -> None:
    """Raise an error for the rules that a run breaks.

    Raises:
        IllegalPlanError: names the rules, their sources and the violations.
    """
    broken = broken_rules(run)
    if broken:
        texts = "; ".join(f"rule {name} ({RULES[name][0]}): {text}" for name, text in broken.items())
        raise IllegalPlanError(
            f"torchtitan {run.version} refuses it, {texts}.", "Expected settings that its own checks admit.", do
        )


def titan_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that torchtitan can produce.

    Unlike in ``piped_states``, unsharded replicas reduce gradients in every micro-batch, and after a pipeline.
    """
    several, stage, piped = c["cp"] * c["dp"] > 1, c["zero_stage"], c["pp"] > 1
    once = c["num_micro_batches"] == 1
    late = (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    unsharded = np.where(piped, late, once & (c["overlap_grad_reduce"] == 1))
    # Experts are sharded only over sharded replicas (distributed/parallel_dims.py:187-192).
    unsharded &= (c["tp"] * c["cp"]) % (c["ep"] * c["etp"]) == 0
    if problem.space.target_version == V022:
        unsharded &= c["tp"] * c["pp"] * c["ep"] == 1
        alone = c["tp"] * c["pp"] * c["ep"] == 1
    else:
        alone = np.ones(len(stage), dtype=np.bool_)
    keeps = np.where(stage == 0, unsharded, piped_states(problem, c))
    return np.asarray(np.where(several, keeps, (stage == 0) & alone))


def titan_experts(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require expert parallelism that torchtitan supports.

    Without expert parallelism tp shards the experts. With it, experts are on one tp rank, or up to 0.2.2 also over
    tp.
    """
    if not problem.model.has_experts:
        return np.ones(len(c["tp"]), dtype=np.bool_)
    whole = c["etp"] == 1
    if problem.space.target_version == V022:
        whole |= c["etp"] == c["tp"]
        if problem.hardware.software.deduplicated_dispatch:
            # Its DeepEP dispatcher supports one model and whole experts only.
            whole &= c["ep"] == 1
    return np.asarray(np.where(c["ep"] == 1, c["etp"] == c["tp"], whole))


def titan_sequences(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require gathered inputs to be kept under sequence parallelism, which up to 0.2.2 always comes with tp."""
    again = c["gather_again"] if "gather_again" in c else np.ones(len(c["tp"]), dtype=np.int64)
    keeps = (c["sequence_parallel"] == 1) == (again == 0)
    if problem.space.target_version == V022:
        keeps &= (c["tp"] == 1) | (c["sequence_parallel"] == 1)
    return np.asarray(keeps)


def titan_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require pipelines that torchtitan can run.

    1F1B needs at least as many micro-batches as stages. Up to 0.2.2 only dense models and DeepSeek's have a
    pipeline.
    """
    enough = (c["pp"] == 1) | (c["schedule"] != ONE_F_ONE_B) | (c["num_micro_batches"] >= c["pp"])
    if problem.space.target_version == V022:
        enough &= c["pp"] == 1
    return np.asarray(enough)


TORCHTITAN = Capability(
    name="torchtitan",
    versions=("b5bcd76c", "0.3.0", "0.2.2"),
    limits={
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "its zero-bubble schedules fail on the mask of FlexAttention and are off in its own tests "
            "(tests/integration_tests/features.py:129)",
        ),
        "tp_overlap": Limit(("none",), NO_TILES),
        "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
        "offload_weights": Limit((False,), NO_STREAMS),
        "offload_activations": Limit((False,), NO_STREAMS),
        "offload_optimizer": Limit((False,), f"{NO_STREAMS} (enable_cpu_offload updates on the processor)"),
    },
    rules={
        **WHOLE_NODES,
        "whole_key_value_heads": RowRule(whole_kv_heads, "heads of a rank are whole"),
        "whole_words": RowRule(whole_words, "DTensor shards of the vocabulary are even here"),
        "experts": RowRule(titan_experts, "experts are cut over tp without ep, with it over one rank"),
        "sequences": RowRule(titan_sequences, "with sequence parallelism gathered inputs are kept"),
        "pipelines": RowRule(titan_pipelines, "1F1B wants as many micro-batches as stages"),
        "states": RowRule(titan_states, "fully_shard decides what is sharded and when", shards=True),
    },
    more_limits=own_orders,
    complete=True,
)
