"""Processes of the service for tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.waiting import POLL_S

API, BACKGROUND = "ablate.service.app", "ablate.service.background.main"


@contextmanager
def service_process(module: str, log: Path, **settings: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a module of the service under `settings`, named without ABLATE_; append its output to `log`.

    Leaving the block kills the process, whether it runs or is stopped.
    """
    environment = {f"ABLATE_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("ab") as out:
        command = [sys.executable, "-m", module]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    """Return whether an API answers at `url`."""
    try:
        return httpx.get(f"{url}/healthz", trust_env=False, timeout=POLL_S).is_success
    except httpx.TransportError:
        return False
