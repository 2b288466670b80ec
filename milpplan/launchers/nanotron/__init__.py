"""Launcher nanotron: its YAML configuration."""
