"""Launcher Accelerate: FSDP2 or unsharded replicas under Transformers' trainer."""
