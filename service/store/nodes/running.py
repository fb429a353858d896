"""What runs in an ablation now: its trials, and how each went until now by its heartbeats."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from experiments.outcomes import TrialState
from service.lifecycle import EventKind
from service.store.tables import blocks, events, nodes, trials

MOST_POINTS = 400
"""Heartbeats of one trial that are read, the newest."""


def runs_now() -> ColumnElement[bool]:
    """Return the condition for the one trial of a block that runs now: the last that was heard to run.

    Trials start in their block's order and one runs at a time; in slices the others wait for their turn.
    """
    other = trials.alias("other")
    since, other_since = func.coalesce(trials.c.runs_since, 0), func.coalesce(other.c.runs_since, 0)
    later = (other_since > since) | ((other_since == since) & (other.c.position > trials.c.position))
    beside = (other.c.block_id == trials.c.block_id, other.c.state == TrialState.RUNNING)
    return (trials.c.state == TrialState.RUNNING) & ~select(other.c.id).where(*beside, later).exists()


def running_trials(connection: Connection, ablation_id: str, *, limit: int) -> list[Row[Any]]:
    """Return the trials that run, with the node's name."""
    query = select(trials, nodes.c.name.label("node")).join(blocks, blocks.c.id == trials.c.block_id)
    query = query.outerjoin(nodes, nodes.c.id == blocks.c.node_id)
    mine = (trials.c.ablation_id == ablation_id, runs_now())
    return list(connection.execute(query.where(*mine).order_by(trials.c.block_index, trials.c.position).limit(limit)))


def heartbeats(connection: Connection, trial_id: str) -> list[dict[str, Any]]:
    """Return what a running trial told of itself, oldest first: steps done, tokens per second, loss."""
    told = (events.c.subject == trial_id, events.c.kind == EventKind.TRIAL_PROGRESS)
    newest = select(events.c.data).where(*told).order_by(events.c.seq.desc()).limit(MOST_POINTS)
    return [json.loads(data) for data in connection.execute(newest).scalars()][::-1]
