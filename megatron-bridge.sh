#!/usr/bin/env bash
# Megatron-Bridge (0.3.1), 1 node of 8 GPUs. Written by milpplan 0.
# llama3-8b on 8 GPUs (dgx-h100), 16 sequences of 8192 tokens a step.
# Layout: tp 1, cp 1, ep 1, etp 1, pp 1, dp 8, vpp 1; ZeRO 3, 1f1b.
# Note: Megatron-FSDP shards embedding and head as well, which the plan counts at ZeRO 1.
# Note: The sizes are those of the plan; activation function, rotary base and router's scores are the recipe's:
# give RECIPE one of your model's family where they matter.
set -euo pipefail

# Where Megatron-Bridge is, whose recipe says what the plan does not, and where this node is.
BRIDGE_DIR=${BRIDGE_DIR:-.}
RECIPE=${RECIPE:-gpt3_175b_pretrain_config}
NUM_NODES=${NUM_NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=8

# The model: llama3-8b.
MODEL_ARGS=(
    model.num_layers=32
    model.hidden_size=4096
    model.ffn_hidden_size=14336
    model.num_attention_heads=32
    model.num_query_groups=8
    model.kv_channels=128
    model.vocab_size=128256
    model.seq_length=8192
    dataset.sequence_length=8192
    model.position_embedding_type=rope
    model.normalization=RMSNorm
    model.attention_dropout=0.0
    model.hidden_dropout=0.0
    model.share_embeddings_and_output_weights=false
    model.add_bias_linear=false
    model.gated_linear_unit=true
)

# Degrees and the places of ranks.
PARALLEL_ARGS=(
    model.tensor_model_parallel_size=1
    model.context_parallel_size=1
    model.pipeline_model_parallel_size=1
)

# 2 micro-batches a pipeline.
BATCH_ARGS=(
    train.micro_batch_size=1
    train.global_batch_size=16
)

# Sharding of states, and what overlaps.
STATE_ARGS=(
    ddp.use_distributed_optimizer=true
    optimizer.use_distributed_optimizer=true
    dist.use_megatron_fsdp=true
    ddp.use_megatron_fsdp=true
    ddp.data_parallel_sharding_strategy=optim_grads_params
    checkpoint.ckpt_format=fsdp_dtensor
    ddp.overlap_grad_reduce=true
    ddp.overlap_param_gather=true
)

# Precision and kernels.
KERNEL_ARGS=(
    model.cross_entropy_loss_fusion=true
    model.cross_entropy_fusion_impl=native
    mixed_precision=bf16_mixed
)

# Off in this plan, whatever the recipe says.
OFF_ARGS=(
    model.add_qkv_bias=false
    model.qk_layernorm=false
    model.softmax_type=vanilla
    model.window_size=null
    model.window_attn_skip_freq=null
    model.num_moe_experts=null
    model.multi_latent_attention=false
    model.expert_model_parallel_size=1
    model.expert_tensor_parallel_size=1
    model.cp_comm_type=null
    model.sequence_parallel=false
    dist.use_tp_pp_dp_mapping=false
    model.virtual_pipeline_model_parallel_size=null
    model.pipeline_model_parallel_layout=null
    model.recompute_granularity=null
    model.recompute_method=null
    model.recompute_num_layers=null
    model.recompute_modules=null
    model.should_pad_vocab=true
    model.mtp_num_layers=null
    model.account_for_embedding_in_pipeline_split=false
    model.account_for_loss_in_pipeline_split=false
    model.num_layers_in_first_pipeline_stage=null
    model.num_layers_in_last_pipeline_stage=null
    model.cuda_graph_impl=none
    model.moe_shared_expert_overlap=false
    comm_overlap=null
)

# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data.
TRAINING_ARGS=(
    train.train_iters=100
    optimizer.lr=1.0e-4
    optimizer.min_lr=1.0e-5
)

torchrun \
    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$BRIDGE_DIR/scripts/training/run_recipe.py" --recipe "$RECIPE" --dataset llm-pretrain-mock \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${BATCH_ARGS[@]}" \
    "${STATE_ARGS[@]}" \
    "${KERNEL_ARGS[@]}" \
    "${OFF_ARGS[@]}" \
    "${TRAINING_ARGS[@]}"
