"""Typed, checked access to the keys of one Hugging Face ``config.json``; the keys read are remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

MAX_LAYERS = 10_000
MAX_DIMENSION = 10**9
"""Maximum dimension of a model; a larger number is a mistake."""

LAYERS = "num_hidden_layers"
HIDDEN = "hidden_size"
HEADS = "num_attention_heads"
KEY_VALUE_HEADS = "num_key_value_heads"
POSITIONS = "max_position_embeddings"

SOURCE = "transformers 5.24"
DO = "Correct the config, or write the model as TOML: `milpplan show llama3-8b` prints one to start from."


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of a config. A key that is null counts as absent."""

    values: Mapping[str, object]
    source: str
    """Name of the config in messages."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other spellings of a key in the family's class."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of the class for absent keys that milpplan shares."""
    class_sizes: Mapping[str, int] = field(default_factory=dict)
    """Default sizes of the class that milpplan does not assume; a message names them."""
    read: set[str] = field(default_factory=set)
    """Keys that were read so far, and are therefore priced."""

    def refuse(self, seen: str, expected: str) -> InvalidInputError:
        """Make the error for this config."""
        return InvalidInputError(f"{self.source}: {seen}", expected, DO)

    def there(self, key: str) -> bool:
        """Check that the file has the key, even with the value null."""
        return any(name in self.values for name in (key, *self.aliases.get(key, ())))

    def unused(self, *keys: str) -> None:
        """Note keys that the class reads and that change nothing under the other settings of this config."""
        self.read.update(keys)

    def value(self, key: str) -> object:
        """Return the value under a key or another spelling of it, else the class default, else None.

        Raises:
            InvalidInputError: two spellings contradict each other.
        """
        names = (key, *self.aliases.get(key, ()))
        self.read.update(names)
        present = {name: self.values[name] for name in names if self.values.get(name) is not None}
        first = next(iter(present.values()), None)
        if len(present) > 1 and any(
            value != first or type(value) is not type(first) for value in present.values()
        ):
            spellings = " and ".join(f"{name} is {shown(value)}" for name, value in present.items())
            raise self.refuse(f"{spellings}.", "Expected one value: both are names of the same size.")
        return self.defaults.get(key) if first is None else first

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """Return the integer under a key, None if it is absent."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_DIMENSION:
            names = (key, *self.aliases.get(key, ()))
            name = next((name for name in names if self.values.get(name) is not None), key)
            raise self.refuse(
                f"{name} is {shown(value)}.", f"Expected an integer from {minimum} to {MAX_DIMENSION}."
            )
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the integer under a key, else the default; without a default the key is required."""
        value = self.optional(key, minimum=minimum)
        value = default if value is None else value
        if value is None:
            raise self.missing(key)
        return value

    def missing(self, key: str) -> InvalidInputError:
        """Make the error for a missing size; it names the default of the class."""
        spelled = " or ".join((key, *self.aliases.get(key, ())))
        assumed = self.class_sizes.get(key)
        class_takes = "" if assumed is None else f" ({SOURCE} assumes {assumed}: write it down if that is meant)"
        return self.refuse(f"{key} is missing.", f"Expected an integer under {spelled}{class_takes}.")

    def flag(self, key: str) -> bool:
        """Return the boolean under a key, False if it is absent."""
        value = self.value(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shown(value)}.", "Expected true or false.")
        return value

    def drops(self, *keys: str) -> bool:
        """Check that dropout with one of several probabilities keeps a mask."""
        found = False
        for key in keys:
            value = self.value(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise self.refuse(f"{key} is {shown(value)}.", "Expected a probability from 0 to below 1.")
            found |= value > 0
        return found

    def sequence(self, key: str) -> list[object] | None:
        """Return the list under a key, None if it is absent."""
        value = self.value(key)
        if value is not None and not isinstance(value, list):
            raise self.refuse(f"{key} is {shown(value)}.", "Expected a list.")
        return value

    def must_be(self, key: str, expected: object, reason: str) -> None:
        """Refuse a setting that the description of a model has no field for."""
        value = self.value(key)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, expected))
        if value is not None and (value != expected or (type(value) is not type(expected) and not numbers)):
            raise self.refuse(f"{key} is {shown(value)}.", f"Only {shown(expected)} is supported: {reason}.")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, bounded because some keys are lists with an entry per layer."""
        number = self.integer(LAYERS)
        if number > MAX_LAYERS:
            raise self.refuse(f"{LAYERS} is {number}.", f"Expected at most {MAX_LAYERS} layers.")
        return number

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.integer(HIDDEN)

    @property
    def num_key_value_heads(self) -> int:
        """Number of key-value heads; equal to the heads if the class or a null in the file says so."""
        heads = self.integer(HEADS)
        derived = KEY_VALUE_HEADS not in self.class_sizes or self.there(KEY_VALUE_HEADS)
        return self.integer(KEY_VALUE_HEADS, default=heads if derived else None)

    @property
    def head_dim(self) -> int:
        """``head_dim`` if given, else hidden_size / num_attention_heads if that is the class's default."""
        given = self.optional("head_dim")
        if given is not None:
            return given
        if "head_dim" in self.class_sizes:
            raise self.missing("head_dim")
        return self.divided_head_dim

    @property
    def divided_head_dim(self) -> int:
        """hidden_size / num_attention_heads, which must be whole."""
        heads = self.integer(HEADS)
        if self.hidden_size % heads:
            raise self.refuse(
                f"{HIDDEN}={self.hidden_size} is not a multiple of {HEADS}={heads}.",
                "Expected a multiple, or head_dim in a family whose class reads it.",
            )
        return self.hidden_size // heads

    def window(self, key: str = "sliding_window") -> int | None:
        """Return the size of a window; the key is required, if only as null, where the class assumes a number."""
        if key in self.class_sizes and not self.there(key):
            raise self.missing(key)
        return self.optional(key)

    def expert_layers(self) -> list[bool]:
        """Find the layers with a mixture of experts (``decoder_sparse_step``, ``mlp_only_layers``)."""
        step = self.integer("decoder_sparse_step", default=1)
        listed = self.sequence("mlp_only_layers") or []
        dense = {layer for layer in listed if isinstance(layer, int)}
        if len(dense) != len(listed):
            raise self.refuse(f"mlp_only_layers is {shown(listed)}.", "Expected distinct layer numbers.")
        return [layer not in dense and (layer + 1) % step == 0 for layer in range(self.num_layers)]

    def listed_slides(self) -> list[bool] | None:
        """Find the layers with a sliding window in ``layer_types``; None if the file does not list them."""
        types = self.sequence("layer_types")
        if types is None:
            return None
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
