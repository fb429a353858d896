"""Which nodes may take blocks now, and in words why the others may not: for a plan, and for what waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from experiments.design.plan import Plan
from service.store.ablations import queue
from service.store.nodes.placement import Needs, lacks, lanes_of

NONE_REGISTERED = "none has registered: it waits until somebody starts one"
"""Of a node class that never had a node."""


@dataclass(frozen=True, kw_only=True)
class Takers:
    """The nodes of a class, before blocks that all need the same."""

    node_class: str
    working: int
    """Nodes that may take them."""
    reasons: Sequence[str]
    """Why the others may not."""

    @property
    def waits_for(self) -> str | None:
        """What the blocks wait for when no node may take them, else None."""
        if self.working:
            return None
        why = f": {'; '.join(self.reasons)}" if self.reasons else f"; {NONE_REGISTERED}"
        return f"a live node of class '{self.node_class}'{why}"


def takers(node_class: str, nodes: Sequence[Row[Any]], needs: Needs, *, silent_s: float) -> Takers:
    """Sort the `nodes` of a class; one counts as silent when it was not heard for `silent_s`."""
    found = [_why_not(node, needs, silent_s) for node in nodes]
    reasons = [reason for reason in found if reason is not None]
    return Takers(node_class=node_class, working=found.count(None), reasons=reasons)


def needs_of(plan: Plan) -> Needs:
    """Return what every block of `plan` needs of its node."""
    return Needs(lanes=lanes_of(plan), devices=plan.devices)


def takers_of(connection: Connection, node_class: str, needs: Needs, *, silent_s: float) -> Takers:
    """Return the nodes of a class that may take blocks with these needs if they were submitted now."""
    return takers(node_class, queue.nodes_of(connection, [node_class]), needs, silent_s=silent_s)


def _why_not(node: Row[Any], needs: Needs, silent_s: float) -> str | None:
    if node.revoked:
        return f"the key of '{node.name}' is revoked"
    if node.quarantined_reason is not None:
        return f"'{node.name}' is quarantined ({node.quarantined_reason})"
    if node.draining:
        return f"'{node.name}' is drained"
    if node.silent_s > silent_s:
        return f"'{node.name}' was last heard {duration(node.silent_s)} ago"
    lacking = lacks(node, needs)
    return None if lacking is None else f"'{node.name}' {lacking}"


def duration(seconds: float) -> str:
    """Write a duration of which nobody needs more than two digits."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.3g} h"
