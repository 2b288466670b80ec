"""Layers forward and backward, of the operators that the cost model assumes: their times, and the memory between.

A layer is Megatron-LM's with fused kernels: layer norm, packed projection of queries, keys and values, rotary
positions, flash attention, output projection, residual; layer norm, gated feed-forward, residual. The product for
a weight's gradient adds to a sum in bf16.

The tensors kept from forward to backward are those that ``milpplan.simulation.layers.activations`` counts:
``replay`` keeps the inputs of norms and of the gate instead of their outputs (selective recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from milpplan.profiling.machine import num_samples, timing_of
from milpplan.profiling.pytorch.clock import Marks
from milpplan.profiling.pytorch.operators import Flash, Pointwise
from milpplan.profiling.records import Layers, LayersTime

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


WARM_UPS: Final = 2


def layers_time(shape: Layers, device: Any, point: Pointwise, flash: Flash) -> LayersTime:
    """Measure layers."""
    stack = blocks(shape, device, point, flash)
    on_device = device.type == "cuda"
    x = torch.randn(shape.micro_batch_size * shape.sequence_length, shape.hidden_size, device=device)
    grad = torch.randn_like(x).bfloat16()
    x = x.bfloat16()
    one_s = min(sum(_pass_s(stack, x, grad, on_device)) for _ in range(WARM_UPS))
    passes = [_pass_s(stack, x, grad, on_device) for _ in range(num_samples(one_s))]
    del x, grad
    kept, peak = (_memory_of_device if on_device else _memory_of_tensors)(stack, device)
    forward, backward = (timing_of([seconds[part] for seconds in passes]) for part in (0, 1))
    return LayersTime(shape=shape, forward=forward, backward=backward, kept_bytes=kept, peak_bytes=peak)


def _pass_s(stack: list[Block], x: Any, grad: Any, on_device: bool) -> tuple[float, float]:
    """Time a forward and a backward pass in seconds."""
    for block in stack:
        for weight in block.weights:
            weight.sum.zero_()
    start = x.detach().requires_grad_()
    if on_device:
        torch.cuda.synchronize()
    marks = Marks(on_device)
    marks.mark()
    out = _forward(stack, start)
    marks.mark()
    torch.autograd.backward(out, grad)
    marks.mark()
    forward_s, backward_s = marks.between_s()
    return forward_s, backward_s


def _forward(stack: list[Block], x: Any) -> Any:
    for block in stack:
        if block.shape.recompute == "full":
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = block(x)
    return x


def _input(stack: list[Block], device: Any) -> Any:
    shape = stack[0].shape
    tokens = shape.micro_batch_size * shape.sequence_length
    return torch.randn(tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)


def _memory_of_device(stack: list[Block], device: Any) -> tuple[int, int]:
    """Return allocated bytes beyond the weights and the last output: after the forward, and at the peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = _forward(stack, _input(stack, device).requires_grad_())
    own = out.numel() * out.element_size()
    kept = torch.cuda.memory_allocated(device) - before - own
    torch.autograd.backward(out, torch.ones_like(out))
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated(device) - before - own


def _memory_of_tensors(stack: list[Block], device: Any) -> tuple[int, None]:
    """Count bytes that autograd keeps, by a hook; of replayed layers, their inputs. A CPU has no peak."""
    kept: dict[int, int] = {}
    replayed = stack[0].shape.recompute == "full"
    x = _input(stack, device).requires_grad_()
    with nullcontext() if replayed else _noting(kept):
        for block in stack:
            if replayed:
                _note(kept, x)
            x = _forward([block], x)
    return sum(kept.values()), None


@contextmanager
def _noting(kept: dict[int, int]) -> Iterator[None]:
    """Record storages that autograd keeps, by address."""

    def pack(tensor: Any) -> Any:
        _note(kept, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _note(kept: dict[int, int], tensor: Any) -> None:
    storage = tensor.untyped_storage()
    kept[storage.data_ptr()] = storage.nbytes()
