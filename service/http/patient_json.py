"""JSON bodies of many megabytes, read without stopping everybody else.

A parser in C keeps the interpreter to itself until the document is whole: seconds, in which no other request is
answered. A large body is read in another thread by the standard library's parser in Python, which lets others go on
every few milliseconds, one body at a time.
"""

import json
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]  # unknown to the checker
from json.scanner import make_scanner, py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn

from anyio import to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute

AT_ONCE_BYTES = 1_048_576
"""Bodies up to this size are parsed where they arrive, in some ten milliseconds at most."""
LEVELS = 3
"""Lists and mappings inside of each other that are read in Python: to the files of an import, the steps of a report."""
_SURROGATES = ("\\ud", "\\uD")
"""How characters that may lack their other half are written."""


class LargeBodyRoute(APIRoute):
    """A route whose body may be large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the framework, on a request that is read patiently."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(PatientRequest(request.scope, request.receive))

        return handle


class PatientRequest(Request):
    """A request whose large JSON is parsed in another thread, and refused where UTF-8 cannot hold it."""

    async def is_large(self) -> bool:
        """Tell whether the body is parsed in another thread."""
        return len(await self.body()) > AT_ONCE_BYTES

    async def json(self) -> Any:
        """Return the document. Raises JSONDecodeError, RecursionError."""
        if not await self.is_large():
            return await super().json()
        if not hasattr(self, "_json"):
            limiter = self.app.state.services.large_bodies
            self._json = await to_thread.run_sync(parse, await self.body(), limiter=limiter)
        return self._json


def parse(body: bytes) -> Any:
    """Return the document of `body`: what json.loads returns, but NaN, Infinity and lone surrogates are refused.

    Raises JSONDecodeError, RecursionError for too many levels.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"not UTF-8: {error.reason}", "", error.start) from error
    decoder = _Checking() if any(mark in text for mark in _SURROGATES) else _ByLevels()
    return decoder.decode(text)


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no JSON", "", 0)


Scan = Callable[[str, int], tuple[Any, int]]
"""Reads the value at a place of a text; returns it and the place after it."""


class _ByLevels(json.JSONDecoder):
    """Reads the first levels in Python and each value below them in C: a file of a bundle, a step of a trial."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant)
        self.scan_once: Scan = _scan_from(make_scanner(self), level=0)  # type: ignore[arg-type]  # as the parent does it


def _scan_from(in_c: Scan, *, level: int) -> Scan:
    below = in_c if level == LEVELS else _scan_from(in_c, level=level + 1)

    def scan(text: str, place: int) -> tuple[Any, int]:
        found: tuple[Any, int]
        match text[place : place + 1]:
            case "[":
                found = JSONArray((text, place + 1), below)
            case "{":
                found = JSONObject((text, place + 1), True, below, None, None)
            case _:
                found = in_c(text, place)
        return found

    return scan


class _Checking(json.JSONDecoder):
    """Reads all but the characters of strings in Python, and looks at every string."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant, object_pairs_hook=_checked_keys)
        self.parse_string = _checked_string
        self.scan_once = py_make_scanner(self)


def _checked_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        _check(key, 0)
    return dict(pairs)


def _checked_string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    found, end = scanstring(text, begin, strict)
    _check(found, begin)
    return found, end


def _check(found: str, begin: int) -> None:
    if found.isascii():
        return
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise json.JSONDecodeError("a lone surrogate is no character", "", begin) from error
