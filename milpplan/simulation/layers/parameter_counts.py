"""Exact numbers of parameters of a model, and its FLOPs.

Parameters are split by how tensor and expert parallelism divide them. All counts are Python integers of parameters
(not bytes) and agree to the unit with the classes of Hugging Face transformers. Layers of multi-token prediction
are counted apart (``mtp_parameters``), buffers (rotary tables, DeepSeek-V3's routing bias) are not.

The functions do not divide by degrees: the caller divides ``tensor_parallel`` by tp and ``experts`` by ep * etp.
In two cases the division is a lower bound of the parameters of a rank, and the caller has to correct it. With tp
greater than ``num_key_value_heads`` the key and value part is copied instead of divided. With etp greater than 1
the output bias of a routed expert (gpt-oss) is copied within the etp group.

FLOPs serve utilisation figures only; ``milpplan.simulation.layers.layer_time`` computes durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from milpplan.problem import (
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
    VisionEncoder,
)
from milpplan.problem.model import Mixer, Mlp

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from milpplan.problem import Lora, Problem, Projector

    IntOrArray = int | NDArray[np.integer[Any]]
    FloatOrArray = float | NDArray[np.floating[Any]]

DELTA_RULES = ("delta", "kda")
"""Recurrences that correct their state by a delta rule."""
VOCAB_ROWS_PER_RANK = 128
"""Divisor of the embedding rows of a tp rank (Megatron's ``--make-vocab-size-divisible-by``)."""


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one decoder layer, or of a part of it, by how they are sharded."""

    tensor_parallel: int = 0
    """Attention, dense MLP and shared expert: matrices, column biases, sink logits; divided by tp."""
    replicated: int = 0
    """Norms, router, row-parallel biases, q/k norms, low-rank down projections; a copy on every tp rank."""
    experts: int = 0
    """All routed experts together; divided by ep * etp."""

    @property
    def total(self) -> int:
        """Parameters of the layer."""
        return self.tensor_parallel + self.replicated + self.experts

    def __add__(self, other: LayerParameters) -> LayerParameters:
        return LayerParameters(
            self.tensor_parallel + other.tensor_parallel,
            self.replicated + other.replicated,
            self.experts + other.experts,
        )


def _norm_parameters(model: ModelSpec) -> int:
    """Count a norm of hidden_size: h weights, and h biases of a LayerNorm."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _grouped_query_attention(hidden: int, attention: GroupedQueryAttention) -> LayerParameters:
    """Count projections q, k, v (column parallel) and o (row parallel), biases, q/k norms and sinks.

    ``h*(a*d + k*(d + v)) + a*v*h``, with a heads and k key-value heads, of width d with values of width v; a gate
    adds ``h*a*v``, a gate of heads ``h*a``, an index branch of n heads of width d
    ``h*(n + 1)*d + 2*d``. Source: transformers 5.23.0, ``LlamaAttention``, ``Qwen3Attention``,
    ``Olmo2Attention``, ``GptOssAttention``, ``MiMoV2FlashAttention``, ``Qwen3NextAttention``; 5.24.0,
    ``Step3p7Attention``, ``MiniMaxM3VLAttention``.
    """
    query = attention.num_attention_heads * attention.head_dim
    keys = attention.num_key_value_heads * attention.head_dim
    values = 0 if attention.keys_are_values else attention.num_key_value_heads * attention.value_dim
    gate = attention.num_attention_heads * attention.gate_dim
    columns = query + gate + keys + values
    matrices = hidden * columns + attention.num_attention_heads * attention.value_dim * hidden
    column_bias = columns if attention.qkv_bias else 0
    sinks = attention.num_attention_heads if attention.sinks else 0
    qk_norm = {"none": 0, "unweighted": 0, "per_head": 2 * attention.head_dim, "full_width": query + keys}
    return LayerParameters(
        tensor_parallel=matrices + column_bias + sinks,
        replicated=qk_norm[attention.qk_norm]
        + (hidden if attention.output_bias else 0)
        + (hidden * attention.blocks.width + 2 * attention.blocks.index_head_dim if attention.blocks else 0),
    )


def _latent_attention(hidden: int, attention: LatentAttention) -> LayerParameters:
    """Count DeepSeek's latent attention: low-rank down projections and their norms replicated, the rest divided.

    Replicated ``h*rq + rq + h*(rkv + rope) + rkv``; divided ``rq*a*(nope + rope) + rkv*a*(nope + v) + a*v*h``
    (without a query rank rq the query is ``h*a*(nope + rope)``, divided). Source: transformers 5.23.0,
    ``DeepseekV3Attention``; DeepSeek-V2 (arXiv 2405.04434) section 2.1. An indexer is replicated: its products,
    and weight and bias of the norm of its keys (``DeepseekV32Indexer``; Megatron-LM's ``DSAIndexer``).
    """
    heads = attention.num_attention_heads
    query_width = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    kv_rank = attention.kv_lora_rank
    divided = kv_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    divided += heads * attention.v_head_dim * hidden
    copied = hidden * (kv_rank + attention.qk_rope_head_dim) + kv_rank
    if attention.indexer is not None and not attention.indexer.takes:
        copied += indexer_matrix_parameters(hidden, attention) + 2 * attention.indexer.index_head_dim
    if attention.q_lora_rank is None:
        return LayerParameters(tensor_parallel=divided + hidden * query_width, replicated=copied)
    return LayerParameters(
        tensor_parallel=divided + attention.q_lora_rank * query_width,
        replicated=copied + hidden * attention.q_lora_rank + attention.q_lora_rank,
    )


def indexer_matrix_parameters(hidden: int, attention: LatentAttention) -> int:
    """Count the indexer's matrices for queries, keys and weights of heads, ``rq*H*d + h*(d + H)``; 0 if the layer
    takes the keys of another."""
    indexer = attention.indexer
    assert indexer is not None
    assert attention.q_lora_rank is not None
    if indexer.takes:
        return 0
    queries = attention.q_lora_rank * indexer.index_n_heads * indexer.index_head_dim
    return queries + hidden * (indexer.index_head_dim + indexer.index_n_heads)


def _compressed_attention(hidden: int, attention: CompressedAttention) -> LayerParameters:
    """Count DeepSeek-V4's attention, of which every rank has a copy.

    With A heads of width d in g groups of rank ro, query rank rq, and ``series`` n of blocks of m tokens:
    ``h*rq + rq + rq*A*d + h*d + d + A*d*ro + g*ro*h + A``, and ``2*h*n*d + m*n*d + d`` for compressed keys. An
    indexer compresses keys of its own width, and has queries and weights of heads. Source: transformers 5.24.0,
    ``DeepseekV4Attention``, ``DeepseekV4HCACompressor``, ``DeepseekV4CSACompressor``, ``DeepseekV4Indexer``.
    """
    size, query = attention.head_dim, attention.num_attention_heads * attention.head_dim
    total = (hidden + 1 + query) * attention.q_lora_rank + (hidden + 1) * size
    total += query * attention.o_lora_rank + attention.o_groups * attention.o_lora_rank * hidden
    total += attention.num_attention_heads + compressed_parameters(hidden, attention, size)
    return LayerParameters(replicated=total + selecting_parameters(hidden, attention))


def compressed_parameters(hidden: int, attention: CompressedAttention, size: int) -> int:
    """Count the weights that make compressed keys of width ``size``: values, gates, positions and a norm."""
    if attention.compress_rate is None:
        return 0
    return (2 * hidden + attention.compress_rate) * attention.series * size + size


def selecting_parameters(hidden: int, attention: CompressedAttention) -> int:
    """Count the weights of an indexer of compressed keys; 0 without one."""
    if (indexer := attention.indexer) is None:
        return 0
    queries = attention.q_lora_rank * indexer.index_n_heads * indexer.index_head_dim
    keys = compressed_parameters(hidden, attention, indexer.index_head_dim)
    return queries + hidden * indexer.index_n_heads + keys


def stream_parameters(model: ModelSpec, mapped: int) -> int:
    """Count a mapping of n residual streams to ``mapped`` numbers of each token, ``mapped * (n*h + 1)``."""
    return mapped * (model.residual_streams * model.hidden_size + 1)


def mixed_streams(model: ModelSpec) -> int:
    """Count the numbers of a token in a hyper-connection: n to read, n to write and n^2 to mix n streams."""
    return model.residual_streams * (2 + model.residual_streams)


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of a recurrence's tensors in elements a token, over all heads."""

    keys: int
    """Keys, and queries as wide as they."""
    values: int
    """Values, gate and output."""
    gates: int
    """Decays (of KDA one for every channel of the keys), and strengths of a delta rule, of every value head."""

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Output of the input projection."""
        return self.convolved + self.values + self.gates


def decays(mixer: LinearRecurrence) -> tuple[int, int]:
    """Count the numbers of a value head that are computed of every token, and the weights beside them."""
    channels = 1 + mixer.key_head_dim
    return {"delta": (2, 2), "kda": (channels, channels), "ssm": (1, 3), "lightning": (0, 0)}[mixer.update]


def widths(mixer: LinearRecurrence) -> Widths:
    """Return the widths of a recurrence."""
    return Widths(
        keys=mixer.num_key_heads * mixer.key_head_dim,
        values=mixer.num_value_heads * mixer.value_head_dim,
        gates=mixer.num_value_heads * decays(mixer)[0],
    )


def direct_width(mixer: LinearRecurrence) -> int:
    """Return the width of the input projection: all, or what does not pass through a low rank."""
    width = widths(mixer)
    return width.projected if mixer.gate_rank is None else width.convolved + mixer.num_value_heads


def _linear_recurrence(hidden: int, mixer: LinearRecurrence) -> LayerParameters:
    """Count the projections, the convolution, decays (with their biases, and skips of Mamba-2) and the gated norm.

    ``h*p + v*h + conv*kernel + n*a``, with p and v the widths of ``Widths``, a value heads and n the weights of
    ``decays``. The norm has v weights, and in a delta rule the width of a head. Through a low rank r, decay and
    gate have ``2*h*r`` copied and ``r*(a*key_head_dim + v)`` divided weights. Source: transformers 5.23.0,
    ``Qwen3NextGatedDeltaNet``, ``NemotronHMamba2Mixer``, ``MiniMaxLightningAttention``; 5.24.0,
    ``KimiLinearDeltaAttention``.
    """
    width = widths(mixer)
    projected, rank = direct_width(mixer), mixer.gate_rank or 0
    divided = hidden * (projected + width.values) + width.convolved * (mixer.conv_kernel + mixer.conv_bias)
    divided += mixer.bias * projected + rank * (width.projected - projected)
    copied = mixer.bias * hidden + 2 * hidden * rank
    divided += decays(mixer)[1] * mixer.num_value_heads
    if mixer.update in DELTA_RULES:
        return LayerParameters(divided, copied + mixer.value_head_dim)
    return LayerParameters(divided + width.values, copied)


def _feed_forward(hidden: int, intermediate: int, gated: bool, bias: bool) -> tuple[int, int]:
    """Count a feed-forward block.

    Returns:
        Matrices and column biases, ``3*h*f + 2*f`` (gated; else ``2*h*f + f``), and the row bias ``h``.
    """
    columns = 2 if gated else 1
    divided = (columns + 1) * hidden * intermediate + (columns * intermediate if bias else 0)
    return divided, hidden if bias else 0


def _mixture_of_experts(hidden: int, mlp: MixtureOfExperts) -> LayerParameters:
    """Count router ``E*h``, E routed experts, projections to and from their width, the shared expert and its gate.

    Source: transformers 5.23.0, ``MixtralSparseMoeBlock``, ``Qwen2MoeSparseMoeBlock``, ``GptOssMLP``,
    ``DeepseekV3MoE``, ``NemotronHMoE``.
    """
    expert_matrices, expert_bias = _feed_forward(
        mlp.latent_size or hidden, mlp.intermediate_size, mlp.gated, mlp.bias
    )
    shared, shared_bias = 0, 0
    if mlp.shared_intermediate_size:
        shared, shared_bias = _feed_forward(hidden, mlp.shared_intermediate_size, mlp.gated, mlp.bias)
    router = mlp.num_experts * (hidden + (1 if mlp.router_bias else 0))
    if mlp.router_scales:
        router += hidden + mlp.num_experts
    return LayerParameters(
        tensor_parallel=shared,
        replicated=router + shared_bias + (hidden if mlp.shared_gate else 0) + 2 * hidden * (mlp.latent_size or 0),
        experts=mlp.num_experts * (expert_matrices + expert_bias),
    )


def layer_parameters(model: ModelSpec, kind: LayerRun) -> LayerParameters:
    """Count the parameters of **one** layer of ``kind`` (its ``count`` is ignored), by sharding.

    A hyper-connection around each block has a mapping and three factors. Source: transformers 5.24.0,
    ``DeepseekV4HyperConnection``.
    """
    norms = LayerParameters(replicated=kind.num_norms * _norm_parameters(model))
    if model.residual_streams > 1:
        mappings = kind.num_blocks * (stream_parameters(model, mixed_streams(model)) + 3)
        norms = norms + LayerParameters(replicated=mappings)
    return _mixer(model.hidden_size, kind.attention) + _mlp(model.hidden_size, kind.mlp) + norms


def _mixer(hidden: int, mixer: Mixer) -> LayerParameters:
    """Count a token mixer."""
    if isinstance(mixer, NoBlock):
        return LayerParameters()
    if isinstance(mixer, LatentAttention):
        return _latent_attention(hidden, mixer)
    if isinstance(mixer, CompressedAttention):
        return _compressed_attention(hidden, mixer)
    if isinstance(mixer, LinearRecurrence):
        return _linear_recurrence(hidden, mixer)
    return _grouped_query_attention(hidden, mixer)


def _mlp(hidden: int, mlp: Mlp) -> LayerParameters:
    """Count a feed-forward block."""
    if isinstance(mlp, NoBlock):
        return LayerParameters()
    if isinstance(mlp, MixtureOfExperts):
        return _mixture_of_experts(hidden, mlp)
    return LayerParameters(*_feed_forward(hidden, mlp.intermediate_size, mlp.gated, mlp.bias))


def mtp_projection_parameters(model: ModelSpec) -> LayerParameters:
    """Count the projection of a layer of multi-token prediction, 2 h^2, and its norms: of both inputs and before
    the head."""
    copied = 2 * _norm_parameters(model) + final_norm_parameters(model)
    return LayerParameters(tensor_parallel=2 * model.hidden_size**2, replicated=copied)


def mtp_parameters(model: ModelSpec) -> int:
    """Count the parameters of one layer of multi-token prediction, without the shared embedding and head.

    Source: DeepSeek-V3, README_WEIGHTS.md; ``MultiTokenPredictionLayer`` of Megatron-LM.
    """
    return layer_parameters(model, model.mtp_kind).total + mtp_projection_parameters(model).total


@dataclass(frozen=True, slots=True)
class AdapterParameters:
    """Parameters of the adapters of a layer on one GPU; arrays or numbers."""

    dense: FloatOrArray
    """Adapters of attention, dense MLP and shared expert."""
    expert: FloatOrArray
    """Adapters of the routed experts."""
    dense_copied: FloatOrArray
    """Part of ``dense`` that every tensor-parallel rank has, with a gradient that is a sum over these ranks."""
    expert_copied: FloatOrArray
    """Likewise of ``expert``, over the ranks that share an expert."""


def adapter_parameters(
    hidden: int,
    kind: LayerRun,
    lora: Lora,
    tp: FloatOrArray = 1.0,
    ep: FloatOrArray = 1.0,
    etp: FloatOrArray = 1.0,
) -> AdapterParameters:
    """Count the parameters of the adapters of one layer of ``kind`` on one GPU.

    r (inputs + outputs) for each adapted matrix. Beside a matrix whose outputs are divided by tp, B is divided and
    A copied. Beside a matrix whose inputs are divided, A is divided and B copied: B A x is then a part of the sum
    that the matrix needs anyway. Adapters of copied matrices are copied. Every expert has its own adapters, which
    ep divides, and etp as tp divides others.

    Megatron Bridge divides the rank of A instead of copying A, and gathers A x; that is not modelled.
    Source: Hu et al. 2021 (LoRA), section 4.1.
    """
    total: FloatOrArray = 0.0
    copied: FloatOrArray = 0.0
    for name, (inputs, outputs, divided) in _matrix_shapes(hidden, kind, tp).items():
        if name in lora.modules:
            total = total + lora.rank * (inputs + outputs)
            copied = copied + lora.rank * {"outputs": inputs, "inputs": outputs, "": inputs + outputs}[divided]
    expert, expert_copied = _expert_adapters(hidden, kind, lora, ep, etp)
    return AdapterParameters(total, expert, copied, expert_copied)


def _matrix_shapes(
    hidden: int, kind: LayerRun, tp: FloatOrArray
) -> dict[str, tuple[FloatOrArray, FloatOrArray, Literal["inputs", "outputs", ""]]]:
    """List inputs and outputs of a layer's matrices on one GPU, and which of both tp divides, without experts."""
    attention, mlp = kind.attention, kind.mlp
    assert not isinstance(attention, CompressedAttention | LinearRecurrence | NoBlock)
    assert not isinstance(mlp, NoBlock)
    heads = attention.num_attention_heads / tp
    shapes: dict[str, tuple[FloatOrArray, FloatOrArray, Literal["inputs", "outputs", ""]]]
    if isinstance(attention, LatentAttention):
        query, value = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
        down = attention.kv_lora_rank + attention.qk_rope_head_dim
        shapes = {"kv_a_proj_with_mqa": (hidden, down, ""), "o_proj": (heads * value, hidden, "inputs")}
        shapes["kv_b_proj"] = attention.kv_lora_rank, heads * (attention.qk_nope_head_dim + value), "outputs"
        if attention.q_lora_rank is None:
            shapes["q_proj"] = hidden, heads * query, "outputs"
        else:
            shapes["q_a_proj"] = hidden, attention.q_lora_rank, ""
            shapes["q_b_proj"] = attention.q_lora_rank, heads * query, "outputs"
    else:
        # NumPy takes long to import, and counts of whole models do without.
        import numpy as np

        # Key and value heads fewer than tp are copied.
        copies = np.maximum(attention.num_key_value_heads / tp, 1.0)
        shapes = {
            "q_proj": (hidden, heads * attention.head_dim, "outputs"),
            "k_proj": (hidden, copies * attention.head_dim, "outputs"),
            "v_proj": (hidden, copies * attention.value_dim, "outputs"),
            "o_proj": (heads * attention.value_dim, hidden, "inputs"),
        }
    dense = mlp.intermediate_size if mlp.type == "dense" else mlp.shared_intermediate_size
    if dense:
        shapes |= dict.fromkeys(("gate_proj", "up_proj")[not mlp.gated :], (hidden, dense / tp, "outputs"))
        shapes["down_proj"] = dense / tp, hidden, "inputs"
    return {name: shape for name, shape in shapes.items() if name in kind.linear_modules}


def _expert_adapters(
    hidden: int, kind: LayerRun, lora: Lora, ep: FloatOrArray, etp: FloatOrArray
) -> tuple[FloatOrArray, FloatOrArray]:
    """Count the parameters of the adapters of routed experts on one GPU: all, and the copied part."""
    if not isinstance(kind.mlp, MixtureOfExperts):
        return 0.0, 0.0
    adapted = sum(name in lora.modules for name in kind.linear_modules[-3 if kind.mlp.gated else -2 :])
    each = lora.rank * adapted * kind.mlp.num_experts / ep
    return each * (hidden + kind.mlp.intermediate_size / etp), each * hidden


def trained_parameters(problem: Problem) -> int:
    """Count the parameters that have gradients: all, those of the adapters, or those of the parts not frozen.

    Layers of multi-token prediction count if they are trained.
    """
    model, job = problem.model, problem.job
    if job.lora is not None:
        layers = [(run.count, adapter_parameters(model.hidden_size, run, job.lora)) for run in model.layers]
        return round(sum(count * float(layer.dense + layer.expert) for count, layer in layers))
    frozen = 0 if job.trains("embedding") else embedding_parameters(model) + position_parameters(model)
    frozen += 0 if job.trains("vision") else encoder_parameters(model).total
    frozen += 0 if job.trains("head") else head_parameters(model) + final_norm_parameters(model)
    mtp = job.mtp_layers * mtp_parameters(model) if job.mtp_layers else 0
    return total_parameters(model) + mtp - frozen


def embedding_parameters(model: ModelSpec) -> int:
    """Count the token embedding: ``V*h``, divided by tp; without padding (see ``padded_vocab_size``)."""
    return model.vocab_size * model.hidden_size


def position_parameters(model: ModelSpec) -> int:
    """Count learned positions, ``s_max*h``, 0 with rotary or no positions; a copy on every tp rank."""
    return model.max_position_embeddings * model.hidden_size if model.learned_positions else 0


def head_parameters(model: ModelSpec) -> int:
    """Count the output projection: ``V*h``, 0 if tied to the embedding; plus V for a bias. Divided by tp.

    With V scores instead of the vocabulary every tp rank has a copy. Source: transformers 5.24.0,
    modeling_layers.py (``GenericForSequenceClassification``, ``GenericForTokenClassification``).
    """
    outputs = model.num_labels or model.vocab_size
    return (0 if model.tie_word_embeddings else outputs * model.hidden_size) + outputs * model.lm_head_bias


def final_norm_parameters(model: ModelSpec) -> int:
    """Count the norm before the output projection, and the mapping with a factor that reads several residual
    streams (``DeepseekV4HyperHead``); a copy on every tp rank."""
    streams = model.residual_streams
    return _norm_parameters(model) + (stream_parameters(model, streams) + 1 if streams > 1 else 0)


def encoder_model(vision: VisionEncoder) -> ModelSpec:
    """Describe the layers of an encoder of images as a model, for the formulas of layers."""
    return ModelSpec(
        name="vision encoder",
        hidden_size=vision.hidden_size,
        vocab_size=1,
        max_position_embeddings=1,
        layers=vision.layers,
        norm=vision.norm,
        learned_positions=not vision.rotary_positions,
    )


def encoder_parameters(model: ModelSpec) -> LayerParameters:
    """Count the parameters of the encoder of images with its projectors; none without any encoder.

    ``h p (+ h)`` for patches of p numbers, copied; layers; ``i m + m + m o`` divided and ``o`` copied for a
    projector of widths i, m, o with biases, ``i o + o`` copied without m; and others, copied. The degree that
    divides is ``encoder_tp``. Source: transformers 5.24.0, ``Qwen3VLMoeVisionModel``, ``KimiK25VisionModel``.
    """
    vision = model.vision
    if vision is None:
        return LayerParameters()
    patches = vision.hidden_size * (vision.patch_inputs + vision.patch_bias)
    divided, copied = 0, patches + vision.other_parameters
    for run in vision.layers:
        counts = layer_parameters(encoder_model(vision), run)
        divided += run.count * counts.tensor_parallel
        copied += run.count * counts.replicated
    for projector in vision.projectors:
        matrices, (*columns, row) = _projector_matrices(projector), projector.widths[1:]
        divided += projector.count * (matrices + sum(columns) * projector.bias) * bool(columns)
        copied += projector.count * (row * projector.bias + matrices * (not columns))
    return LayerParameters(tensor_parallel=divided, replicated=copied)


def _projector_matrices(projector: Projector) -> int:
    """Count the weights of a projector's matrices."""
    return sum(inputs * outputs for inputs, outputs in pairwise(projector.widths))


def encoder_flops(problem: Problem) -> float:
    """Count the FLOPs of the encoder of images for a sequence: three forwards, or one if it is frozen.

    2 for each parameter and patch (projectors: and token), and 2 keys (qk + v width) a patch and layer, where keys
    are the patches of an image.
    """
    vision, job = problem.model.vision, problem.job
    if vision is None or not job.has_images:
        return 0.0
    layers, patches = encoder_model(vision), vision.patches_per_token
    per_patch = vision.hidden_size * vision.patch_inputs
    keys, attention = problem.image_tokens * patches, 0
    for run in vision.layers:
        assert isinstance(run.attention, GroupedQueryAttention)
        per_patch += run.count * layer_parameters(layers, run).total
        width = run.attention.num_attention_heads * (run.attention.head_dim + run.attention.value_dim)
        attention += run.count * width * min(keys, run.attention.sliding_window or keys)
    per_token = sum(
        projector.count * _projector_matrices(projector) * (patches if projector.of_patches else 1)
        for projector in vision.projectors
    )
    forward = 2.0 * problem.vision_tokens * (patches * (per_patch + attention) + per_token)
    return forward * (3 if job.trains("vision") else 1)


def total_parameters(model: ModelSpec) -> int:
    """Count all parameters; a tied embedding counts once."""
    layers = sum(run.count * layer_parameters(model, run).total for run in model.layers)
    return (
        embedding_parameters(model)
        + position_parameters(model)
        + layers
        + final_norm_parameters(model)
        + head_parameters(model)
        + encoder_parameters(model).total
    )


def active_parameters(model: ModelSpec) -> int:
    """Count the parameters that a token of text uses: all but the encoder, and routed experts outside its top-k.

    The embedding counts once, and so does an untied output projection, as in the published counts of Mixtral
    (12.9B), DeepSeek-V3 (37B) and Qwen3 (3.3B, 22B); gpt-oss's card leaves the input embedding out.
    """
    idle = sum(run.count * _idle_parameters(model, run) for run in model.layers)
    return total_parameters(model) - idle - encoder_parameters(model).total


def _idle_parameters(model: ModelSpec, kind: LayerRun) -> int:
    """Count the parameters of one layer that a token does not use."""
    if not isinstance(kind.mlp, MixtureOfExperts):
        return 0
    per_expert = layer_parameters(model, kind).experts // kind.mlp.num_experts
    return per_expert * (kind.mlp.num_experts - kind.mlp.num_experts_per_tok)


def padded_vocab_size(model_vocab: IntOrArray, tp: IntOrArray) -> IntOrArray:
    """Pad the rows of the embedding: ``ceil(V / (128*tp)) * 128*tp``; broadcasts over integer arrays.

    Source: Megatron-LM, megatron/training/vocab_utils.py, ``vocab_size_with_padding`` (earlier in
    megatron/training/tokenizer/tokenizer.py), with its default ``--make-vocab-size-divisible-by 128``.
    """
    multiple = VOCAB_ROWS_PER_RANK * tp
    return -(-model_vocab // multiple) * multiple


def scan_flops(mixer: LinearRecurrence) -> float:
    """Count the FLOPs a token of a scan's forward, over all heads; a backward has twice as many.

    Delta rules, for every value head: 6 C K for K K', Q K' and T K; 4 C V for T V and (Q K') V; 6 K V for the
    state's update and two reads. Mamba-2: 2 C N for every group, 2 C P + 4 N P for every head. Lightning attention
    as Mamba-2, with a group for every head.
    """
    heads, chunk = mixer.num_value_heads, mixer.chunk_size
    key, value = mixer.key_head_dim, mixer.value_head_dim
    if mixer.update in DELTA_RULES:
        return heads * (6.0 * chunk * key + 4.0 * chunk * value + 6.0 * key * value)
    return 2.0 * mixer.num_key_heads * chunk * key + heads * (2.0 * chunk * value + 4.0 * key * value)


def model_flops_per_token(model: ModelSpec, sequence_length: int, mtp_layers: int = 0) -> float:
    """Count the forward and backward FLOPs of a token: 6 per multiplying parameter, and causal attention.

    Each of ``mtp_layers`` adds those of its transformer layer, its projection and the head, as in Megatron-LM
    (megatron/training/training.py, ``num_floating_point_operations``).

    6 * (active parameters without look-ups: positions, and an untied embedding) + 6 * keys * (qk + v width) per
    layer, with the mean number of keys under the causal mask (half of Megatron's older count, which uses s), or 3
    times the FLOPs of a recurrence's scan.
    Recomputation does not count. Source: Chowdhery et al. 2022 (PaLM), appendix B, with the causal half.

    An indexer has no gradient of its inputs, scores all keys forward and has gradients of the selected keys alone;
    the attention to these keys is that of latent keys and values (``sparse_attention``).
    """
    attention = 0.0
    for run in model.layers:
        for flops in _mixer_flops(model.hidden_size, run.attention, sequence_length):
            attention += run.count * flops
    total = 6.0 * _multiplying_parameters(model) + attention
    if mtp_layers:
        kind = model.mtp_kind
        used = mtp_parameters(model) - _idle_parameters(model, kind) + model.vocab_size * model.hidden_size
        # Half of the projection is of every residual stream.
        used += (model.residual_streams - 1) * model.hidden_size**2
        total += mtp_layers * (6.0 * used + sum(_mixer_flops(model.hidden_size, kind.attention, sequence_length)))
    return total


def _mixer_flops(hidden: int, mixer: Mixer, sequence_length: int) -> tuple[float, ...]:
    """List the FLOPs of a token in a layer's mixer beyond its parameters: of an indexer, and of the rest."""
    # Kernels import NumPy, and counts of parameters do without.
    from milpplan.simulation.layers.kernels import average_keys

    if isinstance(mixer, LinearRecurrence):
        return (3 * scan_flops(mixer),)
    if isinstance(mixer, NoBlock):
        return ()
    heads = mixer.num_attention_heads
    if isinstance(mixer, GroupedQueryAttention):
        blocks = mixer.blocks
        window = blocks.selected_keys if blocks else mixer.sliding_window
        keys = float(average_keys(sequence_length, window, chunked=mixer.chunked))
        core = 6 * keys * heads * (mixer.head_dim + mixer.value_dim)
        if blocks is None:
            return (core,)
        # Scores of all earlier keys forward; the branch has no gradient.
        scores = 2 * float(average_keys(sequence_length, None)) * blocks.index_n_heads * blocks.index_head_dim
        return scores - 4 * hidden * blocks.width, core
    if isinstance(mixer, CompressedAttention):
        from milpplan.simulation.layers.sparse_attention import compressed_keys

        earlier, chosen, _ = (float(number) for number in compressed_keys(mixer, sequence_length))
        attended = chosen + float(average_keys(sequence_length, mixer.sliding_window))
        core, indexer = 12 * attended * heads * mixer.head_dim, mixer.indexer
        if indexer is None:
            return (core,)
        scores = indexer.index_n_heads * indexer.index_head_dim * (2 * earlier + 4 * chosen)
        return scores - 2 * selecting_parameters(hidden, mixer), core
    keys = float(average_keys(sequence_length, None))
    if mixer.indexer is None:
        return (6 * keys * heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim),)
    scores = 0 if mixer.indexer.takes else mixer.indexer.index_n_heads * mixer.indexer.index_head_dim
    indexed = 2 * keys * scores - 2 * indexer_matrix_parameters(hidden, mixer)
    keys = float(average_keys(sequence_length, mixer.indexer.index_topk))
    return indexed + 4 * keys * scores, 6 * keys * heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim)


def _multiplying_parameters(model: ModelSpec) -> int:
    """Count the active parameters without look-ups: positions, and an untied embedding."""
    untied = 0 if model.tie_word_embeddings else embedding_parameters(model)
    return active_parameters(model) - position_parameters(model) - untied


def _frozen_flops_per_token(problem: Problem) -> float:
    """Count the FLOPs of a token that training all weights has beyond the job: 2 for each frozen multiplying
    parameter, whose weight gradient falls away, less the 6 of each adapter parameter that a token uses."""
    model, lora = problem.model, problem.job.lora
    if lora is None:
        return 0.0 if problem.job.trains("head") else 2.0 * model.head_outputs * model.hidden_size
    adapters = 0.0
    for run in model.layers:
        layer = adapter_parameters(model.hidden_size, run, lora)
        used = run.mlp.num_experts_per_tok / run.mlp.num_experts if isinstance(run.mlp, MixtureOfExperts) else 0.0
        adapters += run.count * float(layer.dense + layer.expert * used)
    return 2.0 * _multiplying_parameters(model) - 6.0 * adapters


def mfu(problem: Problem, tokens_per_s: float, num_gpus: int) -> float:
    """Compute the model FLOPs utilisation: model FLOPs per second over the sum of the accelerators' dense peaks.

    The peak is that of the job's precision. The forward of a reference counts.
    """
    peak = 0.0
    for hardware, count in zip(problem.node_types, problem.node_gpus, strict=True):
        gpu = hardware.accelerator
        engine = gpu.engine(problem.job.precision)
        assert engine is not None, "a problem has checked that"
        peak += (count if problem.other_hardware else num_gpus) * engine.peak_flops_per_s
    flops = model_flops_per_token(problem.model, problem.job.sequence_length, problem.job.mtp_layers)
    if problem.inference:
        # Forwards are a third, and each sequence has the logits of a single token.
        length = problem.job.sequence_length
        flops = flops / 3 - 2 * problem.model.vocab_size * problem.model.hidden_size * (length - 1) / length
    else:
        flops += problem.job.further_forwards * flops / 3 - _frozen_flops_per_token(problem)
    flops += encoder_flops(problem) / problem.job.sequence_length
    return flops * tokens_per_s / peak
