"""Server processes under measurement, and the output of the benches."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_S = 180.0
"""A server on a loaded machine may take this long to start."""


@contextmanager
def server(
    command: list[str], port: int, *, environment: dict[str, str], ready: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; it is ready when `ready` answers."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
