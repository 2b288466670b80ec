"""Measurements of a machine by itself as an overlay: ``milpplan profile``.

``sweep`` lists the measurements, a ``machine.Machine`` makes them, ``measuring`` records them, and ``overlay``
turns ``records.Measurements`` into constants with the fits of ``milpplan.calibration``. Only ``profiling.pytorch``
imports PyTorch.
"""
