"""Logs of ablations that are long over are dropped; everything that was measured or decided stays."""

import pytest
from sqlalchemy import func, select, update

from ablate.service.background.main import Retention
from ablate.service.store.files import logs
from ablate.service.store.files.logs import drop_logs
from ablate.service.store.tables import ablations, db_now, events, log_chunks, receipts
from tests.api_stack import Api, api_fixture

DAY_S = 86_400.0


api = api_fixture()


def logged(api: Api, *, age_days: float) -> tuple[str, str]:
    """Run a block of an ablation with a log, then cancel it; return its id and a trial of it."""
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    trial = block["trials"][0]["trial_id"]
    logs = [{"trial_id": trial, "offset": 0, "text": "step 1\n"}]
    assert api.attempt(block, "heartbeat", logs=logs).status_code == 200
    api.attempt(block, "report", failure_class="preempted", message="x")
    assert api.cancel(made["id"]).status_code == 202
    with api.store.write() as connection:
        ended = update(ablations).where(ablations.c.id == made["id"])
        connection.execute(ended.values(finished_at=db_now() - age_days * DAY_S))
    return str(made["id"]), str(trial)


def events_of(api: Api, ablation_id: str) -> int:
    with api.store.read() as connection:
        counted = select(func.count()).select_from(events).where(events.c.ablation_id == ablation_id)
        return int(connection.execute(counted).scalar_one())


def log_of(api: Api, trial_id: str) -> str:
    return api.get(f"/v1/trials/{trial_id}/log").text


def test_old_logs_go_and_the_rest_stays(api: Api) -> None:
    old, old_trial = logged(api, age_days=91)
    _, new_trial = logged(api, age_days=89)
    before = events_of(api, old)
    assert log_of(api, old_trial) == log_of(api, new_trial) == "step 1\n"
    keeper = Retention(api.store, drop_logs, age_s=90 * DAY_S)
    while keeper.round():
        pass
    assert events_of(api, old) == before
    gone = api.get(f"/v1/trials/{old_trial}/log")
    assert gone.status_code == 404
    assert "the log was dropped" in gone.json()["detail"]
    assert log_of(api, new_trial) == "step 1\n"
    assert api.get(f"/v1/ablations/{old}").json()["state"] == "cancelled"


def test_receipts_are_never_dropped(api: Api) -> None:
    made = api.submit()
    api.finish(api.register())
    with api.store.write() as connection:
        connection.execute(update(ablations).values(finished_at=db_now() - 9999 * DAY_S))
    keeper = Retention(api.store, drop_logs, age_s=DAY_S)
    while keeper.round():
        pass
    with api.store.read() as connection:
        assert connection.execute(select(func.count()).select_from(receipts)).scalar_one() == 18
        assert connection.execute(select(ablations.c.logs_dropped_at)).scalar_one() is not None
    assert api.get(made["links"]["self"]).status_code == 200


def test_a_running_ablation_and_an_age_of_zero_keep_everything(api: Api) -> None:
    _, trial = logged(api, age_days=9999)
    api.submit()
    assert not Retention(api.store, drop_logs, age_s=9999.5 * DAY_S).round()
    assert not Retention(api.store, drop_logs, age_s=0).round()
    assert log_of(api, trial) == "step 1\n"


def test_many_logs_go_in_small_transactions(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TRIALS_AT_ONCE", 1)
    made = api.submit()
    block = api.claimed(api.register())
    chunks = [{"trial_id": trial["trial_id"], "offset": 0, "text": "x"} for trial in block["trials"]]
    assert api.attempt(block, "heartbeat", logs=chunks).status_code == 200
    with api.store.write() as connection:
        connection.execute(update(ablations).values(finished_at=db_now() - DAY_S))
    keeper = Retention(api.store, drop_logs, age_s=1.0)
    left = []
    for _ in range(len(chunks) + 1):
        assert keeper.round()
        with api.store.read() as connection:
            left.append(connection.execute(select(func.count()).select_from(log_chunks)).scalar_one())
    assert left == [2, 1, 0, 0]
    assert not keeper.round()
    assert api.get(made["links"]["self"]).status_code == 200
