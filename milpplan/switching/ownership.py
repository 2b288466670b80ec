"""Ownership of the slices of all tensors by ranks under a plan.

A slice is a box ``[first row, last row + 1) x [first column, last column + 1)`` of a tensor. Tensor parallelism
cuts rows or columns, pipeline parallelism distributes the layers, expert parallelism the experts. Replicas hold
the same boxes, or with ZeRO equal shares of the rows of each box.

**Tensors**: the parameters of a model, their shapes, their layers, and the parallelism that divides them.

Every tensor is a matrix [outputs, inputs] as in a linear layer; vectors are [length, 1]. Their total equals the
count of ``milpplan.simulation.layers.parameter_counts`` to the unit: tests compare them for every shipped model.

**Lots** of a switch: slices of tensors, grouped by their holders before and their receivers. The boxes of both
plans cut every tensor into cells (their common refinement). Cells with the same holders and the same receivers
form a lot, whatever their tensors. Senders are chosen for lots, and a lot may be divided among senders between any
two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from milpplan.communication.records import rank_lists
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.problem import (
    CompressedAttention,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    Layout,
    LinearRecurrence,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
    Plan,
)
from milpplan.problem.hardware import FP32_STATE_BYTES
from milpplan.problem.model import Mixer
from milpplan.simulation import BoolArray, IntArray
from milpplan.simulation.layers import (
    DELTA_RULES,
    decays,
    direct_width,
    mixed_streams,
    padded_vocab_size,
    total_parameters,
    widths,
)

Split = Literal["rows", "columns", "none"]
"""Dimension that tensor parallelism (etp for experts) divides: outputs of the first linear layer of a pair, inputs
of the second layer, or none."""

EMBEDDING, HEAD = -2, -1
"""Places of the tensors outside layers, as in ``milpplan.simulation.stages``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a tensor and rule of its division; tensors with equal shape and place are divided alike."""

    rows: int
    columns: int
    split: Split = "none"
    units: int = 1
    """Number of indivisible pieces of the divided dimension: heads, else its rows or columns."""
    vocabulary: bool = False
    """True if the rows are those of the vocabulary, which frameworks pad before they divide it."""

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Tensor:
    """Parameter tensor."""

    name: str
    shape: Shape
    place: int
    """Index of its layer, ``EMBEDDING`` or ``HEAD``."""
    expert: int | None = None
    """Index of its routed expert; None: no routed expert."""
    num_experts: int = 1
    """Routed experts of its layer."""
    tied: bool = False
    """True if the last virtual stage holds a copy as its output projection."""


def _rows(rows: int, columns: int, units: int | None = None) -> Shape:
    """Make a shape whose rows are divided."""
    return Shape(rows, columns, "rows", rows if units is None else units)


def _columns(rows: int, columns: int, units: int | None = None) -> Shape:
    """Make a shape whose columns are divided."""
    return Shape(rows, columns, "columns", columns if units is None else units)


def _vector(length: int) -> Shape:
    """Make the shape of an undivided vector."""
    return Shape(length, 1)


MAX_EXPERTS = 200_000
"""Maximum number of routed experts of all layers, each of which is listed."""
MAX_PARAMETERS = 10**14
"""Maximum number of parameters, so that sums of their bytes over ranks stay in 64 bits."""

Named = Iterator[tuple[str, Shape]]
"""Names and shapes of tensors."""


def _norm(model: ModelSpec, name: str) -> Named:
    """List the tensors of a norm."""
    yield f"{name}.weight", _vector(model.hidden_size)
    if model.norm == "layernorm":
        yield f"{name}.bias", _vector(model.hidden_size)


def _grouped_query_attention(hidden: int, attention: GroupedQueryAttention) -> Named:
    """List the tensors of ``parameters._grouped_query_attention``; cuts respect heads."""
    heads, shared, width = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    values = () if attention.keys_are_values else (("v", shared, attention.value_dim),)
    gates = (("gate", heads, attention.gate_dim),) if attention.gate_dim else ()
    for name, count, size in (("q", heads, width), *gates, ("k", shared, width), *values):
        yield f"{name}.weight", _rows(count * size, hidden, count)
        if attention.qkv_bias:
            yield f"{name}.bias", _rows(count * size, 1, count)
    if attention.sinks:
        yield "sinks", _rows(heads, 1)
    if attention.qk_norm not in ("none", "unweighted"):
        per_head = attention.qk_norm == "per_head"
        yield "q_norm.weight", _vector(width if per_head else heads * width)
        yield "k_norm.weight", _vector(width if per_head else shared * width)
    if blocks := attention.blocks:
        width = blocks.index_head_dim
        yield "indexer.q.weight", Shape(blocks.index_n_heads * width, hidden)
        yield "indexer.k.weight", Shape(width, hidden)
        yield from ((f"indexer.{part}_norm.weight", _vector(width)) for part in "qk")
    yield "o.weight", _columns(hidden, heads * attention.value_dim, heads)
    if attention.output_bias:
        yield "o.bias", _vector(hidden)


def _latent_attention(hidden: int, attention: LatentAttention) -> Named:
    """List the tensors of ``parameters._latent_attention``."""
    heads, rank = attention.num_attention_heads, attention.kv_lora_rank
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    if attention.q_lora_rank is None:
        yield "q.weight", _rows(query, hidden, heads)
    else:
        yield "q_down.weight", Shape(attention.q_lora_rank, hidden)
        yield "q_norm.weight", _vector(attention.q_lora_rank)
        yield "q_up.weight", _rows(query, attention.q_lora_rank, heads)
    yield "kv_down.weight", Shape(rank + attention.qk_rope_head_dim, hidden)
    yield "kv_norm.weight", _vector(rank)
    yield "kv_up.weight", _rows(heads * (attention.qk_nope_head_dim + attention.v_head_dim), rank, heads)
    yield "o.weight", _columns(hidden, heads * attention.v_head_dim, heads)
    if (indexer := attention.indexer) is not None and not indexer.takes:
        assert attention.q_lora_rank is not None
        count, width = indexer.index_n_heads, indexer.index_head_dim
        yield "indexer.q.weight", Shape(count * width, attention.q_lora_rank)
        yield "indexer.k.weight", Shape(width, hidden)
        yield from ((f"indexer.k_norm.{part}", _vector(width)) for part in ("weight", "bias"))
        yield "indexer.weights.weight", Shape(count, hidden)


def _compressed_attention(hidden: int, attention: CompressedAttention) -> Named:
    """List the tensors of ``parameters._compressed_attention``, of which every rank has a copy."""
    rank, size, series = attention.q_lora_rank, attention.head_dim, attention.series
    heads, outputs = attention.num_attention_heads, attention.o_groups * attention.o_lora_rank
    shapes = {"q_down": (rank, hidden), "q_up": (heads * size, rank), "kv": (size, hidden), "o": (hidden, outputs)}
    shapes |= {"q_norm": (rank, 1), "kv_norm": (size, 1), "sinks": (heads, 1)}
    shapes["o_groups"] = outputs, heads * size // attention.o_groups
    made = {"compressor": size} if attention.compress_rate else {}
    if indexer := attention.indexer:
        made["indexer"], count = indexer.index_head_dim, indexer.index_n_heads
        shapes |= {"indexer.q": (count * indexer.index_head_dim, rank), "indexer.weights": (count, hidden)}
    for name, width in made.items():
        shapes |= {f"{name}.{part}": (series * width, hidden) for part in ("kv", "gate")}
        shapes |= {f"{name}.positions": (attention.compress_rate or 0, series * width), f"{name}.norm": (width, 1)}
    return ((f"{name}.weight", Shape(*shape)) for name, shape in shapes.items())


def _streams(model: ModelSpec, name: str, mapped: int, factors: int) -> Named:
    """List the tensors of a mapping of residual streams; none of a single stream."""
    width = model.residual_streams * model.hidden_size
    shapes = {"weight": Shape(mapped, width), "bias": _vector(mapped), "scale": _vector(factors)}
    return ((f"{name}.{part}", shape) for part, shape in shapes.items() if model.residual_streams > 1)


def _linear_recurrence(hidden: int, mixer: LinearRecurrence) -> Named:
    """List the tensors of ``parameters._linear_recurrence``; cuts respect heads.

    The parts of the projection and of the convolution are cut on their own.
    """
    keys, values = mixer.num_key_heads, mixer.num_value_heads
    key, value = keys * mixer.key_head_dim, values * mixer.value_head_dim
    for name, width, heads in (("query", key, keys), ("key", key, keys), ("value", value, values)):
        yield f"in.{name}.weight", _rows(width, hidden, heads)
        if mixer.conv_kernel:
            yield f"conv.{name}.weight", _rows(width, mixer.conv_kernel, heads)
        if mixer.conv_bias:
            yield f"conv.{name}.bias", _rows(width, 1, heads)
    gates, rank = widths(mixer).gates, mixer.gate_rank
    if rank is None:
        yield "in.gate.weight", _rows(value, hidden, values)
    else:
        gates = values
        for name, width in (("decay", values * mixer.key_head_dim), ("gate", value)):
            yield f"in.{name}.down.weight", Shape(rank, hidden)
            yield f"in.{name}.up.weight", _rows(width, rank, values)
    if gates:
        yield "in.decay.weight", _rows(gates, hidden, values)
        yield "decay", _rows(decays(mixer)[1] * values, 1, values)
    if mixer.bias:
        yield "in.bias", _rows(direct_width(mixer), 1)
        yield "out.bias", _vector(hidden)
    yield "norm.weight", _vector(mixer.value_head_dim) if mixer.update in DELTA_RULES else _rows(value, 1, values)
    yield "out.weight", _columns(hidden, value, values)


def _mixer(hidden: int, mixer: Mixer) -> Named:
    """List the tensors of a token mixer."""
    if isinstance(mixer, LatentAttention):
        return _latent_attention(hidden, mixer)
    if isinstance(mixer, CompressedAttention):
        return _compressed_attention(hidden, mixer)
    if isinstance(mixer, LinearRecurrence):
        return _linear_recurrence(hidden, mixer)
    return iter(()) if isinstance(mixer, NoBlock) else _grouped_query_attention(hidden, mixer)


def _feed_forward(hidden: int, width: int, gated: bool, bias: bool) -> Named:
    """List the tensors of ``parameters._feed_forward``."""
    for name in ("gate", "up") if gated else ("up",):
        yield f"{name}.weight", _rows(width, hidden)
        if bias:
            yield f"{name}.bias", _rows(width, 1)
    yield "down.weight", _columns(hidden, width)
    if bias:
        yield "down.bias", _vector(hidden)


def _mixture_of_experts(hidden: int, mlp: MixtureOfExperts) -> Named:
    """List the tensors of a mixture of experts outside the routed experts."""
    yield "router.weight", Shape(mlp.num_experts, hidden)
    if mlp.router_bias:
        yield "router.bias", _vector(mlp.num_experts)
    if mlp.router_scales:
        yield "router.scale", _vector(hidden)
        yield "router.expert_scales", _vector(mlp.num_experts)
    if mlp.shared_intermediate_size:
        shared = _feed_forward(hidden, mlp.shared_intermediate_size, mlp.gated, mlp.bias)
        yield from ((f"shared.{name}", shape) for name, shape in shared)
    if mlp.latent_size:
        yield "latent_down.weight", Shape(mlp.latent_size, hidden)
        yield "latent_up.weight", Shape(hidden, mlp.latent_size)
    if mlp.shared_gate:
        yield "shared.gate_logit.weight", Shape(1, hidden)


def _layer(model: ModelSpec, kind: LayerRun, number: int) -> Iterator[Tensor]:
    """List the tensors of a layer."""
    hidden, mlp, prefix = model.hidden_size, kind.mlp, f"layers.{number}"
    outer = [_norm(model, f"{prefix}.norms.{norm}") for norm in range(kind.num_norms)]
    mappings = [f"{prefix}.streams.{block}" for block in range(kind.num_blocks)]
    outer += [_streams(model, name, mixed_streams(model), 3) for name in mappings]
    for name, shape in _mixer(hidden, kind.attention):
        yield Tensor(f"{prefix}.attention.{name}", shape, number)
    yield from (Tensor(name, shape, number) for name, shape in chain(*outer))
    if isinstance(mlp, DenseMlp):
        for name, shape in _feed_forward(hidden, mlp.intermediate_size, mlp.gated, mlp.bias):
            yield Tensor(f"{prefix}.mlp.{name}", shape, number)
        return
    if isinstance(mlp, NoBlock):
        return
    for name, shape in _mixture_of_experts(hidden, mlp):
        yield Tensor(f"{prefix}.mlp.{name}", shape, number)
    for expert in range(mlp.num_experts):
        for name, shape in _feed_forward(mlp.latent_size or hidden, mlp.intermediate_size, mlp.gated, mlp.bias):
            yield Tensor(f"{prefix}.mlp.experts.{expert}.{name}", shape, number, expert, mlp.num_experts)


@lru_cache(maxsize=8)
def model_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """List all parameter tensors in the order of the model; a tied embedding occurs once.

    Raises:
        InvalidInputError: too many tensors, too large, or a vision encoder, whose tensors are not listed.
    """
    _check_size(model)
    if model.vision is not None:
        raise InvalidInputError(
            f"{model.name} has a vision encoder.",
            "Expected a language model: a switch lists the tensors of decoders.",
            "Leave the encoder out of the model; it moves with the first stage.",
        )
    hidden, vocabulary = model.hidden_size, model.vocab_size
    words = Shape(vocabulary, hidden, "rows", vocabulary, vocabulary=True)
    tensors = [Tensor("embedding.weight", words, EMBEDDING, tied=model.tie_word_embeddings)]
    if model.learned_positions:
        tensors.append(Tensor("positions.weight", Shape(model.max_position_embeddings, hidden), EMBEDDING))
    for number, kind in enumerate(model.layer_kinds):
        tensors += _layer(model, model.kinds[kind], number)
    last = chain(_norm(model, "final_norm"), _streams(model, "streams", model.residual_streams, 1))
    tensors += [Tensor(name, shape, HEAD) for name, shape in last]
    bias = Shape(vocabulary, 1, "rows", vocabulary, vocabulary=True)
    if model.num_labels is not None:
        words, bias = Shape(model.num_labels, hidden), _vector(model.num_labels)
    if not model.tie_word_embeddings:
        tensors.append(Tensor("head.weight", words, HEAD))
    if model.lm_head_bias:
        tensors.append(Tensor("head.bias", bias, HEAD))
    return tuple(tensors)


def _check_size(model: ModelSpec) -> None:
    """Refuse models whose tensors are too many to list."""
    experts = sum(run.count * run.mlp.num_experts for run in model.layers if isinstance(run.mlp, MixtureOfExperts))
    parameters = total_parameters(model)
    if experts > MAX_EXPERTS or parameters > MAX_PARAMETERS:
        raise InvalidInputError(
            f"{model.name} has {parameters:,} parameters and {experts:,} routed experts.",
            f"Expected at most {MAX_PARAMETERS:,} and {MAX_EXPERTS:,} for a switch, which lists every tensor.",
            "Correct the model.",
        )


What = Literal["parameters", "gradients", "optimizer"]
WHATS: tuple[What, ...] = ("parameters", "gradients", "optimizer")
"""States: bf16 weights; reduced gradients; fp32 weights with both moments."""

SHARDED_FROM: dict[What, int] = {"parameters": 3, "gradients": 1, "optimizer": 1}
"""First ZeRO stage in which replicas hold shares. Gradients are shared from stage 1: its reduce-scatter leaves the
sums of a share on each replica, and the rest of its buffer is not reduced (``states.reduce_s``). The weights of
embedding and head are whole at stage 3, as in the simulator."""

Key = tuple[tuple[int, ...], int, bool]
"""Pipeline ranks, rank of the experts (-1: dense), and True for tensors of layers."""
Box = tuple[int, int, int, int]
"""First row, last row + 1, first column, last column + 1."""


def element_bytes(what: What, grad_bytes: int) -> int:
    """Return the bytes per parameter of a state: 2, ``grad_bytes``, or 12 (Adam in fp32)."""
    return {"parameters": 2, "gradients": grad_bytes, "optimizer": FP32_STATE_BYTES}[what]


@dataclass(frozen=True, slots=True)
class ShardRules:
    """Rules of a framework for the divisions that the degrees leave open."""

    shards: Literal["tensor", "hetu"] = "tensor"
    """``tensor``: each replica holds an equal number of the rows of each of its boxes (PyTorch's fully_shard).
    ``hetu``: the rows of the whole tensor are divided first by replicas and then by tensor-parallel ranks, as
    Hetu's switch planner reads Hetu's annotation of a scattered gradient."""
    padded_vocabulary: bool = True
    """True: the vocabulary is cut with Megatron-LM's padding; False: in equal parts."""


EQUAL_ROWS = ShardRules()
"""Default rules: every replica holds an equal number of the rows of each box."""


def _cut(size: int, units: int, parts: int, part: int) -> tuple[int, int]:
    """Return the interval of part ``part`` of ``parts`` of a dimension whose ``units`` stay whole.

    With more parts than units, neighbouring parts share a unit (key and value heads if tp is above
    ``num_key_value_heads``).
    """
    first, last = part * units // parts, (part + 1) * units // parts
    if units < parts:
        last = first + 1
    return first * size // units, last * size // units


def _share(box: Box, parts: int, part: int) -> Box:
    """Cut an equal share of the rows of a box."""
    rows = box[1] - box[0]
    return box[0] + part * rows // parts, box[0] + (part + 1) * rows // parts, box[2], box[3]


def tensor_box(shape: Shape, parts: int, part: int, rules: ShardRules) -> Box:
    """Return the box of a tensor-parallel rank."""
    if shape.split == "columns":
        return 0, shape.rows, *_cut(shape.columns, shape.units, parts, part)
    if shape.split == "none":
        return 0, shape.rows, 0, shape.columns
    if shape.vocabulary and rules.padded_vocabulary:
        rows = int(padded_vocab_size(shape.rows, parts)) // parts
        return min(part * rows, shape.rows), min((part + 1) * rows, shape.rows), 0, shape.columns
    return *_cut(shape.rows, shape.units, parts, part), 0, shape.columns


def _shard_box(shape: Shape, grid: tuple[int, int], position: tuple[int, int], rules: ShardRules) -> Box:
    """Return the box of a shard; ``grid`` and ``position`` are (tensor-parallel ranks, shards)."""
    (parts, shards), (part, shard) = grid, position
    if rules.shards == "hetu" and shape.split != "columns" and shards > 1:
        return *_cut(shape.rows, shape.rows, shards * parts, shard * parts + part), 0, shape.columns
    return _share(tensor_box(shape, parts, part, rules), shards, shard)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Ownership of a state under a plan. Boxes are computed once for every shape and position."""

    plan: Plan
    what: What
    rules: ShardRules
    layers_sharded: bool
    ends_sharded: bool
    stage_of_layer: tuple[int, ...]
    dense: IntArray
    """Ranks [pp, tp, replicas]."""
    expert: IntArray
    """Ranks [pp, ep, etp, replicas]."""
    tensors: tuple[Tensor, ...]
    known: dict[tuple[Shape, int, int, bool], IntArray] = field(default_factory=dict)
    known_keys: list[Key] = field(default_factory=list)

    def stages(self, tensor: Tensor) -> tuple[int, ...]:
        """List the pipeline ranks that hold a tensor: a single rank, or both ends for a tied embedding."""
        ranks = self.plan.layout.stage_ranks
        if tensor.place == EMBEDDING:
            return tuple(sorted({ranks[0], ranks[-1]})) if tensor.tied else (ranks[0],)
        return (ranks[-1],) if tensor.place == HEAD else (self.stage_of_layer[tensor.place],)

    @property
    def keys(self) -> list[Key]:
        """``key`` of every tensor."""
        if not self.known_keys:
            self.known_keys.extend(self.key(tensor) for tensor in self.tensors)
        return self.known_keys

    def key(self, tensor: Tensor) -> Key:
        """Return the key that, with the shape, decides which ranks hold a tensor."""
        layout = self.plan.layout
        home = -1 if tensor.expert is None else tensor.expert * layout.ep // tensor.num_experts
        return self.stages(tensor), home, tensor.place >= 0

    def boxes(self, tensor: Tensor) -> IntArray:
        """List rank and box of every holder, [holders, 5], without empty boxes."""
        stages, home, _ = self.key(tensor)
        sharded = self.layers_sharded if tensor.place >= 0 else self.ends_sharded
        return np.concatenate([self._boxes(tensor.shape, stage, home, sharded) for stage in stages])

    def _boxes(self, shape: Shape, stage: int, home: int, sharded: bool) -> IntArray:
        key = (shape, stage, home, sharded)
        if key not in self.known:
            ranks = self.dense[stage] if home < 0 else self.expert[stage, home]
            parts, replicas = ranks.shape
            shards = replicas // self.plan.layout.dp_replicate if sharded else 1
            grid = (parts, shards)
            rows = [
                (int(ranks[part, replica]), *_shard_box(shape, grid, (part, replica % shards), self.rules))
                for part in range(parts)
                for replica in range(replicas)
            ]
            boxes = np.array(rows, dtype=np.int64).reshape(-1, 5)
            self.known[key] = boxes[(boxes[:, 1] < boxes[:, 2]) & (boxes[:, 3] < boxes[:, 4])]
        return self.known[key]


def ownership(model: ModelSpec, plan: Plan, what: What, rules: ShardRules = EQUAL_ROWS) -> Ownership:
    """Determine the ownership of a state under a plan.

    Raises:
        IllegalPlanError: the plan does not cover the model's layers, or its degrees do not divide.
    """
    layout = plan.layout
    _check(model, plan)
    lists = rank_lists(layout, 1, 1)
    stage_of_layer = [
        layout.stage_ranks[number]
        for number, stage in enumerate(plan.virtual_stages)
        for _ in range(stage.num_layers)
    ]
    return Ownership(
        plan,
        what,
        rules,
        layout.zero_stage >= SHARDED_FROM[what],
        layout.zero_stage >= SHARDED_FROM[what] and what != "parameters",
        tuple(stage_of_layer),
        lists["replicas"].reshape(layout.pp, layout.tp, -1),
        lists["expert_replicas"].reshape(layout.pp, layout.ep, layout.etp, -1),
        model_tensors(model),
    )


def _check(model: ModelSpec, plan: Plan) -> None:
    """Check that the plan covers the model and that its degrees divide."""
    layout, held = plan.layout, plan.virtual_stages[-1].layers[1]
    if held != model.num_layers:
        raise IllegalPlanError(
            f"The plan holds {held} layers, {model.name} has {model.num_layers}.",
            "Expected a plan of this model.",
            "Give plans and model that belong together.",
        )
    for name, number, divisor in _divisions(model, layout):
        if number % divisor:
            raise IllegalPlanError(
                f"{name} = {number} is not a multiple of {divisor}.",
                "Expected degrees that divide what they share.",
                "Correct the layout of the plan.",
            )


def _divisions(model: ModelSpec, layout: Layout) -> list[tuple[str, int, int]]:
    """List (name, number, divisor) of the numbers that must be multiples."""
    divisions = [("tp * cp * dp", layout.tp * layout.cp * layout.dp, layout.ep * layout.etp)]
    moes = [run.mlp for run in model.layers if isinstance(run.mlp, MixtureOfExperts)]
    return divisions + [("num_experts", mlp.num_experts, layout.ep) for mlp in moes]


MAX_GPUS = 4096
"""Maximum number of GPUs of a switch, which lists every rank."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Lots that some rank lacks, and the bytes of every rank."""

    what: What
    element_bytes: int
    tensors: tuple[Tensor, ...]
    holders: BoolArray
    """[lots, ranks] ranks that hold a lot before the switch."""
    receivers: BoolArray
    """[lots, ranks] ranks that lack a lot."""
    num_bytes: IntArray
    """[lots]."""
    groups: tuple[IntArray, ...]
    """Numbers of the tensors of each group of tensors that are cut alike."""
    cells: IntArray
    """[cells, 5] group of tensors, and box; in the order of their lots."""
    ends: IntArray
    """[lots] last cell + 1 of each lot."""
    old_bytes: IntArray
    """[ranks] before the switch."""
    new_bytes: IntArray
    """[ranks] after the switch."""
    kept_bytes: IntArray
    """[ranks] both before and after the switch."""

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return len(self.old_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks lack; a plan without duplicate messages moves exactly these bytes."""
        return int((self.new_bytes - self.kept_bytes).sum())

    def slices(self, lot: int) -> IntArray:
        """List number of the tensor and box of every slice of a lot, in the order of the model, [slices, 5]."""
        cells = self.cells[self.ends[lot - 1] if lot else 0 : self.ends[lot]]
        numbers = [self.groups[group] for group in cells[:, 0]]
        boxes = np.repeat(cells[:, 1:], [len(part) for part in numbers], axis=0)
        rows = np.column_stack([np.concatenate(numbers), boxes])
        return np.asarray(rows[np.lexsort((rows[:, 3], rows[:, 1], rows[:, 0]))])


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a tensor."""

    boxes: IntArray
    """[cells, 4]."""
    holders: BoolArray
    """[cells, ranks] ranks that hold a cell before the switch."""
    needers: BoolArray
    """[cells, ranks] ranks that hold a cell after the switch."""

    @property
    def sizes(self) -> IntArray:
        """Number of elements of each cell."""
        return np.asarray((self.boxes[:, 1] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 2]))


def refine(source: IntArray, target: IntArray, num_gpus: int) -> Cells:
    """Compute the common refinement of two sets of boxes [boxes, 5] (rank, box) of a tensor.

    Boxes of the same rank in the same set do not overlap.
    """
    both = np.concatenate([source, target])
    row_cuts, column_cuts = np.unique(both[:, 1:3]), np.unique(both[:, 3:5])
    marks = []
    for boxes in (source, target):
        # Each box adds 1 at its first corner and subtracts it behind its edges; sums over both axes fill the box.
        corners = np.zeros((num_gpus, len(row_cuts), len(column_cuts)), dtype=np.int32)
        rows, columns = np.searchsorted(row_cuts, boxes[:, 1:3]), np.searchsorted(column_cuts, boxes[:, 3:5])
        for row, column, sign in ((0, 0, 1), (1, 0, -1), (0, 1, -1), (1, 1, 1)):
            np.add.at(corners, (boxes[:, 0], rows[:, row], columns[:, column]), sign)
        mark = corners.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1] > 0
        marks.append(mark.reshape(num_gpus, -1).T)
    top, left = (axis.ravel() for axis in np.meshgrid(row_cuts[:-1], column_cuts[:-1], indexing="ij"))
    bottom, right = (axis.ravel() for axis in np.meshgrid(row_cuts[1:], column_cuts[1:], indexing="ij"))
    return Cells(np.stack([top, bottom, left, right], axis=1), marks[0], marks[1])


def lots(
    model: ModelSpec,
    source: Plan,
    target: Plan,
    what: What,
    grad_bytes: int = 4,
    rules: ShardRules = EQUAL_ROWS,
) -> Lots:
    """Find the lots that a switch of a state from one plan to another has to move.

    Raises:
        InvalidInputError: the plans have different numbers of GPUs, or too many GPUs.
        IllegalPlanError: a plan does not suit the model.
    """
    check_gpus([source, target])
    before, after = (ownership(model, plan, what, rules) for plan in (source, target))
    return lots_between(before, after, element_bytes(what, grad_bytes))


def check_gpus(plans: list[Plan]) -> None:
    """Check that all plans are on the same GPUs, and not on too many.

    Raises:
        InvalidInputError: they are not.
    """
    numbers = sorted({plan.layout.num_gpus for plan in plans})
    if len(numbers) > 1:
        raise InvalidInputError(
            f"The plans use {' and '.join(f'{number:,}' for number in numbers)} GPUs.",
            "Expected plans on the same GPUs.",
            "Give plans of one job.",
        )
    if numbers and numbers[0] > MAX_GPUS:
        raise InvalidInputError(
            f"A switch of {numbers[0]:,} GPUs.",
            f"Expected at most {MAX_GPUS:,}: it is written out rank by rank.",
            "Plan it for fewer replicas, which all do the same.",
        )


def lots_between(before: Ownership, after: Ownership, element_size: int) -> Lots:
    """Find the lots between two ownerships of the same state, with ``element_size`` bytes per element."""
    num_gpus = before.plan.layout.num_gpus
    rank_elements = np.zeros((3, num_gpus), dtype=np.int64)
    groups, boxes, sizes, marks = list[IntArray](), list[IntArray](), list[IntArray](), list[BoolArray]()
    for numbers, pair in _alike(before, after):
        cells = refine(*pair, num_gpus)
        elements = cells.sizes * len(numbers)
        for row, mark in enumerate((cells.holders, cells.needers, cells.holders & cells.needers)):
            rank_elements[row] += elements @ mark
        lacking = cells.needers & ~cells.holders
        moved = np.flatnonzero(lacking.any(axis=1))
        boxes.append(np.insert(cells.boxes[moved], 0, len(groups), axis=1))
        sizes.append(elements[moved])
        marks.append(np.concatenate([cells.holders[moved], lacking[moved]], axis=1))
        groups.append(numbers)
    distinct, inverse = np.unique(np.packbits(np.concatenate(marks), axis=1), axis=0, return_inverse=True)
    lot = inverse.ravel()
    flags = np.unpackbits(distinct, axis=1)[:, : 2 * num_gpus] > 0
    assert flags[:, :num_gpus].any(axis=1).all(), "a slice that nobody holds"
    elements = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(elements, lot, np.concatenate(sizes))
    return Lots(
        before.what,
        element_size,
        before.tensors,
        flags[:, :num_gpus],
        flags[:, num_gpus:],
        elements * element_size,
        tuple(groups),
        np.concatenate(boxes)[np.argsort(lot, kind="stable")],
        np.cumsum(np.bincount(lot, minlength=len(distinct))),
        *rank_elements * element_size,
    )


def _alike(before: Ownership, after: Ownership) -> Iterator[tuple[IntArray, tuple[IntArray, IntArray]]]:
    """Group the tensors that are divided alike under both plans; yield their numbers and both sets of boxes."""
    groups: dict[tuple[Shape, object, object], list[int]] = defaultdict(list)
    for number, (tensor, *keys) in enumerate(zip(before.tensors, before.keys, after.keys, strict=True)):
        groups[tensor.shape, keys[0], keys[1]].append(number)
    for numbers in groups.values():
        first = before.tensors[numbers[0]]
        yield np.array(numbers, dtype=np.int64), (before.boxes(first), after.boxes(first))
