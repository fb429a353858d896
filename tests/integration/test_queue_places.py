"""The place in the queue is what numbering the whole queue gives, however it lies; on SQLite and on PostgreSQL."""

import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, select, update

from service.store import queue
from service.store.tables import blocks
from tests.api_stack import Api, running_api


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


def _expected(rows: list[Row[Any]], asked: set[str]) -> dict[str, int]:
    """Number the whole queue of each class, as a claim would go through it."""
    queued = sorted(
        (row for row in rows if row.state == "queued"),
        key=lambda row: (row.node_class, -row.priority, row.turn, row.ablation_id, row.index),
    )
    found: dict[str, int] = {}
    for _, own in groupby(queued, key=lambda row: row.node_class):
        for place, row in enumerate(own):
            found.setdefault(row.ablation_id, place)
    return {name: place for name, place in found.items() if name in asked}


def test_places_are_those_of_the_whole_queue(api: Api) -> None:
    draw = random.Random(11)  # noqa: S311 - a seeded draw
    ids = [api.submit(ablation=f"waiting-{number}")["id"] for number in range(7)]
    for _ in range(25):
        classes = dict(zip(ids, draw.choices(["cpu", "h200"], weights=[4, 1], k=len(ids)), strict=True))
        priorities = {name: draw.choice([10, 50, 50, 50, 90]) for name in ids}
        with api.store.write() as connection:
            for row in connection.execute(select(blocks.c.id, blocks.c.ablation_id)).all():
                values = {
                    "priority": priorities[row.ablation_id],
                    "turn": draw.randint(0, 9),
                    "state": draw.choice(["queued", "queued", "done", "held"]),
                    "node_class": classes[row.ablation_id],
                }
                connection.execute(update(blocks).where(blocks.c.id == row.id).values(**values))
        asked = set(draw.sample(ids, draw.randint(1, len(ids))))
        with api.store.read() as connection:
            rows = list(connection.execute(select(blocks)))
            found = queue.places(connection, asked)
        assert {name: place.blocks_ahead for name, place in found.items()} == _expected(rows, asked)
    with api.store.write() as connection:
        connection.execute(update(blocks).values(state="done"))
    with api.store.read() as connection:
        assert queue.places(connection, ids) == {}
