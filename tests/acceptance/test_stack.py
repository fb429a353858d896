"""The embedded stack with its real parts: up, up again, killed, down. Slow: every start takes about ten seconds."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.system.processes import is_alive
from ablate.service.stack import part_processes
from ablate.service.stack.layout import MLFLOW_USER, StackFiles
from tests.architecture.pages import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = "a home whose path is longer than the kernel allows for the path of a Unix socket " * 2
PAUSE_S = 0.5
"""Between two conditions that start a command: each takes a third of a second of a processor."""
ABLATE = str(Path(sys.executable).with_name("ablate"))


class Home:
    """A home of its own and the commands in it."""

    def __init__(self, path: Path, program: Sequence[str] = (ABLATE,)) -> None:
        self.program = program
        self.files = StackFiles(home=path)
        self.current = ROOT
        """Folder from which commands are started."""
        self.environment = {**os.environ, "ABLATE_HOME": str(path), "ABLATE_PORT": str(18_000 + os.getpid() % 10_000)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            [*self.program, *arguments],
            env=self.environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            cwd=self.current,
            check=False,
        )

    def up(self) -> dict[str, Any]:
        """Start the stack; return what it says about itself."""
        done = self.run("up", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def mlflow(self) -> str:
        """Return the address of the running stack's MLflow server, with its password."""
        port = json.loads(self.files.state.read_bytes())["mlflow_port"]
        return f"http://{MLFLOW_USER}:{self.files.mlflow_password.read_text().strip()}@127.0.0.1:{port}"


def test_up_joins_a_running_stack_and_works_again_after_down_and_after_a_kill_without_a_worker(tmp_path: Path) -> None:
    home = Home(tmp_path / LONG.strip())
    try:
        _ups_and_downs(home)
    finally:
        home.run("down")


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
    until(lambda: not part_processes.stack_mark(second["stack_id"]).members())
    again = home.run("up", "--no-worker", "--json")
    assert again.returncode == 0
    assert "supervisor had died" in again.stderr
    assert set(json.loads(again.stdout)["parts"]) == {"valkey", "mlflow", "api", "background"}
    assert home.run("up", "--no-worker").returncode == 0
    refused = home.run("up")
    assert refused.returncode == 5
    assert "already runs and has no worker; ablate down, then up" in refused.stderr


def test_killed_parts_start_again_and_one_that_cannot_stay_is_given_up_while_the_rest_goes_on(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment["ABLATE_RESTART_PAUSE_S"] = "0.02"
    try:
        first = home.up()
        _killed_parts_start_again(home, first)
        _one_part_is_given_up(home)
        spec = tmp_path / "smallest.yaml"
        spec.write_text(EXACT)
        assert home.run("run", str(spec)).returncode == 0, "workers poll where nobody wakes them"
    finally:
        home.run("down")
    assert part_processes.stack_mark(first["stack_id"]).members() == []


def _killed_parts_start_again(home: Home, first: dict[str, Any]) -> None:
    of_parts = {name: set(part_processes.part_mark(first["stack_id"], name).members()) for name in first["pids"]}
    started_by_parts = set().union(*of_parts.values()) - set(first["pids"].values())
    assert started_by_parts, "the worker starts processes"
    for pid in first["pids"].values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: home.run("status").returncode == 6, pause_s=PAUSE_S)
    until(lambda: all_started_again(home))
    until(lambda: home.run("status").returncode == 0, what="a stack that is well", pause_s=PAUSE_S)
    stack = json.loads(home.run("status", "--json").stdout)["stack"]
    assert {name: part["restarts"] for name, part in stack["parts"].items()} == dict.fromkeys(first["pids"], 1)
    assert not set(stack["pids"].values()) & set(first["pids"].values())
    assert {finding["part"] for finding in stack["findings"]} == set(first["pids"])
    assert all(finding["what"].startswith("was ended by SIGKILL") for finding in stack["findings"])
    assert not any(is_alive(pid) for pid in started_by_parts)
    shown = home.run("status").stdout
    assert "1 time" in shown
    assert "restarts after 0.02 s" in shown


def _one_part_is_given_up(home: Home) -> None:
    home.files.broker_config.write_text("no-such-option yes\n")
    os.kill(json.loads(home.files.state.read_text())["pids"]["valkey"], signal.SIGKILL)
    until(lambda: phase_of(home, "valkey") == "given_up")
    status = home.run("status")
    assert status.returncode == 6
    assert "given up after 8 failures in a row" in status.stdout.replace("\n", " ")


def all_started_again(home: Home) -> bool:
    """Read the stack's file: each call of the command `status` would need a second of a processor."""
    return all(part["restarts"] and part["phase"] == "ready" for part in parts_of(home).values())


def phase_of(home: Home, part: str) -> str:
    return str(parts_of(home)[part]["phase"])


def parts_of(home: Home) -> dict[str, Any]:
    return dict(json.loads(home.files.state.read_text())["parts"])


EXACT = """
ablation: smallest
question: Does the whole path work?
workload:
  recipe: hybrid-tiny
  overrides: {d_model: 32, headdim: 16, seq_len: 32, micro_batch: 1, pattern: MA, vocab_size: 512, max_corpus_mib: 0.5}
  steps: {warmup: 0, warmup_s: 0, timed: 2, val_rows: 1}
variants: {psiv-on: {gates: {psiv_cache: true}}}
design: {seeds: [1], blocks: {count: 2}}
placement: {node_class: cpu, max_foreign_load: 99%}
verdict: {primary: {metric: peak_allocated_gib, margin: 2%}}
"""
"""A question about memory, which has no noise, in four trials. Preparing the small corpus takes a second."""


def test_a_part_that_cannot_start_ends_the_stack_and_shows_its_log(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.files.make_folders()
    worker_token = home.files.home / "tokens" / "worker"
    worker_token.parent.mkdir()
    worker_token.write_bytes(b"")
    done = home.run("up")
    assert done.returncode == 5
    assert "api ended with exit code" in done.stderr
    assert f"{worker_token} contains no secret" in done.stderr.replace("\n", " ")
    assert home.run("status").returncode == 6
    assert not home.files.state.exists()
