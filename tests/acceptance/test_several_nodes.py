"""Trials on two nodes: two real workers with folders of their own, over gloo, with a real service."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import create_engine, text

from tests.api_stack import migrated_url, nobody_url
from tests.factories import spec_values
from tests.integration.worker_service import TOKEN, children_of, corpus, processes_of, worker
from tests.ports import free_port
from tests.service_process import API, BACKGROUND, is_up, service_process
from tests.waiting import until

ADMIN = "admin-key-of-this-test"
NODES = ("a", "b")
_numbers = itertools.count()
OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}


class Service:
    """The service's processes with the keys of two nodes."""

    def __init__(self, folder: Path, url: str, database: str) -> None:
        self.folder, self.url = folder, url
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30, trust_env=False
        )
        self._engine = create_engine(database)
        self._keys = {"a": TOKEN}
        self._ports = {name: free_port() for name in NODES}

    def close(self) -> None:
        self.http.close()
        self._engine.dispose()

    def home(self, name: str) -> Path:
        return self.folder / name

    @contextmanager
    def worker(self, name: str) -> Iterator[int]:
        """Run the worker of a node, which has the machine's processors for itself as far as it knows."""
        if name not in self._keys:
            self._keys[name] = self.http.post("/v1/nodes", json={"name": name}).json()["secret"]
        own = {
            "ABLATE_NODE_NAME": name,
            "ABLATE_WORKER_TOKEN": self._keys[name],
            "ABLATE_MEETING": f"127.0.0.1:{self._ports[name]}",
            "ABLATE_DEVICE_LOCKS": "home",
        }
        with worker(self.home(name), self.url, **own) as process:
            yield process.pid

    @contextmanager
    def workers(self) -> Iterator[dict[str, int]]:
        with self.worker("a") as first, self.worker("b") as second:
            yield {"a": first, "b": second}
        until(lambda: not any(processes_of(self.home(name)) for name in NODES), 60)

    def submit(self, *, timed: int = 4, **placement: Any) -> str:
        spec = spec_values(
            workload={
                "recipe": "hybrid-tiny",
                "overrides": {**OVERRIDES, "corpus": str(corpus(self.folder / "corpus"))},
                "steps": {"warmup": 1, "warmup_s": 0, "timed": timed, "val_rows": 2},
            },
            baseline={"gates": {"micro_batch": 2}},
            variants={"replicated": {"gates": {"sharding": "replicated"}}},
            design={"seeds": [1], "blocks": {"count": 2}, "order_seed": 7},
            verdict={"primary": {"metric": "peak_allocated_gib", "margin": "2%"}},
            placement={"node_class": "cpu", "devices": 2, **placement},
        )
        key = {"Idempotency-Key": f"key-{next(_numbers)}"}
        answer = self.http.post("/v1/ablations", json=spec, headers=key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def view(self, ablation: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/ablations/{ablation}").json())

    def completed(self, ablation: str) -> bool:
        return bool(self.view(ablation)["state"] == "completed")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def receipts(self, ablation: str) -> list[dict[str, Any]]:
        query = f"SELECT payload FROM receipts WHERE ablation_id = '{ablation}'"  # noqa: S608 - our own id
        found = [json.loads(payload) for (payload,) in self.rows(query)]
        return sorted(found, key=lambda one: (one["ids"]["block_index"], one["arm"]))

    def attempts(self) -> list[tuple[str, str, str]]:
        """State, failure class and message of every attempt, oldest first."""
        return self.rows("SELECT state, failure_class, message FROM attempts ORDER BY started_at, id")

    def ranks(self, name: str) -> list[int]:
        """The rank processes of a node, once they train."""
        servers = [pid for pid, command in processes_of(self.home(name)).items() if "forkserver" in command]
        trials = [child for server in servers for child in children_of(server)]
        return [rank.pid for trial in trials for rank in children_of(trial.pid)]


@pytest.fixture
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    port, database = free_port(), migrated_url(request.param, tmp_path / "database")  # kind of the database
    settings: dict[str, object] = {
        "home": tmp_path,
        "database_url": database,
        "port": port,
        "admin_token": ADMIN,
        "worker_token": TOKEN,
        "node_name": "a",
        "lease_s": 10,
        "heartbeat_s": 0.5,
        "claim_poll_s": 1,
        "mlflow_url": nobody_url(),
    }
    with ExitStack() as running:
        service = Service(tmp_path, f"http://127.0.0.1:{port}", database)
        running.callback(service.close)
        running.enter_context(service_process(API, tmp_path / "api.log", **settings))
        until(lambda: is_up(service.url))
        running.enter_context(service_process(BACKGROUND, tmp_path / "background.log", **settings))
        yield service


def losses(receipt: dict[str, Any]) -> list[float]:
    return [*(step["loss"] for step in receipt["steps"]), receipt["summary"]["loss_val"]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("service", ["sqlite"], indirect=True)
def test_two_nodes_reach_a_verdict_with_the_losses_of_one(service: Service) -> None:
    with service.worker("a"):
        one_node = service.submit()
        until(lambda: service.completed(one_node), 240)
        shared = service.submit(nodes=2)
        alone = "2 live nodes of class 'cpu' with equal devices and software: only 'a' can share a block"
        until(lambda: service.view(shared)["waiting_for"] == alone)
        assert service.view(shared)["blocks"]["done"] == 0
        with service.worker("b"):
            until(lambda: service.completed(shared), 240)
    until(lambda: not any(processes_of(service.home(name)) for name in NODES), 60)
    until(lambda: service.http.get(f"/v1/ablations/{shared}/verdict").is_success, 60)
    own, together = service.receipts(one_node), service.receipts(shared)
    assert len(own) == len(together) == 4
    assert list(map(losses, together)) == list(map(losses, own)), "the same ranks compute the same"
    for receipt in together:
        assert receipt["outcome"] == "measured"
        assert [device["node"] for device in receipt["environment"]["devices"]] in (["a", "b"], ["b", "a"])
        assert receipt["ids"]["device"] in ("a/0 + b/0", "b/0 + a/0")
        assert receipt["facts"]["mesh.devices"] == 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("service", "lost", "beside"),
    [
        ("postgresql", "rank", True),
        ("sqlite", "worker", False),
    ],
    indirect=["service"],
)
def test_a_lost_part_breaks_the_block_which_runs_again(service: Service, lost: str, *, beside: bool) -> None:
    """`beside`: on the node that does not have rank 0."""
    with service.workers() as pids:
        ablation = service.submit(timed=40, nodes=2)
        until(lambda: all(service.ranks(name) for name in NODES), 120)
        first = str(service.rows("SELECT name FROM nodes JOIN members ON node_id = nodes.id WHERE number = 0")[0][0])
        hit = next(name for name in NODES if (name == first) != beside)
        until(lambda: list((service.home(first) / "work").glob("*/*/steps.jsonl")), 120)
        victim = service.ranks(hit)[0] if lost == "rank" else pids[hit]
        os.kill(victim, signal.SIGKILL)
        until(lambda: service.attempts()[0][0] != "running", 120)
        until(lambda: not any(service.ranks(name) for name in NODES) or len(service.attempts()) > 1, 60)
        state, failure, message = service.attempts()[0]
        assert failure == "infra_node", message
        assert state == ("broken" if lost == "rank" else "expired"), message
        again = service.worker(hit) if lost == "worker" else nullcontext()
        with again:
            until(lambda: service.completed(ablation), 300)
    assert len({one["ids"]["attempt"] for one in service.receipts(ablation)}) == 2
    assert [state for state, *_ in service.attempts()[1:]] == ["done"] * 2, service.attempts()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("service", ["sqlite"], indirect=True)
def test_a_cancelled_trial_ends_on_every_node(service: Service) -> None:
    with service.workers():
        ablation = service.submit(timed=400, nodes=2)
        until(lambda: all(service.ranks(name) for name in NODES), 120)
        ranks = [pid for name in NODES for pid in service.ranks(name)]
        assert service.http.post(f"/v1/ablations/{ablation}:cancel").is_success
        until(lambda: service.view(ablation)["state"] == "cancelled", 60)
        until(lambda: not any(map(psutil.pid_exists, ranks)), 30)
        count_of_places = "SELECT count(*) FROM members JOIN blocks USING (attempt_id) WHERE blocks.state = 'running'"
        until(lambda: service.rows(count_of_places) == [(0,)], 30)
