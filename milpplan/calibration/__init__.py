"""Constants of hardware and software fitted to a user's own measurements: ``milpplan calibrate``.

For measured steps the whole fit is ``fit(observations(read_runs(path))[0], hardware)``. Its result becomes an
overlay by ``Fit.overlay``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.calibration.bus_tables import PASSES, fit_bus, is_nccl_log, parse_nccl
    from milpplan.calibration.coverage import Coverage, mean_share, within_one_sigma
    from milpplan.calibration.efficiency_tables import fit_gemm, is_gemm_csv, least_within, parse_gemm
    from milpplan.calibration.error_bars import at, error_bar, joint_end, robustness, side_s
    from milpplan.calibration.event_files import event_steps
    from milpplan.calibration.fitting.fit import fit
    from milpplan.calibration.fitting.records import Constant, Fit
    from milpplan.calibration.measured import Observation, StepPredictor, observations
    from milpplan.calibration.profiler_traces import read_trace
    from milpplan.calibration.sources import overlay_text, peak_margin, write_overlay
    from milpplan.calibration.training_logs import LoggedSteps, logged_steps, program_of
    from milpplan.calibration.trials import Trial, TrialModel, best_trial
else:
    __getattr__ = lazy_exports(__name__, __file__)
