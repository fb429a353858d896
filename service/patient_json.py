"""JSON bodies of many megabytes, read without stopping everybody else.

A parser in C keeps the interpreter to itself until the document is whole: seconds, in which no other request is
answered. A large body is read in another thread by the standard library's parser in Python, which lets others go on
every few milliseconds, one body at a time.
"""

import json
from collections.abc import Callable, Coroutine
from json.decoder import scanstring
from json.scanner import py_make_scanner
from typing import Any, NoReturn

from anyio import to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute

AT_ONCE_BYTES = 1_048_576
"""Bodies up to this size are parsed where they arrive, in some ten milliseconds at most."""


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
    return _Decoder().decode(text)


class _Decoder(json.JSONDecoder):
    """The standard library's decoder with all but its strings in Python."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant, object_pairs_hook=_checked_keys)
        self.parse_string = _checked_string
        self.scan_once = py_make_scanner(self)


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no JSON", "", 0)


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
