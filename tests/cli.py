"""The program `ablate` as people start it, in this process or as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from ablate.experiments.system.console import GROUP, build
from ablate.service.client.settings import get_client_settings
from tests.api_stack import ADMIN, Api

PROGRAM = Path(sys.executable).with_name("ablate")


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def ablate(*words: object) -> Done:
    """Run a command in this process, against the service that `speaking_to` chose."""
    done = CliRunner().invoke(build(entry_points(group=GROUP)), [str(word) for word in words], prog_name="ablate")
    return Done(done.exit_code, done.stdout, done.stderr)


def environment(api: Api, **more: str) -> dict[str, str]:
    """Return the environment of a process that speaks to `api` as its administrator."""
    return {**os.environ, "ABLATE_URL": str(api.client.base_url), "ABLATE_TOKEN": ADMIN, **more}


@contextmanager
def speaking_to(api: Api, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let commands in this process speak to `api`."""
    for name, value in environment(api).items():
        patch.setenv(name, value)
    get_client_settings.cache_clear()
    yield
    get_client_settings.cache_clear()


def start(api: Api, *words: object, cwd: Path | None = None, **more: str) -> "subprocess.Popen[str]":
    """Start a command as a process of its own, which Ctrl-C reaches: tests that run in the background ignore it."""
    pipe = subprocess.PIPE
    command = ["env", "--default-signal=INT", str(PROGRAM), *map(str, words)]
    return subprocess.Popen(command, env=environment(api, **more), cwd=cwd, stdout=pipe, stderr=pipe, text=True)
