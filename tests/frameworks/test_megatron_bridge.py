"""Megatron-Bridge's own program reads what is exported: its parser, its recipe, its overrides in Hydra's grammar,
and its checks of the whole configuration with Megatron-Core's below them. ``.ci/frameworks megatron-bridge`` runs
it on both versions; the registry has none of the second, whose sources are taken."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from milpplan.launchers.megatron_bridge.launcher import BRIDGE
from tests.frameworks.absent import hopper, stand_in
from tests.frameworks.jobs import CONFIGS, Case, all_cases, all_full, best_cases, differing, torchrun_words
from tests.launchers.cases import NAMED

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", BRIDGE.versions[-1])
CORES = {"0.3.1": "0.16.1", "0.6.0": "0.19.0"}
SHARDING = {0: "no_shard", 1: "no_shard", 2: "optim_grads", 3: "optim_grads_params"}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check asks which GPU this is; without one, the answer is an H100. Version 0.6 wants
    ``typing.override`` of Python 3.12."""
    hopper(monkeypatch)
    monkeypatch.setattr(typing, "override", override, raising=False)


def overrides_of(case: Case, folder: Path) -> list[str]:
    """The words that the script gives to the program, which start with the recipe."""
    read, _ = torchrun_words(case, case.written(folder), "megatron-bridge.sh")
    assert Path(read.training_script).name == "run_recipe.py"
    return list(read.training_script_args)


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The working folder holds the config of the checkpoint that the recipe of 0.3.1 reads from the hub first."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "Qwen" / "Qwen2-7B").mkdir(parents=True)
    shutil.copy(CONFIGS / "qwen2-7b.json", folder / "Qwen" / "Qwen2-7B" / "config.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@cache
def program() -> tuple[Any, list[Any]]:
    """What Bridge's own ``run_recipe.py`` does, up to the training that it starts; and the configurations given to
    that, one by one.

    The libraries that stand in are those of layers, which do not install without CUDA, and those of restarts, of
    quantisation and of images, which no pre-training recipe of texts has.
    """
    stand_in("transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext")
    stand_in("modelopt", "megatron.energon", "diffusers")
    import_module("megatron.core")
    given: list[Any] = []
    loop = import_module("megatron.bridge.training.pretrain")
    loop.pretrain = lambda config, **_: given.append(config)
    return runpy.run_path(os.environ["RUN_RECIPE"], run_name="run_recipe")["main"], given


def configured(words: list[str], processes: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe with the overrides, checked as ``pretrain`` does before anything is built."""
    main, given = program()
    with monkeypatch.context() as patch:
        patch.chdir(".")
        patch.setattr(sys, "argv", ["run_recipe.py", *words])
        patch.setenv("WORLD_SIZE", str(processes))
        patch.setenv("RANK", "1")
        main()
        import_module("megatron.bridge.training.config").runtime_config_update(given[-1])
    return given[-1]


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names, with the core that it is built on; of 0.6 there is a tag alone,
    whose package says the next number."""
    program()
    if VERSION == "0.3.1":
        assert version("megatron-bridge") == VERSION
    assert import_module("megatron.core").__version__.split("+")[0] == CORES[VERSION]


def test_it_takes_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans of the ten jobs and drawn ones: sizes, degrees, batch, sharding and overlaps arrive."""
    assert len(best_cases("megatron-bridge", VERSION)) == 10
    cases = all_cases("megatron-bridge", VERSION, 3)
    assert len(cases) == 40
    for case in cases:
        layout, problem = case.plan.layout, case.problem
        found = configured(overrides_of(case, tmp_path), layout.num_gpus, monkeypatch)
        assert found.data_parallel_size == layout.dp, case.title
        model = {
            "num_layers": problem.model.num_layers,
            "hidden_size": problem.model.hidden_size,
            "vocab_size": problem.model.vocab_size,
            "seq_length": problem.job.sequence_length,
            "tensor_model_parallel_size": layout.tp,
            "context_parallel_size": layout.cp,
            "pipeline_model_parallel_size": layout.pp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp if problem.model.has_experts else 1,
            "sequence_parallel": layout.sequence_parallel,
            "bf16": True,
        }
        assert differing(model, found.model) == {}, case.title
        assert (found.model.virtual_pipeline_model_parallel_size or 1) == layout.vpp, case.title
        batch = {"micro_batch_size": layout.micro_batch_size, "global_batch_size": problem.job.global_batch_size}
        assert differing(batch, found.train) == {}, case.title
        states = {
            "use_distributed_optimizer": layout.zero_stage > 0,
            "data_parallel_sharding_strategy": SHARDING[layout.zero_stage],
            "use_megatron_fsdp": layout.zero_stage > 1,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
            "overlap_param_gather": layout.overlap_param_gather,
        }
        assert differing(states, found.ddp) == {}, case.title
        check_recompute(case, found.model)


def check_recompute(case: Case, found: Any) -> None:
    """All layers fully where the plan says so; with ``block`` the first of every virtual stage; else not fully."""
    counts = [(stage.recompute.full, stage.num_layers) for stage in case.plan.virtual_stages]
    if all_full(case):
        assert (found.recompute_granularity, found.recompute_method) == ("full", "uniform"), case.title
    elif any(full for full, _ in counts):
        assert (found.recompute_granularity, found.recompute_method) == ("full", "block"), case.title
        assert all(full == min(found.recompute_num_layers, size) for full, size in counts), case.title
    else:
        assert found.recompute_granularity != "full", case.title


def test_it_builds_uneven_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout string of a pipeline with small ends is read by Megatron-Core into the plan's stages."""
    from tests.frameworks.jobs import exported_case

    problem, plan = NAMED["llama3-70b-uneven"]()
    layout = plan.layout.model_copy(update={"tp_overlap": "none"})
    plan = plan.model_copy(update={"layout": layout})
    case = exported_case("uneven", "megatron-bridge", VERSION, problem, plan)
    found = configured(overrides_of(case, tmp_path), layout.num_gpus, monkeypatch)
    stages = found.model.pipeline_model_parallel_layout.layout
    held = [
        sum(layer.name == "decoder" for layer in stages[rank][chunk])
        for chunk in range(layout.vpp)
        for rank in range(layout.pp)
    ]
    assert held == [stage.num_layers for stage in plan.virtual_stages]


def test_it_refuses_names_and_degrees_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are Bridge's, and can fail: a setting that there is not, processes that the degrees do not
    divide, and full recomputation without a method."""
    case = best_cases("megatron-bridge", VERSION)[0]
    overrides = overrides_of(case, tmp_path)
    with pytest.raises(Exception, match="tensor_parallel_size"):
        configured([*overrides, "model.tensor_parallel_size=2"], case.plan.layout.num_gpus, monkeypatch)
    with pytest.raises(AssertionError, match="not divisible"):
        configured([*overrides, "model.tensor_model_parallel_size=3"], case.plan.layout.num_gpus, monkeypatch)
    with pytest.raises((AssertionError, ValueError), match="recompute"):
        configured(
            [*overrides, "model.recompute_granularity=full", "model.recompute_method=null"],
            case.plan.layout.num_gpus,
            monkeypatch,
        )
