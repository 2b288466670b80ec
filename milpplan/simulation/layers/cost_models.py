"""The times of a layer by another cost model than ours: a plug-in that a hardware description names.

Everything else (states, memory, transfers between stages, the schedule) stays ours, so that simulator, bounds and
programs go on agreeing: they all take a layer's times from ``layers.layer_seconds``, which asks here.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from milpplan.plugins import PluginError, plugin, plugin_title
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.problem.model import LayerRun
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import FloatArray, LayoutColumns


class LayerModel(Protocol):
    """What an entry point of ``milpplan.cost_models`` names."""

    def __call__(
        self, problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray
    ) -> FloatArray:
        """Seconds of one layer, [Part, Phase, n], given ours; finite, not negative, the same for the same layout
        whatever other layouts are asked for. May depend on ``LAYER_KEYS`` of the layout and on what its ranks'
        places depend on, on nothing else."""


def replaced_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """The times of the cost model that the problem's hardware names; ``seconds`` where that is ours.

    Raises:
        UnknownNameError: it is not installed.
        PluginError: it fails, or its times are no times.
    """
    name = problem.hardware.software.cost_model
    if name == OWN_COST_MODEL:
        return seconds
    model = cast(LayerModel, plugin("cost_models", name))
    try:
        answer = np.asarray(model(problem, kind, columns, seconds.copy()), dtype=np.float64)
    except Exception as error:
        raise _broken(name, f"fails: {type(error).__name__}: {error}") from error
    if answer.shape != seconds.shape:
        raise _broken(name, f"gives times of shape {answer.shape}, expected {seconds.shape}")
    if not (np.isfinite(answer).all() and (answer >= 0).all()):
        raise _broken(name, "gives times that are negative or not finite")
    return answer


def has_own_times(problem: Problem) -> bool:
    """Whether the layers of all node types are timed by our own formulas."""
    return all(hardware.software.cost_model == OWN_COST_MODEL for hardware in problem.node_types)


def _broken(name: str, what: str) -> PluginError:
    return PluginError(
        f"The cost model {plugin_title('cost_models', name)} {what}.",
        "Expected seconds of a layer by part, phase and layout.",
        "Repair its package, or take cost_model out of the hardware description.",
    )
