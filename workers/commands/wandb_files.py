"""Read the numbers of offline runs of W&B: a log of records of protocol buffers, cut into pieces with checksums."""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ablate.workers.commands.logged_runs import (
    FIXED64,
    PART,
    TORN,
    VARINT,
    Content,
    LoggedRun,
    Unreadable,
    damaged,
    fields,
    mapped,
    number,
    signed,
    text,
)

_BEGIN = b":W&B\xe1\xbe\x00"
_BLOCK, _HEAD = 2**15, 7
"""Bytes of a block, and of the head of a piece, which no block divides."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""Kinds of pieces of a record."""
_MOST_BYTES = 64 * 2**20
"""Of a record."""
_HISTORY, _RUN, _EXIT = 2, 17, 18
"""Fields of a record."""
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|Infinity|NaN)")


def wandb_runs(files: Sequence[Path], wanted: Sequence[str]) -> Iterator[LoggedRun]:
    """Yield the run of each file."""
    for file in files:
        run, ended = LoggedRun([file.stem], wanted), False
        try:
            with mapped(file) as content:
                for record in _records(content):
                    ended |= _take(run, record)
            if not ended:
                raise Unreadable("has no end: call run.finish() before the program ends")
        except (Unreadable, OSError) as error:
            run.broken = f"file {file.name} {error}"
        yield run


def _take(run: LoggedRun, record: bytes) -> bool:
    """Read one record; return whether it ends the run."""
    ended = False
    for field, kind, start, stop in fields(record, 0, len(record)):
        if (field, kind) == (_HISTORY, PART):
            _take_history(run, record, start, stop)
        elif (field, kind) == (_RUN, PART):
            names = {one: text(record, *place) for one, form, *place in fields(record, start, stop) if form == PART}
            run.call([name for one in (8, 1) if (name := names.get(one))] or run.names)
        elif (field, kind) == (_EXIT, PART):
            ended = True
    return ended


def _take_history(run: LoggedRun, record: bytes, begin: int, end: int) -> None:
    """Read the numbers of one step."""
    step, items = 0, []
    for field, kind, start, stop in fields(record, begin, end):
        if (field, kind) == (1, PART):
            items.append(_item(record, start, stop))
        elif (field, kind) == (2, PART):
            step = next((signed(one[2]) for one in fields(record, start, stop) if one[:2] == (1, VARINT)), 0)
    for tag, value in items:
        if value is not None and not tag.startswith("_"):
            run.note(tag, step, value)


def _item(record: bytes, begin: int, end: int) -> tuple[str, float | None]:
    """Return name and number of an item; None of one that is no number."""
    names, value = list[str](), None
    for field, kind, start, stop in fields(record, begin, end):
        if field in (1, 2) and kind == PART:
            names.append(text(record, start, stop))
        elif (field, kind) == (5, VARINT):
            value = float((start >> 1) ^ -(start & 1))
        elif (field, kind) == (6, FIXED64):
            value = number("<d", record, start)
        elif (field, kind) == (16, PART) and _NUMBER.fullmatch(written := text(record, start, stop)):
            value = float(written)
    return ".".join(names), value


def _records(content: Content) -> Iterator[bytes]:
    """Yield the records of a file. Raises Unreadable."""
    if content[: len(_BEGIN)] != _BEGIN:
        raise Unreadable("is of a version of the format that is not known here (known: 0)")
    place, pieces = len(_BEGIN), list[bytes]()
    while place < len(content):
        room = _BLOCK - place % _BLOCK
        if room < _HEAD:
            place += room
            continue
        if len(content) - place < _HEAD:
            raise Unreadable(TORN)
        expected, length, kind = struct.unpack_from("<IHB", content, place)
        piece = content[place + _HEAD : place + _HEAD + length]
        if len(piece) < length:
            raise Unreadable(TORN)
        fits = (kind in (_WHOLE, _FIRST)) == (not pieces) and kind in (_WHOLE, _FIRST, _MIDDLE, _LAST)
        if not fits or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != expected:
            raise damaged()
        pieces.append(piece)
        if len(pieces) * _BLOCK > _MOST_BYTES:
            raise Unreadable(f"has a record of more than {_MOST_BYTES // 2**20} MiB")
        place += _HEAD + length
        if kind in (_WHOLE, _LAST):
            yield b"".join(pieces)
            pieces = []
    if pieces:
        raise Unreadable(TORN)
