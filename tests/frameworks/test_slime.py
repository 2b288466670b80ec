"""slime's own code reads what is exported: ``parse_args`` of its program, with Megatron-LM's parser, the
comparison with the checkpoint's config, and the checks of both. ``.ci/frameworks slime`` runs it, on the sources
of slime and of the Megatron-LM that it builds, with its patch."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from milpplan.launchers import TARGETS
from tests.frameworks.absent import hopper, stand_in
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, checkpoint, differing, started

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", TARGETS["slime"].capability.versions[0])


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 with Transformer Engine 2.8; and SGLang, whose engines a run without rollouts does not start."""
    stand_in("sglang", "sglang_router")
    hopper(monkeypatch)
    monkeypatch.setattr(import_module("megatron.core.utils"), "_te_version", Version("2.8.0"))


def words_of(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the script gives to ``train_async.py`` on the first node, and the variables of the processes.

    The checkpoint and the arguments that slime compares with it are given as the script's notes ask.
    """
    place = case.written(folder)
    config = checkpoint(case, place)
    read = json.loads((config / "config.json").read_text(encoding="utf-8"))
    more = f"--rotary-base {read['rope_theta']:.0f} --norm-epsilon {read['rms_norm_eps']}"
    (place / "bin").mkdir()
    (place / "bin" / "ray").write_text("#!/bin/sh\n", encoding="utf-8")
    (place / "bin" / "ray").chmod(0o755)
    words, _ = started(place, "slime.sh", "python3", HF_CHECKPOINT=str(config), MORE_ARGS=more)
    assert words[0] == "./train_async.py"
    return words[1:], json.loads(words[words.index("--train-env-vars") + 1])


def parsed(words: list[str], variables: dict[str, str], patch: pytest.MonkeyPatch) -> Any:
    """The arguments of the run, after all checks; no word is left over, which slime itself would ignore."""
    from slime.utils.arguments import parse_args

    parse, rest = ArgumentParser.parse_known_args, []

    def watched(parser: ArgumentParser, *given: Any) -> Any:
        read, over = parse(parser, *given)
        rest.append(over)
        return read, over

    with patch.context() as here:
        here.setattr(ArgumentParser, "parse_known_args", watched)
        here.setattr(sys, "argv", ["train_async.py", *words])
        for name, value in variables.items():
            here.setenv(name, value)
        read = parse_args()
    # The first parser takes the words that decide which others there are; the second, all the others.
    assert rest[1:] == [["--debug-train-only"]], rest[1:]
    return read


def test_it_takes_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Degrees, batch, sharding and recomputation of the best plans and of drawn ones arrive."""
    assert len(best_cases("slime", VERSION)) == 9
    cases = all_cases("slime", VERSION, 3)
    assert len(cases) > 30
    for case in cases:
        layout, problem = case.plan.layout, case.problem
        found = parsed(*words_of(case, tmp_path), monkeypatch)
        full = sum(stage.recompute.full for stage in case.plan.virtual_stages)
        expected = {
            "num_layers": problem.model.num_layers,
            "hidden_size": problem.model.hidden_size,
            "world_size": layout.num_gpus,
            "data_parallel_size": layout.dp,
            "tensor_model_parallel_size": layout.tp,
            "context_parallel_size": layout.cp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "expert_model_parallel_size": layout.ep,
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch_size": layout.micro_batch_size,
            "global_batch_size": problem.job.global_batch_size,
            "rollout_batch_size": problem.job.global_batch_size,
            "seq_length": problem.job.sequence_length,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
            "overlap_param_gather": layout.overlap_param_gather,
            "recompute_method": ("uniform" if all_full(case) else "block") if full else None,
            "bf16": True,
            "variable_seq_lengths": True,
            "debug_train_only": True,
        }
        assert differing(expected, found) == {}, case.title


def test_it_refuses_what_its_rules_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: another size than the checkpoint's, degrees that do not divide the processes, and words
    that are no numbers."""
    case = best_cases("slime", VERSION)[0]
    words, variables = words_of(case, tmp_path)
    with pytest.raises(AssertionError, match="hidden_size"):
        parsed([*words, "--hidden-size", "128"], variables, monkeypatch)
    with pytest.raises(AssertionError, match="divisible"):
        parsed([*words, "--tensor-model-parallel-size", "3"], variables, monkeypatch)
    with pytest.raises(SystemExit):
        parsed([*words, "--micro-batch-size", "many"], variables, monkeypatch)
    with pytest.raises(AssertionError, match="parallel-sise"):
        parsed([*words, "--tensor-parallel-sise", "2"], variables, monkeypatch)
