#!/usr/bin/env bash
# Megatron-LM (d98e8a64), 32 nodes of 8 GPUs. Written by milpplan 0.
# deepseek-v3 on 256 GPUs (dgx-h100), 1024 sequences of 4096 tokens a step.
# Layout: tp 1, cp 1, ep 32, etp 1, pp 8, dp 32, vpp 2; ZeRO 1, interleaved.
# Note: Rotary base and scaling are not part of a plan: add --rotary-base and the like.
# Note: Nor are the router's scores and losses: add --moe-router-score-function and the like.
# Note: The plan knows that the feed-forward block is gated, not by which function: --swiglu is usual.
# Note: --moe-token-dispatcher-type flex needs DeepEP installed.
# Note: Selective recomputation: no module drops the activation of dense layers and shared experts; Megatron-LM
# keeps it, the plan counts it as dropped.
set -euo pipefail

# Where Megatron-LM is, and where this node is.
MEGATRON_DIR=${MEGATRON_DIR:-.}
NUM_NODES=${NUM_NODES:-32}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=1

# The model: deepseek-v3.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --vocab-size 129280
    --seq-length 4096
    --max-position-embeddings 163840
    --position-embedding-type rope
    --normalization RMSNorm
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
    --num-attention-heads 128
    --multi-latent-attention
    --qk-layernorm
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --q-lora-rank 1536
    --disable-bias-linear
    --ffn-hidden-size 18432
    --swiglu
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-grouped-gemm
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-shared-expert-intermediate-size 2048
)

# Degrees and the places of ranks.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    --pipeline-model-parallel-size 8
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type flex
)

# Which layers are where, and what is recomputed.
STAGE_ARGS=(
    --pipeline-model-parallel-layout 'Et*4|(t*4|)*12(t*3|)*2t*3L'
    --recompute-granularity selective
    --recompute-modules layernorm moe_act mla_up_proj
)

# 32 micro-batches a pipeline.
BATCH_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1024
)

# Sharding of states, and what overlaps.
STATE_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

# Precision and kernels.
KERNEL_ARGS=(
    --bf16
    --attention-backend auto
    --fp8-format hybrid
    --fp8-recipe tensorwise
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
    "${STATE_ARGS[@]}" \
    "${KERNEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}"
