"""What runs in an ablation now: its trials, and how each went until now by its heartbeats."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect, func, select

from experiments.outcomes import TrialState
from service.lifecycle import EventKind
from service.store.tables import blocks, events, nodes, trials

MOST_POINTS = 400
"""Heartbeats of one trial that are read, the newest."""


def runs_now() -> ColumnElement[bool]:
    """Return the condition for the one trial of a block that runs now.

    Trials start in their block's order and one runs at a time; in slices the others wait for their turn. So it is the
    last that started and has told nothing yet, else the one that told of its steps last.
    """
    other = trials.alias("other")
    told, other_told = _last_told(trials.c.id), _last_told(other.c.id)
    started_later = (other.c.position > trials.c.position) & (told.is_(None) | other_told.is_(None))
    beside = (other.c.block_id == trials.c.block_id, other.c.state == TrialState.RUNNING)
    overtaken = select(other.c.id).where(*beside, started_later | (other_told > told)).exists()
    return (trials.c.state == TrialState.RUNNING) & ~overtaken


def _last_told(trial_id: ColumnElement[str]) -> ScalarSelect[int]:
    return select(func.max(events.c.seq)).where(_told_by(trial_id)).correlate_except(events).scalar_subquery()


def _told_by(trial_id: ColumnElement[str] | str) -> ColumnElement[bool]:
    """Return the condition for the heartbeats of a trial."""
    return (events.c.subject == trial_id) & (events.c.kind == EventKind.TRIAL_PROGRESS)


def running_trials(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the trials that run, with the node's name."""
    query = select(trials, nodes.c.name.label("node")).join(blocks, blocks.c.id == trials.c.block_id)
    query = query.outerjoin(nodes, nodes.c.id == blocks.c.node_id)
    mine = (trials.c.ablation_id == ablation_id, runs_now())
    return list(connection.execute(query.where(*mine).order_by(trials.c.block_index, trials.c.position).limit(limit)))


def heartbeats(connection: Connection, trial_id: str) -> list[dict[str, Any]]:
    """Return what a running trial told of itself, oldest first: steps done, tokens per second, loss."""
    newest = select(events.c.data).where(_told_by(trial_id)).order_by(events.c.seq.desc()).limit(MOST_POINTS)
    return [json.loads(data) for data in connection.execute(newest).scalars()][::-1]
