"""DeepSpeed's own code reads what is exported: ``DeepSpeedConfig`` with its checks, and PyTorch's ``torchrun``.
``.ci/frameworks deepspeed`` runs it."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milpplan import Layout
from milpplan.launchers.deepspeed.launcher import DEEPSPEED
from tests.frameworks.jobs import (
    TORCHRUN,
    Case,
    all_cases,
    all_full,
    best_cases,
    differing,
    stepped,
    tiny_case,
    torchrun_words,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = DEEPSPEED.versions[0]


def settings_of(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """What DeepSpeed is given, and what the training program keeps to itself."""
    settings = json.loads(case.files["deepspeed.json"])
    own = settings.pop("milpplan")
    return settings, own


def configured(settings: dict[str, Any], processes: int) -> Any:
    """DeepSpeed's configuration on so many data-parallel processes."""
    from deepspeed.runtime import config

    # Its checks ask how many processes there are; nothing is started.
    config.dist.get_rank = lambda *_: 0
    units = SimpleNamespace(get_data_parallel_world_size=lambda: processes)
    return config.DeepSpeedConfig(settings, mpu=units)


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names."""
    assert version("deepspeed") == VERSION


def test_its_configuration_takes_every_file() -> None:
    """The best plans of the jobs of dense models and drawn ones: batch sizes, stage, overlap and types arrive."""
    import torch

    assert len(best_cases("deepspeed", VERSION)) == 7
    cases = all_cases("deepspeed", VERSION, 8)
    assert len(cases) >= 40
    for case in cases:
        settings, own = settings_of(case)
        layout, job = case.plan.layout, case.problem.job
        found = configured(settings, layout.dp)
        expected = {
            "train_batch_size": job.global_batch_size,
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.num_micro_batches,
            "world_size": layout.num_gpus,
            "grad_accum_dtype": job.grad_dtype,
            "communication_data_type": torch.float32 if job.grad_dtype == "fp32" else torch.bfloat16,
        }
        assert differing(expected, found) == {}, case.title
        sharding = {
            "stage": layout.zero_stage,
            "overlap_comm": layout.overlap_grad_reduce and layout.zero_stage > 0,
            "reduce_scatter": True,
            "offload_optimizer": None,
            "offload_param": None,
        }
        assert differing(sharding, found.zero_config) == {}, case.title
        assert found.bfloat16_config.enabled
        assert own["recompute"] == all_full(case)


def test_its_model_is_that_of_the_plan() -> None:
    """Transformers' configuration, as the training program makes it, has the plan's sizes."""
    from transformers import AutoConfig

    for case in best_cases("deepspeed", VERSION):
        fields = dict(settings_of(case)[1]["model"])
        found = AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
        model = case.problem.model
        expected = {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
        }
        assert differing(expected, found) == {}, case.title


def test_torchrun_starts_the_program(tmp_path: Path) -> None:
    """The script gives torchrun the nodes, the processes, the program and the configuration beside it."""
    for case in best_cases("deepspeed", VERSION):
        place = case.written(tmp_path)
        read, _ = torchrun_words(case, place, "deepspeed.sh")
        assert Path(read.training_script) == place / "deepspeed_train.py"
        assert [Path(word) for word in read.training_script_args] == [place / "deepspeed.json"]


WATCHER = """import json, os, runpy, sys
import deepspeed
step = deepspeed.DeepSpeedEngine.step
def watched(engine, *words, **more):
    step(engine, *words, **more)
    if engine.global_steps == 1:
        states = engine.optimizer
        masters = "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"
        flat = next((getattr(states, name) for name in masters if getattr(states, name, None)), ())
        seen = {
            "stage": engine.zero_optimization_stage(), "dp": engine.dp_world_size, "micro": engine.micro_steps,
            "shard": sum(part.numel() for part in flat),
            "weights": sum(getattr(part, "ds_numel", part.numel()) for part in engine.module.parameters()),
            "cut": all(hasattr(part, "ds_tensor") for part in engine.module.parameters()),
        }
        os.write(1, f"STEPPED {json.dumps(seen)}\\n".encode())
        os._exit(0)
deepspeed.DeepSpeedEngine.step = watched
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("stage", range(4))
def test_two_processes_take_a_step(tmp_path: Path, stage: int) -> None:
    """The script as written trains a tiny model on two processes, sharded and accumulated as the plan says."""
    overlap = {"overlap_grad_reduce": stage > 0, "overlap_param_gather": stage == 3}
    layout = Layout(dp=2, micro_batch_size=1, global_batch_size=4, zero_stage=stage, **overlap)
    case = tiny_case("deepspeed", VERSION, layout, grad_dtype="fp32" if stage > 1 else "bf16")
    place = case.written(tmp_path)
    settings = json.loads(case.files["deepspeed.json"])
    # The fused Adam of a CPU is compiled at its first use; PyTorch's has the states of the same size.
    settings["optimizer"]["params"]["torch_adam"] = True
    (place / "deepspeed.json").write_text(json.dumps(settings))
    for seen in stepped(place, "deepspeed.sh", TORCHRUN, WATCHER, DS_ACCELERATOR="cpu"):
        assert (seen["stage"], seen["dp"], seen["micro"]) == (stage, layout.dp, layout.num_micro_batches)
        assert seen["shard"] == (seen["weights"] // 2 if stage else 0)
        assert seen["cut"] == (stage == 3)


def test_it_refuses_batches_that_do_not_multiply() -> None:
    """The checks are DeepSpeed's, and can fail: another number of processes, and a stage that there is not."""
    case = best_cases("deepspeed", VERSION)[0]
    settings, _ = settings_of(case)
    with pytest.raises(AssertionError, match="train_batch_size"):
        configured(settings, 2 * case.plan.layout.dp)
    sharding = settings["zero_optimization"] | {"stage": 4}
    with pytest.raises(ValueError, match="stage"):
        configured(settings | {"zero_optimization": sharding}, case.plan.layout.dp)
