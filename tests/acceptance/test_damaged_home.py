"""The embedded stack in poor surroundings: damaged files, a shell without UTF-8, a long TMPDIR. Slow, as all starts."""

import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from service.stack import part_processes
from tests.acceptance.test_stack import EXACT, Home
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POOR = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
GARBAGE = b"\xff\x00 garbage" * 400


def damage(home: Path) -> None:
    """Leave no file as it was that the stack can make again."""
    for name in ("stack.json", "mlflow/mlflow.db", "tokens/worker", "logs/api.log", "run/valkey.conf", "lanes.json"):
        (home / name).write_bytes(GARBAGE)
    (home / "tokens" / "admin").write_bytes(b"")
    for name in ("run/stack.lock", "logs/valkey.log", "lanes.json", "run/dump.rdb"):
        (home / name).unlink(missing_ok=True)
        (home / name).mkdir()
    shutil.rmtree(home / "data")
    (home / "data").write_bytes(GARBAGE)
    for folder in (home / "valkey" / "appendonlydir", home / "run" / "appendonlydir"):
        folder.mkdir(parents=True)
        (folder / "appendonly.aof.manifest").write_bytes(GARBAGE)


def interrupt_creation(home: Path) -> None:
    """Leave what a killed MLflow may leave of its first start: an index, and no word of the migration that made it."""
    (home / "mlflow").mkdir(parents=True)
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as connection:
        connection.execute("CREATE TABLE params (key VARCHAR(250), value VARCHAR(250), run_uuid VARCHAR(32))")
        connection.execute("CREATE INDEX index_params_run_uuid ON params (run_uuid)")


RUNS = 1 + 2 + 4
"""Of the ablation, its arms and its trials."""


def runs_in(mlflow: str) -> int:
    body = {"experiment_ids": ["0", "1"], "max_results": 1000}
    answer = httpx.post(f"{mlflow}/api/2.0/mlflow/runs/search", json=body, trust_env=False, timeout=LIMIT_S)
    return len(answer.json().get("runs", []))


def test_a_stack_starts_again_over_damaged_files_and_loses_no_result(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment |= POOR | {"TMPDIR": str(tmp_path / ("t" * 120))}
    Path(home.environment["TMPDIR"]).mkdir()
    spec = tmp_path / "smallest.yaml"
    spec.write_text(EXACT)
    interrupt_creation(home.files.home)
    try:
        first = home.up()
        assert home.run("run", str(spec)).returncode == 0
        until(lambda: runs_in(home.mlflow()) == RUNS)
        os.kill(first["supervisor_pid"], signal.SIGKILL)
        until(lambda: not part_processes.stack_mark(first["stack_id"]).members())
        damage(home.files.home)
        again = home.run("up")
        assert again.returncode == 0, again.stderr
        assert "stack.json is damaged; it is now stack.json.damaged-" in again.stderr.replace("\n", " ")
        until(lambda: runs_in(home.mlflow()) == RUNS)
        assert home.run("run", str(spec)).returncode == 0
        home.files.state.write_bytes(GARBAGE)
        until(lambda: home.run("status").returncode == 0, what="the file that the supervisor writes again")
        assert json.loads(home.run("down", "--json").stdout)["was_running"] is True
    finally:
        home.run("down")


def test_a_damaged_signing_key_stops_the_start_with_its_remedy(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    key = home.files.home / "keys" / "node"
    key.parent.mkdir(parents=True)
    key.write_bytes(GARBAGE)
    key.chmod(0o600)
    done = home.run("up")
    assert done.returncode == 5
    assert "is no private key in PEM format" in " ".join(done.stderr.split())
    assert "remove it to sign with a new key" in " ".join(done.stderr.split())
    assert key.read_bytes() == GARBAGE
