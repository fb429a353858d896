"""The first page: the queue with reasons for waiting, the nodes, and the latest answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row

from ablate.experiments.analysis.noise.calibrate import serials_of
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.wording import duration
from ablate.service.http.links import below
from ablate.service.lifecycle import OVER
from ablate.service.routes.ablations import public
from ablate.service.routes.nodes import nodes_public
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.schemas.nodes import CalibrationPublic, NodePublic
from ablate.service.settings import ServiceSettings
from ablate.service.store import tables as stored
from ablate.service.store.ablations import ablations
from ablate.service.web.answers import VariantLine, read_answer


def age_s(rfc3339: str) -> float:
    """Return the seconds since an RFC 3339 time."""
    return (datetime.now(UTC) - datetime.fromisoformat(rfc3339)).total_seconds()


MOST_RUNNING = 50
MOST_QUEUED = 100
MOST_ANSWERS = 12
ANSWERS_AMONG = 5 * MOST_ANSWERS
"""Finished ablations that are read, newest submission first; the page shows the last to end."""
MOST_VARIANTS = 4
"""Variants that an answer names; the others are counted."""
_BUSY = (AblationState.RUNNING, AblationState.CANCELLING)


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """One node."""

    node: NodePublic
    runs: tuple[tuple[str, str], ...]
    """(ablation, block and arms in words; address) of each running block."""
    calibrated: str
    """The age of its noise calibration, and whether it still holds."""


@dataclass(frozen=True, kw_only=True)
class EndedAblation:
    """One finished ablation."""

    row: AblationPublic
    lead: str
    """The answer in one sentence; empty without one."""
    variants: tuple[VariantLine, ...] = ()
    """The most important first."""
    more: int = 0
    """Number of other variants."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The whole page."""

    queue: tuple[AblationPublic, ...]
    """Running ablations, then waiting ones by their place."""
    waiting_more: int
    """Number of waiting ablations that are not shown."""
    nodes: tuple[NodeLine, ...]
    answers: tuple[EndedAblation, ...]


def overview(connection: Connection, settings: ServiceSettings, noise: Sequence[CalibrationPublic]) -> Overview:
    """Read the first page; `noise` are the calibrations of all devices."""
    counts = ablations.count_by_state(connection, stored.ablations)
    running = _some(connection, settings, _BUSY, MOST_RUNNING)
    queued = _some(connection, settings, (AblationState.QUEUED,), MOST_QUEUED)
    ended = _newest(connection, tuple(OVER), ANSWERS_AMONG)
    over = public(connection, sorted(ended, key=lambda row: row.finished_at, reverse=True)[:MOST_ANSWERS], settings)
    return Overview(
        queue=(*running, *sorted(queued, key=_place)),
        waiting_more=counts.get(AblationState.QUEUED, 0) - len(queued),
        nodes=tuple(_node(node, noise) for node in nodes_public(connection, settings)),
        answers=tuple(_answer(connection, row) for row in over),
    )


def _some(
    connection: Connection, settings: ServiceSettings, states: Sequence[AblationState], limit: int
) -> list[AblationPublic]:
    """Return the newest ablations in these states."""
    return public(connection, _newest(connection, states, limit), settings)


def _newest(connection: Connection, states: Sequence[str], limit: int) -> list[Row[Any]]:
    return ablations.list_ablations(connection, ablations.Wanted(states=states), before=None, limit=limit)


def _place(row: AblationPublic) -> tuple[str, float]:
    return row.node_class, float("inf") if row.blocks_ahead is None else row.blocks_ahead


def _node(node: NodePublic, noise: Sequence[CalibrationPublic]) -> NodeLine:
    runs = tuple(
        (", ".join((one.name, block_name(one.block_index), *one.arms)), below(f"/a/{one.ablation}"))
        for one in node.runs
    )
    return NodeLine(node=node, runs=runs, calibrated=calibrated(node, noise))


def calibrated(node: NodePublic, noise: Sequence[CalibrationPublic]) -> str:
    """Describe the age of a node's newest calibration, and why it no longer holds."""
    serials = serials_of([(device.name, device.serial) for device in node.devices], node.name)
    own = [one for one in noise if one.calibration.key.device_serial in serials]
    if not own:
        return "uncalibrated"
    newest = max(own, key=lambda one: one.calibration.measured_at)
    if newest.calibration.blocks < MIN_BLOCKS:
        return f"uncalibrated: {newest.calibration.blocks} of {MIN_BLOCKS} A/A blocks"
    words = f"calibrated {duration(age_s(newest.calibration.measured_at))} ago for {newest.calibration.key.recipe}"
    return words if newest.problem is None else f"{words}, no longer valid: {newest.problem}"


def _answer(connection: Connection, row: AblationPublic) -> EndedAblation:
    document = ablations.get_document(connection, row.id, "verdict").document
    if document is None:
        return EndedAblation(row=row, lead="")
    answer = read_answer(document)
    shown, more = answer.variants[:MOST_VARIANTS], len(answer.variants[MOST_VARIANTS:])
    return EndedAblation(row=row, lead=answer.lead, variants=shown, more=more)
