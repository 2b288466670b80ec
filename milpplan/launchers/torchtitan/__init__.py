"""Launcher torchtitan: TOML configurations up to 0.2.2 and Python configurations since."""
