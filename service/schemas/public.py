"""The base of all wire types, which service and client share, and pages of lists.

Clients ignore unknown fields, because a newer service may add some.
"""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")

INDEX = "Place of the block in the plan, from 0. People see its number, which counts from 1."


class Public(BaseModel):
    """A document that the service sends."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Page(Public, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None
    """The `cursor` of the next page; null on the last."""


class Version(Public):
    """Versions of the code and of the schemas."""

    version: str
    schema_revision: str
    receipt_schema: int


class DependencyCheck(Public):
    """The check of one dependency."""

    ok: bool
    detail: str


class Readiness(Public):
    """Whether this process answers requests, and the checks of all dependencies."""

    ready: bool
    degraded: list[str] = Field(
        description="Failing checks that stop no request; empty when all is well.", examples=[["broker"]]
    )
    checks: dict[str, DependencyCheck]
