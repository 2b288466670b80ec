"""Hugging Face configs become models whose counts are those of the classes, and nonsense is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from milpplan import fixed, solve
from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.problem import (
    GroupedQueryAttention,
    Job,
    LatentAttention,
    Layout,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Problem,
    VirtualStage,
    load_hardware,
)
from milpplan.problem.huggingface import (
    ALIASES,
    BUILDERS,
    CLASS_DEFAULTS,
    CLASS_SIZES,
    OBSTACLES,
    RENAMED,
    SCORED,
    UNPRICED,
    model_from_config,
    without_effect,
)
from milpplan.simulation import simulate
from milpplan.simulation.layers import active_parameters, total_parameters
from tests.amounts import few_or_many, long_but

DATA = Path(__file__).parents[1] / "data"
COUNTS: dict[str, int] = json.loads((DATA / "hf_param_counts.json").read_text())["counts"]
SCORE_COUNTS: dict[str, list[int | None]] = json.loads((DATA / "hf_score_counts.json").read_text())["counts"]
FAMILY_CASES: list[dict[str, Any]] = json.loads((DATA / "hf_family_counts.json").read_text())["cases"]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DATA / "hf_configs" / f"{name}.json").read_text())
    return config


def windows(model: ModelSpec) -> list[int | None]:
    """The attention window of every layer."""
    result: list[int | None] = []
    for run in model.layers:
        assert isinstance(run.attention, GroupedQueryAttention)
        result += [run.attention.sliding_window] * run.count
    return result


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_hub_config_counts_as_its_class(name: str) -> None:
    """A config as on the Hub has, to the unit, the parameters of the transformers class, which has no layers that
    predict further tokens."""
    config = config_of(name)
    ignored = [key for key in UNPRICED if key in config or key in config.get("text_config", {})]
    model = model_from_config(config_of(name), name, ignored)
    assert total_parameters(model) == COUNTS[name]
    assert list(model.ignored_keys) == ignored


@pytest.mark.parametrize("index", range(len(FAMILY_CASES)))
def test_every_switch_of_every_family_counts_as_its_class(index: int) -> None:
    """Small configs with every switch of a family have the parameters of the transformers class."""
    case = FAMILY_CASES[index]
    assert total_parameters(model_from_config(case["config"], "small")) == case["parameters"]


def test_every_family_has_a_checked_case() -> None:
    """No family is supported without a count that transformers confirms, nor without its defaults."""
    assert {case["config"]["model_type"] for case in FAMILY_CASES} == set(BUILDERS) == set(CLASS_DEFAULTS)


@pytest.mark.parametrize("family", sorted(RENAMED))
def test_renamed_family_is_the_other_family(family: str) -> None:
    """The same sizes under a renamed family make the same model, and a size may not be missing."""
    config = small(RENAMED[family]) | {"tie_word_embeddings": False}
    assert model_from_config(config | {"model_type": family}, "small") == model_from_config(config, "small")
    del config["max_position_embeddings"]
    with pytest.raises(InvalidInputError, match="max_position_embeddings is missing"):
        model_from_config(config | {"model_type": family}, "small")


@pytest.mark.parametrize("family", sorted(OBSTACLES))
def test_refused_family_names_its_obstacle_and_a_neighbour(family: str) -> None:
    """A known family without a builder is refused by the part that is missing."""
    part, nearest = OBSTACLES[family]
    assert family not in {*BUILDERS, *RENAMED}
    assert nearest in BUILDERS
    with pytest.raises(InvalidInputError) as caught:
        model_from_config({"model_type": family}, "small")
    assert part in caught.value.seen
    assert nearest in caught.value.expected


def test_missing_tie_word_embeddings_takes_the_class_default() -> None:
    """The key is often absent: Gemma is then tied, Llama is not."""
    gemma, llama = config_of("gemma-7b"), config_of("llama3-8b")
    del llama["tie_word_embeddings"]
    assert "tie_word_embeddings" not in gemma
    assert model_from_config(gemma, "gemma").tie_word_embeddings
    assert not model_from_config(llama, "llama").tie_word_embeddings


def test_lightning_attention_is_read_in_both_spellings() -> None:
    """Text-01's own file lists 0 and 1 and fixes the block; 45.9 of its 456 billion parameters work for a token
    beside embedding and head, as published (arXiv 2501.08313)."""
    config = config_of("minimax-text-01")
    model = model_from_config(config, "m")
    own = {key: value for key, value in config.items() if key not in ("layer_types", "block_size")}
    own |= {"model_type": "minimax_text_01", "attn_type_list": ([0] * 7 + [1]) * 10, "postnorm": True}
    own |= {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    assert model_from_config(own, "m") == model
    ends = 2 * 200064 * 6144
    idle = 80 * 30 * 3 * 6144 * 9216
    assert total_parameters(model) - ends - idle == pytest.approx(45.9e9, rel=2e-3)
    with pytest.raises(InvalidInputError, match="attn_type_list"):
        model_from_config(own | {"attn_type_list": [0, 1]}, "m")
    with pytest.raises(InvalidInputError, match="shared_intermediate_size"):
        model_from_config(own | {"shared_intermediate_size": 64}, "m")


def test_kimi_linear_is_as_published() -> None:
    """Its own file: 48 billion parameters, 3 billion of which work for a token beside the embedding (arXiv
    2510.26692), three layers of delta attention to one of latent attention; K3's residuals are refused."""
    config = config_of("kimi-linear-48b")
    model = model_from_config(config, "k")
    embedding = 163_840 * 2304
    assert total_parameters(model) / 1e9 == pytest.approx(48, rel=0.03)
    assert (active_parameters(model) - embedding) / 1e9 == pytest.approx(3, rel=0.05)
    kinds = [run.attention.type for run in model.layers for _ in range(run.count)]
    assert kinds == (["recurrence"] * 3 + ["mla"]) * 6 + ["recurrence"] * 2 + ["mla"]
    linear = config["linear_attn_config"]
    for changes, seen in (
        ({"attn_res_block_size": 12}, "attn_res_block_size is 12"),
        ({"linear_attn_config": linear | {"kda_layers": [1]}}, "full_attn_layers"),
        ({"linear_attn_config": linear | {"use_full_rank_gate": True}}, "use_full_rank_gate is True"),
        ({"linear_attn_config": linear | {"gate_lower_bound": -5.0}}, "'gate_lower_bound' not understood"),
        ({"linear_attn_config": 3}, "linear_attn_config is 3"),
        ({"linear_num_heads": 16}, "linear_num_heads is 16"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | changes, "k")


def test_layers_that_differ_one_by_one() -> None:
    """Nemotron-Super has 49.9 billion parameters as published, 49 of 80 layers with attention, and a norm before
    each block that is there; replacements and windows are refused by name."""
    config = config_of("nemotron-super-49b")
    model = model_from_config(config, "n")
    assert total_parameters(model) == 49_867_145_216
    assert sum(run.count for run in model.layers if run.attention.type == "gqa") == 49
    assert {(run.attention.type, run.num_norms) for run in model.layers} == {("gqa", 2), ("none", 1)}
    blocks = config["block_configs"]
    for part, changes, seen in (
        ("attention", {"replace_with_linear": True}, "replace_with_linear is True"),
        ("attention", {"window_length": 512}, "window_length is 512"),
        ("attention", {"n_heads_in_group": 3}, "n_heads_in_group is 3"),
        ("ffn", {"ffn_mult": None}, "ffn_mult is None"),
        ("ffn", {"moe": {"num_local_experts": 8}}, "'moe' not understood"),
    ):
        other = {**blocks[0], part: blocks[0][part] | changes}
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | {"block_configs": [other, *blocks[1:]]}, "n")
    with pytest.raises(InvalidInputError, match="Expected a block for each of 80 layers"):
        model_from_config(config | {"block_configs": blocks[1:]}, "n")
    empty = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    fewer = model_from_config(config | {"block_configs": [*blocks, empty], "num_hidden_layers": 81}, "n")
    assert fewer == model
    with pytest.raises(InvalidInputError, match="no block that computes"):
        model_from_config(config | {"block_configs": [empty], "num_hidden_layers": 1}, "n")


def test_minimax_modules_that_predict_further_tokens_are_layers() -> None:
    """MiniMax-M2.5's file has three such modules of a layer each, which a switch turns off."""
    config = config_of("minimax-m2.5")
    assert model_from_config(config, "m").num_nextn_predict_layers == 3
    assert model_from_config(config | {"use_mtp": False}, "m").num_nextn_predict_layers == 0
    with pytest.raises(InvalidInputError, match="mtp_transformer_layers is 2"):
        model_from_config(config | {"mtp_transformer_layers": 2}, "m")


def test_transformers_5_spelling_of_experts_is_understood() -> None:
    """Version 5 saves num_local_experts where the Hub's Qwen3-MoE has num_experts."""
    config = config_of("qwen3-30b-a3b")
    config["num_local_experts"] = config.pop("num_experts")
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    assert total_parameters(model_from_config(config, "qwen")) == COUNTS["qwen3-30b-a3b"]


def test_text_part_of_a_multimodal_config_is_the_model() -> None:
    """Gemma 3 4B on the Hub leaves family and tying to the outer config, and sizes to the class: they are refused
    until they are written down; the tower of images is priced, unless it is ignored."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "patch_size": 14, "model_type": "siglip_vision_model"},
    }
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    for key, value in sizes.items():
        given = {name: size for name, size in sizes.items() if name != key}
        with pytest.raises(InvalidInputError, match=f"{key} is missing.*assumes {value}"):
            model_from_config({**config, "text_config": {**given, **text}}, "g", ["vision_config"])
    text |= sizes
    with pytest.raises(InvalidInputError, match="vision_config: image_size is missing"):
        model_from_config(config, "gemma-3-4b")
    with pytest.raises(InvalidInputError, match=r"vision_config \(the image tower"):
        model_from_config({**config, "architectures": None, "model_type": "mistral3"}, "gemma-3-4b")
    model = model_from_config(config, "gemma-3-4b", ["vision_config"])
    assert model.ignored_keys == ("vision_config",)
    # 262,208 * 2560, and a layer 2560*(8 + 2*4)*256 + 8*256*2560 + 2*256 + 3*2560*10240 + 4*2560, and a norm.
    layer = 10_485_760 + 5_242_880 + 512 + 78_643_200 + 10_240
    assert total_parameters(model) == 671_252_480 + 34 * layer + 2_560
    del text["model_type"]
    assert model_from_config(config, "gemma-3-4b", ["vision_config"]) == model


def test_outer_tying_holds_for_the_text_part() -> None:
    """tie_word_embeddings outside text_config holds unless the inside says otherwise."""
    text = config_of("mistral-7b")
    del text["tie_word_embeddings"]
    outer = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": True}
    assert model_from_config(outer, "m").tie_word_embeddings


def test_family_follows_from_the_class_name() -> None:
    """A config without model_type is recognised by its architectures."""
    config = config_of("qwen3-30b-a3b")
    del config["model_type"]
    assert total_parameters(model_from_config(config, "qwen")) == COUNTS["qwen3-30b-a3b"]


def test_null_means_absent() -> None:
    """A null n_inner is 4 * n_embd; a null num_key_value_heads is as many as heads."""
    config = config_of("gpt2") | {"n_inner": None}
    assert total_parameters(model_from_config(config, "gpt2")) == COUNTS["gpt2"]
    llama = model_from_config(config_of("llama3-8b") | {"num_key_value_heads": None}, "llama")
    attention = llama.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    assert attention.num_key_value_heads == 32


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_size_that_is_no_number_is_named(key: str) -> None:
    """NaN, which Python's JSON reads, is unlike itself: that is no second spelling."""
    with pytest.raises(InvalidInputError, match=f"{key} is nan") as caught:
        model_from_config(config_of("llama3-8b") | {key: float("nan")}, "x")
    assert "names of the same size" not in str(caught.value)


def test_dense_layers_before_the_experts() -> None:
    """DeepSeek-V3 has first_k_dense_replace = 3 dense layers and then 58 with experts, all with MLA."""
    config = config_of("deepseek-v3") | {"num_nextn_predict_layers": 0}
    model = model_from_config(config, "deepseek-v3")
    assert [(run.count, run.mlp.type) for run in model.layers] == [(3, "dense"), (58, "moe")]
    assert all(isinstance(run.attention, LatentAttention) for run in model.layers)


def test_sparse_step_and_dense_list() -> None:
    """With decoder_sparse_step 2 every second layer has experts, unless mlp_only_layers names it."""
    config = config_of("qwen1.5-moe") | {
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    model = model_from_config(config, "qwen")
    kinds = [isinstance(run.mlp, MixtureOfExperts) for run in model.layers for _ in range(run.count)]
    assert kinds == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gpt-oss-120b", {}, [128, None] * 18),
        ("gpt-oss-120b", {"layer_types": None}, [128, None] * 18),
        ("gemma2-2b", {}, [4096, None] * 13),
        ("mistral-7b", {}, [4096] * 32),
        ("mistral-7b", {"sliding_window": None}, [None] * 32),
        ("qwen2-7b", {}, [None] * 28),
        ("qwen2-7b", {"use_sliding_window": True, "max_window_layers": 20}, [None] * 20 + [131072] * 8),
        (
            "gemma2-2b",
            {"model_type": "gemma3_text", "architectures": None, "sliding_window_pattern": 13},
            [*[4096] * 12, None] * 2,
        ),
        ("gemma2-2b", {"layer_types": ["full_attention"] * 26}, [None] * 26),
    ],
)
def test_windows_by_layer(name: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    """layer_types, patterns and switches say which layers slide, as in the transformers class."""
    assert windows(model_from_config(config_of(name) | changes, name)) == expected


def test_default_sequence_length_fits_the_context() -> None:
    """A sequence is 4096 tokens unless the model's context is shorter."""
    assert model_from_config(config_of("llama3-8b"), "l").default_sequence_length == 4096
    assert model_from_config(config_of("gpt2"), "g").default_sequence_length == 1024


def test_unknown_family_says_what_it_found_and_what_is_missing() -> None:
    """An unknown model_type is refused with the dimensions found, those missing, the families, a way out."""
    with pytest.raises(InvalidInputError) as caught:
        model_from_config({"model_type": "mamba", "hidden_size": 768, "n_layer": 24}, "my-mamba")
    error = caught.value
    assert "'mamba'" in error.seen
    assert "n_layer=24" in error.seen
    assert "hidden_size=768" in error.seen
    assert "missing heads" in error.seen
    assert "deepseek_v3" in error.expected
    assert "TOML" in error.do


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000"),
        ({"vocab_size": "128256"}, "vocab_size is '128256'"),
        ({"vocab_size": 10**5000}, "vocab_size is a value too large"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"intermediate_size": 2.5}, "intermediate_size is 2.5"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": [32]}, "num_attention_heads"),
        ({"num_attention_heads": 33}, "not a multiple"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "bloom"}, "model_type 'bloom'"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], word: str) -> None:
    """Zero, negative, absurd and mistyped values are refused by name and value."""
    with pytest.raises(InvalidInputError) as caught:
        model_from_config(config_of("llama3-8b") | changes, "broken")
    assert word in caught.value.seen
    assert caught.value.expected
    assert caught.value.do


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-oss-120b", {"layer_types": ["sliding_attention"]}),
        ("gpt-oss-120b", {"layer_types": ["linear_attention"] * 36}),
        ("gpt-oss-120b", {"layer_types": "full_attention"}),
        ("gpt-oss-120b", {"num_experts_per_tok": 200}),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["first"]}),
        ("deepseek-v3", {"attention_bias": True}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("deepseek-v3", {"moe_layer_freq": True}),
    ],
)
def test_settings_without_a_field_are_refused(name: str, changes: dict[str, Any]) -> None:
    """What the description cannot express is refused instead of being dropped."""
    with pytest.raises(InvalidInputError):
        model_from_config(config_of(name) | changes, name)


STORED_AS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    ({"producer": {"name": "modelopt"}, "quant_algo": "NVFP4", "kv_cache_scheme": "FP8"}, "modelopt (NVFP4)"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors (pack-quantized)"),
)


@pytest.mark.parametrize(("stored", "words"), STORED_AS)
def test_the_format_of_a_checkpoint_costs_nothing(stored: dict[str, Any], words: str) -> None:
    """DeepSeek's and OpenAI's files say how weights are stored: the model is the one without, and names it."""
    config = config_of("deepseek-v3")
    plain, model = (model_from_config(other, "d") for other in (config, config | {"quantization_config": stored}))
    assert model.stored_weights == words
    assert model.model_copy(update={"stored_weights": None}) == plain
    inside = {"model_type": "mistral3", "text_config": config | {"quantization_config": stored}}
    assert model_from_config(inside, "d") == model


@pytest.mark.parametrize(
    ("stored", "seen"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the method is 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 4}, "the method is 'gptq'"),
        ({"bits": 4}, "the method is None"),
        ({"quant_method": ["fp8"]}, "the method is"),
        ({"quant_method": "fp8", "sparsity_config": {"format": "2:4"}}, "'sparsity_config' not understood"),
        (4, "quantization_config is 4"),
    ],
)
def test_formats_that_training_keeps_are_refused(stored: object, seen: str) -> None:
    """Base weights of few bits beside adapters, and settings that say more than a format, are refused by name."""
    with pytest.raises(InvalidInputError, match=seen):
        model_from_config(config_of("llama3-8b") | {"quantization_config": stored}, "l")


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}, {"architectures": []}, {"text_config": 1}])
def test_no_config_at_all(config: object) -> None:
    """Whatever is not a config is refused with the same kind of error."""
    with pytest.raises(InvalidInputError):
        model_from_config(config, "nothing")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 40), st.floats(), st.text(max_size=12)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
KEYS = sorted({key for case in FAMILY_CASES for key in case["config"]} | {"layer_types", "text_config"})


@few_or_many(40, 400, st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), JSON, max_size=12))
def test_arbitrary_objects_never_crash(config: dict[str, Any]) -> None:
    """Any JSON object becomes a model or a MilpplanError, never another exception."""
    with contextlib.suppress(MilpplanError):
        model_from_config(config, "fuzz")


@few_or_many(
    100,
    1000,
    st.sampled_from(FAMILY_CASES).map(lambda case: case["config"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    st.sets(st.sampled_from(KEYS), max_size=3),
)
def test_mutated_configs_never_crash(config: dict[str, Any], changes: dict[str, Any], removed: set[str]) -> None:
    """A real config with keys changed and removed becomes a countable model or a MilpplanError."""
    mutated = {key: value for key, value in {**config, **changes}.items() if key not in removed}
    try:
        model = model_from_config(mutated, "fuzz")
    except MilpplanError:
        return
    assert total_parameters(model) > 0


CLASS_KEYS: dict[str, Any] = json.loads((DATA / "hf_class_keys.json").read_text())
"""Every key of every family's class, with its default (the file names its source)."""
NOT_SIZES = {"model_type", "architectures", "tie_word_embeddings", "max_position_embeddings"}


def small(family: str, index: int = 0) -> dict[str, Any]:
    """A small config of a family with all its sizes."""
    cases = [case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == family]
    return dict(cases[index])


def other_values(value: object) -> list[object]:
    """Values of the same type that are not the default."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, 0]
    if isinstance(value, float):
        return [0.5, 0.0]
    return ["odd", True, False, 3, 0.5, ["sliding_attention", "full_attention"]]


def fate(config: dict[str, Any], key: str, value: object) -> str:
    """What becomes of a key: ``priced`` where the model is another one, ``equal`` where it is not, ``refused``."""
    before = model_from_config(config, "small")
    try:
        after = model_from_config(config | {key: value}, "small")
    except InvalidInputError as error:
        # Lists with a value for every layer, as compress_ratios, contradict another number of layers.
        known = (key, *CLASS_KEYS["families"][config["model_type"]], "compress_ratios")
        named = [name for name in known if name in error.seen]
        return "refused" if named else f"refused for another reason: {error.seen}"
    return "equal" if after == before else "priced"


@pytest.mark.parametrize("family", long_but(sorted(BUILDERS)[::6], sorted(BUILDERS)))
def test_every_key_of_a_class_is_priced_listed_or_refused(family: str) -> None:
    """A key that is neither listed as without effect nor fixed changes the model or is refused; a listed one
    never changes it."""
    listed = without_effect(family)
    keys = CLASS_KEYS["base"] | CLASS_KEYS["families"][family]
    configs = [small(family, index) for index in (0, 1, -1)]
    if "use_sliding_window" in keys and "sliding_window" in CLASS_SIZES[family]:
        slides = {"use_sliding_window": True, "sliding_window": 64}
        slides |= {"max_window_layers": 1} if "max_window_layers" in keys else {}
        configs += [config | slides for config in configs]
    for key in sorted(set(keys) - NOT_SIZES):
        fates = {
            fate(config, key, value)
            for config in configs
            for value in other_values(config.get(key, keys[key]))
            if config.get(key) != value
        }
        if key in listed:
            assert fates == {"equal"}, (key, fates)
        else:
            assert fates & {"priced", "refused"}, (key, fates)
            assert fates <= {"priced", "refused", "equal"}, (key, fates)


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_no_size_has_a_default(family: str) -> None:
    """A config without one of its sizes is refused, and the message names the key and what the class assumes."""
    config = small(family)
    for key, assumed in CLASS_SIZES[family].items():
        spelled = [name for name in (key, *ALIASES.get(family, {}).get(key, ())) if name in config]
        if not spelled:
            continue
        with pytest.raises(InvalidInputError) as caught:
            model_from_config({name: value for name, value in config.items() if name not in spelled}, "small")
        if caught.value.seen.endswith(f"{key} is missing."):
            assert str(assumed) in caught.value.expected
        else:
            assert "multiple" in caught.value.seen or "exceeds" in caught.value.seen, (key, caught.value.seen)


@few_or_many(
    60, 600, st.sampled_from(sorted(BUILDERS)), st.text(min_size=1, max_size=20), st.booleans() | st.integers()
)
def test_an_invented_key_is_refused_by_name(family: str, key: str, value: object) -> None:
    """No family swallows a key that it does not know; with ignore the model is the same and names the key."""
    config, known = small(family), CLASS_KEYS["base"] | CLASS_KEYS["families"][family] | without_effect(family)
    key = f"x_{key}"
    assert key not in known
    with pytest.raises(InvalidInputError) as caught:
        model_from_config(config | {key: value}, "small")
    assert "x_" in caught.value.seen
    model = model_from_config(config | {key: value}, "small", [key])
    assert model.ignored_keys == (key,)
    assert model.model_copy(update={"ignored_keys": ()}) == model_from_config(config, "small")


@pytest.mark.parametrize("family", sorted(SCORE_COUNTS))
def test_heads_of_scores_count_as_their_classes(family: str) -> None:
    """Classes for sequences, and for tokens where there is one, have as many parameters as in transformers; they
    neither share a matrix with the embedding nor predict further tokens."""
    config = small(family)
    stem = family.replace("_", "")
    for head, bias, count in zip(("Sequence", "Token"), (False, True), SCORE_COUNTS[family], strict=True):
        asked = config | {"architectures": [f"{stem}For{head}Classification"], "num_labels": 3}
        asked |= {"classifier_dropout": 0.0} if bias else {}
        assert (family in SCORED[f"for{head.lower()}classification"]) == (count is not None)
        if count is None:
            with pytest.raises(InvalidInputError, match="architectures names"):
                model_from_config(asked, "small")
            continue
        model = model_from_config(asked, "small")
        assert total_parameters(model) == count
        assert (model.num_labels, model.lm_head_bias, model.tie_word_embeddings) == (3, bias, False)
        assert model.num_nextn_predict_layers == 0


def test_the_number_of_scores_is_read_from_the_file() -> None:
    """Names of classes give their number; a file without it, with two of them, or with a mask is refused."""
    config = config_of("llama3-8b") | {"architectures": ["LlamaForSequenceClassification"]}
    assert model_from_config(config | {"id2label": {"0": "bad", "1": "good"}}, "l").num_labels == 2
    assert model_from_config(config | {"num_labels": 1}, "l").num_labels == 1
    tokens = config | {"architectures": ["LlamaForTokenClassification"], "num_labels": 1}
    for wrong, seen in (
        (config, "num_labels and id2label are missing"),
        (config | {"id2label": {"0": "a"}, "num_labels": 3}, "num_labels is 3"),
        (config | {"num_labels": 0}, "num_labels is 0"),
        (tokens, "classifier_dropout is missing"),
        (tokens | {"classifier_dropout": 0.1}, "classifier_dropout is 0.1"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(wrong, "l")


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "Model", "RewardModel", "ForMultipleChoice"])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-32b", "gemma-7b", "deepseek-v3"])
def test_other_heads_than_the_vocabulary_are_refused(name: str, head: str) -> None:
    """A score of spans or nothing is not the vocabulary: refused or ignored by name."""
    config = config_of(name) | {"num_labels": 1, "num_nextn_predict_layers": None}
    stem = config["architectures"][0].replace("ForCausalLM", "").replace("LMHeadModel", "")
    other = config | {"architectures": [stem + head]}
    with pytest.raises(InvalidInputError, match=stem + head):
        model_from_config(other, name)
    assert model_from_config(other, name, ["architectures"]).ignored_keys == ("architectures",)


@pytest.mark.parametrize(
    ("name", "changes", "masks"),
    [
        # residual stream, embedding, scores
        ("gpt2", {}, (True, True, True)),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, (False, False, False)),
        ("gpt2", {"resid_pdrop": 0.0}, (False, True, True)),
        ("starcoder2", {}, (True, True, True)),
        ("starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}, (False, False, True)),
        ("llama3-8b", {}, (False, False, False)),
        ("llama3-8b", {"attention_dropout": 0.1}, (False, False, True)),
        ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}, (True, False, False)),
        ("gpt-neox-20b", {"hidden_dropout": 0.1}, (True, True, False)),
    ],
)
def test_dropout_is_what_the_file_says(name: str, changes: dict[str, Any], masks: tuple[bool, ...]) -> None:
    """The three probabilities decide the masks; StarCoder2's file has 0.1, GPT-2's class where it is absent."""
    model = model_from_config(config_of(name) | changes, name)
    assert (model.dropout, model.drops_embedding, model.drops_scores) == masks


def test_opt_drops_residuals_and_neither_embedding_nor_scores() -> None:
    """OPT's class has a dropout of 0.1 after attention and feed-forward block; with 0.0 it has none."""
    model = model_from_config(small("opt"), "opt")
    assert (model.dropout, model.drops_embedding, model.drops_scores) == (True, False, False)
    assert not model_from_config(small("opt") | {"dropout": 0.0}, "opt").dropout


def test_masks_are_priced() -> None:
    """Masks of the residual stream take memory in every layer, and a mask of the embedding in the first stage."""
    peaks = []
    for masks in ({}, {"embedding_dropout": 0.1}, {"residual_dropout": 0.1}):
        quiet = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
        model = model_from_config(config_of("starcoder2") | quiet | masks, "starcoder2")
        job = Job(num_gpus=8, global_batch_size=64, sequence_length=4096)
        problem = Problem(model=model, hardware=load_hardware("dgx-h100"), job=job)
        layout = Layout(tp=1, pp=2, dp=4, micro_batch_size=1, global_batch_size=64)
        half = model.num_layers // 2
        stages = (VirtualStage(layers=(0, half)), VirtualStage(layers=(half, model.num_layers)))
        report = simulate(problem, Plan(layout=layout, virtual_stages=stages))
        peaks.append([stage.memory.peak_bytes for stage in report.stages])
    tokens, hidden, layers = (
        4096,
        config_of("starcoder2")["hidden_size"],
        config_of("starcoder2")["num_hidden_layers"],
    )
    assert peaks[1][0] - peaks[0][0] == pytest.approx(2 * tokens * hidden, abs=4)
    assert peaks[1][1] == peaks[0][1]
    # Two micro-batches wait in the first stage, one in the second; two masks of a byte a layer.
    assert peaks[2][1] - peaks[0][1] == pytest.approx(2 * tokens * hidden * (layers - layers // 2), rel=0.05)


def test_two_spellings_of_a_size_must_agree() -> None:
    """GPT-2's class takes n_layer and num_hidden_layers; a file that contradicts itself is refused."""
    config = config_of("gpt2")
    assert model_from_config(config | {"num_hidden_layers": 12}, "gpt2") == model_from_config(config, "gpt2")
    with pytest.raises(InvalidInputError, match="num_hidden_layers is 24 and n_layer is 12"):
        model_from_config(config | {"num_hidden_layers": 24}, "gpt2")


def test_a_key_of_another_family_is_no_size() -> None:
    """Llama's class does not read n_layer: transformers would build 32 layers, so the file is refused."""
    config = config_of("llama3-8b")
    config["n_layer"] = config.pop("num_hidden_layers")
    with pytest.raises(InvalidInputError, match="num_hidden_layers is missing"):
        model_from_config(config, "llama")


def test_step_has_heads_by_layer_and_says_what_predicts_further_tokens() -> None:
    """Step-3.5-Flash has 196 billion parameters, 11 billion of them for a token beside embedding and head, as
    published. Its windows have 96 heads, and its three further layers are dense; a file without their kinds leaves
    them out by name."""
    kinds = (["full_attention"] + ["sliding_attention"] * 3) * 12
    config = {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "intermediate_size": 11264,
        "vocab_size": 128896,
        "max_position_embeddings": 262144,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "sliding_window": 512,
        "num_nextn_predict_layers": 3,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "layer_types": kinds,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
    }
    model = model_from_config(config, "s")
    assert total_parameters(model) / 1e9 == pytest.approx(196, rel=5e-3)
    assert (active_parameters(model) - 2 * 128_896 * 4096) / 1e9 == pytest.approx(11, rel=0.03)
    assert {run.head_counts for run in model.layers} == {(64,), (96,)}
    assert model.num_nextn_predict_layers == 3
    assert (model.mtp_kind.head_counts, model.mtp_kind.mlp.type) == ((96,), "dense")
    short = model_from_config(config | {"layer_types": kinds[:45]}, "s")
    assert (short.num_nextn_predict_layers, short.ignored_keys) == (0, ("num_nextn_predict_layers",))
    assert short.layers == model.layers
    for changes, seen in (
        ({"layer_types": kinds[:40]}, "layer_types is"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups is 4"),
        ({"attention_other_setting": {"rope": 4}}, "'rope' not understood"),
        ({"attention_other_setting": {"num_attention_heads": 90}}, "num_attention_heads=90"),
        ({"layer_types": kinds[:46] + ["full_attention"] * 2}, "predict further tokens differ"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | changes, "s")


def test_layers_that_share_a_selection_are_read_in_every_spelling() -> None:
    """A list, a pattern, and a distance with an offset say which layers take the keys of the layer before; what
    predicts further tokens has an indexer of its own, and the first layer takes none."""
    cases = [case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == "glm_moe_dsa"]
    config = {key: value for key, value in cases[0].items() if key != "num_hidden_layers"} | {
        "num_hidden_layers": 6
    }

    def sharing(**changes: Any) -> str:
        model = model_from_config(config | changes, "g")
        return "".join(
            run.attention.indexer.sharing[0]
            for run in model.layers
            for _ in range(run.count)
            if isinstance(run.attention, LatentAttention) and run.attention.indexer is not None
        )

    kinds = ["full", "full", "shared", "shared", "full", "shared"]
    assert sharing(indexer_types=kinds) == "ngttgt"
    assert sharing(index_topk_pattern="FFSSFS") == "ngttgt"
    assert sharing(index_topk_freq=3, index_skip_topk_offset=2) == "ngttgt"
    assert sharing() == "nnnnnn"
    model = model_from_config(config | {"indexer_types": kinds}, "g")
    attention = model.mtp_kind.attention
    assert isinstance(attention, LatentAttention)
    assert attention.indexer is not None
    assert not attention.indexer.takes
    for wrong in (kinds[:5], ["shared", *kinds[1:]], ["half", *kinds[1:]]):
        with pytest.raises(InvalidInputError, match="indexer_types or index_topk_pattern is"):
            model_from_config(config | {"indexer_types": wrong}, "g")


def test_stages_begin_with_layers_that_select_their_own_keys() -> None:
    """A plan may cut before a layer with an indexer and nowhere else, and the space has such plans alone."""
    cases = [case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == "glm_moe_dsa"]
    model = model_from_config(next(config for config in cases if "indexer_types" in config), "g")
    job = Job(num_gpus=2, global_batch_size=4, sequence_length=128)
    problem = Problem(model=model, hardware=load_hardware("dgx-h100"), job=job)
    layout = Layout(tp=1, pp=2, dp=1, micro_batch_size=1, global_batch_size=4)
    for cut in range(1, model.num_layers):
        stages = (VirtualStage(layers=(0, cut)), VirtualStage(layers=(cut, model.num_layers)))
        if cut in (1, 4):
            assert simulate(problem, Plan(layout=layout, virtual_stages=stages)).step_time_s > 0
        else:
            with pytest.raises(MilpplanError, match=f"starts with layer {cut}"):
                simulate(problem, Plan(layout=layout, virtual_stages=stages))
    result = solve(fixed(problem, {"pp": 2}))
    assert result.status == "optimal"
    assert result.plan is not None
    assert {stage.layers[0] for stage in result.plan.virtual_stages} <= {0, 1, 4, model.num_layers}


def test_minimax_m3_selects_blocks_of_keys() -> None:
    """Both spellings of the index branch give the same model; settings of it that are not priced, heads that are
    not those of the groups, and contradictions between lists are refused by name."""
    cases = [case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == "minimax_m3_vl_text"]
    flat, nested = cases[0], cases[2]
    own = nested["sparse_attention_config"]
    sizes = {"index_n_heads": 2, "index_head_dim": 12, "index_block_size": 8, "index_topk_blocks": 3}
    spelled = {key: value for key, value in nested.items() if key != "sparse_attention_config"} | sizes
    spelled |= {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "model_type": "minimax_m3"}
    assert model_from_config(spelled, "m") == model_from_config(nested, "m")
    assert model_from_config(nested, "m").has_indexers
    for config, changes, seen in (
        (flat, {"index_n_heads": 4}, "index_n_heads is 4"),
        (flat, {"index_topk_blocks": None}, "index_topk_blocks is missing"),
        (flat, {"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
        (flat, {"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        (flat, {"qk_norm_type": "per_layer"}, "qk_norm_type is"),
        (nested, {"moe_layer_freq": [0, 1]}, "moe_layer_freq is"),
        (nested, {"index_head_dim": 16}, "index_head_dim is 16"),
        (nested, {"sparse_attention_config": own | {"sparse_init_block": 1}}, "sparse_init_block is 1"),
        (nested, {"sparse_attention_config": own | {"sparse_gate": 1}}, "'sparse_gate' not understood"),
        (
            nested,
            {"sparse_attention_config": own | {"sparse_disable_index_value": [0] * 4}},
            "disable_index_value",
        ),
        (nested, {"sparse_attention_config": 3}, "sparse_attention_config is 3"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | changes, "m")


def test_granite_4_is_as_published() -> None:
    """Granite-4.0-H-Small has 32 billion parameters, 9 billion of them for a token, and nine layers of Mamba-2 to
    one of attention, as its card says; without routed experts the shared one is the feed-forward block."""
    config: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 100352,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    }
    model = model_from_config(config, "g")
    assert total_parameters(model) / 1e9 == pytest.approx(32.2, rel=2e-3)
    assert active_parameters(model) / 1e9 == pytest.approx(9, rel=0.04)
    kinds = [run.attention.type for run in model.layers for _ in range(run.count)]
    assert (kinds.count("recurrence"), kinds.count("gqa")) == (36, 4)
    assert not model_from_config(config | {"num_local_experts": 0}, "g").has_experts
    for changes, seen in (
        ({"mamba_n_heads": 96}, "mamba_n_heads is 96"),
        ({"mamba_d_head": 32}, "mamba_d_head is 32"),
        ({"mamba_n_groups": 3}, "mamba_n_groups is 3"),
        ({"layer_types": ["mamba"]}, "layer_types is"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | changes, "g")
    bamba = next(case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == "bamba")
    with pytest.raises(InvalidInputError, match="attn_layer_indices is"):
        model_from_config(bamba | {"attn_layer_indices": [9]}, "b")


def test_deepseek_v4_lists_its_compressions() -> None:
    """Its own spelling of layers is that of the class; further numbers are those of layers that predict further
    tokens; rates and lists that contradict each other, and what the class does not build, are refused by name."""
    cases = [case["config"] for case in FAMILY_CASES if case["config"]["model_type"] == "deepseek_v4"]
    own, listed, plain = cases[:3]
    kinds = [layer.attention.compress_rate for layer in model_from_config(own, "m").kinds]
    assert kinds == [None, 4, 128]
    further = model_from_config(own | {"compress_ratios": [0, 4, 128, 4, 0, 128]}, "m")
    assert [one.mtp_layer.attention.compress_rate for one in (model_from_config(own, "m"), further)] == [None, 128]
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    spelled = {key: value for key, value in own.items() if key != "compress_ratios"}
    spelled |= {
        "layer_types": [names[ratio] for ratio in own["compress_ratios"][:5]],
        "model_type": "deepseek_ref",
    }
    assert model_from_config(spelled, "m") == model_from_config(own, "m")
    rates = [layer.attention.compress_rate for layer in model_from_config(plain, "m").layers]
    assert rates == [16, 2, 16, 2]
    for config, changes, seen in (
        (own, {"compress_ratios": [0, 4, 128]}, "compress_ratios is"),
        (own, {"compress_ratios": [0, 4, 128, 4, 8]}, "compress_ratios is"),
        (own, {"compress_ratios": [0, 4, 128, 4, 0, 0, 4]}, "Layers of further tokens differ"),
        (own, {"layer_types": ["sliding_attention"] * 5}, "layer_types differs from compress_ratios"),
        (own, {"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types is"),
        (own, {"hc_mult": 1}, "hc_mult is 1"),
        (own, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (own, {"n_shared_experts": 2}, "n_shared_experts is 2"),
        (own, {"o_groups": 5}, "o_groups=5 does not divide"),
        (own, {"tie_word_embeddings": True}, "tie_word_embeddings is"),
        (own, {"kv_lora_rank": 8}, "kv_lora_rank"),
        (listed, {"layer_types": ["full_attention"] * 5}, "layer_types is"),
        (listed, {"compress_rate_csa": 4}, "compress_rate_csa is 4"),
        (listed, {"compress_rates": {"heavily_compressed_attention": 4}}, "compress_rates is"),
    ):
        with pytest.raises(InvalidInputError, match=seen):
            model_from_config(config | changes, "m")
