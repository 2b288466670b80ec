"""Run of torchtitan in one form for its three dialects, and the plan of such a run.

Sharding, from pytorch/torchtitan at 0.2.2, 0.3.0 and b5bcd76c (models/llama3/infra/parallelize.py, later
distributed/fsdp.py) and PyTorch (distributed/pipelining/stage.py, ``perform_backward``):

- without a pipeline ``fully_shard`` gathers weights for every forward and reduces gradients after every backward,
  of each micro-batch. ``fsdp_reshard_after_forward`` ``always`` frees and gathers again between the two: ZeRO 3.
  ``never`` keeps them until the backward is over: ZeRO 2 if there is one micro-batch per step, else ZeRO 3 with
  ``keep_weights``.
- with a pipeline it neither reshards nor reduces before the last micro-batch, and reduces after it: ZeRO 1 without
  overlap, where nothing is resharded after the forward (``never``, the default with a pipeline).

Models have names and flavors. Source of their sizes:
torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/__init__.py of 0.2.2, 0.3.0 and b5bcd76c, which agree on them.

**Rules** of torchtitan, restated: runs that its configuration, its meshes or PyTorch's schedules refuse.

Each rule has a name, its source and a function that describes the violation, if there is one. Sources are in
pytorch/torchtitan at b5bcd76c, or at 0.2.2 where stated; S is PyTorch's distributed/pipelining/schedules.py
(2.13). ``TORCHTITAN`` declares the layouts that torchtitan can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.launchers.capabilities import (
    NO_STREAMS,
    ONE_F_ONE_B,
    Columns,
    Limit,
    Mode,
    RowRule,
    config_capability,
    piped_states,
    whole_kv_heads,
    whole_words,
)
from milpplan.launchers.expressible import Rules, model_differences
from milpplan.problem import (
    NO_MODULES,
    GroupedQueryAttention,
    LatentAttention,
    Layout,
    ModelSpec,
    NoBlock,
    Plan,
    Problem,
    validated,
)

Pair = tuple[str, str]

_LLAMA = {"8B": (4096, 32, 32, 14336), "70B": (8192, 80, 64, 28672), "405B": (16384, 126, 128, 53248)}
"""Flavor to width, layers, heads and feed-forward width; 8 heads of keys and values, 128,256 words."""
_QWEN = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}
"""Flavor to width, layers, heads, heads of keys and values, feed-forward width, and tied embeddings."""
_QWEN_MOE = {"30B-A3B": (2048, 48, 32, 4, 768), "235B-A22B": (4096, 94, 64, 4, 1536)}
"""Flavor to width, layers, heads, heads of keys and values, and width of one of 128 experts, 8 a token."""
_DEEPSEEK = {
    "16B": (102400, 2048, 27, 1, 16, None, 10944, 64, 6, 1408, 2),
    "236B": (102400, 5120, 60, 1, 128, 1536, 12288, 160, 6, 1536, 2),
    "671B": (129280, 7168, 61, 3, 128, 1536, 18432, 256, 8, 2048, 1),
}
"""Flavor to words, width, layers, dense layers, heads, rank of queries, dense width, experts, experts a token,
width of an expert, and shared experts."""
_GPT_OSS = {"20b": (24, 32), "120b": (36, 128)}
"""Flavor to layers and experts."""


def _spec(
    name: str, flavor: str, hidden: int, words: int, layers: list[dict[str, Any]], tied: bool = False
) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": f"{name}-{flavor}",
            "hidden_size": hidden,
            "vocab_size": words,
            "max_position_embeddings": 131072,
            "layers": layers,
            "tie_word_embeddings": tied,
        }
    )


def _grouped(heads: int, groups: int, **more: Any) -> dict[str, Any]:
    return {"type": "gqa", "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 128} | more


def _dense(width: int) -> dict[str, Any]:
    return {"type": "dense", "intermediate_size": width}


def _experts(number: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_experts": number, "num_experts_per_tok": chosen, "intermediate_size": width}
    return {"type": "moe"} | sizes | more


def _deepseek(flavor: str) -> ModelSpec:
    words, hidden, layers, dense, heads, rank, width, number, chosen, expert, shared = _DEEPSEEK[flavor]
    attention = {
        "type": "mla",
        "num_attention_heads": heads,
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = _experts(number, chosen, expert, shared_intermediate_size=shared * expert)
    runs = [
        {"count": dense, "attention": attention, "mlp": _dense(width)},
        {"count": layers - dense, "attention": attention, "mlp": experts},
    ]
    return _spec("deepseek_v3", flavor, hidden, words, runs)


def _gpt_oss(flavor: str) -> ModelSpec:
    layers, number = _GPT_OSS[flavor]
    full = _grouped(64, 8, head_dim=64, qkv_bias=True, output_bias=True, sinks=True)
    mlp = _experts(number, 4, 2880, bias=True, router_bias=True)
    pair = [{"count": 1, "attention": full | {"sliding_window": 128}, "mlp": mlp}]
    pair += [{"count": 1, "attention": full, "mlp": mlp}]
    return _spec("gpt_oss", flavor, 2880, 201088, pair * (layers // 2))


@cache
def flavors() -> dict[Pair, ModelSpec]:
    """Return every name and flavor with its model."""
    models: dict[Pair, ModelSpec] = {}
    for flavor, (hidden, layers, heads, width) in _LLAMA.items():
        run = {"count": layers, "attention": _grouped(heads, 8), "mlp": _dense(width)}
        models["llama3", flavor] = _spec("llama3", flavor, hidden, 128256, [run])
    for flavor, (hidden, layers, heads, groups, width, tied) in _QWEN.items():
        run = {"count": layers, "attention": _grouped(heads, groups, qk_norm="per_head"), "mlp": _dense(width)}
        models["qwen3", flavor] = _spec("qwen3", flavor, hidden, 151936, [run], tied)
    for flavor, (hidden, layers, heads, groups, width) in _QWEN_MOE.items():
        attention = _grouped(heads, groups, qk_norm="per_head")
        run = {"count": layers, "attention": attention, "mlp": _experts(128, 8, width)}
        models["qwen3", flavor] = _spec("qwen3", flavor, hidden, 151936, [run])
    models |= {("deepseek_v3", flavor): _deepseek(flavor) for flavor in _DEEPSEEK}
    return models | {("gpt_oss", flavor): _gpt_oss(flavor) for flavor in _GPT_OSS}


def flavor_of(model: ModelSpec) -> Pair | None:
    """Find the name and flavor of a model, if torchtitan has it."""
    return next((pair for pair, spec in flavors().items() if not model_differences(model, spec)), None)


NEWEST, V030, V022 = "b5bcd76c", "0.3.0", "0.2.2"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""PyTorch's names of the schedules (distributed/pipelining/schedules.py, ``get_schedule_class``)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run that a configuration describes.

    ``replicate`` and ``shard`` are data_parallel_*_degree. ``stages`` holds the layers of every virtual stage in
    model order. A step of the optimizer takes ``accumulations`` runs of ``micro_batches`` micro-batches.
    ``recompute`` is the mode of every layer.
    """

    version: str
    flavor: Pair
    experts: bool
    sequence_length: int
    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    etp: int
    sequence_parallel: bool
    schedule: str
    stages: tuple[int, ...]
    micro_batch_size: int
    micro_batches: int
    accumulations: int
    reshard: str
    recompute: Mode
    deduplicated: bool

    @property
    def dp(self) -> int:
        """Number of replicas, sharded or not."""
        return self.replicate * self.shard

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.micro_batch_size * self.micro_batches * self.accumulations * self.dp

    @property
    def expert_tensor(self) -> int:
        """Number of ranks that share the tensors of an expert: without expert parallelism those of ``tp``
        (models/common/moe_sharding.py, 0.2.2: distributed/expert_parallel.py)."""
        if not self.experts:
            return 1
        return self.etp if self.ep > 1 else self.tp


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding and overlap of a run. ``loss`` describes a difference between the run and the plan; ``keeps`` is
    ``Layout.keep_weights``."""

    zero_stage: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    why: str
    loss: str = ""
    keeps: bool = False


def sharding_of(run: Run) -> Sharding:
    """Determine the ZeRO stage of a run, by the rules in the module's docstring."""
    once = run.accumulations * (1 if run.pp > 1 else run.micro_batches) == 1
    if run.dp * run.cp == 1:
        return Sharding(0, False, False, "there is one replica")
    if run.shard * run.cp == 1:
        why = "data_parallel_replicate_degree alone replicates everything"
        if run.pp > 1:
            return Sharding(0, False, False, f"{why}, and gradients are reduced after the pipeline has run")
        loss = "" if once else "replicas reduce gradients in every micro-batch, a plan at ZeRO 0 once a step"
        return Sharding(0, True, False, f"{why}, and reduces gradients beside the backward", loss)
    if run.pp > 1:
        why = (
            "fully_shard under a pipeline keeps weights and gradients whole until all micro-batches have run, and "
        )
        why += "reduces after them: ZeRO 1 without overlap"
        reshards = (
            "weights that are gathered again for every micro-batch of a pipeline, with whole gradients, are "
        )
        reshards += "no ZeRO stage (fsdp_reshard_after_forward always)"
        return Sharding(1, False, False, why, reshards if run.reshard == "always" else "")
    if run.reshard == "never":
        why = "fully_shard without resharding after the forward is ZeRO 2 with one micro-batch a step"
        if once:
            return Sharding(2, True, True, why)
        return Sharding(3, True, True, f"{why}, else ZeRO 3 with weights that stay until the backward", keeps=True)
    return Sharding(3, True, True, "fully_shard gathers weights beside forward and backward: ZeRO 3")


def plan_losses(run: Run) -> list[str]:
    """List properties of a run that a plan cannot express; empty where ``plan_of_run`` describes the whole run."""
    losses = [sharding_of(run).loss]
    if run.cp > 1:
        losses.append("context parallelism gathers keys and values, and what is priced is a ring")
    if run.pp > 1 and run.accumulations > 1:
        losses.append("the pipeline runs several times a step (gradient accumulation), a plan's runs once")
    if run.schedule not in SCHEDULES.values():
        losses.append(f"schedule {run.schedule} is none of {', '.join(SCHEDULES.values())}")
    return [text for text in losses if text]


def layout_of_run(run: Run) -> Layout:
    """Build the layout of a run, as far as a layout can express it."""
    sharding = sharding_of(run)
    schedule = {name: word for word, name in SCHEDULES.items()}.get(run.schedule, "1f1b")
    sequence_parallel = run.sequence_parallel and run.tp > 1
    data: dict[str, Any] = {
        "tp": run.tp,
        "cp": run.cp,
        "ep": run.ep if run.experts else 1,
        "etp": run.expert_tensor,
        "pp": run.pp,
        "dp": run.dp,
        "vpp": len(run.stages) // run.pp,
        "micro_batch_size": run.micro_batch_size,
        "global_batch_size": run.global_batch_size,
        "sequence_parallel": sequence_parallel,
        "zero_stage": sharding.zero_stage,
        "dp_replicate": run.replicate if sharding.zero_stage else 1,
        "keep_weights": sharding.keeps,
        "schedule": schedule if run.pp > 1 else "1f1b",
        "overlap_grad_reduce": sharding.overlap_grad_reduce,
        "overlap_param_gather": sharding.overlap_param_gather,
        # Autograd keeps the gathered input of a product.
        "gather_again": not sequence_parallel,
    }
    return validated(Layout, data, "the layout that the configuration describes")


def plan_of_run(run: Run) -> Plan:
    """Build the plan of a run.

    Raises:
        InvalidInputError: no plan can express the run.
    """
    losses = plan_losses(run)
    if losses:
        raise InvalidInputError(
            f"The run is not one that is priced: {'; '.join(losses)}.",
            "Expected a run that a plan can tell without loss.",
            "Change the settings to compare it as the nearest run that is.",
        )
    spans = pairwise(accumulate(run.stages, initial=0))
    stages = [
        {"layers": list(span), "recompute": {} if run.recompute == "none" else {run.recompute: span[1] - span[0]}}
        for span in spans
    ]
    data = {"layout": layout_of_run(run).model_dump(), "virtual_stages": stages}
    return validated(Plan, data, "the plan that the configuration describes")


def run_of_plan(
    version: str, flavor: Pair, experts: bool, sequence_length: int, deduplicated: bool, plan: Plan
) -> Run:
    """Build the run that is nearest to a plan; the export compares it with the plan by reading it back."""
    layout = plan.layout
    sharded = layout.zero_stage > 0
    pipelined = layout.pp > 1
    whole = sum(stage.recompute.full for stage in plan.virtual_stages)
    return Run(
        version=version,
        flavor=flavor,
        experts=experts,
        sequence_length=sequence_length,
        replicate=layout.dp_replicate if sharded else layout.dp,
        shard=layout.dp // layout.dp_replicate if sharded else 1,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp if version == V022 else 1,
        sequence_parallel=layout.sequence_parallel or (version == V022 and layout.tp > 1),
        schedule=SCHEDULES.get(layout.schedule, "1F1B"),
        stages=tuple(stage.num_layers for stage in plan.virtual_stages),
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.num_micro_batches if pipelined else 1,
        accumulations=1 if pipelined else layout.num_micro_batches,
        reshard="always" if layout.zero_stage == 3 and not (pipelined or layout.keep_weights) else "never",
        recompute="full" if whole else "selective" if plan.selects else "none",
        deduplicated=deduplicated and layout.ep > 1,
    )


NO_PIPELINE_022 = ("qwen3", "gpt_oss")
"""Models whose ``pipelining_fn`` is None in 0.2.2 (models/*/__init__.py, train.py:255)."""


def _undivided_experts(run: Run) -> str:
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
        counts = [*kind.head_counts]
        if isinstance(attention, GroupedQueryAttention):
            counts.append(attention.num_key_value_heads)
        for count in counts:
            if count % run.tp:
                return f"{count} heads over tp={run.tp}"
    return ""


def _widths(run: Run) -> str:
    spec = flavors()[run.flavor]
    for kind in spec.kinds:
        assert not isinstance(kind.mlp, NoBlock)
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


def _checkpoints(run: Run) -> str:
    unpriced = run.recompute == "selective" and not prices_products(flavors()[run.flavor], run.version)
    return f"SelectiveAC of {run.flavor[0]} in {run.version}: what it keeps is not priced" if unpriced else ""


RULES: Rules = {
    "experts_divide": ("distributed/parallel_dims.py:187-192, 0.2.2: :63-64", _undivided_experts),
    "sequence_divides": ("trainer.py:296-309, 0.2.2: models/llama3/infra/parallelize.py:67", _sequence),
    "heads_divide": ("models/common/attention.py: heads of a rank are whole", _heads),
    "widths_divide": ("torch DTensor shards of products are even here", _widths),
    "stages": ("distributed/pipeline_parallel.py:233-254", _stages),
    "micro_batches": ("S: Schedule1F1B and ScheduleInterleaved1F1B", _micro_batches),
    "mixed_precision_needs_fsdp": ("0.2.2: distributed/utils.py, maybe_enable_amp", _number_format),
    "replicas_stand_alone": ("0.2.2: models/llama3/infra/parallelize.py, DDP has not supported > 1D", _replicas),
    "model_has_pipeline": ("0.2.2: train.py, does not support pipelining", _pipelines),
    "deepep_has_the_model": ("0.2.2: models/deepseek_v3/infra/parallelize.py:99-113 alone", _dispatcher),
    "kept_products_are_priced": (
        "0.2.2: models/llama4/infra/parallelize.py compiles parts of layers",
        _checkpoints,
    ),
    "flex_attention_is_not_split": ("0.2.2: models/*/infra/parallelize.py", _latent),
}
"""Rules by name, with source and check of a run."""


def prices_products(model: ModelSpec, version: str | None) -> bool:
    """Check that every layer is one of which what SelectiveAC keeps is priced.

    0.2.2 compiles layers with experts in parts, and keeps all that a part gives.
    """
    return all(kind.prices_products for kind in model.kinds) and not (version == V022 and model.has_experts)


def titan_modes(problem: Problem) -> tuple[Mode, ...]:
    """List the recompute modes of the model's layers; selective is SelectiveAC, by matrix product."""
    priced = prices_products(problem.model, problem.space.target_version)
    return ("none", "selective", "full") if priced else ("none", "full")


def titan_program(version: str) -> dict[str, bool]:
    """Return how selective recomputation works: by product, in the compiled layers of an export.

    Source: ``fuse_qkv`` of all flavors at b5bcd76c and in 0.3.0; 0.2.2 has wq, wk and wv
    (models/llama3/model/model.py).
    """
    return {"operator_checkpoints": True, "keeps_unread_results": False, "fused_qkv": version != V022}


def titan_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that torchtitan can produce.

    Unlike in ``piped_states``, unsharded replicas reduce gradients in every micro-batch, and after a pipeline.
    Weights that stay after a forward are ZeRO 2 with a single micro-batch.
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
    if "keep_weights" in c:
        keeps &= (c["keep_weights"] == 0) | ~once
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


TORCHTITAN = config_capability(
    name="torchtitan",
    versions=("b5bcd76c", "0.3.0", "0.2.2"),
    limits={
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "its zero-bubble schedules fail on the mask of FlexAttention and are off in its own tests "
            "(tests/integration_tests/features.py:129)",
        ),
        "expert_dispatch": Limit(("default",), "the hardware's software says how tokens reach experts"),
        "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
        "offload_weights": Limit((False,), NO_STREAMS),
        "offload_modules": Limit((NO_MODULES,), NO_STREAMS),
        "offload_activations": Limit((False,), NO_STREAMS),
        "offload_optimizer": Limit((False,), f"{NO_STREAMS} (enable_cpu_offload updates on the processor)"),
    },
    rules={
        "whole_key_value_heads": RowRule(whole_kv_heads, "heads of a rank are whole"),
        "whole_words": RowRule(whole_words, "DTensor shards of the vocabulary are even here"),
        "experts": RowRule(titan_experts, "experts are cut over tp without ep, with it over one rank"),
        "sequences": RowRule(titan_sequences, "with sequence parallelism gathered inputs are kept"),
        "pipelines": RowRule(titan_pipelines, "1F1B wants as many micro-batches as stages"),
        "states": RowRule(titan_states, "fully_shard decides what is sharded and when", shards=True),
    },
    formats={
        "precision": "its float8 converters leave out layers that the plan counts in fp8",
        "grad_dtype": "mixed_precision_reduce is float32 alone",
        "attention_kernel": "its attention is fused",
    },
    modes=titan_modes,
    program=titan_program,
    complete=True,
)
