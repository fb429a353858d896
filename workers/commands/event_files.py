"""Read scalars from TensorBoard's event files: records of protocol buffers, each with two checksums.

A scalar is a plain float (torch's SummaryWriter, tensorboardX) or a tensor with one element (TensorFlow, Keras, JAX).
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from ablate.workers.commands.logged_runs import (
    FIXED32,
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

_HEAD, _TAIL = 12, 4
"""Bytes of a record before and behind its content."""
_MOST_SUMMED, _MOST_SUMMED_WANTED = 2**9, 2**16
"""Bytes of a record whose checksum is compared, and of one with a wanted scalar: Python takes long for large ones."""
_FLOAT, _DOUBLE = 1, 2
"""Types of tensors."""
_FORMS = {_FLOAT: "<f", _DOUBLE: "<d"}
_VALUES = {5: _FLOAT, 6: _DOUBLE}
"""Fields of a tensor with its elements, by their types."""


def _table() -> tuple[int, ...]:
    rows = []
    for row in range(256):
        for _bit in range(8):
            row = (row >> 1) ^ (0x82F63B78 if row & 1 else 0)
        rows.append(row)
    return tuple(rows)


_CRC32C = _table()


def _checksum(content: bytes) -> int:
    """Return the CRC-32C of a record, rotated and shifted as the format wants it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tensorboard_runs(files: Sequence[Path], folder: Path, wanted: Sequence[str]) -> Iterator[LoggedRun]:
    """Yield the runs of these event files below `folder`: all in one folder are one run."""
    for place in sorted({file.parent for file in files}):
        parts = place.relative_to(folder).parts
        run = LoggedRun(("/".join(parts[start:]) for start in range(len(parts) or 1)), wanted)
        try:
            _join(run, [_EventFile(file, run.names, wanted) for file in files if file.parent == place])
        except Unreadable as error:
            run.broken = str(error)
        yield run


class _EventFile:
    """The scalars of one file, and when the wanted ones were logged."""

    def __init__(self, path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
        self.name = path.name
        self.run = LoggedRun(names, wanted)
        self.times: dict[str, tuple[float, float]] = {}
        """First and last time by tag."""
        try:
            with mapped(path) as content:
                for begin, end in _records(content):
                    self._take_event(content, begin, end)
        except (Unreadable, OSError) as error:
            raise Unreadable(f"event file {path.name} {error}") from error

    def _take_event(self, content: Content, begin: int, end: int) -> None:
        at, step, summaries = 0.0, 0, []
        for field, kind, start, stop in fields(content, begin, end):
            if (field, kind) == (1, FIXED64):
                at = number("<d", content, start)
            elif (field, kind) == (2, VARINT):
                step = signed(start)
            elif (field, kind) == (5, PART):
                summaries.append((start, stop))
        scalars = [scalar for start, stop in summaries for scalar in _scalars(content, start, stop)]
        wanted = any(tag in self.run.numbers for tag, _value in scalars)
        if end - begin <= (_MOST_SUMMED_WANTED if wanted else _MOST_SUMMED):
            (expected,) = struct.unpack_from("<I", content, end)
            if _checksum(content[begin:end]) != expected:
                raise damaged()
        for tag, value in scalars:
            self.run.note(tag, step, value)
            if tag in self.run.numbers:
                self.times[tag] = (self.times.get(tag, (at, at))[0], at)


def _join(run: LoggedRun, files: Sequence[_EventFile]) -> None:
    """Put the numbers of several files of a run in their order: a writer that is opened again begins another file."""
    for file in files:
        run.others |= file.run.others
    for tag in run.numbers:
        own = sorted((file for file in files if tag in file.times), key=lambda file: file.times[tag])
        for file in own:
            for step, value in file.run.numbers[tag]:
                run.note(tag, step, value)
        both = next((pair for pair in pairwise(own) if pair[1].times[tag][0] <= pair[0].times[tag][1]), None)
        if both is not None:
            run.problems[tag] = (
                f"{both[0].name} and {both[1].name} were written at the same time, so no value of it is the last one: "
                "let one process log it"
            )


def _records(content: Content) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each record. Raises Unreadable."""
    place = 0
    while place < len(content):
        if len(content) - place < _HEAD:
            raise Unreadable(TORN)
        length, expected = struct.unpack_from("<QI", content, place)
        if _checksum(content[place : place + 8]) != expected:
            raise damaged()
        begin, end = place + _HEAD, place + _HEAD + length
        if end + _TAIL > len(content):
            raise Unreadable(TORN)
        yield begin, end
        place = end + _TAIL


def _scalars(content: Content, begin: int, end: int) -> Iterator[tuple[str, float]]:
    """Yield name and number of the scalars of a summary."""
    for field, kind, start, stop in fields(content, begin, end):
        if (field, kind) == (1, PART):
            tag, value = "", None
            for own, form, first, last in fields(content, start, stop):
                if (own, form) == (1, PART):
                    tag = text(content, first, last)
                elif (own, form) == (2, FIXED32):
                    value = number("<f", content, first)
                elif (own, form) == (8, PART):
                    value = _element(content, first, last)
            if value is not None:
                yield tag, value


def _element(content: Content, begin: int, end: int) -> float | None:
    """Return the only element of a tensor of floats; None of another tensor."""
    dtype, elements = 0, list[tuple[int, int, int]]()
    for field, kind, start, stop in fields(content, begin, end):
        if (field, kind) == (1, VARINT):
            dtype = start
        elif (field, kind) == (2, PART) and not _is_of_one(content, start, stop):
            return None
        elif (field, kind) == (4, PART):
            elements.append((dtype, start, stop))
        elif field in _VALUES and kind in (PART, FIXED32, FIXED64):
            elements.append((_VALUES[field], start, stop))
    elements = [one for one in elements if one[2] > one[1]]
    if dtype not in _FORMS or len(elements) != 1 or elements[0][0] not in (dtype, 0):
        return None
    _type, start, stop = elements[0]
    return number(_FORMS[dtype], content, start) if stop - start == struct.calcsize(_FORMS[dtype]) else None


def _is_of_one(content: Content, begin: int, end: int) -> bool:
    """Return whether a shape is that of one element."""
    for field, kind, start, stop in fields(content, begin, end):
        if (field, kind) == (2, PART) and [one[2] for one in fields(content, start, stop) if one[:2] == (1, 0)] != [1]:
            return False
    return True
