"""Output of every process: log lines as text or JSON, each with the id of its request; text for any terminal."""

import codecs
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that change the direction of text."""
WARNING = "warning: "
"""How a line for people begins that warns of something."""


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


@contextmanager
def requested_by(request_id: str | None) -> Iterator[None]:
    """Add this request id to all log lines inside."""
    previous = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(previous)


def current_request_id() -> str | None:
    """Return the id of the current request, or None outside of a request."""
    return _request_id.get()


def style_of(line: str) -> str:
    """Return the style of a remark on a terminal: warnings stand out."""
    return "yellow" if line.startswith(WARNING) else "dim"


def visible(text: str) -> str:
    """Return untrusted text with symbols in place of characters that control a terminal."""
    return UNSEEN.sub(_symbol, text)


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = visible(super().format(record))
        request_id = current_request_id()
        return f"{line} [{request_id}]" if request_id else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": current_request_id(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in values.items() if value is not None})


_PLAIN = {
    "\N{MIDDLE DOT}": "|",
    "\N{EN DASH}": "-",
    "\N{MINUS SIGN}": "-",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{NO-BREAK SPACE}": " ",
    "\N{PLUS-MINUS SIGN}": "+/-",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{CHECK MARK}": "ok",
    "\N{REPLACEMENT CHARACTER}": "?",
    "\N{IDENTICAL TO}": "=",
    "\N{BLACK UP-POINTING TRIANGLE}": "^",
    "\N{BLACK DOWN-POINTING TRIANGLE}": "v",
    "\N{BLACK RIGHT-POINTING TRIANGLE}": ">",
    "\N{BLACK SQUARE}": "#",
    "\N{BLACK CIRCLE}": "*",
    "\N{WHITE CIRCLE}": "o",
    "\N{CIRCLED DIVISION SLASH}": "/",
    "\N{RIGHTWARDS ARROW TO BAR}": "->",
}
"""Marks of our own sentences, for terminals without them."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return a replacement for characters that a stream cannot encode: a plain mark, or the code as in JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_mark, error.object[error.start : error.end])), error.end


def _mark(sign: str) -> str:
    if sign in _PLAIN:
        return _PLAIN[sign]
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


codecs.register_error("ablate.ascii", _in_ascii)


def accept_every_text() -> None:
    """Let standard output and error take every text, in any encoding, also if they are closed.

    A character that the encoding lacks becomes ASCII. Every program calls this before it prints.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the shell closed it (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ablate.ascii")


def is_unicode(stream: TextIO) -> bool:
    """Return whether the stream's encoding has every character."""
    return (stream.encoding or "ascii").lower().startswith("utf")


def configure_logging(form: LogFormat, *, quiet: tuple[str, ...] = ()) -> None:
    """Log every library to standard error in one format. Loggers in `quiet` log warnings only, and so does httpx.

    It would log whole addresses, and the path of a webhook's address is often a secret.
    """
    accept_every_text()
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("httpx", *quiet):
        logging.getLogger(name).setLevel(logging.WARNING)
