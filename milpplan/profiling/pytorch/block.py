"""Transformer layer of the operators that the cost model assumes (Megatron-LM's with fused kernels).

Layer norm, packed projection of queries, keys and values, rotary positions, flash attention, output projection,
residual; layer norm, gated feed-forward, residual. The product for a weight's gradient adds to a sum in bf16.

The tensors kept from forward to backward are those that ``milpplan.simulation.layers.activations`` counts:
``replay`` keeps the inputs of norms and of the gate instead of their outputs (selective recomputation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from milpplan.profiling.pytorch.attention import Flash
from milpplan.profiling.pytorch.pointwise import Pointwise
from milpplan.profiling.records import Layers

EPSILON = 1e-5
SCALE = 0.02


class Weight:
    """Weight and the sum of its gradients; autograd sees neither."""

    __slots__ = ("sum", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.sum = torch.zeros_like(value)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """Linear layer x W^T, which keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Weight) -> Any:
        """Map [tokens, k] to [tokens, n]."""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.value.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradient of x; the weight's gradient is added to its sum."""
        (x,) = ctx.saved_tensors
        ctx.weight.sum.addmm_(grad.t(), x)
        return grad @ ctx.weight.value, None


class _NormLinear(torch.autograd.Function):  # type: ignore[misc]
    """Norm and linear layer, norm(x) W^T, which keep x, and norm(x) unless it is replayed."""

    @staticmethod
    def forward(ctx: Any, x: Any, norm: tuple[Weight, Weight], weight: Weight, replay: bool) -> Any:
        """Map [tokens, k] to [tokens, n]."""
        y, mean, deviation = _normed(x, norm)
        ctx.save_for_backward(x, mean, deviation, *(() if replay else (y,)))
        ctx.norm, ctx.weight = norm, weight
        return y @ weight.value.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradient of x; the weights' gradients are added to their sums."""
        x, mean, deviation, *rest = ctx.saved_tensors
        y = rest[0] if rest else _normed(x, ctx.norm)[0]
        gain, shift = ctx.norm
        ctx.weight.sum.addmm_(grad.t(), y)
        del y, rest
        inner = grad @ ctx.weight.value
        wanted = [True, True, True]
        back = torch.ops.aten.native_layer_norm_backward(
            inner, x, [x.shape[-1]], mean, deviation, gain.value, shift.value, wanted
        )
        gain.sum.add_(back[1])
        shift.sum.add_(back[2])
        return back[0], None, None, None


def _normed(x: Any, norm: tuple[Weight, Weight]) -> Any:
    """Compute the norm, the mean and the inverse deviation."""
    return torch.ops.aten.native_layer_norm(x, [x.shape[-1]], norm[0].value, norm[1].value, EPSILON)


class _GateLinear(torch.autograd.Function):  # type: ignore[misc]
    """Gate and linear layer, gate(x) W^T, which keep x, and gate(x) unless it is replayed."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Weight, point: Pointwise, replay: bool) -> Any:
        """Map [tokens, 2 f] to [tokens, h]."""
        y = point.gate(x)
        ctx.save_for_backward(x, *(() if replay else (y,)))
        ctx.weight, ctx.point = weight, point
        return y @ weight.value.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradient of x; the weight's gradient is added to its sum."""
        x, *rest = ctx.saved_tensors
        y = rest[0] if rest else ctx.point.gate(x)
        ctx.weight.sum.addmm_(grad.t(), y)
        del y, rest
        return ctx.point.gate_back(grad @ ctx.weight.value, x), None, None, None


class _Split(torch.autograd.Function):  # type: ignore[misc]
    """Split into queries and keys with their positions, and values; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, packed: Any, angles: tuple[Any, Any], heads: tuple[int, int], point: Pointwise) -> Any:
        """Map [tokens, heads, size] to three tensors."""
        ctx.angles, ctx.point = angles, point
        return point.split(packed, *angles, *heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient of the packed product."""
        return ctx.point.split_back(*grads, *ctx.angles), None, None, None


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of a layer, and its options."""

    norms: tuple[tuple[Weight, Weight], tuple[Weight, Weight]]
    packed: Weight
    out: Weight
    up: Weight
    down: Weight
    angles: tuple[Any, Any]
    shape: Layers
    point: Pointwise
    flash: Flash

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return all weights."""
        return (*self.norms[0], *self.norms[1], self.packed, self.out, self.up, self.down)

    def __call__(self, x: Any) -> Any:
        """Map [tokens, hidden] to [tokens, hidden]."""
        shape, replay = self.shape, self.shape.recompute == "selective"
        heads = (shape.num_attention_heads, shape.num_key_value_heads)
        packed = _NormLinear.apply(x, self.norms[0], self.packed, replay)
        packed = packed.view(len(x), -1, shape.head_dim)
        parts = _Split.apply(packed, self.angles, heads, self.point)
        del packed
        batch = (shape.micro_batch_size, shape.sequence_length)
        query, key, value = (part.view(*batch, -1, shape.head_dim).transpose(1, 2) for part in parts)
        del parts
        inner = self.flash(query, key, value).transpose(1, 2).reshape(len(x), -1)
        x = x + _Linear.apply(inner, self.out)
        both = _NormLinear.apply(x, self.norms[1], self.up, replay)
        return x + _GateLinear.apply(both, self.down, self.point, replay)


def blocks(shape: Layers, device: Any, point: Pointwise, flash: Flash) -> list[Block]:
    """Make equal layers with random weights."""
    hidden, size = shape.hidden_size, shape.head_dim
    inner = shape.num_attention_heads * size
    packed = inner + 2 * shape.num_key_value_heads * size
    tokens = shape.micro_batch_size * shape.sequence_length
    angle = torch.rand(tokens, 1, size // 2, device=device)
    angles = (torch.cos(angle).bfloat16(), torch.sin(angle).bfloat16())

    def weight(*sizes: int) -> Weight:
        return Weight(torch.randn(*sizes, dtype=torch.bfloat16, device=device) * SCALE)

    def norm() -> tuple[Weight, Weight]:
        ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        return Weight(ones), Weight(torch.zeros_like(ones))

    return [
        Block(
            norms=(norm(), norm()),
            packed=weight(packed, hidden),
            out=weight(hidden, inner),
            up=weight(2 * shape.intermediate_size, hidden),
            down=weight(hidden, shape.intermediate_size),
            angles=angles,
            shape=shape,
            point=point,
            flash=flash,
        )
        for _ in range(shape.num_layers)
    ]
