"""Two API processes are restarted in turns under load: whatever was answered 2xx is stored, once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api_stack import ADMIN, WORKER, database_url, nobody_url
from tests.factories import spec_values
from tests.ports import free_port
from tests.service_process import is_up
from tests.waiting import LIMIT_S, until

CLIENTS = 4
PAUSE_S = 0.04
"""Between two submissions of a client. Most of the time passes while processes start, which need the processor too."""
HEADERS = {"Authorization": f"Bearer {ADMIN}"}


class ApiProcess:
    """`python -m ablate.service.app` on a port of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / f"{self.port}.log"
        self._environment = {
            "ABLATE_HOME": str(folder),
            "ABLATE_DATABASE_URL": url,
            "ABLATE_PORT": str(self.port),
            "ABLATE_ADMIN_TOKEN": ADMIN,
            "ABLATE_WORKER_TOKEN": WORKER,
            "ABLATE_MLFLOW_URL": nobody_url(),
            "ABLATE_BROKER_URL": "memory://",
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as out:
            command = [sys.executable, "-m", "ablate.service.app"]
            self.process = subprocess.Popen(command, env={**os.environ, **self._environment}, stdout=out, stderr=out)
        until(lambda: is_up(self.url) or self.process.poll() is not None, what=self.url)
        assert self.process.poll() is None, self.log.read_text()

    def stop(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        assert self.process.wait(LIMIT_S) == (0 if number == signal.SIGTERM else -number), self.log.read_text()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Client(threading.Thread):
    """Submits one spec after another, each to the processes in turn until one of them takes it."""

    def __init__(self, number: int, apis: list[ApiProcess], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.answered: dict[str, str] = {}
        self.odd: list[str] = []
        self.tries: Counter[str] = Counter()
        self._number, self._apis, self._stop_asked = number, apis, stop

    def run(self) -> None:
        count = 0
        while not self._stop_asked.is_set():
            key = f"client-{self._number}-{count}"
            self.answered[key] = self._submit(key, first=count)
            count += 1
            time.sleep(PAUSE_S)

    def _submit(self, key: str, *, first: int) -> str:
        values = spec_values(ablation=key)
        for turn in range(1000):
            api = self._apis[(first + turn) % len(self._apis)]
            self.tries[key] += 1
            try:
                headers = {**HEADERS, "Idempotency-Key": key}
                url = f"{api.url}/v1/ablations"
                answer = httpx.post(url, json=values, headers=headers, trust_env=False, timeout=LIMIT_S)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if answer.status_code == 202:
                return str(answer.json()["id"])
            if answer.status_code not in (409, 503):
                self.odd.append(f"{answer.status_code} {answer.text}")
            time.sleep(0.02)
        raise AssertionError(f"{key} was never taken")


@pytest.fixture(params=["sqlite", "postgresql"])
def apis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ApiProcess]]:
    url = database_url(request.param, tmp_path)
    started = [ApiProcess(url, tmp_path) for _ in range(2)]
    try:
        for api in started:
            api.start()
        yield started
    finally:
        for api in started:
            api.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_answered_is_stored_once_whatever_process_was_restarted(apis: list[ApiProcess]) -> None:
    stop = threading.Event()
    clients = [Client(number, apis, stop) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for api, number in zip(apis, (signal.SIGTERM, signal.SIGKILL), strict=True):
        more_answers(clients)
        api.stop(number)
        more_answers(clients)
        api.start()
    more_answers(clients)
    stop.set()
    for client in clients:
        client.join(LIMIT_S)
        assert not client.is_alive()
        assert client.odd == []
    answered = {key: ablation_id for client in clients for key, ablation_id in client.answered.items()}
    stored = {row["name"]: row["id"] for row in listed(apis[0])}
    assert answered == {key: stored.get(key) for key in answered}
    assert len(list(listed(apis[1]))) == len(stored), "no name is there twice"
    assert any(count > 1 for client in clients for count in client.tries.values()), "the restarts were felt"


def more_answers(clients: list[Client]) -> None:
    """Wait until each client has two more answers, the second of which it asked the other process for first."""
    goals = {client: len(client.answered) + 2 for client in clients}
    until(lambda: all(len(client.answered) >= goal or not client.is_alive() for client, goal in goals.items()))


def listed(api: ApiProcess) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        params = {"limit": 100, **({"cursor": cursor} if cursor else {})}
        page = httpx.get(
            f"{api.url}/v1/ablations", params=params, headers=HEADERS, trust_env=False, timeout=LIMIT_S
        ).json()
        yield from page["items"]
        cursor = page.get("next_cursor")
        if cursor is None:
            return
