"""The life of a worker: find the devices, start the fork server, register, serve, and end cleanly."""

import logging
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape

from ablate.experiments.design.kinds.program import needed_secret
from ablate.experiments.design.packages import LANE, installed, lane_over
from ablate.experiments.design.workload import COMMAND
from ablate.experiments.documents import make_state_folder
from ablate.experiments.errors import SigningUnavailable
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.signing import Signer
from ablate.experiments.system.logs import configure_logging
from ablate.model.measurements import GIB
from ablate.workers.blocks.block_runner import NodeContext
from ablate.workers.blocks.code_cache import CodeCache
from ablate.workers.commands.several_nodes import node_names
from ablate.workers.devices.device_lock import DeviceLock
from ablate.workers.devices.node_health import NodeHealth, ReleaseProof
from ablate.workers.environment_variables import allocated_nodes
from ablate.workers.errors import ApiUnreachable, WorkerError
from ablate.workers.isolation.node_secrets import read_secrets
from ablate.workers.leases.enrolment import Enroller, enroller
from ablate.workers.leases.service_api import ServiceApi, service_api
from ablate.workers.leases.spool import FOLDER, Spool
from ablate.workers.leases.supervisor import ServiceLink, ServiceNode, Supervisor
from ablate.workers.leases.wake_listener import WakeListener
from ablate.workers.node import KEY_FILE, Node, find_node, node_signer
from ablate.workers.paths import MOST_OUTPUT, WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.lanes import LaneResults, keep_lanes, run_lanes, stored_lanes, tried_on
from ablate.workers.processes.runner import TrialRunner, start_processes
from ablate.workers.processes.wake_event import StopFlag, WakeEvent
from ablate.workers.settings import Settings, get_settings

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

ENDED = "the worker has ended, with all its processes"

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class StoppedEarly(Exception):
    """The worker had to end before it was registered."""


def serve() -> int:
    """Run a worker with the settings of the environment; return the exit code."""
    console = Console(stderr=True)
    try:
        settings = get_settings()
        configure_logging(settings.log_format, quiet=("celery.worker.strategy", "celery.app.trace"))
        with suppress(StoppedEarly):
            _serve(settings, console)
    except (WorkerError, SigningUnavailable, ValueError, OSError) as error:
        console.print(f"[red]worker cannot run:[/red] {escape(str(error))}")
        return ExitCode.ERROR
    console.print(ENDED)
    return ExitCode.DONE


def _serve(settings: Settings, console: Console) -> None:
    make_state_folder(settings.home_dir)
    wake_event = WakeEvent(settings.home_dir / "alive")
    stopping = StopFlag(
        wake_event, drain_s=settings.drain_s, lasts_s=settings.lasts_s, idle_s=settings.exit_when_idle or math.inf
    )
    stopping.install()
    joining = enroller(settings)
    settings = settings if joining is None else joining.settings
    node = find_node(settings.node_name, settings.node_class)
    node = node if joining is None else replace(node, allocation=joining.allocation)
    if allocated_nodes() > 1:
        node = replace(node, nodes=node_names(settings.data_path))
    console.print(node.table())
    with DeviceLock(node.devices.locks("worker")):
        signer = node_signer(settings.home_dir / KEY_FILE)
        console.print(f"signs with {signer.key}")
        with start_processes(
            wake_event,
            grace_s=settings.grace_s,
            stopping=stopping,
            most_output=replace(
                MOST_OUTPUT, bytes=int(settings.trial_disk_gib * GIB), processes=settings.trial_processes
            ),
        ) as runner:
            _work(settings, node, signer, runner, joining=joining, wake_event=wake_event, stopping=stopping)


def _work(
    settings: Settings,
    node: Node,
    signer: Signer,
    runner: TrialRunner,
    *,
    joining: Enroller | None,
    wake_event: WakeEvent,
    stopping: StopFlag,
) -> None:
    """Register and serve."""
    proof = node.devices.proof()
    secret_values = read_secrets(settings.secrets_path) if settings.secrets_path else {}
    test_lanes = partial(_offered_lanes, node, runner.server, settings, secret_values)
    health = _health(settings, node, proof, test_lanes(anew=False))
    stopping.ended()
    api = _until(partial(_connected, settings, joining, node.node_class.name), wake_event, stopping)
    service_node = ServiceNode(
        api, node, health, public_key=signer.key, test_lanes=partial(test_lanes, anew=True), left_s=stopping.left_s
    )
    registered = _until(service_node.register, wake_event, stopping)
    context = NodeContext(
        node=node,
        node_id=registered.node_id,
        runner=runner,
        paths=WorkPaths(home=settings.home_dir),
        data_dir=settings.data_path,
        proof=proof,
        signer=signer,
        corpus_roots=settings.corpus_roots,
        secret_values=secret_values,
        secrets=(settings.home_dir, *([settings.secrets_path] if settings.secrets_path else [])),
        code_roots=settings.code_roots,
        data_roots=settings.data_roots,
        code_cache=CodeCache(settings.data_path, api.code),
        environments=settings.python_environments,
        quiet_s=settings.quiet_s,
    )
    link = ServiceLink(
        api=api,
        node=service_node,
        spool=Spool(settings.home_dir / FOLDER / quote(node.name, safe="")),
        wake_event=wake_event,
        poll_s=registered.claim_poll_s,
        keep_attempts=settings.keep_attempts,
        most_blocks=settings.max_blocks,
    )
    listener = WakeListener(settings.broker, node.node_class.name, wake_event, poll_s=registered.claim_poll_s)
    listener.start()
    _log.info(
        "node %s is %s and asks for work of class %s; to end it after its block: kill -TERM %d",
        *(node.name, registered.node_id, node.node_class, os.getpid()),
    )
    try:
        Supervisor(context, link, stopping=stopping).run()
    finally:
        listener.stop()
        _end(api, joining)


def _connected(settings: Settings, joining: Enroller | None, node_class: str) -> ServiceApi:
    """Enrol if there is no key, and return the client of the service."""
    if joining is not None:
        joining.enrol(node_class)
    return service_api(settings)


def _end(api: ServiceApi, joining: Enroller | None) -> None:
    if joining is not None:
        joining.leave(api)
    api.close()


def _health(settings: Settings, node: Node, proof: ReleaseProof, lanes: LaneResults | None) -> NodeHealth:
    folders, least_disk_gib = (settings.home_dir, settings.data_path), settings.least_disk_gib
    return NodeHealth(proof, node.node_class, lanes=lanes, folders=folders, least_disk_gib=least_disk_gib)


def _offered_lanes(
    node: Node, server: ForkServer, settings: Settings, secrets: Iterable[str], *, anew: bool
) -> LaneResults | None:
    lanes = {} if node.nodes else _lanes(node, server, settings, anew=anew)  # the built-in model runs on one node
    return _with_commands(lanes, node, settings, secrets)


def _lanes(node: Node, server: ForkServer, settings: Settings, *, anew: bool) -> LaneResults | None:
    """Return the result of every lane: stored from an earlier start unless `anew`, or from a run now."""
    stored = frozenset() if anew else stored_lanes(node, settings.home_dir)
    if stored >= set(tried_on(node.node_class)):
        return dict.fromkeys(sorted(stored))
    _log.info("testing the lanes of class %s with a small scan on each, and the back ends of its GPUs", node.node_class)
    results = run_lanes(node, server, data_dir=settings.data_path, works=stored)
    for lane, problem in (results or {}).items():
        _log.info("%s works", lane) if problem is None else _log.warning("%s: %s", lane, problem)
    if results is not None:
        try:
            keep_lanes(node, results, settings.home_dir)
        except OSError as error:
            _log.warning("cannot store the results of the lanes, which run again at the next start: %s", error)
    return results


def _with_commands(
    results: LaneResults | None, node: Node, settings: Settings, secrets: Iterable[str]
) -> LaneResults | None:
    """Add the lanes of commands, one for each Python environment, of packages' recipes, and the names of secrets."""
    if results is None:
        return None
    refusal = None if settings.takes_commands else "this node takes no commands (ABLATE_ACCEPT_CODE)"
    if refusal is None and node.isolates and not node.node_class.on_host and os.geteuid() == 0:
        refusal = "an isolated command of root cannot use the GPU: run the worker as another user"
    over = partial(lane_over, nodes=len(node.nodes) or 1)
    lanes = [over(COMMAND), *(over(f"{COMMAND}:{name}") for name in sorted(settings.python_environments))]
    own = installed()
    recipes = {over(recipe.lane): None for recipe in own.recipes.values() if recipe.runs_on(node.node_class.name)}
    for problem in own.problems.values():
        _log.warning("%s", problem)
    broken = {f"{LANE}:{name}": problem for name, problem in own.problems.items()}
    offered = dict.fromkeys(map(needed_secret, secrets))
    return {**results, **dict.fromkeys(lanes, refusal), **recipes, **broken, **offered}


def _until(call: Callable[[], _T], wake_event: WakeEvent, stopping: StopFlag) -> _T:
    """Call until there is an answer: the service, or the file with its key, may appear after this worker.

    Raises:
        ApiRefused: the service rejects the key or the registration.
        StoppedEarly: the worker had to end in the meantime.

    """
    pause_s, last_reason = _FIRST_PAUSE_S, ""
    while not stopping():
        try:
            return call()
        except ApiUnreachable as error:
            if str(error) != last_reason:
                last_reason = str(error)
                _log.info("waiting for the service: %s", error)
        wake_event.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    _log.info("this worker ends: %s", stopping.reason)
    raise StoppedEarly
