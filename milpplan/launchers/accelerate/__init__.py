"""Launchers Accelerate, TRL, LLaMA-Factory and axolotl: Transformers' trainer with FSDP2."""
