#!/usr/bin/env bash
# nanotron (2411b022), 4 nodes of 8 GPUs. Written by milpplan 0.
# llama3-8b on 32 GPUs (dgx-h100), 256 sequences of 8192 tokens a step.
# Layout: tp 4, cp 1, ep 1, etp 1, pp 2, dp 4, vpp 1; ZeRO 1, 1f1b.
# Note: Rotary base and scaling are not part of a plan: add rope_theta and the like.
set -euo pipefail

# Where this node is.
NUM_NODES=${NUM_NODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=1

# Where nanotron is, and this file.
NANOTRON_DIR=${NANOTRON_DIR:-.}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

torchrun \
    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$NANOTRON_DIR/run_train.py" \
    --config-file "$HERE/nanotron.yaml"
