"""The same code on PostgreSQL and Redis as servers, over TLS with passwords; both are killed and come back."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from kombu import pools
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from ablate.experiments.system.wake import celery_app, publish_wake, wake_subscription
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.session import Store
from tests import certificates, servers
from tests.api_stack import ADMIN, WORKER, nobody_url, running_api, served_api
from tests.ports import free_port
from tests.servers import Postgres, RedisServer
from tests.service_process import API, BACKGROUND, service_process
from tests.waiting import until

needs_postgres = pytest.mark.skipif(servers.no_postgres() is not None, reason=str(servers.no_postgres()))
needs_redis = pytest.mark.skipif(servers.no_redis() is not None, reason=str(servers.no_redis()))


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with servers.redis() as server:
        yield server


def process(module: str, log: Path, **settings: object) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """Run a module of the service with settings as an installation has them."""
    secrets = {"admin_token": ADMIN, "worker_token": WORKER, "mlflow_url": nobody_url()}
    return service_process(module, log, **secrets, **settings)


@needs_postgres
def test_every_connection_is_encrypted_and_an_ablation_goes_from_submission_to_verdict(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = postgres.new_database()
    background = process(BACKGROUND, tmp_path / "log", home=tmp_path, database_url=url)
    with running_api("sqlite", tmp_path, database_url=url) as api, background:
        made = api.submit()
        api.finish(api.register())
        until(lambda: api.get(made["links"]["report"]).status_code == 200)
        with api.store.read() as connection:
            joined = "pg_stat_ssl JOIN pg_stat_activity USING (pid)"
            query = text(f"SELECT bool_and(ssl), count(*) FROM {joined} WHERE usename = 'ablate'")  # noqa: S608
            encrypted, count = connection.execute(query).one()
        assert encrypted
        assert count >= 2
    assert postgres.password not in (tmp_path / "log").read_text()


@needs_postgres
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"password": "wrong"}, "password authentication failed"),
        ({"options": "sslmode=disable"}, "no pg_hba.conf entry"),
        ({"options": "sslmode=verify-full&sslrootcert={other}"}, "certificate verify failed"),
    ],
)
def test_what_is_not_allowed_is_refused_and_said_without_the_password(
    postgres: Postgres, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    certificates.write(tmp_path)
    given = {key: value.format(other=tmp_path / "ca.pem") for key, value in given.items()}
    url = postgres.url("postgres", **given)
    with pytest.raises(OperationalError, match=message):
        Store(url).writer.connect()
    log = tmp_path / "log"
    with process(API, log, home=tmp_path, database_url=url, port=free_port()):
        until(lambda: message in log.read_text())
    assert postgres.password not in log.read_text()


@needs_postgres
def test_postgres_trusts_the_authorities_of_every_client(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = postgres.url("postgres", options="sslmode=verify-full&sslrootcert=system")
    certificates.write(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with pytest.raises(OperationalError, match="certificate verify failed"):
        Store(url).writer.connect()
    monkeypatch.setenv("SSL_CERT_FILE", str(postgres.ca))
    store = Store(url)
    with store.read() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    store.close()


@needs_postgres
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_database_that_was_killed_comes_back_and_nothing_is_lost(
    postgres: Postgres, tmp_path: Path, number: signal.Signals
) -> None:
    with served_api("sqlite", tmp_path, database_url=postgres.new_database()) as api:
        before = api.submit()
        node = api.register()
        block = api.claim(node)
        postgres.end(number)
        away = api.client.get("/v1/ablations", headers=api.admin)
        assert away.status_code in (500, 503), away.text
        assert "password" not in away.text.lower()
        postgres.start()
        until(lambda: api.get(before["links"]["self"]).status_code == 200)
        assert block is not None
        assert api.attempt(block, "heartbeat").status_code == 200
        after = api.submit()
        api.attempt(block, "report", failure_class="preempted", message="x")
        assert {before["id"], after["id"]} <= {row["id"] for row in api.get("/v1/ablations").json()["items"]}
        assert api.finish(node) >= 11


class Ear:
    """Hears wake-ups of class cpu as a worker does."""

    def __init__(self, url: str) -> None:
        self.heard = 0
        self._connection = celery_app(url, name="ear").connection_for_read()
        self._consumer = self._connection.Consumer([wake_subscription("cpu")], callbacks=[self._hear], accept=["json"])
        self._consumer.consume()

    def _hear(self, _body: object, _message: object) -> None:
        self.heard += 1

    def listen(self, seconds: float) -> int:
        """Return how many were heard so far, after waiting for one."""
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=seconds)
        return self.heard

    def close(self) -> None:
        self._connection.close()


@needs_redis
def test_a_submission_wakes_a_worker_over_tls(redis: RedisServer, tmp_path: Path) -> None:
    ear = Ear(redis.url())
    ear.listen(0.5)
    with running_api("sqlite", tmp_path, broker_url=redis.url()) as api:
        api.submit()
        assert ear.listen(30) == 1
        broker = api.get("/readyz").text
        assert redis.password not in broker
    ear.close()


@needs_redis
@pytest.mark.parametrize("wrong", ["password", "authority", "plain"])
def test_without_password_or_trust_nothing_is_sent_and_submissions_go_on(
    redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    certificates.write(tmp_path)
    url = {
        "password": redis.url(password="wrong"),
        "authority": redis.url(ca=tmp_path / "ca.pem"),
        "plain": f"redis://:{redis.password}@localhost:{redis.port}/0",
    }[wrong]
    pools.reset()  # a connection of an earlier test to the same address is trusted already
    ear = Ear(redis.url())
    ear.listen(0.5)
    with running_api("sqlite", tmp_path, broker_url=url) as api:
        assert api.submit()["state"] == "queued"
        until(lambda: "wake-ups not sent" in caplog.text)
        assert api.claim(api.register()) is not None
    assert ear.listen(1) == 0
    assert redis.password not in caplog.text
    ear.close()


@needs_redis
def test_a_broker_that_was_killed_is_used_again(redis: RedisServer, tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, broker_url=redis.url()) as api:
        api.submit()
        redis.end()
        api.submit()
        redis.start()
        ear = Ear(redis.url())
        ear.listen(0.5)
        api.submit()
        assert ear.listen(30) >= 1
        ear.close()


@needs_redis
def test_nothing_but_json_travels(redis: RedisServer) -> None:
    with redis.client() as client, client.pubsub() as subscription:
        subscription.psubscribe("*")
        until(lambda: (subscription.get_message(timeout=1) or {}).get("type") == "psubscribe")
        publish_wake(celery_app(redis.url(), name="sender"), "cpu")
        sent: list[dict[str, Any]] = []
        until(lambda: (sent.append(subscription.get_message(timeout=1) or {}), sent[-1].get("type") == "pmessage")[1])
    body = json.loads(sent[-1]["data"])
    assert body["content-type"] == "application/json"


@needs_postgres
@needs_redis
def test_the_background_process_runs_on_both(postgres: Postgres, redis: RedisServer, tmp_path: Path) -> None:
    url, log = postgres.new_database(), tmp_path / "log"
    with (
        running_api("sqlite", tmp_path, database_url=url, broker_url="memory://") as api,
        process(BACKGROUND, log, home=tmp_path, database_url=url, broker_url=redis.url()),
    ):
        ear = Ear(redis.url())
        ear.listen(0.5)
        node = api.register()  # who is not there is not woken
        api.submit()
        assert ear.listen(30) >= 1, "the background process sends wake-ups that the API could not"
        postgres.end()
        postgres.start()
        made = api.submit()
        api.finish(node)
        until(lambda: api.get(made["links"]["report"]).status_code == 200)
        ear.close()
        with api.store.read() as connection:
            query = text("SELECT count(*) FROM outbox WHERE kind = :kind")
            assert connection.execute(query, {"kind": OutboxKind.JUDGE}).scalar() == 0
    assert redis.password not in log.read_text()
    assert postgres.password not in log.read_text()
