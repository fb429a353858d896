"""List pages: a cursor holds the key of the last item shown; one row more than the limit tells that more follow."""

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, Row

from experiments.errors import SpecProblem
from service.errors import Invalid
from service.responses import document
from service.schemas.public import Item, Page
from service.store.session import Store

Key = TypeVar("Key", bound=tuple[str | int, ...])


class PageQuery(BaseModel):
    """Which page of a list."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=100, ge=1, le=500, description="Most items on the page.")
    cursor: str | None = Field(
        default=None, max_length=200, pattern="^[A-Za-z0-9_-]+$", description="From `next_cursor`."
    )


PageQueryDep = Annotated[PageQuery, Query()]


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Key, Item]):
    """How the rows of a list are read, in the order of their keys, and shown."""

    start: Key
    """The key before the first row."""
    key: Callable[[Row[Any]], Key]
    read: Callable[[Connection, Key, int], list[Row[Any]]]
    """Returns the rows after a key, at most so many."""
    items: Callable[[Connection, list[Row[Any]]], list[Item]]
    """Builds what is shown of rows."""


def page(request: Request, store: Store, wanted: PageQuery, listing: Listing[Key, Item]) -> Response:
    """Answer with one page and a link to the next. Raises Invalid for a cursor that no page handed out."""
    after = listing.start if wanted.cursor is None else decode_cursor(wanted.cursor, listing.start)
    with store.read() as connection:
        rows = listing.read(connection, after, wanted.limit + 1)
        shown = listing.items(connection, rows[: wanted.limit])
    cursor = encode_cursor(listing.key(rows[wanted.limit - 1])) if len(rows) > wanted.limit else None
    return document(request, Page(items=shown, next_cursor=cursor), headers=_next_link(request, cursor))


def _next_link(request: Request, cursor: str | None) -> dict[str, str]:
    if cursor is None:
        return {}
    kept = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    return {"Link": f'<{request.url.path}?{urlencode([*kept, ("cursor", cursor)])}>; rel="next"'}


def encode_cursor(key: tuple[str | int, ...]) -> str:
    """Pack the key of a page's last item."""
    return base64.urlsafe_b64encode(":".join(str(part) for part in key).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, like: Key) -> Key:
    """Unpack a cursor into a key with the types of `like`. Raises Invalid for anything that no page handed out."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        values = tuple(type(part)(given) for part, given in zip(like, text.split(":"), strict=True))
    except (ValueError, binascii.Error) as error:
        raise _bad_cursor(cursor) from error
    if any(isinstance(value, int) and not -1 <= value < 2**31 for value in values) or not text.isprintable():
        raise _bad_cursor(cursor)
    return values  # type: ignore[return-value]  # of the same types, one by one


def _bad_cursor(cursor: str) -> Invalid:
    hint = "give back `next_cursor` of the page before, unchanged"
    return Invalid(problems=[SpecProblem(pointer="query:cursor", detail=f"{cursor!r} is not a cursor", hint=hint)])
