"""`ablate worker doctor`: checks of everything that a worker on this machine needs."""

import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ablate.experiments.design.packages import installed
from ablate.experiments.errors import BadSetting, SigningUnavailable
from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.records.signing import signing_problem
from ablate.experiments.system.kernel_limits import landlock_version
from ablate.model.data.corpus import BUILT_IN
from ablate.model.measurements import GIB
from ablate.workers import node
from ablate.workers.devices.device_lock import DeviceLock
from ablate.workers.devices.inventory import find_devices, memory_limit_bytes
from ablate.workers.devices.node_health import free_gib_at
from ablate.workers.errors import DeviceBusy, DeviceMissing, PreloadError, WorkerError
from ablate.workers.isolation.node_secrets import read_secrets
from ablate.workers.isolation.reach import isolation_gaps, isolation_problem
from ablate.workers.leases.service_api import ServiceApi, service_api
from ablate.workers.node import KEY_FILE, node_signer
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.lanes import keep_lanes, run_lanes
from ablate.workers.settings import Settings

_LEAST_MEMORY_GIB = 4


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """The result of one check."""

    name: str
    passed: bool
    needed: bool
    """A worker cannot serve without it; otherwise a feature is missing."""
    detail: str


def examine(settings: Settings) -> list[DoctorCheck]:
    """Run every check. The results of the lanes are stored for the next start of a worker; nothing else changes."""
    return [
        *_service(settings),
        _broker(settings),
        _signing(settings.home_dir / KEY_FILE),
        _isolation(),
        _torch(),
        _devices(settings),
        *_lanes(settings),
        *_recipes(),
        *_secrets(settings.secrets_path),
        _check("cores", None, str(node.cores())),
        _memory(),
        *_disks(settings),
        _corpora(settings.corpus_roots),
        _program("git", shutil.which("git"), "receipts carry no commit without it"),
        _program("C++ compiler", node.compiler(), "arms with compile: true need one"),
    ]


def _check(name: str, problem: str | None, detail: str = "", *, needed: bool = True) -> DoctorCheck:
    """Return the result of a check, which has failed if there is a problem."""
    return DoctorCheck(name=name, passed=problem is None, needed=needed, detail=problem or detail)


def _service(settings: Settings) -> list[DoctorCheck]:
    try:
        key = settings.read_token()
        api = service_api(settings, token=key or settings.read_enrolment_token())
    except (WorkerError, BadSetting) as error:
        return [_check("worker key", str(error))]
    try:
        return [_reachable(api), _enrolment(api) if key is None else _key(api, settings.node_name)]
    finally:
        api.close()


def _reachable(api: ServiceApi) -> DoctorCheck:
    try:
        return _check("service", None, f"{api.url}: {api.version()}")
    except WorkerError as error:
        return _check("service", str(error))


def _key(api: ServiceApi, name: str) -> DoctorCheck:
    try:
        owner = api.key_node()
    except WorkerError as error:
        return _check("worker key", str(error))
    problem = None if owner == name else f"belongs to node '{owner}', but ABLATE_NODE_NAME here is '{name}'"
    return _check("worker key", problem, "accepted")


def _enrolment(api: ServiceApi) -> DoctorCheck:
    try:
        return _check("worker key", None, f"none: enrols at its start as a node of class {api.enrolment_class()}")
    except WorkerError as error:
        return _check("worker key", str(error))


def _broker(settings: Settings) -> DoctorCheck:
    """Connect once. The library is imported here, so that a broken one is a failed check and the others still run."""
    try:
        from kombu.exceptions import OperationalError
        from kombu.utils.url import maybe_sanitize_url

        from ablate.experiments.system.wake import celery_app
    except Exception as error:  # a broken installation may raise anything
        return _check("broker", f"cannot import its library: {error!r}")
    address = maybe_sanitize_url(settings.broker)
    try:
        with celery_app(settings.broker, name="ablate.doctor").connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
    except (OperationalError, OSError, ImportError) as error:
        problem = f"{address}: {error}; the worker finds work by polling"
        return _check("broker", problem, needed=False)
    return _check("broker", None, address, needed=False)


def _signing(path: Path) -> DoctorCheck:
    try:
        detail = f"signs with {node_signer(path).key}" if path.exists() else f"the first start creates {path}"
    except (WorkerError, SigningUnavailable) as error:
        return _check("signing key", str(error))
    return _check("signing key", signing_problem(), detail)


def _isolation() -> DoctorCheck:
    """Say which isolation trials get here. A node without any runs built-in trials, which are no foreign code."""
    problem = isolation_problem()
    if problem is not None:
        return _check("isolation", f"none: trials can read this node's keys, because {problem}", needed=False)
    detail = "; ".join((f"trials run under Landlock, version {landlock_version()}", *isolation_gaps()))
    return _check("isolation", None, detail, needed=False)


def _torch() -> DoctorCheck:
    try:
        return _check("torch", None, metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return _check("torch", "not installed; install the extra for this device")


def _devices(settings: Settings) -> DoctorCheck:
    try:
        devices = find_devices(settings.node_class)
    except DeviceMissing as error:
        return _check("device", str(error))
    names = ", ".join(_described(device) for device in devices.devices)
    offered = max(devices.node_class.spreads(len(devices.devices)))
    several = () if devices.node_class.occupied(offered) == 1 else (f"a command may use up to {offered} of them",)
    detail = "; ".join((f"{devices.node_class}: {names}", *several, *devices.lacks))
    return _check("device", detail if devices.lacks else None, detail, needed=False)


def _described(device: DeviceInfo) -> str:
    capability = f", compute capability {device.capability}" if device.capability else ""
    return f"{device.name} ({device.memory_bytes / GIB:.1f} GiB{capability})"


def _lanes(settings: Settings) -> list[DoctorCheck]:
    """Run a small scan on every lane of the node's class, unless a worker uses the device."""
    try:
        here = node.find_node(settings.node_name, settings.node_class)
        with DeviceLock((*here.devices.locks("worker"), *here.devices.locks("block"))):
            server = ForkServer()
            server.check()
            results = run_lanes(here, server, data_dir=settings.data_path)
    except DeviceMissing:
        return []  # the check of the device reports it
    except (DeviceBusy, PreloadError, OSError) as error:
        return [_check("lanes", f"not run: {error}", needed=not isinstance(error, DeviceBusy))]
    if results is None:
        return [_check("lanes", None, "this class of node executes nothing", needed=False)]
    not_stored = []
    try:
        keep_lanes(here, results, settings.home_dir)
    except OSError as error:
        not_stored = [_check("lanes", f"their results are not stored: {error}", needed=False)]
    lanes = set(map(str, here.node_class.lanes))
    needed = None not in (problem for name, problem in results.items() if name in lanes)
    return [
        _check(
            f"lane {name}" if name in lanes else name,
            problem,
            "it ran with correct results",
            needed=needed and name in lanes,
        )
        for name, problem in results.items()
    ] + not_stored


def _recipes() -> list[DoctorCheck]:
    """Load the recipes of installed packages."""
    own = installed()
    works = [_check(f"recipe {name}", None, recipe.distribution, needed=False) for name, recipe in own.recipes.items()]
    return [*works, *(_check(f"recipe {name}", problem, needed=False) for name, problem in own.problems.items())]


def _secrets(path: Path | None) -> list[DoctorCheck]:
    """List the names of the secrets for programs, never their values."""
    if path is None:
        return []
    try:
        return [_check("secrets", None, f"{', '.join(sorted(read_secrets(path)))} ({path})", needed=False)]
    except WorkerError as error:
        return [_check("secrets", str(error))]


def _memory() -> DoctorCheck:
    limit_gib = memory_limit_bytes() / GIB
    detail = f"{limit_gib:.1f} GiB, needed: {_LEAST_MEMORY_GIB}"
    return _check("memory", detail if limit_gib < _LEAST_MEMORY_GIB else None, detail)


def _disks(settings: Settings) -> list[DoctorCheck]:
    """Check the space in the state folder, and in the folder of datasets if it is elsewhere."""
    checks = [_disk("disk", settings.home_dir, settings.least_disk_gib)]
    if not settings.data_path.is_relative_to(settings.home_dir):
        checks.append(_disk("disk of datasets", settings.data_path, settings.least_disk_gib))
    return checks


def _disk(name: str, folder: Path, least_gib: float) -> DoctorCheck:
    free_gib = free_gib_at(folder)
    detail = f"{free_gib:.1f} GiB free at {folder}, needed: {least_gib:g}"
    return _check(name, detail if free_gib < least_gib else None, detail)


def _corpora(roots: tuple[Path, ...]) -> DoctorCheck:
    absent = [str(root) for root in roots if not root.is_dir()]
    problem = f"missing: {', '.join(absent)}" if absent else None
    return _check("corpora", problem, ", ".join([*BUILT_IN, *map(str, roots)]), needed=False)


def _program(name: str, path: str | None, consequence: str) -> DoctorCheck:
    return _check(name, None if path else f"not found: {consequence}", path or "", needed=False)
