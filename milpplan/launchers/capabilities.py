"""What each target can run, field of the layout by field: the table behind an export's refusals.

A field that is not named takes any value. What depends on more than one field (stages, recomputation, the order of
ranks) is decided by the target's own modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milpplan.specs.plan import Layout


@dataclass(frozen=True, slots=True)
class Limit:
    """The values of a field that a target has, and what it has in place of the others."""

    values: tuple[object, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Capability:
    """A target's name, versions (the first is the default) and limits."""

    name: str
    versions: tuple[str, ...]
    limits: Mapping[str, Limit]

    def refused(self, layout: Layout) -> dict[str, Limit]:
        """Fields of a layout whose values the target does not have."""
        return {name: limit for name, limit in self.limits.items() if getattr(layout, name) not in limit.values}


_NO_HOST = "Megatron-LM keeps on the host what this plan streams beside the layers only in other ways"
MEGATRON = Capability(
    name="Megatron-LM",
    versions=("d98e8a64", "core_v0.16.0", "core_v0.15.0", "core_v0.14.0"),
    limits={
        "schedule": Limit(
            ("1f1b", "interleaved"),
            "its schedules are 1F1B and interleaved 1F1B (core/pipeline_parallel/schedules.py)",
        ),
        "tp_overlap": Limit(
            ("none", "ring"),
            "Transformer Engine gathers in a ring only, --tp-comm-overlap has no pipelined gather",
        ),
        "pp_scatter_gather": Limit(
            (False,),
            "core/pipeline_parallel sends whole activations; without sequence parallelism none is scattered",
        ),
        "gather_again": Limit(
            (True,), "core/tensor_parallel/layers.py keeps the sharded input and gathers it again in the backward"
        ),
        "offload_weights": Limit((False,), _NO_HOST),
        "offload_activations": Limit((False,), _NO_HOST),
        "offload_optimizer": Limit((False,), f"{_NO_HOST} (--optimizer-cpu-offload updates on the processor)"),
        "rank_order": Limit(
            ("tp-cp-dp-pp", "tp-cp-pp-dp"),
            "its orders are tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping",
        ),
    },
)
_NO_STREAMS = "it keeps on the host what this plan streams beside the layers only in other ways"
_NO_TILES = "it has no tiles of products beside their messages that are known to take the time that is priced"
TORCHTITAN = Capability(
    name="torchtitan",
    versions=("b5bcd76c", "0.3.0", "0.2.2"),
    limits={
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "its zero-bubble schedules fail on the mask of FlexAttention and are off in its own tests "
            "(tests/integration_tests/features.py:129)",
        ),
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
        "offload_weights": Limit((False,), _NO_STREAMS),
        "offload_activations": Limit((False,), _NO_STREAMS),
        "offload_optimizer": Limit((False,), f"{_NO_STREAMS} (enable_cpu_offload updates on the processor)"),
    },
)
NANOTRON = Capability(
    name="nanotron",
    versions=("2411b022",),
    limits={
        "cp": Limit((1,), "its ring attention gathers keys and values, and what is priced is a ring"),
        "ep": Limit(
            (1,), "expert_parallel_size above 1 passes only one of its two checks (parallel/context.py:24, :62)"
        ),
        "vpp": Limit((1,), "its pipeline has one stage a rank (models/base.py, build_model)"),
        "schedule": Limit(("1f1b", "gpipe"), "pp_engine is 1f1b or afab"),
        "zero_stage": Limit((0, 1), "zero_stage above 0 is ZeRO 1 (helpers.py:409)"),
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "its pipeline sends whole activations"),
        "offload_weights": Limit((False,), "it keeps nothing on the host"),
        "offload_activations": Limit((False,), "it keeps nothing on the host"),
        "offload_optimizer": Limit((False,), "it keeps nothing on the host"),
        "overlap_param_gather": Limit(
            (False,), "weights are gathered when the update is over (optim/zero.py:119)"
        ),
    },
)
_ONLY_DATA = "its configuration is data parallel; "
DEEPSPEED = Capability(
    name="DeepSpeed",
    versions=("0.19.8",),
    limits={
        "tp": Limit((1,), f"{_ONLY_DATA}AutoTP keeps the embedding whole on every rank, which a plan cuts"),
        "cp": Limit((1,), f"{_ONLY_DATA}Ulysses exchanges heads, and what is priced is a ring"),
        "ep": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "etp": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "pp": Limit((1,), f"{_ONLY_DATA}stages are a PipelineModule of the model's own code (runtime/pipe)"),
        "vpp": Limit((1,), "there is no pipeline in its configuration"),
        "schedule": Limit(("1f1b",), "there is no pipeline in its configuration"),
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "there is no pipeline in its configuration"),
        "offload_weights": Limit((False,), f"{_NO_STREAMS} (offload_param)"),
        "offload_activations": Limit((False,), f"{_NO_STREAMS} (cpu_checkpointing)"),
        "offload_optimizer": Limit((False,), f"{_NO_STREAMS} (offload_optimizer updates on the processor)"),
    },
)
CAPABILITIES: dict[str, Capability] = {
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "deepspeed": DEEPSPEED,
}
"""Targets by the name that ``--to`` and ``--from`` take."""
