"""The first page: the queue with reasons for waiting, the nodes, and the latest answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row

from ablate.experiments.analysis.noise.calibrate import serials_of
from ablate.experiments.analysis.proposals import NOTE
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.changes import ChangedArm, changes_in_plan
from ablate.experiments.reporting.pages.first_screen import LONGEST_CHANGE
from ablate.experiments.reporting.wording import duration, metric, shorten
from ablate.service.http.links import below
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
MOST_ROWS = 25
ROWS_AMONG = 3 * MOST_ROWS
"""Ablations that are read, newest submission first; the page shows the last to end."""
MOST_VARIANTS = 4
"""Variants that an answer names; the others are counted."""
_BUSY = (AblationState.RUNNING, AblationState.CANCELLING)


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """One node."""

    node: NodePublic
    runs: tuple[tuple[str, str], ...]
    """(ablation, block and arms in words; address) of each running block."""
    calibrated: tuple[str, ...]
    """The age of each noise calibration, the newest first, and whether it still holds; one line without any."""
    load: str = ""
    """How busy it is; empty where the page does not say."""


SHOWN = {
    "all": "all",
    "running": "running or waiting",
    "better": "better",
    "worse": "worse",
    "same": "same",
    "inconclusive": "inconclusive",
    "failed": "failed or cancelled",
}
"""Filters of the table, by their names in the address."""
_STATES = {
    "running": (AblationState.QUEUED, *_BUSY),
    "failed": (AblationState.FAILED, AblationState.CANCELLED),
}


@dataclass(frozen=True, kw_only=True)
class AblationLine:
    """One ablation in the table."""

    row: AblationPublic
    when: str
    """RFC 3339: when it ended, or was submitted."""
    lead: str
    """The answer or the state in a few words."""
    variants: tuple[tuple[str, str, VariantLine | None], ...]
    """(name, changes, answer) of each variant, the most important first."""
    more: int = 0
    """Number of other variants."""
    note: str = ""
    """Its author's words about the change."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The whole page."""

    queue: tuple[AblationPublic, ...]
    """Running ablations, then waiting ones by their place."""
    waiting_more: int
    """Number of waiting ablations that are not shown."""
    nodes: tuple[NodeLine, ...]
    ablations: tuple[AblationLine, ...]
    """The newest ones that the reader asks for."""
    shown: str
    """The chosen filter."""
    words: str
    """The searched text."""
    empty: bool
    """Whether nobody has ever submitted anything."""


def overview(
    connection: Connection, settings: ServiceSettings, noise: Sequence[CalibrationPublic], shown: str, words: str
) -> Overview:
    """Read the first page; `noise` are the calibrations of all devices, `shown` and `words` filter the table."""
    counts = ablations.count_by_state(connection, stored.ablations)
    running = _some(connection, settings, _BUSY, MOST_RUNNING)
    queued = _some(connection, settings, (AblationState.QUEUED,), MOST_QUEUED)
    return Overview(
        queue=(*running, *sorted(queued, key=_place)),
        waiting_more=counts.get(AblationState.QUEUED, 0) - len(queued),
        nodes=tuple(node_line(node, noise) for node in nodes_public(connection, settings)),
        ablations=_lines(connection, settings, shown, words),
        shown=shown,
        words=words,
        empty=not any(counts.values()),
    )


def _lines(connection: Connection, settings: ServiceSettings, shown: str, words: str) -> tuple[AblationLine, ...]:
    """Return the rows of the table, the last to end first."""
    states = _STATES.get(shown, ())
    answer = "" if states or shown == "all" else shown
    wanted = ablations.Wanted(states=states, words=words, answer=answer)
    rows = ablations.list_ablations(connection, wanted, before=None, limit=ROWS_AMONG)
    newest = sorted(rows, key=lambda row: row.finished_at or row.created_at, reverse=True)[:MOST_ROWS]
    return tuple(_line(connection, row) for row in public(connection, newest, settings))


def _some(
    connection: Connection, settings: ServiceSettings, states: Sequence[AblationState], limit: int
) -> list[AblationPublic]:
    """Return the newest ablations in these states."""
    return public(connection, _newest(connection, states, limit), settings)


def _newest(connection: Connection, states: Sequence[str], limit: int) -> list[Row[Any]]:
    return ablations.list_ablations(connection, ablations.Wanted(states=states), before=None, limit=limit)


def _place(row: AblationPublic) -> tuple[str, float]:
    return row.node_class, float("inf") if row.blocks_ahead is None else row.blocks_ahead


def node_line(node: NodePublic, noise: Sequence[CalibrationPublic]) -> NodeLine:
    """Return a node with its running work and its calibration."""
    runs = tuple(
        (", ".join((one.name, block_name(one.block_index), *one.arms)), below(f"/a/{one.ablation}"))
        for one in node.runs
    )
    return NodeLine(node=node, runs=runs, calibrated=calibrated(node, noise))


def calibrated(node: NodePublic, noise: Sequence[CalibrationPublic]) -> tuple[str, ...]:
    """Describe the age of a node's calibrations, the newest first, and why they no longer hold."""
    serials = serials_of([(device.name, device.serial) for device in node.devices], node.name)
    own = [one for one in noise if one.calibration.key.device_serial in serials]
    newest_first = sorted(own, key=lambda one: one.calibration.measured_at, reverse=True)
    return tuple(map(_calibration, newest_first)) or ("uncalibrated",)


def _calibration(one: CalibrationPublic) -> str:
    calibration = one.calibration
    what = f"{metric(calibration.metric)} of {calibration.key.recipe}"
    if calibration.blocks < MIN_BLOCKS:
        return f"uncalibrated for {what}: {calibration.blocks} of {MIN_BLOCKS} A/A blocks"
    words = f"calibrated {duration(age_s(calibration.measured_at))} ago for {what}"
    return words if one.problem is None else f"{words}, no longer valid: {one.problem}"


def _line(connection: Connection, row: AblationPublic) -> AblationLine:
    document = ablations.get_document(connection, row.id, "verdict").document
    answer = None if document is None else read_answer(document)
    changes = changes_in_plan(ablations.get_document(connection, row.id, "plan").document)
    answers = {one.arm: one for one in answer.variants} if answer else {}
    names = list(answers or changes)
    return AblationLine(
        row=row,
        when=row.finished_at or row.created_at,
        lead=answer.lead if answer else row.answer or str(row.state),
        variants=tuple((name, _change(changes, name), answers.get(name)) for name in names[:MOST_VARIANTS]),
        more=len(names[MOST_VARIANTS:]),
        note=row.labels.get(NOTE, ""),
    )


def _change(changes: Mapping[str, ChangedArm], name: str) -> str:
    """Return the changes of a variant in one line."""
    return shorten(changes[name].text, LONGEST_CHANGE) if name in changes else ""
