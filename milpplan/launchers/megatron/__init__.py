"""Launcher Megatron-LM: command-line arguments of ``pretrain_gpt.py``."""
