"""Blocks of an answer on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, assert_never

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from milpplan.reports.blocks import Block, Cell, Drawing, Fact, Items, Pair, Paragraph, Table

LABEL_WIDTH: Final = 10
"""Columns of a fact's label; further lines of its text are indented as far."""
MAX_COLUMNS: Final = 1000
"""Width without wrapping: beyond that of any table here."""


def terminal_text(blocks: Iterable[Block]) -> RenderableType:
    """Convert blocks to text for a terminal of any width."""
    return Group(*(part for block in blocks for part in _renderables(block)))


def _renderables(block: Block) -> Iterator[RenderableType]:
    match block:
        case Paragraph(text, style, further):
            yield Text.assemble((text, ""), *((span.text, span.style) for span in further), style=style)
        case Fact(label, text, style):
            grid = RichTable.grid(padding=0)
            grid.add_column(width=LABEL_WIDTH)
            grid.add_column()
            grid.add_row(Text(label), Text(text, style))
            yield grid
        case Items(texts):
            yield from (Padding(Text(text), (0, 0, 0, 2)) for text in texts)
        case Table():
            yield _table(block)
        case Pair(left, right):
            yield _SideBySide(_table(left), _table(right))
        case Drawing():
            pass
        case _:
            assert_never(block)


def _table(block: Table) -> RichTable:
    title = Text(block.title, "bold") if block.title else None
    table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in block.columns:
        # A word that is too long for a narrow terminal continues on the next line.
        table.add_column(Text(column), justify="right", overflow="fold", no_wrap=block.fixed)
    for index in block.words:
        table.columns[index].justify = "left"
    table.columns[-1].no_wrap = False
    for row in block.rows:
        if row:
            table.add_row(*(_cell(cell) for cell in row))
        else:
            table.add_section()
    return table


def _cell(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else Text(cell.text, cell.style)


class _SideBySide:
    """Two tables side by side, or one below the other where the terminal is too narrow."""

    def __init__(self, left: RichTable, right: RichTable) -> None:
        self.tables = left, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = RichTable.grid(padding=(0, 4))
        grid.add_row(*self.tables)
        fits = console.measure(grid, options=options.update(max_width=MAX_COLUMNS)).maximum <= options.max_width
        yield from (grid,) if fits else self.tables
