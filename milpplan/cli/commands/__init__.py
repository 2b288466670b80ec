"""Commands, one a file: options, help, examples and work. A command returns its exit code, or None for 0.

``milpplan.cli.app`` lists them, and imports a command's file only when the command is needed.
"""
