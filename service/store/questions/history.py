"""Earlier measurements of a recipe's baselines, and earlier verdicts about a gate."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, select

from ablate.experiments.analysis.noise.history import BaselineRun
from ablate.experiments.design.load import parse_spec
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import BASELINE
from ablate.experiments.records.receipts import Receipt
from ablate.service.lifecycle import OVER
from ablate.service.store.tables import ablations, receipts, trials

MAX_ABLATIONS = 500
"""Newest ablations that are read."""


def baseline_runs(connection: Connection, recipe: str, *, node_class: str | None = None) -> list[BaselineRun]:
    """Return the baselines of the newest ended ablations of `recipe`, newest first."""
    conditions: list[ColumnElement[bool]] = [ablations.c.state.in_([state.value for state in OVER])]
    if node_class is not None:
        conditions.append(ablations.c.node_class == node_class)
    rows = _newest(connection, recipe, select(ablations.c.name).where(*conditions), limit=MAX_ABLATIONS)
    own = _baseline_receipts(connection, [row.id for row in rows])
    return [BaselineRun(ablation=row.id, name=row.name, receipts=tuple(own.get(row.id, ()))) for row in rows]


def judged_with(connection: Connection, recipe: str, gate: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest ablations of `recipe` with a verdict whose specs contain the text `gate`."""
    columns = (ablations.c.name, ablations.c.node_class, ablations.c.created_at, ablations.c.plan, ablations.c.verdict)
    named = ablations.c.spec_text.contains(gate, autoescape=True)
    return _newest(connection, recipe, select(*columns).where(ablations.c.verdict.is_not(None), named), limit=limit)


def _newest(connection: Connection, recipe: str, query: Select[Any], *, limit: int) -> list[Row[Any]]:
    """Return the ablations of `recipe` among the newest `limit` of `query` that contain its text, with their ids."""
    query = query.add_columns(ablations.c.id, ablations.c.spec_text, ablations.c.content_type)
    newest = query.where(ablations.c.spec_text.contains(recipe, autoescape=True)).order_by(ablations.c.id.desc())
    return [row for row in connection.execute(newest.limit(limit)).all() if _recipe_of(row) == recipe]


def _recipe_of(row: Row[Any]) -> str | None:
    try:
        return parse_spec(row.spec_text.encode(), row.content_type).workload.name
    except SpecError:  # a version with another vocabulary stored it
        return None


def _baseline_receipts(connection: Connection, ablation_ids: Sequence[str]) -> dict[str, list[Receipt]]:
    """Return the receipts of the baselines by ablation, in the order of their blocks."""
    query = select(trials.c.ablation_id, receipts.c.payload).join(receipts, receipts.c.trial_id == trials.c.id)
    query = query.where(trials.c.ablation_id.in_(ablation_ids), trials.c.role == BASELINE)
    by_ablation: dict[str, list[Receipt]] = {}
    for ablation_id, payload in connection.execute(query.order_by(trials.c.block_index)).all():
        by_ablation.setdefault(ablation_id, []).append(Receipt.model_validate_json(payload))
    return by_ablation
