"""Answers to operators: versions and readiness."""

from pydantic import Field

from service.schemas.public import Public


class Version(Public):
    """Which code and schema answer."""

    version: str
    schema_revision: str
    receipt_schema: int


class DependencyCheck(Public):
    """One thing that the service needs."""

    ok: bool
    detail: str


class Readiness(Public):
    """Whether this process answers requests, and what of the whole does not work."""

    ready: bool
    degraded: list[str] = Field(
        description="Checks that fail while everything else goes on; empty when all is well.", examples=[["broker"]]
    )
    checks: dict[str, DependencyCheck]
