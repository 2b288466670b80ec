"""Encoders of images from the ``vision_config`` of a multimodal Hugging Face config.

Source: transformers 5.24.0 (``Qwen3VLMoeVisionModel``, ``Qwen3_5MoeVisionModel``, ``KimiK25VisionModel``,
``SiglipVisionModel`` with ``Gemma3MultiModalProjector``, ``Llama4VisionModel``, ``Gemma4VisionModel``,
``MiniMaxM3VLVisionModel`` with ``MiniMaxM3VLMultiModalProjector``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from milpplan.problem import DenseMlp, GroupedQueryAttention, LayerRun, Projector, VisionEncoder
from milpplan.problem.huggingface.defaults import FIXED, without_effect
from milpplan.problem.huggingface.typed_keys import HEADS, HIDDEN, LAYERS, Fields
from milpplan.problem.reading import shown

COLORS = 3

_WITHOUT_EFFECT = frozenset(
    [
        "model_type",
        "hidden_act",
        "hidden_activation",
        "projector_hidden_act",
        "initializer_range",
        "layer_norm_eps",
        "projector_ln_eps",
        "_attn_implementation",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "architectures",
        "init_pos_emb_time",
    ]
)
"""Keys about functions within kernels, and about files. Kimi's positions in time have no weights."""


def _layers(fields: Fields, hidden: int, heads: int, width: int, count: int) -> tuple[LayerRun, ...]:
    """Build layers of multi-head attention and a plain MLP, with biases and two norms."""
    if hidden % heads:
        raise fields.refuse(f"the width {hidden} is not a multiple of {heads} heads.", "Expected a multiple.")
    attention = GroupedQueryAttention(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        output_bias=True,
    )
    mlp = DenseMlp(intermediate_size=width, gated=False, bias=True)
    return (LayerRun(count=count, attention=attention, mlp=mlp),)


def _qwen(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    hidden, merge = fields.integer(HIDDEN), fields.integer("spatial_merge_size")
    fields.must_be("out_hidden_size", width, "it is the width of the language model")
    merged = hidden * merge**2
    further = fields.sequence("deepstack_visual_indexes") or []
    projector = Projector(widths=(merged, merged, width), bias=True, count=1 + len(further))
    pixels = (
        fields.integer("in_channels") * fields.integer("temporal_patch_size") * fields.integer("patch_size") ** 2
    )
    # Norms before the merger are of a patch, those of the further mergers of the merged patches.
    norms = 2 * hidden + len(further) * 2 * merged
    return VisionEncoder(
        hidden_size=hidden,
        layers=_layers(
            fields,
            hidden,
            fields.integer("num_heads"),
            fields.integer("intermediate_size"),
            fields.integer("depth"),
        ),
        patch_inputs=pixels,
        patch_bias=True,
        patches_per_token=merge**2,
        projectors=(projector,),
        other_parameters=fields.integer("num_position_embeddings") * hidden + norms,
    )


def _kimi(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    hidden = fields.integer("vt_hidden_size")
    fields.must_be("merge_kernel_size", [2, 2], "four patches merge to a token")
    as_class = "it is what the class builds"
    fields.must_be("mm_hidden_size", hidden, as_class)
    fields.must_be("text_hidden_size", width, "it is the width of the language model")
    for key, value in (
        ("mm_projector_type", "patchmerger"),
        ("merge_type", "sd2_tpool"),
        ("pos_emb_type", "divided_fixed"),
        ("video_attn_type", "spatial_temporal"),
    ):
        fields.must_be(key, value, as_class)
    merged = 4 * hidden
    positions = fields.integer("init_pos_emb_height") * fields.integer("init_pos_emb_width")
    return VisionEncoder(
        hidden_size=hidden,
        layers=_layers(
            fields,
            hidden,
            fields.integer("vt_num_attention_heads"),
            fields.integer("vt_intermediate_size"),
            fields.integer("vt_num_hidden_layers"),
        ),
        patch_inputs=COLORS * fields.integer("patch_size") ** 2,
        patch_bias=True,
        patches_per_token=4,
        projectors=(Projector(widths=(merged, merged, width), bias=True),),
        # Positions, the norm behind the layers, and the norm before the projector.
        other_parameters=positions * hidden + 2 * hidden + 2 * hidden,
    )


def _siglip(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    fields.must_be("model_type", "siglip_vision_model", "it is the encoder of the class")
    fields.must_be("vision_use_head", False, "the class has no pooled output")
    fields.must_be("num_channels", COLORS, "images have three colours")
    fields.must_be("attention_dropout", 0.0, "the encoder has no dropout")
    hidden, patch, image = (fields.integer(key) for key in (HIDDEN, "patch_size", "image_size"))
    tokens = Fields(outer, fields.source).integer("mm_tokens_per_image")
    patches = (image // patch) ** 2
    if patches % tokens:
        raise fields.refuse(f"{patches} patches pool to {shown(tokens)} tokens.", "Expected a divisor.")
    return VisionEncoder(
        hidden_size=hidden,
        layers=_layers(
            fields, hidden, fields.integer(HEADS), fields.integer("intermediate_size"), fields.integer(LAYERS)
        ),
        rotary_positions=False,
        patch_inputs=COLORS * patch**2,
        patch_bias=True,
        patches_per_token=patches // tokens,
        tokens_per_image=tokens,
        projectors=(Projector(widths=(hidden, width)),),
        # Positions, the norm behind the layers, and the norm before the projection, which has weights alone.
        other_parameters=patches * hidden + 2 * hidden + hidden,
    )


def _llama4(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    """Build the encoder of Llama 4, whose images are tiles of one size; the class token beside the patches of a
    tile costs nothing here."""
    hidden, patch, image = (fields.integer(key) for key in (HIDDEN, "patch_size", "image_size"))
    feed_forward, between = fields.integer("intermediate_size"), fields.integer("projector_input_dim")
    projected, patches = fields.integer("projector_output_dim"), (image // patch) ** 2
    as_class = "it is what the class builds"
    fields.must_be("num_channels", COLORS, "images have three colours")
    fields.must_be("pixel_shuffle_ratio", 0.5, "four patches merge to a token")
    fields.must_be("intermediate_size", 4 * hidden, "the projector takes four merged patches")
    fields.must_be("vision_output_dim", projected, as_class)
    fields.must_be("multi_modal_projector_bias", False, as_class)
    fields.must_be("vision_feature_select_strategy", "default", as_class)
    for key in ("projector_dropout", "attention_dropout"):
        fields.must_be(key, 0.0, "the encoder has no dropout")
    fields.must_be("vision_feature_layer", -1, "the last layer's output is projected")
    return VisionEncoder(
        hidden_size=hidden,
        layers=_layers(fields, hidden, fields.integer(HEADS), feed_forward, fields.integer(LAYERS)),
        patch_inputs=COLORS * patch**2,
        patches_per_token=4,
        tokens_per_image=patches // 4,
        projectors=(Projector(widths=(4 * hidden, between, projected)), Projector(widths=(projected, width))),
        # Positions, the class token, and two norms around the layers.
        other_parameters=(patches + 2) * hidden + 4 * hidden,
    )


def _gemma4(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    hidden, heads, patch = (fields.integer(key) for key in (HIDDEN, HEADS, "patch_size"))
    size, pooled = fields.head_dim, fields.integer("pooling_kernel_size")
    tokens = fields.integer("default_output_length")
    as_class = "it is what the class builds"
    Fields(outer, fields.source).must_be("vision_soft_tokens_per_image", tokens, as_class)
    fields.must_be("num_key_value_heads", heads, "every head has keys and values of its own")
    fields.must_be("global_head_dim", size, as_class)
    for key in ("attention_bias", "use_clipped_linears"):
        fields.must_be(key, False, as_class)
    fields.must_be("attention_dropout", 0.0, "the encoder has no dropout")
    fields.must_be("image_seq_length", tokens, "it is default_output_length")
    # Buffers, the length of a table of angles, and tokens of videos, which no job has.
    fields.unused("standardize", "max_position_embeddings", "video_seq_length")
    attention = GroupedQueryAttention(
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=size, qk_norm="per_head"
    )
    mlp = DenseMlp(intermediate_size=fields.integer("intermediate_size"))
    return VisionEncoder(
        hidden_size=hidden,
        layers=(LayerRun(count=fields.integer(LAYERS), attention=attention, mlp=mlp, num_norms=4),),
        norm="rmsnorm",
        patch_inputs=COLORS * patch**2,
        patches_per_token=pooled**2,
        tokens_per_image=tokens,
        projectors=(Projector(widths=(hidden, width)),),
        # A table of positions for each of both axes.
        other_parameters=2 * fields.integer("position_embedding_size") * hidden,
    )


def _minimax_m3(fields: Fields, outer: Mapping[str, object], width: int) -> VisionEncoder:
    """Build MiniMax-M3's encoder: a projector of patches, and another behind it of merged patches."""
    whole, as_class = Fields(outer, fields.source), "it is what the class builds"
    nested = fields.value("img_token_compression_config")
    sizes = (
        Fields(nested, f"{fields.source}, img_token_compression_config") if isinstance(nested, Mapping) else fields
    )
    merge, frames = sizes.integer("spatial_merge_size"), sizes.integer("temporal_patch_size")
    sizes.must_be("image_token_compression_method", "patch_merge", as_class)
    whole.must_be("img_token_compression_config", nested, "both levels say it")
    fields.must_be("projection_dim", width, "it is the width of the language model")
    for key, value in (("position_embedding_type", "rope"), ("rope_mode", "3d"), ("num_channels", COLORS)):
        fields.must_be(key, value, as_class)
    fields.must_be("attention_dropout", 0.0, "the encoder has no dropout")
    for key, plain in (("multimodal_projector_bias", True), ("num_reward_heads", 0), ("vision_feature_layer", -1)):
        whole.must_be(key, plain, as_class)
    whole.must_be("vision_feature_select_strategy", "full", as_class)
    # Limits of sizes of images and videos, and a vocabulary that the class lacks.
    fields.unused("image_size", "vocab_size", "vision_segment_max_frames", "initializer_factor", "rope_theta")
    hidden, between = fields.integer(HIDDEN), whole.integer("projector_hidden_size")
    return VisionEncoder(
        hidden_size=hidden,
        layers=_layers(
            fields, hidden, fields.integer(HEADS), fields.integer("intermediate_size"), fields.integer(LAYERS)
        ),
        patch_inputs=COLORS * frames * fields.integer("patch_size") ** 2,
        patches_per_token=merge**2,
        projectors=(
            Projector(widths=(hidden, between, width), bias=True, of_patches=True),
            Projector(widths=(merge**2 * width, between, width), bias=True),
        ),
        # A norm before the layers.
        other_parameters=2 * hidden,
    )


OUTER_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "minimax_m3_vl": (
        *("img_token_compression_config", "multimodal_projector_bias", "num_reward_heads", "vision_feature_layer"),
        *("vision_feature_select_strategy", "projector_hidden_size", "projector_hidden_act"),
        *("image_grid_pinpoints", "image_seq_length", "process_image_mode"),
    )
}
"""Keys beside ``vision_config`` that builders of encoders check, or that only say how images are cut."""

ENCODERS: Final[dict[str, Callable[[Fields, Mapping[str, object], int], VisionEncoder]]] = {
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "kimi_k25": _kimi,
    "gemma3": _siglip,
    "minimax_m3_vl": _minimax_m3,
    "gemma4": _gemma4,
    "llama4": _llama4,
}
"""Builders of the encoder, by the ``model_type`` of the whole config.

They take the fields of ``vision_config``, the whole config, and the width of the language model.
"""


def has_known_encoder(config: Mapping[str, object]) -> bool:
    """Check that a config has an encoder of images with a builder."""
    return isinstance(config.get("vision_config"), Mapping) and config.get("model_type") in ENCODERS


def encoder_of(config: Mapping[str, object], width: int, source: str) -> VisionEncoder | None:
    """Build the encoder of images of a config; None without any, and of families without a builder.

    Args:
        config: the whole config.
        width: width of the language model.
        source: name of the config in messages.

    Raises:
        InvalidInputError: a missing or impossible value, or a key that is not understood.
    """
    values = config.get("vision_config")
    if not isinstance(values, Mapping) or not has_known_encoder(config):
        return None
    fields = Fields(values, f"{source}, vision_config")
    encoder = ENCODERS[str(config["model_type"])](fields, config, width)
    for key, (expected, reason) in FIXED.items():
        fields.must_be(key, expected, reason)
    known = {*fields.read, *_WITHOUT_EFFECT, *without_effect("")}
    unknown = [key for key, value in values.items() if value is not None and key not in known]
    if unknown:
        raise fields.refuse(
            f"{', '.join(shown(key) for key in unknown)} not understood.",
            f"Expected keys of the encoder of {shown(config['model_type'])} that are priced.",
        )
    return encoder
