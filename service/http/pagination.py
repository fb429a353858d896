"""Pages of lists: a cursor is the key of the last item shown; one extra row reveals that more follow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from sqlalchemy import Connection, Row

from ablate.service.http.responses import document
from ablate.service.schemas.public import Item, Page
from ablate.service.store.session import Store

Key = TypeVar("Key", bound=tuple[str | int, ...])


FROM_NEXT = "From `next_cursor`."
PLACE = "(0|[1-9][0-9]{0,8})"
"""Pattern of a whole number in a cursor."""


def text_like(pattern: str) -> WithJsonSchema:
    """Return the schema of an optional text parameter without null: no query value means null."""
    return WithJsonSchema({"type": "string", "pattern": pattern})


class PageQuery(BaseModel):
    """A page of a list; each list adds the pattern of its cursors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=100, ge=1, le=500, description="Most items on the page.")
    cursor: str | None = Field(default=None, description=FROM_NEXT)


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Key, Item]):
    """Functions that read the rows of a list, ordered by key, and convert them."""

    start: Key
    """The key before the first row."""
    key: Callable[[Row[Any]], Key]
    read: Callable[[Connection, Key, int], list[Row[Any]]]
    """Returns at most this many rows after a key."""
    items: Callable[[Connection, list[Row[Any]]], list[Item]]
    """Converts rows to wire types."""


def page(request: Request, store: Store, wanted: PageQuery, listing: Listing[Key, Item]) -> Response:
    """Answer with one page and a link to the next."""
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
    """Write the key of a page's last item."""
    return ".".join(str(part) for part in key)


def decode_cursor(cursor: str, like: Key) -> Key:
    """Read a cursor that fits its list's pattern as a key with the types of `like`."""
    parts = zip(like, cursor.split("."), strict=True)
    return tuple(type(part)(text) for part, text in parts)  # type: ignore[return-value]  # of the same types
