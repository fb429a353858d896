"""A worker's life: probe, register, fork server, wake-ups, supervisor, clean end."""

import logging
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from workers import node as nodes
from workers.bell import Bell
from workers.blocks import Bench
from workers.errors import ApiUnreachable, WorkerError
from workers.forkserver import ForkServer
from workers.inherited import wait_passively
from workers.node_table import describe
from workers.paths import JobPaths
from workers.reaper import Reaper
from workers.reporting import ServiceApi
from workers.runner import Runner
from workers.settings import Settings, get_settings
from workers.stopping import StopFlag
from workers.supervisor import Desk, Supervisor
from workers.tasks import WakeListener

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Stopped(Exception):
    """The worker was asked to end before it had registered."""


def serve() -> int:
    """Run a worker with the settings of the environment; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    for name in ("httpx", "celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    console = Console(stderr=True)
    try:
        _serve(get_settings(), console)
    except Stopped:
        return 0
    except (WorkerError, ValueError) as error:
        console.print(f"[red]worker cannot run:[/red] {error}")
        return 1
    return 0


def _serve(settings: Settings, console: Console) -> None:
    bell = Bell()
    stopping = StopFlag(bell)
    stopping.install()
    node = nodes.probe(settings.node_name, settings.node_class)
    console.print(describe(node))
    wait_passively()
    server = ForkServer()
    with Reaper() as reaper:
        server.check()
        api = ServiceApi(settings.url, _until(lambda: _token(settings), bell, stopping))
        registered = _until(lambda: api.register(node.name, node.registration()), bell, stopping)
        runner = Runner(server, reaper, bell, grace_s=settings.grace_s, preempted=stopping)
        bench = Bench(
            node=node,
            node_id=registered.node_id,
            runner=runner,
            paths=JobPaths(home=settings.home_dir),
            data_dir=settings.data_path,
        )
        poll_s = min(settings.poll_s, registered.claim_poll_s)
        desk = Desk(api=api, bell=bell, poll_s=poll_s, keep_attempts=settings.keep_attempts)
        listener = WakeListener(settings.broker, node.node_class, bell)
        listener.start()
        _log.info("node %s is %s and asks for work of class %s", node.name, registered.node_id, node.node_class)
        try:
            Supervisor(bench, desk, stopping=stopping).run()
        finally:
            listener.stop()
            api.close()


def _until(ask: Callable[[], _T], bell: Bell, stopping: Callable[[], bool]) -> _T:
    """Ask until there is an answer; the service, or the file with its key, may come up after this worker.

    Raises:
        ApiRefused: the key is not accepted, or the registration is wrong.
        Stopped: the worker was asked to end meanwhile.

    """
    pause_s, said = _FIRST_PAUSE_S, ""
    while not stopping():
        try:
            return ask()
        except ApiUnreachable as error:
            if str(error) != said:
                said = str(error)
                _log.info("waiting for the service: %s", error)
        bell.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise Stopped


def _token(settings: Settings) -> str:
    token = settings.read_token()
    if token is None:
        path = settings.home_dir / "tokens" / "worker"
        raise ApiUnreachable(f"no worker key yet: ABLATE_WORKER_TOKEN is not set and {path} does not exist")
    return token
