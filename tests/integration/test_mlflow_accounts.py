"""The MLflow server of the compose file: a password for everybody, accounts that read, one that writes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ablate.experiments.reporting.mlflow.sink import connect
from tests.mlflow_server import wait_until_it_answers
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

SERVER = Path(__file__).parents[2] / "docker" / "mlflow" / "server.py"
PASSWORD = "the-service-writes-with-this%2"
SEARCH, CREATE = "/api/2.0/mlflow/experiments/search", "/api/2.0/mlflow/experiments/create"


@dataclass
class Mlflow:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url_of_the_service(self) -> str:
        return f"http://ablate:{PASSWORD.replace('%', '%25')}@127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "MLFLOW_SECRETS": str(self.folder),
            "MLFLOW_HOST": "127.0.0.1",
            "MLFLOW_PORT": str(self.port),
            "MLFLOW_WORKERS": "2",
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.folder / "artifacts"),
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{self.port}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TMPDIR": str(self.folder),
        }

    def account(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(SERVER), *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def get(self, name: str, password: str) -> int:
        query = {"max_results": 5}
        return httpx.get(
            self.url + SEARCH, params=query, auth=(name, password), timeout=LIMIT_S, trust_env=False
        ).status_code


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / "mlflow_database_url").write_text(f"sqlite:///{folder / 'mlflow.db'}\n")
    (folder / "mlflow_password").write_text(PASSWORD + "\n")
    served = Mlflow(folder, free_port())
    log = folder / "server.log"
    with log.open("w") as out:
        command = [sys.executable, str(SERVER), "start"]
        server = subprocess.Popen(command, env=served.environment, stdout=out, stderr=out, start_new_session=True)
        try:
            wait_until_it_answers(served.url, server, log)
            yield served
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=LIMIT_S)


def test_nobody_reads_or_writes_without_the_password(mlflow: Mlflow) -> None:
    for method, path in (("GET", SEARCH), ("POST", CREATE), ("GET", "/"), ("GET", "/ajax-api/2.0/mlflow/users/list")):
        answer = httpx.request(method, mlflow.url + path, timeout=LIMIT_S, trust_env=False)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["WWW-Authenticate"].startswith("Basic")
    assert mlflow.get("ablate", "wrong") == 401
    assert mlflow.get("admin", "password1234") == 401


def test_the_service_writes_with_its_password(mlflow: Mlflow) -> None:
    client = connect(mlflow.url_of_the_service, timeout_s=60, max_retries=1)
    experiment = client.create_experiment("written")
    assert client.get_experiment(experiment).name == "written"


def test_an_account_of_a_person_reads_only_and_ends(mlflow: Mlflow) -> None:
    made = mlflow.account("add", "ada")
    assert made.returncode == 0, made.stderr
    password = made.stdout.strip()
    assert mlflow.get("ada", password) == 200
    client = connect(mlflow.url_of_the_service, timeout_s=60, max_retries=1)
    run = client.create_run(client.create_experiment("read"))
    signed_in = {"auth": ("ada", password), "timeout": 60, "trust_env": False}
    read = httpx.get(f"{mlflow.url}/api/2.0/mlflow/runs/get", params={"run_id": run.info.run_id}, **signed_in)
    assert read.status_code == 200
    for verb, body in (("delete", {}), ("update", {"status": "FAILED"}), ("set-tag", {"key": "a", "value": "b"})):
        answer = httpx.post(
            f"{mlflow.url}/api/2.0/mlflow/runs/{verb}", json={"run_id": run.info.run_id} | body, **signed_in
        )
        assert answer.status_code == 403, (verb, answer.text)
    new = httpx.post(
        f"{mlflow.url}/api/2.0/mlflow/users/create", json={"username": "eve", "password": "x" * 20}, **signed_in
    )
    assert new.status_code == 403
    assert mlflow.account("list").stdout.splitlines() == ["ablate writes", "ada reads"]
    assert mlflow.account("remove", "ada").returncode == 0
    until(lambda: mlflow.get("ada", password) == 401)
