"""Accelerate and its trainers: the program, the flags of the command and of the trainer, and plain FSDP 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import Imported, ImportRequest
from milpplan.launchers.accelerate.launcher import LAUNCHER, PROGRAMS, imported
from milpplan.problem import Lora
from tests.simulation.cases import shipped_hardware, shipped_model

YAML = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
"""FSDP 2 as TRL's examples configure it."""
COMMAND = (
    "accelerate launch --config_file fsdp.yaml train_sft.py --model_name_or_path meta-llama/Llama-3.1-8B "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --block_size 8192"
)


def script(command: str = COMMAND, configuration: str = YAML) -> str:
    """A script that writes its configuration and starts the trainer."""
    return f"cat > fsdp.yaml <<'YAML'\n{configuration}YAML\n{command}\n"


def read(text: str, **more: Any) -> Imported:
    """Import a script."""
    more = {"model": shipped_model("llama3-8b")} | more
    return imported(ImportRequest(text, "run.sh", shipped_hardware("dgx-h100"), **more))


def test_fsdp_without_a_parallelism_config_shards_over_all_processes() -> None:
    """Accelerate builds no device mesh, and FSDP takes the whole job: ZeRO 3 on eight GPUs, as with dp_shard 8."""
    found = read(script())
    layout = found.plan.layout
    assert (layout.dp, layout.zero_stage, layout.micro_batch_size, layout.global_batch_size) == (8, 3, 1, 32)
    assert found.plan.virtual_stages[0].recompute.full == 32
    assert (found.problem.job.sequence_length, found.ignored_flags) == (8192, ())
    sizes = "parallelism_config:\n  parallelism_config_dp_shard_size: 8\n"
    assert read(script(configuration=YAML + sizes)).plan == found.plan
    with pytest.raises(IllegalPlanError, match="dp_shard 4"):
        read(script(configuration=YAML + sizes.replace("8", "4")))


NUMBERS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "block_size": 8192}


def read_yaml(configuration: str, given: dict[str, Any]) -> Imported:
    """Import a YAML alone, with numbers of the trainer."""
    model, hardware = shipped_model("llama3-8b"), shipped_hardware("dgx-h100")
    return imported(ImportRequest(configuration, "fsdp.yaml", hardware, model=model, given=given))


def test_context_parallel_ranks_gather_by_default() -> None:
    """PyTorch gathers all keys and values unless the ring is asked for; no export writes the gather."""
    sizes = "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_cp_size: 4\n"
    name = "  parallelism_config_cp_comm_strategy: "
    found = {word: read(script(configuration=YAML + sizes + (word and name + word + "\n")))
             for word in ("", "allgather", "alltoall")}  # fmt: skip
    assert found[""] == found["allgather"]
    assert found[""].plan == found["alltoall"].plan
    gathers = {word: read_in.problem.hardware.software.gathered_keys for word, read_in in found.items()}
    assert gathers == {"": True, "allgather": True, "alltoall": False}
    with pytest.raises(IllegalPlanError, match="gathered keys and values"):
        LAUNCHER.export(found[""].problem, found[""].plan, "1.15.0")
    with pytest.raises(InvalidInputError, match="cp_comm_strategy"):
        read(script(configuration=f"{YAML}{sizes}{name}broadcast\n"))


def test_a_yaml_alone_takes_the_numbers_of_the_trainer() -> None:
    """Without them the message asks for the options that state them; they win over a script's flags."""
    assert read_yaml(YAML, NUMBERS).plan == read(script()).plan
    with pytest.raises(InvalidInputError, match="--micro-batch, --accumulation and --seq-len"):
        read_yaml(YAML, {})
    assert read(script(), given={"gradient_accumulation_steps": 2}).plan.layout.global_batch_size == 16


FSDP1 = """distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: bf16
num_processes: 8
"""


def test_fsdp_1_shards_by_its_strategy() -> None:
    """FULL_SHARD is ZeRO 3 and SHARD_GRAD_OP ZeRO 2, also under the newer name; others are refused by name."""
    assert read_yaml(FSDP1, NUMBERS).plan.layout.zero_stage == 3
    two = FSDP1.replace("FULL_SHARD", "SHARD_GRAD_OP")
    single = NUMBERS | {"gradient_accumulation_steps": 1}
    assert read_yaml(two, single).plan.layout.zero_stage == 2
    renamed = two.replace("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    assert read_yaml(renamed, single).plan.layout.zero_stage == 2
    for old, new in (("FULL_SHARD", "HYBRID_SHARD"), ("FULL_SHARD", "true"), ("BACKWARD_PRE", "BACKWARD_POST")):
        with pytest.raises(InvalidInputError, match="fsdp_config"):
            read_yaml(FSDP1.replace(old, new), NUMBERS)


UNDER = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_processes: 8
"""


def test_deepspeed_under_accelerate_is_a_run_of_deepspeed() -> None:
    """The section gives the stage and the accumulation; offloading, a file that is not there and a contradiction
    do not pass."""
    numbers = {name: value for name, value in NUMBERS.items() if name != "gradient_accumulation_steps"}
    layout = read_yaml(UNDER, numbers).plan.layout
    assert (layout.dp, layout.zero_stage, layout.global_batch_size) == (8, 3, 32)
    for old, new, word in (
        ("_device: none", "_device: cpu", "offload_optimizer"),
        ("zero_stage: 3", "deepspeed_config_file: ds.json", "ds.json"),
        ("mixed_precision: bf16", "mixed_precision: fp16", "mixed_precision"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            read_yaml(UNDER.replace(old, new), numbers)
    with pytest.raises(InvalidInputError, match="trainer has another number"):
        read(script(COMMAND.replace("_steps 4", "_steps 8"), UNDER))


def test_ranks_that_share_a_sequence_under_deepspeed_exchange_heads() -> None:
    """Two ranks a sequence: half as many replicas, shards over all ranks, gradients sent in fp32; without them
    nothing changes, and degrees that do not make the processes are refused."""
    section = "parallelism_config_dp_shard_size: 4\n  parallelism_config_sp_size: 2\n"
    text = f"{UNDER}parallelism_config:\n  {section}"
    numbers = {name: value for name, value in NUMBERS.items() if name != "gradient_accumulation_steps"}
    found, whole = read_yaml(text, numbers), read_yaml(UNDER, numbers)
    layout = found.plan.layout
    assert (layout.dp, layout.cp, layout.ulysses, layout.zero_stage) == (4, 2, 2, 3)
    assert layout.num_micro_batches == whole.plan.layout.num_micro_batches
    assert layout.global_batch_size * 2 == whole.plan.layout.global_batch_size
    software = whole.problem.hardware.software
    assert found.problem.hardware.software == software.model_copy(update={"reduced_gradient_bytes": 4.0})
    with pytest.raises(InvalidInputError, match="sp_size 2 and dp_shard_size 2"):
        read_yaml(text.replace("shard_size: 4", "shard_size: 2"), numbers)


LORA = "--use_peft --lora_r 16 --lora_dropout 0 --lora_target_modules q_proj v_proj --dtype bfloat16"


def test_adapters_are_read() -> None:
    """Named matrices have adapters beside frozen weights in bf16; all-linear names all matrices of the layers."""
    adapted = read(script(f"{COMMAND} {LORA}", UNDER))
    plain = read(script(COMMAND, UNDER))
    assert adapted.plan == plain.plan
    assert adapted.problem.job == plain.problem.job.model_copy(update={"lora": Lora(rank=16)})
    every = read(script(f"{COMMAND} {LORA.replace('q_proj v_proj', 'all-linear')}", UNDER))
    assert every.problem.job.lora is not None
    assert every.problem.job.lora.modules == shipped_model("llama3-8b").linear_modules


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("--lora_dropout 0", "", "lora_dropout is None"),
        ("--lora_dropout 0", "--lora_dropout 0.05", "lora_dropout is 0.05"),
        ("--lora_r 16", "", "lora_r"),
        ("q_proj v_proj", "q_proj", "lora_target_modules"),
        ("q_proj v_proj", "q_proj qkv_proj", "qkv_proj"),
        ("--use_peft", "--use_peft --lora_modules_to_save lm_head", "lora_modules_to_save"),
        ("--use_peft", "--use_peft --load_in_4bit", "load_in_4bit"),
    ],
)
def test_adapters_that_are_not_priced_are_refused_by_name(old: str, new: str, word: str) -> None:
    """Dropout, which is the default, matrices of other names, other trained weights, quantised weights."""
    with pytest.raises(InvalidInputError, match=word):
        read(script(f"{COMMAND} {LORA.replace(old, new)}", UNDER))


def test_adapters_beside_weights_that_fsdp_shards_are_refused() -> None:
    """FSDP keeps frozen weights in fp32."""
    with pytest.raises(InvalidInputError, match="use_peft is true beside 'FSDP'"):
        read(script(f"{COMMAND} {LORA}"))


def test_the_trainers_format_wins() -> None:
    """The trainer's bf16 replaces the mixed precision of the configuration."""
    without = YAML.replace("mixed_precision: bf16\n", "")
    assert without != YAML
    assert read_yaml(without, {**NUMBERS, "bf16": True}).plan == read_yaml(YAML, NUMBERS).plan
    with pytest.raises(InvalidInputError, match="mixed_precision"):
        read_yaml(without, NUMBERS)


def test_every_flag_of_lora_is_refused_by_name() -> None:
    """LoRA, quantised weights and another length change the cost: all are named, all can be ignored, and the
    answer says which were."""
    flags = ["use_peft", "lora_r", "load_in_4bit"]
    text = script(f"{COMMAND} --use_peft --lora_r 16 --load_in_4bit --max_length 2048")
    with pytest.raises(InvalidInputError, match="lora_r = 16, load_in_4bit = True"):
        read(text, ignored=["use_peft"])
    with pytest.raises(InvalidInputError, match="block_size 8192 and max_length 2048"):
        read(text, ignored=flags)
    found = read(text, ignored=[*flags, "--max_length"])
    assert found.ignored_flags == (
        "use_peft = True", "lora_r = 16", "load_in_4bit = True", "max_length = 2048"
    )  # fmt: skip
    assert found.plan == read(script()).plan


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--load_in_8bit", "load_in_8bit"),
        ("--lora_target_modules all-linear", "lora_target_modules"),
        ("--beta 0.1", "beta"),
        ("--max_prompt_length 512", "max_prompt_length"),
        ("--optim adamw_bnb_8bit", "optim"),
        ("--optim adafactor", "optim"),
        ("--fp16", "fp16"),
        ("--bf16 false", "bf16"),
        ("--tf32 true", "tf32"),
        ("--torch_compile", "torch_compile"),
        ("--use_liger_kernel true", "use_liger_kernel"),
        ("--attn_implementation eager", "attn_implementation"),
        ("--deepspeed ds.json", "deepspeed"),
        ("--fsdp 'full_shard auto_wrap'", "fsdp"),
        ("--padding_free", "padding_free"),
        ("--activation_offloading", "activation_offloading"),
        ("--auto_find_batch_size", "auto_find_batch_size"),
        ("--neftune_noise_alpha 5", "neftune_noise_alpha"),
        ("--label_smoothing_factor 0.1", "label_smoothing_factor"),
        ("--config_overrides n_layer=2", "config_overrides"),
        ("--gradient_checkpointing", "gradient_checkpointing"),
        ("--activation_checkpointing true", "gradient_checkpointing"),
        ("--accelerator_config '{\"split_batches\": true}'", "split_batches"),
        ("--loss_type dft", "loss_type"),
        ("--no_such_flag 3", "no_such_flag"),
        ("--max_steps many", "max_steps"),
        ("--learning_rate '[1]'", "learning_rate"),
        ("--learning_rate nan", "learning_rate"),
        ("--do_train ''", "do_train"),
        ("--seed 1 2", "seed"),
        ("recipe.yaml", "recipe.yaml"),
        ('"${ARGS[@]}"', "ARGS"),
        ("--block_size $LENGTH", "block_size"),
    ],
)
def test_flags_that_change_the_cost_are_refused_by_name(flags: str, word: str) -> None:
    """Whatever is not priced, is of another kind, or is known to the running shell alone."""
    with pytest.raises(InvalidInputError, match=word):
        read(
            script(
                COMMAND.replace("train_sft.py", f"train_sft.py {flags}")
                if "rec" in flags
                else f"{COMMAND} {flags}"
            )
        )


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --do_train --learning-rate 2e-5 --lr_scheduler_type cosine --warmup_ratio 0.1 --max_steps 100",
        '--output_dir $OUT --run_name "run of $(date)" --report_to wandb tensorboard --logging_steps 1',
        "--optim adamw_torch --adam_beta2 0.95 --weight_decay 0.1 --max_grad_norm 1.0 --seed 7",
        "--dataset_name wikitext --dataset_num_proc 8 --dataloader_num_workers 4 --no_remove_unused_columns",
        "--lr_scheduler_kwargs '{\"num_cycles\": 1}'",
        "--torch_dtype bfloat16 --attn_implementation flash_attention_2 --packing --max_length 8192",
        "--gradient_checkpointing false --use_peft false --torch_compile false --use_liger_kernel False",
        "--gradient_checkpointing_kwargs '{\"use_reentrant\": false}' --ddp_timeout 7200 --max_steps $STEPS",
        '--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'',
    ],
)
def test_flags_without_effect_change_nothing(flags: str) -> None:
    """Names, data, learning rates and records, and flags at what they are anyway."""
    assert read(script(f"{COMMAND} {flags}")).plan == read(script()).plan


def test_a_value_that_only_the_shell_knows_can_be_ignored() -> None:
    """Where it changes nothing it is no matter; elsewhere it is named; --ignore takes either."""
    text = script(f"{COMMAND} --output_dir $OUT --optim $OPTIM")
    with pytest.raises(InvalidInputError, match=r"optim is \$OPTIM"):
        read(text)
    found = read(text.replace(" --optim $OPTIM", " --max_steps $STEPS"), ignored=["output_dir"])
    assert found.ignored_flags == ("output_dir = $OUT, which only the running shell knows",)
    assert read(text.replace("optim", "no_such"), ignored=["no_such"]).plan == found.plan


def test_the_program_decides() -> None:
    """Known programs train all weights on the next token; another one must be declared, and the answer says so."""
    for name in PROGRAMS:
        start = f"-m {name}" if "." in name and not name.endswith(".py") else f"examples/scripts/{name}"
        text = script(f"{COMMAND.replace('train_sft.py', start)} --gradient_checkpointing false")
        assert read(text).plan == read(script()).plan
    for name in ("dpo.py", "train_grpo.py", "run_mlm.py", "reward_modeling.py", "my_own.py"):
        text = script(COMMAND.replace("train_sft.py", f"src/{name}"))
        with pytest.raises(InvalidInputError, match=name):
            read(text)
        found = read(text, ignored=[name])
        assert found.plan == read(script()).plan
        assert found.ignored_flags == (f"{name} (what it does besides its flags)",)
    with pytest.raises(InvalidInputError, match="depends on the release of TRL"):
        read(script(COMMAND.replace("train_sft.py", "sft.py")))


def test_the_commands_own_flags_count() -> None:
    """What stands before the program replaces what the YAML says; what is not known there is refused."""
    found = read(
        script(COMMAND.replace("fsdp.yaml train", "fsdp.yaml --num_processes 16 --machine_rank $R train"))
    )
    assert (found.plan.layout.dp, found.plan.layout.global_batch_size) == (16, 64)
    assert (
        read(script(COMMAND.replace("fsdp.yaml train", "fsdp.yaml --use_fsdp train"))).plan == read(script()).plan
    )
    sharded = COMMAND.replace("fsdp.yaml train", "fsdp.yaml --fsdp_reshard_after_forward false train")
    with pytest.raises(MilpplanError):
        read(script(sharded.replace("steps 4", "steps x")))
    assert read(script(sharded.replace("steps 4", "steps 1"))).plan.layout.zero_stage == 2
    with pytest.raises(IllegalPlanError, match="micro-batch"):
        read(script(sharded))
    for flags, word in (
        ("--mixed_precision fp16", "mixed_precision"),
        ("--use_deepspeed", "use_deepspeed"),
        ("--multi_gpu", "multi_gpu"),
        ("--use_fsdp --multi_gpu", "multi_gpu"),
        ("--dynamo_backend inductor", "dynamo_backend"),
        ("--no_such 1", "no_such"),
        ("--num_processes $N", "num_processes"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            read(script(COMMAND.replace("fsdp.yaml train", f"fsdp.yaml {flags} train")))


def test_the_configuration_is_that_of_the_command() -> None:
    """Of several here documents the named one counts; a command that takes another file, or none, is refused."""
    other = YAML.replace("num_processes: 8", "num_processes: 4")
    both = f"cat > other.yaml <<'YAML'\n{other}YAML\n{script()}"
    assert read(both).plan == read(script()).plan
    assert read(both.replace("--config_file fsdp.yaml", "--config_file other.yaml")).plan.layout.dp == 4
    for text in (
        both.replace("--config_file fsdp.yaml", ""),
        script().replace("--config_file fsdp.yaml", "--config_file elsewhere.yaml"),
        COMMAND,
        script().replace("accelerate launch --config_file fsdp.yaml", "torchrun"),
        script() + COMMAND.replace("steps 4", "steps 8"),
    ):
        with pytest.raises(InvalidInputError):
            read(text)
    named = (
        script()
        .replace("> fsdp.yaml", '> "$CONFIG"')
        .replace("--config_file fsdp.yaml", '--config_file "$CONFIG"')
    )
    assert read(named).plan == read(script()).plan


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("fsdp_version: 2", "fsdp_version: 1", "sharding_strategy"),
        ("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", "", "auto_wrap_policy"),
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "auto_wrap_policy"),
        ("num_processes: 8\n", "", "num_processes"),
        ("num_processes: 8", "num_processes: [8]", "num_processes"),
        ("mixed_precision: bf16", "mixed_precision: null", "mixed_precision"),
        ("mixed_precision: bf16", "mixed_precision: bf16\ndynamo_config:\n  dynamo_backend: INDUCTOR", "dynamo"),
        ("mixed_precision: bf16", "mixed_precision: bf16\nfp8_config:\n  backend: TE", "fp8_config"),
        ("FSDP\n", "MEGATRON_LM\n", "distributed_type"),
        ("offload_params: false", "offload_params: true", "offload_params"),
        ("fsdp_version: 2", "fsdp_version: 2\n  fsdp_no_such: 1", "no_such"),
        ("fsdp_version: 2", "fsdp_version: 2\n  no_such: 1", "no_such"),
        ("mixed_precision: bf16", "mixed_precision: bf16\nfsdp_version: 2", "fsdp_version"),
    ],
)
def test_settings_that_are_not_priced_are_refused_by_name(old: str, new: str, word: str) -> None:
    """Other sharding than that of whole layers, other formats, and settings that Accelerate does not have."""
    assert old in YAML
    with pytest.raises(InvalidInputError, match=word):
        read(script(configuration=YAML.replace(old, new)))


def test_names_without_the_prefix_of_their_section_are_read() -> None:
    """Accelerate takes fsdp_config.version for fsdp_config.fsdp_version; either name can be ignored."""
    text = script(configuration=YAML.replace("  fsdp_", "  "))
    assert read(text).plan == read(script()).plan
    strange = script(configuration=YAML.replace("fsdp_version: 2", "fsdp_version: 2\n  no_such: 1"))
    assert read(strange, ignored=["fsdp_config.no_such"]).ignored_flags == ("fsdp_config.fsdp_no_such = 1",)


def test_what_accelerate_config_writes_is_read() -> None:
    """The questionnaire's other lines change nothing."""
    lines = """debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
    layers = "fsdp_version: 2\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"
    assert read(script(configuration=YAML.replace("fsdp_version: 2", layers) + lines)).plan == read(script()).plan


def test_a_command_of_endless_words_is_refused() -> None:
    """No command has ten thousand words."""
    with pytest.raises(InvalidInputError, match="50,0"):
        read(script(COMMAND + " y" * 50_000))


def test_what_the_user_should_know_is_told() -> None:
    """Accumulated gradients that are reduced once a step, and lengths that are only the longest."""
    assert any("sync_each_batch" in note for note in read(script()).notes)
    text = script(COMMAND.replace("--block_size", "--max_length"))
    found = read(text)
    assert found.problem.job.sequence_length == 8192
    assert any("max_length" in note for note in found.notes)
    assert not any("max_length" in note for note in read(text.replace("8192\n", "8192 --packing\n")).notes)


def test_a_sourced_file_beside_the_script_is_read(tmp_path: Path) -> None:
    """What a script sources counts as if it stood there."""
    (tmp_path / "sizes.sh").write_text("LENGTH=8192\n")
    file = tmp_path / "run.sh"
    file.write_text("source sizes.sh\n" + script(COMMAND.replace("8192", "$LENGTH")))
    found = imported(
        ImportRequest(file.read_text(), str(file), shipped_hardware("dgx-h100"), model=shipped_model("llama3-8b"))
    )
    assert (found.problem, found.plan) == (read(script()).problem, read(script()).plan)
