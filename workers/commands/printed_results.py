"""Read results from the output of a program as it arrives.

The last line that begins as a result line is the result. If it cannot be read whole, there is none: an older line, or a
part of a number, would be a wrong one.
"""

import fcntl
import math
import os
import re
import select
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Self

from ablate.experiments.in_trial.ablate import MOST_RESULTS, name_problem
from ablate.experiments.records.program_report import contradicts, printable
from ablate.workers.commands.logged_results import MOST_POINTS, Curve

LONGEST_LINE = select.PIPE_BUF
"""Most bytes of a line with a result. The kernel keeps only so many together when several processes write."""
MOST_CURVES = 8
"""METRIC lines of so many names give curves."""
_SHOWN = 120
"""Letters of a line in a message."""
_NO_NUMBER = "has no plain number (such as 1234.5) alone in its place"
_TOO_LONG = f"is longer than {LONGEST_LINE:,} bytes"
_NO_END = "has no end: print a line end after it"

_METRIC = re.compile(r"METRIC\s+([^\s=]+)\s*=")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|(?i:nan|inf(?:inity)?))")
_THOUSANDS, _GROUP = re.compile(r"[-+]?[0-9]{1,3}"), re.compile(r"\s[0-9]{3}(?![0-9])")
"""A number, and digits behind it that may belong to it."""
_GOES_ON = re.compile(r"[,.'_\u2019][0-9]")
_ENDS = re.compile(r"\s|[,;)\]}|\"']|\.(?:\s|$)|$")
_OPENING = "([{|\"'"

_WITHOUT_EFFECT = re.compile(
    rb"\x1b\[[0-9;:]*m|\x1b\[[?>=]?[0-9;]*[hl]|\x1b\[0?K|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[PX^_][^\x1b\n]*\x1b\\"
    rb"|\x1b[()*+][ -~]|\x1b[=>7]"
)
"""Codes for colours, modes, titles and links, and the one that empties the rest of a row."""
_OTHER_ROW = re.compile(rb"\x1b\[[0-9;]*[ABEFHJdf]|\x1b[DEMc]")
_WITHIN_ROW = ("\x1b", "\b")
"""Begin of codes that move along a row: what stands behind them may cover a number."""


class _PrintedCurve:
    """The numbers of one result in their order, of which every second one goes when they are too many."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._every, self._count, self._last = 1, 0, 0.0

    def add(self, value: float) -> None:
        if self._count % self._every == 0:
            self._values.append(value)
        self._count, self._last = self._count + 1, value
        if len(self._values) >= MOST_POINTS:
            self._values, self._every = self._values[::2], 2 * self._every

    @property
    def points(self) -> Curve:
        """(number of the line, value), the last one included; empty unless several were printed."""
        kept = {1 + place * self._every: value for place, value in enumerate(self._values)}
        return tuple((kept | {self._count: self._last}).items()) if self._count > 1 else ()


class PrintedResults:
    """The results in the output of a program, of which only the last lines are kept."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        """Read lines such as `METRIC name=1.5`, and by name those that look like one of `lines`."""
        self._patterns = {name: _Pattern(line) for name, line in lines.items()}
        self._by_metric: dict[str, float | str] = {}
        """The value of each name, or what is wrong with its last line."""
        self._by_pattern: dict[str, float | str] = {}
        self._rest = b""
        """The beginning of a line."""
        self._cut = False
        """Whether its first part was dropped."""
        self._bad_name: str | None = None
        self._curves: dict[str, _PrintedCurve] = {}

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes of the output, which may begin and end anywhere."""
        whole, newline, self._rest = (self._rest + chunk.replace(b"\r", b"\n")).rpartition(b"\n")
        if newline and self._cut:
            first, _newline, whole = whole.partition(b"\n")
            self._refuse(first, _TOO_LONG)
            self._cut = False
        if newline:
            self._take(_without_codes(whole))
        if len(self._rest) > 2 * LONGEST_LINE:
            self._refuse(self._rest, _TOO_LONG)
            self._rest, self._cut = self._rest[-LONGEST_LINE:], True

    def end(self) -> None:
        """Read the rest, a number at whose very end may be a part of one."""
        whole, _newline, rest = _without_codes(self._rest).rpartition(b"\n")
        self._take(whole)
        self._refuse(rest, _TOO_LONG if self._cut else _NO_END)
        if not self._cut:
            text = rest.decode("utf-8", "backslashreplace")
            values = {
                name: pattern.value(text + "\N{REPLACEMENT CHARACTER}") for name, pattern in self._patterns.items()
            }
            self._by_pattern |= {name: value for name, value in values.items() if value is not None}
        self._rest = b""

    @property
    def values(self) -> dict[str, float]:
        """The results, those that are not finite included."""
        return {name: value for name, value in self._last.items() if isinstance(value, float)}

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of the results that were printed more than once, by name."""
        return {name: points for name, curve in self._curves.items() if (points := curve.points)}

    def contradicting(self, counted: Mapping[str, float]) -> dict[str, float]:
        """Return the printed numbers that contradict a number of the same name that counts."""
        printed = [*self._by_pattern.items(), *self._by_metric.items()]
        return {
            name: value
            for name, value in printed
            if name in counted
            and isinstance(value, float)
            and math.isfinite(value)
            and contradicts(value, counted[name])
        }

    def problem(self, *, besides: Collection[str] = ()) -> str | None:
        """Return why a result cannot be read; None if all can, except those that do not count."""
        unread = (value for name, value in self._last.items() if isinstance(value, str) and name not in besides)
        return self._bad_name or next(unread, None)

    @property
    def _last(self) -> dict[str, float | str]:
        return {**self._by_metric, **self._by_pattern}

    def _take(self, text: bytes) -> None:
        """Read whole lines without codes."""
        metrics: dict[str, float | str] = {}
        numbers: dict[str, list[float | None]] = {}  # the last one first
        for line in _lines_with(b"METRIC", text):
            shown = line.decode("utf-8", "backslashreplace")
            for match in reversed(list(_METRIC.finditer(shown))):
                value = _number(shown[match.end() :].strip())
                numbers.setdefault(match[1], []).append(value)
                if match[1] not in metrics:
                    metrics[match[1]] = _reading(match[1], value, line, shown[match.start() :])
        for name, last in metrics.items():
            self._store_metric(name, last)
            if name in self._by_metric and (name in self._curves or len(self._curves) < MOST_CURVES):
                self._draw(name, numbers[name])
        for name, pattern in self._patterns.items():
            values: list[float | None] = []
            for line in _lines_with(pattern.needle, text):
                shown = line.decode("utf-8", "backslashreplace")
                begin = pattern.begin(shown)
                if begin is not None:
                    value = pattern.value(shown)
                    if not values:
                        self._by_pattern[name] = _reading(name, value, line, shown[begin:])
                    values.append(value)
            self._draw(name, values)

    def _draw(self, name: str, numbers: Sequence[float | None]) -> None:
        """Add numbers, the last one first, to the curve of a result."""
        for value in reversed(numbers):
            if value is not None and math.isfinite(value):
                self._curves.setdefault(name, _PrintedCurve()).add(value)

    def _refuse(self, part: bytes, why: str) -> None:
        """Note the results that begin in a part of a line that gives none."""
        shown = _without_codes(part).decode("utf-8", "backslashreplace")
        for match in _METRIC.finditer(shown):
            self._store_metric(match[1], _problem(match[1], why, shown[match.start() :]))
        for name, pattern in self._patterns.items():
            begin = pattern.begin(shown)
            if begin is not None:
                self._by_pattern[name] = _problem(name, why, shown[begin:])

    def _store_metric(self, name: str, last: float | str) -> None:
        problem = None if name in self._by_metric else name_problem(name)
        if not name.isprintable():
            problem = (
                f"the name of the printed result {name[:_SHOWN]!a} has control characters; allowed: any other letter"
            )
        if len(self._by_metric) >= MOST_RESULTS and name not in self._by_metric:
            problem = f"the program printed METRIC lines of more than {MOST_RESULTS:,} names, which is the limit"
        if problem is None:
            self._by_metric[name] = last
        else:
            self._bad_name = self._bad_name or problem


class _Pattern:
    """The line of a metric, with {} in place of the number."""

    def __init__(self, line: str) -> None:
        left, right = line.split("{}")
        self._before, self._after = left.strip(), right.strip()
        text = self._before or self._after
        self.needle = text.encode()
        inside = r"(?![A-Za-z_])" if self._before[-1:].isalnum() and left[-1:].isspace() else ""
        self._place = re.compile(re.escape(text) + inside)
        self._behind = re.compile(r"\s*" + re.escape(self._after) + (r"(?!\w)" if right[-1:].isalnum() else ""))

    def begin(self, line: str) -> int | None:
        """Return where in a line its text begins, None if the line is not of this pattern."""
        place = self._place.search(line)
        return None if place is None else place.start()

    def value(self, line: str) -> float | None:
        """Return the only number in its place, None if there is none or several differ."""
        places = list(self._place.finditer(line))
        if not places or (self._before and any(code in line[places[0].start() :] for code in _WITHIN_ROW)):
            return None
        values = {self._at(line, one) for one in places}
        first = values.pop()
        return None if values else first

    def _at(self, line: str, place: re.Match[str]) -> float | None:
        if self._before:
            return self._number_at(line[place.end() :])
        return _number_before(line[: place.start()]) if self._behind.match(line, place.start()) else None

    def _number_at(self, text: str) -> float | None:
        text = text.lstrip()
        token = _NUMBER.match(text)
        if token is None:
            return None
        rest = text[token.end() :]
        ends = self._behind if self._after else _ENDS
        in_groups = _THOUSANDS.fullmatch(token[0]) and _GROUP.match(rest)
        return None if in_groups or _GOES_ON.match(rest) or not ends.match(rest) else _number(token[0])


def _number_before(text: str) -> float | None:
    """Return the number at the end of a text."""
    token = (text.split() or [""])[-1].rpartition("=")[2].lstrip(_OPENING)
    before = text.rstrip()[: -len(token) or None]
    in_groups = re.fullmatch(r"[0-9]{3}(\.[0-9]*)?", token) and before.rstrip()[-1:].isdigit()
    return None if in_groups or any(code in text for code in _WITHIN_ROW) else _number(token)


def _number(text: str) -> float | None:
    """Return the number that a whole text is; None for any other, and for one that a float cannot tell from zero."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return None if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]) else value


def _reading(name: str, value: float | None, line: bytes, shown: str) -> float | str:
    if len(line) > LONGEST_LINE:
        return _problem(name, _TOO_LONG, shown)
    return _problem(name, _NO_NUMBER, shown) if value is None else value


def _problem(name: str, why: str, shown: str) -> str:
    shown = printable(shown.strip())
    quoted = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"the last line that the program printed for result '{printable(name)[:_SHOWN]}' {why}: '{quoted}'"


def _without_codes(text: bytes) -> bytes:
    """Return lines without the codes of terminals; those that leave a row end a line."""
    return _OTHER_ROW.sub(b"\n", _WITHOUT_EFFECT.sub(b"", text)) if b"\x1b" in text else text


def _lines_with(needle: bytes, text: bytes) -> Iterator[bytes]:
    """Yield the lines that contain `needle`, the last one first."""
    place = text.rfind(needle)
    while place >= 0:
        begin, end = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place)
        yield text[begin:] if end < 0 else text[begin:end]
        place = text.rfind(needle, 0, begin)


_READ_BYTES = 2**18
_PIPE_BYTES = 2**20
_PAUSE_S = 0.01
"""Pause after a small piece of output, so that a program that prints much does not wake this process as often."""


class ProgramOutput:
    """The output of a program: a pipe that a thread copies to the log and reads results from.

    A pipe stays whole whatever the program opens: `> /dev/stderr` would empty a file.
    """

    def __init__(self, log: int, lines: Mapping[str, str]) -> None:
        """Copy to the descriptor `log`; `lines` are those of PrintedResults."""
        self._log = log
        self._results = PrintedResults(lines)
        self._pipe, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writer, True)
        with suppress(PermissionError):  # the user's share of the kernel's memory for pipes is used up
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()
        for descriptor in (self._pipe, self.writer):
            if descriptor >= 0:
                os.close(descriptor)

    def follow(self, end_program: Callable[[], None]) -> None:
        """Begin to read, after the program has got the pipe; call `end_program` when the log cannot be written."""
        os.close(self.writer)
        self.writer = -1
        self._thread = threading.Thread(target=self._follow, args=(end_program,), daemon=True)
        self._thread.start()

    def finish(self) -> PrintedResults:
        """Return the results, once all processes of the program have ended. Raises OSError of the log."""
        self._stop()
        if self._error is not None:
            raise self._error
        self._results.end()
        return self._results

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self, end_program: Callable[[], None]) -> None:
        try:
            self._copy()
        except Exception as error:  # the boundary of a thread: `finish` raises it
            self._error = error
            os.close(self._pipe)  # a program that goes on printing must not wait for a reader
            self._pipe = -1
            end_program()

    def _copy(self) -> None:
        """Read until every process has closed the pipe, or until it is empty after the end of the program."""
        while True:
            over = self._over.is_set()
            try:
                chunk = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                if over:
                    return
                select.select([self._pipe], [], [], _PAUSE_S)
                continue
            if not chunk:
                return
            _write_all(self._log, chunk)
            self._results.feed(chunk)
            if len(chunk) < _READ_BYTES // 4:
                self._over.wait(_PAUSE_S)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
