"""Why an ablation waits, its place in the queue and one estimate; how much work waits in all.

The estimate of an ablation is the blocks that are left, times their mean time, divided by the nodes that may run them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, Row

from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.packages import nodes_of_lane
from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.wording import counted, duration
from ablate.service.lifecycle import OVER
from ablate.service.schemas.nodes import WaitingPublic
from ablate.service.store.blocks import queue
from ablate.service.store.blocks.queue import Pace, QueuePlace
from ablate.service.store.nodes.placement import Needs, lacks

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EligibleNodes:
    """The nodes of one class, sorted for blocks with the same needs."""

    node_class: str
    count: int
    """Nodes that may run the blocks, busy ones included."""
    reasons: Sequence[str]
    """Why each other node may not."""

    @property
    def waits_for(self) -> str | None:
        """What the blocks wait for if no node may run them, else None."""
        if self.count:
            return None
        why = f": {'; '.join(self.reasons)}" if self.reasons else "; none has registered yet"
        return f"a live node of class '{self.node_class}'{why}"


def eligible_nodes(connection: Connection, plan: Plan, *, silent_s: float) -> EligibleNodes:
    """Return the nodes that may run the blocks of `plan` now; a node that was silent for `silent_s` is not live."""
    nodes = queue.nodes_of(connection, [plan.node_class])
    return _eligible(plan.node_class, nodes, Needs.of_plan(plan), silent_s)


def _eligible(node_class: str, nodes: Sequence[Row[Any]], needs: Needs, silent_s: float) -> EligibleNodes:
    reasons = [_why_not(node, needs, silent_s) for node in nodes]
    others = [reason for reason in reasons if reason is not None]
    return EligibleNodes(node_class=node_class, count=reasons.count(None), reasons=others)


def _why_not(node: Row[Any], needs: Needs, silent_s: float) -> str | None:
    if node.revoked:
        return f"the key of '{node.name}' is revoked"
    if node.quarantined_reason is not None:
        return f"'{node.name}' is quarantined ({node.quarantined_reason}){_next_probe(node)}"
    if node.draining:
        return f"'{node.name}' is drained"
    if node.silent_s > silent_s:
        return f"'{node.name}' was last seen {duration(node.silent_s)} ago"
    if node.left_s is not None and needs.takes_s > node.left_s:
        rest = "has ended" if node.left_s <= 0 else f"ends in {duration(node.left_s)}"
        return f"'{node.name}' {rest}, and a block may take {duration(needs.takes_s)}"
    lacking = lacks(node, needs)
    return None if lacking is None else f"'{node.name}' {lacking}"


def _next_probe(node: Row[Any]) -> str:
    if node.probe_in_s is None:
        return ""
    return " and probes itself " + ("now" if node.probe_began_at else f"in {duration(max(0.0, node.probe_in_s))}")


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What an unfinished ablation waits for, and how long it takes."""

    waiting_for: str | None = None
    """None while one of its blocks runs and does not wait on its node."""
    blocks_ahead: int | None = None
    """Blocks of its node class that nodes claim before its next one; None if it waits for something else."""
    starts_in_s: float | None = None
    """Seconds until its next block starts; None without a recent block time of the node class."""
    time_left_s: float | None = None
    """Seconds until its last block ends; None without a block time, and once it has taken as long as it should."""


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The database's state behind a page of ablations."""

    places: Mapping[str, QueuePlace]
    eligible: Mapping[tuple[str, Needs], EligibleNodes]
    """By node class and needs of queued blocks."""
    paces: Mapping[str, Pace]
    own: Mapping[str, Sequence[Row[Any]]]
    """Running blocks by ablation."""
    rests: Mapping[str, Sequence[float]]
    """By node class: the seconds that each running block still takes."""
    silent_s: float


def waiting(connection: Connection, rows: Sequence[Row[Any]], *, silent_s: float) -> dict[str, Waiting]:
    """Return what the unfinished ablations of `rows` wait for; a node that was silent for `silent_s` is not live."""
    unfinished = [row for row in rows if row.state not in OVER]
    if not unfinished:
        return {}
    snapshot = _read(connection, unfinished, silent_s)
    return {row.id: _waiting(row, snapshot) for row in unfinished}


def _read(connection: Connection, rows: Sequence[Row[Any]], silent_s: float) -> _Snapshot:
    classes = {row.node_class for row in rows}
    running, paces = queue.running(connection, classes), queue.paces(connection)
    places = queue.places(connection, [row.id for row in rows if row.blocks_queued])
    nodes = _grouped((node.node_class, node) for node in queue.nodes_of(connection, classes))
    kinds = {(row.node_class, places[row.id].needs) for row in rows if row.id in places}
    return _Snapshot(
        places=places,
        eligible={kind: _eligible(kind[0], nodes.get(kind[0], ()), kind[1], silent_s) for kind in kinds},
        paces=paces,
        own=_grouped((block.ablation_id, block) for block in running),
        rests=_grouped((block.node_class, _rest_s(block, paces)) for block in running),
        silent_s=silent_s,
    )


def _grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _block_s(row: Row[Any], paces: Mapping[str, Pace]) -> float | None:
    """Return the mean time of an ablation's blocks in seconds: its own, else by the recent trials of its node class."""
    if row.blocks_done:
        return float(row.settled_s / row.blocks_done)
    pace = paces.get(row.node_class)
    return None if pace is None else pace.trial_s * float(row.trials_planned / row.blocks_planned)


def _rest_s(block: Row[Any], paces: Mapping[str, Pace]) -> float:
    """Return how long a running block still takes, in seconds; 0 without a mean block time."""
    return max(0.0, (_block_s(block, paces) or 0.0) - float(block.elapsed_s))


def _waiting(row: Row[Any], snapshot: _Snapshot) -> Waiting:
    own = snapshot.own.get(row.id, ())
    if row.state == AblationState.CANCELLING:
        names = ", ".join(f"node '{block.name}'" for block in own)
        return Waiting(waiting_for=f"{names} to stop its trial" if own else "its cancellation to be recorded")
    if own and all(block.silent_s > snapshot.silent_s or block.lease_s < 0 for block in own):
        return Waiting(waiting_for=_lost(own[0]))
    place = snapshot.places.get(row.id)
    if place is None:
        held = not own and row.blocks_held
        waits = Waiting(waiting_for="the look at its blocks so far to decide" if held else _on_node(own))
        return replace(waits, time_left_s=_time_left_s(row, snapshot, 0.0, 1))
    nodes = snapshot.eligible[row.node_class, place.needs]
    waits = Waiting(waiting_for=_on_node(own)) if own else _in_queue(row, snapshot, place, nodes)
    if not nodes.count:
        return waits
    pace = snapshot.paces.get(row.node_class)
    others_s = place.blocks_between * pace.block_s / nodes.count if pace else 0.0
    before_s = max(waits.starts_in_s or 0.0, others_s)
    return replace(waits, time_left_s=_time_left_s(row, snapshot, before_s, nodes.count))


def _on_node(own: Sequence[Row[Any]]) -> str | None:
    """Return what the running blocks of an ablation wait for on their nodes; None if one of them runs a trial."""
    reasons = [block.waits_for for block in own]
    if not reasons or None in reasons:
        return None
    return f"{own[0].waits_for} ({block_name(own[0].block_index)} on node '{own[0].name}')"


def _lost(block: Row[Any]) -> str:
    back = f"in {duration(block.lease_s)}" if block.lease_s > 0 else "now"
    return (
        f"node '{block.name}', which runs {block_name(block.block_index)} and was last seen "
        f"{duration(block.silent_s)} ago; the block goes back to the queue {back}"
    )


def _in_queue(row: Row[Any], snapshot: _Snapshot, place: QueuePlace, nodes: EligibleNodes) -> Waiting:
    """Say why no node has claimed a block of an ablation of which none runs."""
    ahead = place.blocks_ahead
    if nodes.waits_for is not None:
        return Waiting(waiting_for=nodes.waits_for, blocks_ahead=ahead)
    if place.pause_s > 0:
        pause = f"the pause after a broken attempt to end, in {duration(place.pause_s)}"
        return Waiting(waiting_for=pause, blocks_ahead=ahead, starts_in_s=place.pause_s)
    words = f"a free node of class '{row.node_class}' ({nodes.count} live, {counted(ahead, 'block')} ahead in the queue"
    pace = snapshot.paces.get(row.node_class)
    if pace is None:
        return Waiting(waiting_for=f"{words})", blocks_ahead=ahead)
    rests = snapshot.rests.get(row.node_class, ())
    busy_s = sum(rests) if len(rests) >= nodes.count else 0.0
    starts_in_s = (busy_s + ahead * pace.block_s) / nodes.count
    words = f"{words}, about {duration(starts_in_s)} at the recent pace)"
    return Waiting(waiting_for=words, blocks_ahead=ahead, starts_in_s=starts_in_s)


def _time_left_s(row: Row[Any], snapshot: _Snapshot, before_s: float, nodes: int) -> float | None:
    """Return the time to an ablation's end in seconds, if its queued blocks begin after `before_s` on so many nodes.

    Queued blocks that its device minutes no longer pay for do not count. None without a block time, or at 0.
    """
    block_s = _block_s(row, snapshot.paces)
    if block_s is None:
        return None
    rests = [_rest_s(block, snapshot.paces) for block in snapshot.own.get(row.id, ())]
    queued_s = 0.0
    if row.blocks_queued:
        queued_s = _queued_s(row, block_s, snapshot.places[row.id].needs)
    at_once = max(1, min(nodes, len(rests) + row.blocks_queued))
    last_s = before_s + (sum(rests) + queued_s) / at_once if queued_s else 0.0
    return max([last_s, *rests]) or None


def _queued_s(row: Row[Any], block_s: float, needs: Needs) -> float:
    """Return how long an ablation's queued blocks take one after another, as far as its device minutes pay for them."""
    allowed_s: float = row.device_minutes * 60 / needs.busy_devices(row.node_class) - row.device_s
    return min(int(row.blocks_queued) * block_s, max(0.0, allowed_s))


def demand(connection: Connection, *, silent_s: float) -> list[WaitingPublic]:
    """Return the device minutes that wait, by node class and numbers of devices and nodes, and who may run them."""
    rows, paces = queue.waiting(connection), queue.paces(connection)
    nodes = _grouped((node.node_class, node) for node in queue.nodes_of(connection, {row.node_class for row in rows}))
    kinds = _grouped(((row.node_class, row.num_devices, nodes_of_lane(row.lanes)), row) for row in rows)
    return [
        WaitingPublic(
            node_class=node_class,
            devices=devices,
            nodes_each=nodes_each,
            blocks=sum(row.blocks_queued for row in own),
            device_minutes=sum(_queued_minutes(row, paces) for row in own),
            least_s=min(queue.needs_of(row).takes_s for row in own),
            nodes=_count_eligible(nodes.get(node_class, ()), own, silent_s),
        )
        for (node_class, devices, nodes_each), own in sorted(kinds.items())
    ]


def _queued_minutes(row: Row[Any], paces: Mapping[str, Pace]) -> float:
    """Return the device minutes of an ablation's queued blocks; without any block time, each counts with its limit."""
    block_s = _block_s(row, paces)
    needs = queue.needs_of(row)
    return _queued_s(row, row.limit_s if block_s is None else block_s, needs) * needs.busy_devices(row.node_class) / 60


def _count_eligible(nodes: Sequence[Row[Any]], rows: Sequence[Row[Any]], silent_s: float) -> int:
    """Return how many nodes may run a block of one of these ablations now."""
    kinds = set(map(queue.needs_of, rows))
    return sum(any(_why_not(node, needs, silent_s) is None for needs in kinds) for node in nodes)
