"""Layers forward and backward: their times, and the memory between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from milpplan.profiling.pytorch.attention import Flash
from milpplan.profiling.pytorch.block import Block, blocks
from milpplan.profiling.pytorch.clock import Marks
from milpplan.profiling.pytorch.pointwise import Pointwise
from milpplan.profiling.records import Layers, LayersTime
from milpplan.profiling.timing import num_samples, timing_of

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
