"""Runs that a program has logged into the folder of its trial, and how their files are found and taken apart.

A program wrote these files, so nothing in them is trusted: links are not followed, nothing is unpickled, and a part
that cannot be read makes its run unreadable.
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from ablate.experiments.records.program_report import printable
from ablate.workers.paths import open_plain

MOST_NUMBERS = 1_000_000
"""Most numbers of one metric in a run."""
MOST_TAGS = 1_000
"""Names of other numbers that are kept for a message."""
_LONGEST_NAME = 250

Content: TypeAlias = bytes | mmap.mmap
VARINT, FIXED64, PART, FIXED32 = 0, 1, 2, 5
"""How a field of a protocol buffer is written."""
_SIZES = {FIXED64: 8, FIXED32: 4}
_DAMAGED = "is damaged"
TORN = "ends within a record: close the writer before the program ends"


class Unreadable(ValueError):
    """What a program has logged cannot be read."""


class LoggedRun:
    """The numbers of one run, by their names."""

    def __init__(self, names: Iterable[str], wanted: Iterable[str]) -> None:
        """Take the names by which a spec may call the run, the one for people first, and the tags that are wanted."""
        self.names: tuple[str, ...] = ()
        self.call(names)
        self.numbers: dict[str, list[tuple[int, float]]] = {tag: [] for tag in wanted}
        """(step, number), as they were logged."""
        self.others: set[str] = set()
        """Names of other numbers."""
        self.problems: dict[str, str] = {}
        """By tag, why its numbers do not say which one is the last."""
        self.broken: str | None = None
        """Why the run cannot be read whole."""

    def call(self, names: Iterable[str]) -> None:
        """Give the run other names."""
        self.names = tuple(printable(name)[-_LONGEST_NAME:] for name in names)

    def note(self, tag: str, step: int, number: float) -> None:
        """Store a number. Raises Unreadable beyond the limit."""
        numbers = self.numbers.get(tag)
        if numbers is None:
            if len(self.others) < MOST_TAGS:
                self.others.add(printable(tag)[:_LONGEST_NAME])
        elif len(numbers) < MOST_NUMBERS:
            numbers.append((step, number))
        else:
            raise Unreadable(f"has more than {MOST_NUMBERS:,} numbers of '{printable(tag)}': log it less often")


@contextmanager
def mapped(path: Path) -> Iterator[Content]:
    """Open the content of a file that a program wrote. Raises OSError."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, in the order of their names, without following links."""
    folders = [folder]
    while folders:
        with suppress(OSError):
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
            for entry in entries:
                with suppress(OSError):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode):
                        folders.append(Path(entry.path))
                    elif stat.S_ISREG(mode):
                        yield Path(entry.path)


def fields(content: Content, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of a message of protocol buffers: number, how it is written, begin, end; of a varint its value.

    Raises Unreadable if it is none.
    """
    while place < end:
        key, place = _varint(content, place, end)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(content, place, end)
            yield number, kind, value, place
            continue
        if kind == PART:
            length, place = _varint(content, place, end)
        elif kind in _SIZES:
            length = _SIZES[kind]
        else:
            raise Unreadable(_DAMAGED)
        if place + length > end:
            raise Unreadable(_DAMAGED)
        yield number, kind, place, place + length
        place += length


def _varint(content: Content, place: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise Unreadable(_DAMAGED)


def signed(value: int) -> int:
    """Return the int64 of a varint."""
    return value - (1 << 64) if value >> 63 else value


def text(content: Content, begin: int, end: int) -> str:
    """Return a field with text."""
    return content[begin : min(end, begin + 4096)].decode("utf-8", "replace")


def number(form: str, content: Content, begin: int) -> float:
    """Return a floating-point number, by its form for `struct`."""
    return float(struct.unpack_from(form, content, begin)[0])


def damaged() -> Unreadable:
    """Return the error of a file that no writer of its format has written."""
    return Unreadable(_DAMAGED)
