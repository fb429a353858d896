"""Tables as plain data for page, terminal and Markdown: columns, and cells with their unrounded numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple


class Tone(StrEnum):
    """Meaning of a cell. Renderers use it for colour; the text says the same."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"
    OPEN = "open"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: str
    sign: str = ""
    """Symbol before the text; the text says the same."""
    note: str = ""
    """Remark after the text, shown less prominently."""
    link: str = ""
    """Address of the text on the same server; only pages of a service have any."""
    tone: Tone | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Unrounded numbers of the text; names contain the unit."""

    def __str__(self) -> str:
        """Return sign, text and note in one line."""
        note = f"({self.note})" if self.note else ""
        return " ".join(part for part in (self.sign, self.text, note) if part)


class Column(NamedTuple):
    """One column: its heading and kind."""

    heading: str
    kind: Literal["text", "number", "code"] = "text"
    """Numbers are right-aligned; code (identifiers, digests) is monospaced."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table; the first column heads its row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """How to read the table, or what it leaves out."""


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    """Return a row; strings become plain cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(text=cell) for cell in cells)


def texts(*headings: str) -> tuple[Column, ...]:
    """Return columns of text."""
    return tuple(Column(heading) for heading in headings)


def numbers(*headings: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(heading, "number") for heading in headings)


def codes(*headings: str) -> tuple[Column, ...]:
    """Return columns of identifiers or digests."""
    return tuple(Column(heading, "code") for heading in headings)
