"""A home that two containers share: process numbers of one mean nothing in the other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.experiments.system.processes import number_space, start_of
from ablate.service.errors import StackError
from ablate.service.stack import control
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.state import StackState, exclusive, write_state

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]


def state_of(pid: int, **changes: object) -> StackState:
    values = {"stack_id": "s", "phase": "ready", "api_url": "http://127.0.0.1:1", "mlflow_url": "", "broker_url": ""}
    own = {"host": "other", "number_space": number_space(), "supervisor_pid": pid, "supervisor_start": start_of(pid)}
    return StackState.model_validate(
        {**values, "ablations_url": "", "mlflow_port": 2, "started_at": "", **own, **changes}
    )


@pytest.mark.parametrize("other", ["another-boot pid:[1]", "another namespace"])
def test_nothing_is_stopped_from_another_process_namespace(tmp_path: Path, other: str) -> None:
    files = StackFiles(home=tmp_path / "home")
    space = other if " pid" in other else f"{number_space().split()[0]} pid:[1]"
    with subprocess.Popen(["sleep", "60"]) as innocent, exclusive(files):
        write_state(files, state_of(innocent.pid, number_space=space))
        before = files.state.read_bytes()
        for call in (control.running, lambda files: control.stop(files, lambda *_: None)):
            with pytest.raises(StackError, match="runs on 'other', in another container or on another machine"):
                call(files)
        assert innocent.poll() is None
        assert files.state.read_bytes() == before
        innocent.kill()


def test_a_process_that_got_the_number_of_a_dead_supervisor_is_not_taken_for_it(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path / "home")
    with subprocess.Popen(["sleep", "60"]) as innocent, exclusive(files):
        write_state(files, state_of(innocent.pid, supervisor_start=1))
        assert control.running(files) is None
        write_state(files, state_of(innocent.pid))
        assert control.running(files) is not None
        innocent.kill()


ABLATE = [sys.executable, "-c", "from ablate.experiments.system.console import main; main()"]
WORKER_OF_NOBODY = "import time; print('runs', flush=True); time.sleep(600)"


@pytest.mark.parametrize("home", ["named", "default", "another", "of a stack"])
def test_down_names_a_worker_that_it_did_not_start(tmp_path: Path, home: str) -> None:
    files, own = StackFiles(home=tmp_path / ".ablate"), {**os.environ}
    for name in ("ABLATE_HOME", "ABLATE_STACK_ID"):
        own.pop(name, None)
    named = {"named": {"ABLATE_HOME": str(files.home)}, "another": {"ABLATE_HOME": str(tmp_path / "another")}}
    started = {**own, **named.get(home, {}), **({"ABLATE_STACK_ID": "s"} if home == "of a stack" else {})}
    command = [sys.executable, "-c", WORKER_OF_NOBODY, "-m", "ablate.workers.app"]
    with subprocess.Popen(command, cwd=tmp_path, env=started, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "runs\n"
        done = subprocess.run([*ABLATE, "down"], cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
        worker.kill()
    assert done.returncode == 0, done.stderr
    named_worker = f"process {worker.pid}, a worker that `ablate worker up` started in this home, still runs"
    assert (named_worker in " ".join(done.stdout.split())) == (home in {"named", "default"}), done.stdout


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode,
    reason="no process namespace can be made here",
)
def test_commands_in_another_namespace_change_nothing_and_say_so(tmp_path: Path) -> None:
    files = StackFiles(home=tmp_path / "home")
    with exclusive(files):
        write_state(files, state_of(os.getpid()))
        before = files.state.read_bytes()
        for command in ("down", "status", "up"):
            ablate = [sys.executable, "-c", "from ablate.experiments.system.console import main; main()", command]
            environment = {**os.environ, "ABLATE_HOME": str(files.home)}
            done = subprocess.run([*UNSHARE, *ablate], env=environment, capture_output=True, text=True, check=False)
            assert (done.returncode, "in another container" in done.stderr) == (5, True), (command, done.stderr)
        assert files.state.read_bytes() == before
        assert json.loads(before)["supervisor_pid"] == os.getpid()
