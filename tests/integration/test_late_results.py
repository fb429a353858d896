"""Results that come after their lease, and leases that end at a block's limit; on SQLite and on PostgreSQL."""

import pytest
from sqlalchemy import func, select, update

from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.service.background.reconciler import Reconciler
from ablate.service.store.blocks.attempts import broken_attempts
from ablate.service.store.blocks.claims import BESIDE_TRIAL_S
from ablate.service.store.tables import ablations, attempts, blocks, db_now, receipts
from tests.api_stack import Api, api_fixture, receipts_of

api = api_fixture()


def expire(api: Api) -> None:
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() - 1))
    assert Reconciler(api.store).expire_leases() == 1
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))


def count_receipts(api: Api) -> int:
    with api.store.read() as connection:
        return int(connection.execute(select(func.count()).select_from(receipts)).scalar_one())


def test_late_result_counts_while_nobody_else_holds_the_block(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    expire(api)
    with api.store.read() as connection:
        spent = connection.execute(select(ablations.c.device_s)).scalar_one()
    assert api.attempt(block, "heartbeat").status_code == 409
    body = receipts_of(block, node)
    first = api.attempt(block, "report", receipts=body)
    assert (first.status_code, first.json()["block_state"]) == (200, "done")
    assert api.attempt(block, "report", receipts=body).json() == first.json()
    assert api.attempt(block, "report", receipts=body[:2]).status_code == 409
    assert count_receipts(api) == 3
    with api.store.read() as connection:
        assert broken_attempts(connection, made["id"]) == ()
        (attempt,) = connection.execute(select(attempts)).all()
        assert connection.execute(select(ablations.c.device_s)).scalar_one() == spent
    assert (attempt.state, attempt.failure_class, attempt.message) == ("done", None, None)
    moves = [
        (name, event["from"], event["to"])
        for name, event in api.events(api.cancel(made["id"]).json()["id"])
        if event["subject"] in (block["block_id"], block["attempt_id"])
    ]
    assert moves == [
        ("block.state", "queued", "running"),
        ("attempt.state", "running", "expired"),
        ("block.state", "running", "queued"),
        ("block.state", "queued", "running"),
        ("attempt.state", "expired", "done"),
        ("block.state", "running", "done"),
    ]


def test_late_break_and_a_late_result_of_a_cancelled_ablation_change_nothing(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    expire(api)
    assert api.attempt(block, "report", failure_class="timeout", message="slow").status_code == 409
    assert api.cancel(made["id"]).json()["state"] == "cancelled"
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 409
    assert count_receipts(api) == 0


def test_another_attempts_token_is_refused_before_and_after_the_lease_ended(api: Api) -> None:
    api.submit()
    node = api.register()
    block = api.claimed(node)
    stolen = {**block, "token": "A" * len(block["token"])}
    assert api.attempt(stolen, "heartbeat").status_code == 409
    expire(api)
    assert api.attempt(stolen, "report", receipts=receipts_of(block, node)).status_code == 409
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 200


def test_lease_ends_at_the_blocks_limit_however_often_the_worker_is_heard(api: Api) -> None:
    made = api.submit(limits={"trial": "60s"})
    block = api.claimed(api.register())
    with api.store.read() as connection:
        left = connection.execute(
            select(blocks.c.limit_at - db_now()).where(blocks.c.id == block["block_id"])
        ).scalar_one()
    assert left == pytest.approx(PREPARATION_LIMIT_S + 3 * (60 + BESIDE_TRIAL_S), abs=30)
    assert api.attempt(block, "heartbeat").json() == {"lease_s": 30.0, "cancel": False}
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.state == "running").values(limit_at=db_now() + 7))
    assert 0 < api.attempt(block, "heartbeat").json()["lease_s"] <= 7
    assert Reconciler(api.store).expire_leases() == 0
    with api.store.write() as connection:
        past = {"limit_at": db_now() - 1, "lease_until": db_now() - 1}
        connection.execute(update(blocks).where(blocks.c.state == "running").values(**past))
    assert api.attempt(block, "heartbeat").json()["lease_s"] == 0
    assert Reconciler(api.store).expire_leases() == 1
    with api.store.read() as connection:
        (attempt,) = broken_attempts(connection, made["id"])
    assert "held the block for longer than its limit" in attempt.message
    assert api.attempt(block, "heartbeat").status_code == 409
