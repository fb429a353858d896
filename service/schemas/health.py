"""Wire types of versions and readiness."""

from pydantic import Field

from service.schemas.public import Public


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
