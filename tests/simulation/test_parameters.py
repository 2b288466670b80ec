"""Parameter counts equal published counts and hand calculations, and split by sharding without a rest."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
    load_model,
    model_names,
)
from milpplan.simulation.layers import (
    LayerParameters,
    active_parameters,
    embedding_parameters,
    encoder_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    padded_vocab_size,
    position_parameters,
    total_parameters,
)

PUBLISHED = {
    # Parameters of the transformers classes (version 5.23.0), as in tests/data/hf_param_counts.json.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "glm-5": 743_911_199_232,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-7b": 8_537_680_896,
    "qwen3-next-80b": 79_674_391_296,
    "nemotron-3-nano": 31_577_937_344,
    # Of transformers 5.24.0.
    "kimi-linear-48b": 49_122_675_072,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b": 31_070_754_032,
    "qwen3-vl-235b": 235_670_022_896,
    # Sizes of the published weights on Hugging Face.
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-405b": 405_853_388_800,
    # 60 * (4*6656*6656 + 3*6656*17920 + 2*6656) + 2*32000*6656 + 6656; the paper's table 2: 32.5 billion.
    "llama-33b": 32_528_943_616,
    # 56 * (2*6144*6144 + 2*6144*1024 + 8*6144 + 8*3*6144*16384 + 2*6144) + 2*32768*6144 + 6144.
    "mixtral-8x22b": 140_630_071_296,
}

PUBLISHED_BILLIONS = {
    # Narayanan et al. 2021, table 1 (145.6, 529.6, 1008.0) and GPT-3's 174.6 in its section 5.
    "megatron-145b": 145.6,
    "turing-530b": 529.6,
    "megatron-1t": 1008.0,
    "gpt3-175b": 174.6,
    # Korthikanti et al. 2022, table 3: 22 billion.
    "megatron-22b": 22.1,
}


def one_layer(hidden: int, run: LayerRun, **more: object) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "hidden_size": hidden,
            "vocab_size": 100,
            "max_position_embeddings": 32,
            "layers": (run,),
        }
        | more
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_preset_has_its_published_count(name: str) -> None:
    """A shipped model has exactly the published number of parameters."""
    assert total_parameters(load_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED_BILLIONS))
def test_megatron_preset_has_its_published_size(name: str) -> None:
    """A model of the Megatron papers has the published size to the digit printed."""
    assert round(total_parameters(load_model(name)) / 1e9, 1) == PUBLISHED_BILLIONS[name]


@pytest.mark.parametrize("name", ["gpt3-175b", "megatron-22b", "megatron-145b", "turing-530b", "megatron-1t"])
def test_gpt_family_has_the_closed_form(name: str) -> None:
    """L*(12*h^2 + 13*h) + (V + s)*h + 2*h: Narayanan et al. 2021, equation 2, which leaves out 2*h."""
    model = load_model(name)
    layers, hidden = model.num_layers, model.hidden_size
    expected = layers * (12 * hidden**2 + 13 * hidden) + (51200 + 2048) * hidden + 2 * hidden
    assert total_parameters(model) == expected


def test_every_preset_is_checked() -> None:
    """No shipped model goes without a published count."""
    assert set(model_names()) == set(PUBLISHED) | set(PUBLISHED_BILLIONS)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Mixtral of Experts, section 1: 13B; Mistral's announcement: 12.9B and 39B.
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.2),
        # Model cards: 3.3B (3.35 exactly), 22B, 37B (37.55 exactly).
        ("qwen3-30b-a3b", 3.4),
        ("qwen3-235b-a22b", 22.2),
        ("deepseek-v3", 37.6),
    ],
)
def test_active_parameters(name: str, billions: float) -> None:
    """A token meets the published number of parameters."""
    assert round(active_parameters(load_model(name)) / 1e9, 1) == billions


def test_gpt_oss_active_count_leaves_the_embedding_out() -> None:
    """gpt-oss's model card (table 1) counts 5.13B active: ours less the input embedding."""
    model = load_model("gpt-oss-120b")
    active = active_parameters(model) - embedding_parameters(model)
    assert round(active / 1e9, 2) == 5.13


@pytest.mark.parametrize("name", model_names())
def test_dense_model_is_all_active_and_parts_add_up(name: str) -> None:
    """Without experts, all but an encoder of images is active, and the parts add up to the total."""
    model = load_model(name)
    encoder = encoder_parameters(model).total
    has_experts = any(isinstance(run.mlp, MixtureOfExperts) for run in model.layers)
    assert (active_parameters(model) < total_parameters(model) - encoder) == has_experts
    parts = [layer_parameters(model, model.kinds[kind]).total for kind in model.layer_kinds]
    ends = embedding_parameters(model) + position_parameters(model)
    ends += head_parameters(model) + final_norm_parameters(model)
    assert sum(parts) + ends + encoder == total_parameters(model)


def test_split_of_a_layer_with_every_bias() -> None:
    """Matrices, column biases and sinks divide by tp; norms, q/k norms and row biases are replicated."""
    attention = GroupedQueryAttention(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=3,
        qkv_bias=True,
        output_bias=True,
        qk_norm="full_width",
        sinks=True,
    )
    run = LayerRun(count=7, attention=attention, mlp=DenseMlp(intermediate_size=5, bias=True), num_norms=3)
    split = layer_parameters(one_layer(10, run, norm="layernorm"), run)
    # q 10*12, k and v 10*6 each, o 12*10; biases 12 + 6 + 6; sinks 4; gate, up, down 3*10*5; biases 2*5.
    assert split.tensor_parallel == 120 + 120 + 120 + 24 + 4 + 150 + 10
    # q/k norms 12 + 6; output bias 10; down bias 10; three LayerNorms of weight and bias.
    assert split.replicated == 18 + 10 + 10 + 3 * 20
    assert split.experts == 0
    assert split.total == split.tensor_parallel + split.replicated


def test_split_of_a_mixture_of_experts() -> None:
    """Routed experts stand apart, the shared expert divides by tp, router and its gate are replicated."""
    attention = GroupedQueryAttention(num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    mlp = MixtureOfExperts(
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=3,
        router_bias=True,
        bias=True,
        shared_intermediate_size=5,
        shared_gate=True,
    )
    run = LayerRun(count=1, attention=attention, mlp=mlp)
    split = layer_parameters(one_layer(10, run), run)
    # An expert: 3*10*3 matrices, 2*3 column biases, 10 row biases.
    assert split.experts == 4 * (90 + 6 + 10)
    # Attention 4*10*2; shared expert 3*10*5 and its column biases 2*5.
    assert split.tensor_parallel == 80 + 150 + 10
    # Router 4*10 and 4 biases, shared row bias 10, shared gate 10, two norms.
    assert split.replicated == 40 + 4 + 10 + 10 + 20


@pytest.mark.parametrize(
    ("q_rank", "divided", "copied"),
    [
        # q: 6*2*(4+2) on the rank; kv: 5*2*(4+3); o: 2*3*10. Down: 10*6 + 6 and 10*(5+2) + 5.
        (6, 72 + 70 + 60, 66 + 75),
        # q: 10*2*(4+2) directly.
        (None, 120 + 70 + 60, 75),
    ],
)
def test_split_of_latent_attention(q_rank: int | None, divided: int, copied: int) -> None:
    """Low-rank down projections and their norms are replicated, up and output projections divide by tp."""
    attention = LatentAttention(
        num_attention_heads=2,
        q_lora_rank=q_rank,
        kv_lora_rank=5,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=3,
    )
    run = LayerRun(count=1, attention=attention, mlp=DenseMlp(intermediate_size=1, gated=False), num_norms=0)
    split = layer_parameters(one_layer(10, run), run)
    assert split == LayerParameters(tensor_parallel=divided + 20, replicated=copied)


def test_ends_of_the_model() -> None:
    """Embedding V*h, positions s*h when learned, head V*h unless tied, its bias V, final norm h or 2*h."""
    attention = GroupedQueryAttention(num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    run = LayerRun(count=1, attention=attention, mlp=DenseMlp(intermediate_size=1))
    plain = one_layer(10, run)
    ends = (embedding_parameters, position_parameters, head_parameters, final_norm_parameters)
    assert [end(plain) for end in ends] == [1000, 0, 1000, 10]
    gpt = one_layer(10, run, tie_word_embeddings=True, learned_positions=True, norm="layernorm", lm_head_bias=True)
    assert [end(gpt) for end in ends] == [1000, 320, 100, 20]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [
        (50257, 1, 50304),  # GPT-2's vocabulary as Megatron pads it, 393 * 128
        (50257, 8, 51200),  # the 51,200 of the Megatron papers, 50 * 1024
        (51200, 8, 51200),
        (128256, 1, 128256),  # Llama 3's is a multiple of 128
        (151936, 2, 152064),  # Qwen3's is not one of 256
        (1, 4, 512),
    ],
)
def test_padded_vocabulary(vocab: int, tp: int, padded: int) -> None:
    """The vocabulary is rounded up to a multiple of 128 * tp, as Megatron does."""
    assert padded_vocab_size(vocab, tp) == padded


def test_padded_vocabulary_broadcasts() -> None:
    """Arrays of degrees give arrays of sizes, equal to the scalar results."""
    tps = np.array([1, 2, 4, 8])
    expected = [padded_vocab_size(50257, int(tp)) for tp in tps]
    np.testing.assert_array_equal(padded_vocab_size(50257, tps), expected)
    assert np.shape(padded_vocab_size(np.array([[5], [50257]]), tps)) == (2, 4)
