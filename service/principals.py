"""Who sends requests: the scopes of tokens, and the principal behind one."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SERVICE: Final = "service"
"""Who submits sentinels: the service itself."""


class Scope(StrEnum):
    """What a token may do. Each human scope includes the ones before it; a node's key stands apart."""

    READ = "read"
    SUBMIT = "submit"
    """Submit, and change what the same token submitted."""
    OPERATE = "operate"
    """Change what anybody submitted; import; nodes and their keys."""
    ADMIN = "admin"
    """Tokens."""
    WORKER = "worker"
    """Register, claim and report for one node."""

    def includes(self, needed: "Scope") -> bool:
        """Tell whether a token of this scope may do what `needed` is asked for."""
        if Scope.WORKER in (self, needed):
            return self == needed
        ranks = list(Scope)
        return ranks.index(self) >= ranks.index(needed)


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who sent a request."""

    token_id: str
    name: str
    scope: Scope
    node: str | None = None
    """The node that a worker key belongs to; None for every other scope."""
    node_class: str | None = None
    """The only class under which that node may register; None for any."""
    device_minutes: float | None = None
    """Device minutes that its ablations may use in all; None for no limit."""
