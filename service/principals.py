"""Principals, which send requests, and the scopes of their tokens."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SERVICE: Final = "service"
"""Name of the service itself, which submits sentinels."""


class Scope(StrEnum):
    """Permission of a token. Each scope of people includes those before it; those of machines stand apart."""

    READ = "read"
    SUBMIT = "submit"
    """Submit, and change own ablations."""
    CODE = "code"
    """Submit specs with a command, which runs code of the submitter on a node."""
    OPERATE = "operate"
    """Change all ablations, import, and manage nodes and their keys."""
    ADMIN = "admin"
    """Manage tokens."""
    WORKER = "worker"
    """Register, claim and report for one node."""
    ENROL = "enrol"
    """Store the key of a new node of one class, and nothing else."""

    def includes(self, needed: "Scope") -> bool:
        """Return whether a token of this scope has the permission `needed`."""
        if {Scope.WORKER, Scope.ENROL} & {self, needed}:
            return self == needed
        ranks = list(Scope)
        return ranks.index(self) >= ranks.index(needed)


@dataclass(frozen=True, kw_only=True)
class Principal:
    """The sender of a request."""

    token_id: str
    name: str
    scope: Scope
    node: str | None = None
    """The node that a worker key belongs to; None for every other scope."""
    node_class: str | None = None
    """The only class under which that node may register, or of a node to enrol; None for any."""
    device_minutes: float | None = None
    """Device minutes that its ablations may use in total; None for no limit."""
