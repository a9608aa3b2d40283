"""Tables of one line a row: cut at a terminal's edge, whole where the output goes elsewhere. No row ever wraps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.text import Text

_GAP = "  "


def aligned(rows: Sequence[Sequence[str | Text]], sides: str) -> list[Text]:
    """A line for each row, its cells as wide as the widest of their column.

    `sides` has a character for each column, "<" for left and ">" for right. A row may have fewer cells.
    """
    cells = [[cell.copy() if isinstance(cell, Text) else Text(" ".join(cell.split())) for cell in row] for row in rows]
    widths = [max((row[i].cell_len for row in cells if i < len(row)), default=0) for i in range(len(sides))]
    for row in cells:
        for cell, side, width in zip(row, sides, widths, strict=False):
            cell.align("left" if side == "<" else "right", width)
    lines = [Text(_GAP).join(row) for row in cells]
    for line in lines:
        line.rstrip()
    return lines


def fitted(lines: Iterable[Text]) -> Group:
    """The lines for a terminal: what does not fit is cut, with an ellipsis in its place."""
    shown = [line.copy() for line in lines]
    for line in shown:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*shown)


def print_lines(lines: Sequence[Text], console: Console) -> None:
    """Prints a table."""
    if console.is_terminal:
        console.print(fitted(lines))
        return
    for line in lines:
        console.print(line, soft_wrap=True)
