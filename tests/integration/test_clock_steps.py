"""Somebody sets the database's clock: nobody is charged for it, and nothing waits or ends because of it.

A test sets the clock forwards by moving every stored time back.
"""

from typing import Any

import pytest
from sqlalchemy import select, update

from ablate.service.background import leader, reconciler
from ablate.service.background.leader import Leader
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import leaders, outbox
from ablate.service.store.nodes import nodes
from ablate.service.store.tables import attempts, blocks, db_now, metadata
from tests.api_stack import Api, api_fixture, receipts_of
from tests.factories import spec_values

LEASE_S = 30.0
STEPS_S = (6 * 3600.0, -2 * 3600.0)
LIMITS = {"trial": "5m", "device_minutes": 100}
_MOMENTS = ("_at", "until", "not_before", "runs_since")

api = api_fixture()


class Clocks:
    """The database's clock and this process's."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        self._api = api
        self._own_s = self._database_s = 0.0
        monkeypatch.setattr(reconciler, "now_s", lambda: leader.now_s() + self._own_s)
        monkeypatch.setattr(reconciler, "db_now", lambda: db_now() + self._database_s)

    def step(self, seconds: float) -> None:
        """Set the database's clock."""
        with self._api.store.write() as connection:
            for table in metadata.sorted_tables:
                moments = {c.name: c - seconds for c in table.columns if c.name.endswith(_MOMENTS)}
                if moments:
                    connection.execute(update(table).values(moments))
        self._database_s += seconds

    def wait(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.step(seconds)
        self._own_s += seconds


@pytest.fixture
def clocks(api: Api, monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(api, monkeypatch)


@pytest.fixture
def repairs(api: Api) -> Reconciler:
    made = Reconciler(api.store, lease_s=LEASE_S)
    made.tick()
    return made


def used_s(api: Api, block: dict[str, Any]) -> float:
    with api.store.read() as connection:
        own = select(attempts.c.started_at, attempts.c.ended_at, db_now()).where(attempts.c.id == block["attempt_id"])
        started_at, ended_at, now = connection.execute(own).one()
    return float((now if ended_at is None else ended_at) - started_at)


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("step_s", STEPS_S)
def test_an_attempt_survives_a_step_and_is_charged_for_its_own_time(
    api: Api, clocks: Clocks, repairs: Reconciler, step_s: float, renews: bool
) -> None:
    made = api.submit(limits=LIMITS)
    node = api.register()
    block = api.claimed(node)
    for _ in range(4):
        clocks.wait(20)
        assert api.attempt(block, "heartbeat").json()["lease_s"] == LEASE_S
        repairs.tick()
    clocks.step(step_s)
    repairs.tick()
    clocks.wait(20)
    repairs.tick()
    if renews:
        assert api.attempt(block, "heartbeat").json() == {"lease_s": LEASE_S, "cancel": False}
        assert used_s(api, block) == pytest.approx(100, abs=LEASE_S)
        with api.store.read() as connection:
            own = select(blocks.c.limit_at - db_now(), blocks.c.lease_until - db_now())
            limit_s, lease_s = connection.execute(own.where(blocks.c.id == block["block_id"])).one()
        assert 3600 < limit_s < 3 * 3600
        assert lease_s == pytest.approx(LEASE_S, abs=5)
    assert api.attempt(block, "report", receipts=receipts_of(block, node, limits=LIMITS)).status_code == 200
    assert 0 <= used_s(api, block) < 100 + LEASE_S + 10
    assert api.get(f"/v1/ablations/{made['id']}").json()["state"] == "running"


@pytest.mark.parametrize("step_s", STEPS_S)
def test_the_lease_of_a_silent_worker_ends_one_lease_after_a_step(
    api: Api, clocks: Clocks, repairs: Reconciler, step_s: float
) -> None:
    owner = api.token("owner", "submit", device_minutes=1000)
    headers = {**owner, "Idempotency-Key": "one"}
    api.client.post("/v1/ablations", json=spec_values(limits=LIMITS), headers=headers)
    block = api.claimed(api.register())
    clocks.step(step_s)
    running = select(blocks.c.state).where(blocks.c.id == block["block_id"])
    for passed_s, state in ((0, "running"), (20, "running"), (LEASE_S, "queued")):
        clocks.wait(passed_s)
        repairs.tick()
        with api.store.read() as connection:
            assert connection.scalar(running) == state
        used = api.client.get("/v1/identity", headers=owner).json()["device_minutes_used"]
        assert 0 <= used <= 1
    assert 0 <= used_s(api, block) <= 2 * LEASE_S


def test_a_lapsed_lease_uses_no_more_time(api: Api, clocks: Clocks) -> None:
    api.submit()
    block = api.claimed(api.register())
    clocks.wait(3600)
    assert Reconciler(api.store, lease_s=LEASE_S).expire_leases() == 1
    assert used_s(api, block) == pytest.approx(LEASE_S, abs=5)


def test_duties_and_pauses_do_not_wait_for_a_clock_that_went_back(api: Api, clocks: Clocks) -> None:
    dead, successor = (Leader(api.store, lease_s=5) for _ in range(2))
    dead.renew()
    made = api.submit()
    node = api.register()
    api.attempt(api.claimed(node), "report", failure_class="invalid_measurement", message="noise")
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.JUDGE, made["id"])
    clocks.step(-2 * 3600)
    with api.store.read() as connection:
        assert not leaders.has_leader(connection, lease_s=5)
        assert [row.key for row in outbox.due(connection, OutboxKind.JUDGE, limit=9)] == [made["id"]]
    successor.renew()
    assert successor.leads
    assert api.claimed(node)["attempt_no"] == 2


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_dead_node_is_silent_after_the_clock_was_set(api: Api, clocks: Clocks, step_s: float) -> None:
    api.register("dead")
    api.register("lives")
    clocks.step(step_s)
    api.claim(api.register("lives"))
    health = {node["name"]: node["health"] for node in api.get("/v1/nodes").json()["items"]}
    assert health == {"dead": "silent", "lives": "live"}
    with api.store.read() as connection:
        assert nodes.count_live(connection, silent_s=LEASE_S) == {"cpu": 1}
