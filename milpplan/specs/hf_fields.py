"""Typed, checked access to the keys of one Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milpplan.errors import InvalidInputError
from milpplan.specs.reading import shown

MAX_LAYERS = 10_000
MAX_DIMENSION = 10**9
"""No dimension of a model comes near: a larger number is a mistake."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
POSITIONS = ("max_position_embeddings", "n_positions")

DO = "Correct the config, or write the model as TOML: `milpplan show llama3-8b` prints one to start from."


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of a config. A key that is null counts as absent; the first one present wins."""

    values: Mapping[str, object]
    source: str
    """How messages name the config."""

    def refuse(self, seen: str, expected: str) -> InvalidInputError:
        """The error to raise for this config."""
        return InvalidInputError(f"{self.source}: {seen}", expected, DO)

    def optional(self, *keys: str, minimum: int = 1, maximum: int = MAX_DIMENSION) -> int | None:
        """The integer under the first key present, None if no key is."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
                raise self.refuse(f"{key} is {shown(value)}.", f"Expected an integer from {minimum} to {maximum}.")
            return value
        return None

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """The integer under the first key present, else the default; without a default it must be there."""
        value = self.optional(*keys, minimum=minimum)
        value = default if value is None else value
        if value is None:
            raise self.refuse(f"{keys[0]} is missing.", f"Expected an integer under {' or '.join(keys)}.")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shown(value)}.", "Expected true or false.")
        return value

    def sequence(self, key: str) -> list[object] | None:
        """A list, None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refuse(f"{key} is {shown(value)}.", "Expected a list.")
        return value

    def must_be(self, key: str, expected: object, reason: str) -> None:
        """Refuses a setting that the description of a model has no field for."""
        value = self.values.get(key)
        if value is not None and (value != expected or type(value) is not type(expected)):
            raise self.refuse(f"{key} is {shown(value)}.", f"Only {shown(expected)} is supported: {reason}.")

    @property
    def num_layers(self) -> int:
        """Decoder layers, bounded because some keys are lists with one entry a layer."""
        number = self.integer(*LAYERS)
        if number > MAX_LAYERS:
            raise self.refuse(f"{LAYERS[0]} is {number}.", f"Expected at most {MAX_LAYERS} layers.")
        return number

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.integer(*HIDDEN)

    @property
    def head_dim(self) -> int:
        """``head_dim`` when given, else hidden_size / num_attention_heads, which must be whole."""
        given = self.optional("head_dim")
        if given is not None:
            return given
        heads = self.integer(*HEADS)
        if self.hidden_size % heads:
            raise self.refuse(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}.",
                "Expected a multiple, or head_dim.",
            )
        return self.hidden_size // heads

    def expert_layers(self) -> list[bool]:
        """Whether each layer is a mixture of experts (``decoder_sparse_step``, ``mlp_only_layers``)."""
        step = self.integer("decoder_sparse_step", default=1)
        listed = self.sequence("mlp_only_layers") or []
        dense = {layer for layer in listed if isinstance(layer, int)}
        if len(dense) != len(listed):
            raise self.refuse(f"mlp_only_layers is {shown(listed)}.", "Expected distinct layer numbers.")
        return [layer not in dense and (layer + 1) % step == 0 for layer in range(self.num_layers)]

    def windows(self, slides: list[bool], window: int | None) -> list[int | None]:
        """For every layer its attention window, None for full attention: ``layer_types`` if given, else
        ``slides``."""
        types = self.sequence("layer_types")
        if types is not None:
            slides = self._slides(types)
        return [window if sliding else None for sliding in slides]

    def _slides(self, types: list[object]) -> list[bool]:
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.refuse(
                    f"layer_types has {shown(kind)}.", "Expected full_attention or sliding_attention."
                )
        if len(types) != self.num_layers:
            raise self.refuse(
                f"layer_types has {len(types)} entries.",
                f"Expected one for each of {self.num_layers} layers.",
            )
        return [kind == "sliding_attention" for kind in types]
