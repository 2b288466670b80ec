"""Causal flash attention by the fastest of PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
