"""What rounds of cutting planes ask of a relaxation of one layout."""

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
    """A relaxation of one layout without its paths, z above a base in units."""

    @property
    def program(self) -> Program:
        """All rows but the paths and peaks."""

    @property
    def peaks(self) -> Sequence[CeilingPath]:
        """Rows of peaks, right after those of the program."""

    def base_ns(self, paths: list[CriticalPath]) -> int:
        """Where z starts."""

    def peak_rows(self, base: int, unit: int) -> Rows:
        """Rows of the peaks."""

    def path_rows(self, paths: list[CriticalPath], base: int, unit: int) -> Rows:
        """Rows of paths."""

    def narrow(self, relaxation: Relaxation, context: LayoutContext) -> None:
        """Make the rows but those of paths, in a relaxation of the program, those of a narrower setting."""

    def path_limits(
        self, context: LayoutContext, paths: Sequence[CriticalPath], base: int, unit: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Rows of peaks and paths, lower and upper sides, of a narrower setting."""

    def durations(self, values: FloatArray) -> IntArray:
        """Duration matrix [Term, J] of a fractional point."""

    def layers(self, values: FloatArray) -> FloatArray:
        """Layers of every virtual stage at a fractional point, [J]."""
