"""Builders of families whose token mixers differ from layer to layer (see ``families``)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from milpplan.problem import (
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    LayerRun,
    LinearRecurrence,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
)
from milpplan.problem.huggingface.parts import (
    Builder,
    attention_of,
    biased_attention,
    dense_mlp,
    expert_mlps,
    experts_of,
    latent_attention,
    leading_dense,
    listed_experts,
    model_of,
    runs,
    shared_experts,
)
from milpplan.problem.huggingface.typed_keys import HEADS, KEY_VALUE_HEADS, MAX_DIMENSION, Fields
from milpplan.problem.model import Mixer, Mlp
from milpplan.problem.reading import shown


def _qwen_mixers(fields: Fields) -> list[Mixer]:
    """Build gated delta nets, and gated attention in every fourth (or ``full_attention_interval``-th) layer."""
    interval = fields.integer("full_attention_interval", default=4)
    is_full = _full_layers(fields, [(layer + 1) % interval == 0 for layer in range(fields.num_layers)])
    fields.must_be("attn_output_gate", True, "attention has a gate")
    fields.must_be("use_sliding_window", False, "attention is full")
    attention = biased_attention(fields, qk_norm="per_head").model_copy(update={"output_gate": True})
    delta_net = LinearRecurrence(
        update="delta",
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )
    return [attention if full else delta_net for full in is_full]


_AS_CLASS = "it is what the class builds"
_TYPES = ("linear_attention", "full_attention")


def _full_layers(fields: Fields, default: list[bool]) -> list[bool]:
    """Read which layers attend fully: ``layer_types``, or the default of the class."""
    listed = fields.sequence("layer_types")
    if listed is None:
        return default
    if len(listed) != fields.num_layers or not set(map(str, listed)) <= set(_TYPES):
        raise fields.refuse(
            f"layer_types is {shown(listed)}.",
            f"Expected {' or '.join(_TYPES)} for each of {fields.num_layers} layers.",
        )
    return [kind == _TYPES[True] for kind in listed]


def _qwen3_next(fields: Fields, name: str) -> ModelSpec:
    return _qwen_moe(fields, name, fields.expert_layers())


def _qwen3_5_moe(fields: Fields, name: str) -> ModelSpec:
    return _qwen_moe(fields, name, [True] * fields.num_layers)


def _qwen_moe(fields: Fields, name: str, is_expert: list[bool]) -> ModelSpec:
    shared = fields.integer("shared_expert_intermediate_size")
    experts = experts_of(
        fields, "num_experts", "moe_intermediate_size", shared_intermediate_size=shared, shared_gate=True
    )
    return model_of(fields, name, runs(_qwen_mixers(fields), expert_mlps(fields, experts, is_expert)))


def _qwen3_5(fields: Fields, name: str) -> ModelSpec:
    mixers = _qwen_mixers(fields)
    return model_of(fields, name, runs(mixers, [dense_mlp(fields)] * len(mixers)))


_NEMOTRON_BLOCKS = {
    "M": ("mamba", "linear_attention"),
    "*": ("attention", "full_attention"),
    "E": ("moe",),
    "-": ("mlp",),
}
"""Letters of ``hybrid_override_pattern``, and names of the blocks in ``layers_block_type``."""


def _nemotron_pattern(fields: Fields) -> str:
    """Read the block of every layer as a letter."""
    names, pattern = fields.sequence("layers_block_type"), fields.value("hybrid_override_pattern")
    if names is not None:
        letters = {name: letter for letter, listed in _NEMOTRON_BLOCKS.items() for name in listed}
        pattern = "".join(letters.get(str(name), "?") for name in names)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_BLOCKS):
        given = fields.value("hybrid_override_pattern") if names is None else names
        raise fields.refuse(
            f"layers_block_type or hybrid_override_pattern is {shown(given)}.",
            "Expected a block for every layer: mamba (M), attention (*), moe (E) or mlp (-).",
        )
    fields.must_be("num_hidden_layers", len(pattern), "every layer has a block in the list")
    return pattern


def _nemotron_experts(fields: Fields) -> MixtureOfExperts:
    fields.must_be("mlp_bias", False, "experts are described without biases")
    shared = fields.integer("moe_shared_expert_intermediate_size")
    return experts_of(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        gated=False,
        shared_intermediate_size=shared,
        latent_size=fields.optional("moe_latent_size"),
    )


def _nemotron_h(fields: Fields, name: str) -> ModelSpec:
    pattern = _nemotron_pattern(fields)
    for key in ("attention_bias", "mamba_proj_bias"):
        fields.must_be(key, False, "the class does not read it, and has no such bias")
    fields.must_be("tie_word_embeddings", False, "the class never ties its head")
    fields.must_be("residual_in_fp32", False, "the residual stream is in bf16")
    fields.must_be("hidden_dropout", 0, "the class applies none")
    fields.must_be("sliding_window", None, "attention is full")
    blocks: dict[str, tuple[Mixer, Mlp]] = {}
    if "M" in pattern:
        mamba = LinearRecurrence(
            update="ssm",
            num_key_heads=fields.integer("n_groups"),
            num_value_heads=fields.integer("mamba_num_heads"),
            key_head_dim=fields.integer("ssm_state_size"),
            value_head_dim=fields.integer("mamba_head_dim"),
            conv_kernel=fields.integer("conv_kernel"),
            conv_bias=fields.flag("use_conv_bias"),
            bias=fields.flag("use_bias"),
            chunk_size=fields.integer("chunk_size"),
        )
        blocks["M"] = (mamba, NoBlock())
    if "*" in pattern:
        blocks["*"] = (attention_of(fields), NoBlock())
    if "E" in pattern:
        blocks["E"] = (NoBlock(), _nemotron_experts(fields))
    if "-" in pattern:
        blocks["-"] = (NoBlock(), dense_mlp(fields, gated=False, bias=fields.flag("mlp_bias")))
    fields.unused(*_NEMOTRON_SIZES)
    mixers, mlps = zip(*(blocks[letter] for letter in pattern), strict=True)
    return model_of(fields, name, runs(mixers, mlps, num_norms=1))


_NEMOTRON_SIZES = (
    *(
        "n_groups",
        "mamba_num_heads",
        "ssm_state_size",
        "mamba_head_dim",
        "conv_kernel",
        "use_conv_bias",
        "use_bias",
    ),
    *("chunk_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim"),
    *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
    *("moe_shared_expert_intermediate_size", "intermediate_size", "mlp_bias"),
)
"""Keys of blocks that a model may lack."""


def _minimax(fields: Fields, name: str) -> ModelSpec:
    """Build lightning and softmax attention: by ``layer_types``, or by ``attn_type_list`` in files for the code
    beside the weights, whose block is fixed."""
    numbers, layers = fields.sequence("attn_type_list"), range(fields.num_layers)
    if numbers is not None and (len(numbers) != len(layers) or any(one not in (0, 1) for one in numbers)):
        raise fields.refuse(f"attn_type_list is {shown(numbers)}.", "Expected 0 or 1 for every layer.")
    fields.must_be("shared_intermediate_size", 0, "there are no shared experts")
    is_full = _full_layers(
        fields, [layer % 2 == 0 if numbers is None else numbers[layer] == 1 for layer in layers]
    )
    attention = attention_of(fields).model_copy(update={"sliding_window": fields.window()})
    heads, size = attention.num_attention_heads, attention.head_dim
    lightning = LinearRecurrence(
        update="lightning",
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=size,
        value_head_dim=size,
        conv_kernel=0,
        chunk_size=fields.integer("block_size", default=None if numbers is None else 256),
    )
    mixers: list[Mixer] = [attention if full else lightning for full in is_full]
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    return model_of(fields, name, runs(mixers, [experts] * len(mixers)))


_KIMI_SIZES = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Keys of Kimi-Linear's class, and what its own files call them within ``linear_attn_config``."""


def _kimi_linear(fields: Fields, name: str) -> ModelSpec:
    """Build Kimi delta attention, and latent attention in the layers that the file lists."""
    fields.must_be("attn_res_block_size", 0, "the residual stream is a sum, without attention to earlier blocks")
    fields.must_be("mla_use_output_gate", False, "latent attention has no gate")
    fields.must_be("tie_word_embeddings", False, "the class never ties its head")
    nested, layers = fields.value("linear_attn_config"), range(fields.num_layers)
    is_full = [layer > 0 and layer % 4 == 0 for layer in layers]
    if nested is None:
        sizes = [fields.integer(key) for key in _KIMI_SIZES]
    elif isinstance(nested, Mapping):
        own = Fields(nested, f"{fields.source}, linear_attn_config")
        sizes = [own.integer(key) for key in _KIMI_SIZES.values()]
        full, kda = own.sequence("full_attn_layers"), own.sequence("kda_layers")
        if full is not None and kda is not None:
            if sorted(map(str, full + kda)) != sorted(str(layer + 1) for layer in layers):
                raise own.refuse(
                    f"num_hidden_layers={len(layers)}, full_attn_layers {shown(full)}, kda_layers {shown(kda)}.",
                    f"Expected every layer from 1 to {len(layers)} in one of both lists.",
                )
            is_full = [layer + 1 in full for layer in layers]
        own.must_be("use_full_rank_gate", False, "the gate passes through a low rank")
        if unknown := sorted({key for key, value in nested.items() if value is not None} - own.read):
            raise own.refuse(f"{', '.join(map(shown, unknown))} not understood.", "Expected keys that are priced.")
        for key, size in zip(_KIMI_SIZES, sizes, strict=True):
            fields.must_be(key, size, "linear_attn_config says so")
    else:
        raise fields.refuse(f"linear_attn_config is {shown(nested)}.", "Expected an object.")
    heads, head_dim, kernel = sizes
    delta_attention = LinearRecurrence(
        update="kda",
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_kernel=kernel,
        gate_rank=head_dim,
    )
    latent = latent_attention(fields)
    mixers: list[Mixer] = [latent if is_latent else delta_attention for is_latent in _full_layers(fields, is_full)]
    mlps = expert_mlps(fields, shared_experts(fields), listed_experts(fields, leading_dense(fields)))
    return model_of(fields, name, runs(mixers, mlps))


_NAS_PARTS = {
    "attention": (
        "n_heads_in_group",
        (
            "num_sink_tokens",
            "sparsify",
            "unshifted_sink",
            "use_prefill_window_in_sink_attention",
            "window_length",
            "replace_with_linear",
        ),
    ),
    "ffn": ("ffn_mult", ("sparsify", "replace_with_linear")),
}
"""Parts of a block: the key of its size, and keys that must be null or false."""
FFN_MULTIPLE = 256
"""Divisor to which widths of feed-forward blocks are rounded up."""


def _nas_size(fields: Fields, block: object, part: str) -> int | float | None:
    """Read the size of a block's attention or feed-forward part; None if the layer lacks the part."""
    values = block.get(part) if isinstance(block, Mapping) else None
    if not isinstance(values, Mapping):
        raise fields.refuse(f"block_configs has {shown(block)}.", f"Expected an object with {part} in each block.")
    own, (size, plain) = Fields(values, f"{fields.source}, block_configs, {part}"), _NAS_PARTS[part]
    for key in plain:
        if own.value(key) is not None:
            own.must_be(key, False, "blocks are causal attention over all keys, and SwiGLU, or absent")
    absent, number = own.flag("no_op"), own.value(size)
    if unknown := sorted({key for key, value in values.items() if value is not None} - own.read):
        raise own.refuse(f"{', '.join(map(shown, unknown))} not understood.", "Expected keys that are priced.")
    if absent:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= MAX_DIMENSION:
        raise own.refuse(f"{size} is {shown(number)}.", "Expected a positive number.")
    return number


def _nemotron_nas(fields: Fields, name: str) -> ModelSpec:
    """Build layers that differ one by one; layers without any block are left out, because they compute nothing.

    A feed-forward block has the width 2/3 ffn_mult hidden_size, rounded up to a multiple of 256. Source:
    Megatron-LM@d98e8a64 core/transformer/heterogeneous/heterogeneous_config.py, and the classes beside the weights
    of nvidia/Llama-3_3-Nemotron-Super-49B-v1 (``DeciLMDecoderLayer``: a norm before each block that is there).
    """
    blocks, heads = fields.sequence("block_configs"), fields.integer(HEADS)
    if blocks is None or len(blocks) != fields.num_layers:
        raise fields.refuse(
            f"block_configs is {shown(blocks)}.", f"Expected a block for each of {fields.num_layers} layers."
        )
    for key in (KEY_VALUE_HEADS, "intermediate_size"):
        if fields.value(key) is not None:
            raise fields.refuse(f"{key} is {shown(fields.value(key))}.", "Expected null: block_configs says it.")
    fields.must_be("head_dim", fields.divided_head_dim, "heads divide the width")
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    layers: list[LayerRun] = []
    for block in blocks:
        group, factor = (_nas_size(fields, block, part) for part in _NAS_PARTS)
        mixer: Mixer = NoBlock()
        if group is not None:
            if not isinstance(group, int) or heads % group:
                raise fields.refuse(f"n_heads_in_group is {group}.", f"Expected a divisor of {heads} heads.")
            mixer = attention_of(fields, bias, bias, "none", False, heads // group, fields.divided_head_dim)
        mlp: Mlp = NoBlock()
        if factor is not None:
            width = -(-int(2 * factor * fields.hidden_size / 3) // FFN_MULTIPLE) * FFN_MULTIPLE
            mlp = DenseMlp(intermediate_size=width, bias=mlp_bias)
        if "none" not in (mixer.type, mlp.type):
            layers += runs([mixer], [mlp])
        elif mixer.type != mlp.type:
            layers += runs([mixer], [mlp], num_norms=1)
    if not layers:
        raise fields.refuse("block_configs has no block that computes anything.", "Expected at least one.")
    joined = [(kind, len(list(same))) for kind, same in groupby(layers)]
    return model_of(fields, name, tuple(kind.model_copy(update={"count": count}) for kind, count in joined))


def _kinds_with_mtp(
    fields: Fields, keys: tuple[str, str], default: list[str], kinds: tuple[str, str], further: int
) -> list[str]:
    """Read the kind of every layer, and of layers of multi-token prediction behind them if the file has any.

    Args:
        fields: the config.
        keys: the key of the list, and that of a second list with the further entries.
        default: kinds of an absent list.
        kinds: names of both kinds.
        further: number of layers of multi-token prediction.
    """
    number, listed = fields.num_layers, fields.sequence(keys[0])
    behind = fields.sequence(keys[1]) or []
    found = default if listed is None else [str(kind) for kind in listed]
    if len(found) == number:
        found = [*found, *map(str, behind)]
    if len(found) not in (number, number + further) or not {*found} <= {*kinds}:
        raise fields.refuse(f"{keys[0]} is {shown(found)}.", f"Expected {' or '.join(kinds)} for {number} layers.")
    return found


def _step_attentions(fields: Fields) -> tuple[GroupedQueryAttention, GroupedQueryAttention]:
    """Build full attention, and that of a window with heads of its own; both have a gate of heads."""
    full = attention_of(fields, qk_norm="per_head").model_copy(update={"head_gate": True})
    heads = fields.optional("num_sliding_attention_heads")
    other = fields.value("attention_other_setting")
    if isinstance(other, Mapping):
        own = Fields(other, f"{fields.source}, attention_other_setting")
        heads = heads or own.optional(HEADS)
        own.must_be("attention_type", "sliding_attention", _AS_CLASS)
        own.must_be("num_attention_groups", full.num_key_value_heads, _AS_CLASS)
        for key in ("head_dim", "true_head_dim"):
            own.must_be(key, full.head_dim, _AS_CLASS)
        if unknown := sorted({*other} - own.read):
            raise own.refuse(f"{', '.join(map(shown, unknown))} not understood.", "Expected keys that are priced.")
    else:
        fields.must_be("attention_other_setting", None, "an object has the heads of sliding layers")
    near = {"num_attention_heads": heads or full.num_attention_heads, "sliding_window": fields.window()}
    return full, GroupedQueryAttention(**full.model_dump() | near)


def _step(fields: Fields, name: str) -> ModelSpec:
    """Build Step-3.5 and 3.7: windows with heads of their own, gates of heads, dense layers before the experts.

    Layers of multi-token prediction differ from the last layer; a file that does not say how leaves them out by
    name. Source: transformers 5.24.0, ``Step3p7TextConfig``; Megatron-Bridge@067f987d
    models/stepfun/step35_bridge.py.
    """
    number = fields.num_layers
    further = fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    for key in ("n_shared_experts", "use_qk_norm", "use_head_wise_attn_gate"):
        fields.must_be(key, 1 if key == "n_shared_experts" else True, _AS_CLASS)
    for key in ("attention_bias", "mlp_bias", "sink"):
        fields.must_be(key, False, "attention and experts are described without")
    listed = fields.value("moe_layers_enum")
    sparse = listed.split(",") if isinstance(listed, str) else fields.sequence("moe_layers_enum")
    numbers = {str(layer).strip() for layer in (range(3, number) if sparse is None else sparse)}
    mlp_kinds = ["sparse" if str(layer) in numbers else "dense" for layer in range(number + further)]
    mlp_kinds = _kinds_with_mtp(
        fields, ("mlp_layer_types", "mtp_mlp_layer_types"), mlp_kinds, ("dense", "sparse"), further
    )
    kinds = _kinds_with_mtp(
        fields,
        ("layer_types", "mtp_layer_types"),
        ["full_attention"] * (number + further),
        ("full_attention", "sliding_attention"),
        further,
    )
    first = mlp_kinds.index("sparse") if "sparse" in mlp_kinds else number
    fields.must_be("first_k_dense_replace", first, _AS_CLASS)
    width = fields.integer("share_expert_dim")
    experts = experts_of(fields, "n_routed_experts", "moe_intermediate_size", shared_intermediate_size=width)
    mlps = expert_mlps(fields, experts, [kind == "sparse" for kind in mlp_kinds])
    full, near = _step_attentions(fields)
    mixers = [near if kind == "sliding_attention" else full for kind in kinds]
    model = model_of(fields, name, runs(mixers[:number], mlps[:number]))
    predicting = runs(mixers[number:], mlps[number : len(mixers)])
    if len({*predicting}) > 1:
        raise fields.refuse("layers that predict further tokens differ.", "Expected equal ones.")
    if further and not predicting:
        return model.model_copy(update={"ignored_keys": ("num_nextn_predict_layers",)})
    return (
        model.model_copy(update={"mtp_layer": predicting[0].model_copy(update={"count": 1})}) if further else model
    )


def _mamba2(fields: Fields) -> LinearRecurrence:
    """Build the Mamba-2 mixer of Bamba and Granite 4, whose keys start with ``mamba_``."""
    heads, width = fields.integer("mamba_n_heads"), fields.integer("mamba_expand") * fields.hidden_size
    if width % heads:
        raise fields.refuse(
            f"mamba_n_heads is {heads}.", f"Expected a divisor of mamba_expand x hidden_size, {width}."
        )
    if fields.value("mamba_d_head") != "auto":
        fields.must_be("mamba_d_head", width // heads, "heads fill mamba_expand x hidden_size")
    if heads % (groups := fields.integer("mamba_n_groups")):
        raise fields.refuse(f"mamba_n_groups is {groups}.", f"Expected a divisor of {heads} heads.")
    return LinearRecurrence(
        update="ssm",
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=fields.integer("mamba_d_state"),
        value_head_dim=width // heads,
        conv_kernel=fields.integer("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias"),
        bias=fields.flag("mamba_proj_bias"),
        chunk_size=fields.integer("mamba_chunk_size"),
    )


_MAMBA_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of layers in Granite's own files, and those of its class."""


def _granite_hybrid(fields: Fields, name: str) -> ModelSpec:
    """Build Granite 4: Mamba-2 or attention, and a shared expert with or without routed ones."""
    number = fields.num_layers
    listed = fields.sequence("layer_types") or ["linear_attention"] * number
    kinds = [_MAMBA_TYPES.get(str(kind), str(kind)) for kind in listed]
    if len(kinds) != number or not {*kinds} <= {*_TYPES}:
        raise fields.refuse(
            f"layer_types is {shown(listed)}.", f"Expected mamba or attention for {number} layers."
        )
    shared = fields.integer("shared_intermediate_size")
    mlp: Mlp = DenseMlp(intermediate_size=shared)
    if fields.integer("num_local_experts", minimum=0):
        mlp = experts_of(fields, "num_local_experts", "intermediate_size", shared_intermediate_size=shared)
    fields.unused("num_experts_per_tok", "intermediate_size")
    mamba, attention = _mamba2(fields), biased_attention(fields)
    mixers: list[Mixer] = [attention if kind == _TYPES[True] else mamba for kind in kinds]
    return model_of(fields, name, runs(mixers, [mlp] * number))


def _bamba(fields: Fields, name: str) -> ModelSpec:
    """Build Bamba: Mamba-2, and attention in the layers that ``attn_layer_indices`` names."""
    fields.must_be("z_loss_coefficient", 0.0, "the loss is that of the logits alone")
    layers, listed = range(fields.num_layers), fields.sequence("attn_layer_indices") or []
    if not {*map(str, listed)} <= {*map(str, layers)}:
        raise fields.refuse(f"attn_layer_indices is {shown(listed)}.", f"Expected numbers below {len(layers)}.")
    mamba, attention = _mamba2(fields), biased_attention(fields)
    mixers: list[Mixer] = [attention if layer in listed else mamba for layer in layers]
    return model_of(fields, name, runs(mixers, [dense_mlp(fields, bias=fields.flag("mlp_bias"))] * len(layers)))


_BLOCK_SIZES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}
"""Sizes of MiniMax-M3's index branch in its class, and within ``sparse_attention_config`` of its own files."""


def _block_attention(fields: Fields, full: GroupedQueryAttention) -> list[Mixer]:
    """Build attention to selected blocks in the layers that ``layer_types`` or ``sparse_attention_freq`` names."""
    number, nested = fields.num_layers, fields.value("sparse_attention_config")
    listed = fields.sequence("layer_types")
    sizes = {key: fields.optional(key) for key in _BLOCK_SIZES}
    flags: list[object] = [kind == "minimax_m3_sparse" for kind in listed or ["full_attention"] * number]
    known = listed is None or {*map(str, listed)} <= {"minimax_m3_sparse", "full_attention"}
    if isinstance(nested, Mapping):
        own = Fields(nested, f"{fields.source}, sparse_attention_config")
        for key, name in _BLOCK_SIZES.items():
            if (size := own.optional(name)) is not None:
                fields.must_be(key, size, f"sparse_attention_config has it as {name}")
                sizes[key] = size
        named = own.sequence("sparse_attention_freq")
        flags = flags if listed is not None or named is None else named
        own.must_be("use_sparse_attention", True, _AS_CLASS)
        own.must_be("sparse_score_type", "max", _AS_CLASS)
        own.must_be("sparse_init_block", 0, _AS_CLASS)
        own.must_be("sparse_disable_index_value", named, "the branch selects, and has no values")
        # A block that is always selected is one of the selected blocks.
        own.unused("sparse_local_block")
        if unknown := sorted({*nested} - own.read):
            raise own.refuse(f"{', '.join(map(shown, unknown))} not understood.", "Expected keys that are priced.")
    elif nested is not None:
        raise fields.refuse(f"sparse_attention_config is {shown(nested)}.", "Expected an object.")
    if not known or len(flags) != number or any(flag not in (0, 1) for flag in flags):
        raise fields.refuse(
            f"layer_types is {shown(listed)}.",
            f"Expected minimax_m3_sparse or full_attention for {number} layers.",
        )
    if not any(flags):
        return [full] * number
    if missing := [key for key, size in sizes.items() if size is None]:
        raise fields.missing(missing[0])
    if sizes["index_n_heads"] != full.num_key_value_heads:
        raise fields.refuse(
            f"index_n_heads is {sizes['index_n_heads']}.", "Expected one for each group of queries."
        )
    sparse = GroupedQueryAttention(**full.model_dump() | {"blocks": sizes})
    return [sparse if flag else full for flag in flags]


def _minimax_m3(fields: Fields, name: str) -> ModelSpec:
    """Build attention to selected blocks of keys, and dense layers before the experts."""
    for key, value in (("use_qk_norm", True), ("qk_norm_type", "per_head"), ("attention_output_gate", False)):
        fields.must_be(key, value, _AS_CLASS)
    fields.must_be("n_shared_experts", 1, _AS_CLASS)
    fields.must_be("moe_intermediate_size", fields.value("intermediate_size"), _AS_CLASS)
    number, freq = fields.num_layers, fields.sequence("moe_layer_freq")
    if freq is not None and (len(freq) != number or any(flag not in (0, 1) for flag in freq)):
        raise fields.refuse(
            f"moe_layer_freq is {shown(freq)}, num_hidden_layers {number}.", "Expected 0 or 1 for every layer."
        )
    is_expert = listed_experts(fields, [True] * number if freq is None else [bool(flag) for flag in freq])
    first = is_expert.index(True) if True in is_expert else number
    fields.must_be("first_k_dense_replace", first, _AS_CLASS)
    experts = experts_of(
        fields,
        "num_local_experts",
        "intermediate_size",
        shared_intermediate_size=fields.integer("shared_intermediate_size"),
    )
    dense = dense_mlp(fields, key="dense_intermediate_size")
    mixers = _block_attention(fields, attention_of(fields, qk_norm="per_head"))
    return model_of(fields, name, runs(mixers, [experts if flag else dense for flag in is_expert]))


_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_RATES = {0: "sliding_attention", 4: _COMPRESSED[0], 128: _COMPRESSED[1]}
"""Kinds of layers by their number in ``compress_ratios``."""


def _compression(fields: Fields) -> tuple[list[str], dict[str, int]]:
    """Read DeepSeek-V4's kinds of layers, then that of the layers that predict further tokens (a window alone if
    the file has none, as in the published ones), and the tokens of a block in each kind with compressed keys."""
    number, listed = fields.num_layers, fields.sequence("layer_types")
    ratios, rates = fields.sequence("compress_ratios"), {_COMPRESSED[0]: 4, _COMPRESSED[1]: 128}
    kinds = [_COMPRESSED[layer < 2 or layer % 2 == 0] for layer in range(number)]
    if ratios is not None:
        if len(ratios) < number or {*map(str, ratios)} - {*map(str, _RATES)}:
            raise fields.refuse(
                f"compress_ratios is {shown(ratios)}.", f"Expected 0, 4 or 128 for each of {number} layers."
            )
        kinds = [_RATES[int(str(one))] for one in ratios]
    if listed is not None:
        if len(listed) < number or not {*map(str, listed)} <= {*_RATES.values()}:
            raise fields.refuse(
                f"layer_types is {shown(listed)}.",
                f"Expected {', '.join(_RATES.values())} for each of {number} layers.",
            )
        if ratios is not None and listed[:number] != kinds[:number]:
            raise fields.refuse("layer_types differs from compress_ratios.", "Expected the same kinds of layers.")
        kinds[:number] = [str(kind) for kind in listed[:number]]
    if len({*kinds[number:]}) > 1:
        raise fields.refuse("Layers of further tokens differ in compress_ratios.", "Expected one kind of them.")
    for key, kind in (("compress_rate_csa", _COMPRESSED[0]), ("compress_rate_hca", _COMPRESSED[1])):
        rates[kind] = fields.integer(key, default=rates[kind])
    nested = fields.value("compress_rates")
    if isinstance(nested, Mapping) and {*nested} == {*rates}:
        own = Fields(nested, f"{fields.source}, compress_rates")
        for key, kind in (("compress_rate_csa", _COMPRESSED[0]), ("compress_rate_hca", _COMPRESSED[1])):
            rates[kind] = own.integer(kind)
            fields.must_be(key, rates[kind], "compress_rates says so")
    elif nested is not None:
        raise fields.refuse(f"compress_rates is {shown(nested)}.", f"Expected a number for {', '.join(rates)}.")
    return [*kinds[:number], *(kinds[number : number + 1] or [_RATES[0]])], rates


def _deepseek_v4(fields: Fields, name: str) -> ModelSpec:
    """Build attention to windows and compressed keys, experts in every layer, and several residual streams."""
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        fields.must_be(key, False, _AS_CLASS)
    fields.must_be(KEY_VALUE_HEADS, 1, "all heads share a key, which is the value, too")
    fields.must_be("n_shared_experts", 1, _AS_CLASS)
    number, mlps = fields.num_layers, fields.sequence("mlp_layer_types")
    if mlps is not None and (len(mlps) < number or not {*map(str, mlps)} <= {"hash_moe", "moe"}):
        raise fields.refuse(f"mlp_layer_types is {shown(mlps)}.", f"Expected hash_moe or moe for {number} layers.")
    kinds, rates = _compression(fields)
    plain = CompressedAttention(
        num_attention_heads=fields.integer(HEADS),
        head_dim=fields.integer("head_dim"),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window"),
    )
    indexer = Indexer(**{key: fields.integer(key) for key in ("index_n_heads", "index_head_dim", "index_topk")})
    mixers: dict[str, Mixer] = {_RATES[0]: plain}
    for kind, selects in zip(_COMPRESSED, (indexer, None), strict=True):
        mixers[kind] = plain.model_copy(update={"compress_rate": rates[kind], "indexer": selects})
    width = fields.integer("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", "moe_intermediate_size", shared_intermediate_size=width)
    layers = runs([mixers[kind] for kind in kinds[:number]], [experts] * number)
    further = LayerRun(count=1, attention=mixers[kinds[number]], mlp=experts)
    streams = fields.integer("hc_mult", minimum=2)
    return model_of(fields, name, layers, residual_streams=streams, mtp_layer=further)


BUILDERS: dict[str, Builder] = {
    "deepseek_v4": _deepseek_v4,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "minimax_m3_vl_text": _minimax_m3,
    "step3p7": _step,
    "nemotron-nas": _nemotron_nas,
    "kimi_linear": _kimi_linear,
    "minimax": _minimax,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "nemotron_h": _nemotron_h,
}
"""Families by ``model_type``."""
