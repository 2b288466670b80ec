"""Measurements of a machine by itself as an overlay: ``milpplan profile``.

``sweep`` lists the measurements and records them, a ``records.Machine`` makes them, and ``overlay`` turns
``records.Measurements`` into constants with the fits of ``milpplan.calibration``. Only ``profiling.pytorch``
imports PyTorch.
"""
