#!/usr/bin/env bash
# Megatron-LM (d98e8a64), 1 node of 8 GPUs. Written by milpplan 0.
# llama3-8b on 8 GPUs (dgx-h100), 16 sequences of 8192 tokens a step.
# Layout: tp 1, cp 1, ep 1, etp 1, pp 1, dp 8, vpp 1; ZeRO 3, 1f1b.
# Note: Rotary base and scaling are not part of a plan: add --rotary-base and the like.
# Note: The plan knows that the feed-forward block is gated, not by which function: --swiglu is usual.
# Note: Megatron-FSDP shards embedding and head as well, which the plan counts at ZeRO 1.
set -euo pipefail

# Where Megatron-LM is, and where this node is.
MEGATRON_DIR=${MEGATRON_DIR:-.}
NUM_NODES=${NUM_NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=8

# The model: llama3-8b.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --vocab-size 128256
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
    --num-attention-heads 32
    --kv-channels 128
    --group-query-attention
    --num-query-groups 8
    --disable-bias-linear
    --ffn-hidden-size 14336
    --swiglu
)

# Degrees and the places of ranks.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    --pipeline-model-parallel-size 1
)

# 2 micro-batches a pipeline.
BATCH_ARGS=(
    --micro-batch-size 1
    --global-batch-size 16
)

# Sharding of states, and what overlaps.
STATE_ARGS=(
    --use-distributed-optimizer
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor
    --overlap-grad-reduce
    --overlap-param-gather
)

# Precision and kernels.
KERNEL_ARGS=(
    --bf16
    --attention-backend auto
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native
)

# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data.
TRAINING_ARGS=(
    --train-iters 100
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --log-interval 1
    --eval-iters 0
    --distributed-timeout-minutes 60
)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
)

torchrun \
    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$MEGATRON_DIR/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${BATCH_ARGS[@]}" \
    "${STATE_ARGS[@]}" \
    "${KERNEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}"
