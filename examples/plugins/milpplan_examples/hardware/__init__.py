"""Hardware descriptions: every TOML file of this package is a name that milpplan knows."""
