"""The stack's supervisor: starts the parts in order, holds the home's lock while they live, ends them all.

`python -m service.stack.supervisor` is it in the background; it tells its starter how the start goes.

A part that fails during the start ends the whole stack. One that ends later is recorded in stack.json and in the
supervisor's log and is not restarted: `ablate status` shows it.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from service.client import Client, ClientError
from service.errors import PartFailed, StackBusy
from service.settings import get_client_settings, get_settings
from service.stack import processes
from service.stack.layout import StackFiles
from service.stack.parts import BACKGROUND, MLFLOW, WORKER, Addresses, StackPart, all_parts, free_port, listeners
from service.stack.state import StackState, exclusive, write_state

Report = Callable[[str, str], None]
"""Receives (kind, text) while the stack starts; kinds: note, part, ready."""

_log = logging.getLogger(__name__)

_LOG_TAIL_LINES = 15
_LOOK_EVERY_S = 0.5
_LOCK_PATIENCE_S = 20.0
"""Another command may be cleaning up after a dead supervisor."""
_WORKER_PATIENCE_S = 15.0
"""A worker gives its block back and ends its trainer first."""
_PARTS_PATIENCE_S = 8.0


class StopRequested(Exception):
    """The supervisor was asked to end."""


def supervise(files: StackFiles, report: Report) -> None:
    """Run the stack of `files` until SIGTERM or SIGINT; returns when no process of it is left.

    Raises StackBusy when another supervisor holds the home, PartFailed when a part did not start.
    """
    with exclusive(files, patience_s=_LOCK_PATIENCE_S):
        files.make_folders()
        supervisor = _Supervisor(files, report)
        _end_on_signals()
        try:
            supervisor.start()
            supervisor.watch()
        except StopRequested:
            _log.info("asked to end")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            supervisor.stop()


class _Supervisor:
    def __init__(self, files: StackFiles, report: Report) -> None:
        self._files = files
        self._report = report
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started, self._started_at = time.monotonic(), datetime.now(UTC)
        self._where = _choose_ports(files, report)
        self._state = StackState(
            stack_id=uuid.uuid4().hex,
            phase="starting",
            api_url=self._where.api_url,
            mlflow_url=self._where.mlflow_url,
            broker_url=files.broker_url,
            supervisor_pid=os.getpid(),
            started_at=self._started_at.isoformat(timespec="seconds"),
        )
        self._record()

    def start(self) -> None:
        """Start all parts; MLflow, the slowest, gets ready beside the others."""
        parts = all_parts(self._where, node_is_ready=self._node_is_ready)
        for part in parts:
            self._launch(part)
            if part.name not in (MLFLOW, BACKGROUND):
                self._wait(part)
        for part in parts:
            if part.name in (MLFLOW, BACKGROUND):
                self._wait(part)
        self._record(phase="ready")
        self._report("ready", f"{time.monotonic() - self._started:.1f}")

    def watch(self) -> None:
        """Notice parts that end by themselves, for ever."""
        while True:
            for name, process in self._running.items():
                code = process.poll()
                if code is not None and name not in self._state.exited:
                    _log.error("%s ended by itself with exit code %s; it is not restarted", name, code)
                    self._record(exited={**self._state.exited, name: code})
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """End the worker first, then the rest, then whatever carries the mark; leave no runtime file."""
        self._record(phase="stopping")
        worker = [process for name, process in self._running.items() if name == WORKER]
        processes.end(worker, patience_s=_WORKER_PATIENCE_S)
        processes.end(list(reversed(self._running.values())), patience_s=_PARTS_PATIENCE_S)
        killed = processes.kill_members(self._state.stack_id)
        _log.info("ended; %d processes had to be killed", killed)
        self._files.remove_runtime()

    def _launch(self, part: StackPart) -> None:
        self._running[part.name] = processes.start(
            part.command, stack_id=self._state.stack_id, environment=part.environment, log=self._files.log(part.name)
        )
        self._record(pids={name: process.pid for name, process in self._running.items()})

    def _wait(self, part: StackPart) -> None:
        deadline = time.monotonic() + part.patience_s
        while not part.answers():
            code = self._running[part.name].poll()
            if code is not None:
                raise PartFailed(part.name, f"ended with exit code {code} while it started", self._log_tail(part.name))
            if time.monotonic() > deadline:
                raise PartFailed(part.name, f"did not answer within {part.patience_s:.0f} s", self._log_tail(part.name))
            time.sleep(0.1)
        self._check_own(part)
        self._report("part", f"{part.name} {time.monotonic() - self._started:.1f}")

    def _check_own(self, part: StackPart) -> None:
        """Refuse an answer that came from another process: one that took the port after it was found free."""
        if part.port is None or listeners(part.port).intersection(processes.members(self._state.stack_id)):
            return
        what = f"cannot have port {part.port}: another process took it after it was found free; start again"
        raise PartFailed(part.name, what, self._log_tail(part.name))

    def _node_is_ready(self) -> bool:
        token = (self._files.home / "tokens" / "admin").read_text().strip()
        with Client(self._where.api_url, token) as client:
            try:
                return any(datetime.fromisoformat(node.seen_at) >= self._started_at for node in client.nodes())
            except ClientError:
                return False

    def _log_tail(self, name: str) -> str:
        lines = self._files.log(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _record(self, **changes: object) -> None:
        self._state = self._state.model_copy(update=changes)
        write_state(self._files, self._state)


def _choose_ports(files: StackFiles, report: Report) -> Addresses:
    wanted = get_settings().port
    api = free_port(wanted)
    mlflow = free_port(wanted + 1, taken=frozenset({api}))
    for name, asked, got in (("API", wanted, api), ("MLflow", wanted + 1, mlflow)):
        if got != asked:
            report("note", f"port {asked} is taken; {name} uses {got}")
    return Addresses(files=files, api_port=api, mlflow_port=mlflow)


def _end_on_signals() -> None:
    def stop(_number: int, _frame: object) -> None:
        raise StopRequested

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def main() -> int:
    """Supervise the stack of $ABLATE_HOME; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        supervise(StackFiles(home=get_client_settings().home), _tell_starter)
    except StackBusy as error:
        _tell_starter("busy", str(error))
        return 1
    except Exception as error:  # the task boundary: whoever started us hears it, and the log keeps the traceback
        _log.exception("the stack did not start")
        _tell_starter("failed", str(error))
        return 1
    return 0


def _tell_starter(kind: str, text: str) -> None:
    """Write progress as JSON lines until the stack is ready or has failed; then nothing more is written."""
    try:
        sys.stdout.write(json.dumps({"kind": kind, "text": text}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the starter went away; the stack goes on
        kind = "ready"
    if kind == "ready":
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
