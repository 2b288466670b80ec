"""The command line. stdout is the result, stderr the talk."""

from milpplan.cli.app import app, main

__all__ = ["app", "main"]
