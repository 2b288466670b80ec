"""TRL's, LLaMA-Factory's and axolotl's own parsers take what is exported. ``.ci/frameworks trl`` (or
``llama-factory``, ``axolotl``) runs it, with the program's name in ``FRAMEWORK``."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from milpplan.launchers import TARGETS
from tests.frameworks.jobs import Case, aligned_cases, all_cases, all_full, best_cases, started

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

NAME = os.environ.get("FRAMEWORK", "trl")
VERSION = TARGETS[NAME].capability.versions[0]
PACKAGE = {"llama-factory": "llamafactory"}.get(NAME, NAME)


def program_words(case: Case, folder: Path) -> list[str]:
    """The program and its words, after Accelerate's own parser has taken the command."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    place = case.written(folder)
    words, _ = started(place, f"{NAME}.sh", "accelerate", CONFIG=str(place / "written.yaml"), TMPDIR=str(place))
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[1:]))
    assert args.use_fsdp
    assert args.module
    said: list[str] = [args.training_script, *args.training_script_args]
    # Without it the parsers refuse bf16 on a machine that has none.
    return [*said, "--use_cpu", "true"]


def stage(case: Case) -> str:
    """What the program trains by, in TRL's and LLaMA-Factory's words."""
    alignment = case.problem.job.alignment
    return "sft" if alignment is None else alignment.method


def of_trl(case: Case, folder: Path) -> dict[str, Any]:
    """Numbers as TRL's parser reads them."""
    program, *words = program_words(case, folder)
    assert program == f"trl.scripts.{stage(case)}"
    parser = import_module(program).make_parser()
    _, training, model, _ = parser.parse_args_and_config(args=words, fail_with_unknown_args=True)
    assert model.dtype == "float32"
    if stage(case) == "sft":
        assert (training.packing, training.packing_strategy) == (True, "wrapped")
    else:
        assert (training.precompute_ref_log_probs, training.loss_type) == (True, ["sigmoid"])
    return {
        "micro": training.per_device_train_batch_size,
        "steps": training.gradient_accumulation_steps,
        "length": training.max_length,
        "again": training.gradient_checkpointing,
    }


def of_llama_factory(case: Case, folder: Path) -> dict[str, Any]:
    """Numbers as LLaMA-Factory's parser reads them; it keeps one token of the length of packed sequences."""
    from llamafactory.hparams.parser import _parse_train_args

    program, *words = program_words(case, folder)
    assert program == "llamafactory.launcher"
    model, data, training, tuning, _ = _parse_train_args(words)
    packed = stage(case) == "sft"
    assert (bool(data.packing), data.neat_packing, tuning.finetuning_type) == (packed, False, "full")
    assert (tuning.stage, tuning.use_ref_model) == (stage(case), not packed)
    return {
        "micro": training.per_device_train_batch_size,
        "steps": training.gradient_accumulation_steps,
        "length": data.cutoff_len + packed,
        "again": not model.disable_gradient_checkpointing,
    }


def of_axolotl(case: Case, folder: Path) -> dict[str, Any]:
    """Numbers as axolotl's schema reads them, whose sizes make the number of processes."""
    from axolotl.utils.distributed import _get_parallel_config_kwargs
    from axolotl.utils.schemas.config import AxolotlInputConfig

    place, layout = case.written(folder), case.plan.layout
    words, _ = started(place, "axolotl.sh", "torchrun")
    assert words[words.index("-m") + 1 : words.index("-m") + 3] == [
        "axolotl.cli.train",
        str(place / "axolotl.yaml"),
    ]
    config = AxolotlInputConfig(**yaml.safe_load((place / "axolotl.yaml").read_text(encoding="utf-8")))
    sizes = _get_parallel_config_kwargs(
        layout.num_gpus, config.tensor_parallel_size or 1, config.context_parallel_size or 1,
        config.dp_shard_size, config.dp_replicate_size, True,
    )  # fmt: skip
    shards = layout.dp // layout.dp_replicate
    expected = {"tp_size": layout.tp, "dp_shard_size": shards, "dp_replicate_size": layout.dp_replicate}
    assert sizes == {name: size for name, size in expected.items() if size > 1}
    assert config.fsdp_config.reshard_after_forward == (layout.zero_stage == 3)
    assert config.fsdp_config.activation_checkpointing == all_full(case)
    return {
        "micro": config.micro_batch_size,
        "steps": config.gradient_accumulation_steps,
        "length": config.sequence_len,
        "again": bool(config.gradient_checkpointing),
    }


ON_PAIRS = {"trl": ("dpo", "none"), "llama-factory": ("dpo", "frozen")}
"""How programs train on pairs."""
READ = {"trl": of_trl, "llama-factory": of_llama_factory, "axolotl": of_axolotl}[NAME]


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names."""
    assert version(PACKAGE) == VERSION


def test_its_parser_takes_every_file(tmp_path: Path) -> None:
    """Batch, accumulation and length of best and of drawn plans arrive; FSDP recomputes, not the program."""
    cases = [
        *all_cases(NAME, VERSION, each=2),
        *(aligned_cases(NAME, VERSION, *ON_PAIRS[NAME]) if NAME in ON_PAIRS else ()),
    ]
    assert len(cases) > 10
    for case in cases:
        layout = case.plan.layout
        expected = {
            "micro": layout.micro_batch_size // case.problem.job.sequences_together,
            "steps": layout.num_micro_batches,
            "length": case.problem.job.sequence_length,
            "again": False,
        }
        assert READ(case, tmp_path) == expected, case.title


def test_a_number_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    """The checks are the program's, and can fail: a length in words."""
    case = best_cases(NAME, VERSION)[0]
    length = str(case.problem.job.sequence_length)
    changed = {name: text.replace(f" {length}", " many") for name, text in case.files.items()}
    assert changed != case.files
    with pytest.raises((ValueError, SystemExit)):
        READ(Case("changed", case.problem, case.plan, case.launch, changed), tmp_path)
