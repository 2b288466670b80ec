"""Launcher DeepSpeed: its JSON configuration and a training program that reads it."""
