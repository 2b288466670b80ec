"""Programs that take Megatron-LM's arguments under other names: each reads as the arguments it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from milpplan.errors import InvalidInputError
from milpplan.launchers import ImportRequest, target_named
from milpplan.launchers.megatron.launcher import Imported
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


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"norm"', '"gpt_j_residual": true, "norm"', "gpt_j_residual"),
        ('"norm"', '"use_bias_in_attn_linear": false, "norm"', "use_bias_in_mlp"),
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
        ("use_turbo_deepep: true", "use-turbo-deepep"),
        ("no_fp8_weight_transpose_cache: true", "no-fp8-weight-transpose-cache"),
        ("use_torch_fsdp2: true", "use-torch-fsdp2"),
        ("something_new: 3", "something-new"),
    ],
)
def test_settings_of_primus_that_are_not_priced_are_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    """Its own kernels are quiet where they are priced as such, and nothing else is; --ignore takes the rest."""
    text = PRIMUS.replace("      micro_batch", f"      {line}\n      micro_batch")
    with pytest.raises(InvalidInputError, match=named):
        primus(tmp_path, text)
    assert primus(tmp_path, text, ignored=(named,)).plan == primus(tmp_path).plan


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
    with pytest.raises(InvalidInputError, match="core_attn"):
        read(SWIFT_SCRIPT.partition("--recompute_granularity")[0], model=model)
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
        ("--mtp_num_layers 1", "mtp-num-layers"),
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--optimizer-cpu-offload", "optimizer-cpu-offload"),
        ("--enable-mtp-training", "enable-mtp-training"),
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


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("param_offload=False", "param_offload=True", "param-offload"),
        (f"{A}.entropy_coeff=0", f"{A}.entropy_coeff=0.01", "entropy-coeff"),
        ("trainer.nnodes=2", f"trainer.nnodes=2 {A}.something_new=1", "something-new"),
        ("trainer.nnodes=2", "trainer.nnodes=$NODES", "trainer.nnodes"),
        (f"{A}.megatron.", f"{A}.fsdp_config.", "FSDP"),
    ],
)
def test_settings_of_verl_that_are_not_priced_are_refused_by_name(old: str, new: str, named: str) -> None:
    """Offloading, the entropy of every token, other workers."""
    with pytest.raises(InvalidInputError, match=named):
        read(VERL_SCRIPT.replace(old, new), model=shipped_model("llama3-8b"))


def test_two_commands_are_not_chosen_from() -> None:
    """A script that trains twice with different arguments names no single run."""
    twice = SWIFT_SCRIPT + SWIFT_SCRIPT.replace("--lr 1e-5", "--lr 2e-5")
    with pytest.raises(InvalidInputError, match="2 ways"):
        read(twice, model=shipped_model("qwen3-32b"))
