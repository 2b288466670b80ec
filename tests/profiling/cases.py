"""A machine made of the cost model itself, whose constants are known, with noise and with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from milpplan import load_hardware
from milpplan.calibration import PASSES
from milpplan.problem import COLLECTIVES, HardwareSpec, SizeCurve, with_constants
from milpplan.profiling.measurement_order import GPU, Task, sweep
from milpplan.profiling.overlay import attention_flops, layers_cost
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
)
from milpplan.simulation.layers import attention_backward_s, attention_forward_s, memory_bound_s
from milpplan.simulation.layers.kernels import gemm_s
from milpplan.simulation.network import bus_bandwidth_bytes_per_s

BASE = "dgx-h100"
GEMM, MEMORY, SCALE_UP = 0.83, 1.12, 0.9
LAUNCH_S, LATENCY_S, COPY_BYTES_PER_S = 4e-4, 6e-6, 5e10
FORWARD_TILT, BACKWARD_TILT = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95), (1.2, 1.15, 1.1, 1.1, 1.05, 1.0)


def truth(base: HardwareSpec) -> HardwareSpec:
    """The description with other constants, and with curves of another shape."""
    factors = {"gemm_efficiency": GEMM, "memory_efficiency": MEMORY, "scale_up_efficiency": SCALE_UP}
    times = {"layer_launch_s": LAUNCH_S, "kernel_latency_s": LATENCY_S}
    moved = with_constants(base, factors, times)
    curves = {
        "attention_forward": _tilted(base.accelerator.attention_forward, FORWARD_TILT),
        "attention_backward": _tilted(base.accelerator.attention_backward, BACKWARD_TILT),
    }
    return moved.model_copy(update={"accelerator": moved.accelerator.model_copy(update=curves)})


def _tilted(curve: SizeCurve, tilt: tuple[float, ...]) -> SizeCurve:
    value = tuple(a * b for a, b in zip(curve.value, tilt, strict=True))
    return curve.model_copy(update={"value": value})


class SyntheticMachine:
    """Answers with the model's times on a description, times noise; peaks of memory are 2 % above the model's."""

    def __init__(self, hardware: HardwareSpec, noise: float = 0.02, num_ranks: int = 8, seed: int = 1) -> None:
        self.hardware, self.noise, self.num_ranks = hardware, noise, num_ranks
        self._random = np.random.default_rng(seed)
        self.before: Callable[[object], None] = lambda shape: None

    def environment(self) -> Environment:
        """An H100 that does not exist."""
        return Environment(
            date="2026-01-31",
            device="cuda",
            device_name="synthetic H100",
            num_devices=self.num_ranks,
            memory_bytes=self.hardware.accelerator.memory_bytes,
            num_processors=132,
            driver="1.2.3",
            libraries={"torch": "9.9", "cuda": "99.1"},
            notes=("made of the cost model",),
        )

    def product(self, shape: Product) -> Timing:
        """As the model."""
        self.before(shape)
        return self._time(gemm_s(self.hardware.accelerator, shape.precision, shape.m, shape.n, shape.k))

    def attention(self, shape: Attention) -> tuple[Timing, Timing]:
        """As the model."""
        self.before(shape)
        flops = attention_flops(shape, self.hardware)
        length = shape.sequence_length
        forward = attention_forward_s(self.hardware.accelerator, flops[0], length)
        return self._time(forward), self._time(attention_backward_s(self.hardware.accelerator, flops[1], length))

    def traffic(self, shape: Traffic) -> Timing:
        """As the model."""
        self.before(shape)
        return self._time(memory_bound_s(self.hardware.accelerator, shape.num_bytes))

    def copy(self, shape: Copy) -> Timing:
        """At one rate."""
        self.before(shape)
        return self._time(shape.num_bytes / COPY_BYTES_PER_S)

    def collectives(self, shape: Exchange) -> Iterator[CollectiveTime]:
        """As the tables."""
        for operation in COLLECTIVES:
            for size in shape.message_bytes:
                self.before(shape)
                rate = float(bus_bandwidth_bytes_per_s(self.hardware, operation, size, shape.num_ranks))
                passed = PASSES[operation] * (shape.num_ranks - 1) / shape.num_ranks * size
                row = {"operation": operation, "num_ranks": shape.num_ranks, "message_bytes": size}
                yield CollectiveTime.model_validate({**row, "time": self._time(passed / rate)})

    def layers(self, shape: Layers) -> LayersTime:
        """As the model."""
        self.before(shape)
        cost = layers_cost(shape, self.hardware)
        return LayersTime(
            shape=shape,
            forward=self._time(cost.forward_s),
            backward=self._time(cost.backward_s),
            kept_bytes=round(cost.kept_bytes),
            peak_bytes=round(1.02 * cost.peak_bytes),
        )

    def _time(self, seconds: object) -> Timing:
        noisy = float(seconds) * float(np.exp(self.noise * self._random.standard_normal()))  # type: ignore[arg-type]
        return Timing(median_s=noisy, spread=self.noise, num_samples=20)


def synthetic(noise: float = 0.02, num_ranks: int = 8) -> SyntheticMachine:
    """On the truth."""
    return SyntheticMachine(truth(load_hardware(BASE)), noise, num_ranks)


def out_of_memory(kind: type) -> Callable[[object], None]:
    """A fault of every measurement of a kind."""

    def fault(shape: object) -> None:
        if isinstance(shape, kind):
            raise MeasurementError("out of memory: it wanted 2 GiB")

    return fault


def few_tasks(num_ranks: int = 2, num_layers: int = 6) -> list[Task]:
    """The coarse sweep with few cases of layers, whose predictions take the time."""
    tasks = sweep(load_hardware(BASE), GPU, num_ranks, quick=True)
    layers = [one for one in tasks if isinstance(one, Layers)]
    return [one for one in tasks if one not in layers[num_layers:]]
