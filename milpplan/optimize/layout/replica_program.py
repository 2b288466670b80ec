"""Integer program of a layout with heterogeneous replicas: the programs of its views, coupled by the layers.

Sets and variables: those of ``layout_program`` once for each view v (node type), with items x_vji; one z for all.

    minimise z
    all rows of each view's program, in equal units: z >= path_p(x_v) for the paths of v's own graph
    same_layers             sum_i runs_vjir x_vji = sum_i runs_0jir x_0ji        every view v > 0, stage j, run r

Replicas of all types hold the same layers, and each recomputes what its own memory requires. The step is the
longest of the views' steps, so z is at most the step of every plan: a relaxation, as tight as those of the views.
An item that a view's menu drops in favour of an item with equal layers is not needed by other views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from milpplan.optimize.layout.layout_program import MEMORY_UNITS, LayoutProgram
from milpplan.optimize.layout.warm_start import Choice
from milpplan.optimize.milp.program import Program, Rows
from milpplan.simulation.layout_columns import FloatArray, IntArray


@dataclass(slots=True)
class JointProgram:
    """Programs of all views with one z. A choice lists the first view's stages, then the second view's."""

    views: list[LayoutProgram]
    cutoff_ns: int
    memory_units: int = field(default=MEMORY_UNITS)

    @property
    def offsets(self) -> IntArray:
        """First column of each stage's items, view by view, and the end; [views * J + 1]."""
        widths = np.concatenate([np.diff(view.offsets) for view in self.views])
        return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)

    @property
    def num_rows_found(self) -> int:
        """Number of paths and forbidden combinations so far."""
        return sum(view.num_rows_found for view in self.views)

    def split(self, row: FloatArray) -> list[FloatArray]:
        """Split a row over all items into one part per stage of each view."""
        return [row[start:end] for start, end in pairwise(self.offsets)]

    def choices(self, choice: Sequence[int]) -> list[Choice]:
        """Split a choice into one choice per view."""
        J = len(self.views[0].menus)
        return [list(choice[J * number : J * (number + 1)]) for number in range(len(self.views))]

    def scaling(self, proved_ns: int = 0) -> tuple[int, int]:
        """Return (base_ns, unit_ns) of z: the highest base of the views, and the coarsest unit above it."""
        self._share_settings()
        base = max(view.scaling(proved_ns)[0] for view in self.views)
        return base, max(view.scaling(base)[1] for view in self.views)

    def program(self, base: int, unit: int) -> Program:
        """Return the views' programs side by side, with one z."""
        self._share_settings()
        parts = [view.program(base, unit) for view in self.views]
        widths = [part.num_variables - 1 for part in parts]
        starts = np.cumsum([0, *widths])
        z = int(starts[-1])
        rows = [
            _moved(part.rows, int(start), width, z, view)
            for view, (part, start, width) in enumerate(zip(parts, starts[:-1], widths, strict=True))
        ]
        items = [slice(0, width) for width in widths]
        last = parts[0]
        objective = np.zeros(z + 1, dtype=np.int64)
        objective[z] = 1
        names = [
            f"{name}@{view}"
            for view, (part, columns) in enumerate(zip(parts, items, strict=True))
            for name in part.variable_names[columns]
        ]
        return Program(
            last.name,
            (*names, "z"),
            np.concatenate(
                [*(part.lower[columns] for part, columns in zip(parts, items, strict=True)), last.lower[-1:]]
            ),
            np.concatenate(
                [*(part.upper[columns] for part, columns in zip(parts, items, strict=True)), last.upper[-1:]]
            ),
            np.ones(z + 1, dtype=np.bool_),
            Rows.concatenate([*rows, self._same_layers()]),
            objective,
        )

    def _share_settings(self) -> None:
        """Give the views' programs one cutoff and one unit of memory."""
        for view in self.views:
            view.cutoff_ns, view.memory_units = self.cutoff_ns, self.memory_units

    def _same_layers(self) -> Rows:
        """same_layers: every stage holds equal layers of every run in all views."""
        first, width = self.views[0], int(self.offsets[-1])
        starts = np.cumsum([0, *(int(view.offsets[-1]) for view in self.views)])
        names, matrix = [], []
        for index, view in enumerate(self.views[1:], start=1):
            for j, (first_menu, menu) in enumerate(zip(first.menus, view.menus, strict=True)):
                for run in range(first_menu.runs.shape[1]):
                    row = np.zeros(width, dtype=np.int64)
                    row[first.offsets[j] : first.offsets[j + 1]] = -first_menu.runs[:, run]
                    view_offsets = starts[index] + view.offsets
                    row[view_offsets[j] : view_offsets[j + 1]] = menu.runs[:, run]
                    names.append(f"same_layers[{index},{j},{run}]")
                    matrix.append(row)
        return Rows.dense(names, np.array(matrix, dtype=np.int64).reshape(-1, width), 0, 0)

    def overfull_rank(self, choice: Sequence[int]) -> int | None:
        """Return a rank of a view whose exact peak exceeds the capacity, if any.

        Ranks of the second view are numbered after those of the first.
        """
        for index, (view, view_choice) in enumerate(zip(self.views, self.choices(choice), strict=True)):
            rank = view.overfull_rank(view_choice)
            if rank is not None:
                return index * view.context.layout.pp + rank
        return None

    def forbid_rank_items(self, choice: Sequence[int], rank: int) -> None:
        """Exclude the combination of items that a rank cannot hold together."""
        index, own_rank = divmod(rank, self.views[0].context.layout.pp)
        self.views[index].forbid_rank_items(self.choices(choice)[index], own_rank)


def _moved(rows: Rows, start: int, width: int, z: int, view: int) -> Rows:
    """Return a view's rows with its items moved to column ``start`` and its z (column ``width``) to ``z``."""
    columns = np.where(rows.columns == width, z, rows.columns + start)
    names = tuple(f"{name}@{view}" for name in rows.names)
    return Rows(names, rows.starts, columns, rows.coefficients, rows.lower, rows.upper)
