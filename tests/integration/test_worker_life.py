"""Start and end of a worker process, and its key."""

import shutil
import signal
import sys
from pathlib import Path

from ablate.experiments.digest import IMPORT_ROOT
from ablate.experiments.outcomes import ExitCode
from ablate.model.config import StepsConfig
from tests.api_stack import Api, served_api
from tests.integration.worker_service import Service, block, built_in_arm, corpus, processes_of, worker
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)


def test_worker_waits_for_the_service_and_sigint_releases(tmp_path: Path) -> None:
    port = free_port()
    with worker(tmp_path, f"http://127.0.0.1:{port}") as process:
        until(lambda: b"waiting for the service" in (tmp_path / "worker.log").read_bytes())
        service = Service(port=port)
        service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"), steps=_ENDLESS)], attempt="term"))
        until(service.steps_done)
        registration = next(body for path, body, _at in service.calls if path == "/v1/nodes/tester")
        assert registration["node_class"] == "cpu"
        assert registration["versions"]["torch"]
        refused = "this node takes no commands (ABLATE_ACCEPT_CODE)"
        assert registration["lanes"] == {"reference": None, "command": refused}
        assert (registration["device_state"], registration["device_reason"]) == ("ok", None)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
        assert [body["failure_class"] for body in service.bodies(":report")] == ["preempted"]
        until(lambda: not processes_of(tmp_path))
        service.close()


def test_refused_key_ends_with_a_sentence(tmp_path: Path) -> None:
    service = Service()
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_WORKER_TOKEN="another-key") as process:
        assert process.wait(LIMIT_S) == ExitCode.ERROR
        assert b"the service answered 401: unknown key" in (tmp_path / "worker.log").read_bytes()
        until(lambda: not processes_of(tmp_path))
    service.close()


def test_class_without_its_device_ends_with_a_sentence_and_registers_nothing(tmp_path: Path) -> None:
    service = Service()
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_NODE_CLASS="tpu-v6e") as process:
        assert process.wait(LIMIT_S) == ExitCode.ERROR
        log = " ".join((tmp_path / "worker.log").read_text().split())
        assert "worker cannot run: node class 'tpu-v6e' is configured, but this machine has no such device" in log
    assert service.calls == []
    service.close()


def log_of(home: Path) -> str:
    return " ".join((home / "worker.log").read_text().split())


def seen_at(api: Api, name: str) -> str:
    return str(next(row["seen_at"] for row in api.get("/v1/nodes").json()["items"] if row["name"] == name))


def test_a_replaced_key_goes_on_and_a_revoked_one_ends_its_worker(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        url = str(api.client.base_url).rstrip("/")
        old = api.client.post("/v1/nodes", headers=api.admin, json={"name": "gpu-7", "node_class": "cpu"}).json()[
            "secret"
        ]
        with worker(tmp_path / "old", url, ABLATE_WORKER_TOKEN=old, ABLATE_NODE_NAME="gpu-7") as process:
            until(lambda: "asks for work" in log_of(tmp_path / "old"))
            rotated = api.client.post("/v1/nodes/gpu-7:rotate-key", headers=api.admin, json={"grace_s": 600})
            assert rotated.is_success
            before = seen_at(api, "gpu-7")
            until(lambda: seen_at(api, "gpu-7") > before)
            assert process.poll() is None, "the key before it still counts"
            answer = api.client.post("/v1/nodes/gpu-7:revoke-key", headers=api.admin, json={"reason": "sold"})
            assert answer.status_code == 204
            assert process.wait(LIMIT_S) == ExitCode.ERROR
        assert "the service answered 401: this key of node 'gpu-7' was revoked; an operator" in log_of(tmp_path / "old")
        assert old not in (tmp_path / "old" / "worker.log").read_text()


def test_changed_code_spoils_the_block_and_ends_the_worker(tmp_path: Path) -> None:
    """The worker runs a copy of the source."""
    shutil.copytree(IMPORT_ROOT / "ablate", tmp_path / "source" / "ablate")
    service = Service()
    home = tmp_path / "home"
    command = [sys.executable, "-P", "-m", "ablate.workers.app"]
    path = str(tmp_path / "source")
    with worker(home, f"http://127.0.0.1:{service.port}", command=command, PYTHONPATH=path) as process:
        steps = StepsConfig(warmup=1, timed=400, val_rows=0)
        service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"), steps=steps)], attempt="changed"))
        until(service.steps_done)
        with (tmp_path / "source" / "ablate" / "model" / "counts.py").open("a") as file:
            file.write("# other code\n")
        assert process.wait(LIMIT_S) == ExitCode.ERROR
        (report,) = service.bodies(":report")
        assert (report["failure_class"], report["arm"], report["receipts"]) == ("infra_node", None, [])
        assert "receipts would name the wrong software: the source code changed" in report["message"]
        log = " ".join(home.with_suffix(".log").read_text().split())
        assert "worker cannot run: the source code changed after this worker had started; start it again" in log
        until(lambda: not processes_of(home))
    service.close()
