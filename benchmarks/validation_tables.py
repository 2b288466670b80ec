"""Tables that come out of a validation of the runs that ship: terms that they exercise, slopes and intercepts, and
what the remaining error is made of.

    python -m benchmarks.validation_tables [--dry-run] [--write benchmarks/results/accuracy.md]

It validates twice, with the constants fitted to each framework and without, which takes three minutes. It prints
the tables, writes the one of terms to where the package ships it, and with ``--write`` puts all into their
sections of a document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.error_causes import evidence_table, order_table, share_table, shares, twin_table
from benchmarks.exercised_terms import table_of
from benchmarks.tables import markdown_table, replace_section
from milpplan import __version__
from milpplan.reports.files import write_whole
from milpplan.units import percent_text
from milpplan.validation.comparison import Comparison, compare
from milpplan.validation.evidence import FILE, Exercise, ExercisedTerms
from milpplan.validation.runs.reader import read_runs
from milpplan.validation.summary import FamilyErrors, families, family_errors
from milpplan.validation.terms import TERMS

TARGET = Path(__file__).resolve().parents[1] / "milpplan" / "validation" / FILE
MADE_BY = "python -m benchmarks.validation_tables"


def term_table(table: ExercisedTerms) -> str:
    """A row a term, a column a generation and number format: runs, sources, error with stacks."""
    columns = [
        (name, precision) for name, generation in table.generations.items() for precision in generation.runs
    ]
    header = ["term", *(f"{name} {precision}" for name, precision in columns)]
    rows = [["all scored runs", *(f"{table.generations[name].runs[precision]:,}" for name, precision in columns)]]
    for term in TERMS:
        cells = [table.generations[name].terms[precision].get(term.name) for name, precision in columns]
        rows.append([term.words, *(_cell(cell) for cell in cells)])
    memory = {name: f"{generation.memory_runs:,}" for name, generation in table.generations.items()}
    rows.append(["whether it fits (any number format)", *(memory.pop(name, "") for name, _ in columns)])
    return markdown_table(header, rows)


def _cell(cell: Exercise | None) -> str:
    if cell is None:
        return "none"
    return f"{cell.num_runs:,} of {cell.num_sources}, {percent_text(cell.error_with_stacks)}"


def line_table(with_stacks: Sequence[Comparison], without: Sequence[Comparison]) -> str:
    """A row a source and what varies: errors of slopes and intercepts, without stacks and with them."""
    fitted, bare = (
        {(one.varies, one.group): one for one in family_errors(families(runs))} for runs in (with_stacks, without)
    )
    header = ["varies", "source", "families", "runs", "slope", "of step", "intercept", "of step"]
    header += [f"{name}, with stacks" for name in header[4:]]
    rows = []
    for place, one in fitted.items():
        counts = (one.varies.replace("_", "-"), one.group, one.num_families, one.num_runs)
        rows.append([*counts, *_line_cells(bare[place]), *_line_cells(one)])
    return markdown_table(header, rows)


def _line_cells(one: FamilyErrors) -> tuple[str, ...]:
    errors = (one.slope_error, one.slope_of_step, one.intercept_error, one.intercept_of_step)
    return tuple("-" if error is None else percent_text(error) for error in errors)


def main() -> None:
    """Make, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="do not write the table that ships")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the printed tables there, too")
    arguments = parser.parse_args()
    runs = read_runs(None)
    with_stacks, without = (compare(runs, stacks=stacks).comparisons for stacks in (True, False))
    table = table_of(with_stacks, without, MADE_BY, __version__)
    sections = {
        "exercised terms": term_table(table),
        "slopes and intercepts": line_table(with_stacks, without),
        "causes of the error": share_table(shares(with_stacks)),
        "twins": twin_table(with_stacks),
        "rows of the earlier engine": evidence_table(with_stacks),
        "order lost": order_table(with_stacks),
    }
    print("\n\n".join(sections.values()))
    if not arguments.dry_run:
        write_whole(TARGET, table.model_dump_json(indent=1) + "\n")
    if arguments.write is not None:
        for name, text in sections.items():
            replace_section(arguments.write, name, text)


if __name__ == "__main__":
    main()
