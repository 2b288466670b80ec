"""Layer times from a cost model plug-in that a hardware description names.

States, memory, transfers between stages and the schedule stay milpplan's own. Simulator, bounds and integer
programs agree with any plug-in, because all of them take a layer's times from ``layer_time.layer_seconds``, which
calls it.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from milpplan.plugins import PluginError, plugin, plugin_title
from milpplan.problem import LayerRun, Problem
from milpplan.problem.hardware import OWN_COST_MODEL
from milpplan.simulation import FloatArray, LayoutColumns


class LayerModel(Protocol):
    """Signature of a cost model, an entry point of ``milpplan.cost_models``."""

    def __call__(
        self, problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray
    ) -> FloatArray:
        """Return the seconds of one layer, [Part, Phase, n], given milpplan's own.

        Times are finite and not negative. The times of a layout must not depend on the other layouts of the call.
        They may depend on ``LAYER_KEYS`` of the layout and on the fields that place its ranks, on nothing else.
        """


def replaced_seconds(problem: Problem, kind: LayerRun, columns: LayoutColumns, seconds: FloatArray) -> FloatArray:
    """Return the times of the cost model that the hardware names; ``seconds`` for milpplan's own model.

    Raises:
        UnknownNameError: the plug-in is not installed.
        PluginError: the plug-in fails, or returns wrong shapes, negative or infinite times.
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
    """Check that milpplan's own formulas time the layers of all node types."""
    return all(hardware.software.cost_model == OWN_COST_MODEL for hardware in problem.node_types)


def _broken(name: str, what: str) -> PluginError:
    """Make the error of a cost model that fails or returns wrong times."""
    return PluginError(
        f"The cost model {plugin_title('cost_models', name)} {what}.",
        "Expected seconds of a layer by part, phase and layout.",
        "Repair its package, or take cost_model out of the hardware description.",
    )
