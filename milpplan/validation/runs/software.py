"""Software of a measured run: its framework's defaults and kernels, and the constants fitted to it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from milpplan.problem.apply_overlay import applied
from milpplan.problem.catalog import load_overlay, stack_names
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import Overlay
from milpplan.validation.runs.frameworks import Framework
from milpplan.validation.runs.recognition import stacks_of
from milpplan.validation.runs.records import Run
from milpplan.validation.runs.variants import stack_hardware

MAX_GROUP: Final = 1_048_576
MAX_DISPATCH: Final = 50.0
"""Maximum ``dispatch_efficiency`` of a description."""


def with_software(
    run: Run, framework: Framework, hardware: HardwareSpec, stacks: bool, notes: list[str]
) -> HardwareSpec:
    """Set the framework's defaults, its kernels, and the constants fitted to it in a description.

    Assumptions are added to ``notes``. ``stacks``: use the fitted constants.
    """
    noted = (run.parallel.noted("attention_kernel"), run.parallel.noted("mode"), run.parallel.precision)
    kernel = ", ".join(str(word or "") for word in noted)
    if run.parallel.noted("fused_rms_norm") is False:
        kernel += ", norm in single operators"
    fields: dict[str, float] = {
        name: value for word, values in framework.kernels if word in kernel for name, value in values
    }
    group = run.parallel.noted("zero1_group")
    if isinstance(group, int) and 0 < group <= MAX_GROUP:
        fields |= {"sharding_group": group}
        notes.append(f"ZeRO within groups of {group} replicas")
    if _hides_dispatch(run):
        share = hardware.scale_up.processor_fraction
        fields |= {"dispatch_efficiency": min(1 / share, MAX_DISPATCH) if share else MAX_DISPATCH}
        notes.append(f"dispatch of experts behind another micro-batch, of whose compute it takes {share:.0%}")
    hardware = hardware.model_copy(update={"software": framework.software.model_copy(update=fields)})
    measured = run.hardware.measured_busbw_GBps or {}
    if framework.slow_calls_below_bytes_per_s and "allgather_intra" not in measured:
        notes.append(
            "state of the nodes not known (no bandwidth measured before the run): taken as the faster one"
        )
    names = [
        name for stack in stacks_of(run) if (name := f"{stack_hardware(hardware.name)}+{stack}") in _stack_names()
    ]
    if not stacks or not names:
        notes.append(f"no constants fitted to {framework.name} on {hardware.name}")
        return hardware
    return _with_stack(hardware, names[0], notes)


def _with_stack(hardware: HardwareSpec, name: str, notes: list[str]) -> HardwareSpec:
    """Apply a stack's constants to the description, after those of the stack that it is based on."""
    overlay = _overlay(name)
    if overlay is None:
        return hardware
    notes.append(f"constants {name}, fitted to {overlay.provenance.data}")
    return applied(_with_stack(hardware, overlay.base, notes), overlay)


@lru_cache(maxsize=1)
def _stack_names() -> frozenset[str]:
    return frozenset(stack_names())


@lru_cache(maxsize=64)
def _overlay(name: str) -> Overlay | None:
    """Read an overlay once for all runs of a file."""
    return load_overlay(name)


def _hides_dispatch(run: Run) -> bool:
    """Test whether the run overlaps the experts' communication with another micro-batch's compute (Megatron-LM's
    overlap_moe_expert_parallel_comm)."""
    words = [run.parallel.noted(key) for key in ("features", "ep_comm")]
    text = "; ".join(word for word in words if isinstance(word, str)).lower()
    return "ep overlap" in text.replace("no ep overlap", "") or "hybridep, overlap" in text
