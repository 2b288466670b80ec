"""ms-swift's own code reads what is exported: the parser and all checks of ``megatron sft``, which make the
process groups of Megatron-Core. ``.ci/frameworks ms-swift`` runs it."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from milpplan.launchers import TARGETS
from tests.frameworks.absent import stand_in
from tests.frameworks.jobs import (
    Case,
    aligned_cases,
    all_cases,
    all_full,
    best_cases,
    checkpoint,
    differing,
    started,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", TARGETS["ms-swift"].capability.versions[0])


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine, which does not install without CUDA, has empty layers; the one number that the checks
    put on the GPU is on the CPU; and process groups of Gloo are PyTorch's fake ones, as all others here."""
    import torch

    stand_in("transformer_engine")
    group = torch.distributed.new_group
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "new_group", lambda *a, **more: group(*a, **more | {"backend": "fake"}))


def words_of(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the script gives to ``megatron``, and the variables of the processes."""
    place = case.written(folder)
    words, variables = started(
        place, "ms-swift.sh", "megatron", MODEL=str(checkpoint(case, place)), OUTPUT_DIR=str(place / "output")
    )
    layout = case.plan.layout
    assert int(variables["NPROC_PER_NODE"]) * int(variables["NNODES"]) == layout.num_gpus, case.title
    assert words[0] == ("sft" if case.problem.job.alignment is None else "rlhf")
    return words, variables


def parsed(words: list[str], variables: dict[str, str], gpus: int, patch: pytest.MonkeyPatch) -> Any:
    """The arguments of the run after all checks, as the first of so many processes sees them."""
    import torch
    from megatron.core import mpu
    from swift.megatron.pipelines.train import rlhf, sft
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        with patch.context() as here:
            for name, value in {**variables, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}.items():
                here.setenv(name, value)
            program = {"sft": sft.MegatronSft, "rlhf": rlhf.MegatronRLHF}[words[0]]
            found = program._parse_args(program.__new__(program), words[1:])
            found.groups = {
                "tp": mpu.get_tensor_model_parallel_world_size(),
                "cp": mpu.get_context_parallel_world_size(),
                "pp": mpu.get_pipeline_model_parallel_world_size(),
                "ep": mpu.get_expert_model_parallel_world_size(),
                "etp": mpu.get_expert_tensor_parallel_world_size(),
                "dp": mpu.get_data_parallel_world_size(),
            }
            return found
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names."""
    assert version("ms-swift") == VERSION


def test_it_takes_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Degrees, batch, sharding and recomputation of the best plans and of drawn ones arrive, and the process
    groups have the degrees' sizes."""
    import torch

    assert len(best_cases("ms-swift", VERSION)) == 7
    cases = [*all_cases("ms-swift", VERSION, 3), *aligned_cases("ms-swift", VERSION, "dpo", "frozen")]
    assert len(cases) > 20
    for case in cases:
        layout, problem = case.plan.layout, case.problem
        found = parsed(*words_of(case, tmp_path), layout.num_gpus, monkeypatch)
        pairs = problem.job.sequences_together
        full = sum(stage.recompute.full for stage in case.plan.virtual_stages)
        expected = {
            "data_parallel_size": layout.dp,
            "num_microbatches": layout.num_micro_batches,
            "micro_batch_size": layout.micro_batch_size // pairs,
            "global_batch_size": problem.job.global_batch_size // pairs,
            "rlhf_type": "dpo" if pairs > 1 else None,
            "seq_length": problem.job.sequence_length,
            "sequence_parallel": layout.sequence_parallel,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "use_distributed_optimizer": layout.zero_stage > 0,
            "use_megatron_fsdp": layout.zero_stage > 1,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
            "overlap_param_gather": layout.overlap_param_gather,
            "recompute_method": ("uniform" if all_full(case) else "block") if full else None,
            "tuner_type": "full",
            "main_grads_dtype": torch.float32,
            "bf16": True,
            "padding_free": True,
        }
        assert differing(expected, found) == {}, case.title
        degrees = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")}
        if problem.model.has_experts:
            degrees["etp"] = layout.etp
        assert differing(degrees, found.groups) == {}, case.title


def test_it_refuses_what_its_rules_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are ms-swift's, and can fail: an argument that it lacks, a batch that replicas do not divide, a
    method of recomputation that a kind does not have."""
    case = best_cases("ms-swift", VERSION)[0]
    words, variables = words_of(case, tmp_path)
    gpus = case.plan.layout.num_gpus
    with pytest.raises(ValueError, match="sise"):
        parsed([*words, "--tensor_parallel_sise", "2"], variables, gpus, monkeypatch)
    with pytest.raises(ValueError, match="not divisible"):
        parsed([*words, "--global_batch_size", "17"], variables, gpus, monkeypatch)
    more = ["--recompute_granularity", "selective", "--recompute_method", "uniform"]
    with pytest.raises(ValueError, match="recompute method"):
        parsed([*words, *more], variables, gpus, monkeypatch)
