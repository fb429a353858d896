"""The place in the queue is what numbering the whole queue gives, however it lies; on SQLite and on PostgreSQL."""

import random
from typing import Any

from sqlalchemy import Row, select, update

from ablate.service.store.blocks import queue
from ablate.service.store.tables import ablations
from tests.api_stack import Api, api_fixture

api = api_fixture()


def _expected(rows: list[Row[Any]], asked: set[str]) -> dict[str, tuple[int, int]]:
    """Number the whole queue of each class, as claims would go through it: whose turn it is, and that moves on.

    Return the place of the first block, and how many blocks of others come before the last.
    """
    places: dict[str, tuple[int, int]] = {}
    for node_class in {row.node_class for row in rows}:
        waiting = {row.id: row.blocks_queued for row in rows if row.node_class == node_class}
        keys = {row.id: (-row.priority, row.turn, row.id) for row in rows if row.node_class == node_class}
        taken = dict.fromkeys(waiting, 0)
        for place in range(sum(waiting.values())):
            first = min((name for name in waiting if waiting[name]), key=lambda name: keys[name])
            places[first] = (places.get(first, (place,))[0], place - taken[first])
            waiting[first] -= 1
            taken[first] += 1
            priority, turn, _ = keys[first]
            keys[first] = (priority, turn + 1, first)
    return {name: place for name, place in places.items() if name in asked}


def test_places_are_those_of_the_whole_queue(api: Api) -> None:
    draw = random.Random(11)  # noqa: S311 - a seeded draw
    ids = [api.submit(ablation=f"waiting-{number}")["id"] for number in range(7)]
    for _ in range(25):
        with api.store.write() as connection:
            for name in ids:
                values = {
                    "node_class": draw.choices(["cpu", "h200"], weights=[4, 1])[0],
                    "priority": draw.choice([10, 50, 50, 50, 90]),
                    "turn": draw.randint(0, 9),
                    "blocks_queued": draw.choice([0, 1, 2, 5, 9, 30]),
                }
                connection.execute(update(ablations).where(ablations.c.id == name).values(**values))
        asked = set(draw.sample(ids, draw.randint(1, len(ids))))
        with api.store.read() as connection:
            rows = list(connection.execute(select(ablations)))
            places = queue.places(connection, asked)
        numbers = {name: (place.blocks_ahead, place.blocks_between) for name, place in places.items()}
        assert numbers == _expected(rows, asked)
    with api.store.write() as connection:
        connection.execute(update(ablations).values(blocks_queued=0))
    with api.store.read() as connection:
        assert queue.places(connection, ids) == {}
