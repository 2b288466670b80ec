"""Implementation of ``milpplan.profiling.records.Machine`` for a CUDA device or the CPU.

**Layers** run forward and backward, of the operators that the cost model assumes; their times and the memory
between are measured. A layer is Megatron-LM's with fused kernels: layer norm, packed projection of queries, keys
and values, rotary positions, flash attention, output projection, residual; layer norm, gated feed-forward,
residual. The product for a weight's gradient adds to a sum in bf16.

The tensors kept from forward to backward are those that ``milpplan.simulation.layers.activations`` counts:
``replay`` keeps the inputs of norms and of the gate instead of their outputs (selective recomputation).
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from milpplan.profiling.pytorch.clock import DeviceClock, HostClock, Marks
from milpplan.profiling.pytorch.collectives import collective_times
from milpplan.profiling.records import (
    Attention,
    CollectiveTime,
    Copy,
    Environment,
    Exchange,
    Layers,
    LayersTime,
    MeasurementError,
    Product,
    Timing,
    Traffic,
    num_samples,
    timed,
    timing_of,
)
from milpplan.version import __version__

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


BF16_BYTES: Final = 2
NORM_WIDTH: Final = 4096
"""Width of the rows that a norm works on."""
CPU_RANKS: Final = 2


class TorchMachine:
    """PyTorch device that measures with random numbers, because zeros run faster than real data."""

    def __init__(self, device: str) -> None:
        """Open a device, cuda or cpu."""
        self._device = torch.device(device)
        self._on_device = device == "cuda"
        torch.manual_seed(1)
        self._clock = DeviceClock(self._device) if self._on_device else HostClock()
        self._point = pointwise(self._device)
        self._flash = Flash(self._device, self._timed)
        kernel = self._flash.name.lower().replace("_", " ") or "attention as PyTorch chooses it"
        self._notes = (f"kernel of attention: {kernel}", self._point.note)

    @property
    def num_ranks(self) -> int:
        """Number of devices that can take part in a collective."""
        return int(torch.cuda.device_count()) if self._on_device else CPU_RANKS

    def environment(self) -> Environment:
        """Describe date, device and versions."""
        return environment_of(self._device, self._notes)

    def product(self, shape: Product) -> Timing:
        """Time x W^T, as in a linear layer."""
        with self._room():
            left, right = self._random(shape.m, shape.k), self._random(shape.n, shape.k)
            if shape.precision == "fp8":
                return self._timed(self._fp8_product(left, right))
            return self._timed(lambda: left @ right.t())

    def _fp8_product(self, left: Any, right: Any) -> Callable[[], object]:
        """Make an fp8 product with a scale per matrix."""
        unit_scale = torch.ones((), device=self._device)
        narrow = [matrix.to(torch.float8_e4m3fn) for matrix in (left, right)]
        return lambda: torch._scaled_mm(
            narrow[0],
            narrow[1].t(),
            scale_a=unit_scale,
            scale_b=unit_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """Time the forward, and the backward with the tensors that the forward kept."""
        with self._room():
            sizes = (shape.micro_batch_size, shape.sequence_length, shape.num_heads, shape.head_dim)
            parts = [self._random(*sizes).requires_grad_() for _ in range(3)]
            views = [part.transpose(1, 2) for part in parts]
            with torch.no_grad():
                forward = self._timed(lambda: self._flash(*views))
            out = self._flash(*views)
            grad = torch.randn_like(out)
            backward = self._timed(lambda: torch.autograd.grad(out, parts, grad, retain_graph=True))
            return forward, backward

    def traffic(self, shape: Traffic) -> Timing:
        """Time a residual (two reads, one write) or a norm (one read, one write)."""
        with self._room():
            if shape.operator == "add":
                x, y, out = (self._random(max(shape.num_bytes // (3 * BF16_BYTES), 1)) for _ in range(3))
                return self._timed(lambda: torch.add(x, y, out=out))
            rows = max(shape.num_bytes // (2 * BF16_BYTES * NORM_WIDTH), 1)
            x, gain = self._random(rows, NORM_WIDTH), self._random(NORM_WIDTH)
            return self._timed(lambda: torch.nn.functional.layer_norm(x, (NORM_WIDTH,), gain, gain))

    def copy(self, shape: Copy) -> Timing:
        """Time a copy to or from pinned memory."""
        if not self._on_device:
            raise MeasurementError("a CPU has no other memory to copy to")
        with self._room():
            host = torch.empty(shape.num_bytes, dtype=torch.int8, pin_memory=True)
            there = torch.empty(shape.num_bytes, dtype=torch.int8, device=self._device)
            target, source = (there, host) if shape.direction == "host_to_device" else (host, there)
            return self._timed(lambda: target.copy_(source, non_blocking=True))

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """Time collectives among processes, after releasing this process's memory."""
        self._given_back()
        yield from collective_times(shape, self._device.type)

    def layers(self, shape: Layers) -> LayersTime:
        """Time layers forward and backward."""
        try:
            with self._room():
                return layers_time(shape, self._device, self._point, self._flash)
        finally:
            self._given_back()

    def _random(self, *sizes: int) -> Any:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=self._device)

    def _timed(self, run: Callable[[], object]) -> Timing:
        return timed(self._clock, run)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Turn PyTorch's errors into a ``MeasurementError`` and release the memory."""
        failed = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            failed = f"out of memory: {error}"
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            failed = f"{type(error).__name__}: {error}"
        if failed:
            # After the handler, because the traceback has held tensors until here.
            self._given_back()
            raise MeasurementError(failed)

    def _given_back(self) -> None:
        """Collect cycles that hold memory, and return the allocator's cache to the device."""
        gc.collect()
        if self._on_device:
            # A device that has failed for good also fails here; every measurement reports it.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


WAIT_S: Final = 10.0


def environment_of(device: Any, notes: tuple[str, ...]) -> Environment:
    """Describe date, device, driver and libraries."""
    libraries = {"torch": str(torch.__version__), "python": platform.python_version(), "milpplan": __version__}
    date = datetime.date.today().isoformat()
    if device.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Environment(
            date=date,
            device="cpu",
            device_name=platform.processor() or platform.machine(),
            num_devices=1,
            memory_bytes=memory,
            num_processors=os.cpu_count() or 0,
            driver="none",
            libraries=libraries,
            notes=notes,
        )
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        date=date,
        device="cuda",
        device_name=properties.name,
        num_devices=torch.cuda.device_count(),
        memory_bytes=int(properties.total_memory),
        num_processors=int(properties.multi_processor_count),
        driver=_driver(),
        libraries=libraries | _of_cuda(),
        notes=notes,
    )


def _of_cuda() -> dict[str, str]:
    """Return the versions of CUDA (or HIP), cuDNN and NCCL."""
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    with suppress(AttributeError, RuntimeError, TypeError):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: str(version) for name, version in versions.items() if version}


def _driver() -> str:
    """Return the driver's version from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if lines else "unknown"
