"""Interface of a relaxation of one layout for the cutting-plane rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from milpplan.optimize.layout.ceiling_cuts import CeilingPath
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.optimize.milp.linear_relaxation import Relaxation
from milpplan.optimize.milp.program import Program, Rows
from milpplan.simulation.layout_columns import FloatArray, IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath


class PathRelaxation(Protocol):
    """Relaxation of one layout without its path rows; z counts units above a base."""

    @property
    def program(self) -> Program:
        """All rows but those of paths and ceiling cuts."""

    @property
    def ceiling_paths(self) -> Sequence[CeilingPath]:
        """Ceiling cuts, whose rows come right after those of the program."""

    def base_ns(self, paths: list[CriticalPath]) -> int:
        """Return the step time at z = 0."""

    def ceiling_rows(self, base: int, unit: int) -> Rows:
        """Return the rows of the ceiling cuts."""

    def path_rows(self, paths: list[CriticalPath], base: int, unit: int) -> Rows:
        """Return the rows of paths."""

    def narrow(self, relaxation: Relaxation, context: LayoutContext) -> None:
        """Narrow the program's rows in a relaxation to the limits of ``context``."""

    def path_limits(
        self, context: LayoutContext, paths: Sequence[CriticalPath], base: int, unit: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return indices, lower and upper sides of the rows of ceiling cuts and paths under narrower limits."""

    def durations(self, values: FloatArray) -> IntArray:
        """Return the duration matrix [Term, J] of a fractional point."""

    def layers(self, values: FloatArray) -> FloatArray:
        """Return the layers of every virtual stage at a fractional point, [J]."""
