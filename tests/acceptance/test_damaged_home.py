"""The embedded stack in poor surroundings: damaged files, a shell without UTF-8, a long TMPDIR. Slow, as all starts."""

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from ablate.service.stack import part_processes
from tests.acceptance.test_stack import EXACT, Home
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POOR = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
GARBAGE = b"\xff\x00 garbage" * 400


RUNS = 1 + 2 + 4
"""Of the ablation, its arms and its trials."""


def runs_in(mlflow: str) -> int:
    body = {"experiment_ids": ["0", "1"], "max_results": 1000}
    answer = httpx.post(f"{mlflow}/api/2.0/mlflow/runs/search", json=body, trust_env=False, timeout=LIMIT_S)
    return len(answer.json().get("runs", []))


def refusal(home: Home, path: Path) -> str:
    """Damage a file, or put one in the place of a folder; return the refusal of a start."""
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(GARBAGE)
    done = home.run("up")
    assert done.returncode == 5, done.stderr
    assert path.read_bytes() == GARBAGE
    text = " ".join(done.stderr.split())
    assert str(path) in text
    return text


def test_damaged_files_are_refused_with_their_remedies_which_lose_no_result(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment |= POOR | {"TMPDIR": str(tmp_path / ("t" * 120))}
    Path(home.environment["TMPDIR"]).mkdir()
    files, spec, backup = home.files, tmp_path / "smallest.yaml", tmp_path / "backup"
    spec.write_text(EXACT)
    try:
        first = home.up()
        assert home.run("run", str(spec)).returncode == 0
        assert home.run("admin", "backup", str(backup)).returncode == 0
        os.kill(first["supervisor_pid"], signal.SIGKILL)
        until(lambda: not part_processes.stack_mark(first["stack_id"]).members())
        for path in (files.state, files.home / "data", files.broker_password, files.home / "tokens" / "worker"):
            text = refusal(home, path)
            assert "remove it, then run: ablate up" in text or "remove the file, and run: ablate up" in text
            path.unlink()
        assert f"remove {files.mlflow}, then run: ablate up, ablate admin mlflow rebuild" in refusal(
            home, files.mlflow_database
        )
        shutil.rmtree(files.mlflow)
        assert "file is not a database; if it is damaged, restore" in refusal(home, files.database)
        assert home.run("admin", "restore", str(backup)).returncode == 0
        home.up()
        assert home.run("admin", "mlflow", "rebuild").returncode == 0
        until(lambda: runs_in(home.mlflow()) == RUNS)
        assert home.run("run", str(spec)).returncode == 0
        files.state.write_bytes(GARBAGE)
        for command in ("status", "down", "up"):
            refused = home.run(command)
            assert refused.returncode == 5
            assert f"{files.state} cannot be read: it is damaged; remove it" in " ".join(refused.stderr.split())
        files.state.unlink()
        until(files.state.exists, what="the file that the supervisor writes again")
        assert home.run("status").returncode == 0
        assert json.loads(home.run("down", "--json").stdout)["was_running"] is True
    finally:
        files.state.unlink(missing_ok=True)
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
