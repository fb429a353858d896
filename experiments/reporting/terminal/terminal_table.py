"""Tables for terminals of any width. They never cut a name.

A row keeps as many columns as fit. The others follow below it as "heading value". Only text wraps, between words. Ids
may lose their ends, down to prefixes that are unique in the table. Every command accepts such a prefix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from os.path import commonprefix
from typing import Literal, NamedTuple, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ablate.experiments.system.logs import visible

GAP = 2
"""Spaces between two columns, and before the lines below a row."""
SHORTEST_ID = 14
_COMFORTABLE = 14
"""A column of text is at least so wide, or as its longest word."""
_BETWEEN = " \N{MIDDLE DOT} "


Kind: TypeAlias = Literal["name", "number", "id", "text"]
"""Names and numbers stay whole, ids may lose their ends, text wraps between words."""


class TerminalColumn(NamedTuple):
    """One column of a table."""

    heading: str
    kind: Kind


def names(*headings: str) -> list[TerminalColumn]:
    """Return columns of names, states or times, whose cells stay whole."""
    return [TerminalColumn(heading, "name") for heading in headings]


def numbers(*headings: str) -> list[TerminalColumn]:
    """Return columns of numbers, aligned to the right."""
    return [TerminalColumn(heading, "number") for heading in headings]


def ids(*headings: str) -> list[TerminalColumn]:
    """Return columns of ids."""
    return [TerminalColumn(heading, "id") for heading in headings]


def texts(*headings: str) -> list[TerminalColumn]:
    """Return columns of text, which wraps between words."""
    return [TerminalColumn(heading, "text") for heading in headings]


class TerminalTable:
    """Rows of cells in rich's markup. The first column always stays in its row.

    On a narrow terminal, columns leave the row: first those in `leaving`, in this order, then from the right.
    """

    def __init__(self, *columns: TerminalColumn, title: str = "", leaving: Sequence[str] = ()) -> None:
        self.columns = columns
        self.rows: list[list[Text]] = []
        self._title = title
        names = [column.heading for column in columns]
        first = [names.index(heading) for heading in leaving if heading in names]
        self._leaving = first + [place for place in reversed(range(1, len(columns))) if place not in first]

    def add_row(self, *cells: str) -> None:
        """Add a row with one cell for each column."""
        self.rows.append([_text(cell) for _, cell in zip(self.columns, cells, strict=True)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table's lines for a terminal of this width."""
        width = options.max_width
        if self._title:
            yield from _wrapped(console, Text.from_markup(f"[bold]{visible(self._title)}[/]"), width)
        rows = self.rows if self._fits(self.rows, range(len(self.columns)), width) else self._with_short_ids()
        shown = self._beside(rows, width)
        widths = self._widths(rows, shown, width)
        yield from self._lines(console, [Text(c.heading, "bold") for c in self.columns], widths)
        yield Text("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * min(width, _total(widths.values())), "dim")
        for row in rows:
            yield from self._lines(console, row, widths)
            yield from self._below(console, row, shown, width)

    def _beside(self, rows: Sequence[Sequence[Text]], width: int) -> list[int]:
        """Return the indices of the columns that stay in the row."""
        shown = list(range(len(self.columns)))
        for place in self._leaving:
            if self._fits(rows, shown, width):
                break
            shown.remove(place)
        return shown

    def _fits(self, rows: Sequence[Sequence[Text]], places: Iterable[int], width: int) -> bool:
        return _total(self._least(rows, place) for place in places) <= width

    def _widths(self, rows: Sequence[Sequence[Text]], places: Sequence[int], width: int) -> dict[int, int]:
        """Return the width of each column: its need, or for text a fair share of the rest."""
        widths = {place: self._least(rows, place) for place in places}
        spare = width - _total(widths.values())
        needs = sorted((self._natural(rows, place) - least, place) for place, least in widths.items())
        for left, (need, place) in zip(range(len(needs), 0, -1), needs, strict=True):
            share = max(0, min(need, spare // left))
            widths[place] += share
            spare -= share
        return {place: min(column_width, width) for place, column_width in widths.items()}

    def _natural(self, rows: Sequence[Sequence[Text]], place: int) -> int:
        return max(len(self.columns[place].heading), *(row[place].cell_len for row in rows), 1)

    def _least(self, rows: Sequence[Sequence[Text]], place: int) -> int:
        natural = self._natural(rows, place)
        if self.columns[place].kind != "text":
            return natural
        words = (Text(word).cell_len for row in rows for word in row[place].plain.split(" "))
        return max(len(self.columns[place].heading), min(natural, _COMFORTABLE), *words)

    def _with_short_ids(self) -> list[list[Text]]:
        """Return the rows with ids shortened to unique prefixes."""
        prefixes = {
            place: unique_prefixes([row[place].plain for row in self.rows])
            for place, column in enumerate(self.columns)
            if column.kind == "id"
        }
        return [[_cut(cell, prefixes.get(place)) for place, cell in enumerate(row)] for row in self.rows]

    def _lines(self, console: Console, cells: Sequence[Text], widths: Mapping[int, int]) -> Iterator[Text]:
        """Yield the lines of one row."""
        parts = [list(cells[place].wrap(console, width)) for place, width in widths.items()]
        for pieces in zip_longest(*parts, fillvalue=Text()):
            line = Text()
            for piece, (place, width) in zip(pieces, widths.items(), strict=True):
                line.append(" " * (GAP if line.plain else 0))
                line.append_text(_pad(piece, width, right=self.columns[place].kind == "number"))
            line.rstrip()
            yield line

    def _below(self, console: Console, row: Sequence[Text], shown: Sequence[int], width: int) -> Iterator[Text]:
        """Yield the lines below a row, with the cells that did not fit."""
        below = [
            Text.assemble((f"{column.heading} ", "dim"), cell)
            for place, (column, cell) in enumerate(zip(self.columns, row, strict=True))
            if place not in shown and cell.plain.strip()
        ]
        for line in _wrapped(console, Text(_BETWEEN, "dim").join(below), width - GAP) if below else ():
            line.pad_left(GAP)
            yield line


def unique_prefixes(ids: Iterable[str]) -> dict[str, str]:
    """Return the shortest unique prefix of each id, with at least `SHORTEST_ID` characters."""
    in_order = sorted(set(ids))
    shared = [0, *(len(commonprefix(pair)) for pair in pairwise(in_order)), 0]  # noqa: RUF071 - of ids, not of paths
    return {one: one[: max(SHORTEST_ID, 1 + max(shared[at : at + 2]))] for at, one in enumerate(in_order)}


def _text(markup: str) -> Text:
    return Text.from_markup(visible(markup).replace("\n", " ").replace("\t", " "))


def _cut(cell: Text, prefixes: Mapping[str, str] | None) -> Text:
    return cell if prefixes is None else cell[: len(prefixes[cell.plain])]


def _pad(piece: Text, width: int, *, right: bool) -> Text:
    padded, missing = piece.copy(), max(0, width - piece.cell_len)
    padded.pad_left(missing) if right else padded.pad_right(missing)
    return padded


def _wrapped(console: Console, text: Text, width: int) -> Iterator[Text]:
    for line in text.wrap(console, max(1, width)):
        line.rstrip()
        yield line


def _total(widths: Iterable[int]) -> int:
    columns = list(widths)
    return sum(columns) + GAP * max(0, len(columns) - 1)
