"""verl's own configuration takes the exported overrides: Hydra composes them with the files of its package.
``.ci/frameworks verl`` runs it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from milpplan.launchers import TARGETS
from tests.frameworks.jobs import Case, aligned_cases, all_cases, all_full, best_cases, differing, started

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", TARGETS["verl"].capability.versions[0])


def words_of(case: Case, folder: Path) -> list[str]:
    """What the script gives to Python on the first node, after it has made a Ray cluster."""
    place = case.written(folder)
    (place / "bin").mkdir()
    (place / "bin" / "ray").write_text("#!/bin/sh\n", encoding="utf-8")
    (place / "bin" / "ray").chmod(0o755)
    words, _ = started(place, "verl.sh", "python3")
    return words


def composed(words: list[str]) -> Any:
    """The configuration that the program would get."""
    from hydra import compose, initialize_config_dir

    module, program, name, *overrides = words
    assert (module, program) == ("-m", "verl.trainer.main_ppo")
    package = find_spec("verl")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(next(iter(package.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name.removeprefix("--config-name="), overrides=overrides)


def test_it_takes_every_script(tmp_path: Path) -> None:
    """Degrees, batch and sharding of the best plans and of drawn ones are those of the actor's configuration."""
    cases = [*all_cases("verl", VERSION, each=3), *aligned_cases("verl", VERSION, "grpo", "frozen")]
    assert len(cases) > 20
    for case in cases:
        layout, job = case.plan.layout, case.problem.job
        config = composed(words_of(case, tmp_path))
        actor = config.actor_rollout_ref.actor
        engine = actor.megatron
        expected = {
            "tensor_model_parallel_size": layout.tp,
            "context_parallel_size": layout.cp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "expert_model_parallel_size": layout.ep,
            "sequence_parallel": layout.sequence_parallel,
            "use_distributed_optimizer": layout.zero_stage == 1,
            "use_megatron_fsdp": False,
        }
        assert differing(expected, engine) == {}, case.title
        overlaps = {"overlap_grad_reduce": layout.overlap_grad_reduce}
        overlaps["overlap_param_gather"] = layout.overlap_param_gather
        assert dict(engine.override_ddp_config) == overlaps, case.title
        assert (engine.override_transformer_config.recompute_granularity == "full") == all_full(case), case.title
        assert actor.ppo_micro_batch_size_per_gpu == layout.micro_batch_size
        aligned = job.alignment is not None
        assert actor.use_kl_loss == aligned
        reference = config.actor_rollout_ref.ref
        if aligned:
            assert reference.log_prob_micro_batch_size_per_gpu == layout.micro_batch_size
            sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            assert differing({name: expected[name] for name in sizes}, reference.megatron) == {}, case.title
        assert actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n == job.global_batch_size
        assert config.data.max_prompt_length + config.data.max_response_length == job.sequence_length
        assert config.trainer.nnodes * config.trainer.n_gpus_per_node == layout.num_gpus


def test_it_refuses_settings_that_it_lacks(tmp_path: Path) -> None:
    """A setting that the configuration does not have is an error of Hydra."""
    from hydra.errors import ConfigCompositionException

    words = words_of(best_cases("verl", VERSION)[0], tmp_path)
    with pytest.raises(ConfigCompositionException):
        composed([*words, "actor_rollout_ref.actor.megatron.tensor_parallel_sise=2"])
