#!/usr/bin/env bash
# DeepSpeed (0.19.8), 2 nodes of 8 GPUs. Written by milpplan 0.
# llama3-8b on 16 GPUs (dgx-h100), 128 sequences of 8192 tokens a step.
# Layout: tp 1, cp 1, ep 1, etp 1, pp 1, dp 16, vpp 1; ZeRO 3, 1f1b.
# Note: The model is built as llama: which function gates it is no part of a plan.
# Note: The program has norms, activations and the loss of transformers, which are not fused as the plan prices
# them unless torch.compile fuses them.
# Note: Rotary base and scaling are not part of a plan: add rope_theta and the like to the model.
# Note: Weights below stage3_param_persistence_threshold stay whole on every rank: the norms.
set -euo pipefail

# Where this node is.
NUM_NODES=${NUM_NODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

torchrun \
    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$HERE/deepspeed_train.py" \
    "$HERE/deepspeed.json"
