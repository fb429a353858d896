"""What a claim, a heartbeat and a report cost does not grow with the ablation: counted in steps of SQLite's machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from ablate.experiments.design.power import MAX_BLOCKS
from tests.api_stack import Api, receipts_of, running_api

GRAIN = 20
"""Steps of the virtual machine between two counts."""


@contextmanager
def counted(api: Api) -> Iterator[list[int]]:
    """Count the machine's steps of every statement that writes, in GRAIN; one number in the list."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    def begin(connection: Any) -> None:
        connection.connection.driver_connection.set_progress_handler(count, GRAIN)

    event.listen(api.store.writer, "begin", begin)
    try:
        yield steps
    finally:
        event.remove(api.store.writer, "begin", begin)
        with api.store.write() as connection:
            connection.connection.driver_connection.set_progress_handler(None, GRAIN)  # type: ignore[union-attr]


def cost(api: Api, node: str, **changes: Any) -> list[int]:
    """Return the steps of the third claim, of a heartbeat and of the report of that block."""
    for _ in range(2):
        block = api.claimed(node)
        body = receipts_of(block, node, **changes)
        assert api.attempt(block, "report", receipts=body).status_code == 200
    costs = []
    with counted(api) as steps:
        block = api.claim(node)
    costs.append(steps[0])
    assert block is not None
    with counted(api) as steps:
        assert api.attempt(block, "heartbeat").status_code == 200
    costs.append(steps[0])
    body = receipts_of(block, node, **changes)
    with counted(api) as steps:
        assert api.attempt(block, "report", receipts=body).status_code == 200
    costs.append(steps[0])
    return costs


@pytest.mark.slow
def test_costs_of_a_block_are_those_of_a_small_ablation_in_a_large_one(tmp_path: Path) -> None:
    limits = {"device_minutes": 100_000}
    with running_api("sqlite", tmp_path) as api:
        node = api.register()
        small = api.submit(limits=limits)
        first = cost(api, node, limits=limits)
        api.cancel(small["id"])
        large = {"design__blocks": {"count": MAX_BLOCKS}, "limits": limits}
        api.submit(**large)
        second = cost(api, node, **large)
    assert all(after <= before + 10 for before, after in zip(first, second, strict=True)), (first, second)
