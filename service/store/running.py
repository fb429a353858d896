"""What runs in an ablation now: its trials, and how each went until now by its heartbeats."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from experiments.outcomes import TrialState
from service.lifecycle import EventKind
from service.store.tables import blocks, events, nodes, trials

MOST_POINTS = 400
"""Heartbeats of one trial that are read, the newest."""


def still_runs() -> ColumnElement[bool]:
    """Return the condition for a running trial: not one that did its steps before the next of its block began."""
    later = trials.alias("later")
    followed = (later.c.block_id == trials.c.block_id) & (later.c.position > trials.c.position)
    is_followed = select(later.c.id).where(followed, later.c.state == TrialState.RUNNING).exists()
    did_its_steps = func.coalesce(trials.c.steps_done >= trials.c.steps_total - 1, False)
    return (trials.c.state == TrialState.RUNNING) & ~(is_followed & did_its_steps)


def running_trials(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the trials that run, with the node's name."""
    query = select(trials, nodes.c.name.label("node")).join(blocks, blocks.c.id == trials.c.block_id)
    query = query.outerjoin(nodes, nodes.c.id == blocks.c.node_id)
    mine = (trials.c.ablation_id == ablation_id, still_runs())
    return list(connection.execute(query.where(*mine).order_by(trials.c.block_index, trials.c.position).limit(limit)))


def heartbeats(connection: Connection, trial_id: str) -> list[dict[str, Any]]:
    """Return what a running trial told of itself, oldest first: steps done, tokens per second, loss."""
    told = (events.c.subject == trial_id, events.c.kind == EventKind.TRIAL_PROGRESS)
    newest = select(events.c.data).where(*told).order_by(events.c.seq.desc()).limit(MOST_POINTS)
    return [json.loads(data) for data in connection.execute(newest).scalars()][::-1]
