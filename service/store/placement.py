"""Which node may take which block: not a stopped one, not without the lanes that it needs, elsewhere after a break."""

import json
from collections.abc import Mapping
from itertools import combinations

from sqlalchemy import ColumnElement, Connection, Row, func, select

from experiments.design.plan import Plan
from service.store.columns import db_now
from service.store.tables import blocks, nodes

ELSEWHERE_S = 300.0
"""A block that broke for a node's sake waits so long for another one, where another one takes work."""

ANY_LANE = ""
"""What a block needs that was stored before it was known."""


def lanes_of(plan: Plan) -> str:
    """Return the lanes that one block of `plan` runs, as it is stored with the block."""
    return ",".join(sorted({str(arm.gates["lane"]) for arm in plan.arms}))


def lanes_that_ran(lanes: Mapping[str, str | None] | None) -> str | None:
    """Return what a node's check of its lanes says, as it is stored: JSON of the lanes that ran, None without a check."""
    return None if lanes is None else json.dumps(sorted(lane for lane, problem in lanes.items() if problem is None))


def fits(node: Row[tuple[object, ...]]) -> ColumnElement[bool]:
    """Return the condition that a waiting block may be given to `node`."""
    elsewhere = (blocks.c.avoid_node_id == node.id) & (blocks.c.avoid_until > db_now())
    may = func.coalesce(elsewhere, False) == False  # noqa: E712  # NULL where the block broke nowhere
    return may if node.lanes is None else may & blocks.c.lanes.in_(_runnable(json.loads(node.lanes)))


def _runnable(lanes: list[str]) -> list[str]:
    """Return every combination of lanes that a node with these can run, as blocks store them."""
    sizes = range(1, len(lanes) + 1)
    return [ANY_LANE, *(",".join(chosen) for size in sizes for chosen in combinations(sorted(lanes), size))]


def works_elsewhere(connection: Connection, node_id: str, node_class: str, *, silent_s: float) -> bool:
    """Tell whether another node of the class takes work now."""
    others = select(nodes.c.id).where(nodes.c.node_class == node_class, nodes.c.id != node_id, *takes_work(silent_s))
    return connection.execute(others.limit(1)).first() is not None


def takes_work(silent_s: float) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that a node was heard lately and is not stopped."""
    return (
        nodes.c.seen_at > db_now() - silent_s,
        nodes.c.quarantined_reason.is_(None),
        nodes.c.draining.is_(False),
    )
