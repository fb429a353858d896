"""Earlier measurements of a recipe's baselines, and earlier verdicts about a gate."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from experiments.analysis.noise.history import BaselineRun
from experiments.design.load import parse_spec
from experiments.errors import SpecError
from experiments.outcomes import BASELINE
from experiments.records.receipts import Receipt
from service.lifecycle import OVER
from service.store.tables import ablations, receipts, trials

MAX_ABLATIONS = 500
"""Newest ablations that are read."""


def baseline_runs(connection: Connection, recipe: str, *, node_class: str | None = None) -> list[BaselineRun]:
    """Return the baselines of the newest ended ablations of `recipe`, newest first."""
    query = select(ablations).where(
        ablations.c.state.in_([state.value for state in OVER]), ablations.c.spec_text.contains(recipe, autoescape=True)
    )
    if node_class is not None:
        query = query.where(ablations.c.node_class == node_class)
    rows = connection.execute(query.order_by(ablations.c.id.desc()).limit(MAX_ABLATIONS)).all()
    return [_run(connection, row) for row in rows if _recipe_of(row) == recipe]


def _recipe_of(row: Row[tuple[object, ...]]) -> str | None:
    try:
        return parse_spec(row.spec_text.encode(), row.content_type).workload.recipe
    except SpecError:  # a version with another vocabulary stored it
        return None


def _run(connection: Connection, row: Row[tuple[object, ...]]) -> BaselineRun:
    return BaselineRun(ablation=row.id, name=row.name, receipts=tuple(_receipts(connection, row.id)))


def _receipts(connection: Connection, ablation_id: str) -> Iterator[Receipt]:
    query = select(receipts.c.payload).join(trials, trials.c.id == receipts.c.trial_id)
    own = query.where(trials.c.ablation_id == ablation_id, trials.c.role == BASELINE)
    for payload in connection.execute(own.order_by(trials.c.block_index)).scalars():
        yield Receipt.model_validate_json(payload)


def judged_with(connection: Connection, recipe: str, gate: str, *, limit: int) -> list[Row[Any]]:
    """Return the newest ablations of `recipe` with a verdict whose specs contain the text `gate`, with all columns."""
    named = (ablations.c.spec_text.contains(text, autoescape=True) for text in (recipe, gate))
    query = select(ablations).where(ablations.c.verdict.is_not(None), *named)
    rows = connection.execute(query.order_by(ablations.c.id.desc()).limit(limit)).all()
    return [row for row in rows if _recipe_of(row) == recipe]
