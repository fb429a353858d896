"""Secrets planted in processes that cannot start or cannot connect, and searched in all that they print and keep."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ablate.experiments.system.processes import end_all
from ablate.workers.isolation.environment import hide_secrets
from tests.api_stack import migrated_url, nobody_url
from tests.cli import PROGRAM
from tests.factories import spec_values
from tests.ports import free_port
from tests.service_process import is_up
from tests.waiting import until

PLANTED = "pl4nted-s3cret-7d21"
GOOD = "g00d-s3cret-of-the-tests-55"
API, BACKGROUND, MIGRATE, WORKER = (
    [sys.executable, "-m", name]
    for name in (
        "ablate.service.app",
        "ablate.service.background.main",
        "ablate.service.store.migrate",
        "ablate.workers.app",
    )
)
LIST, STATUS, DOCTOR = ([str(PROGRAM), *words] for words in (["list"], ["status"], ["worker", "doctor"]))
SERVICE = {"ADMIN_TOKEN": GOOD, "WORKER_TOKEN": f"{GOOD}-2"}


@pytest.mark.parametrize(
    ("command", "variable", "bad"),
    [
        *((LIST, "TOKEN", bad) for bad in ("\r", " ", "é", "\u2028")),
        (API, "ADMIN_TOKEN", "\r"),
        (API, "WORKER_TOKEN", "é"),
        (BACKGROUND, "WEBHOOK_SECRET", "\r"),
        (WORKER, "WORKER_TOKEN", "\r"),
        (DOCTOR, "WORKER_TOKEN", "é"),
    ],
)
def test_a_secret_that_no_header_can_carry_is_named_and_not_shown(
    command: list[str], variable: str, bad: str, tmp_path: Path
) -> None:
    settings = {**SERVICE, "URL": "http://127.0.0.1:9", variable: f"{PLANTED}{bad}{PLANTED}"}
    printed = _run(command, tmp_path, **settings)
    assert f"ABLATE_{variable}: its character {len(PLANTED) + 1} of" in printed
    assert "allowed in a secret: printable ASCII without spaces" in " ".join(printed.split())
    assert PLANTED not in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("command", [WORKER, LIST])
def test_a_bad_file_with_a_token_is_named_and_not_shown(command: list[str], tmp_path: Path) -> None:
    for name in ("admin", "worker"):
        path = tmp_path / "tokens" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"{PLANTED}\r{PLANTED}\r\n".encode())
    printed = _run(command, tmp_path, URL="http://127.0.0.1:9")
    assert "its character" in printed
    assert str(tmp_path / "tokens") in printed.replace("\n", "")
    assert PLANTED not in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("command", "name", "value", "reason"),
    [
        (BACKGROUND, "DATABASE_URL", f"postgresql+psycopg://u:{PLANTED}@127.0.0.1:9/db", "refused"),
        (MIGRATE, "DATABASE_URL", f"postgresql+psycopg://u:{PLANTED}@x@127.0.0.1/db", "percent-encode"),
        (API, "DATABASE_URL", f"postgresql+psycopg://u:{PLANTED}@127.0.0.1:9/db", "refused"),
        (API, "DATABASE_URL", f"postgresql+psycopg://u:{PLANTED}@x@nowhere.invalid/db", "percent-encode"),
        (API, "DATABASE_URL", f"postgresql+psycopg://u:{PLANTED}@nowhere.invalid/db", "resolve"),
        (API, "DATABASE_URL", f"mysql://u:{PLANTED}@127.0.0.1/db", "names 'mysql'"),
        (API, "BROKER_URL", f"redis://:{PLANTED}/x@127.0.0.1:9/0", "percent-encode"),
        (API, "MLFLOW_URL", f"http://me:{PLANTED}\r@127.0.0.1:9", "control character"),
        (API, "MLFLOW_URL", f"me:{PLANTED}@127.0.0.1:9", "has no scheme"),
        (BACKGROUND, "WEBHOOK_URL", f"ftp://me:{PLANTED}@127.0.0.1:9/{PLANTED}", "scheme 'ftp'"),
        (BACKGROUND, "WEBHOOK_SECRET", f"whsec_{PLANTED}", "whsec_ and base64"),
        (API, "PUBLIC_URL", f"https://me:{PLANTED}@host", "user name or a password"),
    ],
)
def test_an_address_that_does_not_work_is_reported_without_its_password(
    command: list[str], name: str, value: str, reason: str, tmp_path: Path
) -> None:
    settings = {**SERVICE, "DATABASE_URL": migrated_url("sqlite", tmp_path / "db"), name: value}
    if name.startswith("WEBHOOK"):
        settings = {"WEBHOOK_URL": "https://x.invalid/hook", "WEBHOOK_SECRET": f"whsec_{'QUJD' * 12}", **settings}
    printed = _run(command, tmp_path, **settings, PORT=str(free_port()))
    assert reason in printed
    assert PLANTED not in printed


def test_a_running_service_whose_servers_refuse_says_nothing_secret(tmp_path: Path) -> None:
    """Broker, MLflow and webhook refuse; addresses with passwords appear nowhere, also not in /readyz."""
    dead = nobody_url().removeprefix("http://")
    port = free_port()
    settings = {
        **SERVICE,
        "DATABASE_URL": migrated_url("sqlite", tmp_path / "db"),
        "BROKER_URL": f"redis://:{PLANTED}@{dead}/0",
        "MLFLOW_URL": f"http://me:{PLANTED}@{dead}",
        "PORT": str(port),
    }
    log = tmp_path / "log"
    with log.open("w") as out:
        processes = [
            subprocess.Popen(command, env=_environment(tmp_path, settings), stdout=out, stderr=out)
            for command in (API, BACKGROUND)
        ]
        try:
            base = f"http://127.0.0.1:{port}"
            until(lambda: is_up(base))
            with httpx.Client(base_url=base, trust_env=False, headers={"Authorization": f"Bearer {GOOD}"}) as http:
                made = http.post("/v1/ablations", json=spec_values(), headers={"Idempotency-Key": "k" * 16}).json()
                until(lambda: "projection" in http.get("/readyz").json()["degraded"])
                checks = http.get("/readyz").text
                shown = http.get(f"/v1/ablations/{made['id']}").text
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert "not written to MLflow yet" in checks
    everything = checks + shown + log.read_text()
    assert "MLflow" in log.read_text()
    assert PLANTED not in everything
    assert all(PLANTED.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_no_process_below_a_worker_inherits_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TOKEN", "ADMIN_TOKEN", "WORKER_TOKEN", "WEBHOOK_SECRET", "WEBHOOK_URL", "DATABASE_URL", "BROKER_URL")
    planted = [f"ABLATE_{name}" for name in (*names, "MLFLOW_URL")]
    planted += ["MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD", "REDISCLI_AUTH"]
    for name in planted:
        monkeypatch.setenv(name, PLANTED)
    monkeypatch.setenv("ABLATE_HOME", "/somewhere")
    hide_secrets()
    assert PLANTED not in os.environ.values()
    assert os.environ["ABLATE_HOME"] == "/somewhere"


def test_the_kernel_shows_no_secret_of_a_worker_that_has_read_its_settings() -> None:
    """Other processes of the same user read the environment with which a process was started."""
    code = (
        "from pathlib import Path; from ablate.workers.isolation.environment import hide_secrets; hide_secrets();"
        "print(Path('/proc/self/environ').read_bytes())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ABLATE_WORKER_TOKEN": PLANTED, "ABLATE_HOME": "/somewhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ABLATE_WORKER_TOKEN=" + "-" * len(PLANTED) in done.stdout
    assert "ABLATE_HOME=/somewhere" in done.stdout
    assert PLANTED not in done.stdout


def _environment(home: Path, settings: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "ABLATE_HOME": str(home), **{f"ABLATE_{name}": value for name, value in settings.items()}}


def _run(command: list[str], home: Path, **settings: str) -> str:
    """Return all that a command prints until it ends, or until it has printed a line and waits."""
    log = home / "printed"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=_environment(home, settings), stdout=out, stderr=out, start_new_session=True
        )
        try:
            until(lambda: process.poll() is not None or re.search("cannot.*\n", log.read_text()))
        finally:
            end_all(lambda: [process.pid] if process.poll() is None else [], grace_s=5)
            process.wait()
    return log.read_text()
