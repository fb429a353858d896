"""Start and end of a worker process."""

import signal
from pathlib import Path

from experiments.outcomes import ExitCode
from model.config import StepsConfig
from tests.integration.worker_service import Service, block, config_json, corpus, processes_of, worker
from tests.ports import free_port
from tests.waiting import until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)


def test_worker_waits_for_the_service_and_sigint_releases(tmp_path: Path) -> None:
    port = free_port()
    with worker(tmp_path, f"http://127.0.0.1:{port}") as process:
        until(lambda: b"waiting for the service" in (tmp_path / "worker.log").read_bytes())
        service = Service(port=port)
        service.blocks.append(block([config_json(corpus(tmp_path / "corpus"), steps=_ENDLESS)], attempt="term"))
        until(service.steps_done)
        registration = next(body for path, body, _at in service.calls if path == "/v1/nodes/tester")
        assert registration["node_class"] == "cpu"
        assert registration["versions"]["torch"]
        assert registration["lanes"] == {"reference": None}
        assert (registration["device_state"], registration["device_reason"]) == ("ok", None)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert [body["failure_class"] for body in service.bodies(":release")] == ["preempted"]
        until(lambda: not processes_of(tmp_path))
        service.close()


def test_refused_key_ends_with_a_sentence(tmp_path: Path) -> None:
    service = Service()
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_WORKER_TOKEN="another-key") as process:
        assert process.wait(120) == ExitCode.ERROR
        assert b"the service answered 401: unknown key" in (tmp_path / "worker.log").read_bytes()
        until(lambda: not processes_of(tmp_path))
    service.close()


def test_class_without_its_device_ends_with_a_sentence_and_registers_nothing(tmp_path: Path) -> None:
    service = Service()
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_NODE_CLASS="tpu-v6e") as process:
        assert process.wait(120) == ExitCode.ERROR
        log = " ".join((tmp_path / "worker.log").read_text().split())
        assert "worker cannot run: node class 'tpu-v6e' is configured, but this machine has no such device" in log
    assert service.calls == []
    service.close()
