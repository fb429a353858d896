"""Whoever submits first to a fresh process of the API waits for no import of numbers' libraries."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from ablate.service.store.session import Store
from tests.api_stack import ADMIN, WORKER, Api
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

SERVES = "Uvicorn running"


def test_the_first_submission_finds_imported_what_it_needs(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "api.log"
    secrets = {"ABLATE_ADMIN_TOKEN": ADMIN, "ABLATE_WORKER_TOKEN": WORKER}
    environment = {**os.environ, **secrets, "ABLATE_HOME": str(tmp_path), "ABLATE_PORT": str(port)}
    command = [sys.executable, "-X", "importtime", "-m", "ablate.service.app"]
    with log.open("wb") as sink, subprocess.Popen(command, env=environment, stdout=sink, stderr=sink) as process:
        try:
            until(lambda: SERVES in log.read_text() or process.poll() is not None, what="the API")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=LIMIT_S) as client:
                Api(client, Store(f"sqlite:///{tmp_path / 'ablate.db'}")).submit()
        finally:
            process.terminate()
    before, _, after = log.read_text().partition(SERVES)
    assert " scipy.optimize" in before
    assert [line for line in after.splitlines() if " scipy" in line or " numpy" in line] == []
