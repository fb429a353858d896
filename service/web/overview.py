"""What the first page shows: what waits and runs and why, the nodes, and the latest answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from experiments.analysis.noise.calibrate import device_serial
from experiments.block_numbers import block_name
from experiments.design.aa_spec import ADMITTING_BLOCKS
from experiments.outcomes import AblationState
from experiments.reporting.wording import duration
from service.lifecycle import OVER
from service.routes.ablations import public
from service.routes.nodes import nodes_public
from service.schemas.ablations import AblationPublic
from service.schemas.calibrations import CalibrationPublic
from service.schemas.nodes import NodePublic
from service.settings import ServiceSettings
from service.store import tables as stored
from service.store.ablations import ablations
from service.web.answers import VariantLine, read_answer
from service.web.durations import age_s

MOST_RUNNING = 50
MOST_QUEUED = 100
MOST_ANSWERS = 12
ANSWERS_AMONG = 5 * MOST_ANSWERS
"""The newest submissions that are over; of these the last to end are shown."""
MOST_VARIANTS = 4
"""Variants of an answer that are named; the others are counted."""
_BUSY = (AblationState.RUNNING, AblationState.CANCELLING)


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """One node."""

    node: NodePublic
    runs: tuple[tuple[str, str], ...]
    """Each block that it runs as (ablation, block and arm in words, address)."""
    calibrated: str
    """How old what is known of its noise is, and whether it still holds."""


@dataclass(frozen=True, kw_only=True)
class EndedAblation:
    """One ablation that is over."""

    row: AblationPublic
    lead: str
    """The answer in one sentence; empty where there is none."""
    variants: tuple[VariantLine, ...] = ()
    """The best first."""
    more: int = 0
    """Variants beyond these."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All of the first page."""

    queue: tuple[AblationPublic, ...]
    """Running ones first, then those that wait, by their place."""
    waiting_more: int
    """Waiting ones that are not shown."""
    nodes: tuple[NodeLine, ...]
    answers: tuple[EndedAblation, ...]


def overview(connection: Connection, settings: ServiceSettings, noise: Sequence[CalibrationPublic]) -> Overview:
    """Read the first page; `noise` is what is known of the noise of devices."""
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
    return ablations.list_ablations(connection, before=None, limit=limit, states=states, label=None, digest=None)


def _place(row: AblationPublic) -> tuple[str, float]:
    return row.node_class, float("inf") if row.blocks_ahead is None else row.blocks_ahead


def _node(node: NodePublic, noise: Sequence[CalibrationPublic]) -> NodeLine:
    runs = tuple(
        (", ".join((one.name, block_name(one.block_index), *one.arms)), f"/a/{one.ablation}") for one in node.runs
    )
    return NodeLine(node=node, runs=runs, calibrated=calibrated(node, noise))


def calibrated(node: NodePublic, noise: Sequence[CalibrationPublic]) -> str:
    """Say how old what is known of a node's noise is, and what does not hold any more."""
    serials = {device_serial(device.serial, node.name, device.name) for device in node.devices}
    own = [one for one in noise if one.calibration.key.device_serial in serials]
    if not own:
        return "not calibrated"
    newest = max(own, key=lambda one: one.calibration.measured_at)
    if newest.calibration.blocks < ADMITTING_BLOCKS:
        return f"not calibrated: {newest.calibration.blocks} of {ADMITTING_BLOCKS} A/A blocks"
    told = f"calibrated {duration(age_s(newest.calibration.measured_at))} ago for {newest.calibration.key.recipe}"
    return told if newest.problem is None else f"{told}, which holds no more: {newest.problem}"


def _answer(connection: Connection, row: AblationPublic) -> EndedAblation:
    document = ablations.get_document(connection, row.id, "verdict").document
    if document is None:
        return EndedAblation(row=row, lead="")
    answer = read_answer(document)
    shown, more = answer.variants[:MOST_VARIANTS], len(answer.variants[MOST_VARIANTS:])
    return EndedAblation(row=row, lead=answer.lead, variants=shown, more=more)
