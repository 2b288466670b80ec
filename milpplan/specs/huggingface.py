"""From a Hugging Face ``config.json`` (already parsed) to a ``ModelSpec``.

Only the keys are read; neither the network nor the transformers package is needed. Both spellings in use are
understood: the Hub's files (written by transformers 4 and earlier) and what transformers 5 saves.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.specs.hf_defaults import CLASS_DEFAULTS
from milpplan.specs.hf_families import BUILDERS
from milpplan.specs.hf_fields import (
    DO,
    EXPERTS,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KEY_VALUE_HEADS,
    LAYERS,
    POSITIONS,
    Fields,
)
from milpplan.specs.model import ModelSpec
from milpplan.specs.reading import invalid_fields, shown

_GENERIC = {
    "layers": LAYERS,
    "hidden size": HIDDEN,
    "heads": HEADS,
    "key-value heads": KEY_VALUE_HEADS,
    "feed-forward width": INTERMEDIATE,
    "experts": EXPERTS,
    "vocabulary": ("vocab_size",),
    "context": POSITIONS,
}
_REQUIRED = ("layers", "hidden size", "heads", "feed-forward width", "vocabulary")
_CLASS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
_TEXT_PART = {"gemma3": "gemma3_text"}
"""The model_type of the text part where a multimodal config does not name it."""


def is_huggingface_config(data: Mapping[str, object]) -> bool:
    """Whether a JSON object is a Hugging Face config and not a ``ModelSpec``."""
    return "model_type" in data or "architectures" in data


def model_from_config(config: object, name: str) -> ModelSpec:
    """The model that a Hugging Face config describes, named ``name``.

    Raises:
        InvalidInputError: an unknown family, a missing or impossible value, or a setting without a field.
    """
    source = f"Hugging Face config of {name}"
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"{source} is {shown(config)}.", "Expected a JSON object.", DO)
    text = _text_part(config)
    family = _family(text)
    if family not in BUILDERS:
        raise _unknown_family(text, family, source)
    fields = Fields({**CLASS_DEFAULTS[family], **text}, source)
    try:
        return BUILDERS[family](fields, name)
    except ValidationError as error:
        raise invalid_fields(ModelSpec, error, source) from error


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model of a multimodal config, which may leave its family and tying to the outside."""
    text = config.get("text_config")
    outer = config.get("model_type")
    if isinstance(text, Mapping):
        inherited = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        config = {**inherited, **text}
    if config.get("model_type") == outer and isinstance(outer, str) and outer in _TEXT_PART:
        config = {**config, "model_type": _TEXT_PART[outer]}
    return config


def _family(config: Mapping[str, object]) -> str:
    """``model_type``; for files without one, the family whose name the class in ``architectures`` carries."""
    family = config.get("model_type")
    if family is not None:
        return family if isinstance(family, str) else shown(family)
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else "missing"
    for suffix in _CLASS_SUFFIXES:
        name = name.removesuffix(suffix)
    spelled = {known.replace("_", ""): known for known in BUILDERS}
    return spelled.get(name.lower(), name)


def _unknown_family(config: Mapping[str, object], family: str, source: str) -> InvalidInputError:
    found, missing = [], []
    for dimension, keys in _GENERIC.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            found.append(f"{key}={shown(config[key])}")
        elif dimension in _REQUIRED:
            missing.append(f"{dimension} ({' or '.join(keys)})")
    return InvalidInputError(
        f"{source} has model_type {shown(family)}, which is not supported; "
        f"found {', '.join(found) or 'no known dimension'}; missing {', '.join(missing) or 'none'}.",
        f"Supported families: {', '.join(sorted({*BUILDERS, *_TEXT_PART}))}.",
        "Write the model as TOML: `milpplan show llama3-8b` prints one to start from.",
    )
