"""The MLflow server of the embedded stack, for tests."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from ablate.service.settings import generated_secret
from ablate.service.stack.layout import MLFLOW_USER
from ablate.service.stack.parts import mlflow_command
from tests.ports import free_port
from tests.waiting import LIMIT_S, POLL_S


class EndedEarly(AssertionError):
    """The server ended instead of starting."""


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run a server that keeps everything below `folder`, and yield its address with its password."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(_serving(folder, free_port()))
        except EndedEarly:  # MLflow binds the port seconds after it was found free; somebody else may have it by then
            url = stack.enter_context(_serving(folder, free_port()))
        yield url


@contextmanager
def _serving(folder: Path, port: int) -> Iterator[str]:
    secret = folder.with_name(f"{folder.name}-password")
    command, log = mlflow_command(port, folder, secret), folder / "server.log"
    url = f"http://{MLFLOW_USER}:{generated_secret(secret)}@127.0.0.1:{port}"
    with log.open("a") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            wait_until_it_answers(url, server, log)
            yield url
        finally:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=LIMIT_S)


def wait_until_it_answers(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for a server that writes to `log`. Raises EndedEarly or AssertionError with what it wrote."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=POLL_S, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    kind = AssertionError if server.poll() is None else EndedEarly
    raise kind(f"the MLflow server did not start:\n{log.read_text()[-4000:]}")
