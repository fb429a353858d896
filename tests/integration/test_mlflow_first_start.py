"""The MLflow server creates its database whole: a kill during its first migrations is no damage."""

import subprocess
from pathlib import Path

import httpx

from ablate.service.stack.parts import mlflow_command
from tests.mlflow_server import running
from tests.ports import free_port
from tests.waiting import LIMIT_S, until


def test_a_server_that_was_killed_while_it_created_its_database_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    unfinished = folder / "mlflow.db.unfinished"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(mlflow_command(free_port(), folder, tmp_path / "password"), stdout=log, stderr=log)
        until(lambda: unfinished.exists() and unfinished.stat().st_size > 0)
        server.kill()
        server.wait()
    with running(folder) as url:
        body = {"max_results": 10}
        answer = httpx.post(f"{url}/api/2.0/mlflow/experiments/search", json=body, trust_env=False, timeout=LIMIT_S)
        assert [experiment["name"] for experiment in answer.json()["experiments"]] == ["Default"]
    assert not unfinished.exists()
