"""How much work waits, and which blocks a worker with little time gets: by an independent count, on both databases."""

import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select, update

from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.service.cli import tables
from ablate.service.http.metrics import StoreCollector
from ablate.service.schemas.nodes import WaitingPublic
from ablate.service.store.blocks.claims import BESIDE_TRIAL_S
from ablate.service.store.tables import ablations, attempts, db_now, nodes
from tests.api_stack import Api, api_fixture, receipts_of, settings_for
from tests.factories import spec_values

BLOCKS, ARMS = 6, 3
LIMIT_S = PREPARATION_LIMIT_S + ARMS * (1200 + BESIDE_TRIAL_S)
"""Of a block of the factories' spec."""
LATE_S = 60.0
"""The clock runs on during the test, also during each finished block."""
RICH = {"device_minutes": 100_000}

api = api_fixture()


def waiting(api: Api) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["node_class"], row["devices"]): row for row in api.get("/v1/waiting").json()["items"]}


def metric(api: Api, name: str) -> dict[tuple[str, int], float]:
    text = generate_latest(StoreCollector(api.store, settings_for("sqlite://", Path("unused")))).decode()
    (family,) = (one for one in text_string_to_metric_families(text) if one.name == name)
    return {(one.labels["node_class"], int(one.labels["devices"])): one.value for one in family.samples}


def finish(api: Api, node: str, took_s: float, *, limits: dict[str, Any] = RICH) -> str:
    """Claim a block, let it have taken so long, and report it; return its ablation."""
    block = api.claimed(node)
    with api.store.write() as connection:
        own = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(own.values(started_at=db_now() - took_s))
    answer = api.attempt(block, "report", receipts=receipts_of(block, node, limits=limits))
    assert answer.status_code == 200, answer.text
    return str(block["ablation_id"])


def minutes(seconds: float) -> Any:
    return pytest.approx(seconds / 60, abs=BLOCKS * LATE_S / 60)


def test_queued_blocks_count_with_their_limit_then_with_the_pace_of_the_class_then_with_their_own(api: Api) -> None:
    assert waiting(api) == metric(api, "ablate_waiting_device_minutes") == {}
    made = api.submit(limits=RICH)
    assert waiting(api) == {
        ("cpu", 1): {
            "node_class": "cpu", "devices": 1, "nodes_each": 1, "blocks": BLOCKS, "nodes": 0, "least_s": LIMIT_S,
            "device_minutes": BLOCKS * LIMIT_S / 60,
        }
    }  # fmt: skip
    node = api.register()
    finish(api, node, 900.0)
    assert waiting(api)["cpu", 1]["device_minutes"] == minutes(5 * 900)
    api.submit(limits=RICH)
    row = waiting(api)["cpu", 1]
    assert (row["device_minutes"], row["blocks"], row["nodes"]) == (minutes(11 * 900), 11, 1)
    assert metric(api, "ablate_waiting_device_minutes") == {("cpu", 1): minutes(11 * 900)}
    block = api.claimed(node)
    assert waiting(api)["cpu", 1]["blocks"] == 10, "a running block does not wait"
    api.attempt(block, "report", failure_class="infra_control", message="it pauses now, and still waits")
    assert waiting(api)["cpu", 1]["blocks"] == 11
    api.cancel(made["id"])
    assert waiting(api)["cpu", 1]["blocks"] == BLOCKS


def test_blocks_that_the_device_minutes_do_not_pay_for_are_no_work(api: Api) -> None:
    api.submit(limits={"device_minutes": 100})
    assert waiting(api)["cpu", 1]["device_minutes"] == 100
    with api.store.write() as connection:
        connection.execute(update(ablations).values(device_s=90 * 60.0))
    assert waiting(api)["cpu", 1]["device_minutes"] == pytest.approx(10)
    with api.store.write() as connection:
        connection.execute(update(ablations).values(device_s=900 * 60.0))
    assert waiting(api)["cpu", 1]["device_minutes"] == 0


@pytest.mark.parametrize(("node_class", "busy"), [("tpu-v6e", 4), ("xla-cpu", 1)])
def test_each_number_of_devices_is_a_row_of_its_own(api: Api, node_class: str, busy: int) -> None:
    """Virtual devices are the processors of one machine."""
    values = {
        "workload__overrides": {"micro_batch": 4},
        "baseline": {"gates": {"lane": "xla"}},
        "variants": {"whole": {"gates": {"sharding": "replicated"}}},
        "limits": RICH,
    }
    api.submit(**values, placement={"node_class": node_class, "devices": 4})
    api.submit(limits=RICH)
    api.register("whole", node_class, devices=4)
    api.register("cpu-1")
    rows, limit_s = waiting(api), PREPARATION_LIMIT_S + 2 * (1200 + BESIDE_TRIAL_S)
    assert {kind: row["nodes"] for kind, row in rows.items()} == {("cpu", 1): 1, (node_class, 4): 1}
    assert rows[node_class, 4]["device_minutes"] == pytest.approx(BLOCKS * limit_s / 60 * busy)


def test_stopped_silent_and_unable_nodes_are_no_capacity(api: Api) -> None:
    api.submit(limits=RICH)
    for name in ("works", "drained", "quarantined", "silent", "revoked", "unable"):
        api.register(name, lanes={"reference": "wrong gradients"} if name == "unable" else {"reference": None})
    api.register("other", "h200")
    assert waiting(api)["cpu", 1]["nodes"] == 5
    for path, body in (
        ("drained:drain", {}),
        ("quarantined:quarantine", {"reason": "smells"}),
        ("revoked:revoke-key", {"reason": "sold"}),
    ):
        assert api.client.post(f"/v1/nodes/{path}", headers=api.admin, json=body).is_success
    with api.store.write() as connection:
        connection.execute(update(nodes).where(nodes.c.name == "silent").values(seen_at=db_now() - 3600))
    assert waiting(api)["cpu", 1]["nodes"] == 1
    assert metric(api, "ablate_waiting_nodes") == {("cpu", 1): 1}
    for name in ("drained", "quarantined"):
        assert api.client.post(f"/v1/nodes/{name}:resume", headers=api.admin).is_success
    assert waiting(api)["cpu", 1]["nodes"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_any_queue_is_paid_for_block_by_block(api: Api, seed: int) -> None:
    """The counts of the ablations are drawn; the oracle pays for one block after another."""
    rng = random.Random(seed)  # noqa: S311 - draws that repeat
    expected = 0.0
    for _ in range(8):
        made = api.submit(limits=RICH)
        done, mean_s = rng.choice([1, 2, 7]), rng.choice([0.25, 60.0, 5_000.0])
        budget_s, spent_s = rng.choice([60.0, 7_000.0, 1e6]), rng.choice([0.0, 59.0, 1e4])
        with api.store.write() as connection:
            own = update(ablations).where(ablations.c.id == made["id"])
            times = {"blocks_done": done, "settled_s": done * mean_s, "device_s": spent_s}
            connection.execute(own.values(**times, device_minutes=budget_s / 60))
        left_s = max(0.0, budget_s - spent_s)
        for _block in range(BLOCKS):
            paid_s = min(mean_s, left_s)
            expected, left_s = expected + paid_s, left_s - paid_s
    assert waiting(api)["cpu", 1]["device_minutes"] == pytest.approx(expected / 60)


def test_the_work_is_for_readers_and_a_line_of_the_nodes(api: Api) -> None:
    reader = api.token("reader", "read")
    assert api.client.get("/v1/waiting", headers=reader).status_code == 200
    assert api.client.get("/v1/waiting", headers=api.worker).status_code == 403
    row = WaitingPublic(node_class="h200", devices=2, blocks=1, device_minutes=7.25, least_s=60.0, nodes=3)
    (line,) = tables.waiting([row]).renderables  # type: ignore[union-attr]
    assert str(line) == "7.2 device minutes wait for class h200, 2 devices: 1 block, 3 nodes may run them"


def test_a_worker_with_little_time_gets_no_block_that_should_take_longer(api: Api) -> None:
    node = api.register()
    long, short = api.submit(limits=RICH)["id"], api.submit(limits=RICH)["id"]
    assert api.claim(node, left_s=LIMIT_S - 1) is None, "no block of either has finished, so the limit counts"
    assert finish(api, node, 5_000.0) == long
    assert finish(api, node, 500.0) == short
    assert api.claim(node, left_s=400.0) is None
    block = api.claimed(node, left_s=1_000.0)
    assert (block["ablation_id"], block["expected_s"]) == (short, pytest.approx(500, abs=LATE_S))
    assert api.attempt(block, "report", failure_class="preempted", message="away").is_success
    patient = api.claimed(node)
    assert patient["ablation_id"] == long, "it is the turn of the long one"
    assert patient["expected_s"] == pytest.approx(5_000, abs=LATE_S)
    assert api.claim(node, left_s=LIMIT_S) is not None


@pytest.mark.parametrize("left_s", [-1, "soon", True])
def test_a_time_left_is_a_number_of_seconds(api: Api, left_s: Any) -> None:
    body = {"node_id": api.register("tester"), "left_s": left_s}
    answer = api.client.post("/v1/blocks:claim", headers=api.worker, json=body)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "#/left_s")


def test_a_claim_is_answered_again_when_less_time_is_left(api: Api) -> None:
    api.submit(limits=RICH)
    node = api.register("once", devices=1)
    first = api.claimed(node, claim_id="A" * 22, left_s=LIMIT_S)
    assert api.claim(node, claim_id="A" * 22, left_s=1.0) == first


def test_a_block_that_short_workers_gave_back_counts_against_no_node(api: Api) -> None:
    node = api.register("short")
    api.submit(limits=RICH)
    for _ in range(9):
        block = api.claimed(node)
        assert api.attempt(block, "report", failure_class="preempted", message="away").json()["block_state"] == "queued"
    with api.store.read() as connection:
        assert connection.scalar(select(nodes.c.quarantined_reason).where(nodes.c.name == "short")) is None
    assert spec_values()["design"]["blocks"]["count"] == waiting(api)["cpu", 1]["blocks"]
