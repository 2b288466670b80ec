"""Models that torchtitan has by name and flavor, as model descriptions.

Source: pytorch/torchtitan, torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/__init__.py of 0.2.2, 0.3.0 and
b5bcd76c, which agree on these sizes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from milpplan.launchers.expressible import model_differences
from milpplan.problem.model import ModelSpec

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
