"""Launcher NeMo AutoModel: recipes in YAML."""
