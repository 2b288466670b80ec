"""The question that is asked: a model, a cluster, a training job, and the space of plans that a proof covers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from milpplan.problem.hardware import (
    MAX_NODE_TYPES,
    PRECISIONS,
    QUANTIZATIONS,
    HardwareSpec,
    NodeGroup,
    PrecisionName,
    Quantization,
)
from milpplan.problem.model import Images, LinearModule, ModelSpec
from milpplan.problem.plan import (
    HELD_BY_MOE,
    NO_MODULES,
    OFFLOAD_MODULES,
    ExpertDispatch,
    MicroBatchShares,
    ModuleSet,
    NodeOrder,
    OffloadModule,
    OffloadSet,
    RankOrder,
    RecomputeModule,
    Schedule,
    TpOverlap,
    module_set,
)
from milpplan.problem.records import Count, PositiveFloat, PositiveInt, Range, Record

MAX_GPUS: Final = 1_048_576
MAX_BATCH: Final = 1_048_576
MAX_SEQUENCE: Final = 16_777_216
MAX_MARGIN: Final = 0.5
MAX_LORA_RANK: Final = 4096
MAX_MTP_LAYERS: Final = 8
MAX_IMBALANCE: Final = 1024.0
MAX_ROLLOUT_S: Final = 1e6
MAX_HELD_BYTES: Final = 2**40

Objective = Literal["step_time_per_token", "num_gpus", "gpu_hours"]


class Lora(Record):
    """Low-rank adapters beside frozen weights: y = W x + s B A x, with A [rank, inputs] and B [outputs, rank].

    All other parameters are frozen: embedding, head, norms and routers too.
    Source: Hu et al. 2021 (LoRA), equation 3; ``LoraConfig`` of Hugging Face PEFT.
    """

    rank: Annotated[int, Field(gt=0, le=MAX_LORA_RANK)]
    modules: Annotated[tuple[LinearModule, ...], Field(min_length=1)] = ("q_proj", "v_proj")
    """Matrices with an adapter, in every layer that has them."""

    @model_validator(mode="after")
    def _distinct(self) -> Lora:
        if len(set(self.modules)) < len(self.modules):
            raise ValueError(f"modules must name each matrix once, got {', '.join(self.modules)}")
        return self


Optimizer = Literal["adam", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "muon")
MuonTpMode = Literal["duplicated", "distributed", "blockwise"]
MUON_TP_MODES: tuple[MuonTpMode, ...] = ("duplicated", "distributed", "blockwise")

FrozenPart = Literal["embedding", "head", "vision"]
FROZEN_PARTS: tuple[FrozenPart, ...] = ("embedding", "head", "vision")


Method = Literal["dpo", "grpo", "reward", "critic"]
METHODS: tuple[Method, ...] = ("dpo", "grpo", "reward", "critic")
SCORE_METHODS: tuple[Method, ...] = ("reward", "critic")
"""Methods that train a head of scores (``ModelSpec.num_labels``), without a reference."""
Reference = Literal["frozen", "none"]
REFERENCES: tuple[Reference, ...] = ("frozen", "none")


class Alignment(Record):
    """Training on preferences or rewards: work of a step beside forward and backward of the policy.

    ``dpo``: every sample is a pair of sequences, chosen and rejected, which share a micro-batch. Source: Rafailov
    et al. 2023 (Direct Preference Optimization), equation 7.

    ``grpo``: a step generates sequences (rollouts), runs a forward of the policy for its log-probabilities before
    the update, and trains on them once. Source: Shao et al. 2024 (DeepSeekMath), section 4.1; verl
    verl/trainer/ppo/ray_trainer.py (``_compute_old_log_prob``, ``_compute_ref_log_prob``).

    ``reward``: scores of pairs, which share a micro-batch. Source: Ouyang et al. 2022 (InstructGPT), equation 1;
    TRL trl/trainer/reward_trainer.py, which concatenates chosen and rejected sequences.

    ``critic``: the step of PPO's critic, a forward for its values before the update, and training on them once.
    Source: Schulman et al. 2017 (PPO), section 5; verl verl/trainer/ppo/ray_trainer.py (``_compute_values``).
    """

    method: Method
    reference: Reference = "frozen"
    """``frozen``: the model before training runs a forward of every micro-batch before the policy. It is a second
    copy of the weights in the policy's layout; beside LoRA it is the policy without its adapters and needs none.
    ``none``: its log-probabilities were computed beforehand (GRPO: there is no penalty for leaving it).
    Source: TRL trl/trainer/dpo_trainer.py (``ref_model``, ``precompute_ref_log_probs``); ms-swift
    swift/megatron/trainers/rlhf_mixin.py (``prepare_model``, ``null_ref_context``). Scores have none."""

    @model_validator(mode="before")
    @classmethod
    def _scores_need_none(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("method") in SCORE_METHODS:
            return {"reference": "none", **values}
        return values

    @model_validator(mode="after")
    def _scores_have_none(self) -> Alignment:
        if self.method in SCORE_METHODS and self.reference != "none":
            raise ValueError(f"{self.method} has no reference: use reference none")
        return self


class Rollout(Record):
    """Generation of the sequences of a GRPO step. It is given, not modelled."""

    seconds: Annotated[float, Field(ge=0, le=MAX_ROLLOUT_S)]
    """Time of a step's generation, with rewards and the move of weights to the engine."""
    held_bytes: Annotated[int, Field(ge=0, le=MAX_HELD_BYTES)] = 0
    """Device memory that the engine holds while the policy trains; 0: all is offloaded, or it runs elsewhere."""
    apart: bool = False
    """True if other accelerators generate the next step's sequences meanwhile: the training of this job is planned
    alone, and the run takes at least as long as all generations."""

    @model_validator(mode="after")
    def _memory_is_here(self) -> Rollout:
        if self.apart and self.held_bytes:
            raise ValueError("held_bytes is memory of the training accelerators: leave it out, or apart")
        return self


class Job(Record):
    """A training or inference job. Batch sizes count sequences, ``expert_imbalance`` is a ratio."""

    kind: Literal["training", "inference"] = "training"
    """``inference``: a single forward of every sequence (a prefill), without gradients and optimizer."""
    num_gpus: PositiveInt | Range
    global_batch_size: PositiveInt | Range
    sequence_length: PositiveInt
    precision: PrecisionName = "bf16"
    """Recipe of the layers' matrix products; attention, router, embedding and head stay in bf16."""
    attention_kernel: Literal["flash", "unfused"] = "flash"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    objective: Objective = "step_time_per_token"
    training_tokens: PositiveFloat | None = None
    """Tokens of the whole run; a deadline and ``gpu_hours`` need them."""
    deadline_s: PositiveFloat | None = None
    """Maximum time of the whole run. Without it ``num_gpus`` asks for the minimum on which a plan fits."""
    lora: Lora | None = None
    """Adapters; None: the model's own weights are trained."""
    frozen: tuple[FrozenPart, ...] = ()
    """Parts that are not trained. ``embedding``: look-up table and learned positions; ``head``: output projection
    and the norm before it; ``vision``: the encoder of images with its projectors."""
    mtp_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] = 0
    """Layers of multi-token prediction that are trained: each predicts a further token with a projection, a
    transformer layer, and the shared embedding and head. All are on the last stage. None by default, as in
    Megatron-LM, even if the published model has some.
    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; Megatron-LM's ``--mtp-num-layers``."""
    expert_imbalance: Annotated[float, Field(ge=1, le=MAX_IMBALANCE)] = 1.0
    """Token copies that the fullest rank of an expert-parallel group receives over the mean, at most ``ep``: 1 +
    the maximal violation of Wang et al. 2024 (arXiv 2408.15664), or a capacity that experts are padded to."""
    vision_tokens: Count = 0
    """Tokens of a sequence that come from images, a mean over the micro-batches; part of ``sequence_length``."""
    image_tokens: PositiveInt | None = None
    """Tokens of an image; None: those that the model fixes, else all ``vision_tokens`` are of one image."""
    images: Images | None = None
    """Distribution of the images of a sequence, in place of ``vision_tokens``; None: all have the mean."""
    alignment: Alignment | None = None
    """Training on preferences or rewards; None: on the next token."""
    rollout: Rollout | None = None
    """Generation of a GRPO step; None: outside the step."""
    optimizer: Optimizer = "adam"
    """Rule of the update. ``muon`` orthogonalizes the momentum of every matrix between embedding and head; Adam
    updates the rest. Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv 2502.16982."""
    muon_tp_mode: MuonTpMode = "duplicated"
    """Orthogonalization of matrices that tensor parallelism divides. ``duplicated``: ranks gather the momentum and
    each does all the work; ``distributed``: they add products of their parts; ``blockwise``: each does its own
    part (another update). Source: Megatron-LM's ``--muon-tp-mode``."""

    @property
    def quantization(self) -> Quantization:
        """Bytes of the operands of matrix products."""
        return QUANTIZATIONS[self.precision]

    @property
    def sequences_together(self) -> int:
        """Sequences that share a micro-batch: both of a pair."""
        return 2 if self.alignment is not None and self.alignment.method in ("dpo", "reward") else 1

    @property
    def reference_forwards(self) -> int:
        """Forwards of a frozen reference in every micro-batch."""
        return int(self.alignment is not None and self.alignment.reference == "frozen")

    @property
    def policy_forwards(self) -> int:
        """Forwards of the policy before its update in every micro-batch."""
        return int(self.alignment is not None and self.alignment.method in ("grpo", "critic"))

    @property
    def further_forwards(self) -> int:
        """Forwards of every micro-batch beside that of training."""
        return self.reference_forwards + self.policy_forwards

    @property
    def joined_forwards(self) -> int:
        """Further forwards whose activations stages send together with those of training."""
        return 0 if self.policy_forwards else self.reference_forwards

    @property
    def rollout_s(self) -> float:
        """Seconds of a step's generation on the accelerators that train."""
        return 0.0 if self.rollout is None or self.rollout.apart else self.rollout.seconds

    def paced_s(self, step_s: float) -> float:
        """Return the time of a step of training, in seconds, with the wait for rollouts on other accelerators."""
        return max(step_s, self.rollout.seconds) if self.rollout is not None and self.rollout.apart else step_s

    @property
    def reference_copies(self) -> int:
        """Copies of all weights that a reference holds."""
        return self.reference_forwards if self.lora is None else 0

    @property
    def alignment_text(self) -> str:
        """Words for training on preferences; empty for training on the next token."""
        if self.alignment is None:
            return ""
        if self.alignment.method in SCORE_METHODS:
            return "a reward model on pairs" if self.alignment.method == "reward" else "the critic of PPO"
        name = self.alignment.method.upper()
        if not self.reference_forwards:
            before = "with log-probabilities of the reference computed beforehand"
            return f"{name} {before if self.alignment.method == 'dpo' else 'without a reference'}"
        base = "a frozen reference" if self.lora is None else "the model without adapters as reference"
        return f"{name} with {base}"

    @property
    def frozen_text(self) -> str:
        """Words for the adapters or the frozen parts of the job; empty if all weights are trained."""
        if self.lora is not None:
            return f"LoRA adapters of rank {self.lora.rank} on {', '.join(self.lora.modules)}"
        return f"frozen {' and '.join(self.frozen)}" if self.frozen else ""

    @property
    def optimizer_text(self) -> str:
        """Words for the optimizer."""
        return "Adam" if self.optimizer == "adam" else f"Muon ({self.muon_tp_mode} over tensor-parallel ranks)"

    @property
    def vision_text(self) -> str:
        """Words for the images of the job; empty without any."""
        size = f" in images of {self.image_tokens:,} tokens" if self.image_tokens else ""
        if self.images is not None:
            return self.images.text + size.replace(" in images", ",", 1)
        return f"{self.vision_tokens:,} image tokens a sequence{size}" if self.vision_tokens else ""

    @property
    def has_images(self) -> bool:
        """True if sequences hold images."""
        return bool(self.vision_tokens or self.images)

    def trains(self, part: FrozenPart) -> bool:
        """Check that a part of the model is trained."""
        return self.kind == "training" and self.lora is None and part not in self.frozen

    @property
    def num_gpus_values(self) -> tuple[int, ...]:
        """Candidate numbers of accelerators."""
        return self.num_gpus.values if isinstance(self.num_gpus, Range) else (self.num_gpus,)

    @property
    def global_batch_values(self) -> tuple[int, ...]:
        """Candidate global batch sizes, in sequences."""
        if isinstance(self.global_batch_size, Range):
            return self.global_batch_size.values
        return (self.global_batch_size,)

    @model_validator(mode="after")
    def _fields_agree(self) -> Job:
        if self.objective == "gpu_hours" and self.training_tokens is None:
            raise ValueError("objective=gpu_hours needs training_tokens")
        if self.deadline_s is not None and self.training_tokens is None:
            raise ValueError("deadline_s needs training_tokens, the tokens of the whole run")
        if self.rollout is not None and not self.policy_forwards:
            raise ValueError("rollout needs alignment grpo or critic")
        if self.rollout is not None and self.rollout.apart:
            if self.objective == "gpu_hours" or len(self.global_batch_values) > 1:
                raise ValueError("rollouts apart need one batch and the objective step_time_per_token or num_gpus")
            steps = (self.training_tokens or 0.0) / (self.global_batch_values[0] * self.sequence_length)
            if (run_s := steps * self.rollout.seconds) > (self.deadline_s or float("inf")):
                raise ValueError(f"the run's rollouts take {run_s / 3600:.4g} h, longer than the deadline")
        given = [name for name in ("lora", "frozen") if getattr(self, name)]
        if self.kind == "inference" and given:
            raise ValueError(f"an inference job trains nothing: leave {given[0]} out")
        if len(given) > 1:
            raise ValueError("lora freezes all parts of the model: leave frozen out")
        return self


ANY_SPLIT_LAYERS = 10
"""Maximum number of layers of models whose default space has interleaved splits of any kind."""

Values = tuple[int, ...]
"""Values of a degree."""
Switch = tuple[bool, ...]
"""Values of a switch."""


Mixing = Literal["stages", "replicas"]
MIXINGS: tuple[Mixing, ...] = ("stages", "replicas")


class Space(Record):
    """Declared set of plans. ``None`` leaves a degree to its divisibility rules.

    ``uniform``: every virtual stage holds ceil(layers / virtual stages) layers, and the last stages hold the rest.
    A single recompute mode (none, selective or full) applies to all layers.

    ``free``: each virtual stage has its own recompute counts, and layers may be split unevenly. Without
    interleaving, every stage holds at least one layer; the first and the last stage, which also hold the embedding
    and the head, may hold no layer.
    """

    kind: Literal["uniform", "free"] = "free"
    interleaved_layers: Literal["auto", "even", "any"] = "auto"
    """Uneven splits in the free space with interleaving. ``any``: as without interleaving. ``even``: inner virtual
    stages hold ceil or floor of layers / virtual stages, larger stages first, and the first and the last stage at
    most ceil. ``auto``: ``any`` for models of at most ``ANY_SPLIT_LAYERS`` layers, whose proofs take seconds, else
    ``even``."""
    vpp_values: Literal["distinct", "all"] = "all"
    """Numbers of virtual stages per rank. ``all``: every number. ``distinct``: a number only if its largest chunk
    is smaller than that of every smaller number."""
    tp: Values | None = None
    cp: Values | None = None
    ep: Values | None = None
    etp: Values | None = None
    pp: Values | None = None
    dp: Values | None = None
    vpp: Values | None = None
    micro_batch_size: Values | None = None
    sequence_parallel: Switch = (False, True)
    zero_stage: Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], Field(min_length=1)] = (0, 1, 2, 3)
    dp_replicate: Values | None = (1,)
    """Groups of replicas that each shard the states by themselves; None: all divisors of dp."""
    keep_weights: Switch = (False,)
    schedule: Annotated[tuple[Schedule, ...], Field(min_length=1)] = ("1f1b", "interleaved")
    overlap_grad_reduce: Switch = (False, True)
    overlap_param_gather: Switch = (False, True)
    tp_overlap: Annotated[tuple[TpOverlap, ...], Field(min_length=1)] = ("none",)
    pp_scatter_gather: Switch = (False,)
    gather_again: Switch = (True,)
    recompute_vision: Switch = (False, True)
    vision_data_parallel: Switch = (False,)
    recompute_modules: Annotated[tuple[ModuleSet, ...] | None, Field(min_length=1)] = (NO_MODULES,)
    """None: those of ``Problem.module_sets``."""
    ulysses: Values | None = (1,)
    """None: all divisors of the heads that divide cp."""
    expert_dispatch: Annotated[tuple[ExpertDispatch, ...], Field(min_length=1)] = ("default",)
    offload_weights: Switch = (False,)
    offload_activations: Switch = (False,)
    offload_modules: Annotated[tuple[OffloadSet, ...] | None, Field(min_length=1)] = (NO_MODULES,)
    """None: those of ``Problem.offload_sets``."""
    offload_optimizer: Switch = (False,)
    rank_order: Annotated[tuple[RankOrder, ...], Field(min_length=1)] = ("tp-cp-dp-pp",)
    node_order: tuple[NodeOrder, ...] | None = None
    """Orders of the node types along the pipeline, in a cluster of several types; None: all orders."""
    mixing: Annotated[tuple[Mixing, ...], Field(min_length=1)] = ("stages",)
    """Use of several node types. ``stages``: the stages of a pipeline differ, all replicas are alike.
    ``replicas``: each replica is wholly on one node type and has its own share of the batch."""
    replica_micro_batches: tuple[MicroBatchShares, ...] | None = None
    """Shares of the replicas on each node type, in micro-batches; None: all shares that add up to the batch."""
    recompute: Annotated[tuple[Literal["none", "selective", "full"], ...], Field(min_length=1)] = (
        "none",
        "selective",
        "full",
    )
    recompute_counts: Literal["any", "alike", "block"] = "any"
    """Recomputation of the virtual stages in the free space. ``any``: each stage has its own counts. ``alike``: a
    single mode applies to all layers. ``block``: as ``alike``, or the first n layers of every virtual stage are
    recomputed wholly (all layers of a shorter stage), with the same n everywhere."""
    zero_pipeline: bool = False
    """True if layouts may have ZeRO 2 or 3 together with a pipeline, which exchange gradients or weights in every
    micro-batch and which few train with."""
    memory_margin_fraction: Annotated[float | None, Field(ge=0, le=MAX_MARGIN)] = None
    """Share of the device's memory that every plan leaves; None: that of a safe plan on each node type
    (``HardwareSpec.memory_margin_fraction``)."""
    target: str | None = None
    """Launcher (``launchers.targets.TARGETS``) whose rules every layout keeps.
    ``launchers.targets.restrict`` sets this field, ``target_version`` and ``recompute_counts``."""
    target_version: str | None = None
    """Version of the target."""


NOT_LISTS: Final = frozenset(
    (
        *("kind", "interleaved_layers", "vpp_values", "recompute_counts"),
        *("zero_pipeline", "memory_margin_fraction", "target", "target_version"),
    )
)
"""Fields of a space that are not lists of values."""

SPACES: Final = {"uniform": Space(kind="uniform"), "free": Space(), "any": Space(interleaved_layers="any")}
"""Spaces by name."""


class Problem(Record):
    """The question that a proof answers. The version of the package names the cost model.

    In a cluster of several node types, ``other_hardware`` holds all types but the first. The rest of
    ``job.num_gpus`` has the type ``hardware``. All accelerators of a pipeline rank are of the same type.
    """

    schema_version: Literal[1] = 1
    model: ModelSpec
    hardware: HardwareSpec
    job: Job
    space: Space = Space()
    other_hardware: Annotated[tuple[NodeGroup, ...], Field(max_length=MAX_NODE_TYPES - 1)] = ()

    @property
    def node_types(self) -> tuple[HardwareSpec, ...]:
        """Node types, ``hardware`` first."""
        return (self.hardware, *map(attrgetter("hardware"), self.other_hardware))

    @property
    def node_gpus(self) -> tuple[int, ...]:
        """Accelerators of each node type, for a job with a single number of accelerators."""
        others = tuple(group.num_gpus for group in self.other_hardware)
        return (max(self.job.num_gpus_values) - sum(others), *others)

    def on_type(self, node_type: int) -> Problem:
        """Reorder the node types so that ``node_type`` comes first; the cluster stays the same."""
        if node_type == 0:
            return self
        gpus, types = self.node_gpus, self.node_types
        rest = [NodeGroup(hardware=types[t], num_gpus=gpus[t]) for t in range(len(types)) if t != node_type]
        return self.model_copy(update={"hardware": types[node_type], "other_hardware": tuple(rest)})

    @property
    def inference(self) -> bool:
        """True if the job runs forwards only."""
        return self.job.kind == "inference"

    @property
    def recompute_modes(self) -> tuple[Literal["none", "selective", "full"], ...]:
        """Recompute modes of the space; inference recomputes nothing."""
        return ("none",) if self.inference else self.space.recompute

    @property
    def recompute_modules(self) -> tuple[RecomputeModule, ...]:
        """Modules that layers of the model can recompute by themselves; none where that is not priced.

        Not priced: frozen weights, checkpoints of single products, and inputs that are kept gathered.
        """
        software = self.hardware.software
        unpriced = self.inference or self.job.frozen_text or software.operator_checkpoints
        return () if unpriced or software.gathered_inputs else self.model.recompute_modules

    @property
    def module_sets(self) -> tuple[str, ...]:
        """Values of ``Layout.recompute_modules`` in the space; the default alone without selective recomputation.

        A space that leaves them open has the default and a chain of sets, each with all that replay less work a
        byte: activations, norms, expanded queries, keys and values, shared experts, dense MLPs; then ``moe`` with
        those outside it, one by one. Flash attention keeps no scores, so its module is left to ``--fix``.
        """
        asked, present = self.space.recompute_modules, self.recompute_modules
        if asked is not None and NO_MODULES not in asked:
            return asked
        if "selective" not in self.recompute_modes or not present:
            return (NO_MODULES,)
        if asked is not None:
            return asked
        order = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp")
        flash = self.job.attention_kernel == "flash"
        narrow = [name for name in order if name in present and not (flash and name == "core_attn")]
        outside = [name for name in narrow if name not in HELD_BY_MOE]
        sets = [narrow[:length] for length in range(1, len(narrow) + 1)]
        sets += [["moe", *outside[:length]] for length in range(len(outside) + 1) if "moe" in present]
        return (NO_MODULES, *map(module_set, sets))

    @property
    def offload_modules(self) -> tuple[OffloadModule, ...]:
        """Modules whose inputs can lie in host memory; none with kept scores or without ``recompute_modules``."""
        unpriced = self.job.attention_kernel == "unfused" or self.hardware.software.copied_inputs
        present = {name for run in self.model.layers for name in run.offload_modules}
        named = bool(self.recompute_modules) and not unpriced
        return tuple(name for name in OFFLOAD_MODULES if named and name in present)

    @property
    def offload_sets(self) -> tuple[str, ...]:
        """Values of ``Layout.offload_modules`` in the space; the default alone where no module is priced.

        A space that leaves them open has a chain of sets, from inputs of experts to those of norms. Every byte
        hides beside the same work, so no other set with as many bytes is better.
        """
        asked = self.space.offload_modules
        if asked is not None:
            return asked
        order = ("moe_act", "expert_fc1", "core_attn", "attn_proj", "qkv_linear", "mlp_norm", "attn_norm")
        present = [name for name in order if name in self.offload_modules]
        sets = [module_set(present[:length], OFFLOAD_MODULES) for length in range(1, len(present) + 1)]
        return (NO_MODULES, *sets)

    def prices_offload(self, modules: str) -> bool:
        """Check that some layer has each module of ``Layout.offload_modules``, and outputs of attention, which its
        backward reads, lie on the host only with its inputs.

        Source: Megatron-LM at d98e8a64, core/transformer/transformer_config.py.
        """
        names = {*modules.split("+")} - {NO_MODULES}
        return names <= {*self.offload_modules} and not ("attn_proj" in names and "core_attn" not in names)

    def prices_modules(self, modules: str) -> bool:
        """Check that some layer has each module of ``Layout.recompute_modules``, and none is inside another."""
        names = {*modules.split("+")} - {NO_MODULES}
        return names <= {*self.recompute_modules} and not ("moe" in names and names & HELD_BY_MOE)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules of the space; the forwards of inference fill and drain the pipeline, as in GPipe."""
        return ("gpipe",) if self.inference else self.space.schedule

    @property
    def interleaved_layers(self) -> Literal["even", "any"]:
        """The field of the space, with ``auto`` resolved by the size of the model."""
        declared = self.space.interleaved_layers
        if declared == "auto":
            return "any" if self.model.num_layers <= ANY_SPLIT_LAYERS else "even"
        return declared

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        for hardware in self.node_types:
            gpu = hardware.accelerator
            if gpu.engine(self.job.precision) is None:
                known = [name for name in PRECISIONS if gpu.engine(name) is not None]
                raise ValueError(f"{gpu.name} has no {self.job.precision}; use precision {' or '.join(known)}")
        self.check_node_types()
        self._check_frozen_parts()
        self._check_mtp_layers()
        if self.job.expert_imbalance > 1 and not self.model.has_experts:
            raise ValueError(f"{self.model.name} has no experts: leave expert_imbalance out")
        self._check_images()
        if self.model.num_labels is not None:
            self._check_scores()
        self._check_alignment()
        self._check_optimizer()
        if self.model.learned_positions and self.job.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"sequence_length={self.job.sequence_length} exceeds the {self.model.max_position_embeddings}"
                " learned positions"
            )
        if self.job.attention_kernel == "unfused" and self.model.has_indexers:
            raise ValueError(
                f"{self.model.name} attends to selected keys, unfused kernels to all: use attention_kernel flash"
            )
        return self

    def _check_frozen_parts(self) -> None:
        lora, frozen = self.job.lora, self.job.frozen
        if self.model.tie_word_embeddings and len({"embedding", "head"} & {*frozen}) == 1:
            raise ValueError(f"embedding and head of {self.model.name} share a matrix: freeze both or neither")
        if lora is not None and self.model.has_indexers:
            raise ValueError(f"lora beside sparse attention with an indexer ({self.model.name}) is not modelled")
        if lora is not None and not all(kind.has_known_adapters for kind in self.model.kinds):
            parts = "linear recurrences, gated attention, single blocks or experts in a latent width"
            raise ValueError(f"lora beside {parts} ({self.model.name}) is not modelled")
        present = self.model.linear_modules
        absent = [] if lora is None else [name for name in lora.modules if name not in present]
        if absent:
            raise ValueError(f"{self.model.name} has no {', '.join(absent)} to adapt; it has {', '.join(present)}")

    def _check_mtp_layers(self) -> None:
        if not self.job.mtp_layers:
            return
        if beside := self.job.frozen_text or ("inference" if self.inference else ""):
            raise ValueError(f"mtp_layers={self.job.mtp_layers} beside {beside} is not modelled")
        kind = self.model.mtp_kind
        if kind.mlp.type == "none" or kind.attention.type not in ("gqa", "mla", "compressed"):
            raise ValueError(
                f"a layer of multi-token prediction is priced as the last layer of the model, and that of "
                f"{self.model.name} is not attention with a feed-forward block: leave mtp_layers out"
            )

    def _check_scores(self) -> None:
        unmodelled = {
            "inference": self.inference,
            "mtp_layers": self.job.mtp_layers > 0,
            "lora": self.job.lora is not None,
        }
        beside = [name for name, is_so in unmodelled.items() if is_so]
        if beside:
            raise ValueError(f"{beside[0]} beside a head of {self.model.num_labels} scores is not modelled")
        if self.model.tie_word_embeddings:
            raise ValueError("a head of num_labels scores has a matrix of its own: tie_word_embeddings=false")

    def _check_alignment(self) -> None:
        if self.job.alignment is None:
            return
        method, scores = self.job.alignment.method, self.model.num_labels
        if (method in SCORE_METHODS) != (scores is not None):
            seen = "a head over the vocabulary" if scores is None else f"a head of {scores} scores"
            raise ValueError(f"alignment {method} beside {seen} (num_labels of {self.model.name}): use the other")
        beside = "inference" if self.inference else "layers of multi-token prediction" * (self.job.mtp_layers > 0)
        if beside:
            raise ValueError(f"{self.job.alignment_text} beside {beside} is not modelled")

    def _check_images(self) -> None:
        job, vision = self.job, self.model.vision
        if vision is None:
            if job.vision_tokens or job.image_tokens or job.images or "vision" in job.frozen:
                raise ValueError(f"{self.model.name} has no vision encoder: leave images and frozen vision out")
            return
        if job.vision_tokens > job.sequence_length:
            raise ValueError(
                f"vision_tokens={job.vision_tokens} exceeds sequence_length={job.sequence_length}, which includes "
                "them"
            )
        if vision.tokens_per_image not in (None, job.image_tokens or vision.tokens_per_image):
            raise ValueError(
                f"image_tokens={job.image_tokens}, and images of {self.model.name} have {vision.tokens_per_image}"
            )
        if job.images is not None:
            if job.vision_tokens or job.alignment or len(self.node_types) > 1:
                raise ValueError("images beside vision_tokens, alignment or several node types are not modelled")
            job.images.check(self.image_tokens, job.sequence_length, max(job.global_batch_values))

    def _check_optimizer(self) -> None:
        job = self.job
        if job.optimizer == "adam":
            return
        unmodelled = {
            "inference": self.inference,
            "lora": job.lora is not None,
            "a trained vision encoder": self.model.vision is not None and job.trains("vision"),
            "several node types": len(self.node_types) > 1,
            self.hardware.software.states_text: bool(self.hardware.software.states_text),
        }
        if any(unmodelled.values()):
            seen = " and ".join(name for name, is_so in unmodelled.items() if is_so)
            raise ValueError(
                f"optimizer={job.optimizer} beside {seen} is not modelled: expected training of a language "
                "model's weights with states in fp32; use optimizer adam"
            )

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, at most those of a sequence's images."""
        fixed = None if self.model.vision is None else self.model.vision.tokens_per_image
        stated = self.job.image_tokens or fixed or self.job.vision_tokens
        return stated if self.job.images else min(stated, self.job.vision_tokens)

    @property
    def vision_tokens(self) -> float:
        """Mean tokens of a sequence that come from images."""
        return self.image_tokens * self.job.images.mean if self.job.images else self.job.vision_tokens

    @property
    def recomputes_vision(self) -> bool:
        """True if the encoder of images has activations that a layout may recompute."""
        return self.job.has_images and self.job.trains("vision")

    def check_node_types(self) -> None:
        """Check the fields that name node types.

        Raises:
            ValueError: a type has no GPUs, or an order or a list of shares does not name every type.
        """
        count = len(self.node_types)
        if count > 1 and (len(self.job.num_gpus_values) > 1 or self.node_gpus[0] < 1):
            others = sum(group.num_gpus for group in self.other_hardware)
            raise ValueError(
                f"other_hardware holds {others} GPUs, so num_gpus must be one number above that (the rest are "
                f"{self.hardware.name}), got {self.job.num_gpus}"
            )
        if count > 1 and any(hardware.pods is not None for hardware in self.node_types):
            raise ValueError("pods, a third tier of network, need a cluster of one node type")
        wanted = list(range(count)) if count > 1 else []
        for shares in self.space.replica_micro_batches or ():
            if len(shares) != count or count == 1:
                raise ValueError(
                    f"replica_micro_batches must name each of {max(2, count)} node types once, got {list(shares)}"
                )
        for order in self.space.node_order or ():
            if sorted(order) != wanted:
                raise ValueError(f"node_order must name each of {count} node types once, got {list(order)}")
