"""Conversion of a parsed Hugging Face ``config.json`` to a ``ModelSpec``.

Only the keys are read; neither the network nor the transformers package is needed. Both spellings in use are
understood: the Hub's files (written by transformers 4 and earlier) and what transformers 5 saves. Every key is
priced, or on a list of keys known not to change the cost, or refused by name; a key that the user ignores is named
in the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import ModelSpec
from milpplan.problem.huggingface.defaults import (
    CLASS_DEFAULTS,
    CLASS_SIZES,
    FIXED,
    FUSED,
    MTP_LAYERS,
    OBSTACLES,
    SCORED,
    STORED,
    STORED_KEYS,
    UNPRICED,
    without_effect,
)
from milpplan.problem.huggingface.families import ALIASES, BUILDERS, RENAMED
from milpplan.problem.huggingface.typed_keys import DO, HEADS, HIDDEN, KEY_VALUE_HEADS, LAYERS, POSITIONS, Fields
from milpplan.problem.huggingface.vision import OUTER_KEYS, encoder_of, has_known_encoder
from milpplan.problem.reading import invalid_fields, shown

_GENERIC = {
    "layers": (LAYERS, "n_layer", "n_layers", "num_layers"),
    "hidden size": (HIDDEN, "n_embd", "d_model"),
    "heads": (HEADS, "n_head", "n_heads"),
    "key-value heads": (KEY_VALUE_HEADS, "num_kv_heads", "n_head_kv"),
    "feed-forward width": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "vocabulary": ("vocab_size",),
    "context": (POSITIONS, "n_positions"),
}
_REQUIRED = ("layers", "hidden size", "heads", "feed-forward width", "vocabulary")
_CAUSAL = ("forcausallm", "lmheadmodel")
_CLASS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
_CLASS_NAMES = {
    "falcon": ("rw",),
    "nemotron-nas": ("decilm",),
    "gemma3_text": ("gemma3text", "gemma3"),
    "gemma4_text": ("gemma4text", "gemma4"),
    "llama4_text": ("llama4",),
    "minimax_m3_vl_text": ("minimaxm3vl", "minimaxm3sparse", "minimaxm3"),
    "step3p7": ("step3p7flash", "step3p5"),
    "qwen3_5_text": ("qwen3_5",),
    "qwen3_5_moe_text": ("qwen3_5moe",),
}
"""Names of classes, without their suffix, that are not the family's name without its underscores."""
_TEXT_PART = {
    "minimax_m3_vl": "minimax_m3_vl_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
}
"""Model type of the text part of multimodal configs that do not name it."""
_TOWER = "vision_config"
MAX_DETAIL = 40
"""Characters of a stored format's name that are shown."""
CAUSAL_TEXT = {"use_bidirectional_attention": "vision"}
"""Values beside those of ``FIXED`` that change nothing for tokens of text."""


def model_from_config(config: object, name: str, ignore: Collection[str] = ()) -> ModelSpec:
    """Build the model that a Hugging Face config describes.

    Args:
        config: The parsed file.
        name: What the model is called.
        ignore: Keys that are left out, whatever they cost; the model names those that the file has.

    Raises:
        InvalidInputError: an unknown family, a missing or impossible value, or a key that is not understood.
    """
    source = f"Hugging Face config of {name}"
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"{source} is {shown(config)}.", "Expected a JSON object.", DO)
    ignored = [key for key in dict.fromkeys(ignore) if _has(config, key)]
    config = {key: value for key, value in config.items() if key not in ignored}
    text = _text_part(config, ignored)
    outer_family = config.get("model_type")
    named = outer_family if isinstance(outer_family, str) and outer_family in OBSTACLES else _family(text)
    family = RENAMED.get(named, named)
    if family not in BUILDERS:
        raise _unknown_family(text, family, source)
    suffix = _check_class(config, {named, family}, ignored, source)
    # A renamed family has defaults of its own; its files write their sizes down.
    defaults = CLASS_DEFAULTS[family] if named == family else {}
    fields = Fields(text, source, ALIASES.get(family, {}), defaults, CLASS_SIZES[family])
    try:
        model = BUILDERS[family](fields, name)
        encoder = encoder_of(config, model.hidden_size, source)
    except ValidationError as error:
        raise invalid_fields(ModelSpec, error, source) from error
    fields.must_be("mtp_transformer_layers", 1, "a module that predicts a further token has a single layer")
    mtp_layers = max(fields.integer(key, default=0, minimum=0) for key in MTP_LAYERS)
    if {*MTP_LAYERS} & {*model.ignored_keys}:
        ignored, mtp_layers = [*ignored, *model.ignored_keys], 0
    if fields.value("use_mtp") is not None and not fields.flag("use_mtp"):
        mtp_layers = 0
    if suffix is not None:
        model, mtp_layers = _with_scores(model, fields, suffix), 0
    outer = Fields(config if isinstance(config.get("text_config"), Mapping) else {}, source)
    stored = _stored_weights(fields) or _stored_weights(outer)
    _check_keys(config, fields, outer, family)
    update: dict[str, object] = {"num_nextn_predict_layers": mtp_layers} if mtp_layers else {}
    if encoder is not None:
        update["vision"] = encoder
    return model.model_copy(update=update | {"ignored_keys": tuple(ignored), "stored_weights": stored})


def _has(config: Mapping[str, object], key: str) -> bool:
    text = config.get("text_config")
    return config.get(key) is not None or (isinstance(text, Mapping) and text.get(key) is not None)


def _text_part(config: Mapping[str, object], ignored: Collection[str]) -> Mapping[str, object]:
    """Return the language model of a multimodal config, which may inherit its family and its tying."""
    text = config.get("text_config")
    outer = config.get("model_type")
    if isinstance(text, Mapping):
        inherited = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        config = {**inherited, **{key: value for key, value in text.items() if key not in ignored}}
    if config.get("model_type") == outer and isinstance(outer, str) and outer in _TEXT_PART:
        config = {**config, "model_type": _TEXT_PART[outer]}
    return config


def _class_name(config: Mapping[str, object]) -> str | None:
    """Return the first class in ``architectures``."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None


def _family(config: Mapping[str, object]) -> str:
    """Return ``model_type``, or the family named by the class in ``architectures``."""
    family = config.get("model_type")
    if family is not None:
        return family if isinstance(family, str) else shown(family)
    name = _class_name(config) or "missing"
    stem = name.split("For", 1)[0] if "For" in name else name
    for suffix in _CLASS_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return next((known for known in (*BUILDERS, *RENAMED) if stem.lower() in _class_stems(known)), stem)


def _class_stems(family: str) -> tuple[str, ...]:
    """List the names of a family's classes without their suffix."""
    return (family.replace("_", ""), *_CLASS_NAMES.get(family, ()))


def _with_scores(model: ModelSpec, fields: Fields, suffix: str) -> ModelSpec:
    """Replace the head over the vocabulary by that of a class that scores sequences or tokens."""
    names, number = fields.value("id2label"), fields.optional("num_labels")
    if isinstance(names, Mapping) and names:
        fields.must_be("num_labels", len(names), "it is the number of names in id2label")
        number = len(names)
    if number is None:
        raise fields.refuse(
            "num_labels and id2label are missing.", "Expected the number of scores (the class assumes 2)."
        )
    of_tokens = suffix == "fortokenclassification"
    if of_tokens:
        if fields.value("classifier_dropout") is None:
            raise fields.refuse(
                "classifier_dropout is missing, and the class drops a tenth.",
                "Expected 0.0: the head is described without a mask.",
            )
        fields.must_be("classifier_dropout", 0.0, "the head is described without a mask")
    return model.with_scores(number, bias=of_tokens)


def _check_class(
    config: Mapping[str, object], families: Collection[str], ignored: Collection[str], source: str
) -> str | None:
    """Refuse classes with parts that a causal language model does not have, but for a head of scores.

    Returns:
        The suffix of a class whose head scores tokens.
    """
    classes = config.get("architectures")
    if classes is None or classes == []:
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise InvalidInputError(
            f"{source}: architectures is {shown(classes)}.", "Expected a list of names of classes.", DO
        )
    causal = {stem + suffix for family in families for stem in _class_stems(family) for suffix in _CAUSAL}
    other = [name for name in classes if name.lower() not in causal]
    for suffix, known in SCORED.items():
        scoring = {stem + suffix for family in known & {*families} for stem in _class_stems(family)}
        if len(classes) == 1 and classes[0].lower() in scoring:
            return suffix
    if _TOWER in ignored or has_known_encoder(config):
        other = [name for name in other if not name.endswith("ForConditionalGeneration")]
    if other:
        is_cut = isinstance(config.get("text_config"), Mapping) and config.get(_TOWER) is None
        without = " and vision_config is missing" if is_cut else ""
        raise InvalidInputError(
            f"{source}: architectures names {', '.join(map(shown, other))}{without}.",
            f"Expected the class of {' or '.join(sorted(families))} with a head over the vocabulary "
            "(...ForCausalLM), or scores of sequences or tokens where transformers has the class: other heads, "
            "models without one and models of other media are not priced.",
            "Price the model as if it had such a head with --ignore architectures, or write it as TOML.",
        )
    return None


def _stored_weights(fields: Fields) -> str | None:
    """Name the format in which the checkpoint stores weights; None if it stores them as they are trained.

    Raises:
        InvalidInputError: a format that training keeps, or a key that may say more than a format.
    """
    for key in ("quantization_config", "compression_config"):
        values = fields.value(key)
        if not isinstance(values, Mapping):
            fields.must_be(key, None, "an object describes how the checkpoint is stored")
            continue
        values = {name: value for name, value in values.items() if value not in (None, {}, [], "")}
        own = Fields(values, f"{fields.source}, {key}")
        producer = own.value("producer")
        by_producer = producer.get("name") if isinstance(producer, Mapping) else None
        method = own.value("quant_method") or by_producer
        if not isinstance(method, str) or method not in STORED:
            raise own.refuse(
                f"the method is {shown(method)}.",
                f"Expected {', '.join(sorted(STORED))}: they say how a checkpoint is stored. Other methods keep a "
                "frozen base in few bits beside adapters, which is not priced.",
            )
        if unknown := sorted(map(shown, {*values} - STORED_KEYS)):
            raise own.refuse(f"{', '.join(unknown)} not understood.", "Expected keys of the stored format.")
        detail = own.value("quant_algo") or own.value("format")
        return f"{method} ({detail})" if isinstance(detail, str) and len(detail) <= MAX_DETAIL else str(method)
    return None


def _check_keys(config: Mapping[str, object], fields: Fields, outer: Fields, family: str) -> None:
    """Refuse every key that is neither priced nor known to leave the cost unchanged.

    Raises:
        InvalidInputError: keys are left; all of them are named.
    """
    for key, (expected, reason) in FIXED.items():
        for level in (fields, outer):
            if level.value(key) != CAUSAL_TEXT.get(key, expected):
                level.must_be(key, expected, reason)
    implementation = fields.value("attn_implementation") or fields.value("_attn_implementation")
    if implementation is not None and implementation not in FUSED:
        raise fields.refuse(
            f"attn_implementation is {shown(implementation)}.",
            f"Expected one of {', '.join(FUSED)}: an unfused attention is asked for with --attention unfused.",
        )
    known_keys = {"model_type", "architectures", *fields.read, *without_effect(family)}
    outer_keys = {"model_type", "architectures", "text_config", "tie_word_embeddings"}
    outer_keys |= {*outer.read, *without_effect("")}
    if has_known_encoder(config):
        outer_keys |= {_TOWER, *OUTER_KEYS.get(str(config["model_type"]), ())}
    unknown = {key: value for key, value in fields.values.items() if key not in known_keys}
    unknown |= {key: value for key, value in outer.values.items() if key not in outer_keys}
    unknown = {key: value for key, value in unknown.items() if value is not None}
    if unknown:
        findings = ", ".join(f"{shown(key)[1:-1]} ({UNPRICED.get(key, 'not understood')})" for key in unknown)
        ignore = " ".join(f"--ignore {shown(key)[1:-1]}" for key in list(unknown)[:6])
        raise InvalidInputError(
            f"{fields.source}: {findings}.",
            f"Expected keys of {family} that are priced or known not to change the cost.",
            f"Correct the spelling, or price the model without: milpplan show CONFIG {ignore}.",
        )


def _unknown_family(config: Mapping[str, object], family: str, source: str) -> InvalidInputError:
    """Make the error of a family without builder; it names the dimensions in the config."""
    present, missing = [], []
    for dimension, keys in _GENERIC.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            present.append(f"{key}={shown(config[key])}")
        elif dimension in _REQUIRED:
            missing.append(f"{dimension} ({' or '.join(keys)})")
    part, nearest = OBSTACLES.get(family, (None, None))
    reason = "which is not supported" if part is None else f"which has {part}: they are not priced"
    return InvalidInputError(
        f"{source} has model_type {shown(family)}, {reason}; "
        f"found {', '.join(present) or 'no known dimension'}; missing {', '.join(missing) or 'none'}.",
        ("" if nearest is None else f"The nearest family is {nearest}. ")
        + f"Supported families: {', '.join(sorted({*BUILDERS, *RENAMED, *_TEXT_PART}))}.",
        "Write the model as TOML: `milpplan show llama3-8b` prints one to start from.",
    )
