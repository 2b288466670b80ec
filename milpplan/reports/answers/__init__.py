"""Answers as documents and as blocks, a module for each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.reports.answers.explain import ExplanationDocument
    from milpplan.reports.answers.gap import Failed, GapDocument, Judged, gap_document, layout_fates
    from milpplan.reports.answers.hardware_choice import ChoiceDocument, FewestDocument
    from milpplan.reports.answers.lengths import LengthsFile
    from milpplan.reports.answers.solve import solve_blocks
    from milpplan.reports.answers.step import simulation_blocks
    from milpplan.reports.answers.traffic import NAMES, traffic_blocks, traffic_document
else:
    __getattr__ = lazy_exports(__name__, __file__)
