"""Accelerate's own code reads what is exported: parser and checks of ``accelerate launch``, the variables that it
hands to every process, and the records that a process makes of them. ``.ci/frameworks accelerate`` runs it."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milpplan import Layout
from milpplan.launchers.accelerate.launch_files import ACCELERATE
from tests.frameworks.jobs import (
    TINY,
    Case,
    all_cases,
    all_full,
    best_cases,
    differing,
    started,
    stepped,
    tiny_case,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = ACCELERATE.versions[0]


def launched(case: Case, folder: Path) -> tuple[Any, dict[str, str], list[str]]:
    """The arguments of ``accelerate launch`` after its checks, the variables of the processes, and the words that
    the trainer gets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    place = case.written(folder)
    words, _ = started(place, "accelerate.sh", "accelerate", CONFIG=str(place / "written.yaml"), TMPDIR=str(place))
    assert words[0] == "launch"
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[1:]))
    if case.plan.layout.num_gpus == 1:
        return args, prepare_simple_launcher_cmd_env(args)[1], args.training_script_args
    return args, prepare_multi_gpu_env(args), args.training_script_args


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names."""
    assert version("accelerate") == VERSION


def test_its_launch_takes_every_script(tmp_path: Path) -> None:
    """The best plans of the ten jobs and drawn ones: processes, machines, precision and kind arrive, and the YAML
    beside the script says what the one in it does."""
    cases = all_cases("accelerate", VERSION)
    assert len(best_cases("accelerate", VERSION)) == 10
    assert len(cases) > 40
    for case in cases:
        args, _, _ = launched(case, tmp_path)
        place = Path(args.config_file).parent
        assert Path(args.config_file).read_text() == (place / "accelerate.yaml").read_text()
        layout = case.plan.layout
        expected = {
            "num_processes": layout.num_gpus,
            "num_machines": case.launch.num_nodes,
            "mixed_precision": "bf16",
            "use_fsdp": layout.zero_stage > 0,
            "multi_gpu": layout.zero_stage == 0 and layout.num_gpus > 1,
        }
        assert differing(expected, args) == {}, case.title


def test_its_processes_shard_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variables of a process Accelerate makes the sizes of the plan, and its FSDP 2 with the ZeRO stage
    and the recomputation of the plan; the sizes multiply to the number of processes."""
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    for case in all_cases("accelerate", VERSION):
        layout = case.plan.layout
        _, variables, _ = launched(case, tmp_path)
        if not layout.zero_stage:
            assert variables.get("ACCELERATE_USE_FSDP", "false") == "false", case.title
            continue
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            sizes, sharding = ParallelismConfig(), FullyShardedDataParallelPlugin()
        expected = {"dp_replicate_size": 1, "dp_shard_size": layout.dp, "cp_size": layout.cp, "tp_size": layout.tp}
        assert differing(expected, sizes) == {}, case.title
        assert sizes.total_size == layout.num_gpus
        if layout.cp > 1:
            assert sizes.cp_handler.cp_comm_strategy == "alltoall"
        settings = {
            "fsdp_version": 2,
            "reshard_after_forward": layout.zero_stage == 3,
            "activation_checkpointing": all_full(case),
        }
        assert differing(settings, sharding) == {}, case.title


def test_the_trainer_takes_its_flags(tmp_path: Path) -> None:
    """Transformers' own parser of training arguments reads batch and accumulation as planned."""
    from transformers import HfArgumentParser, TrainingArguments

    for case in best_cases("accelerate", VERSION):
        _, _, words = launched(case, tmp_path)
        at = words.index("--bf16")
        # It refuses bf16 on a machine that has none.
        words = [*words[:at], *words[at + 2 :]]
        read, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            words, return_remaining_strings=True
        )
        layout = case.plan.layout
        expected = {
            "per_device_train_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.num_micro_batches,
            "gradient_checkpointing": layout.zero_stage == 0 and all_full(case),
        }
        assert differing(expected, read) == {}, case.title
        assert rest[rest.index("--block_size") + 1] == str(case.problem.job.sequence_length)


PROGRAM = """import sys
from dataclasses import dataclass
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Words:
    config_name: str
    tokenizer_name: str
    dataset_name: str
    dataset_config_name: str
    block_size: int
# bf16 without a GPU is only for those who ask for the CPU.
parser, said = HfArgumentParser((TrainingArguments, Words)), [*sys.argv[1:], "--use_cpu"]
training, words = parser.parse_args_into_dataclasses(said)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(words.config_name))
tokens = [{"input_ids": list(range(words.block_size)), "labels": list(range(words.block_size))}] * 64
Trainer(model, training, train_dataset=tokens).train()
"""
"""Stand-in for ``run_clm.py``, which needs data from the hub: the same trainer on numbers in order."""
# Accelerate shards on accelerators alone: two processes of a CPU pass for such.
WATCHER = """import json, os, runpy, sys
import torch, transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor
torch.distributed.init_process_group("gloo")
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
trainer, step, forwards = [], AcceleratedOptimizer.step, []
forward = transformers.Trainer.training_step
def counted(self, *words, **more):
    trainer[:] = [self]
    forwards.append(1)
    return forward(self, *words, **more)
def watched(optimizer, *words, **more):
    step(optimizer, *words, **more)
    if not optimizer.gradient_state.sync_gradients:
        return
    model = trainer[0].accelerator.unwrap_model(trainer[0].model)
    parameters = [*model.parameters()]
    blocks = [module for module in model.modules() if "LlamaDecoderLayer" in type(module).__name__]
    states = [block._get_fsdp_state()._fsdp_param_group for block in blocks]
    seen = {
        "kind": str(trainer[0].accelerator.distributed_type), "micro": len(forwards),
        "processes": trainer[0].accelerator.num_processes,
        "shard": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
        "weights": sum(p.numel() for p in parameters), "blocks": len(states),
        "gathers_again": all(state.post_forward_mesh_info is not None for state in states),
        "reduced": sorted({str(state.mp_policy.reduce_dtype) for state in states}),
        "held": str(parameters[0].dtype),
        "recomputes": any("Checkpoint" in type(module).__name__ for module in model.modules()),
    }
    os.write(1, f"STEPPED {json.dumps(seen)}\\n".encode())
    os._exit(0)
transformers.Trainer.training_step, AcceleratedOptimizer.step = counted, watched
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_take_a_step(tmp_path: Path, stage: int) -> None:
    """The script as written trains a tiny model on two processes, sharded, accumulated, recomputed and reduced as
    the plan says. ZeRO 2 has one micro-batch."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    layout = Layout(dp=2, micro_batch_size=1, global_batch_size=2 * (stage - 1), zero_stage=stage, **overlap)
    case = tiny_case("accelerate", VERSION, layout, full=stage == 2)
    place = case.written(tmp_path)
    (place / "run_clm.py").write_text(PROGRAM)
    (place / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    expected = {
        "kind": "DistributedType.FSDP",
        "processes": layout.dp,
        "micro": layout.num_micro_batches,
        "blocks": 2,
        "gathers_again": stage == 3,
        "recomputes": stage == 2,
        "held": "torch.float32",
        "reduced": ["torch.bfloat16"],
    }
    for seen in stepped(place, "accelerate.sh", ("accelerate", "accelerate.commands.accelerate_cli"), WATCHER):
        assert differing(expected, seen) == {}
        assert 2 * seen["shard"] == seen["weights"]
    assert case.problem.hardware.software.reduced_gradient_bytes == 2


def test_it_refuses_sizes_that_do_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are Accelerate's, and can fail: sizes for half of the processes, and sizes without FSDP."""
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    case = next(case for case in best_cases("accelerate", VERSION) if case.plan.layout.zero_stage)
    _, variables, _ = launched(case, tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processes = SimpleNamespace(
        multi_device=True, is_fsdp2=True, num_processes=case.plan.layout.num_gpus, distributed_type="FSDP"
    )
    ParallelismConfig()._validate_accelerator(processes)
    processes.num_processes *= 2
    with pytest.raises(ValueError, match="does not match num_processes"):
        ParallelismConfig()._validate_accelerator(processes)
    with pytest.raises(ValueError, match="fsdp_version=2"):
        _validate_launch_command(launch_command_parser().parse_args(["--use_parallelism_config", "train.py"]))
