"""Megatron-LM's own code reads what is exported: its parser, its checks of the arguments, and the configuration of
its core that is made of them. ``.ci/frameworks megatron`` runs it, on the sources that the export names: the
registry has the core alone."""

from __future__ import annotations

import os
import sys
import typing
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from typing_extensions import override

from milpplan.launchers.megatron.rules import MEGATRON
from tests.frameworks.absent import hopper
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, differing, exported_case, torchrun_words
from tests.launchers.cases import NAMED

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", MEGATRON.versions[0])
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks ask what this machine has: an H100, and Transformer Engine 2.8, which does not install without
    CUDA; no check is left out. Its sources want ``typing.override`` of Python 3.12."""
    hopper(monkeypatch)
    monkeypatch.setattr(typing, "override", override, raising=False)
    core = import_module("megatron.core.utils")
    monkeypatch.setattr(core, "_te_version", Version("2.8.0"))
    rotary = import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(rotary, "fused_apply_rotary_pos_emb", object())


def words_of(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the script gives to ``pretrain_gpt.py``, and the variables of the processes."""
    read, variables = torchrun_words(case, case.written(folder), "megatron.sh")
    assert Path(read.training_script).name == "pretrain_gpt.py"
    return list(read.training_script_args), variables


def validated(
    words: list[str], variables: dict[str, str], gpus: int, patch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """The arguments after all checks, and the core's configuration."""
    from megatron.training import arguments

    with patch.context() as here:
        here.setenv("WORLD_SIZE", str(gpus))
        here.setenv("RANK", "0")
        here.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        if "CUDA_DEVICE_MAX_CONNECTIONS" in variables:
            here.setenv("CUDA_DEVICE_MAX_CONNECTIONS", variables["CUDA_DEVICE_MAX_CONNECTIONS"])
        found = arguments.validate_args(arguments.parse_args())
        return found, arguments.core_transformer_config_from_args(found)


def checked(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The same of a case, with everything compared that a plan says."""
    layout, problem = case.plan.layout, case.problem
    args, core = validated(*words_of(case, folder), layout.num_gpus, patch)
    expected = {
        "data_parallel_size": layout.dp,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": problem.job.global_batch_size,
        "seq_length": problem.job.sequence_length,
        "use_distributed_optimizer": layout.zero_stage > 0,
        "use_megatron_fsdp": layout.zero_stage > 1,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
    }
    if layout.zero_stage > 1:
        expected["data_parallel_sharding_strategy"] = SHARDING[layout.zero_stage]
    assert differing(expected, args) == {}, case.title
    of_core = {
        "num_layers": problem.model.num_layers,
        "hidden_size": problem.model.hidden_size,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "bf16": True,
    }
    assert differing(of_core, core) == {}, case.title
    check_recompute(case, core)
    return args, core


def check_recompute(case: Case, core: Any) -> None:
    """All layers fully where the plan says so; with ``block`` the first of every virtual stage; else not fully."""
    counts = [(stage.recompute.full, stage.num_layers) for stage in case.plan.virtual_stages]
    if all_full(case):
        assert (core.recompute_granularity, core.recompute_method) == ("full", "uniform"), case.title
    elif any(full for full, _ in counts):
        assert (core.recompute_granularity, core.recompute_method) == ("full", "block"), case.title
        assert all(full == min(core.recompute_num_layers, size) for full, size in counts), case.title
    else:
        assert core.recompute_granularity != "full", case.title


def test_it_takes_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans of the ten jobs and drawn ones."""
    assert len(best_cases("megatron", VERSION)) == 10
    cases = all_cases("megatron", VERSION)
    assert len(cases) == 60
    stages = Counter(case.plan.layout.zero_stage for case in cases)
    assert len(stages) > 2
    for case in cases:
        checked(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["llama3-70b-uneven", "deepseek-v3-experts"])
def test_it_builds_uneven_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout string is read into the plan's stages: interleaved with small ends, and 61 layers over 16."""
    case = exported_case(name, "megatron", VERSION, *NAMED[name]())
    layout = case.plan.layout
    _, core = checked(case, tmp_path, monkeypatch)
    stages = core.pipeline_model_parallel_layout.layout
    held = [
        sum(layer.name == "decoder" for layer in stages[rank][chunk])
        for chunk in range(layout.vpp)
        for rank in range(layout.pp)
    ]
    assert held == [stage.num_layers for stage in case.plan.virtual_stages]


def test_it_refuses_what_its_rules_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are Megatron-LM's, and can fail: an argument that it lacks, degrees that do not divide the
    processes, a gather that overlaps without the distributed optimizer."""
    case = best_cases("megatron", VERSION)[0]
    words, variables = words_of(case, tmp_path)
    gpus = case.plan.layout.num_gpus
    with pytest.raises(SystemExit):
        validated([*words, "--tensor-parallel-sise", "2"], variables, gpus, monkeypatch)
    with pytest.raises(AssertionError, match="divisible"):
        validated([*words, "--tensor-model-parallel-size", "3"], variables, gpus, monkeypatch)
    plain = [word for word in words if word not in ("--use-distributed-optimizer", "--use-megatron-fsdp")]
    with pytest.raises(AssertionError):
        validated([*plain, "--overlap-param-gather"], variables, gpus, monkeypatch)
