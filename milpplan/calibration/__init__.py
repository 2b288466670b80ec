"""Constants of hardware and software fitted to a user's own measurements: ``milpplan calibrate``.

For measured steps the whole fit is ``fit.fit.fit(measured.observations(read_runs(path))[0], hardware)``. Its
result becomes an overlay by ``Fit.overlay``.
"""
