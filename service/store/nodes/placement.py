"""Which node may take which block: not a stopped one, not without its lanes and devices, elsewhere after a break."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, Row, bindparam, case, or_, select

from experiments.design.plan import Plan
from kernels.backends import NODE_CLASSES
from service.store.columns import db_now
from service.store.tables import blocks, nodes

ELSEWHERE_S = 300.0
"""A block that broke for a node's sake waits so long for another one, where another one takes work."""

HEARD_S = 60.0
"""A node that was silent for longer is no better place: it may be gone."""

ANY_LANE = ""
"""What a block needs that was stored before it was known."""

_TAKES_WORK = (
    nodes.c.seen_at > db_now() - HEARD_S,
    nodes.c.quarantined_reason.is_(None),
    nodes.c.draining.is_(False),
)


NODE_ID: BindParameter[str] = bindparam("to_node", type_=blocks.c.node_id.type)
"""The node that asks for a block."""

BUSY_DEVICES: ColumnElement[int] = case(
    (blocks.c.node_class.in_(sorted(name for name, entry in NODE_CLASSES.items() if entry.occupied(2) == 1)), 1),
    else_=blocks.c.num_devices,
)
"""Devices that a block keeps busy while it runs: so many device minutes pass in a minute."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What every block of an ablation needs of its node."""

    lanes: str
    """As blocks store them."""
    devices: int
    """That share one step."""


def lanes_of(plan: Plan) -> str:
    """Return the lanes that one block of `plan` runs, as it is stored with the block."""
    return ",".join(sorted({str(arm.gates["lane"]) for arm in plan.arms}))


def lanes_that_ran(lanes: Mapping[str, str | None] | None) -> str | None:
    """Return what a node's check of its lanes says, as it is stored: a JSON list of those that ran, or None."""
    return None if lanes is None else json.dumps(sorted(lane for lane, problem in lanes.items() if problem is None))


@dataclass(frozen=True)
class Fits:
    """What decides which waiting blocks may be given to a node; nodes alike share their statements."""

    node_class: str
    num_devices: int
    lanes: str | None
    """As they are stored with the node."""
    room: int | None
    """Devices that are left; None for an idle node, which may also spread a step over more than it has."""

    @property
    def condition(self) -> ColumnElement[bool]:
        """The condition on a block, for the node of the parameter `to_node`."""
        avoid = blocks.c.avoid_node_id
        free = or_(avoid.is_(None), avoid != NODE_ID, blocks.c.avoid_until <= db_now())
        free &= blocks.c.num_devices.in_(NODE_CLASSES[self.node_class].spreads(self.num_devices))
        if self.room is not None:
            free &= blocks.c.num_devices <= self.room
        return free if self.lanes is None else free & blocks.c.lanes.in_(_runnable(json.loads(self.lanes)))


def _runnable(lanes: list[str]) -> list[str]:
    """Return every combination of lanes that a node with these can run, as blocks store them."""
    sizes = range(1, len(lanes) + 1)
    return [ANY_LANE, *(",".join(chosen) for size in sizes for chosen in combinations(sorted(lanes), size))]


def lacks(node: Row[Any], needs: Needs) -> str | None:
    """Return what `node` lacks to run a block that needs this, in words; None when it may run it."""
    if node.lanes is not None and not set(needs.lanes.split(",")) <= {ANY_LANE, *json.loads(node.lanes)}:
        return f"did not run the lanes {needs.lanes} in its check"
    if needs.devices not in NODE_CLASSES[node.node_class].spreads(node.num_devices):
        plural = "" if node.num_devices == 1 else "s"
        return f"has {node.num_devices} device{plural}, and one step is spread over {needs.devices}"
    return None


def works_elsewhere(connection: Connection, node_id: str, node_class: str) -> bool:
    """Tell whether another node of the class takes work now."""
    others = select(nodes.c.id).where(nodes.c.node_class == node_class, nodes.c.id != node_id, *_TAKES_WORK)
    return connection.execute(others.limit(1)).first() is not None
