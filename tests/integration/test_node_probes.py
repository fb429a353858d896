"""Quarantined nodes that probe themselves and work again, and those that wait for a person; on both databases."""

from typing import Any

import httpx
from sqlalchemy import select, update

from ablate.experiments.records.identity import ClaimedBlock
from ablate.kernels.backends import NODE_CLASSES
from ablate.service.store.tables import db_now, nodes
from ablate.workers.devices.node_health import NodeHealth
from ablate.workers.leases.service_api import ServiceApi
from ablate.workers.leases.supervisor import ServiceNode
from ablate.workers.node import find_node
from tests.api_stack import SIGNER, Api, api_fixture, receipts_of
from tests.integration.test_node_states import act, break_one, node, other_work
from tests.web_pages import Person

api = api_fixture()


def claim_answer(api: Api, name: str, node_id: str) -> tuple[int, Any]:
    ask = {"node_id": node_id}
    answer = api.client.post("/v1/blocks:claim", headers=api.worker_of(name), json=ask)
    return answer.status_code, answer.json() if answer.content else None


def make_due(api: Api, name: str) -> float:
    """Let the time of the next probe come; return how many seconds that had been."""
    with api.store.write() as connection:
        rest_s = connection.scalar(select(nodes.c.probe_at - db_now()).where(nodes.c.name == name))
        connection.execute(update(nodes).where(nodes.c.name == name).values(probe_at=db_now()))
    assert rest_s is not None
    return float(rest_s)


BAD = {"device_state": "quarantined", "device_reason": "no lane of class 'cpu' runs here"}


def test_quarantined_node_probes_itself_until_it_passes_and_works_again(api: Api) -> None:
    made = api.submit()
    one = api.register("one")
    assert api.client.post(
        "/v1/blocks:claim", headers=api.worker_of("one"), json={"node_id": one, **BAD}
    ).status_code == 204  # fmt: skip
    assert claim_answer(api, "one", one) == (204, None), "its probe is not due yet"
    for rest_s in (60, 120, 240):
        assert rest_s - 10 < make_due(api, "one") <= rest_s
        waits = api.get(f"/v1/ablations/{made['id']}").json()["waiting_for"]
        assert "runs here) and probes itself in 0" in waits
        assert claim_answer(api, "one", one) == (202, {"probe": True})
        assert claim_answer(api, "one", one) == (204, None), "one order for one probe"
        shown = node(api, "one")
        assert shown["probe_began_at"] is not None
        assert shown["probe_at"] > shown["probe_began_at"]
        assert "and probes itself now" in api.get(f"/v1/ablations/{made['id']}").json()["waiting_for"]
        assert "It probes itself since" in Person.signed_in(api).get("/").text
        api.register("one", probed=True, **BAD)
        shown = node(api, "one")
        assert (shown["state"], shown["probe_began_at"]) == ("quarantined", None)
        assert BAD["device_reason"] in shown["quarantined_reason"]
        assert "and works again if that passes" in Person.signed_in(api).get("/").text
    make_due(api, "one")
    assert claim_answer(api, "one", one) == (202, {"probe": True})
    api.register("one", probed=True)
    shown = node(api, "one")
    assert [shown[name] for name in ("state", "quarantined_reason", "stopped_by", "probe_at")] == ["works"] + 3 * [None]
    assert api.claimed(one)["block_index"] == 0


def test_next_probe_comes_later_until_the_node_finishes_a_block(api: Api) -> None:
    api.submit()
    one = api.register("one")
    for rest_s in (60, 120, 240):
        api.client.post("/v1/blocks:claim", headers=api.worker_of("one"), json={"node_id": one, **BAD})
        assert rest_s - 10 < make_due(api, "one") <= rest_s
        assert claim_answer(api, "one", one)[0] == 202
        api.register("one", probed=True)
    block = api.claimed(one)
    assert api.attempt(block, "report", receipts=receipts_of(block, one)).status_code == 200
    api.client.post("/v1/blocks:claim", headers=api.worker_of("one"), json={"node_id": one, **BAD})
    assert make_due(api, "one") <= 60


def test_attempts_before_a_passed_probe_no_longer_count(api: Api) -> None:
    api.submit()
    one = api.register("one")
    break_one(api, one, place=0)
    break_one(api, one, place=1)
    other = other_work(api)
    break_one(api, one, place=2)
    assert node(api, "one")["state"] == "quarantined"
    make_due(api, "one")
    assert claim_answer(api, "one", one)[0] == 202
    api.register("one", probed=True)
    break_one(api, one, place=0)
    api.cancel(other["id"])
    break_one(api, one, place=1)
    assert node(api, "one")["state"] == "works"


def test_node_that_a_person_stopped_is_never_probed(api: Api) -> None:
    one = api.register("one")
    act(api, "one", "quarantine", reason="its fan is loud")
    assert node(api, "one")["probe_at"] is None
    api.register("one", probed=True)
    assert node(api, "one")["state"] == "quarantined", "no probe ends what a person began"
    act(api, "one", "resume")
    api.client.post("/v1/blocks:claim", headers=api.worker_of("one"), json={"node_id": one, **BAD})
    act(api, "one", "quarantine", reason="its fan is loud")
    assert (node(api, "one")["probe_at"], claim_answer(api, "one", one)) == (None, (204, None))
    act(api, "one", "resume")
    assert node(api, "one")["state"] == "works"


def test_worker_that_is_to_probe_tests_its_lanes_and_says_how_it_went(api: Api) -> None:
    api.submit()
    one = api.register("one")
    results: list[str | None] = ["wrong: relative error 1", None]

    def forward(request: httpx.Request) -> httpx.Response:
        answer = api.client.request(request.method, request.url.path, content=request.content, headers=request.headers)
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    service = ServiceApi("http://127.0.0.1:1", "key")
    headers = api.worker_of("one")
    service._http = httpx.Client(transport=httpx.MockTransport(forward), base_url="http://testserver", headers=headers)
    machine, cpu = find_node("one", "cpu"), NODE_CLASSES["cpu"]
    health = NodeHealth(machine.devices.proof(), cpu, lanes={"reference": None}, folders=(), least_disk_gib=0.0)
    worker = ServiceNode(
        service, machine, health, public_key=SIGNER.key, test_lanes=lambda: {"reference": results.pop(0)}
    )
    worker.id = one
    act(api, "one", "quarantine", reason="for a test")
    with api.store.write() as connection:
        connection.execute(update(nodes).values(probe_at=db_now()))
    assert worker.claim() is None
    assert "relative error 1" in node(api, "one")["quarantined_reason"]
    assert worker.claim() is None, "the next probe is not due yet"
    make_due(api, "one")
    assert worker.claim() is None
    assert node(api, "one")["state"] == "works"
    assert results == []
    block = worker.claim()
    assert isinstance(block, ClaimedBlock)
