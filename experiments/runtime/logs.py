"""Log lines of every process, as text or JSON, each with the id of its request."""

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
"""Control characters except tab and newline, and characters that change the direction of text."""


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


def configure_logging(form: LogFormat, *, quiet: tuple[str, ...] = ()) -> None:
    """Log every library to standard error in one format. Loggers in `quiet` log warnings only."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
