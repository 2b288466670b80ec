"""Which framework a run has: told by its source, by a name in the record, or by what it shards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from milpplan.validation import compare_run
from milpplan.validation.runs import Run, framework_of
from tests.validation.cases import record, shipped_runs


def run_of(**changes: Any) -> Run:
    """A complete run of a source that nobody knows, with changes."""
    return Run.model_validate_json(json.dumps(record(**({"group": "a-new-source"} | changes))), strict=True)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"framework": "Megatron-LM 0.12"}, "Megatron-LM"),
        ({"framework": "Megatron-LM (2021)"}, "Megatron-LM of 2021"),
        ({"framework": "Megatron-LM v2.5"}, "Megatron-LM of 2021"),
        ({"framework": "NeMo 2.0"}, "NeMo"),
        ({"framework": "Megatron Bridge"}, "Megatron Bridge"),
        ({"framework": "megatron_deepspeed"}, "Megatron-DeepSpeed"),
        ({"framework": "DeepSpeed ZeRO-3"}, "DeepSpeed"),
        ({"framework": "PyTorch FSDP2"}, "PyTorch FSDP"),
        ({"group": "team-torchtitan-2025"}, "torchtitan"),
        ({"id": "nanotron-run-17"}, "nanotron"),
        ({"url": "https://github.com/mosaicml/llm-foundry/blob/main/README.md"}, "MosaicML Composer with FSDP"),
        ({"parallel__extra": {"framework": "PaddleNLP"}}, "PaddleNLP"),
        ({"parallel__extra": {"framework": 7}}, "an unknown framework, taken as Megatron-LM"),
        ({"model__name": "nemotron"}, "an unknown framework, taken as Megatron-LM"),
        ({"source": "Table 3 of the Nemotron report"}, "an unknown framework, taken as Megatron-LM"),
        ({"parallel__fsdp": True}, "an unknown framework that shards states, taken as PyTorch FSDP"),
        ({"parallel__zero": 3}, "an unknown framework that shards states, taken as PyTorch FSDP"),
    ],
)
def test_an_unknown_source_is_recognised(changes: dict[str, Any], name: str) -> None:
    """By the record's framework, else by a whole word of its names, else by what it shards."""
    assert framework_of(run_of(**changes)).name == name


def test_experts_of_an_unknown_source_share_tensor_parallelism() -> None:
    """Megatron-LM's default; sources that are known say how their experts are split."""
    assert framework_of(run_of(framework="Megatron-Core")).experts_share_tp
    assert framework_of(run_of(framework="NeMo")).experts_share_tp
    assert not framework_of(run_of(group="nemo-docs")).experts_share_tp


def test_what_the_record_says_counts_before_its_source() -> None:
    """A known source that names another framework for a run has that one's habits."""
    assert framework_of(run_of(group="llm-foundry")).name == "MosaicML Composer with FSDP"
    assert framework_of(run_of(group="llm-foundry", framework="torchtitan")).name == "torchtitan"
    assert framework_of(run_of(group="llm-foundry", framework="ours")).name == "MosaicML Composer with FSDP"


def test_an_unknown_framework_is_told() -> None:
    """Whose habits it was given is among the run's assumptions."""
    sharded = run_of(parallel__fsdp=True, parallel__zero=3, parallel__pp=1, parallel__dp=8)
    for run in (run_of(), sharded):
        told = compare_run(run).statement.assumptions
        assert any("'a-new-source' belongs to an unknown framework" in text for text in told)


def test_shipped_sources_keep_their_frameworks() -> None:
    """None is unknown; a source of several frameworks names them with its runs."""
    for run in shipped_runs().runs:
        assert "unknown" not in framework_of(run).name
