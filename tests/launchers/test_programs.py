"""Programs that take Megatron-LM's arguments under other names: each reads as the arguments it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milpplan import simulate
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import TARGETS, ImportRequest, job_files, restrict, target_named
from milpplan.launchers.megatron.launcher import Imported
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Layout, Lora
from tests.amounts import first
from tests.launchers.cases import as_run
from tests.launchers.test_targets import asked, drawn_plan
from tests.simulation.cases import shipped_hardware, shipped_model

NEOX = """{
  "pipe_parallel_size": 2, "model_parallel_size": 2, "num_layers": 24, "hidden_size": 2048,
  "num_attention_heads": 16, "seq_length": 2048, "max_position_embeddings": 2048, "norm": "layernorm",
  "pos_emb": "rotary", "no_weight_tying": true, "attention_config": [[["flash"], 24]],
  "bias_gelu_fusion": true, "layernorm_fusion": true, "rmsnorm_fusion": true, "rope_fusion": true,
  "bias_dropout_fusion": true, "scaled_upper_triang_masked_softmax_fusion": true,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0002}}, "zero_optimization": {"stage": 1, "overlap_comm": True},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "checkpoint_activations": true,
  "hidden_dropout": 0, "attention_dropout": 0, "fp16": {"enabled": true, "loss_scale": 0}, "tensorboard-dir": "x",
}
"""
PRIMUS = """
workspace: ${PRIMUS_WORKSPACE:./output}
modules:
  pre_trainer:
    framework: megatron
    model: ${PRIMUS_MODEL:small}.yaml
    overrides:
      stderr_sink_level: DEBUG
      micro_batch_size: 2
      global_batch_size: 64
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      tensor_model_parallel_size: 2
      sequence_parallel: 1
      overlap_grad_reduce: true
      high_priority_stream_groups: []
      enable_primus_turbo: true
      recompute_granularity: null
"""
PRESETS = {
    "base.yaml": "swiglu: true\nadd_bias_linear: false\nposition_embedding_type: rope\nnormalization: RMSNorm\n"
    "hidden_dropout: 0.0\nattention_dropout: 0.0\nuntie_embeddings_and_output_weights: true\nnum_layers: 2\n",
    "small.yaml": "extends:\n  - base.yaml\nnum_layers: 32\nhidden_size: 4096\nffn_hidden_size: 14336\n"
    "num_attention_heads: 32\ngroup_query_attention: true\nnum_query_groups: 8\nmax_position_embeddings: 8192\n",
}
SWIFT_SCRIPT = """NPROC_PER_NODE=8 \\
megatron sft --model Qwen/Qwen3-32B --dataset 'a/b' --tensor_model_parallel_size 4 --sequence_parallel true \\
    --micro_batch_size 1 --global_batch_size 16 --packing true --max_length 8192 --recompute_granularity full \\
    --recompute_method uniform --recompute_num_layers 1 --finetune true --no_save_optim true --lr 1e-5
"""
SLIME_SCRIPT = """
ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
    --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --vocab-size 128256 \\
    --use-rotary-position-embeddings --untie-embeddings-and-output-weights --hidden-dropout 0 \\
    --attention-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel --attention-backend flash \\
    --rollout-batch-size 32 --n-samples-per-prompt 8 --advantage-estimator grpo --entropy-coef 0.00 \\
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 --cross-entropy-loss-fusion
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-32B
stage: sft
do_train: true
finetuning_type: full
deepspeed: configs/z3.json
dataset: a,b
template: qwen3
cutoff_len: 2048
output_dir: out
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
"""
Z3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
}
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
datasets:
  - path: a/b
    type: alpaca
val_set_size: 0.05
sequence_len: 8192
sample_packing: true
adapter:
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
attn_implementation: flash_attention_2
fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
  activation_checkpointing: true
special_tokens:
"""
TRL = """
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
chat_template: "{{ messages }}"
dataset_mixture:
  datasets:
    - id: a
bf16: true
gradient_accumulation_steps: 4
gradient_checkpointing: true
max_seq_length: 2048
per_device_train_batch_size: 8
learning_rate: 2.0e-05
"""
A = "actor_rollout_ref.actor"
VERL_SCRIPT = f"""
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo data.train_batch_size=512 data.max_prompt_length=1024 \\
    data.max_response_length=3072 {A}.ppo_mini_batch_size=64 {A}.ppo_micro_batch_size_per_gpu=2 \\
    {A}.megatron.tensor_model_parallel_size=2 {A}.megatron.pipeline_model_parallel_size=2 {A}.entropy_coeff=0 \\
    +{A}.megatron.override_transformer_config.recompute_granularity=full \\
    +{A}.megatron.override_transformer_config.recompute_method=uniform \\
    +{A}.megatron.override_transformer_config.recompute_num_layers=1 \\
    {A}.megatron.param_offload=False actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=8 trainer.nnodes=2
"""


MEGATRON_DEEPSPEED = """#SBATCH --nodes=4
STAGE=1
CONFIG="./ds.$SLURM_JOBID.json"
cat <<EOT > $CONFIG
{
  "train_micro_batch_size_per_gpu": 1, "train_batch_size": 64, "gradient_clipping": 1.0,
  "zero_optimization": {"stage": $STAGE}, "fp16": {"enabled": true, "loss_scale_window": 500},
  "steps_per_print": 2000, "wall_clock_breakdown": false
}
EOT
ARGS="--num-layers 30 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 \\
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --fp16 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
    --pp-partition-method 'type:transformer|embedding' \\
    --position-embedding-type alibi --pad-vocab-size-to 250880 --checkpoint-activations --kill-switch-path k"
export RUN="python -m torch.distributed.run --nproc_per_node 8 --nnodes 4"
export CMD="pretrain_gpt.py $ARGS --deepspeed --deepspeed_config $CONFIG --zero-stage $STAGE \\
    --deepspeed-activation-checkpointing"
srun --jobid $SLURM_JOBID bash -c "$RUN --node_rank \\$SLURM_PROCID $CMD"
"""


def read(text: str, source: str = "run.sh", **more: Any) -> Imported:
    """The import of a text, on DGX H100."""
    request = ImportRequest(text, source, shipped_hardware("dgx-h100"), **more)
    return target_named("megatron", "--from").read(request)


def primus(folder: Path, text: str = PRIMUS, **more: Any) -> Imported:
    """The import of an experiment that lies in a copy of Primus with two presets."""
    models = folder / "primus" / "configs" / "models" / "megatron"
    models.mkdir(parents=True, exist_ok=True)
    for name, preset in PRESETS.items():
        (models / name).write_text(preset, encoding="utf-8")
    (folder / "examples").mkdir(exist_ok=True)
    return read(text, str(folder / "examples" / "run.yaml"), num_gpus=8, vocab_size=128256, **more)


def test_gpt_neox_runs_under_deepspeeds_pipeline() -> None:
    """Batches multiply; ZeRO 1 shards, and reduces after the last backward pass even with overlap_comm."""
    found = read(NEOX, "neox.yml", num_gpus=16, vocab_size=50304)
    layout = found.plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch_size) == (2, 2, 4, 4)
    assert (layout.global_batch_size, layout.zero_stage, layout.overlap_grad_reduce) == (128, 1, False)
    assert [stage.recompute.full for stage in found.plan.virtual_stages] == [12, 12]
    model = found.problem.model
    assert (model.num_layers, model.norm, model.tie_word_embeddings) == (24, "layernorm", False)
    assert model.kinds[0].mlp.intermediate_size == 4 * 2048
    assert (found.problem.job.grad_dtype, found.problem.job.attention_kernel) == ("bf16", "flash")
    alone = read(
        NEOX.replace('"pipe_parallel_size": 2', '"pipe_parallel_size": 0'), "n.yml", num_gpus=16, vocab_size=50304
    )
    assert alone.plan.layout.overlap_grad_reduce


def test_gpt_neox_splits_a_gated_width_in_three() -> None:
    """The stated width counts both halves of a gated block, rounded up: 2/3 of 32,768, halved, is 11,008."""
    text = NEOX.replace(
        '"norm"', '"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256, "norm"'
    )
    mlp = read(text, "n.yml", num_gpus=16, vocab_size=50304).problem.model.kinds[0].mlp
    assert (mlp.intermediate_size, mlp.gated) == (11008, True)


def test_gpt_neox_has_biases_of_attention_and_feed_forward_block_apart() -> None:
    """Megatron-LM has one switch for both."""
    text = NEOX.replace('"norm"', '"use_bias_in_attn_linear": false, "norm"')
    layer = read(text, "n.yml", num_gpus=16, vocab_size=50304).problem.model.kinds[0]
    assert (layer.attention.qkv_bias, layer.attention.output_bias, layer.mlp.bias) == (False, False, True)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"norm"', '"gpt_j_residual": true, "norm"', "gpt_j_residual"),
        ('"norm"', '"synchronize_each_layer": true, "norm"', "synchronize_each_layer"),
        ('"norm"', '"partition_activations": true, "norm"', "partition_activations"),
        ('"norm"', '"moe_num_experts": 8, "norm"', "moe_num_experts"),
        ('"norm"', '"something_new": 1, "norm"', "something_new"),
        ('"stage": 1', '"stage": 2', "zero_optimization.stage"),
        ('"Adam"', '"OneBitAdam"', "optimizer.type"),
        ('"flash"', '"sparse_fixed"', "attention_config"),
        ('"seq_length": 2048,', "", "seq_length"),
        ('"train_micro_batch_size_per_gpu": 4,', "", "train_micro_batch_size_per_gpu"),
    ],
)
def test_gpt_neox_settings_that_are_not_priced_are_refused_by_name(old: str, new: str, named: str) -> None:
    """Other layers, other updates, waits in every layer, sizes that are left out."""
    with pytest.raises(InvalidInputError, match=named):
        read(NEOX.replace(old, new), "neox.yml", num_gpus=16, vocab_size=50304)


def test_a_setting_of_gpt_neox_can_be_ignored_or_stated() -> None:
    """The answer names what it leaves out; options state what a file leaves to another."""
    slow = NEOX.replace('"norm"', '"synchronize_each_layer": true, "norm"')
    found = read(slow, "n.yml", num_gpus=16, vocab_size=50304, ignored=("synchronize_each_layer",))
    assert found.ignored_flags == ("synchronize_each_layer = True",)
    plain = read(NEOX, "n.yml", num_gpus=16, vocab_size=50304)
    assert (found.plan, found.problem) == (plain.plan, plain.problem)
    bare = NEOX.replace('"train_micro_batch_size_per_gpu": 4,', "")
    said = read(bare, "n.yml", num_gpus=16, vocab_size=50304, given={"train_micro_batch_size_per_gpu": 4})
    assert said.plan == plain.plan


def test_megatron_deepspeed_runs_under_deepspeeds_pipeline() -> None:
    """Embedding and head count as layers of the partition: 32 in 4 stages; the script writes the configuration."""
    found = read(MEGATRON_DEEPSPEED)
    layout, job, model = found.plan.layout, found.problem.job, found.problem.model
    assert (layout.tp, layout.pp, layout.dp, layout.zero_stage, layout.num_gpus) == (2, 4, 4, 1, 32)
    assert not layout.overlap_grad_reduce
    assert [stage.recompute.full for stage in found.plan.virtual_stages] == [7, 8, 8, 7]
    assert (job.grad_dtype, job.attention_kernel, job.global_batch_size) == ("bf16", "unfused", 64)
    assert (model.vocab_size, model.learned_positions, model.tie_word_embeddings) == (250880, False, True)
    assert read(MEGATRON_DEEPSPEED.replace("STAGE=1", "STAGE=0")).plan.layout.zero_stage == 0
    assert read(MEGATRON_DEEPSPEED.replace("--fp16", "--fp16 --num-experts 1")).problem.model == model


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("STAGE=1", "STAGE=2", "zero_optimization.stage"),
        ("STAGE=1", "", "--set STAGE=VALUE"),
        ('"stage": $STAGE', '"stage": 0', "zero_optimization.stage is 0"),
        ('"stage": $STAGE', '"stage": $STAGE, "offload_optimizer": {"device": "cpu"}', "offload_optimizer"),
        ('"train_batch_size": 64', '"train_batch_size": 32', "train_batch_size is 32"),
        ('"steps_per_print"', '"something_new": 1, "steps_per_print"', "something_new"),
        ("cat <<EOT", "cut <<EOT", "not found"),
        ("--fp16", "--bf16", "BF16_Optimizer"),
        ("--num-layers 30", "--num-layers 32", "--num-layers is 32"),
        ("transformer|embedding", "parameters", "--pp-partition-method"),
        ("alibi", "relative", "--position-embedding-type"),
        ("to 250880", "to 250240", "--pad-vocab-size-to"),
        ("--fp16", "--fp16 --partition-activations", "--partition-activations"),
        ("--fp16", "--fp16 --num-experts 8", "--num-experts"),
        ("--fp16", "--fp16 --use-distributed-optimizer", "--use-distributed-optimizer"),
        ("STAGE=1", "STAGE=1; export A=1\nexport CUDA_LAUNCH_BLOCKING=1", "--ignore CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_settings_of_megatron_deepspeed_that_are_not_priced_are_refused_by_name(
    old: str, new: str, named: str
) -> None:
    """What contradicts its configuration, other stages and formats, uneven stages, waits after every kernel."""
    with pytest.raises(InvalidInputError, match=named):
        read(MEGATRON_DEEPSPEED.replace(old, new))


def test_what_megatron_deepspeed_alone_has_can_be_ignored() -> None:
    """The answer names what it leaves out."""
    text = MEGATRON_DEEPSPEED.replace("--fp16", "--fp16 --partition-activations").replace(
        "STAGE=1", "export CUDA_LAUNCH_BLOCKING=1; STAGE=1"
    )
    found = read(text, ignored=("partition-activations", "CUDA_LAUNCH_BLOCKING"))
    assert found.plan == read(MEGATRON_DEEPSPEED).plan
    assert found.ignored_flags == ("--partition-activations", "--CUDA-LAUNCH-BLOCKING 1")


def test_primus_takes_the_presets_and_then_the_overrides(tmp_path: Path) -> None:
    """Presets extend others; the nearest value counts; variables have their defaults; names are Megatron-LM's."""
    found = primus(tmp_path)
    layout = found.plan.layout
    assert (layout.tp, layout.dp, layout.micro_batch_size, layout.global_batch_size) == (2, 4, 2, 64)
    assert (layout.sequence_parallel, layout.zero_stage, layout.overlap_grad_reduce) == (True, 1, True)
    model = found.problem.model
    assert (model.num_layers, model.hidden_size, model.default_sequence_length) == (32, 4096, 4096)
    assert not model.kinds[0].mlp.bias


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("gradient_accumulation_fusion: false", "no-gradient-accumulation-fusion"),
        ("turbo_sync_free_moe_stage: 3", "turbo-sync-free-moe-stage"),
        ("no_fp8_weight_transpose_cache: true", "no-fp8-weight-transpose-cache"),
        ("something_new: 3", "something-new"),
    ],
)
def test_settings_of_primus_that_are_not_priced_are_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    """Its own kernels are quiet where they are priced as such, and nothing else is; --ignore takes the rest."""
    text = PRIMUS.replace("      micro_batch", f"      {line}\n      micro_batch")
    with pytest.raises(InvalidInputError, match=named):
        primus(tmp_path, text)
    assert primus(tmp_path, text, ignored=(named,)).plan == primus(tmp_path).plan


def test_primus_dispatches_with_deepep_from_its_second_stage_without_waits(tmp_path: Path) -> None:
    """Its DeepEP sends a token once to each domain, as Megatron-LM's dispatcher flex does."""
    experts = "num_experts: 8\n      moe_router_topk: 2\n      moe_grouped_gemm: true\n      kv_lora_rank: 512\n"
    text = PRIMUS.replace(
        "      micro_batch", f"      {experts}      expert_model_parallel_size: 4\n      micro_batch"
    )
    dispatches = {
        "moe_token_dispatcher_type: alltoall": False,
        "moe_token_dispatcher_type: alltoall\n      turbo_sync_free_moe_stage: 1": False,
        "turbo_sync_free_moe_stage: 2": True,
        "use_turbo_deepep: true": True,
    }
    for line, once in dispatches.items():
        found = primus(tmp_path, text.replace("      micro_batch", f"      {line}\n      micro_batch"))
        assert found.problem.hardware.software.deduplicated_dispatch == once


def test_pytorchs_fsdp_shards_weights_and_reduces_them_in_bf16(tmp_path: Path) -> None:
    """It is ZeRO 3 with gradients in the format of the weights, and excludes Megatron-LM's sharded optimizer."""
    own = "use_torch_fsdp2: true\n      gradient_accumulation_fusion: false\n      ckpt_format: torch_dist\n"
    text = PRIMUS.replace("      micro_batch", f"      {own}      micro_batch")
    found = primus(tmp_path, text.replace("micro_batch", "use_distributed_optimizer: false\n      micro_batch", 1))
    layout = found.plan.layout
    assert (layout.zero_stage, layout.overlap_grad_reduce, layout.overlap_param_gather) == (3, True, True)
    assert found.problem.job.grad_dtype == "bf16"
    with pytest.raises(IllegalPlanError, match="torch_fsdp"):
        primus(tmp_path, text)


def test_a_preset_of_primus_must_be_there(tmp_path: Path) -> None:
    """The sizes are in the preset alone, and other frameworks are other programs."""
    with pytest.raises(InvalidInputError, match=r"small\.yaml"):
        read(PRIMUS, str(tmp_path / "run.yaml"), num_gpus=8)
    with pytest.raises(InvalidInputError, match="pre_trainer"):
        primus(tmp_path, PRIMUS.replace("framework: megatron", "framework: torchtitan"))


def test_ms_swift_takes_the_model_from_its_description() -> None:
    """true and false are words; the length is that of a packed sequence; ZeRO 1 and bf16 are its defaults."""
    model = shipped_model("qwen3-32b")
    found = read(SWIFT_SCRIPT, model=model)
    layout = found.plan.layout
    assert (layout.tp, layout.dp, layout.zero_stage, layout.sequence_parallel) == (4, 2, 1, True)
    assert (layout.micro_batch_size, layout.global_batch_size) == (1, 16)
    assert (found.problem.model, found.problem.job.sequence_length) == (model, 8192)
    assert [stage.recompute.full for stage in found.plan.virtual_stages] == [model.num_layers]
    loose = read(SWIFT_SCRIPT.replace("--packing true", ""), model=model)
    assert any("at most as long" in note for note in loose.notes)
    attention = read(SWIFT_SCRIPT.partition("--recompute_granularity")[0], model=model).plan
    assert attention.layout.recompute_modules == "core_attn"
    assert [stage.recompute.selective for stage in attention.virtual_stages] == [model.num_layers]
    with pytest.raises(InvalidInputError, match="--model"):
        read(SWIFT_SCRIPT)
    with pytest.raises(InvalidInputError, match="--max_length"):
        read(SWIFT_SCRIPT.replace("--max_length 8192", ""), model=model)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--tuner_type lora", "tuner-type"),
        ("--lora_rank 8", "lora-rank"),
        ("--optimizer_cpu_offload true", "optimizer-cpu-offload"),
        ("--mtp_use_repeated_layer true", "mtp-use-repeated-layer"),
        ("--something_new 1", "something-new"),
        ("--padding_free false", "padding-free"),
    ],
)
def test_settings_of_ms_swift_that_are_not_priced_are_refused_by_name(words: str, named: str) -> None:
    """Adapters, offloading, padded batches."""
    with pytest.raises(InvalidInputError, match=named):
        read(SWIFT_SCRIPT.replace("--lr", f"{words} --lr"), model=shipped_model("qwen3-32b"))


def test_slime_packs_micro_batches_to_a_limit_of_tokens() -> None:
    """9,216 tokens hold two sequences of 4,096; a step has the samples of all prompts."""
    found = read(SLIME_SCRIPT, given={"seq_length": 4096})
    layout = found.plan.layout
    assert (layout.tp, layout.dp, layout.micro_batch_size, layout.global_batch_size) == (2, 8, 2, 256)
    assert layout.zero_stage == 1
    assert not found.problem.model.kinds[0].mlp.bias
    assert any("update of the policy alone" in note for note in found.notes)
    assert read(SLIME_SCRIPT, given={"seq_length": 4096, "micro_batch_size": 1}).plan.layout.micro_batch_size == 1
    with pytest.raises(InvalidInputError, match="--seq-len"):
        read(SLIME_SCRIPT)
    tuned = SLIME_SCRIPT.replace("--colocate", "--loss-type sft_loss")
    assert not any("policy" in note for note in read(tuned, given={"seq_length": 4096}).notes)


def test_slime_has_norms_after_both_blocks() -> None:
    """The layers of GLM-4 have two norms more, which Megatron-LM's arguments do not have."""
    text = SLIME_SCRIPT.replace("--cross", "--post-mlp-layernorm --post-self-attn-layernorm --cross")
    assert read(text, given={"seq_length": 4096}).problem.model.kinds[0].num_norms == 4


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--optimizer-cpu-offload", "optimizer-cpu-offload"),
        ("--enable-mtp-training", "enable-mtp-training"),
        ("--mtp-num-layers 1", "without --enable-mtp-training"),
        ("--entropy-coef 0.1", "entropy-coef"),
        ("--post-mlp-layernorm", "post-mlp-layernorm"),
        ("--only-train-params-name-list a", "only-train-params-name-list"),
        ("--actor-num-nodes $NODES", "actor_num_nodes"),
    ],
)
def test_settings_of_slime_that_are_not_priced_are_refused_by_name(words: str, named: str) -> None:
    """Offloading, other layers, frozen weights; a number that only the shell knows."""
    with pytest.raises(InvalidInputError, match=named):
        read(SLIME_SCRIPT.replace("--cross", f"{words} --cross"), given={"seq_length": 4096})


def test_slime_trains_layers_of_multi_token_prediction() -> None:
    """Two arguments together, with the weight of the loss, which costs nothing."""
    words = "--position-embedding-type rope --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2"
    found = read(SLIME_SCRIPT.replace("--cross", f"{words} --cross"), given={"seq_length": 4096})
    assert found.problem.job.mtp_layers == 1


def test_verl_updates_its_actor_with_megatrons_arguments() -> None:
    """A mini-batch has n samples of each prompt; sequences are as long as prompt and response together."""
    model = shipped_model("llama3-8b")
    found = read(VERL_SCRIPT, model=model)
    layout = found.plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.sequence_parallel) == (2, 2, 4, True)
    assert (layout.micro_batch_size, layout.global_batch_size, layout.zero_stage) == (2, 256, 1)
    assert (found.problem.model, found.problem.job.sequence_length) == (model, 4096)
    assert [stage.recompute.full for stage in found.plan.virtual_stages] == [16, 16]
    dynamic = f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=16384 trainer.nnodes"
    assert read(VERL_SCRIPT.replace("trainer.nnodes", dynamic), model=model).plan.layout.micro_batch_size == 4
    moved = read(VERL_SCRIPT.replace("param_offload=False", "param_offload=True"), model=model)
    assert moved.plan == found.plan
    assert any("move to the host" in note for note in moved.notes)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("param_offload=False", "param_offload=$OFFLOAD", "param-offload"),
        (
            "trainer.nnodes=2",
            f"trainer.nnodes=2 +{A}.optim.override_optimizer_config.optimizer_cpu_offload=True",
            "--optimizer-cpu-offload",
        ),
        (f"{A}.entropy_coeff=0", f"{A}.entropy_coeff=0.01", "entropy-coeff"),
        ("trainer.nnodes=2", f"trainer.nnodes=2 {A}.something_new=1", "something-new"),
        ("trainer.nnodes=2", "trainer.nnodes=$NODES", "trainer.nnodes"),
        (f"{A}.megatron.", f"{A}.fsdp_config.", "FSDP"),
    ],
)
def test_settings_of_verl_that_are_not_priced_are_refused_by_name(old: str, new: str, named: str) -> None:
    """An update on the processor, the entropy of every token, other workers."""
    with pytest.raises(InvalidInputError, match=named):
        read(VERL_SCRIPT.replace(old, new), model=shipped_model("llama3-8b"))


def test_two_commands_are_not_chosen_from() -> None:
    """A script that trains twice with different arguments names no single run."""
    twice = SWIFT_SCRIPT + SWIFT_SCRIPT.replace("--lr 1e-5", "--lr 2e-5")
    with pytest.raises(InvalidInputError, match="2 ways"):
        read(twice, model=shipped_model("qwen3-32b"))


def trained(text: str, source: str = "run.yaml", model: str = "llama3-8b", **more: Any) -> Imported:
    """The import of a YAML of a program that starts Transformers' trainer, on eight processes."""
    request = ImportRequest(text, source, shipped_hardware("dgx-h100"), 8, shipped_model(model), **more)
    return target_named("accelerate", "--from").read(request)


def factory(folder: Path, text: str = FACTORY, settings: Any = None) -> Imported:
    """The import of a run of LLaMA-Factory, whose configuration of DeepSpeed is named from a folder above it."""
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "z3.json").write_text(json.dumps(settings or Z3), encoding="utf-8")
    return trained(text, str(folder / "examples" / "run.yaml"), "qwen3-32b")


def test_llama_factory_recomputes_unless_told_otherwise(tmp_path: Path) -> None:
    """The trainer fills in what DeepSpeed's configuration leaves open; every layer is recomputed by default."""
    found = factory(tmp_path)
    layout = found.plan.layout
    assert (layout.dp, layout.micro_batch_size, layout.num_micro_batches, layout.zero_stage) == (8, 1, 2, 3)
    assert found.problem.job.sequence_length == 2048
    assert found.plan.virtual_stages[0].recompute.full == found.problem.model.num_layers
    kept = factory(tmp_path, FACTORY + "disable_gradient_checkpointing: true\n")
    assert kept.plan.virtual_stages[0].recompute.full == 0
    unsharded = factory(tmp_path, FACTORY.replace("deepspeed: configs/z3.json\n", ""))
    assert unsharded.plan.layout.zero_stage == 0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("finetuning_type: full", "finetuning_type: freeze", "finetuning_type"),
        ("finetuning_type: full", "finetuning_type: lora\nlora_dropout: 0.1", "lora_dropout"),
        ("finetuning_type: full", "finetuning_type: lora\nlora_target: q,v", "lora_target_modules names 'q'"),
        ("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 4", "quantization_bit"),
        ("finetuning_type: full", "finetuning_type: lora\nadditional_target: lm_head", "additional_target"),
        ("stage: sft", "stage: rm", "stage"),
        ("bf16: true", "bf16: true\npure_bf16: true", "pure_bf16"),
        ("bf16: true", "fp16: true", "fp16"),
        ("bf16: true", "bf16: true\nuse_galore: true", "use_galore"),
        ("bf16: true", "bf16: true\nneat_packing: true", "neat_packing"),
        ("cutoff_len: 2048\n", "", "max_length"),
        ("configs/z3.json", "configs/other.json", "other.json"),
    ],
)
def test_settings_of_llama_factory_that_are_not_priced_are_refused_by_name(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    """Adapters, preferences, weights of 16 bits, other optimizers; files that are not there."""
    with pytest.raises(InvalidInputError, match=named):
        factory(tmp_path, FACTORY.replace(old, new))


def test_adapters_of_llama_factory_are_on_all_matrices_by_default(tmp_path: Path) -> None:
    """Rank 8 on every matrix of the layers unless told otherwise; the rest of the run is as without adapters."""
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: lora")
    found, whole = factory(tmp_path, text), factory(tmp_path)
    assert found.plan == whole.plan
    assert found.problem.job.lora == Lora(rank=8, modules=found.problem.model.linear_modules)
    named = factory(tmp_path, text + "lora_rank: 16\nlora_target: q_proj,v_proj\n")
    assert named.problem.job.lora == Lora(rank=16)


def test_offloading_in_a_named_configuration_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's own settings are read as if they stood alone."""
    moved = {**Z3, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(InvalidInputError, match="offload_optimizer"):
        factory(tmp_path, settings=moved)


def test_axolotl_shards_by_its_settings_of_fsdp() -> None:
    """The version stands beside the section, names have no prefix, and packed sequences are whole."""
    found = trained(AXOLOTL)
    layout = found.plan.layout
    assert (layout.dp, layout.micro_batch_size, layout.num_micro_batches, layout.zero_stage) == (8, 1, 2, 3)
    assert found.problem.job.sequence_length == 8192
    assert found.plan.virtual_stages[0].recompute.full == 32
    assert not any("at most as long" in note for note in found.notes)
    split = trained(AXOLOTL + "dp_shard_size: 4\ntensor_parallel_size: 2\n").plan.layout
    assert (split.tp, split.dp) == (2, 4)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("adapter:", "adapter: qlora", "adapter"),
        ("adamw_torch_fused", "adamw_torch_8bit", "optim"),
        ("adamw_torch_fused", "adamw_bnb_8bit", "adapters alone"),
        ("num_epochs: 1", "plugins:\n  - axolotl.integrations.liger.LigerPlugin", "plugins"),
        ("num_epochs: 1", "load_in_4bit: true", "load_in_4bit"),
        ("num_epochs: 1", "context_parallel_size: 2", "context_parallel_size"),
        ("offload_params: false", "offload_params: true", "offload_params"),
        ("bf16: auto", "bf16: full", "bf16"),
        ("num_epochs: 1", "something_new: 1", "something_new"),
    ],
)
def test_settings_of_axolotl_that_are_not_priced_are_refused_by_name(old: str, new: str, named: str) -> None:
    """Adapters, states of 8 bits, plug-ins, rings, offloading."""
    with pytest.raises(InvalidInputError, match=named):
        trained(AXOLOTL.replace(old, new))


def test_adapters_of_axolotl_are_beside_frozen_weights_in_bf16() -> None:
    """Names of matrices, or all; states in 8 bits with a scale for 256 values; a dropout only if ignored."""
    base = AXOLOTL.partition("fsdp_version")[0].replace("adapter:", "adapter: lora\nlora_r: 16\nlora_alpha: 32")
    every = base.replace("adamw_torch_fused", "adamw_bnb_8bit") + "lora_target_linear: true\n"
    found = trained(every)
    assert found.problem.job.lora == Lora(rank=16, modules=found.problem.model.linear_modules)
    assert found.problem.hardware.software.optimizer_state_bytes == 4 + 2 * (256 + 4) / 256
    assert (found.plan.layout.dp, found.plan.layout.zero_stage) == (8, 0)
    named = trained(base + "lora_target_modules: [q_proj, v_proj]\n")
    assert named.problem.job.lora == Lora(rank=16)
    dropped = every + "lora_dropout: 0.05\n"
    assert trained(dropped, ignored=("lora_dropout",)).problem.job.lora == found.problem.job.lora
    with pytest.raises(InvalidInputError, match="lora_dropout"):
        trained(dropped)


def test_unsharded_weights_of_axolotl_have_states_in_bf16() -> None:
    """Without FSDP or DeepSpeed nobody keeps them in fp32: 8 bytes a parameter, of them 2 of a gradient."""
    found = trained(AXOLOTL.partition("fsdp_version")[0])
    job, software = found.problem.job, found.problem.hardware.software
    assert (job.grad_dtype, software.optimizer_state_bytes, found.plan.layout.zero_stage) == ("bf16", 4, 0)
    parts = simulate(found.problem, found.plan).stages[0].memory
    assert parts.optimizer_bytes == 2 * parts.weights_bytes == 2 * parts.gradients_bytes


def test_a_yaml_of_trl_needs_what_accelerate_is_told() -> None:
    """Its keys are the trainer's; options say what shards the model."""
    given = {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 3}
    found = trained(TRL, model="mistral-7b", given=given)
    layout = found.plan.layout
    assert (layout.dp, layout.micro_batch_size, layout.num_micro_batches, layout.zero_stage) == (8, 8, 4, 3)
    assert found.plan.virtual_stages[0].recompute.full == 32
    with pytest.raises(InvalidInputError, match="what shards the model"):
        trained(TRL, model="mistral-7b")
    with pytest.raises(InvalidInputError, match="use_peft"):
        trained(TRL + "use_peft: true\n", model="mistral-7b", given=given)
    with pytest.raises(InvalidInputError, match="use_liger_kernel"):
        trained(TRL + "use_liger_kernel: true\n", model="mistral-7b", given=given)


def test_accelerate_names_a_configuration_of_deepspeed(tmp_path: Path) -> None:
    """Its own settings of DeepSpeed are in that file, the numbers are the trainer's."""
    (tmp_path / "z3.json").write_text(json.dumps(Z3), encoding="utf-8")
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
    text += "deepspeed_config:\n  deepspeed_config_file: z3.json\n  zero3_init_flag: true\n"
    numbers = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "block_size": 2048}
    found = trained(text, str(tmp_path / "a.yaml"), given=numbers)
    assert (found.plan.layout.zero_stage, found.plan.layout.num_micro_batches) == (3, 4)
    other = {**Z3, "gradient_accumulation_steps": 2, "compile": {"deepcompile": True}}
    (tmp_path / "z3.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(InvalidInputError, match="gradient_accumulation_steps is 2"):
        trained(text, str(tmp_path / "a.yaml"), given=numbers)
    numbers["gradient_accumulation_steps"] = 2
    with pytest.raises(InvalidInputError, match="deepcompile"):
        trained(text, str(tmp_path / "a.yaml"), given=numbers)
    ignored = trained(text, str(tmp_path / "a.yaml"), given=numbers, ignored=["compile"])
    assert ignored.ignored_flags == ("compile.deepcompile = True",)


WRITTEN = ("slime", "ms-swift", "verl")


@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("model", first(1, ("qwen3-30b-a3b", "qwen3-32b")))
def test_plans_come_back_from_the_scripts_of_programs(target: str, model: str) -> None:
    """Plans of the restricted space, with any split and recomputation: equal field by field, at the same step."""
    random, known = np.random.default_rng(3), TARGETS[target]
    problem = restrict(asked(model), target)
    space = layout_space(problem)
    for row in random.choice(len(space), 4, replace=False).tolist():
        plan = drawn_plan(random, problem, space.at(row))
        launch = known.export(problem, plan, known.capability.versions[0])
        name, text = next(iter(known.files(launch, "0").items()))
        found = known.read(ImportRequest(text, name, problem.hardware, model=problem.model))
        order = {"rank_order": plan.layout.rank_order}
        run = as_run(problem, plan, target)
        assert found.plan.layout.model_copy(update=order) == run.layout
        assert found.plan.virtual_stages == plan.virtual_stages
        assert simulate(found.problem, found.plan).step_time_ns == simulate(problem, plan).step_time_ns
        assert (found.unknown_flags, found.ignored_flags) == ((), ())


@pytest.mark.parametrize(
    ("target", "model", "layout", "why"),
    [
        ("slime", "qwen3-32b", {"dp": 16, "zero_stage": 3}, "Megatron-FSDP"),
        ("slime", "qwen3-32b", {"dp": 16}, "always has the distributed optimizer"),
        ("slime", "gpt3-175b", {"tp": 8, "pp": 2}, "learned positions"),
        (
            "slime",
            "gpt-oss-120b",
            {"cp": 2, "dp": 8, "zero_stage": 1},
            "sliding windows and sinks with all-to-alls alone",
        ),
        ("ms-swift", "qwen3-32b", {"cp": 2, "ulysses": 2, "dp": 8, "zero_stage": 1}, "all-to-all"),
        ("ms-swift", "qwen3-32b", {"dp": 16, "dp_replicate": 2, "zero_stage": 1}, "hybrid sharding"),
        ("ms-swift", "mistral-7b", {"dp": 16, "zero_stage": 1}, "sliding windows"),
        ("ms-swift", "mixtral-8x7b", {"dp": 16, "zero_stage": 1}, "does not build"),
        ("verl", "qwen3-32b", {"dp": 16, "zero_stage": 2}, "no Megatron-FSDP"),
        ("verl", "deepseek-v3", {"pp": 4, "dp": 4, "zero_stage": 1}, "as many layers in every stage"),
    ],
)
def test_programs_refuse_plans_that_they_would_run_differently(
    target: str, model: str, layout: dict[str, Any], why: str
) -> None:
    """What a program lacks is named, and nothing is written."""
    problem = asked(model)
    plan = uniform_plan(problem, Layout(**layout, global_batch_size=32), "none")
    with pytest.raises(IllegalPlanError, match=why):
        TARGETS[target].export(problem, plan, TARGETS[target].capability.versions[0])


def test_programs_of_ray_are_not_started_by_another_job_of_ray() -> None:
    """A program that makes a Ray cluster of its nodes has job files of all other schedulers."""
    problem = restrict(asked("qwen3-32b"), "slime")
    plan = uniform_plan(problem, Layout(tp=8, dp=2, zero_stage=1, global_batch_size=32), "full")
    launch = TARGETS["slime"].export(problem, plan, "0.3.1")
    files = TARGETS["slime"].files(launch, "0")
    for job in ("slurm", "skypilot", "kubeflow"):
        assert job_files(job, launch, "0", files, "dgx-h100")
    with pytest.raises(InvalidInputError, match="by itself"):
        job_files("ray", launch, "0", files, "dgx-h100")
