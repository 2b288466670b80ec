"""Launchers TRL, LLaMA-Factory and axolotl: Accelerate's settings, in files of programs that train with them.

All train on texts that are packed to the length of a sequence, TRL and LLaMA-Factory also on pairs (``ALIGNED``).
Their files are read by ``accelerate.trainers``.

Source: trl 1.16.0, scripts/sft.py, scripts/dpo.py, trainer/sft_config.py and trainer/dpo_config.py; llamafactory
0.9.5, launcher.py, hparams and data/parser.py;
axolotl 0.21.0, cli/train.py, loaders/model.py, utils/distributed.py and utils/schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milpplan.launchers.accelerate.launch_files import (
    ACCELERATE,
    CHECKPOINTING,
    SHARDED,
    STAGE,
    F,
    P,
    configuration,
    script,
    syncs,
    trainer_flags,
)
from milpplan.launchers.accelerate.launcher import trainer_launcher
from milpplan.launchers.accelerate.trainers import AXOLOTL
from milpplan.launchers.capabilities import Limit
from milpplan.launchers.records import PACKED, ConfigLaunch
from milpplan.launchers.scripts import HERE, defaults, header, torchrun_script
from milpplan.launchers.settings import yaml_text
from milpplan.problem import Problem

_TRL_DATA = {
    "sft": ("trl-lib/Capybara", "--packing true --packing_strategy wrapped"),
    "dpo": ("trl-lib/ultrafeedback_binarized", "--precompute_ref_log_probs true"),
}
"""Public data, and the flags on them, by what TRL trains by; pairs are not packed."""


def _trl_files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    flags = trainer_flags(launch.settings, block_size="max_length")
    stage = launch.settings.get(STAGE, "sft")
    data, own = _TRL_DATA[stage]
    program = [
        f"-m trl.scripts.{stage}",
        flags,
        f"{own} --bf16 true --dtype float32",
        f"{CHECKPOINTING} {str(CHECKPOINTING in launch.settings).lower()}",
        '--model_name_or_path "$MODEL" --dataset_name "$DATASET" --max_steps 100',
    ]
    text = script(launch, version, program, DATASET=data)
    return {"trl.sh": text, "accelerate.yaml": yaml_text(configuration(launch))}


_FACTORY_DATA = {
    "sft": ("llamafactory/alpaca_en", "ONLINE", "--packing true"),
    "dpo": ("dpo_en_demo", "data", "--pref_loss sigmoid"),
}
"""Public data, the folder that describes them (ONLINE: none), and the flags on them, by LLaMA-Factory's stage."""


def _factory_files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    flags = trainer_flags(launch.settings, block_size="cutoff_len")
    off = str(CHECKPOINTING not in launch.settings).lower()
    stage = launch.settings.get(STAGE, "sft")
    data, folder, own = _FACTORY_DATA[stage]
    program = [
        "-m llamafactory.launcher",
        flags,
        f"{own} --neat_packing false --bf16 true --flash_attn sdpa",
        f"--disable_gradient_checkpointing {off}",
        f'--stage {stage} --finetuning_type full --do_train true --model_name_or_path "$MODEL"',
        '--dataset "$DATASET" --dataset_dir "$DATASET_DIR" --template default --max_steps 100',
    ]
    text = script(launch, version, program, DATASET=data, DATASET_DIR=folder)
    return {"llama-factory.sh": text, "accelerate.yaml": yaml_text(configuration(launch))}


_AXOLOTL_NAMES: Mapping[str, str] = {
    **{own: name for name, own in AXOLOTL.renamed.items() if own.startswith(P)},
    **{f"{F}{name}": f"fsdp_config.{name}" for name in (
        "auto_wrap_policy", "reshard_after_forward", "activation_checkpointing", "offload_params")},
    f"{F}version": "fsdp_version",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "per_device_train_batch_size": "micro_batch_size",
    "block_size": "sequence_len",
}  # fmt: skip
"""Names of axolotl's YAML by Accelerate's settings and the trainer's."""
_AXOLOTL_HEAD = """base_model: MODEL
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sample_packing: true
pad_to_sequence_len: true
bf16: true
attn_implementation: flash_attention_2
optimizer: adamw_torch_fused
learning_rate: 1.0e-5
max_steps: 100
output_dir: output
"""


def _axolotl_files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    settings = {name: launch.settings[key] for key, name in _AXOLOTL_NAMES.items() if key in launch.settings}
    if syncs(launch.settings):
        settings["accelerator_config.gradient_accumulation_kwargs.sync_each_batch"] = True
    head = "\n".join(header(launch, version))
    program = ("-m axolotl.cli.train", '"$HERE/axolotl.yaml" --base_model "$MODEL"')
    return {
        "axolotl.yaml": f"{head}\n{_AXOLOTL_HEAD}{yaml_text(settings)}",
        "axolotl.sh": torchrun_script(launch, version, program, (HERE, *defaults(MODEL="."))),
    }


def _trl_limits(problem: Problem) -> Mapping[str, Limit]:
    """Return the limits of training on pairs."""
    why = "its DPO adds up the log-probabilities of a rank's own tokens (trainer/dpo_trainer.py, _compute_loss)"
    return {} if problem.job.alignment is None else {"cp": Limit((1,), why)}


TRL = trainer_launcher(
    replace(ACCELERATE, name="TRL", versions=("1.16.0",), more_limits=_trl_limits), _trl_files, (PACKED,)
)
"""Launcher TRL: ``trl.scripts.sft`` of all weights on packed sequences, ``trl.scripts.dpo`` on pairs."""
LLAMA_FACTORY = trainer_launcher(
    replace(
        ACCELERATE,
        name="LLaMA-Factory",
        versions=("0.9.5",),
        limits={**ACCELERATE.limits, "cp": Limit((1,), "its data are not cut for context parallelism")},
    ),
    _factory_files,
    (PACKED,),
)
"""Launcher LLaMA-Factory: training of all weights on packed sequences, or on pairs (DPO)."""
AXOLOTL_LAUNCHER = trainer_launcher(
    replace(
        SHARDED,
        name="axolotl",
        versions=("0.21.0",),
        limits={
            **SHARDED.limits,
            "cp": Limit((1,), "its context parallelism is that of ring-flash-attention, which is not priced"),
            "zero_stage": Limit((3, 2), "without FSDP its weights, states included, are in bf16"),
        },
    ),
    _axolotl_files,
    (PACKED, "MODEL is what the script trains; in the YAML it stands for it."),
)
"""Launcher axolotl: training of all weights on packed sequences, with FSDP2."""
