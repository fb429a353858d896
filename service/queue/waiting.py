"""Why an ablation waits, in words, with its place in the queue and an estimate: for a page of them at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row

from experiments.block_numbers import block_name
from experiments.outcomes import AblationState
from experiments.reporting import wording
from kernels.backends import NODE_CLASSES
from service.lifecycle import OVER
from service.queue.eligible_nodes import Takers, duration, takers
from service.queue.time_left import affordable, last_end_s, rest_s, trial_s
from service.store.ablations import queue
from service.store.ablations.queue import Pace, QueuePlace
from service.store.nodes.placement import Needs

_NAMED = 3  # ablations


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What an ablation that is not over waits for, and how long it takes."""

    waiting_for: str | None = None
    """None while one of its blocks runs."""
    blocks_ahead: int | None = None
    """Blocks of its node class that are given out before its next one; None where it waits for something else."""
    starts_in_s: float | None = None
    """Until its next block starts, at the recent pace; None where nothing of the kind was measured."""
    time_left_s: float | None = None
    """Until its last block ends, with the blocks of others that come before it by now, without held ones and those
    that its device minutes do not allow; None where nothing of the kind was measured, and where it has taken as long
    as it should."""


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """What was read for a page of ablations."""

    places: Mapping[str, QueuePlace]
    holders: Mapping[str, Sequence[Row[Any]]]
    nodes: Mapping[str, Sequence[Row[Any]]]
    needs: Mapping[str, Needs]
    paces: Mapping[str, Pace]
    running: Mapping[str, Sequence[Row[Any]]]
    """Running blocks by node class."""
    own_running: Mapping[str, Sequence[Row[Any]]]
    """Running blocks by ablation."""
    silent_s: float
    sorted_nodes: dict[tuple[str, Needs], Takers] = field(default_factory=dict)
    """The nodes of a class before blocks that need this: once for a page."""

    @cached_property
    def rests(self) -> dict[str, list[tuple[str, float | None]]]:
        """By node class: which ablation each running block is of and what it still takes; None where nobody knows."""
        return {name: [(one.ablation_id, self._rest_s(one)) for one in held] for name, held in self.running.items()}

    def _rest_s(self, block: Row[Any]) -> float | None:
        one_trial_s = trial_s(block, [block], self.paces.get(block.node_class))
        return None if one_trial_s is None else rest_s(block, one_trial_s)


def waiting(connection: Connection, rows: Sequence[Row[Any]], *, silent_s: float) -> dict[str, Waiting]:
    """Return what the ablations of `rows` that are not over wait for, and how long they take.

    A node counts as silent when it was not heard for `silent_s`.
    """
    unfinished = [row for row in rows if row.state not in OVER]
    if not unfinished:
        return {}
    around = _read(connection, unfinished, silent_s)
    return {row.id: _with_time_left(row, around, _waiting(row, around) or Waiting()) for row in unfinished}


def _with_time_left(row: Row[Any], around: _Surroundings, found: Waiting) -> Waiting:
    """Add what its running blocks still need, and those that are queued after them."""
    if found.waiting_for is not None and found.starts_in_s is None:
        return found
    own = around.own_running.get(row.id, ())
    one_trial_s = trial_s(row, own, around.paces.get(row.node_class))
    if one_trial_s is None:
        return found
    running_s = max((rest_s(block, one_trial_s) for block in own), default=0.0)
    queued_s = _queued_s(row, around, one_trial_s) if row.id in around.places else 0.0
    left_s = None if queued_s is None else max(running_s, queued_s)
    return replace(found, time_left_s=left_s or None)


def _queued_s(row: Row[Any], around: _Surroundings, one_trial_s: float) -> float | None:
    """Return when the last of an ablation's queued blocks ends; None where nothing is known of what comes before it."""
    place, pace = around.places[row.id], around.paces.get(row.node_class)
    others = [rest for ablation_id, rest in around.rests.get(row.node_class, ()) if ablation_id != row.id]
    known = [rest for rest in others if rest is not None]
    if len(known) < len(others) or (place.blocks_between and pace is None):
        return None
    rests = [*known, *(rest_s(block, one_trial_s) for block in around.own_running.get(row.id, ()))]
    block_s = one_trial_s * row.trials_planned / row.blocks_planned
    own = _affordable(row, around, block_s)
    jobs = [(place.blocks_between, pace.block_s if pace else 0.0), (own, block_s)]
    return max(0.0, place.rest_s) + last_end_s(rests, _takers(row, around).working, jobs) if own else 0.0


def _affordable(row: Row[Any], around: _Surroundings, block_s: float) -> int:
    """Return how many of an ablation's queued blocks run before its device minutes are used up."""
    busy = NODE_CLASSES[row.node_class].occupied(around.needs[row.id].devices)
    return affordable(
        row.blocks_queued,
        len(around.own_running.get(row.id, ())),
        block_s=block_s,
        budget_s=row.device_minutes * 60 / busy - row.device_s,
        nodes=_takers(row, around).working,
    )


def _read(connection: Connection, rows: Sequence[Row[Any]], silent_s: float) -> _Surroundings:
    ids = [row.id for row in rows]
    queued = [row.id for row in rows if row.blocks_queued]
    classes = {row.node_class for row in rows}
    running = queue.running(connection, classes)
    return _Surroundings(
        places=queue.places(connection, queued) if queued else {},
        holders=_grouped(queue.holders(connection, ids), lambda row: row.ablation_id),
        nodes=_grouped(queue.nodes_of(connection, classes), lambda row: row.node_class),
        needs=queue.needs(connection, queued) if queued else {},
        paces=queue.paces(connection),
        running=_grouped(running, lambda row: row.node_class),
        own_running=_grouped(running, lambda row: row.ablation_id),
        silent_s=silent_s,
    )


def _grouped(rows: Sequence[Row[Any]], key: Callable[[Row[Any]], str]) -> dict[str, list[Row[Any]]]:
    groups: dict[str, list[Row[Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _waiting(row: Row[Any], around: _Surroundings) -> Waiting | None:
    held = around.holders.get(row.id, ())
    silent = [one for one in held if one.silent_s > around.silent_s or one.lease_s < 0]
    if row.state == AblationState.CANCELLING:
        return Waiting(waiting_for=f"{_names(held)} to stop its trial" if held else "its cancellation to be noted")
    if len(silent) < len(held):
        return None
    if silent:
        return Waiting(waiting_for=_lost(silent[0]))
    if row.id in around.places:
        return _in_queue(row, around, around.places[row.id])
    return Waiting(waiting_for="the look at its blocks so far to decide") if row.blocks_held else None


def _names(held: Sequence[Row[Any]]) -> str:
    return ", ".join(f"node '{one.name}'" for one in held)


def _lost(one: Row[Any]) -> str:
    what = f"node '{one.name}', which runs {block_name(one.block_index)} and was last heard "
    when = f"{duration(one.silent_s)} ago"
    then = f"in {duration(one.lease_s)}" if one.lease_s > 0 else "now"
    return f"{what}{when}; the block goes back to the queue {then}"


def _in_queue(row: Row[Any], around: _Surroundings, place: QueuePlace) -> Waiting:
    found = _takers(row, around)
    if found.waits_for is not None:
        return Waiting(waiting_for=found.waits_for, blocks_ahead=place.blocks_ahead)
    working = found.working
    if place.rest_s > 0:
        pause = f"the pause after a broken attempt to end, in {duration(place.rest_s)}"
        return Waiting(waiting_for=pause, blocks_ahead=place.blocks_ahead, starts_in_s=place.rest_s)
    starts_in_s = _estimate(row.node_class, around, place, working)
    counted = wording.counted(place.blocks_ahead, "block")
    words = f"a free node of class '{row.node_class}' ({working} live, {counted} ahead in the queue"
    if starts_in_s is not None:
        words += f", about {duration(starts_in_s)} at the recent pace"
    words += f"){_runs(around.running.get(row.node_class, ()), working)}"
    return Waiting(waiting_for=words, blocks_ahead=place.blocks_ahead, starts_in_s=starts_in_s)


def _runs(held: Sequence[Row[Any]], working: int) -> str:
    """Say what the nodes run when none is free."""
    names = list(dict.fromkeys(f"'{one.name}'" for one in held))
    more = ["others"] if len(names) > _NAMED else []
    return f"; running now: {wording.listed([*names[:_NAMED], *more])}" if len(held) >= working else ""


def _takers(row: Row[Any], around: _Surroundings) -> Takers:
    """Return which nodes may take the ablation's blocks, and why the others may not."""
    kind = (row.node_class, around.needs[row.id])
    if kind not in around.sorted_nodes:
        nodes = around.nodes.get(row.node_class, ())
        around.sorted_nodes[kind] = takers(row.node_class, nodes, kind[1], silent_s=around.silent_s)
    return around.sorted_nodes[kind]


def _estimate(node_class: str, around: _Surroundings, place: QueuePlace, working: int) -> float | None:
    """Return the seconds until the next block starts: until a node is free, and the blocks ahead, shared out."""
    pace = around.paces.get(node_class)
    if pace is None:
        return None
    rests = [rest for _, rest in around.rests.get(node_class, ()) if rest is not None]
    free_in_s = min(rests) if len(rests) >= working else 0.0
    return free_in_s + pace.block_s * place.blocks_ahead / working
