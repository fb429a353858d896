"""Which nodes may run an ablation's blocks now, and in words why the others may not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from experiments.design.plan import Plan
from experiments.reporting.wording import duration
from service.store.ablations import queue
from service.store.nodes.placement import Needs, lacks, lanes_of


@dataclass(frozen=True, kw_only=True)
class Takers:
    """The nodes of one class, sorted for blocks with the same needs."""

    node_class: str
    working: int
    """Nodes that may run the blocks, busy ones included."""
    reasons: Sequence[str]
    """Why each other node may not."""

    @property
    def waits_for(self) -> str | None:
        """What the blocks wait for if no node may run them, else None."""
        if self.working:
            return None
        why = f": {'; '.join(self.reasons)}" if self.reasons else "; none has registered yet"
        return f"a live node of class '{self.node_class}'{why}"


def takers(node_class: str, nodes: Sequence[Row[Any]], needs: Needs, *, silent_s: float) -> Takers:
    """Sort the `nodes` of a class; a node that was silent for `silent_s` is not live."""
    reasons = [_why_not(node, needs, silent_s) for node in nodes]
    return Takers(
        node_class=node_class, working=reasons.count(None), reasons=[reason for reason in reasons if reason is not None]
    )


def needs_of(plan: Plan) -> Needs:
    """Return the needs that all blocks of `plan` share."""
    return Needs(lanes=lanes_of(plan), devices=plan.devices)


def takers_of(connection: Connection, node_class: str, needs: Needs, *, silent_s: float) -> Takers:
    """Return the nodes of a class that may run blocks with these needs now."""
    return takers(node_class, queue.nodes_of(connection, [node_class]), needs, silent_s=silent_s)


def _why_not(node: Row[Any], needs: Needs, silent_s: float) -> str | None:
    if node.revoked:
        return f"the key of '{node.name}' is revoked"
    if node.quarantined_reason is not None:
        return f"'{node.name}' is quarantined ({node.quarantined_reason})"
    if node.draining:
        return f"'{node.name}' is drained"
    if node.silent_s > silent_s:
        return f"'{node.name}' was last seen {duration(node.silent_s)} ago"
    lacking = lacks(node, needs)
    return None if lacking is None else f"'{node.name}' {lacking}"
