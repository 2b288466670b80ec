"""Hardware description of a run's cluster."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from milpplan.problem import HardwareSpec, load_hardware
from milpplan.units import GIB, GIGA, TERA
from milpplan.validation.runs.records import Cluster, UnstatedError
from milpplan.validation.runs.variants import SIBLINGS, VARIANTS, described, varied

OMNI_PATH: Final = ("4x omni-path per node", 4, 100)
"""Words of the source's interconnect, links per node, and Gb/s of each."""
OMNI_PATH_RING: Final = ("omni-path", 6.8e9)
"""Word of the source's interconnect, and bytes/s of a ring of NCCL: an all-reduce of 4 GB on 16 nodes of Jean Zay
with four links of 12.5 GB/s each reached 54 Gb/s (bigscience-workshop/bigscience@9e64edec experiments/bandwidth,
all_reduce_bench.py), on 4 nodes of eight A100 at most 42 Gb/s."""
_GBITS: Final = r"(\d+)\s*(?:Gb/s|Gbps|Gbit/s)"
_LINKS: Final = re.compile(rf"(\d+)\s*x\s[^;,]*?{_GBITS}")
_WHOLE: Final = re.compile(rf"{_GBITS}\s*(?:node-node|(?:per|a) node)")
_OTHER_LINKS: Final = re.compile(r"storage|management|nvlink|xgmi", re.IGNORECASE)
MEMORIES: Final = (("dgx-h100", "96gb hbm2e", 2.4e12),)
"""Description, words of the source, and bytes/s of the memory that they mean (pytorch/torchtitan@31a17bfd
benchmarks/llama3_h100_202412_torchtitan.md)."""
EXACT: Final = (
    frozenset({"a100", "a100-sxm4", "h100", "h100-sxm", "h200", "b200", "gb200", "mi300x", "l40s"})
    | {"rtx4090", "rtx 4090"}
    | {"a800", "b300", "gb300", "h20", "h800", "mi325x", "mi355x"}
)
"""Words for an accelerator that mean exactly a shipped description."""
MAX_MEMORY_RATIO: Final = 2.5
"""Maximum ratio of memory between products of one name; a larger printed value is a node's."""
_SAME_RATE: Final = 0.02
_MEMORY_TOLERANCE: Final = 0.08
"""Relative differences of memory up to this (GB or GiB, and the driver's share) do not indicate another
product."""


def hardware_of(cluster: Cluster) -> tuple[HardwareSpec, list[str]]:
    """Choose the description, and list the assumptions.

    Raises:
        UnstatedError: no description of this accelerator ships with milpplan.
    """
    name = described(cluster.gpu)
    if name is None:
        raise UnstatedError(f"no hardware description for {cluster.gpu}")
    memory = cluster.gpu_mem_GB
    if name == "dgx-a100-80" and memory is not None and memory <= 40:
        name = "dgx-a100-40"
    notes: list[str] = []
    words = cluster.gpu.strip().lower()
    if words not in EXACT:
        notes.append(f"{cluster.gpu.strip()} read as {name}")
    variant = VARIANTS.get(name)
    if variant is not None:
        notes.append(variant.told(name))
    if name in SIBLINGS:
        notes.append(f"{name} has constants of {SIBLINGS[name]}, no scored run")
    spec = _with_capacity(_preset(name), memory, notes)
    spec = _with_memory(spec, cluster.interconnect, notes)
    spec, network = _with_network(spec, cluster.interconnect, cluster.gpus_per_node)
    spec = _with_ring(spec, cluster.interconnect, notes)
    return _with_nodes(spec, cluster.gpus_per_node, notes), notes + network


def _with_capacity(spec: HardwareSpec, memory: float | None, notes: list[str]) -> HardwareSpec:
    """Set the memory that the source prints, where it is another product's."""
    if memory is None or abs(memory * 1e9 / spec.accelerator.memory_bytes - 1) <= 2 * _MEMORY_TOLERANCE:
        return spec
    if memory * 1e9 > MAX_MEMORY_RATIO * spec.accelerator.memory_bytes:
        notes.append(f"{memory:g} GB taken as the memory of a node, as much a GPU as {spec.name} has")
        return spec
    notes.append(f"{spec.name} with {memory:g} GB of memory; speed as in the description")
    usable = int(memory * GIB * (1 - _MEMORY_TOLERANCE / 4))
    return spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update={"memory_bytes": usable})})


def _with_nodes(spec: HardwareSpec, gpus: int | None, notes: list[str]) -> HardwareSpec:
    """Set smaller nodes, where the source has them and the fast domain is the node."""
    if gpus is None or gpus == spec.gpus_per_node:
        return spec
    if gpus > spec.gpus_per_node or spec.scale_up.num_gpus != spec.gpus_per_node:
        notes.append(f"{gpus} GPUs a node in the source, {spec.gpus_per_node} in {spec.name}")
        return spec
    notes.append(f"{spec.name} with {gpus} GPUs a node")
    inside = spec.scale_up.model_copy(update={"num_gpus": gpus})
    return spec.model_copy(update={"gpus_per_node": gpus, "scale_up": inside})


def _with_memory(spec: HardwareSpec, words: str | None, notes: list[str]) -> HardwareSpec:
    """Set another product's memory bandwidth, where the source names it."""
    for name, known, bytes_per_s in MEMORIES:
        if spec.name == name and known in (words or "").lower():
            notes.append(f"memory bandwidth of {known}, {bytes_per_s / TERA:g} TB/s")
            changed = {"memory_bandwidth_bytes_per_s": bytes_per_s}
            return spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update=changed)})
    return spec


def _with_ring(spec: HardwareSpec, interconnect: str | None, notes: list[str]) -> HardwareSpec:
    """Set the measured rate of a ring, where the source's network has one."""
    word, bytes_per_s = OMNI_PATH_RING
    if word not in (interconnect or "").lower():
        return spec
    notes.append(f"a ring between nodes at {bytes_per_s / GIGA:g} GB/s, as measured on its cluster")
    out = spec.scale_out.model_copy(update={"ring_bytes_per_s": bytes_per_s})
    return spec.model_copy(update={"scale_out": out})


def _with_network(
    spec: HardwareSpec, interconnect: str | None, gpus_per_node: int | None
) -> tuple[HardwareSpec, list[str]]:
    """Set the rate of the network between nodes that the source prints, where it differs."""
    ours = f"as {spec.name} ({spec.scale_out.name})"
    if interconnect is None:
        return spec, [f"network between nodes {ours}"]
    found = _links(interconnect)
    if found is None:
        return spec, [f"interconnect {interconnect[:60]!r}: network between nodes {ours}"]
    links, gbits_per_s = found
    bytes_per_s = links * gbits_per_s * GIGA / 8 / (gpus_per_node or spec.gpus_per_node)
    if bytes_per_s <= 0 or abs(bytes_per_s / spec.scale_out.bandwidth_bytes_per_s - 1) < _SAME_RATE:
        return spec, []
    out = spec.scale_out.model_copy(update={"bandwidth_bytes_per_s": bytes_per_s})
    text = f"network of {links} x {gbits_per_s} Gb/s a node, latencies of {spec.name}"
    return spec.model_copy(update={"scale_out": out}), [text]


def _links(interconnect: str) -> tuple[int, int] | None:
    """Read the links of a node to others, and Gb/s of each; None where the words do not state them."""
    words, links, gbits_per_s = OMNI_PATH
    if words in interconnect.lower():
        return links, gbits_per_s
    for part in re.split(r"[;,]", interconnect):
        if _OTHER_LINKS.search(part):
            continue
        if (match := _LINKS.search(part)) is not None:
            return int(match[1]), int(match[2])
        if (match := _WHOLE.search(part)) is not None:
            return 1, int(match[1])
    return None


@lru_cache(maxsize=32)
def _preset(name: str) -> HardwareSpec:
    variant = VARIANTS.get(name)
    return load_hardware(name) if variant is None else varied(load_hardware(variant.base), name, variant)
