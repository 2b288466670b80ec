"""Accelerators without their own description: a shipped description with the differences of their data sheets.

Efficiencies, latencies and the network between nodes are those of the base description; bus bandwidths inside a
node are scaled with the link. Rates are dense, one direction, per accelerator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from milpplan.problem import COLLECTIVES, Accelerator, HardwareSpec, Precision
from milpplan.problem.overlay import scaled_bus_table
from milpplan.units import GIGA, TERA


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences of an accelerator from ``base``; None: no difference.

    ``same_kernels``: constants of software stacks on the base apply, because the architecture is the same.
    ``fp8_flops_per_s`` 0: no such engine. ``sustained``: rate of products in training over that of the base's
    table, where it was fitted.
    """

    base: str
    generation: str
    memory_bytes: float
    memory_bytes_per_s: float
    source: str
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    same_kernels: bool = True
    sustained: float | None = None

    def told(self, name: str) -> str:
        """Describe the assumption."""
        parts = [f"{self.memory_bytes / GIGA:.0f} GB at {self.memory_bytes_per_s / TERA:g} TB/s"]
        if self.bf16_flops_per_s is not None:
            parts.append(f"{self.bf16_flops_per_s / TERA:g} TFLOP/s in 16 bits")
        if self.link_bytes_per_s is not None:
            parts.append(f"{self.link_bytes_per_s / GIGA:g} GB/s inside a node")
        if self.network_bytes_per_s is not None:
            parts.append(f"{self.network_bytes_per_s / GIGA:g} GB/s between nodes")
        return f"{name} as {self.base} with {', '.join(parts)} ({self.source})"


VARIANTS: Final = {
    "h100-pcie": Variant("dgx-h100", "Hopper", 80 * 2**30, 2.0e12, "H100 data sheet", 756.5e12, 1513e12, 63e9),
    "h100-nvl": Variant("dgx-h100", "Hopper", 94e9, 3.9e12, "H100 NVL data sheet", 835.5e12, 1670.5e12, 63e9),
    "gh200": Variant("dgx-h100", "Hopper", 96e9, 4.0e12, "GH200 data sheet"),
    "a100-pcie": Variant("dgx-a100-80", "Ampere", 80 * 2**30, 1.935e12, "A100 data sheet", link_bytes_per_s=31e9),
    # Sustained: between bigscience-gpt2 (0.6) and bigscience-tr3m (0.8).
    "v100": Variant(
        "dgx-a100-40",
        "Volta",
        32 * 2**30,
        0.9e12,
        "V100 data sheet; products at 0.7 of A100's efficiency",
        125e12,
        link_bytes_per_s=150e9,
        network_bytes_per_s=12.5e9,
        same_kernels=False,
        sustained=0.7,
    ),
    "l4": Variant("l40s", "Ada", 24e9, 0.3e12, "L4 data sheet", 121e12, 242.5e12),
    "l40": Variant("l40s", "Ada", 48e9, 0.864e12, "L40 data sheet", 181e12, 362e12),
    "a10g": Variant(
        "l40s", "Ampere", 24e9, 0.6e12, "A10 data sheet, the same chip", 125e12, 0.0, same_kernels=False
    ),
    "a10": Variant("l40s", "Ampere", 24e9, 0.6e12, "A10 data sheet", 125e12, 0.0, same_kernels=False),
    "mi250x": Variant(
        "mi300x", "CDNA 2", 64e9, 1.6e12, "MI250X data sheet, one GCD", 191.5e12, 0.0, 175e9, 12.5e9, False
    ),
    "ampere": Variant("dgx-a100-80", "Ampere", 85899345920, 2.039e12, "the model is not stated"),
    "hopper": Variant("dgx-h100", "Hopper", 85520809984, 3.35e12, "the model is not stated"),
    "blackwell": Variant("dgx-b200", "Blackwell", 192265846784, 7.7e12, "the model is not stated"),
}
"""Accelerators by name; ``source`` names their sources."""
GENERATIONS: Final = {
    "dgx-a100-40": "Ampere",
    "dgx-a100-80": "Ampere",
    "rtx4090": "Ada",
    "l40s": "Ada",
    "dgx-h100": "Hopper",
    "dgx-h200": "Hopper",
    "dgx-b200": "Blackwell",
    "gb200-nvl72": "Blackwell",
    "mi300x": "CDNA 3",
    "mi325x": "CDNA 3",
    "mi355x": "CDNA 4",
    "dgx-b300": "Blackwell Ultra",
    "gb300-nvl72": "Blackwell Ultra",
    "h800": "Hopper H800",
    "h20": "Hopper H20",
    "a800": "Ampere A800",
}
"""Architectures by description, for summaries and evidence: a chip with constants of a sibling has its own."""
SIBLINGS: Final = {
    "a800": "dgx-a100-80",
    "dgx-b300": "dgx-b200",
    "gb300-nvl72": "gb200-nvl72",
    "h20": "dgx-h100",
    "h800": "dgx-h100",
    "mi325x": "mi300x",
    "mi355x": "mi300x",
}
"""Shipped descriptions with constants of another, whose software stacks apply; no constant is from scored runs."""
_WORDS: Final = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("gh200", "gh200"),
    ("h800", "h800"),
    ("h200", "dgx-h200"),
    ("h100.*pcie|pcie.*h100", "h100-pcie"),
    ("h100.*nvl(?!ink)", "h100-nvl"),
    ("h100", "dgx-h100"),
    ("h20", "h20"),
    ("a800", "a800"),
    ("a100.*pcie|pcie.*a100", "a100-pcie"),
    ("a100", "dgx-a100-80"),
    ("v100", "v100"),
    ("a10g", "a10g"),
    ("a10", "a10"),
    ("l40s", "l40s"),
    ("l40", "l40"),
    ("l4", "l4"),
    ("(?:rtx|geforce)? *4090", "rtx4090"),
    ("mi300x?", "mi300x"),
    ("mi325x?", "mi325x"),
    ("mi35[05]x?", "mi355x"),
    ("mi250x?", "mi250x"),
    ("blackwell", "blackwell"),
    ("hopper", "hopper"),
    ("ampere", "ampere"),
)


def described(words: str) -> str | None:
    """Return the shipped description or variant that a source's words for its accelerator mean."""
    text = words.lower().replace("_", " ").replace("-", " ").replace("rtx4090", "rtx 4090")
    return next(
        (name for words, name in _WORDS if re.search(rf"(?<![a-z0-9])(?:{words})(?![a-z0-9])", text)), None
    )


def generation_of(spec: HardwareSpec) -> str:
    """Return the architecture's name, for summaries."""
    variant = VARIANTS.get(spec.name)
    return GENERATIONS.get(spec.name, spec.name) if variant is None else variant.generation


def stack_hardware(name: str) -> str:
    """Return the description whose software stacks apply to a description or variant."""
    variant = VARIANTS.get(name)
    if variant is None:
        return SIBLINGS.get(name, name)
    return variant.base if variant.same_kernels else name


def is_scored(name: str) -> bool:
    """Test whether runs on a description or variant count for accuracy: no sibling gives its constants."""
    return name not in VARIANTS and name not in SIBLINGS


def varied(base: HardwareSpec, name: str, variant: Variant) -> HardwareSpec:
    """Build a description from the base's, with the variant's rates, memory and name."""
    up, out = base.scale_up, base.scale_out
    if variant.link_bytes_per_s is not None:
        factor = variant.link_bytes_per_s / up.bandwidth_bytes_per_s
        tables = {kind: scaled_bus_table(getattr(up, kind), factor) for kind in COLLECTIVES}
        up = up.model_copy(update={**tables, "bandwidth_bytes_per_s": variant.link_bytes_per_s})
    if variant.network_bytes_per_s is not None:
        out = out.model_copy(update={"bandwidth_bytes_per_s": variant.network_bytes_per_s})
    accelerator = _accelerator(base.accelerator, name, variant)
    return base.model_copy(update={"name": name, "accelerator": accelerator, "scale_up": up, "scale_out": out})


def _accelerator(accelerator: Accelerator, name: str, variant: Variant) -> Accelerator:
    update: dict[str, object] = {
        "name": name.upper(),
        "memory_bytes": int(variant.memory_bytes),
        "memory_bandwidth_bytes_per_s": variant.memory_bytes_per_s,
    }
    update["bf16"] = _engine(accelerator.bf16, variant.bf16_flops_per_s, variant)
    if accelerator.fp8 is not None:
        without = variant.fp8_flops_per_s == 0.0
        update["fp8"] = None if without else _engine(accelerator.fp8, variant.fp8_flops_per_s, variant)
    return accelerator.model_copy(update=update)


def _engine(engine: Precision, peak_flops_per_s: float | None, variant: Variant) -> Precision:
    return engine.model_copy(
        update={
            "peak_flops_per_s": engine.peak_flops_per_s if peak_flops_per_s is None else peak_flops_per_s,
            "sustained": engine.sustained if variant.sustained is None else variant.sustained,
        }
    )
