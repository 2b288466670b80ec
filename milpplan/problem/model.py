"""The model that is trained: a decoder-only transformer as runs of identical layers.

Field names follow Hugging Face ``config.json``. The formulas stand elsewhere: parameter counts in
``milpplan.simulation.layers.parameter_counts``, times in ``milpplan.simulation.layers.layer_time``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from math import gcd
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from milpplan.problem.plan import OFFLOAD_MODULES, RECOMPUTE_MODULES, OffloadModule, RecomputeModule
from milpplan.problem.records import Count, PositiveFloat, PositiveInt, Record

MAX_IMAGES: Final = 2**22


class BlockIndexer(Record):
    """Index branch of block-sparse attention: a head for each group of queries scores all earlier keys, and the
    group attends to the blocks with the best keys (MiniMax-M3)."""

    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_block_size: PositiveInt
    """Keys of a block."""
    index_topk_blocks: PositiveInt
    """Blocks that a query attends to at most."""

    @property
    def selected_keys(self) -> int:
        """Keys that a query attends to at most."""
        return self.index_block_size * self.index_topk_blocks

    @property
    def width(self) -> int:
        """Outputs of its projections for a token: the heads' queries and a key."""
        return (self.index_n_heads + 1) * self.index_head_dim


class GroupedQueryAttention(Record):
    """Multi-head, grouped-query or multi-query attention (``num_key_value_heads`` = heads, fewer, 1)."""

    type: Literal["gqa"] = "gqa"
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt | None = None
    """Width of a head's values and output; null: ``head_dim`` (MiMo-V2 has another)."""
    keys_are_values: bool = False
    """The projection of keys gives the values, too, before norms and rotary positions (Gemma 4)."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "unweighted", "per_head", "full_width"] = "none"
    """``unweighted``: no weights (Llama 4); ``per_head``: a weight of head_dim for q and another for k (Qwen3);
    ``full_width``: weights as wide as all heads (OLMo 2)."""
    sinks: bool = False
    """A learned sink logit per head (gpt-oss)."""
    sliding_window: PositiveInt | None = None
    """Keys that a query attends to at most, its own position last."""
    chunked: bool = False
    """The window does not slide: positions are cut in chunks of ``sliding_window``, and a query attends to the
    keys of its own chunk (Llama 4)."""
    output_gate: bool = False
    """A gate as wide as the queries, projected from the input, multiplies the output (Qwen3-Next)."""
    head_gate: bool = False
    """A gate of one number for each head, projected from the input, multiplies the output (Step-3.5)."""

    blocks: BlockIndexer | None = None
    """Blocks of keys that queries attend to; null: all keys, or those of the window."""

    @property
    def gate_dim(self) -> int:
        """Width of a head's gate; 0 without one."""
        return self.value_dim if self.output_gate else int(self.head_gate)

    @property
    def value_dim(self) -> int:
        """Width of a head's values and output."""
        return self.v_head_dim or self.head_dim

    @model_validator(mode="after")
    def _heads_group(self) -> GroupedQueryAttention:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.keys_are_values and self.value_dim != self.head_dim:
            raise ValueError(f"values that are keys have their width, and v_head_dim is {self.v_head_dim}")
        if self.blocks is not None and self.sliding_window is not None:
            raise ValueError("blocks and sliding_window are both given: one of them limits the keys")
        if self.output_gate and self.head_gate:
            raise ValueError("output_gate and head_gate are both true: one gate multiplies the output")
        if self.chunked and self.sliding_window is None:
            raise ValueError("chunked attention needs the size of a chunk, sliding_window")
        return self


Sharing = Literal["none", "gives", "takes"]


class Indexer(Record):
    """Lightning indexer of sparse attention: small heads score all earlier keys, and a query attends to the best
    (DeepSeek-V3.2)."""

    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    """Keys that a query attends to at most."""
    sharing: Sharing = "none"
    """``takes``: the layer has no indexer, and attends to the keys that the layer before it attends to (GLM-5.2);
    ``gives``: the next layer takes this one's keys."""

    @property
    def takes(self) -> bool:
        """True if an earlier layer selects the keys."""
        return self.sharing == "takes"

    @staticmethod
    def taking(num_layers: int, period: int, offset: int) -> list[bool]:
        """Find the layers that take the keys of the layer before: all but layer n, counted from 1, where
        max(n - offset, 0) is a multiple of the period.

        Source: Megatron-LM at d98e8a64, experimental_attention_variant/dsa.py, ``is_dsa_skip_topk_layer``.
        """
        return [max(layer + 1 - offset, 0) % period != 0 for layer in range(num_layers)]

    @staticmethod
    def sharings(takes: Sequence[bool]) -> list[Sharing]:
        """Return ``sharing`` of each layer, given which layers take the keys of the layer before."""
        following = [*takes[1:], False]
        return [
            "takes" if taken else "gives" if after else "none"
            for taken, after in zip(takes, following, strict=True)
        ]


class LatentAttention(Record):
    """Multi-head latent attention (DeepSeek-V2/V3), over all earlier keys or those that an indexer selects."""

    type: Literal["mla"] = "mla"
    num_attention_heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    """Rank of the queries; null: one matrix makes them."""
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    indexer: Indexer | None = None

    @model_validator(mode="after")
    def _indexer_has_queries(self) -> LatentAttention:
        if self.indexer is not None and self.q_lora_rank is None:
            raise ValueError("an indexer makes its queries of the query of low rank, and q_lora_rank is missing")
        return self


class CompressedAttention(Record):
    """Attention of one shared head, whose keys are its values, to a window and to compressed keys (DeepSeek-V4).

    Gates weight the tokens of a block to one compressed key. With an indexer, a query attends to the best
    compressed keys, and each of these is of the tokens of two blocks; without one, to all compressed keys.
    """

    type: Literal["compressed"] = "compressed"
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    """Width of the key, and of a head's queries and output."""
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    """Groups of heads, whose outputs have a first projection of their own."""
    o_lora_rank: PositiveInt
    """Outputs of a group's first projection."""
    sliding_window: PositiveInt
    """Latest tokens whose own keys a query attends to at most."""
    compress_rate: PositiveInt | None = None
    """Tokens of a block; null: there are no compressed keys."""
    indexer: Indexer | None = None

    @property
    def series(self) -> int:
        """Number of compressed keys that a token is a part of."""
        return 0 if self.compress_rate is None else 1 if self.indexer is None else 2

    @property
    def boundary_tokens(self) -> int:
        """Tokens before its own that a part of a sequence needs: those of the window, or of a compression."""
        return max(self.sliding_window, self.series * (self.compress_rate or 0))

    @model_validator(mode="after")
    def _parts_fit(self) -> CompressedAttention:
        if self.num_attention_heads * self.head_dim % self.o_groups:
            raise ValueError(
                f"o_groups={self.o_groups} does not divide {self.num_attention_heads} heads of {self.head_dim}"
            )
        if self.indexer is not None and (self.compress_rate is None or self.indexer.sharing != "none"):
            raise ValueError("an indexer selects compressed keys of its own layer: give compress_rate, no sharing")
        return self


class LinearRecurrence(Record):
    """Token mixer that carries a state from chunk to chunk instead of attending to all keys.

    Every value head has a state of ``key_head_dim`` x ``value_head_dim``. A short causal convolution precedes the
    recurrence (not in lightning attention), a gate and a norm follow it.
    """

    type: Literal["recurrence"] = "recurrence"
    update: Literal["delta", "kda", "ssm", "lightning"]
    """``delta``: gated delta rule (Qwen3-Next); ``kda``: the same with a decay for every channel of the keys (Kimi
    delta attention); ``ssm``: Mamba-2, whose keys are B, queries C and values x; ``lightning``: lightning
    attention (MiniMax-01), whose decays are constants."""
    num_key_heads: PositiveInt
    """Heads of queries and keys; of Mamba-2, the groups."""
    num_value_heads: PositiveInt
    key_head_dim: PositiveInt
    """Of Mamba-2, the size of the state."""
    value_head_dim: PositiveInt
    conv_kernel: Count = 4
    """Tokens of the convolution; 0: there is none."""
    conv_bias: bool = False
    bias: bool = False
    """Both projections have biases."""
    gate_rank: PositiveInt | None = None
    """Rank of the projections of decay and gate of ``kda`` (Kimi-Linear: 128); null: they are matrices."""
    chunk_size: PositiveInt = 64
    """Tokens of a chunk of the scan."""

    @model_validator(mode="after")
    def _heads_group(self) -> LinearRecurrence:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} is not a multiple of num_key_heads={self.num_key_heads}"
            )
        if self.update != "kda" and self.gate_rank is not None:
            raise ValueError(f"gate_rank={self.gate_rank} beside update {self.update!r}: only kda has such a rank")
        return self


class NoBlock(Record):
    """Absence of the token mixer or of the feed-forward block, in layers of a single block (Nemotron-H)."""

    type: Literal["none"] = "none"


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="type")]
Mixer = Annotated[
    GroupedQueryAttention | LatentAttention | CompressedAttention | LinearRecurrence | NoBlock,
    Field(discriminator="type"),
]


class DenseMlp(Record):
    """A feed-forward block; ``gated`` has three matrices (SwiGLU, GeGLU), otherwise two."""

    type: Literal["dense"] = "dense"
    intermediate_size: PositiveInt
    gated: bool = True
    bias: bool = False


class MixtureOfExperts(Record):
    """Routed experts with an optional shared expert; sizes are per expert."""

    type: Literal["moe"] = "moe"
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    intermediate_size: PositiveInt
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    shared_intermediate_size: Count = 0
    """Total width of the shared experts (0: none)."""
    latent_size: PositiveInt | None = None
    """Width to which tokens are projected before the dispatch, and from which after it (Nemotron-3 Ultra); null:
    hidden_size."""
    shared_gate: bool = False
    """A learned scalar gate of the shared expert (hidden_size weights, Qwen1.5-MoE)."""
    router_scales: bool = False
    """Learned factors of the router's input and of the experts' probabilities (Gemma 4)."""

    @model_validator(mode="after")
    def _top_k(self) -> MixtureOfExperts:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            )
        return self


Mlp = Annotated[DenseMlp | MixtureOfExperts | NoBlock, Field(discriminator="type")]


LinearModule = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
]  # fmt: skip
"""Matrix of a layer, named as in Hugging Face's Llama and DeepSeek-V3 whatever the model's own class calls it. The
last three are those of every expert, routed or shared, where a layer has experts."""


class LayerRun(Record):
    """``count`` identical consecutive layers."""

    count: Annotated[int, Field(gt=0, le=10_000)]
    attention: Mixer
    """Token mixer."""
    mlp: Mlp
    num_norms: Annotated[int, Field(ge=0, le=8)] = 2
    """Norms of hidden_size per layer (Gemma 2 has 4)."""

    @model_validator(mode="after")
    def _has_a_block(self) -> LayerRun:
        if self.num_blocks == 0:
            raise ValueError("a layer needs a token mixer or a feed-forward block")
        return self

    @property
    def num_blocks(self) -> int:
        """Number of blocks, each of which adds to the residual stream."""
        return (self.attention.type != "none") + (self.mlp.type != "none")

    @property
    def has_dense_part(self) -> bool:
        """True if the layer has a dense MLP or a shared expert, whose products tensor parallelism divides."""
        return self.mlp.type == "dense" or (self.mlp.type == "moe" and self.mlp.shared_intermediate_size > 0)

    @property
    def recompute_modules(self) -> tuple[RecomputeModule, ...]:
        """Modules that the layer has (``Layout.recompute_modules``).

        Norms are modules of their own before latent attention and experts; Transformer Engine joins other norms
        with the product behind them (Megatron-LM at d98e8a64, core/models/gpt/gpt_layer_specs.py).
        """
        mixer, mlp = self.attention, self.mlp
        experts, compressed = isinstance(mlp, MixtureOfExperts), mixer.type == "compressed"
        latent = isinstance(mixer, LatentAttention)
        whole = mixer.type == "gqa" and mixer.blocks is None
        whole = whole or (isinstance(mixer, LatentAttention) and mixer.indexer is None)
        present = {
            "core_attn": whole,
            "moe_act": experts,
            "layernorm": latent or compressed or experts,
            "mla_up_proj": (latent and whole) or compressed,
            "mlp": isinstance(mlp, DenseMlp),
            "moe": experts,
            "shared_experts": experts and self.has_dense_part,
        }
        return tuple(name for name in RECOMPUTE_MODULES if present[name])

    @property
    def offload_modules(self) -> tuple[OffloadModule, ...]:
        """Modules that the layer has (``Layout.offload_modules``), with norms as in ``recompute_modules``."""
        experts, mixer = isinstance(self.mlp, MixtureOfExperts), self.attention
        whole = mixer.type == "gqa" or (isinstance(mixer, LatentAttention) and mixer.indexer is None)
        before = ("attn_norm",) * isinstance(mixer, LatentAttention)
        attention = (*before, "qkv_linear", "core_attn", "attn_proj") if whole else ()
        present = {*attention, *(("mlp_norm", "expert_fc1", "moe_act") if experts else ())}
        return tuple(name for name in OFFLOAD_MODULES if name in present)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Numbers of heads that tensor parallelism divides; 1 where launchers divide none.

        Attention to compressed keys asserts tp=1 in Megatron-LM@009276bb core/transformer/
        experimental_attention_variant/deepseek_v4_hybrid_attention.py.
        """
        mixer = self.attention
        if isinstance(mixer, NoBlock):
            return ()
        if isinstance(mixer, CompressedAttention):
            return (1,)
        if isinstance(mixer, LinearRecurrence):
            return (mixer.num_key_heads, mixer.num_value_heads)
        return (mixer.num_attention_heads,)

    @property
    def exchanged_heads(self) -> tuple[int, ...]:
        """Numbers of heads that context-parallel ranks exchange, so that cp divides a tensor-parallel rank's.

        Those of a linear recurrence, whose scan needs whole sequences; 1 if its gates pass through a low rank:
        no launcher exchanges these (Megatron-LM@f205386d core/ssm/gated_delta_net/kda.py has matrices instead,
        and AMD-AGI/Primus@46840761 kimi_delta_attention.py no context parallelism).
        """
        if not isinstance(self.attention, LinearRecurrence):
            return ()
        return self.head_counts if self.attention.gate_rank is None else (1,)

    @property
    def prices_products(self) -> bool:
        """True if operator-wise checkpoints of it are priced: with grouped-query attention and no biases, dense or
        with routed experts, whose router, replayed by its shape, has the shape of no other product."""
        mixer, mlp = self.attention, self.mlp
        if mixer.type != "gqa" or mixer.gate_dim or mixer.blocks or mixer.qkv_bias or mixer.output_bias:
            return False
        if mlp.type != "moe":
            return mlp.type == "dense"
        alone = mlp.num_experts / mixer.head_dim not in (mixer.num_key_value_heads, mixer.num_attention_heads)
        others = mlp.bias or mlp.router_bias or mlp.shared_intermediate_size or mlp.latent_size
        return alone and mlp.gated and not others

    @property
    def has_known_adapters(self) -> bool:
        """True if ``linear_modules`` names all matrices that people adapt in a layer."""
        attention = isinstance(self.attention, GroupedQueryAttention | LatentAttention)
        gated = getattr(self.attention, "gate_dim", 0) > 0 or getattr(self.attention, "blocks", None) is not None
        return attention and not gated and self.mlp.type != "none" and not getattr(self.mlp, "latent_size", None)

    @property
    def linear_modules(self) -> tuple[LinearModule, ...]:
        """Names of the layer's matrices that may have an adapter: all but the router."""
        mlp: tuple[LinearModule, ...] = ()
        if not isinstance(self.mlp, NoBlock):
            mlp = ("gate_proj", "up_proj", "down_proj") if self.mlp.gated else ("up_proj", "down_proj")
        if isinstance(self.attention, LinearRecurrence | CompressedAttention | NoBlock):
            return mlp
        if isinstance(self.attention, GroupedQueryAttention):
            values: tuple[LinearModule, ...] = () if self.attention.keys_are_values else ("v_proj",)
            return ("q_proj", "k_proj", *values, "o_proj", *mlp)
        query: tuple[LinearModule, ...] = ("q_proj",)
        if self.attention.q_lora_rank is not None:
            query = ("q_a_proj", "q_b_proj")
        return (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *mlp)

    @property
    def column_modules(self) -> tuple[tuple[LinearModule, ...], tuple[LinearModule, ...]]:
        """Names of the column-parallel matrices of attention and of the MLP."""
        attention = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
        names = self.linear_modules
        return (
            tuple(name for name in names if name in attention),
            tuple(name for name in names if name in ("gate_proj", "up_proj")),
        )


class Projector(Record):
    """Matrices from merged patches to the width of the language model, behind a norm.

    Two matrices have an activation between them, and tensor parallelism divides them as an MLP. A single matrix is
    copied.
    """

    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=3)]
    """Widths of the input, between two matrices, and of the output."""
    bias: bool = False
    of_patches: bool = False
    """It takes single patches, before they merge to tokens (MiniMax-M3)."""
    count: Annotated[int, Field(gt=0, le=1000)] = 1
    """Number of such projectors (Qwen3-VL has one behind the encoder, and others behind layers of it)."""


class VisionEncoder(Record):
    """Encoder of images before the language model: patches, layers that see a whole image, and projectors."""

    hidden_size: PositiveInt
    layers: Annotated[tuple[LayerRun, ...], Field(min_length=1)]
    """Layers of grouped-query attention and a dense MLP."""
    norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    rotary_positions: bool = True
    patch_inputs: PositiveInt
    """Numbers of a patch: channels, pixels and frames."""
    patch_bias: bool = False
    patches_per_token: PositiveInt
    """Patches that merge to a token of the language model."""
    tokens_per_image: PositiveInt | None = None
    """Tokens of every image; null: the job has images of any size."""
    projectors: Annotated[tuple[Projector, ...], Field(min_length=1)]
    other_parameters: Count = 0
    """Parameters of learned positions, and of norms outside layers."""

    @model_validator(mode="after")
    def _layers_are_plain(self) -> VisionEncoder:
        if not all(run.attention.type == "gqa" and run.mlp.type == "dense" for run in self.layers):
            raise ValueError("layers of a vision encoder need attention of type gqa and an mlp of type dense")
        return self

    @property
    def divisors(self) -> tuple[int, ...]:
        """Numbers that tensor parallelism must divide to divide the encoder: heads and widths of MLPs."""
        heads = [heads for run in self.layers for heads in run.head_counts]
        widths = [run.mlp.intermediate_size for run in self.layers if isinstance(run.mlp, DenseMlp)]
        return (*heads, *widths, *(projector.widths[1] for projector in self.projectors if projector.widths[2:]))


class Images(Record):
    """Distribution of the images of a sequence: shares by number, relative to each other. Sequences are drawn
    independently, and all images have the same number of tokens."""

    numbers: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)]
    shares: tuple[PositiveFloat, ...]

    @model_validator(mode="after")
    def _numbers_have_shares(self) -> Images:
        if len(self.shares) != len(self.numbers):
            raise ValueError(f"{len(self.numbers)} numbers need as many shares, not {len(self.shares)}")
        if len({*self.numbers}) < len(self.numbers) or not self.maximum:
            raise ValueError(f"numbers must differ, one of them above 0, got {', '.join(map(str, self.numbers))}")
        return self

    @property
    def mean(self) -> float:
        """Mean number of images."""
        pairs = zip(self.numbers, self.shares, strict=True)
        return sum(number * share for number, share in pairs) / sum(self.shares)

    @property
    def maximum(self) -> int:
        """Maximum number of images."""
        return max(self.numbers)

    @property
    def text(self) -> str:
        """Words for the numbers and their mean."""
        return f"{min(self.numbers):,} to {self.maximum:,} images a sequence, {self.mean:.3g} on average"

    def check(self, image_tokens: int, sequence_length: int, num_sequences: int) -> None:
        """Check that the images fit into a sequence and can be counted over a step.

        Args:
            image_tokens: tokens of an image; 0 if neither job nor model states it.
            sequence_length: tokens of a sequence.
            num_sequences: sequences of a step.

        Raises:
            ValueError: they do not.
        """
        if not image_tokens:
            raise ValueError("images of this model have no fixed size: state image_tokens")
        if self.maximum * image_tokens > sequence_length:
            raise ValueError(
                f"{self.maximum} images of {image_tokens} tokens exceed sequence_length={sequence_length}"
            )
        if self.maximum * num_sequences > MAX_IMAGES:
            raise ValueError(
                f"{num_sequences} sequences of up to {self.maximum} images: expected at most {MAX_IMAGES} images; "
                "state their mean, vision_tokens"
            )


class ModelSpec(Record):
    """Model; ``layers`` lists the runs of identical layers in order."""

    schema_version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    layers: tuple[LayerRun, ...] = Field(min_length=1)
    tie_word_embeddings: bool = False
    learned_positions: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """LayerNorm has a bias, RMSNorm has none."""
    residual_streams: Annotated[int, Field(gt=0, le=64)] = 1
    """Streams of the residual. Hyper-connections mix several of them around each block (DeepSeek-V4)."""
    lm_head_bias: bool = False
    """Bias of the head, whichever it is."""
    num_labels: PositiveInt | None = None
    """Scores of every token from a head that takes the place of the language model's: classes of sequences, a
    reward, a value; null: a head over the vocabulary."""
    dropout: bool = False
    """Training uses dropout after attention and feed-forward block, and keeps the masks for the backward (models
    of the GPT-3 generation)."""
    embedding_dropout: bool | None = None
    """Dropout of the embedding; null: the value of ``dropout``."""
    attention_dropout: bool | None = None
    """Dropout of the scores, whose masks unfused attention keeps; null: the value of ``dropout``."""
    default_sequence_length: PositiveInt = 4096
    num_nextn_predict_layers: Count = 0
    """Layers of multi-token prediction of the published model; ``Job.mtp_layers`` says how many are trained."""
    mtp_layer: LayerRun | None = None
    """Transformer layer of a layer of multi-token prediction; null: that of the last layer."""
    vision: VisionEncoder | None = None
    """Encoder of images, which runs on the first stage before the embedding is filled in."""
    stored_weights: Annotated[str, Field(max_length=100)] | None = None
    """Format of the published checkpoint's weights where it is not the trained one; a loader converts them."""
    ignored_keys: tuple[Annotated[str, Field(max_length=200)], ...] = Field(default=(), max_length=100)
    """Keys of the Hugging Face config that the user ignored; this model lacks their effects."""

    @property
    def head_outputs(self) -> int:
        """Outputs of the head for a token: the vocabulary, or the scores."""
        return self.num_labels or self.vocab_size

    def with_scores(self, num_labels: int = 1, bias: bool = False) -> ModelSpec:
        """Return the model with a head of scores instead of its head over the vocabulary."""
        update = {"num_labels": num_labels, "lm_head_bias": bias, "tie_word_embeddings": False}
        return self.model_copy(update=update | {"num_nextn_predict_layers": 0})

    @property
    def drops_embedding(self) -> bool:
        """True if the embedding keeps a dropout mask."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def drops_scores(self) -> bool:
        """True if unfused attention keeps dropout masks."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(run.count for run in self.layers)

    @property
    def recompute_modules(self) -> tuple[RecomputeModule, ...]:
        """Modules that some layer has."""
        present = {name for run in self.layers for name in run.recompute_modules}
        return tuple(name for name in RECOMPUTE_MODULES if name in present)

    @property
    def has_experts(self) -> bool:
        """True if some layers have routed experts."""
        return any(run.mlp.type == "moe" for run in self.layers)

    @property
    def has_indexers(self) -> bool:
        """True if queries of some layers attend to compressed keys, or to keys or blocks that are selected."""
        return any(
            kind.attention.type == "compressed" or getattr(kind.attention, name, None) is not None
            for kind in self.kinds
            for name in ("indexer", "blocks")
        )

    @property
    def taking_layers(self) -> frozenset[int]:
        """Indices of the layers that attend to the keys of the layer before, and so need it in their stage."""
        takes = [getattr(getattr(kind.attention, "indexer", None), "takes", False) for kind in self.kinds]
        return frozenset(compress(count(), map(takes.__getitem__, self.layer_kinds)))

    @property
    def boundary_tokens(self) -> int:
        """Minimum tokens of a sequence on a context-parallel rank: what the next rank needs of attention to
        compressed keys (``exchange_cp_boundary_hidden`` of Megatron-LM requires as many)."""
        mixers = (kind.attention for kind in self.kinds)
        return max((mixer.boundary_tokens for mixer in mixers if mixer.type == "compressed"), default=1)

    @property
    def common_heads(self) -> int:
        """Greatest common divisor of the heads of queries, and of keys and values, of all layers with attention; 1
        without any, and with indexers, whose layers gather all keys."""
        if self.has_indexers:
            return 1
        softmax = GroupedQueryAttention | LatentAttention
        mixers = [kind.attention for kind in self.kinds if isinstance(kind.attention, softmax)]
        key_values = (mixer.num_key_value_heads for mixer in mixers if mixer.type == "gqa")
        return gcd(*(mixer.num_attention_heads for mixer in mixers), *key_values) or 1

    @property
    def kinds(self) -> tuple[LayerRun, ...]:
        """Distinct layers, in order of first appearance (``count`` is 1)."""
        return _kinds(self.layers)[0]

    @property
    def mtp_kind(self) -> LayerRun:
        """Transformer layer of a layer of multi-token prediction: ``mtp_layer``, else that of the last layer.

        Source: ``get_gpt_mtp_block_spec`` of Megatron-LM (core/models/gpt/gpt_layer_specs.py).
        """
        return self.mtp_layer or self.kinds[self.layer_kinds[-1]]

    @property
    def linear_modules(self) -> tuple[LinearModule, ...]:
        """Names of the matrices of all layers that may have an adapter."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.linear_modules))

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Index in ``kinds`` of every layer, [num_layers]."""
        return _kinds(self.layers)[1]


_Kinds = tuple[tuple[LayerRun, ...], tuple[int, ...]]
_KNOWN: dict[int, tuple[tuple[LayerRun, ...], _Kinds]] = {}
_MOST_KNOWN = 256


def _kinds(layers: tuple[LayerRun, ...]) -> _Kinds:
    """Find ``ModelSpec.kinds`` and ``layer_kinds``, which simulations read once a stage.

    The cache is by identity, because to hash a hundred runs takes long. A cached property would outlive a
    ``model_copy`` that changes the layers.
    """
    known = _KNOWN.get(id(layers))
    if known is not None and known[0] is layers:
        return known[1]
    single = [run.model_copy(update={"count": 1}) for run in layers]
    index = {kind: position for position, kind in enumerate(dict.fromkeys(single))}
    pairs = zip(single, layers, strict=True)
    kinds = tuple(index), tuple(index[kind] for kind, run in pairs for _ in range(run.count))
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    # The entry keeps the layers alive, so no other object has their number.
    _KNOWN[id(layers)] = layers, kinds
    return kinds
