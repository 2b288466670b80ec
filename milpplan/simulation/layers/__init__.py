"""Costs of a layer on one GPU: kernel times, layer times, activations, parameters, embedding and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.simulation.layers.activations import (
        head_deferred_bytes,
        hosted_module_bytes,
        layer_activations,
        layer_deferred_bytes,
    )
    from milpplan.simulation.layers.embedding_and_head import copied_embedding, embedding_endpoint, head_endpoint
    from milpplan.simulation.layers.kernels import (
        attention_backward_s,
        attention_forward_s,
        average_keys,
        interpolate_curve,
        interpolate_table,
        memory_bound_s,
    )
    from milpplan.simulation.layers.layer_time import flash_core_s, layer_seconds
    from milpplan.simulation.layers.paired_layers import LAYER_COMMUNICATION, least_paired_ns
    from milpplan.simulation.layers.parameter_counts import (
        DELTA_RULES,
        LayerParameters,
        active_parameters,
        adapter_parameters,
        decays,
        direct_width,
        embedding_parameters,
        encoder_parameters,
        final_norm_parameters,
        head_parameters,
        layer_parameters,
        mfu,
        mixed_streams,
        model_flops_per_token,
        mtp_parameters,
        mtp_projection_parameters,
        padded_vocab_size,
        position_parameters,
        total_parameters,
        trained_parameters,
        widths,
    )
    from milpplan.simulation.layers.recurrence import low_rank_bytes, scan_bytes, scan_flops, scan_s
    from milpplan.simulation.layers.shard import EXPOSED, ONCE, Part, Phase, Shard, Term, kv_heads_per_rank
    from milpplan.simulation.layers.sparse_attention import compressed_keys
    from milpplan.simulation.layers.vision import images_over_mean
else:
    __getattr__ = lazy_exports(__name__, __file__)
