"""A picture of every layout: what decided it, and how much longer than the best plan it takes at least."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from milpplan.reports.charts import Part, stacked_bar
from milpplan.reports.layout_fates import WORDS

if TYPE_CHECKING:
    from milpplan.reports.document import LayoutsDocument

COLOURS: Final = {"does_not_fit": 8, "bounded": 0, "relaxed": 7, "solved": 4, "open": 2}
REFUSED: Final = "refused by a rule"


def fates_chart(layouts: LayoutsDocument) -> str:
    """Rows of layouts: refused by rules, too large, and by their bound; empty without a best plan to measure by.
    Lengths are logarithms of the numbers, shared by the fates inside."""
    if not layouts.bounds:
        return ""
    lost = (WORDS["does_not_fit"], layouts.does_not_fit, COLOURS["does_not_fit"])
    rows = [
        (REFUSED, [(REFUSED, sum(layouts.rejected.values()), 5)]),
        ("too large for memory", [lost]),
        *(
            (one.words, [(WORDS[fate], one.fates[fate], colour) for fate, colour in COLOURS.items()])
            for one in layouts.bounds
        ),
    ]
    totals = [sum(count for _, count, _ in parts) for _, parts in rows]
    longest = math.log10(1 + max([1, *totals]))
    drawn = "".join(_row(name, parts, longest) for name, parts in rows)
    keys = "".join(
        f'<span class="key"><i class="c{colour}"></i>{WORDS[fate]}</span>'
        for fate, colour in COLOURS.items()
        if getattr(layouts, fate)
    )
    return f'<div class="rows fates">{drawn}</div><div class="keys">{keys}</div>'


def _row(name: str, parts: list[tuple[str, int, int]], longest: float) -> str:
    total = sum(count for _, count, _ in parts)
    length = math.log10(1 + total)
    pieces = [
        Part(what, length * count / total, f"{count:,}", colour) for what, count, colour in parts if count > 0
    ]
    return (
        f'<div class="row"><span>{name}</span>{stacked_bar(pieces, longest)}'
        f'<span class="number">{total:,}</span></div>'
    )
