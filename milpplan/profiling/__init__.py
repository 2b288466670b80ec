"""A machine's own measurements as an overlay: ``milpplan profile``.

``sweep`` says what is measured, a ``machine.Machine`` measures it, ``measuring`` keeps the books, ``overlay``
turns ``records.Measurements`` into constants with the fits of ``milpplan.calibration``. Only
``profiling.pytorch`` knows PyTorch.
"""
