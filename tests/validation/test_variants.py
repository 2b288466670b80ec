"""Accelerators without constants of their own: read from a source's words, made from another, told as such."""

from __future__ import annotations

import json
from typing import Any

import pytest

from milpplan.problem import HardwareSpec, hardware_names, load_hardware
from milpplan.validation import compare_run
from milpplan.validation.runs import (
    SIBLINGS,
    VARIANTS,
    Cluster,
    Run,
    UnstatedError,
    described,
    generation_of,
    hardware_of,
    is_scored,
    stack_hardware,
)
from tests.validation.cases import record, shipped_runs


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("H100", "dgx-h100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("h100_sxm5", "dgx-h100"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("H100 (NVLink)", "dgx-h100"),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-80"),
        ("A100-PCIE-80GB", "a100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("H200 SXM", "dgx-h200"),
        ("GH200 Grace Hopper", "gh200"),
        ("GB300 NVL72", "gb300-nvl72"),
        ("B200 (power limited)", "dgx-b200"),
        ("NVIDIA L40S", "l40s"),
        ("L4", "l4"),
        ("GeForce RTX 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("AMD Instinct MI325X", "mi325x"),
        ("Ampere (model not stated)", "ampere"),
        ("TPU v5p", None),
        ("Trainium2", None),
        ("", None),
        ("AB200", None),
    ],
)
def test_words_of_a_source(words: str, name: str | None) -> None:
    """Whole words only, the special product before the general one."""
    assert described(words) == name


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_variant_is_a_valid_description(name: str) -> None:
    """It satisfies every rule of a description, has its own name and memory, and is told with its source."""
    spec, told = hardware_of(Cluster(gpu=name))
    assert HardwareSpec.model_validate(spec.model_dump()) == spec
    variant = VARIANTS[name]
    assert variant.base in hardware_names()
    assert spec.name == name
    assert spec.accelerator.memory_bytes == int(variant.memory_bytes)
    assert generation_of(spec) == variant.generation
    assert any(variant.source in text for text in told)


def test_the_link_scales_what_was_measured_inside_a_node() -> None:
    """V100's NVLink has 150 of A100's 300 GB/s, and its collectives that share of A100's bandwidth."""
    (v100, _), a100 = hardware_of(Cluster(gpu="V100")), load_hardware("dgx-a100-40")
    ours = v100.scale_up.all_reduce.bus_bandwidth_bytes_per_s[0][-1]
    assert ours / a100.scale_up.all_reduce.bus_bandwidth_bytes_per_s[0][-1] == pytest.approx(150 / 300)
    assert v100.accelerator.bf16.gemm == a100.accelerator.bf16.gemm
    assert v100.accelerator.bf16.sustained == 0.7


@pytest.mark.parametrize(("name", "base"), sorted(SIBLINGS.items()))
def test_a_description_with_constants_of_a_sibling(name: str, base: str) -> None:
    """Its runs are read with it, are told as such, and count in no score; the sibling's do."""
    accelerator = load_hardware(name).accelerator.name
    spec, told = hardware_of(Cluster(gpu=accelerator))
    assert spec == load_hardware(name)
    assert f"{name} has constants of {base}, no scored run" in told
    assert (is_scored(name), is_scored(base)) == (False, True)
    assert generation_of(spec) not in (name, generation_of(load_hardware("dgx-h100")))


def test_stacks_of_the_same_architecture_serve() -> None:
    """A800 has A100's kernels and so its stacks; V100 has neither."""
    assert stack_hardware("a800") == "dgx-a100-80"
    assert stack_hardware("v100") == "v100"
    assert stack_hardware("l4") == "l40s"
    data = record(group="llm-foundry", hardware__gpu="A800", parallel__sp=None)
    told = compare_run(Run.model_validate_json(json.dumps(data), strict=True)).statement.assumptions
    assert any("constants dgx-a100-80+composer" in text for text in told)


@pytest.mark.parametrize(
    ("changes", "memory", "gpus", "words"),
    [
        ({"gpu_mem_GB": 1833.0, "gpu": "B200"}, None, 8, "taken as the memory of a node"),
        ({"gpu_mem_GB": 64.0}, 62.72 * 2**30, 8, "dgx-h100 with 64 GB of memory"),
        ({"gpus_per_node": 4}, None, 4, "dgx-h100 with 4 GPUs a node"),
        ({"gpus_per_node": 16}, None, 8, "16 GPUs a node in the source, 8 in dgx-h100"),
        ({"gpus_per_node": 4, "gpu": "GB200"}, None, 4, ""),
    ],
)
def test_what_the_source_says_of_nodes(
    changes: dict[str, Any], memory: float | None, gpus: int, words: str
) -> None:
    """Another memory and smaller nodes are priced; a node's memory is not taken for a GPU's; larger nodes are
    told."""
    cluster = Cluster(**({"gpu": "H100"} | changes))
    spec, told = hardware_of(cluster)
    plain, _ = hardware_of(Cluster(gpu=cluster.gpu))
    assert spec.accelerator.memory_bytes == pytest.approx(memory or plain.accelerator.memory_bytes, rel=1e-3)
    assert spec.gpus_per_node == gpus
    assert any(words in text for text in told)


def test_an_accelerator_without_any_description() -> None:
    """Is refused with its name."""
    with pytest.raises(UnstatedError, match="no hardware description for TPU v5p"):
        hardware_of(Cluster(gpu="TPU v5p"))


def test_dispatch_that_runs_beside_another_micro_batch() -> None:
    """A run that names this overlap pays the processors' share of its dispatch, and its latencies; one that names
    its absence pays all."""
    runs = {run.id: run for run in shipped_runs().runs}
    alone, beside = (compare_run(runs[f"bridge-skill-qwen30b-{number}"]) for number in (3, 4))
    exposed = [one.report.breakdown_s["ep_exposed"] for one in (alone, beside)]
    assert 0.15 * exposed[0] < exposed[1] < 0.3 * exposed[0]
    assert any("dispatch of experts behind another micro-batch" in text for text in beside.statement.assumptions)
    assert not any("behind another micro-batch" in text for text in alone.statement.assumptions)
