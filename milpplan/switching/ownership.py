"""Ownership of the slices of all tensors by ranks under a plan.

A slice is a box ``[first row, last row + 1) x [first column, last column + 1)`` of a tensor. Tensor parallelism
cuts rows or columns, pipeline parallelism distributes the layers, expert parallelism the experts. Replicas hold
the same boxes, or with ZeRO equal shares of the rows of each box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from milpplan.communication.rank_lists import rank_lists
from milpplan.errors import IllegalPlanError
from milpplan.problem.model import MixtureOfExperts, ModelSpec
from milpplan.problem.plan import Layout, Plan
from milpplan.simulation.layers.parameters import padded_vocab_size
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.states import ADAM_STATE_BYTES
from milpplan.switching.tensors import EMBEDDING, HEAD, Shape, Tensor, model_tensors

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
    return {"parameters": 2, "gradients": grad_bytes, "optimizer": ADAM_STATE_BYTES}[what]


@dataclass(frozen=True, slots=True)
class ShardRules:
    """Rules of a framework for the divisions that the degrees leave open."""

    shards: Literal["tensor", "hetu"] = "tensor"
    """``tensor``: each replica holds an equal number of the rows of each of its boxes (PyTorch's fully_shard).
    ``hetu``: the rows of the whole tensor are divided first by replicas and then by tensor-parallel ranks, as
    Hetu's switch planner reads Hetu's annotation of a scattered gradient."""
    padded_vocabulary: bool = True
    """True: the vocabulary is cut with Megatron-LM's padding; False: in equal parts."""
    sharding_group: int = 0
    """As ``Software.sharding_group``."""


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
            group = self.rules.sharding_group
            shards = 1 if not sharded else replicas if group == 0 else int(np.gcd(replicas, group))
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
