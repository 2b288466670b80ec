"""Sentences on error bars."""

from __future__ import annotations

from milpplan.calibration.records import ErrorBar, Rival, Robustness
from milpplan.units import counted, percent_text, seconds_text

SHOWN_PARTS = 3


def error_bar_text(bar: ErrorBar) -> str:
    """Write an error bar: ``5.73 s a step, one sigma 5.41 s to 6.05 s (overlay x): gemm efficiency 4.1 %,
    ...``."""
    low, high = bar.step_time_s - bar.below_s, bar.step_time_s + bar.above_s
    parts = sorted(((max(sides), name) for name, sides in bar.parts_s.items()), reverse=True)
    shares = [
        f"{name.removesuffix('_s').replace('_', ' ')} {percent_text(most / bar.step_time_s)}"
        for most, name in parts[:SHOWN_PARTS]
    ]
    return (
        f"{seconds_text(low)} to {seconds_text(high)} (-{percent_text(bar.below_s / bar.step_time_s)}, "
        f"+{percent_text(bar.above_s / bar.step_time_s)}), one sigma; most from {', '.join(shares)}"
    )


def robustness_text(robust: Robustness) -> str:
    """Describe the comparison at both ends, and its result."""
    if not robust.solved and not robust.num_plans:
        return (
            "not checked at the ends of the uncertainty: the search simulated this plan only; --check-ends "
            "solves again at both"
        )
    looked = f"the {counted(robust.num_plans, 'other plan')} that the search kept"
    remark = " (what bounds excluded was not simulated; --check-ends solves again)"
    if robust.solved:
        looked, remark = "all plans of the space (solved again at both ends, each with its bound)", ""
    ends = "; ".join(_end_text(end) for end in robust.ends)
    verdict = "still the best at both ends" if robust.still_best else "not the best at both ends"
    return f"{verdict} among {looked}: {ends}{remark}"


def _end_text(end: Rival) -> str:
    text = f"all constants one sigma {'faster' if end.end == 'fast' else 'slower'}: {seconds_text(end.best_s)}"
    if end.rival_s is not None:
        text += f", the next {seconds_text(end.rival_s)}"
    if end.lower_bound_s is not None:
        text += f", bound {seconds_text(end.lower_bound_s)}"
    return text
