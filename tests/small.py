"""A small model and cluster for tests of what surrounds the search: they solve in milliseconds."""

from __future__ import annotations

from typing import Any

from milpplan import Job, Problem, Space, load_hardware
from milpplan.problem import DenseMlp, GroupedQueryAttention, HardwareSpec, LayerRun, ModelSpec

GIB = 2**30


def small_model(num_layers: int = 6) -> ModelSpec:
    """A dense model of about 0.2 billion parameters a layer."""
    attention = GroupedQueryAttention(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    run = LayerRun(count=num_layers, attention=attention, mlp=DenseMlp(intermediate_size=14336))
    return ModelSpec(name="small", hidden_size=4096, vocab_size=32000, max_position_embeddings=8192, layers=(run,))


def small_hardware(memory_gib: float = 80) -> HardwareSpec:
    """DGX H100 with nodes of two GPUs and another memory."""
    hardware = load_hardware("dgx-h100")
    accelerator = hardware.accelerator.model_copy(update={"memory_bytes": int(memory_gib * GIB)})
    return hardware.model_copy(update={"accelerator": accelerator, "gpus_per_node": 2})


def small_problem(
    num_gpus: int = 4,
    global_batch_size: int = 8,
    memory_gib: float = 80,
    space: dict[str, Any] | None = None,
    **job: Any,
) -> Problem:
    """Six layers on four GPUs, in the uniform space unless ``space`` says otherwise."""
    return Problem(
        model=small_model(),
        hardware=small_hardware(memory_gib),
        job=Job(
            num_gpus=num_gpus,
            global_batch_size=global_batch_size,
            **{"sequence_length": 2048} | job,
        ),
        space=Space(**{"kind": "uniform"} | (space or {})),
    )
