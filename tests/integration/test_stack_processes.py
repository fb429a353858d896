import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.service.stack import part_processes
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.parts import BACKGROUND, Addresses, StackPart, all_parts
from tests.waiting import LIMIT_S, until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]
LEAVER = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True); print('left', flush=True); time.sleep(600)",
]
SUPERVISOR = """
import sys, time
from dataclasses import replace
from pathlib import Path
from ablate.service.stack import part_processes
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.parts import BACKGROUND, Addresses, StackPart, all_parts
command = (sys.executable, "-c", "import time; time.sleep(600)")
part = StackPart(name="part", command=command, environment={}, answers=lambda: True)
part_processes.start(part, stack_id=sys.argv[1], log=Path(sys.argv[2]))
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def stack_id() -> str:
    return uuid.uuid4().hex


def _start(command: list[str], stack_id: str, log: Path, *, says: str = "") -> subprocess.Popen[bytes]:
    part = StackPart(name="part", command=tuple(command), environment={}, answers=lambda: True)
    process = part_processes.start(part, stack_id=stack_id, log=log)
    until(lambda: says in log.read_text())
    return process


def test_end_stops_a_willing_process_and_members_see_it_go(stack_id: str, tmp_path: Path) -> None:
    process = _start(SLEEPER, stack_id, tmp_path / "log")
    assert part_processes.stack_mark(stack_id).members() == [process.pid]
    part_processes.end([process], patience_s=LIMIT_S)
    assert process.returncode == -signal.SIGTERM
    assert part_processes.stack_mark(stack_id).members() == []


def test_kill_members_ends_a_process_that_ignores_the_request(stack_id: str, tmp_path: Path) -> None:
    process = _start(DEAF, stack_id, tmp_path / "log", says="deaf")
    part_processes.end([process], patience_s=0.2)
    assert process.poll() is None
    assert part_processes.kill_members(stack_id) == 1
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_kill_members_finds_a_grandchild_in_a_session_of_its_own(stack_id: str, tmp_path: Path) -> None:
    process = _start(LEAVER, stack_id, tmp_path / "log", says="left")
    process.kill()
    process.wait()
    (stray,) = part_processes.stack_mark(stack_id).members()
    assert os.getsid(stray) == stray
    assert part_processes.kill_members(stack_id) == 1
    assert part_processes.stack_mark(stack_id).members() == []


def test_children_end_when_the_supervisor_is_killed(stack_id: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, stack_id, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"started\n"
        assert len(part_processes.stack_mark(stack_id).members()) == 1
        supervisor.kill()
    until(lambda: not part_processes.stack_mark(stack_id).members())


OF_THE_SHELL = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_SERVER_ALLOWED_HOSTS", "MLFLOW_AUTH_CONFIG_PATH"),
    *("_MLFLOW_SERVER_FILE_STORE", "_MLFLOW_STATIC_PREFIX", "MLFLOW_S3_ENDPOINT_URL", "DATABRICKS_HOST"),
    *("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "FLASK_ENV", "UVICORN_PORT", "WEB_CONCURRENCY", "PYTHONWARNINGS"),
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "FORWARDED_ALLOW_IPS"),
    *("ABLATE_DATABASE_URL", "ABLATE_BROKER_URL", "ABLATE_MLFLOW_URL"),
)
"""Variables that would change MLflow, Celery or a server, and addresses of another installation."""


def test_a_part_inherits_only_the_secrets_that_it_is_to_know(
    stack_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABLATE_WEBHOOK_SECRET", "whsec_planted")
    monkeypatch.setenv("ABLATE_ADMIN_TOKEN", "planted-token-of-another")
    monkeypatch.setenv("ABLATE_LOG_FORMAT", "json")
    for name in OF_THE_SHELL:
        monkeypatch.setenv(name, "of-the-shell")
    where = Addresses(files=StackFiles(home=tmp_path), api_port=1, mlflow_port=2)
    show = (sys.executable, "-c", "import os; print('\\n'.join(sorted(os.environ.values())), flush=True)")
    for part in all_parts(where, node_is_ready=lambda: True):
        log = tmp_path / part.name
        process = part_processes.start(replace(part, command=show), stack_id=stack_id, log=log)
        process.wait()
        values = log.read_text().splitlines()
        assert ("json" in values) == part.is_ours
        assert ("whsec_planted" in values) == (part.name == BACKGROUND)
        assert not {"planted-token-of-another", "of-the-shell"} & set(values), part.name
