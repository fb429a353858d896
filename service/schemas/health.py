"""Answers to operators: versions and readiness."""

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
    """Whether everything that the service needs can be reached."""

    ready: bool
    checks: dict[str, DependencyCheck]
