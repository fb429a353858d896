"""What all wire types share, and pages of them: the service builds them, the client reads them.

A reader passes over fields that it does not know: a newer service adds some.
"""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

Item = TypeVar("Item")

INDEX = "Place of the block in the plan, from 0. People are shown its number, which counts from 1."


class Public(BaseModel):
    """A document that is sent to people and programs."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Page(Public, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None
    """Give it back as `cursor` for the next page; null on the last."""
