"""The estimate of an ablation's time left, against blocks times their mean time over nodes, by hand."""

from typing import Any

import pytest
from sqlalchemy import select, update

from ablate.service.store.tables import ablations, attempts, db_now, nodes
from tests.api_stack import Api, api_fixture, receipts_of

BLOCKS, BLOCK_S = 6, 900.0
"""Of the factories' spec, and what each finished block took here."""
LATE_S = 60.0
"""The clock runs on during the test, also during each finished block."""


api = api_fixture(kinds=["sqlite"])


def left_s(api: Api, made: dict[str, Any]) -> Any:
    return api.get(made["links"]["self"]).json()["time_left_s"]


def waiting_for(api: Api, made: dict[str, Any]) -> str:
    return str(api.get(made["links"]["self"]).json()["waiting_for"]).replace("\xa0", " ")


def claimed(api: Api, node: str, *, elapsed_s: float) -> dict[str, Any]:
    """Claim a block and let it have run for so long."""
    block = api.claimed(node)
    with api.store.write() as connection:
        own = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(own.values(started_at=db_now() - elapsed_s))
    return block


def finish(api: Api, node: str) -> None:
    block = claimed(api, node, elapsed_s=BLOCK_S)
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 200


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=LATE_S)


def test_blocks_times_their_mean_time_are_shared_by_the_nodes_that_may_run_them(api: Api) -> None:
    one, two = api.register("one"), api.register("two")
    made = api.submit()
    assert left_s(api, made) is None, "no block time is known"
    finish(api, one)
    assert left_s(api, made) == near(5 * BLOCK_S / 2)
    claimed(api, one, elapsed_s=600)
    claimed(api, two, elapsed_s=600)
    assert left_s(api, made) == near((2 * 300 + 3 * BLOCK_S) / 2)
    assert api.client.post("/v1/nodes/two:drain", headers=api.admin).is_success
    assert left_s(api, made) == near(2 * 300 + 3 * BLOCK_S)
    assert api.client.post("/v1/nodes/one:drain", headers=api.admin).is_success
    assert left_s(api, made) is None, "no node may run the rest"


def test_a_last_block_counts_down_whatever_the_number_of_nodes_and_ends_with_no_estimate(api: Api) -> None:
    node, _ = api.register("one"), api.register("two")
    made = api.submit()
    for _ in range(BLOCKS - 1):
        finish(api, node)
    assert left_s(api, made) == near(BLOCK_S)
    block = claimed(api, node, elapsed_s=400)
    assert left_s(api, made) == near(BLOCK_S - 400)
    with api.store.write() as connection:
        late = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(late.values(started_at=db_now() - 2 * BLOCK_S))
    assert left_s(api, made) is None


def test_only_blocks_that_the_device_minutes_pay_for_count(api: Api) -> None:
    node = api.register()
    made = api.submit()
    finish(api, node)
    with api.store.write() as connection:
        allowed = select(ablations.c.device_minutes * 60).scalar_subquery()
        connection.execute(update(ablations).values(device_s=allowed - 1000))
    assert left_s(api, made) == near(1000)


def test_blocks_of_others_come_between_and_a_newcomer_has_the_pace_of_its_node_class(api: Api) -> None:
    node = api.register()
    first, second = api.submit(), api.submit()
    for _ in range(2):
        finish(api, node)  # equal priorities alternate: one block of each
    assert left_s(api, first) == near(9 * BLOCK_S)
    assert left_s(api, second) == near(10 * BLOCK_S)
    urgent = api.submit(limits={"priority": 99}, variants={"psiv-on": {"gates": {"psiv_cache": True}}})
    assert left_s(api, urgent) == near(BLOCKS * BLOCK_S * 2 / 3), "two arms in the place of three"
    assert left_s(api, first) == near((9 + BLOCKS) * BLOCK_S)


def test_a_block_that_fits_no_workers_time_left_says_so(api: Api) -> None:
    """Against the rule of claims: before its first block its limit counts, later the mean of its blocks."""
    node = api.register("one")
    made = api.submit()
    assert api.claim(node, left_s=1800) is None
    waits = waiting_for(api, made)
    assert "a live node of class 'cpu': 'one' ends in 30 min, and a block may take " in waits
    assert api.get("/v1/waiting").json()["items"][0]["nodes"] == 0
    finish(api, node)  # a claim without an end
    assert "1 live" in waiting_for(api, made)
    block_s = BLOCK_S + LATE_S
    assert api.claim(node, left_s=BLOCK_S / 2) is None
    waits = waiting_for(api, made)
    assert "'one' ends in 7 min" in waits or "'one' ends in 8 min" in waits
    assert "and a block may take 15 min" in waits
    assert api.get("/v1/waiting").json()["items"][0]["nodes"] == 0
    assert api.claim(node, left_s=block_s) is not None
    assert api.get("/v1/waiting").json()["items"][0]["nodes"] == 1


def test_a_worker_that_ended_is_no_capacity_before_it_is_silent(api: Api) -> None:
    node = api.register("one")
    made = api.submit()
    with api.store.write() as connection:
        connection.execute(update(nodes).where(nodes.c.id == node).values(ends_at=db_now() - 1))
    assert "'one' has ended, and a block may take" in waiting_for(api, made)
    api.register("one")
    assert "1 live" in waiting_for(api, made)
