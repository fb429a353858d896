"""The queue: priority first, then turns; a changed priority; why an ablation waits. On SQLite and on PostgreSQL."""

import re
from typing import Any

import pytest
from sqlalchemy import select, update

from ablate.service.store.tables import ablations, attempts, blocks, db_now, nodes
from tests.api_stack import Api, api_fixture, receipts_of
from tests.factories import spec_values

api = api_fixture()


def claimed(api: Api, node_id: str) -> dict[str, Any]:
    block = api.claim(node_id)
    assert block is not None
    return block


def given(api: Api, node_id: str, count: int, names: dict[str, str]) -> str:
    """Claim and report `count` blocks; return whose they were, as letters."""
    order = []
    for _ in range(count):
        block = claimed(api, node_id)
        order.append(names[block["ablation_id"]])
        assert api.attempt(block, "report", receipts=receipts_of(block, node_id)).status_code == 200
    return "".join(order)


def lettered(*made: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: letter for one, letter in zip(made, "abcdef", strict=False)}


def set_priority(api: Api, made: dict[str, Any], priority: Any) -> Any:
    return api.client.patch(made["links"]["self"], headers=api.admin, json={"priority": priority})


def test_equal_priorities_alternate_by_block(api: Api) -> None:
    node = api.register()
    made = [api.submit() for _ in range(3)]
    assert given(api, node, 18, lettered(*made)) == "abc" * 6


def test_whoever_comes_later_starts_where_the_queue_is(api: Api) -> None:
    node = api.register()
    first = api.submit()
    assert given(api, node, 3, lettered(first)) == "aaa"
    second = api.submit()
    assert given(api, node, 9, lettered(first, second)) == "babababbb"


def test_higher_priority_runs_first_and_leaves_the_turns_of_others_alone(api: Api) -> None:
    node = api.register()
    first, second = api.submit(), api.submit()
    assert given(api, node, 3, lettered(first, second)) == "aba"
    urgent = api.submit()
    assert set_priority(api, urgent, 90).status_code == 200
    assert given(api, node, 10, lettered(first, second, urgent)) == "ccccccbaba"


def test_block_that_breaks_takes_a_turn_like_any_other(api: Api) -> None:
    node = api.register()
    names = lettered(api.submit(), api.submit())
    order = []
    for _ in range(8):
        block = claimed(api, node)
        order.append(names[block["ablation_id"]])
        if names[block["ablation_id"]] == "a":
            api.attempt(block, "report", failure_class="preempted", message="away")
        else:
            api.attempt(block, "report", receipts=receipts_of(block, node))
    assert "".join(order) == "abababab"


def test_priority_can_be_changed_while_blocks_wait_and_run(api: Api) -> None:
    node = api.register()
    first, second = api.submit(), api.submit()
    running = claimed(api, node)
    assert running["ablation_id"] == first["id"]
    answer = set_priority(api, second, 80)
    assert (answer.status_code, answer.json()["priority"]) == (200, 80)
    assert given(api, node, 3, lettered(first, second)) == "bbb"
    assert set_priority(api, first, 90).status_code == 200
    assert api.attempt(running, "report", failure_class="preempted", message="away").status_code == 200
    again = claimed(api, node)
    assert again["block_id"] == running["block_id"], "a block that ran keeps the new priority when it comes back"
    events = [event for name, event in api.events(api.cancel(second["id"]).json()["id"]) if name == "ablation.priority"]
    assert [(event["reason"], event["data"]) for event in events] == [("priority 50 became 80", {"priority": 80})]


def test_priority_of_what_is_over_or_unknown_or_out_of_range_is_refused(api: Api) -> None:
    made = api.submit()
    for wrong in (-1, 101, "50", 50.5, None, True):
        assert set_priority(api, made, wrong).status_code == 422, wrong
    assert set_priority(api, made, 50).status_code == 200
    api.cancel(made["id"])
    assert set_priority(api, made, 60).status_code == 409
    nobody = {"links": {"self": "/v1/ablations/abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"}}
    assert set_priority(api, nobody, 60).status_code == 404
    assert api.client.patch(made["links"]["self"], headers=api.worker, json={"priority": 1}).status_code == 403


def shown(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    return dict(api.get(made["links"]["self"]).json())


def test_waiting_says_the_place_and_when_it_starts(api: Api) -> None:
    first = api.submit()
    assert "none has registered yet" in shown(api, first)["waiting_for"]
    node = api.register()
    block = claimed(api, node)
    second = api.submit()
    assert (shown(api, first)["waiting_for"], shown(api, first)["blocks_ahead"]) == (None, None)
    waits = shown(api, second)
    assert (waits["blocks_ahead"], waits["starts_in_s"]) == (0, None)
    assert waits["waiting_for"] == "a free node of class 'cpu' (1 live, 0 blocks ahead in the queue)"
    with api.store.write() as connection:
        long_ago = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(long_ago.values(started_at=db_now() - 600))
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 200
    waits = [shown(api, made) for made in (first, second)]
    assert [one["blocks_ahead"] for one in waits] == [1, 0]
    assert [one["starts_in_s"] for one in waits] == [pytest.approx(600, abs=20), 0]
    assert re.search(r"about 10\smin at the recent pace", waits[0]["waiting_for"])


def test_waiting_says_which_worker_is_gone(api: Api) -> None:
    made = api.submit()
    node = api.register("gone")
    claimed(api, node)
    with api.store.write() as connection:
        connection.execute(update(nodes).values(seen_at=db_now() - 7200 * 3))
        connection.execute(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() + 7200 * 3))
    text = shown(api, made)["waiting_for"]
    assert re.match(r"node 'gone', which runs block 1 and was last seen 6\sh ago; .* back to the queue in", text)


def test_waiting_names_every_node_that_does_not_work_and_why(api: Api) -> None:
    made = api.submit()
    for name in ("one", "two", "three", "four"):
        api.register(name)
    api.client.post("/v1/nodes/one:drain", headers=api.admin)
    api.client.post("/v1/nodes/two:quarantine", headers=api.admin, json={"reason": "smells of smoke"})
    with api.store.write() as connection:
        connection.execute(update(nodes).where(nodes.c.name == "three").values(seen_at=db_now() - 7200 * 3))
    api.client.post("/v1/nodes/four:revoke-key", headers=api.admin, json={"reason": "sold"})
    assert shown(api, made)["waiting_for"].replace("\N{NO-BREAK SPACE}", " ") == (
        "a live node of class 'cpu': the key of 'four' is revoked; 'one' is drained; 'three' was last seen 6 h ago; "
        "'two' is quarantined (smells of smoke)"
    )


def test_a_plan_counts_the_nodes_that_may_take_its_blocks_and_says_of_the_others_what_a_waiting_ablation_does(
    api: Api,
) -> None:
    made = api.submit()

    def nodes_of_plan() -> dict[str, Any]:
        plan = api.client.post("/v1/ablations:plan", json=spec_values(), headers=api.admin).json()
        (row,) = [one for one in plan["node_classes"] if one["node_class"] == "cpu"]
        waits = api.get(f"/v1/ablations/{made['id']}").json()["waiting_for"]
        assert row["reason"] == (None if row["eligible"] else f"it waits for {waits}")
        return {name: row[name] for name in ("live_nodes", "eligible")}

    gone = {"live_nodes": 0, "eligible": False}
    assert nodes_of_plan() == gone
    api.register("one")
    api.register("two")
    assert nodes_of_plan() == {"live_nodes": 2, "eligible": True}
    for path, body in (("one:drain", None), ("two:quarantine", {"reason": "smells"})):
        assert nodes_of_plan()["eligible"]
        api.client.post(f"/v1/nodes/{path}", headers=api.admin, json=body)
    assert nodes_of_plan() == gone
    api.client.post("/v1/nodes/one:resume", headers=api.admin)
    assert nodes_of_plan() == {"live_nodes": 1, "eligible": True}
    api.client.post("/v1/nodes/one:revoke-key", headers=api.admin, json={"reason": "sold"})
    assert nodes_of_plan() == gone


def test_waiting_tells_a_pause_a_look_and_a_cancellation(api: Api) -> None:
    looks = {"looks": [6, 8]}
    made = api.submit(design__blocks=looks)
    node = api.register()
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=db_now() + 50))
    assert "the pause after a broken attempt to end, in" in shown(api, made)["waiting_for"]
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=0.0))
    while block := api.claim(node):
        api.attempt(block, "report", receipts=receipts_of(block, node, design__blocks=looks))
    assert shown(api, made)["waiting_for"] == "the look at its blocks so far to decide"
    other = api.submit()
    claimed(api, node)
    assert api.cancel(other["id"]).json()["waiting_for"] == "node 'node-a' to stop its trial"


def test_counters_are_what_the_rows_say(api: Api) -> None:
    made = api.submit(design__blocks={"looks": [6, 8]})
    node = api.register()
    block = claimed(api, node)
    api.attempt(block, "report", receipts=receipts_of(block, node, design__blocks={"looks": [6, 8]}))
    claimed(api, node)
    with api.store.read() as connection:
        row = connection.execute(select(ablations).where(ablations.c.id == made["id"])).one()
    assert (row.blocks_done, row.blocks_running, row.blocks_queued, row.blocks_held) == (1, 1, 4, 2)
