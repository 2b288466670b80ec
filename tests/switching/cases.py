"""A small model with every kind of tensor, and random plans of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from milpplan import Layout, ModelSpec, Plan, VirtualStage
from milpplan.problem import (
    RANK_ORDERS,
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
)

GROUPED = GroupedQueryAttention(
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    qkv_bias=True,
    output_bias=True,
    qk_norm="per_head",
    sinks=True,
)
LATENT = LatentAttention(
    num_attention_heads=4, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3,
    indexer=Indexer(index_n_heads=2, index_head_dim=3, index_topk=4),
)  # fmt: skip
EXPERTS = MixtureOfExperts(
    num_experts=4,
    num_experts_per_tok=2,
    intermediate_size=8,
    bias=True,
    router_bias=True,
    shared_intermediate_size=8,
    shared_gate=True,
    router_scales=True,
)


def mixed_model(tied: bool = True) -> ModelSpec:
    """Dense layers with shared heads, then latent attention with experts; learned positions, biases, 5 layers."""
    return ModelSpec(
        name="mixed",
        hidden_size=16,
        vocab_size=300,
        max_position_embeddings=8,
        learned_positions=True,
        tie_word_embeddings=tied,
        lm_head_bias=True,
        norm="layernorm",
        layers=(
            LayerRun(count=2, attention=GROUPED, mlp=DenseMlp(intermediate_size=24, bias=True)),
            LayerRun(count=3, attention=LATENT, mlp=EXPERTS),
        ),
    )


def plan_of(model: ModelSpec, spans: list[int] | None = None, **degrees: Any) -> Plan:
    """A plan with stages that end at ``spans``, or equal ones."""
    layout = Layout.model_validate({"global_batch_size": 4096, **degrees})
    stages, layers = layout.num_virtual_stages, model.num_layers
    ends = spans if spans is not None else [layers * (stage + 1) // stages for stage in range(stages)]
    return Plan(layout=layout, virtual_stages=tuple(VirtualStage(layers=span) for span in pairwise([0, *ends])))


def degrees_of(num_gpus: int) -> list[dict[str, int]]:
    """All layouts of powers of two on so many GPUs, experts' degrees included."""
    powers = (1, 2, 4, 8)
    found = []
    for tp, cp, pp in ((tp, cp, pp) for tp in powers for cp in powers for pp in powers):
        if num_gpus % (tp * cp * pp):
            continue
        dp = num_gpus // (tp * cp * pp)
        found += [
            {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}
            for ep in powers[:3]
            for etp in powers
            if (tp * cp * dp) % (ep * etp) == 0
        ]
    return found


@st.composite
def plans(draw: st.DrawFn, model: ModelSpec, num_gpus: int) -> Plan:
    """Any degrees, ZeRO stage, order of ranks, chunks and uneven split of the layers; stages may be empty."""
    degrees: dict[str, Any] = dict(draw(st.sampled_from(degrees_of(num_gpus))))
    chunks = draw(st.sampled_from(["1f1b", "interleaved", "zb-v"])) if degrees["pp"] > 1 else "1f1b"
    degrees |= {"schedule": chunks, "vpp": 1 if chunks == "1f1b" else 2}
    degrees |= {"zero_stage": draw(st.integers(0, 3)), "rank_order": draw(st.sampled_from(RANK_ORDERS))}
    layout = Layout(global_batch_size=degrees["dp"], **degrees)
    if layout.zero_stage:
        groups = [n for n in range(1, layout.dp + 1) if layout.dp % n == layout.expert_dp % n == 0]
        legal = [n for n in groups if n == 1 or n < layout.cp * layout.dp]
        degrees |= {"dp_replicate": draw(st.sampled_from(legal))}
    cut = st.integers(0, model.num_layers)
    cuts = sorted(
        draw(
            st.lists(cut, min_size=degrees["pp"] * degrees["vpp"] - 1, max_size=degrees["pp"] * degrees["vpp"] - 1)
        )
    )
    return plan_of(model, [*cuts, model.num_layers], **degrees)
