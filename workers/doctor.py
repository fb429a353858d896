"""Checks behind `ablate worker doctor`: what this machine needs before a worker can serve."""

import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from experiments.design.metrics import GIB
from experiments.errors import SigningUnavailable
from experiments.records.signing import signing_problem
from workers.devices.device_lock import DeviceLock
from workers.devices.inventory import find_devices
from workers.devices.node_health import free_gib_at
from workers.devices.probes import memory_limit_bytes
from workers.errors import DeviceBusy, DeviceMissing, PreloadError, SettingsError, WorkerError
from workers.identity import node
from workers.identity.node_key import KEY_FILE, node_signer
from workers.leases.service_api import ServiceApi
from workers.processes.forkserver import ForkServer
from workers.processes.lanes import keep_lanes, run_lanes
from workers.settings import Settings

_LEAST_MEMORY_GIB = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    passed: bool
    needed: bool
    """A worker cannot serve without it; otherwise only something is poorer."""
    detail: str


def examine(settings: Settings) -> list[Finding]:
    """Run every check. What ran on which lane is kept for the next start of a worker; nothing else changes."""
    return [
        *_service(settings),
        _broker(settings),
        _signing(settings.home_dir / KEY_FILE),
        _torch(),
        _devices(settings),
        *_lanes(settings),
        _cores(),
        _memory(),
        *_disks(settings),
        _corpora(settings.corpus_roots),
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
    """Connect once. The library is imported here: one that is broken is a finding, not the end of the checks."""
    try:
        from kombu.exceptions import OperationalError
        from kombu.utils.url import maybe_sanitize_url

        from experiments.runtime.wake import celery_app
    except Exception as error:  # whatever a broken installation raises
        return Finding(name="broker", passed=False, needed=True, detail=f"its library does not load: {error!r}")
    shown = maybe_sanitize_url(settings.broker)
    try:
        with celery_app(settings.broker, name="ablate.doctor").connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
    except (OperationalError, OSError, ImportError) as error:
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
    names = ", ".join(f"{device.name} ({device.memory_bytes / GIB:.1f} GiB)" for device in found.devices)
    detail = "; ".join((f"{found.node_class}: {names}", *found.lacks))
    return Finding(name="device", passed=not found.lacks, needed=False, detail=detail)


def _lanes(settings: Settings) -> list[Finding]:
    """Run a small scan on every lane of the node's class, unless a worker has the device."""
    try:
        here = node.find_node(settings.node_name, settings.node_class)
        with DeviceLock(here.devices.locks("worker")):
            server = ForkServer()
            server.check()
            results = run_lanes(here, server, data_dir=settings.data_path)
            if results is not None:
                keep_lanes(here, results, settings.home_dir)
    except DeviceMissing:
        return []  # said by the check of the device
    except (DeviceBusy, PreloadError, OSError) as error:
        needed = not isinstance(error, DeviceBusy)
        return [Finding(name="lanes", passed=False, needed=needed, detail=f"not run: {error}")]
    if results is None:
        return [Finding(name="lanes", passed=True, needed=False, detail="nothing is executed on this class of node")]
    works = [lane for lane, problem in results.items() if problem is None]
    return [
        Finding(
            name=f"lane {lane}", passed=problem is None, needed=not works, detail=problem or "it ran, and was right"
        )
        for lane, problem in results.items()
    ]


def _corpora(roots: tuple[Path, ...]) -> Finding:
    absent = [str(root) for root in roots if not root.is_dir()]
    detail = f"not there: {', '.join(absent)}" if absent else ", ".join(["torch-headers", *map(str, roots)])
    return Finding(name="corpora", passed=not absent, needed=False, detail=detail)


def _cores() -> Finding:
    return Finding(name="cores", passed=True, needed=True, detail=str(node.cores()))


def _memory() -> Finding:
    limit_gib = memory_limit_bytes() / GIB
    detail = f"{limit_gib:.1f} GiB, needed: {_LEAST_MEMORY_GIB}"
    return Finding(name="memory", passed=limit_gib >= _LEAST_MEMORY_GIB, needed=True, detail=detail)


def _disks(settings: Settings) -> list[Finding]:
    """Return the space where this worker writes: in its home, and at its datasets where they are elsewhere."""
    folders = {"disk": settings.home_dir, "disk of datasets": settings.data_path}
    if settings.data_path.is_relative_to(settings.home_dir):
        del folders["disk of datasets"]
    return [_disk(name, folder, settings.least_disk_gib) for name, folder in folders.items()]


def _disk(name: str, folder: Path, least_gib: float) -> Finding:
    free_gib = free_gib_at(folder)
    detail = f"{free_gib:.1f} GiB free at {folder}, needed: {least_gib:g}"
    return Finding(name=name, passed=free_gib >= least_gib, needed=True, detail=detail)


def _program(name: str, path: str | None, why: str) -> Finding:
    return Finding(name=name, passed=path is not None, needed=False, detail=path or f"not found: {why}")
