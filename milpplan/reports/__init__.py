"""Answers as text, HTML pages, JSON documents, traces and notebook views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.reports.answers.lengths import lengths_document
    from milpplan.reports.chrome_trace import lengths_in, lengths_trace
    from milpplan.reports.files import write_whole
    from milpplan.reports.terminal import terminal_text
else:
    __getattr__ = lazy_exports(__name__, __file__)
