#!/usr/bin/env bash
# Megatron-LM (d98e8a64), 64 nodes of 8 GPUs. Written by milpplan 0.
# gpt3-175b on 512 GPUs (dgx-a100-80), 512 sequences of 2048 tokens a step.
# Layout: tp 8, cp 1, ep 1, etp 1, pp 8, dp 8, vpp 3; ZeRO 0, interleaved.
set -euo pipefail

# Where Megatron-LM is, and where this node is.
MEGATRON_DIR=${MEGATRON_DIR:-.}
NUM_NODES=${NUM_NODES:-64}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=1

# The model: gpt3-175b.
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --vocab-size 51200
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type learned_absolute
    --normalization LayerNorm
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --num-attention-heads 96
    --kv-channels 128
    --ffn-hidden-size 49152
)

# Degrees and the places of ranks.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --context-parallel-size 1
    --pipeline-model-parallel-size 8
    --sequence-parallel
    --use-tp-pp-dp-mapping
)

# Which layers are where, and what is recomputed.
STAGE_ARGS=(
    --num-virtual-stages-per-pipeline-rank 3
    --recompute-granularity selective
    --recompute-modules core_attn
)

# 64 micro-batches a pipeline.
BATCH_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
)

# Precision and kernels.
KERNEL_ARGS=(
    --bf16
    --attention-backend unfused
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
    "${STAGE_ARGS[@]}" \
    "${BATCH_ARGS[@]}" \
    "${KERNEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}"
