"""Blocks on several nodes, on SQLite and on PostgreSQL: all of a block's nodes get it in one transaction, or none."""

import threading
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from experiments.design.spec import AblationSpec
from service.background.reconciler import Reconciler
from service.store.tables import attempts, blocks, db_now, members, trials
from tests.api_stack import Api, api_fixture, receipts_of, signed
from tests.factories import spec_values

api = api_fixture()

ON_TWO: dict[str, Any] = {
    "placement": {"node_class": "cpu", "devices": 2, "nodes": 2},
    "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}},
}


def register(api: Api, *names: str, **more: Any) -> list[str]:
    return [api.register(name, devices=1, meeting=f"{name}.example:29500", **more) for name in names]


def call(api: Api, name: str, block: dict[str, Any], verb: str, **body: Any) -> httpx.Response:
    """Call as the worker of node `name`."""
    message = {"token": block["token"], **body}
    path = f"/v1/attempts/{block['attempt_id']}:{verb}"
    return api.client.post(path, headers=api.worker_of(name), json=message)


def both(api: Api, first: str, second: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Claim a block on two nodes, the second one after the first."""
    led, beside = api.claim(first), api.claim(second)
    assert led is not None
    assert beside is not None
    return led, beside


def waits_for(api: Api, ablation_id: str) -> str:
    return str(api.get(f"/v1/ablations/{ablation_id}").json()["waiting_for"])


def state_of(api: Api, block: dict[str, Any]) -> str:
    with api.store.read() as connection:
        return str(connection.scalar(select(blocks.c.state).where(blocks.c.id == block["block_id"])))


def part(block: dict[str, Any], place: int = 0, **more: Any) -> dict[str, Any]:
    return {"trial_id": block["trials"][place]["trial_id"], **more}


def lapse(api: Api, number: int) -> int:
    with api.store.write() as connection:
        connection.execute(update(members).where(members.c.number == number).values(lease_until=db_now() - 1))
    return Reconciler(api.store, lease_s=30.0).expire_leases()


def test_one_claim_gives_the_block_to_both_nodes(api: Api) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    led = api.claim(first, claim_id="c" * 22)
    assert led is not None
    assert led["nodes"] == {
        "own": 0,
        "all": [{"name": "a", "meeting": "a.example:29500"}, {"name": "b", "meeting": "b.example:29500"}],
    }
    with api.store.read() as connection:
        places = connection.execute(select(members.c.number, members.c.node_id).order_by(members.c.number)).all()
    assert places == [(0, first), (1, second)]
    beside = api.claim(second, claim_id="d" * 22)
    assert beside is not None
    assert beside["nodes"]["own"] == 1
    assert {**beside, "nodes": None} == {**led, "nodes": None}, "one attempt, one token"
    assert api.claim(second, claim_id="d" * 22) == beside, "the answer was lost"
    refused = api.client.post(
        "/v1/blocks:claim", headers=api.worker_of("b"), json={"node_id": second, "claim_id": "e" * 22}
    )
    assert refused.status_code == 409, "a worker that was started again has no part in the block"


def test_without_a_second_node_nobody_gets_the_block_and_the_reason_is_shown(api: Api) -> None:
    (first,) = register(api, "a")
    ablation = api.submit(**ON_TWO)["id"]
    assert api.claim(first) is None
    assert waits_for(api, ablation) == (
        "2 live nodes of class 'cpu' with equal devices and software: only 'a' can share a block"
    )
    register(api, "other", versions={"torch": "3"})
    api.register("alone", devices=1)
    assert api.claim(first) is None
    assert waits_for(api, ablation) == (
        "2 live nodes of class 'cpu' with equal devices and software: only 'a' can share a block; "
        "only 'other' can share a block; 'alone' shares no block with other nodes: its worker has no ABLATE_MEETING"
    )
    register(api, "b")
    assert waits_for(api, ablation).startswith("a free node of class 'cpu'")
    assert api.claim(first) is not None


def test_nodes_keep_free_for_a_shared_block_whose_turn_it_is(api: Api) -> None:
    """The second node is busy with an earlier block; meanwhile the first takes no later one."""
    first, second = register(api, "a", "b")
    api.submit(ablation="before", limits={"priority": 90})
    busy = api.claim(second)
    assert busy is not None
    api.submit(ablation="shared", limits={"priority": 95}, **ON_TWO)
    assert api.claim(first) is None
    assert call(api, "b", busy, "release", failure_class="preempted", message="stops").status_code == 200
    led, beside = both(api, second, first)
    assert (led["ablation_name"], beside["nodes"]["own"]) == ("shared", 1)


def test_a_block_that_only_other_nodes_could_share_holds_nobody_up(api: Api) -> None:
    (first,) = register(api, "a")
    api.submit(ablation="shared", limits={"priority": 95}, **ON_TWO)
    api.submit(ablation="single")
    block = api.claim(first)
    assert block is not None
    assert block["ablation_name"] == "single"
    assert "nodes" not in block


def test_claims_at_the_same_time_give_every_node_at_most_one_block(api: Api) -> None:
    names = [f"n{number}" for number in range(5)]
    ids = dict(zip(names, register(api, *names), strict=True))
    api.submit(ablation="shared", **ON_TWO)
    api.submit(ablation="single")
    got: list[tuple[str, str, str]] = []

    def work(name: str) -> None:
        for _ in range(4):
            body = {"node_id": ids[name]}
            answer = api.client.post("/v1/blocks:claim", headers=api.worker_of(name), json=body)
            assert answer.status_code in (200, 204, 409), answer.text
            if answer.status_code == 200:
                got.append((name, answer.json()["block_id"], answer.json()["ablation_name"]))
                return

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holders: dict[tuple[str, str], list[str]] = {}
    for name, block_id, ablation in got:
        holders.setdefault((block_id, ablation), []).append(name)
    assert all(len(held) == (2 if ablation == "shared" else 1) for (_, ablation), held in holders.items())
    with api.store.read() as connection:
        assert connection.scalar(select(func.count()).select_from(members)) == 2 * sum(
            ablation == "shared" for _, ablation in holders
        )


def test_nodes_exchange_their_parts_by_heartbeats(api: Api) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    led, beside = both(api, first, second)
    ready = call(api, "a", led, "heartbeat", part=part(led))
    assert "parts" not in ready.json(), "the other one is not ready"
    failed = {"over": True, "failure_class": "oom", "message": "no memory", "devices": [{"name": "cpu", "node": "b"}]}
    answer = call(api, "b", beside, "heartbeat", part=part(beside, **failed)).json()
    assert [(one["trial_id"], one["over"]) for one in answer["parts"]] == [(led["trials"][0]["trial_id"], False)]
    call(api, "b", beside, "heartbeat", part=part(beside))  # one from before the end that comes late
    (theirs,) = call(api, "a", led, "heartbeat", part=part(led)).json()["parts"]
    assert (theirs["over"], theirs["failure_class"], theirs["devices"][0]["node"]) == (True, "oom", "b")
    assert "parts" not in call(api, "b", beside, "heartbeat", part=part(beside, 1)).json()
    foreign = call(api, "b", beside, "heartbeat", part={"trial_id": "trl_of_nobody"})
    assert foreign.status_code == 422


def test_progress_and_receipts_come_from_the_first_node_alone(api: Api) -> None:
    first, second = register(api, "a", "b")
    ablation = api.submit(**ON_TWO)["id"]
    led, beside = both(api, first, second)
    trial = led["trials"][0]["trial_id"]
    progress = [{"trial_id": trial, "steps_done": 1, "steps_total": 2}]
    assert call(api, "b", beside, "heartbeat", progress=progress).status_code == 200
    with api.store.read() as connection:
        assert connection.scalar(select(trials.c.steps_done).where(trials.c.id == trial)) is None
    receipts = shared_receipts(led, first)
    refused = call(api, "b", beside, "report", receipts=receipts)
    assert refused.status_code == 422
    assert "number 1" in refused.json()["detail"]
    assert call(api, "b", beside, "report").status_code == 200
    assert call(api, "b", beside, "heartbeat").status_code == 409, "it has left"
    assert api.claim(second) is None, "it is free"
    alone = receipts_of(led, first, **ON_TWO)
    answer = call(api, "a", led, "report", **signed(led, {"token": led["token"], "receipts": alone}))
    assert "names devices of the nodes ['None']" in answer.text
    answer = call(api, "a", led, "report", **signed(led, {"token": led["token"], "receipts": receipts}))
    assert answer.status_code == 200, answer.text
    assert api.get(f"/v1/ablations/{ablation}").json()["blocks"]["done"] == 1


def shared_receipts(block: dict[str, Any], node_id: str) -> list[dict[str, Any]]:
    devices = [{"name": "test", "node": "a"}, {"name": "test", "node": "b"}]
    arms = [trial["arm"] for trial in block["trials"]]
    changed = {arm: {"environment": {"node_name": "a", "devices": devices}} for arm in arms}
    return receipts_of(block, node_id, changed=changed, **ON_TWO)


@pytest.mark.parametrize("taken", [True, False])
def test_a_lost_place_sends_the_block_back_to_the_queue(api: Api, *, taken: bool) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    led = api.claim(first)
    assert led is not None
    if taken:
        assert api.claim(second) is not None
    assert lapse(api, 1) == 1
    assert state_of(api, led) == "queued"
    assert call(api, "a", led, "heartbeat").status_code == 409
    assert call(api, "b", led, "heartbeat").status_code == 409
    with api.store.read() as connection:
        message = connection.scalar(select(attempts.c.message).where(attempts.c.id == led["attempt_id"]))
    did = "was silent for longer than the lease of" if taken else "did not take"
    assert message == f"node 'b' {did} its place beside node 'a'"


def test_a_lost_first_node_ends_the_part_of_the_others(api: Api) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    led, beside = both(api, first, second)
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() - 1))
    assert Reconciler(api.store).expire_leases() == 1
    assert call(api, "b", beside, "heartbeat").status_code == 409
    led, beside = both(api, second, first)
    assert led["nodes"]["all"][0]["name"] == "b", "whichever asks first"


def test_a_node_that_must_stop_releases_the_whole_block(api: Api) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    led, beside = both(api, first, second)
    answer = call(api, "b", beside, "release", failure_class="preempted", message="the worker had to stop")
    assert (answer.status_code, answer.json()["block_state"]) == (200, "queued")
    assert call(api, "a", led, "heartbeat").status_code == 409


def test_every_node_is_told_of_a_cancellation(api: Api) -> None:
    first, second = register(api, "a", "b")
    ablation = api.submit(**ON_TWO)["id"]
    led, beside = both(api, first, second)
    api.cancel(ablation)
    assert call(api, "a", led, "heartbeat").json()["cancel"]
    assert call(api, "b", beside, "heartbeat").json()["cancel"]
    assert call(api, "b", beside, "report").status_code == 200
    release = call(api, "a", led, "release", failure_class="cancelled", message="cancelled")
    assert release.json()["block_state"] == "cancelled"


def test_a_shared_block_shows_on_each_of_its_nodes_and_counts_for_all(api: Api) -> None:
    first, second = register(api, "a", "b")
    api.submit(**ON_TWO)
    both(api, first, second)
    rows = {row["name"]: row for row in api.get("/v1/nodes").json()["items"]}
    assert [(rows[name]["devices_free"], len(rows[name]["runs"])) for name in "ab"] == [(0, 1), (0, 1)]
    assert rows["a"]["runs"] == rows["b"]["runs"]


@pytest.mark.parametrize(("node_class", "recipe", "busy"), [("h100", "hybrid-ref-h200", 4), ("cpu", "hybrid-tiny", 2)])
def test_a_minute_of_a_shared_block_uses_the_devices_of_all_nodes(
    api: Api, node_class: str, recipe: str, busy: int
) -> None:
    """Virtual devices are the processors of one machine, so that each node of class cpu counts once."""
    owner = api.token(f"two-{node_class}-{api.store.writer.dialect.name}", "submit", device_minutes=1000)
    values = spec_values(
        workload__recipe=recipe,
        workload__overrides={"micro_batch": 4},
        variants={"whole": {"gates": {"sharding": "replicated"}}},
        placement={"node_class": node_class, "devices": 4, "nodes": 2},
        limits={"trial": "5m", "device_minutes": 100},
    )
    made = api.client.post("/v1/ablations", json=values, headers={**owner, "Idempotency-Key": node_class})
    assert made.status_code == 202, made.text
    names = [f"{name}.example" for name in "ab"]
    nodes = [api.register(name, node_class, devices=2, meeting=f"{name}:29500") for name in names]
    led = api.claim(nodes[0])
    assert led is not None
    with api.store.write() as connection:
        mine = update(attempts).where(attempts.c.id == led["attempt_id"])
        connection.execute(mine.values(started_at=db_now() - 30 * 60))
    used = api.client.get("/v1/identity", headers=owner).json()["device_minutes_used"]
    assert used == pytest.approx(30 * busy, abs=1)
    stopped = call(api, names[0], led, "release", failure_class="preempted", message="the worker was asked to stop")
    assert stopped.status_code == 200, stopped.text
    state = api.get(f"/v1/ablations/{made.json()['id']}").json()["state"]
    assert state == ("failed" if busy == 4 else "running"), "120 of 100 minutes, or 60"


def test_a_spec_names_the_nodes_that_it_can_have() -> None:
    with pytest.raises(ValueError, match=r"3 nodes for one trial are not available .* allowed: 1, 2, 4"):
        AblationSpec.model_validate(spec_values(placement={"node_class": "cpu", "devices": 2, "nodes": 3}))
