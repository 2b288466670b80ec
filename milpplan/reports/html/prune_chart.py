"""Chart of every layout by prune reason and minimum distance from the best plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from milpplan.reports.documents.prune_counts import WORDS, BoundClassDocument
from milpplan.reports.html.charts import Part, stacked_bar
from milpplan.reports.html.step_charts import counted_rows

COLOURS: Final = {"does_not_fit": 8, "bounded": 0, "relaxed": 7, "solved": 4, "open": 2}
REFUSED: Final = "refused by a rule"


def fates_chart(
    rejected: Mapping[str, int], fates: Mapping[str, int], bounds: Sequence[BoundClassDocument]
) -> str:
    """Draw rows of layouts: refused by rules, too large, and by bound; empty without a best plan to compare with.

    ``rejected`` counts layouts by rule, ``fates`` by prune reason. Lengths are logarithms of the counts, shared by
    the reasons inside.
    """
    if not bounds:
        return ""
    lost = (WORDS["does_not_fit"], fates["does_not_fit"], COLOURS["does_not_fit"])
    rows = [
        (REFUSED, [(REFUSED, sum(rejected.values()), 5)]),
        ("too large for memory", [lost]),
        *(
            (
                bound_class.words,
                [(WORDS[fate], bound_class.fates[fate], colour) for fate, colour in COLOURS.items()],
            )
            for bound_class in bounds
        ),
    ]
    totals = [sum(count for _, count, _ in parts) for _, parts in rows]
    longest = math.log10(1 + max([1, *totals]))
    drawn = counted_rows(_row(name, parts, longest) for name, parts in rows)
    keys = "".join(
        f'<span class="key"><i class="c{colour}"></i>{WORDS[fate]}</span>'
        for fate, colour in COLOURS.items()
        if fates[fate]
    )
    return f'{drawn}<div class="keys">{keys}</div>'


def _row(name: str, parts: list[tuple[str, int, int]], longest: float) -> tuple[str, str, str]:
    total = sum(count for _, count, _ in parts)
    length = math.log10(1 + total)
    pieces = [
        Part(what, length * count / total, f"{count:,}", colour) for what, count, colour in parts if count > 0
    ]
    return name, stacked_bar(pieces, longest), f"{total:,}"
