"""`ablate worker doctor` with a service that answers, rejects the key, or is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ablate.workers.cli import app
from ablate.workers.settings import get_settings
from tests.api_stack import nobody_url
from tests.integration.worker_service import TOKEN, Service
from tests.nvidia_gpus import put_driver


def _doctor(monkeypatch: pytest.MonkeyPatch, home: Path, url: str, token: str | None) -> tuple[int, dict[str, Any]]:
    monkeypatch.setenv("ABLATE_HOME", str(home))
    monkeypatch.setenv("ABLATE_URL", url)
    monkeypatch.setenv("ABLATE_NODE_NAME", "tester")
    monkeypatch.delenv("ABLATE_WORKER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("ABLATE_WORKER_TOKEN", token)
    get_settings.cache_clear()
    try:
        answer = CliRunner().invoke(app, ["doctor", "--json"])
    finally:
        get_settings.cache_clear()
    return answer.exit_code, {check["name"]: check for check in json.loads(answer.stdout)}


@pytest.fixture
def service() -> Any:
    running = Service()
    yield running
    running.close()


def test_doctor_good_node_without_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: Service) -> None:
    code, checks = _doctor(monkeypatch, tmp_path, f"http://127.0.0.1:{service.port}", TOKEN)
    assert code == 0
    assert checks["service"]["passed"]
    assert checks["worker key"]["passed"]
    assert not checks["broker"]["passed"]
    assert "finds work by polling" in checks["broker"]["detail"]


def test_doctor_refused_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: Service) -> None:
    code, checks = _doctor(monkeypatch, tmp_path, f"http://127.0.0.1:{service.port}", "a-key-that-nobody-gave")
    assert code == 6
    assert "401" in checks["worker key"]["detail"]


def test_doctor_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, checks = _doctor(monkeypatch, tmp_path, nobody_url(), None)
    assert code == 6
    assert "ABLATE_WORKER_TOKEN is not set" in checks["worker key"]["detail"]


@pytest.mark.parametrize("node_class", ["tpu-v6e", "h200"])
def test_doctor_no_service_and_a_class_without_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node_class: str
) -> None:
    put_driver(tmp_path, monkeypatch)
    monkeypatch.setenv("ABLATE_NODE_CLASS", node_class)
    code, checks = _doctor(monkeypatch, tmp_path, nobody_url(), TOKEN)
    assert code == 6
    assert not checks["service"]["passed"]
    assert (checks["device"]["passed"], checks["device"]["needed"]) == (False, True)
    assert f"node class '{node_class}' is configured, but this machine has no such device" in checks["device"]["detail"]
