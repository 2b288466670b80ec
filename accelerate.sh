#!/usr/bin/env bash
# Accelerate (1.15.0), 1 node of 8 GPUs. Written by milpplan 0.
# llama3-8b on 8 GPUs (dgx-h100), 16 sequences of 8192 tokens a step.
# Layout: tp 1, cp 1, ep 1, etp 1, pp 1, dp 8, vpp 1; ZeRO 3, 1f1b.
# Note: MODEL is a directory or name of Transformers with the sizes of the plan's model.
# Note: FSDP2 reduces gradients in bf16 here, half the bytes that the plan counts.
set -euo pipefail

# Where this node is, what is trained by which program, and where the configuration goes.
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
MODEL=${MODEL:-.}
TRAIN_DIR=${TRAIN_DIR:-.}
CONFIG=${CONFIG:-$(mktemp)}

cat > "$CONFIG" <<'YAML'
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
use_cpu: false
debug: false
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: false
  fsdp_offload_params: false
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 8
  parallelism_config_cp_size: 1
  parallelism_config_tp_size: 1
YAML

# Not decided by the plan: data, learning rates. Any program of Transformers' Trainer takes
# these flags; run_clm.py is in its examples (examples/pytorch/language-modeling).
accelerate launch --config_file "$CONFIG" --machine_rank "$NODE_RANK" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \
    "$TRAIN_DIR/run_clm.py" \
    --gradient_accumulation_steps 2 \
    --per_device_train_batch_size 1 \
    --block_size 8192 \
    --config_name "$MODEL" --tokenizer_name "$MODEL" --dataset_name wikitext \
    --dataset_config_name wikitext-103-raw-v1 --do_train --bf16 true --max_steps 100 \
    --accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}' \
    --output_dir "${OUTPUT_DIR:-output}"
