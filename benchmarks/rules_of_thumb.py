"""The launcher's rule of thumb (``milpplan.explain.overview``) on the problems of the benchmarks.

python -m benchmarks.rules_of_thumb
"""

from __future__ import annotations

from benchmarks.problems import CASES
from benchmarks.tables import layout_text, markdown_table
from milpplan.explain.overview import row_of, rule_of_thumb, split_of_layers
from milpplan.units import seconds_text

__all__ = ["main", "row_of", "rule_of_thumb", "split_of_layers"]


def main() -> None:
    """Print the rule's plan for every problem."""
    rows: list[tuple[object, ...]] = []
    for case in CASES.values():
        found = rule_of_thumb(case.problem("uniform"))
        if found is None:
            rows.append((case.text(), "nothing fits", "-", "-"))
            continue
        note = "" if found.within_table else " (beyond the table)"
        rows.append(
            (
                case.text(),
                layout_text(found.plan) + note,
                seconds_text(found.report.step_time_s),
                f"{found.report.mfu:.1%}",
            )
        )
    print(markdown_table(("problem", "rule of thumb", "step time", "MFU"), rows))


if __name__ == "__main__":
    main()
