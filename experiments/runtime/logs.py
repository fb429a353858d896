"""Log lines of every process: text for people or JSON for programs, each with the request that it belongs to."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and signs that turn the direction of text."""


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


@contextmanager
def requested_by(request_id: str | None) -> Iterator[None]:
    """Mark everything that is logged inside with the request that asked for it."""
    before = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(before)


def current_request_id() -> str | None:
    """Return the id of the request that this code works for, None where it works for none."""
    return _request_id.get()


def visible(text: str) -> str:
    """Return text from outside with nothing in it that steers a terminal: such signs are shown as pictures."""
    return UNSEEN.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        said = visible(super().format(record))
        request_id = current_request_id()
        return f"{said} [{request_id}]" if request_id else said


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


def configure_logging(form: LogFormat, *, quiet: tuple[str, ...] = ()) -> None:
    """Send log lines of every library to standard error, one form for all; `quiet` loggers only warn."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
