"""Checks behind `ablate worker doctor`: what this machine needs before a worker can serve."""

import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kombu.exceptions import OperationalError
from kombu.utils.url import maybe_sanitize_url

from experiments.errors import SigningUnavailable
from experiments.records.signing import signing_problem
from experiments.runtime.wake import celery_app
from workers import node
from workers.devices import find_devices
from workers.errors import DeviceMissing, SettingsError, WorkerError
from workers.node_key import KEY_FILE, node_signer
from workers.probes import memory_limit_bytes
from workers.service_api import ServiceApi
from workers.settings import Settings

_LEAST_MEMORY_GIB = 4
_LEAST_DISK_GIB = 2
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    passed: bool
    needed: bool
    """A worker cannot serve without it; otherwise only something is poorer."""
    detail: str


def examine(settings: Settings) -> list[Finding]:
    """Run every check; none of them changes anything."""
    return [
        *_service(settings),
        _broker(settings),
        _signing(settings.home_dir / KEY_FILE),
        _torch(),
        _devices(settings),
        _cores(),
        _memory(),
        _disk(settings.home_dir),
        _program("git", shutil.which("git"), "receipts carry no commit without it"),
        _program("C++ compiler", node.compiler(), "arms with compile: true need one"),
    ]


def _service(settings: Settings) -> list[Finding]:
    try:
        token = settings.read_token()
    except SettingsError as error:
        return [Finding(name="worker key", passed=False, needed=True, detail=str(error))]
    if token is None:
        detail = f"ABLATE_WORKER_TOKEN is not set and {settings.home_dir / 'tokens' / 'worker'} does not exist"
        return [Finding(name="worker key", passed=False, needed=True, detail=detail)]
    api = ServiceApi(settings.url, token)
    try:
        return [_reachable(api, settings.url), _key(api, settings.node_name)]
    finally:
        api.close()


def _signing(path: Path) -> Finding:
    try:
        detail = f"signs with {node_signer(path).key}" if path.exists() else f"{path} is made by the first start"
    except (WorkerError, SigningUnavailable) as error:
        return Finding(name="signing key", passed=False, needed=True, detail=str(error))
    problem = signing_problem()
    return Finding(name="signing key", passed=problem is None, needed=True, detail=problem or detail)


def _reachable(api: ServiceApi, url: str) -> Finding:
    try:
        version = api.version()
    except WorkerError as error:
        return Finding(name="service", passed=False, needed=True, detail=f"{url}: {error}")
    return Finding(name="service", passed=True, needed=True, detail=f"{url}: {version}")


def _key(api: ServiceApi, name: str) -> Finding:
    try:
        node = api.key_node()
    except WorkerError as error:
        return Finding(name="worker key", passed=False, needed=True, detail=str(error))
    detail = "accepted" if node == name else f"belongs to node '{node}', and ABLATE_NODE_NAME here is '{name}'"
    return Finding(name="worker key", passed=node == name, needed=True, detail=detail)


def _broker(settings: Settings) -> Finding:
    shown = maybe_sanitize_url(settings.broker)
    app = celery_app(settings.broker, name="ablate.doctor")
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
    except (OperationalError, OSError) as error:
        detail = f"{shown}: {error}; work is found by polling every {settings.poll_s:g} s"
        return Finding(name="broker", passed=False, needed=False, detail=detail)
    return Finding(name="broker", passed=True, needed=False, detail=shown)


def _torch() -> Finding:
    try:
        return Finding(name="torch", passed=True, needed=True, detail=metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Finding(
            name="torch", passed=False, needed=True, detail="not installed; install the extra for this device"
        )


def _devices(settings: Settings) -> Finding:
    try:
        found = find_devices(settings.node_class)
    except DeviceMissing as error:
        return Finding(name="device", passed=False, needed=True, detail=str(error))
    names = ", ".join(f"{device.name} ({device.memory_bytes / _GIB:.1f} GiB)" for device in found.devices)
    detail = "; ".join((f"{found.node_class}: {names}", *found.lacks))
    return Finding(name="device", passed=not found.lacks, needed=False, detail=detail)


def _cores() -> Finding:
    return Finding(name="cores", passed=True, needed=True, detail=str(node.cores()))


def _memory() -> Finding:
    limit_gib = memory_limit_bytes() / _GIB
    detail = f"{limit_gib:.1f} GiB, needed: {_LEAST_MEMORY_GIB}"
    return Finding(name="memory", passed=limit_gib >= _LEAST_MEMORY_GIB, needed=True, detail=detail)


def _disk(home: Path) -> Finding:
    existing = next(path for path in (home, *home.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / _GIB
    detail = f"{free_gib:.1f} GiB free at {existing}, needed: {_LEAST_DISK_GIB}"
    return Finding(name="disk", passed=free_gib >= _LEAST_DISK_GIB, needed=True, detail=detail)


def _program(name: str, path: str | None, why: str) -> Finding:
    return Finding(name=name, passed=path is not None, needed=False, detail=path or f"not found: {why}")
