"""Operators of a layer: causal flash attention, and pointwise operators in a single pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from milpplan.profiling.machine import MeasurementError
from milpplan.profiling.records import Timing

NAMES: Final = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
Timer = Callable[[Callable[[], object]], Timing]


class Flash:
    """Attention on [batch, heads, tokens, size]; ``name``: the fastest kernel, "" for PyTorch's own choice."""

    def __init__(self, device: Any, time: Timer) -> None:
        self.name = ""
        if device.type == "cuda":
            self.name = self._fastest(device, time)

    def __call__(self, query: Any, key: Any, value: Any) -> Any:
        """Return the output; several heads of queries may share a head of keys."""
        with self._kernel(self.name):
            if query.shape[1] == key.shape[1]:
                return scaled_dot_product_attention(query, key, value, is_causal=True)
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def _fastest(self, device: Any, time: Timer) -> str:
        """Find the kernel with the fastest forward and backward of 4,096 tokens.

        It is timed in the layout that layers use and with shared heads, which every kernel must support.
        """
        times: dict[str, float] = {}
        for name in NAMES:
            self.name = name
            try:
                parts = [
                    torch.randn(1, 4096, heads, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
                    for heads in (16, 4, 4)
                ]
                times[name] = time(lambda parts=parts: self._both(parts)).median_s  # type: ignore[misc]
            except (RuntimeError, MeasurementError, AttributeError):
                continue
        return min(times, key=lambda name: times[name]) if times else ""

    def _both(self, parts: list[Any]) -> None:
        out = self(*(part.transpose(1, 2) for part in parts))
        torch.autograd.grad(out, parts, torch.ones_like(out))

    @staticmethod
    @contextmanager
    def _kernel(name: str) -> Iterator[None]:
        """Allow only a given kernel."""
        if not name:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, name)):
            yield


def _gate(both: Any) -> Any:
    """Compute silu(gate) * up, of gate and up side by side."""
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _gate_back(grad: Any, both: Any) -> Any:
    """Compute the gradient of ``_gate``'s input."""
    gate, up = both.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], dim=-1)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    """Apply rotary positions: x [tokens, heads, size], cos and sin [tokens, 1, size / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _split(packed: Any, cos: Any, sin: Any, heads: int, key_heads: int) -> tuple[Any, Any, Any]:
    """Split a packed product [tokens, heads, size] into queries and keys with their positions, and values."""
    query, key, value = packed.split([heads, key_heads, key_heads], dim=1)
    return _turned(query, cos, sin), _turned(key, cos, sin), value.clone(memory_format=torch.contiguous_format)


def _split_back(query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
    """Compute the gradient of ``_split``'s input."""
    return torch.cat([_turned(query, cos, -sin), _turned(key, cos, -sin), value], dim=1)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Operators that a layer uses, and whether they are fused (if not, why)."""

    gate: Callable[..., Any]
    gate_back: Callable[..., Any]
    split: Callable[..., Any]
    split_back: Callable[..., Any]
    note: str


PLAIN = "pointwise operators run one by one, so layers move more memory than the model counts"


def pointwise(device: Any) -> Pointwise:
    """Compile the operators for a GPU where that works, else return them uncompiled."""
    plain = Pointwise(_gate, _gate_back, _split, _split_back, PLAIN)
    if device.type != "cuda":
        return plain
    try:
        parts = [torch.compile(operator, dynamic=True) for operator in (_gate, _gate_back, _split, _split_back)]
        fused = Pointwise(parts[0], parts[1], parts[2], parts[3], "pointwise operators fused by torch.compile")
        # As inside autograd's functions: compiled code depends on it.
        with torch.no_grad():
            _tried(fused, device)
    except Exception as error:
        # Compilers fail in several ways: no C compiler, no Triton, an unsupported version.
        return Pointwise(_gate, _gate_back, _split, _split_back, f"{PLAIN} (torch.compile: {_first_line(error)})")
    return fused


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _tried(fused: Pointwise, device: Any) -> None:
    """Run two sizes, so that later compilation is for any size."""
    for tokens in (96, 160):
        both = torch.randn(tokens, 512, dtype=torch.bfloat16, device=device)
        fused.gate_back(fused.gate(both), both)
        packed = torch.randn(tokens, 6, 64, dtype=torch.bfloat16, device=device)
        angle = torch.randn(tokens, 1, 32, dtype=torch.bfloat16, device=device)
        parts = fused.split(packed, angle, angle, 2, 2)
        fused.split_back(*parts, angle, angle)
    torch.cuda.synchronize()
