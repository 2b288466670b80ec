"""Launcher Megatron-Bridge: overrides of a recipe, written and read through Megatron-LM's arguments."""
