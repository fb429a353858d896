"""Tables as plain data, for page, terminal and Markdown: columns, and cells with the numbers behind their text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple


class Tone(StrEnum):
    """How a cell is meant. Renderers colour by it, and no colour ever says what no word says."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"
    OPEN = "open"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell as people read it."""

    text: str
    sign: str = ""
    """Stands before the text; the text says the same."""
    note: str = ""
    """Stands after the text, less loudly."""
    link: str = ""
    """Address on the same server that the text leads to; only pages of a service have any."""
    tone: Tone | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the text rounds, by name with the unit in it."""

    def __str__(self) -> str:
        """Return the cell in one line, for media that set neither sign nor note apart."""
        note = f"({self.note})" if self.note else ""
        return " ".join(part for part in (self.sign, self.text, note) if part)


class Column(NamedTuple):
    """One column: its heading, and how its cells are set."""

    heading: str
    kind: Literal["text", "number", "code"] = "text"
    """Numbers are aligned to the right; code (identifiers, digests) has a fixed width."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table; the first column heads its row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What was left out, or how to read it."""


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    """Return a row; strings are cells that are nothing but text."""
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
