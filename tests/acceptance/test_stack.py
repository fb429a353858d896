"""The embedded stack with its real parts: up, up again, killed, down. Slow: every start takes about ten seconds."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis import AuthenticationError, Redis

from experiments.runtime.processes import is_alive, wait_until
from experiments.runtime.wake import celery_app, wake_subscription
from service.stack import part_processes
from service.stack.layout import StackFiles
from tests.architecture.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = "a home whose path is longer than the kernel allows for the path of a Unix socket " * 2
ABLATE = str(Path(sys.executable).with_name("ablate"))


class Home:
    """A home of its own and the commands in it."""

    def __init__(self, path: Path, program: Sequence[str] = (ABLATE,)) -> None:
        self.program = program
        self.files = StackFiles(home=path)
        self.environment = {**os.environ, "ABLATE_HOME": str(path), "ABLATE_PORT": str(18_000 + os.getpid() % 10_000)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            [*self.program, *arguments],
            env=self.environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            cwd=ROOT,
            check=False,
            timeout=600,
        )

    def up(self) -> dict[str, Any]:
        """Start the stack; return what it says about itself."""
        done = self.run("up", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


def test_up_joins_a_running_stack_and_works_again_after_down_and_after_a_kill(tmp_path: Path) -> None:
    home = Home(tmp_path / LONG.strip())
    try:
        _ups_and_downs(home)
    finally:
        home.run("down")


def test_up_without_a_worker_leaves_the_machine_to_another(tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        started = home.run("up", "--no-worker", "--json")
        assert started.returncode == 0, started.stderr
        assert set(json.loads(started.stdout)["parts"]) == {"valkey", "mlflow", "api", "background"}
        assert home.run("up", "--no-worker").returncode == 0
        refused = home.run("up")
        assert refused.returncode == 5
        assert "already runs and has no worker; ablate down, then up" in refused.stderr
    finally:
        assert home.run("down").returncode == 0


def _ups_and_downs(home: Home) -> None:
    first = home.up()
    assert home.up()["stack_id"] == first["stack_id"]
    shown = home.run("status")
    assert shown.returncode == 0
    view = re.escape(first["mlflow_url"]) + r"/#/experiments/\d+/runs\?viewStateShareKey=ablations&workflowType="
    assert re.search(f"MLflow  {view}machine_learning\n", shown.stdout), "it opens the list of ablations"
    assert json.loads(home.run("nodes", "--json").stdout)[0]["health"] == "live"
    done = home.run("down", "--json")
    assert json.loads(done.stdout)["was_running"] is True
    assert part_processes.stack_mark(first["stack_id"]).members() == []
    assert not home.files.state.exists()
    assert not home.files.broker_socket.exists()
    assert home.run("status").returncode == 6
    second = home.up()
    assert second["stack_id"] != first["stack_id"]
    os.kill(second["supervisor_pid"], signal.SIGKILL)
    assert wait_until(lambda: not part_processes.stack_mark(second["stack_id"]).members(), patience_s=30)
    again = home.run("up")
    assert again.returncode == 0
    assert "supervisor had died" in again.stderr


def test_parts_that_are_killed_start_again_and_the_status_says_so(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    try:
        first = home.up()
        mlflow_child = set(part_processes.part_mark(first["stack_id"], "mlflow").members()) - {first["pids"]["mlflow"]}
        assert mlflow_child, "MLflow's server is a child of its main process"
        for pid in first["pids"].values():
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: home.run("status").returncode == 6, patience_s=30)
        assert wait_until(lambda: home.run("status").returncode == 0, patience_s=180), home.run("status").stdout
        stack = json.loads(home.run("status", "--json").stdout)["stack"]
        assert {name: part["restarts"] for name, part in stack["parts"].items()} == dict.fromkeys(first["pids"], 1)
        assert not set(stack["pids"].values()) & set(first["pids"].values())
        assert {finding["part"] for finding in stack["findings"]} == set(first["pids"])
        assert all(finding["what"].startswith("was ended by SIGKILL") for finding in stack["findings"])
        assert not any(is_alive(pid) for pid in mlflow_child), "the orphan would have gone on answering"
        shown = home.run("status").stdout
        assert "1 time" in shown
        assert "restarts after 0.5 s" in shown
        spec = tmp_path / "smallest.yaml"
        spec.write_text(EXACT)
        assert home.run("run", str(spec)).returncode == 0
    finally:
        home.run("down")
    assert part_processes.stack_mark(first["stack_id"]).members() == []


def test_a_part_that_cannot_stay_is_given_up_and_the_rest_goes_on(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment["ABLATE_RESTART_PAUSE_S"] = "0.02"
    try:
        first = home.up()
        home.files.broker_config.write_text("no-such-option yes\n")
        os.kill(first["pids"]["valkey"], signal.SIGKILL)
        assert wait_until(lambda: phase_of(home, "valkey") == "given_up", patience_s=120)
        said = home.run("status")
        assert said.returncode == 6
        assert "given up after 8 failures in a row" in said.stdout.replace("\n", " ")
        spec = tmp_path / "smallest.yaml"
        spec.write_text(EXACT)
        assert home.run("run", str(spec)).returncode == 0, "workers poll where nobody wakes them"
    finally:
        home.run("down")


def phase_of(home: Home, part: str) -> str:
    return str(json.loads(home.files.state.read_text())["parts"][part]["phase"])


def hears_a_submission(home: Home, broker_url: str, spec: Path) -> bool:
    """Listen as a worker of class cpu on another machine does, and submit."""
    heard: list[object] = []
    with celery_app(broker_url, name="elsewhere").connection_for_read() as connection:
        queue = wake_subscription("cpu")
        with connection.Consumer([queue], callbacks=[lambda body, _message: heard.append(body)], accept=["json"]):
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.5)  # it subscribes when it first waits
            assert home.run("submit", str(spec)).returncode == 0
            with suppress(TimeoutError):
                connection.drain_events(timeout=30)
    return bool(heard)


SPEC = """
ablation: smallest
question: Does the whole path work?
workload:
  recipe: hybrid-tiny
  overrides: {d_model: 32, headdim: 16, seq_len: 32, micro_batch: 1, pattern: MA, vocab_size: 512}
  steps: {warmup: 0, warmup_s: 0, timed: 2, val_rows: 1}
variants: {psiv-on: {gates: {psiv_cache: true}}}
design: {seeds: [1], blocks: {count: 6}}
placement: {node_class: cpu, max_foreign_load: 99%}
verdict: {primary: {metric: tokens_per_s, margin: 2%}}
"""
EXACT = SPEC.replace("count: 6", "count: 2").replace("tokens_per_s", "peak_allocated_gib")
"""The same question about memory, which has no noise: two blocks answer it, four trials instead of twelve."""


def test_an_open_stack_answers_an_ablation_and_wakes_another_machine_that_has_the_password(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment["ABLATE_HOST"] = "0.0.0.0"  # noqa: S104
    spec = tmp_path / "smallest.yaml"
    spec.write_text(SPEC)
    try:
        state = home.up()
        ran = home.run("run", str(spec))
        assert ran.returncode == 0, ran.stderr
        assert re.search(r"block 6/6 on \S+: done", ran.stdout)
        (row,) = json.loads(home.run("list", "--json").stdout)
        assert home.run("verdict", row["id"]).returncode == 3
        assert home.run("verdict", row["id"], "--require", "adopt").returncode == 3
        receipts = tmp_path / "receipts.json"
        assert home.run("receipts", "get", row["id"], "--output", str(receipts)).returncode == 0
        assert len(json.loads(receipts.read_text())) == 12
        assert home.run("receipts", "verify", str(receipts)).returncode == 0
        receipts.write_text(receipts.read_text().replace('"seed": 1', '"seed": 2', 1))
        assert home.run("receipts", "verify", str(receipts)).returncode == 6
        port = state["broker_port"]
        password = home.files.broker_password.read_text().strip()
        assert home.files.broker_password.stat().st_mode & 0o777 == 0o600
        with pytest.raises(AuthenticationError):
            Redis(port=port).ping()
        with pytest.raises(AuthenticationError):
            Redis(port=port, password="wrong").ping()
        assert Redis(port=port, password=password).ping()
        assert password not in json.dumps(state)
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert password not in listed
        assert hears_a_submission(home, f"redis://:{password}@127.0.0.1:{port}/0", spec)
    finally:
        home.run("down")


def test_a_part_that_cannot_start_ends_the_stack_and_shows_its_log(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.files.make_folders(lambda _kind, _text: None)
    (home.files.home / "ablate.db").write_bytes(b"this is no database, and it is longer than the header of one" * 100)
    done = home.run("up")
    assert done.returncode == 5
    assert "api ended with exit code" in done.stderr
    assert "not a database" in done.stderr
    assert home.run("status").returncode == 6
    assert not home.files.state.exists()
