"""Arguments of Megatron-LM: the flags of its parser, and a mapping from flags to given values.

Source of spellings, types, choices and defaults: the file ``megatron_flags.json``, written from
``megatron.training.arguments.add_megatron_arguments`` of NVIDIA/Megatron-LM at d98e8a64 (2026-08-22).

**Models** in these arguments, written and read. Models that its GPT cannot represent are refused.

Patterns over layers, such as ``([0]*3+[1]*58)``, give the layers that have experts or slide a window. Source:
Megatron-LM megatron/training/arguments.py, ``moe_freq_type``, at d98e8a64: an integer, or a Python expression of
lists, ``+``, ``*`` and parentheses.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any, Literal

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
    validated,
)
from milpplan.problem.reading import shown

COMMIT = "d98e8a64"
"""Commit of NVIDIA/Megatron-LM that flags and rules are quoted from."""
MUON = ("muon", "dist_muon")
"""Values of ``--optimizer`` for Muon; the second always shards (training/arguments.py:1853-1866)."""
MUON_SHARDS_ONCE = "whether its layer-wise optimizer takes several instances is not known"

Kind = Literal["value", "on", "off", "switch"]


@dataclass(frozen=True, slots=True)
class Flag:
    """Argument of Megatron-LM. ``kind``: it takes values, or it is a ``switch`` (with two spellings)."""

    spellings: tuple[str, ...]
    kind: Kind
    type: Literal["int", "float", "str"]
    nargs: str | None
    choices: tuple[str, ...]
    default: str | None

    @property
    def name(self) -> str:
        """Spelling that is written."""
        return self.spellings[0]

    def refusal(self, values: tuple[str, ...]) -> str:
        """Describe errors in the values as the parser would; empty if there are none."""
        if self.kind != "value":
            return "takes no value" if values else ""
        wanted = 1 if self.nargs is None else None if self.nargs in ("+", "*") else int(self.nargs)
        if (wanted is not None and len(values) != wanted) or (self.nargs == "+" and not values):
            return f"takes {'one or more values' if wanted is None else f'{wanted} value(s)'}, got {len(values)}"
        for value in values:
            if not _has_type(value, self.type):
                return f"takes {'a whole number' if self.type == 'int' else 'a number'}, got {value!r}"
            if self.choices and value not in self.choices:
                return f"is one of {', '.join(self.choices)}, got {value!r}"
        return ""


def _has_type(value: str, kind: str) -> bool:
    if kind == "str":
        return True
    try:
        int(value) if kind == "int" else float(value)
    except ValueError:
        return False
    return True


@cache
def megatron_flags() -> dict[str, Flag]:
    """Map every spelling to its flag."""
    text = resources.files("milpplan.launchers").joinpath("megatron_flags.json").read_text(encoding="utf-8")
    table: dict[str, Flag] = {}
    for entry in json.loads(text)["flags"]:
        default = entry.get("default")
        flag = Flag(
            spellings=tuple(entry["flags"]),
            kind=entry["kind"],
            type=entry.get("type", "str"),
            nargs=entry.get("nargs") and str(entry["nargs"]),
            choices=tuple(str(choice) for choice in entry.get("choices", ())),
            default=None
            if default is None
            else " ".join(map(str, default if isinstance(default, list) else [default])),
        )
        table |= dict.fromkeys(flag.spellings, flag)
    return table


Values = tuple[str, ...]


@dataclass(slots=True)
class Arguments:
    """Given flags, by their first spelling, with their values (none for a switch).

    ``looked_at`` collects the flags that have been asked for. Flags that a reader never asked for have not entered
    its result.
    """

    values: Mapping[str, Values]
    looked_at: set[str] = field(default_factory=set)

    def given(self, flag: str) -> bool:
        """Test whether the flag is given."""
        self.looked_at.add(flag)
        return flag in self.values

    def texts(self, flag: str) -> Values:
        """Return the values of a flag, or the default of the launcher's parser."""
        if self.given(flag):
            return self.values[flag]
        default = megatron_flags()[flag].default
        return () if default is None else tuple(default.split())

    def text(self, flag: str) -> str | None:
        """Return the only value, or its default."""
        values = self.texts(flag)
        return values[0] if values else None

    def number(self, flag: str) -> int | None:
        """Return the only value as an integer, or its default."""
        text = self.text(flag)
        return None if text is None else int(text)

    def count(self, flag: str, otherwise: int) -> int:
        """Return the integer of a flag whose parser has no default."""
        number = self.number(flag)
        return otherwise if number is None else number

    def needed(self, flag: str) -> int:
        """Return a positive integer, given or by default.

        Raises:
            InvalidInputError: the value is missing or not a positive integer.
        """
        number = self.number(flag)
        if number is None or number < 1:
            raise InvalidInputError(
                f"{flag} is {'missing' if number is None else number}.",
                "Expected a positive whole number: a plan cannot be told without it.",
                f"Give {flag}.",
            )
        return number

    def stated(self, flag: str) -> int:
        """Return a positive integer that the file must state; the parser's default is not a model's size.

        Raises:
            InvalidInputError: the file does not state it.
        """
        if not self.given(flag):
            raise InvalidInputError(
                f"{flag} is missing.",
                "Expected every size of the model: no default stands in for one.",
                f"Give {flag}.",
            )
        return self.needed(flag)


def checked(pairs: Iterable[tuple[str, Values]], source: str) -> tuple[Arguments, tuple[str, ...]]:
    """Check values as the launcher's parser does, and list the flags that it does not know.

    The last occurrence of a flag counts, as in Python's argparse.

    Raises:
        InvalidInputError: a value that the parser would refuse.
    """
    known, found, unknown = megatron_flags(), {}, []
    for name, values in pairs:
        if name not in known:
            unknown.append(" ".join((name, *values)))
            continue
        flag = known[name]
        wrong = flag.refusal(values)
        if wrong:
            raise InvalidInputError(
                f"{source}: {name} {wrong}.",
                f"Expected what Megatron-LM's parser takes, got {shown(' '.join((name, *values)))}.",
                f"Correct {name}.",
            )
        found[flag.name] = values
    return Arguments(found), tuple(unknown)


MAX_LAYERS, MAX_CHARACTERS = 100_000, 20_000
"""Maximum number of layers of a pattern and of characters of its text; every operator may multiply the layers."""


def pattern_text(flags: Sequence[bool]) -> str:
    """Write a pattern of ones and zeros with its shortest period once."""
    size = len(flags)
    period = next(
        width
        for width in range(1, size + 1)
        if size % width == 0 and list(flags[:width]) * (size // width) == list(flags)
    )
    runs = [(int(flag), len(list(same))) for flag, same in groupby(flags[:period])]
    unit = "+".join(f"[{flag}]*{count}" if count > 1 else f"[{flag}]" for flag, count in runs)
    times = size // period
    return f"({unit})*{times}" if times > 1 else f"({unit})"


def pattern_flags(text: str, flag: str) -> list[bool] | int:
    """Read the layers of a pattern, or the frequency that an integer stands for. ``flag`` names it in messages.

    Raises:
        InvalidInputError: the text is neither.
    """
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError("too long")
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInputError(
            f"{flag} is {shown(text)}.",
            "Expected a positive whole number, or lists of 0 and 1 with + and *, such as ([0]*3+[1]*58).",
            f"Correct {flag}.",
        ) from error
    return value if isinstance(value, int) else [bool(element) for element in value]


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return _zeros_and_ones([_value(element) for element in node.elts])
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            if len(left) + len(right) > MAX_LAYERS:
                raise ValueError("too many layers")
            return left + right
        repeats = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
        if repeats and len(left) * right <= MAX_LAYERS:  # type: ignore[arg-type, operator]
            return left * right  # type: ignore[operator]
    raise ValueError("no pattern")


def _zeros_and_ones(values: list[int | list[int]]) -> list[int]:
    flags = [value for value in values if value in (0, 1)]
    if len(flags) != len(values):
        raise ValueError("no pattern")
    return [int(value) for value in flags if isinstance(value, int)]


Pairs = dict[str, Values]


def model_arguments(model: ModelSpec, sequence_length: int) -> Pairs:
    """Write the sizes of the model as arguments.

    Raises:
        IllegalPlanError: Megatron-LM has no arguments for the model.
    """
    _check_layers_alike(model)
    pairs: Pairs = {
        "--num-layers": (str(model.num_layers),),
        "--hidden-size": (str(model.hidden_size),),
        "--vocab-size": (str(model.vocab_size),),
        "--seq-length": (str(sequence_length),),
        "--max-position-embeddings": (str(max(model.max_position_embeddings, sequence_length)),),
        "--position-embedding-type": ("learned_absolute" if model.learned_positions else "rope",),
        "--normalization": ("LayerNorm" if model.norm == "layernorm" else "RMSNorm",),
    }
    if model.drops_embedding != model.dropout:
        raise _refuse(f"{model.name} has dropout in one of embedding and layers", "one hidden dropout for both")
    dropouts = {"--attention-dropout": model.drops_scores, "--hidden-dropout": model.dropout}
    pairs |= {name: ("0.1" if drops else "0.0",) for name, drops in dropouts.items()}
    if not model.tie_word_embeddings:
        pairs["--untie-embeddings-and-output-weights"] = ()
    return pairs | _attention(model) | _biases(model) | _mlps(model)


def _refuse(seen: str, has: str) -> IllegalPlanError:
    return IllegalPlanError(
        f"{seen}, which Megatron-LM cannot build from its arguments.",
        f"Expected {has}.",
        "Export to another target, or plan a model that Megatron-LM has.",
    )


def _check_layers_alike(model: ModelSpec) -> None:
    """Check that layer types differ only in their window and in being dense or not."""
    if model.lm_head_bias:
        raise _refuse(f"{model.name} has a head with a bias", "a head without one (core/models/gpt/gpt_model.py)")
    if parts := sorted({part for kind in model.kinds for part in _unknown_parts(kind)}):
        raise _refuse(
            f"{model.name} has {' and '.join(parts)}",
            "attention without a gate to keys of single tokens, and a feed-forward block, in every layer",
        )
    if any(kind.num_norms != 2 for kind in model.kinds):
        counts = sorted({kind.num_norms for kind in model.kinds})
        raise _refuse(f"{model.name} has layers with {counts} norms", "two norms a layer")
    attentions = {
        kind.attention.model_dump_json(exclude={"sliding_window": True, "indexer": {"sharing"}})
        for kind in model.kinds
    }
    windows = {window for window in _windows(model) if window is not None}
    dense = {kind.mlp for kind in model.kinds if isinstance(kind.mlp, DenseMlp)}
    experts = {kind.mlp for kind in model.kinds if isinstance(kind.mlp, MixtureOfExperts)}
    gated = {kind.mlp.gated for kind in model.kinds if not isinstance(kind.mlp, NoBlock)}
    for what, different in (
        ("attentions", attentions),
        ("sliding windows", windows),
        ("dense feed-forward blocks", dense),
        ("blocks of experts", experts),
        ("activations (gated and not)", gated),
    ):
        if len(different) > 1:
            raise _refuse(
                f"{model.name} has layers of {len(different)} different {what}", "one kind of each in all layers"
            )


def _unknown_parts(kind: LayerRun) -> Iterator[str]:
    """Yield the parts of a layer other than softmax attention to tokens and a feed-forward block."""
    mixer = kind.attention
    if isinstance(mixer, NoBlock) or isinstance(kind.mlp, NoBlock):
        yield "layers of one block"
    if not isinstance(mixer, GroupedQueryAttention | LatentAttention | NoBlock):
        yield "linear recurrences" if mixer.type == "recurrence" else "attention to compressed keys"
    if getattr(mixer, "gate_dim", 0):
        yield "gated attention"
    if getattr(mixer, "blocks", None) is not None:
        yield "attention to blocks of keys"


def _windows(model: ModelSpec) -> list[int | None]:
    """List the sliding window of every layer, in tokens."""
    kinds = [kind.attention for kind in model.kinds]
    return [getattr(kinds[index], "sliding_window", None) for index in model.layer_kinds]


_INDEXER_FLAGS: Pairs = {
    "--experimental-attention-variant": ("dsa",),
    "--dsa-indexer-loss-coeff": ("0.01",),
    "--dsa-indexer-use-sparse-loss": (),
    "--dsa-kernel-backend": ("cudnn",),
    "--no-rope-fusion": (),
}
"""Arguments of the attention that is priced: fused kernels, and a loss of the selected keys. Megatron-LM's
functional test (gpt3_mcore_te_tp2_pp2_dsa) has this coefficient."""


def _selecting(model: ModelSpec) -> Pairs:
    """Write the period and the offset of the layers that select keys of their own (``Indexer.taking``)."""
    if not (takes := model.taking_layers):
        return {}
    offset, layers = min(takes), model.num_layers
    period = min(set(range(offset, layers)) - takes, default=layers + offset) + 1 - offset
    if [layer in takes for layer in range(layers)] != Indexer.taking(layers, period, offset):
        raise _refuse(f"{model.name} has layers of no period that select keys", "a period of such layers")
    return {"--dsa-indexer-topk-freq": (str(period),), "--dsa-indexer-skip-topk-offset": (str(offset),)}


def _attention(model: ModelSpec) -> Pairs:
    attention = model.kinds[0].attention
    assert isinstance(attention, GroupedQueryAttention | LatentAttention)
    pairs: Pairs = {"--num-attention-heads": (str(attention.num_attention_heads),)}
    if isinstance(attention, LatentAttention):
        if attention.indexer is not None:
            pairs |= _INDEXER_FLAGS | _selecting(model)
            pairs |= {
                "--dsa-indexer-n-heads": (str(attention.indexer.index_n_heads),),
                "--dsa-indexer-head-dim": (str(attention.indexer.index_head_dim),),
                "--dsa-indexer-topk": (str(attention.indexer.index_topk),),
            }
        pairs |= {
            "--multi-latent-attention": (),
            "--qk-layernorm": (),
            "--kv-lora-rank": (str(attention.kv_lora_rank),),
            "--qk-head-dim": (str(attention.qk_nope_head_dim),),
            "--qk-pos-emb-head-dim": (str(attention.qk_rope_head_dim),),
            "--v-head-dim": (str(attention.v_head_dim),),
        }
        if attention.q_lora_rank is not None:
            pairs["--q-lora-rank"] = (str(attention.q_lora_rank),)
        if model.hidden_size % attention.num_attention_heads:
            # Latent attention does not use it, but Megatron-LM derives and checks it where it is not given.
            pairs["--kv-channels"] = (str(attention.v_head_dim),)
        return pairs
    if attention.value_dim != attention.head_dim or attention.keys_are_values:
        raise _refuse(f"{model.name} has values of another width than keys, or none", "one width, --kv-channels")
    pairs["--kv-channels"] = (str(attention.head_dim),)
    if attention.num_key_value_heads != attention.num_attention_heads:
        pairs |= {"--group-query-attention": (), "--num-query-groups": (str(attention.num_key_value_heads),)}
    if attention.qk_norm == "full_width":
        raise _refuse(f"{model.name} normalises queries over all heads", "norms of single heads (--qk-layernorm)")
    if attention.qk_norm == "unweighted" or attention.chunked:
        raise _refuse(f"{model.name} has norms without weights or attention in chunks", "windows that slide")
    if attention.qk_norm == "per_head":
        pairs["--qk-layernorm"] = ()
    if attention.sinks:
        pairs["--softmax-type"] = ("learnable",)
    return pairs | _window_arguments(model)


def _window_arguments(model: ModelSpec) -> Pairs:
    """Write the windows; ``--window-size`` counts the tokens before the query's own."""
    windows = _windows(model)
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {}
    pairs: Pairs = {"--window-size": (f"{width - 1},0",)}
    if None in windows:
        pairs["--window-attn-skip-freq"] = (pattern_text([window is not None for window in windows]),)
    return pairs


def _biases(model: ModelSpec) -> Pairs:
    """Write the biases: on all linear layers, on none, or on queries, keys and values only."""
    biases = set()
    for kind in model.kinds:
        assert not isinstance(kind.mlp, NoBlock)
        mlp = [kind.mlp.bias] + ([kind.mlp.router_bias] if isinstance(kind.mlp, MixtureOfExperts) else [])
        qkv, others = False, mlp
        if isinstance(kind.attention, GroupedQueryAttention):
            qkv, others = kind.attention.qkv_bias, [kind.attention.output_bias, *mlp]
        elif any(mlp):
            # Latent attention has no biases here, but Megatron-LM's switch for all layers would add some.
            others = [True, False]
        biases.add((qkv, all(others), any(others)))
    if biases == {(True, True, True)}:
        return {}
    if biases == {(False, False, False)}:
        return {"--disable-bias-linear": ()}
    if biases == {(True, False, False)}:
        return {"--disable-bias-linear": (), "--add-qkv-bias": ()}
    raise _refuse(
        f"{model.name} has biases in some of its linear layers",
        "biases in all, in none, or in queries, keys and values alone (--disable-bias-linear, --add-qkv-bias)",
    )


def _mlps(model: ModelSpec) -> Pairs:
    kinds = model.kinds
    dense = next((kind.mlp for kind in kinds if isinstance(kind.mlp, DenseMlp)), None)
    moe = next((kind.mlp for kind in kinds if isinstance(kind.mlp, MixtureOfExperts)), None)
    width = dense.intermediate_size if dense is not None else moe.intermediate_size if moe is not None else 0
    pairs: Pairs = {"--ffn-hidden-size": (str(width),)}
    if dense.gated if dense is not None else moe is not None and moe.gated:
        pairs["--swiglu"] = ()
    if moe is None:
        return pairs
    pairs |= {
        "--num-experts": (str(moe.num_experts),),
        "--moe-router-topk": (str(moe.num_experts_per_tok),),
        "--moe-ffn-hidden-size": (str(moe.intermediate_size),),
        "--moe-grouped-gemm": (),
    }
    if dense is not None:
        with_experts = [isinstance(kinds[index].mlp, MixtureOfExperts) for index in model.layer_kinds]
        pairs["--moe-layer-freq"] = (pattern_text(with_experts),)
    if moe.shared_intermediate_size:
        pairs["--moe-shared-expert-intermediate-size"] = (str(moe.shared_intermediate_size),)
    if moe.shared_gate:
        pairs["--moe-shared-expert-gate"] = ()
    return pairs


POSITIONS = {"learned_absolute": True, "rope": False, "yarn": False}
"""True for learned positions, by ``--position-embedding-type``; the others rotate queries and keys."""


def model_of(
    given: Arguments, name: str, vocab_size: int | None = None, parts: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Build the model that the arguments describe.

    Args:
        given: the arguments.
        name: of the model.
        vocab_size: the vocabulary, where only the tokenizer knows it.
        parts: fields of every layer, and of its feed-forward block (``mlp``), for which there are no arguments.

    Raises:
        InvalidInputError: sizes are missing or invalid, or the model has parts that are not modelled.
    """
    layers = given.needed("--num-layers")
    hidden = given.needed("--hidden-size")
    positions = given.text("--position-embedding-type") or ""
    if given.given("--use-rotary-position-embeddings"):
        positions = "rope"
    if positions not in POSITIONS:
        raise InvalidInputError(
            f"--position-embedding-type is {positions}.",
            f"Expected one of {', '.join(POSITIONS)}, which are priced.",
            "Describe the model in a .toml file and give it with --model.",
        )
    attentions = _attentions(given, layers, hidden)
    own = dict(parts or {})
    block = own.pop("mlp", {})
    mlps = [mlp | block for mlp in _read_mlps(given, layers, hidden)]
    runs = [
        {"count": len(list(same)), "attention": attention, "mlp": mlp} | own
        for (attention, mlp), same in groupby(zip(attentions, mlps, strict=True))
    ]
    indexer, further = attentions[-1].get("indexer"), None
    if indexer and indexer["sharing"] == "takes":
        # Layers of multi-token prediction are numbered from 1: the first selects keys of its own.
        selects = {"attention": attentions[-1] | {"indexer": indexer | {"sharing": "none"}}}
        further = {"count": 1, "mlp": mlps[-1]} | selects | own
    dropout, scores = (float(given.text(f"--{name}-dropout") or 0.0) > 0 for name in ("hidden", "attention"))
    data = {
        "name": name,
        "hidden_size": hidden,
        "vocab_size": _vocabulary(given, vocab_size),
        "max_position_embeddings": given.count("--max-position-embeddings", given.needed("--seq-length")),
        "layers": runs,
        "mtp_layer": further,
        "tie_word_embeddings": not given.given("--untie-embeddings-and-output-weights"),
        "learned_positions": POSITIONS[positions],
        "norm": (given.text("--normalization") or "").lower(),
        "dropout": dropout,
        "attention_dropout": None if scores == dropout else scores,
        "default_sequence_length": given.needed("--seq-length"),
    }
    return validated(ModelSpec, data, "the model that the arguments describe")


def _vocabulary(given: Arguments, vocab_size: int | None) -> int:
    size = given.number("--vocab-size") or vocab_size
    if size is None:
        raise InvalidInputError(
            "--vocab-size is missing: only the tokenizer knows the vocabulary.",
            "Expected its size, which decides the embedding, the head and the loss.",
            "Give --vocab-size N, in the arguments or to the import, or name the model with --model.",
        )
    return size


def _attentions(given: Arguments, layers: int, hidden: int) -> list[dict[str, Any]]:
    heads = given.needed("--num-attention-heads")
    grouped = given.given("--group-query-attention")
    if not grouped:
        # It acts in grouped attention alone (training/argument_utils.py:330).
        given.given("--num-query-groups")
    if given.given("--multi-latent-attention"):
        given.given("--kv-channels")
        _check_latent(given)
        latent = {
            "type": "mla",
            "num_attention_heads": heads,
            "q_lora_rank": given.number("--q-lora-rank"),
            "kv_lora_rank": given.stated("--kv-lora-rank"),
            "qk_nope_head_dim": given.stated("--qk-head-dim"),
            "qk_rope_head_dim": given.stated("--qk-pos-emb-head-dim"),
            "v_head_dim": given.stated("--v-head-dim"),
        }
        return [latent | {"indexer": indexer} for indexer in _read_indexers(given, layers)]
    for flag in ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"):
        # They act in latent attention alone.
        given.given(flag)
    groups = given.stated("--num-query-groups") if grouped else heads
    biased = not given.given("--disable-bias-linear")
    softmax = given.text("--softmax-type")
    base = {
        "type": "gqa",
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": given.count("--kv-channels", hidden // heads),
        "qkv_bias": biased or given.given("--add-qkv-bias"),
        "output_bias": biased,
        "qk_norm": "per_head" if given.given("--qk-layernorm") else "none",
        "sinks": softmax == "learnable",
        "sliding_window": None,
    }
    return [base | {"sliding_window": window} for window in _read_windows(given, layers)]


def has_indexer(given: Arguments) -> bool:
    """Test whether queries attend to keys that an indexer selects.

    Raises:
        InvalidInputError: the attention is of another variant, or the indexer is beside grouped queries.
    """
    variant = given.text("--experimental-attention-variant")
    if variant is not None and (variant != "dsa" or not given.given("--multi-latent-attention")):
        raise InvalidInputError(
            f"--experimental-attention-variant is {shown(variant)}.",
            "Expected dsa with --multi-latent-attention: other variants are not priced.",
            "Leave it out to compare the run with one of plain attention.",
        )
    return variant is not None


def _read_indexers(given: Arguments, layers: int) -> list[dict[str, Any] | None]:
    """Read the indexer of each layer, trained as is priced, and who shares its keys; None without one."""
    if not has_indexer(given):
        return [None] * layers
    backend, coefficient = given.text("--dsa-kernel-backend"), given.text("--dsa-indexer-loss-coeff")
    given.given("--no-rope-fusion")
    trained = given.given("--dsa-indexer-use-sparse-loss") and coefficient is not None and float(coefficient) > 0
    period, offset = (given.number(f"--dsa-indexer-{name}") or 0 for name in ("topk-freq", "skip-topk-offset"))
    if backend == "none" or not trained or period < 1 or offset < 0:
        raise InvalidInputError(
            f"--dsa-kernel-backend is {backend}, --dsa-indexer-loss-coeff {coefficient or 'missing'}.",
            "Expected a fused kernel, a loss of the selected keys (--dsa-indexer-use-sparse-loss) with a "
            "coefficient above 0, and a --dsa-indexer-topk-freq above 0: that is what is priced.",
            "Correct them, to compare the run with such a one.",
        )
    flags = {f"index_{name}": name.replace("_", "-") for name in ("n_heads", "head_dim", "topk")}
    sizes = {name: given.stated(f"--dsa-indexer-{flag}") for name, flag in flags.items()}
    takes = Indexer.taking(layers, period, max(offset, 1))
    return [sizes | {"sharing": sharing} for sharing in Indexer.sharings(takes)]


def _check_latent(given: Arguments) -> None:
    """Check for norms of the low-rank projections and no biases, as priced (DeepSeek-V2, 2.1)."""
    for flag in ("--qk-layernorm", "--disable-bias-linear"):
        if not given.given(flag):
            raise InvalidInputError(
                f"--multi-latent-attention comes without {flag}.",
                "Expected both: norms of the low-rank projections and no biases, which is what is priced.",
                f"Add {flag} if the model is of this kind.",
            )


def _read_windows(given: Arguments, layers: int) -> list[int | None]:
    """List the number of tokens that a query sees in every layer: its own and those before it."""
    text = given.text("--window-size")
    skip = given.text("--window-attn-skip-freq")
    if text is None:
        return [None] * layers
    parts = text.strip("()").split(",")
    if len(parts) != 2 or not parts[0].strip().isdigit() or parts[1].strip() != "0":
        raise InvalidInputError(
            f"--window-size is {shown(text)}.",
            "Expected tokens before the query and none after it, such as 4095,0.",
            "Correct --window-size.",
        )
    width = int(parts[0]) + 1
    slides = True if skip is None else pattern_flags(skip, "--window-attn-skip-freq")
    if slides is True:
        return [width] * layers
    if isinstance(slides, list):
        return [
            width if slides_here else None for slides_here in _of_length(slides, layers, "--window-attn-skip-freq")
        ]
    return [width if slides and (layer + 1) % slides else None for layer in range(layers)]


def _read_mlps(given: Arguments, layers: int, hidden: int) -> list[dict[str, Any]]:
    gated = given.given("--swiglu") | given.given("--quick-geglu")
    biased = not given.given("--disable-bias-linear")
    # Width that the parser derives where none is given (training/arguments.py, validate_args).
    width = given.count("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    dense = {"type": "dense", "intermediate_size": width, "gated": gated, "bias": biased}
    experts = given.number("--num-experts")
    if not experts:
        return [dense] * layers
    shared = given.count("--moe-shared-expert-intermediate-size", 0)
    moe = {
        "type": "moe",
        "num_experts": experts,
        "num_experts_per_tok": given.stated("--moe-router-topk"),
        "intermediate_size": given.count("--moe-ffn-hidden-size", width),
        "gated": gated,
        "bias": biased,
        "router_bias": biased,
        "shared_intermediate_size": shared,
        "shared_gate": given.given("--moe-shared-expert-gate") and shared > 0,
    }
    frequency = pattern_flags(given.text("--moe-layer-freq") or "1", "--moe-layer-freq")
    if isinstance(frequency, list):
        flags = _of_length(frequency, layers, "--moe-layer-freq")
    else:
        flags = [layer % max(frequency, 1) == 0 for layer in range(layers)]
    return [moe if flag else dense for flag in flags]


def _of_length(flags: list[bool], layers: int, flag: str) -> list[bool]:
    if len(flags) != layers:
        raise InvalidInputError(
            f"{flag} describes {len(flags)} layers, --num-layers is {layers}.",
            "Expected one entry for every layer.",
            f"Correct {flag}.",
        )
    return flags
