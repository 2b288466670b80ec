"""Commands, one a file: arguments, options, help, and a call of the module of ``milpplan.cli`` that does the work.

Nothing here takes long to import: ``--help`` and completion read all of them. ``milpplan.cli.app`` lists them.
"""
