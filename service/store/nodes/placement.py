"""Which node may run which block: it needs lanes, back ends and devices, and a broken block goes elsewhere first."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, or_, select, true

from ablate.experiments.design.gates import BACK_ENDS
from ablate.experiments.design.kinds.program import SECRET
from ablate.experiments.design.packages import LANE, nodes_of_lane
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.workload import COMMAND
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting.wording import counted
from ablate.kernels.backends import Lane
from ablate.service.store.tables import SILENT_S, blocks, has_passed, nodes

ELSEWHERE_S = 300.0
"""How long a block that the node may have broken waits for another node, while another one takes work."""

HEARD_S = 60.0
"""A node that was silent for longer may be gone, so it is no better place."""

ANY_LANE = ""
"""The lanes of a block that was stored before blocks named theirs."""

_REASON_LIMIT = 160  # characters

TAKES_WORK = (
    SILENT_S < HEARD_S,
    nodes.c.left_at.is_(None),
    nodes.c.quarantined_reason.is_(None),
    nodes.c.draining.is_(False),
)

BUSY_ON_A_NODE: ColumnElement[int] = case(
    (blocks.c.node_class.in_(sorted(name for name, entry in NODE_CLASSES.items() if entry.occupied(2) == 1)), 1),
    else_=blocks.c.num_devices,
)
"""Devices that a running block occupies on each of its nodes."""
BUSY_DEVICES: ColumnElement[int] = BUSY_ON_A_NODE * blocks.c.num_nodes
"""Devices that a running block occupies, which is also the device minutes that it uses in a minute."""


_PROGRAMS = (COMMAND, f"{LANE}:")
"""Begin of the lanes of commands and of recipes of packages."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What every block of an ablation needs of its node."""

    lanes: str
    """As blocks store them."""
    back_ends: str
    """As blocks store them."""
    devices: int
    """Devices of each of its nodes that a trial uses together."""
    takes_s: float = 0.0
    """Seconds that one should take at most; 0 for a plan, before anything ran."""

    @property
    def nodes(self) -> int:
        """Nodes over which a trial runs."""
        return nodes_of_lane(self.lanes)

    def busy_devices(self, node_class: str) -> int:
        """Return the devices that a running block occupies, as `BUSY_DEVICES`."""
        return NODE_CLASSES[node_class].occupied(self.devices) * self.nodes

    @classmethod
    def of_plan(cls, plan: Plan) -> "Needs":
        """Return the needs of the blocks of `plan`."""
        names = sorted({name for arm in plan.arms for name in arm.config.back_ends()})
        return cls(
            lanes=",".join(sorted({arm.config.lane() for arm in plan.arms})),
            back_ends=f",{','.join(names)}," if names else "",
            devices=plan.devices,
        )


def may_run_again(moment: ColumnElement[float]) -> ColumnElement[bool]:
    """Return the condition that a block's pause after a broken attempt, or its wait for another node, is over."""
    return has_passed(moment, longest_s=ELSEWHERE_S)


def lanes_that_ran(lanes: Mapping[str, str | None] | None) -> str | None:
    """Return the result of a node's lane check as nodes store it: a JSON list of the lanes that ran, or None."""
    return None if lanes is None else json.dumps(sorted(lane for lane, problem in lanes.items() if problem is None))


def back_ends_that_failed(results: Mapping[str, str | None] | None) -> str | None:
    """Return the lanes and back ends that a node tried in vain, as nodes store them: a JSON object of reasons, or None.

    Programs, which are registered as lanes, are not among them.
    """
    tried = {*BACK_ENDS, *map(str, Lane)}
    failed = {name: problem for name, problem in (results or {}).items() if name in tried and problem is not None}
    return json.dumps(failed) if failed else None


def fits(node: Row[Any], *, room: int | None) -> ColumnElement[bool]:
    """Return the condition on a block that `node` may run.

    `room` is the number of free devices; None for an idle node, which may also spread a step over more devices than it
    has.
    """
    avoid = blocks.c.avoid_node_id
    nowhere_else = ~_others_that_work(node.id, node.node_class).exists()
    free = or_(avoid.is_(None), avoid != node.id, may_run_again(blocks.c.avoid_until), nowhere_else)
    free &= blocks.c.num_devices.in_(NODE_CLASSES[node.node_class].spreads(node.num_devices))
    free &= ~_without_own_secrets(node).contains(f",{SECRET}:", autoescape=True)
    free &= and_(true(), *(~blocks.c.back_ends.contains(f",{name},", autoescape=True) for name in _failed(node)))
    if room is not None:
        free &= blocks.c.num_devices <= room
    if node.lanes is None:
        return free & and_(*(~blocks.c.lanes.startswith(kind, autoescape=True) for kind in _PROGRAMS))
    return free & blocks.c.lanes.in_(_runnable(json.loads(node.lanes)))


def _own_secrets(node: Row[Any]) -> list[str]:
    """Return the secrets that a node offers, as blocks name them."""
    return [lane for lane in json.loads(node.lanes or "[]") if lane.startswith(f"{SECRET}:")]


def _without_own_secrets(node: Row[Any]) -> ColumnElement[str]:
    """Return the needs of a block, of which those secrets are removed that the node offers."""
    needs: ColumnElement[str] = blocks.c.back_ends
    for name in _own_secrets(node):
        needs = func.replace(needs, f",{name},", ",")
    return needs


def _runnable(lanes: list[str]) -> list[str]:
    """Return every combination of lanes that a node with these can run, as blocks store them; a program has one."""
    programs = [lane for lane in lanes if lane.startswith(_PROGRAMS)]
    scans = sorted(set(lanes) & set(map(str, Lane)))
    together = (",".join(chosen) for size in range(1, len(scans) + 1) for chosen in combinations(scans, size))
    return [ANY_LANE, *programs, *together]


def _failed(node: Row[Any]) -> dict[str, str]:
    """Return the reasons of the lanes and back ends that a node tried in vain; empty for a node that tried none."""
    return {} if node.failed_back_ends is None else dict(json.loads(node.failed_back_ends))


def lacks(node: Row[Any], needs: Needs) -> str | None:
    """Say what `node` lacks to run a block with these needs; None if it may run it."""
    return _lacks_nodes(node, needs) or _lacks_more(node, needs)


def _lacks_nodes(node: Row[Any], needs: Needs) -> str | None:
    """Say that a node is an allocation of another number of nodes than a block needs; None if it is not."""
    own = max(map(nodes_of_lane, json.loads(node.lanes or "[]")), default=1)
    return None if own == needs.nodes else f"has {counted(own, 'node')} of a cluster, and a block needs {needs.nodes}"


def _lacks_more(node: Row[Any], needs: Needs) -> str | None:
    lanes = [] if node.lanes is None else json.loads(node.lanes)
    if needs.lanes.startswith(COMMAND) and needs.lanes not in lanes:
        _command, _colon, environment = needs.lanes.partition(":")
        where = f" in Python environment '{environment}' (ABLATE_ENVIRONMENTS)" if environment else ""
        return f"takes no commands{where or '; start its worker with ABLATE_ACCEPT_CODE=true'}"
    if needs.lanes.startswith(f"{LANE}:") and needs.lanes not in lanes:
        name, _at, digest = needs.lanes.removeprefix(f"{LANE}:").partition("@")
        own = [lane for lane in lanes if lane.startswith(f"{LANE}:{name}@")]
        return f"has other code of recipe '{name}' than {digest}" if own else f"has no recipe '{name}'"
    secrets = [name for name in needs.back_ends.split(",") if name.startswith(f"{SECRET}:")]
    if absent := [name.partition(":")[2] for name in secrets if name not in lanes]:
        return f"has no secret {' and '.join(absent)} (ABLATE_SECRETS)"
    scans = [] if node.lanes is None else [lane for lane in needs.lanes.split(",") if lane not in {ANY_LANE, *lanes}]
    reasons = _failed(node)
    if untried := [lane for lane in scans if lane not in reasons]:
        return f"did not run lane {' and '.join(untried)} in its check"
    failed = {f"lane {lane}": reasons[lane] for lane in scans}
    failed |= {
        name.replace("=", " "): reason for name, reason in sorted(reasons.items()) if f",{name}," in needs.back_ends
    }
    if failed:
        named = (
            f"{name} ({textwrap.shorten(reason, _REASON_LIMIT, placeholder=' ...')})" for name, reason in failed.items()
        )
        return f"does not work with {' and '.join(named)}"
    return _lacks_devices(node, needs)


def _lacks_devices(node: Row[Any], needs: Needs) -> str | None:
    if needs.devices not in NODE_CLASSES[node.node_class].spreads(node.num_devices):
        plural = "" if node.num_devices == 1 else "s"
        needed = "a block needs" if needs.devices > node.num_devices else "one step is spread over"
        return f"has {node.num_devices} device{plural}, and {needed} {needs.devices}"
    return None


def works_elsewhere(connection: Connection, node_id: str, node_class: str) -> bool:
    """Return whether another node of the class takes work now."""
    return connection.execute(_others_that_work(node_id, node_class).limit(1)).first() is not None


def _others_that_work(node_id: str, node_class: str) -> Select[Any]:
    return select(nodes.c.id).where(nodes.c.node_class == node_class, nodes.c.id != node_id, *TAKES_WORK)
