"""The stack's supervisor: starts the parts in order, keeps them running, and ends them all.

It holds the home's lock. `python -m ablate.service.stack.supervisor [--no-worker]` runs it in the background and
reports the start to the parent process.

A part that fails during the start ends the whole stack. A later failure becomes a finding in stack.json and in the
supervisor's log, and the part restarts, with growing pauses and a limit. `ablate status` shows both.
"""

import json
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
import uuid
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from ablate.experiments.reporting.mlflow.views import experiment_tags, tags_to_set
from ablate.experiments.system.http_clients import HomeStack, http_client
from ablate.experiments.system.logs import accept_every_text
from ablate.experiments.system.processes import number_space, start_of
from ablate.experiments.system.setting_values import read_secret
from ablate.service.client.api import Client, ClientError
from ablate.service.client.settings import get_client_settings
from ablate.service.errors import PartFailed, PortTaken, StackBusy, StackError
from ablate.service.http import links
from ablate.service.settings import get_settings
from ablate.service.stack import broker, part_processes
from ablate.service.stack.layout import Report, StackFiles
from ablate.service.stack.part_processes import PartRun
from ablate.service.stack.parts import (
    BACKGROUND,
    MLFLOW,
    NO_WORKER,
    WORKER,
    Addresses,
    StackPart,
    all_parts,
    free_port,
    is_ok,
)
from ablate.service.stack.state import StackFinding, StackState, exclusive, write_state

_log = logging.getLogger(__name__)

_LOG_TAIL_LINES = 15
_POLL_S = 0.25
_MAX_FINDINGS = 50
_LOCK_PATIENCE_S = 20.0
"""Another command may be cleaning up after a dead supervisor."""
_WORKER_PATIENCE_S = 15.0
"""A worker first gives its block back and ends its trainer."""
_PARTS_PATIENCE_S = 8.0
_STARTS = 3
"""Starts of a stack that loses its ports to others."""


class StopRequested(Exception):
    """A signal asked the supervisor to stop."""


def supervise(files: StackFiles, report: Report, *, with_worker: bool = True) -> None:
    """Run the stack of `files` until SIGTERM or SIGINT. Returns when none of its processes is left.

    Raises StackBusy if another supervisor has the home, StackError for a damaged file, PartFailed if a part does not
    start.
    """
    os.umask(0o077)  # only this user can read the database, logs and sockets that the parts create
    with exclusive(files, patience_s=_LOCK_PATIENCE_S):
        files.make_folders()
        check_databases(files)
        supervisor = _Supervisor(files, report, with_worker=with_worker)
        _stop_on_signals()
        try:
            supervisor.start()
            supervisor.watch()
        except StopRequested:
            _log.info("a signal asked for the end")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            supervisor.stop()


class _Supervisor:
    def __init__(self, files: StackFiles, report: Report, *, with_worker: bool) -> None:
        self._files = files
        self._with_worker = with_worker
        self._report = report
        self._runs: dict[str, PartRun] = {}
        self._started, self._started_at = time.monotonic(), datetime.now(UTC)
        self._addresses = _choose_ports(files, report)
        self._findings: list[StackFinding] = []
        self._unrecorded = False
        self._state = StackState(
            stack_id=uuid.uuid4().hex,
            phase="starting",
            api_url=self._addresses.api_url,
            mlflow_url=self._addresses.mlflow_pages,
            mlflow_port=self._addresses.mlflow_port,
            ablations_url=links.of_ablations(self._addresses.mlflow_pages, None),
            broker_url=files.broker_address,
            broker_port=self._addresses.broker_port,
            supervisor_pid=os.getpid(),
            supervisor_start=start_of(os.getpid()),
            host=socket.gethostname(),
            number_space=number_space(),
            started_at=self._started_at.isoformat(timespec="seconds"),
        )
        self._record()

    def start(self) -> None:
        """Start all parts. MLflow, the slowest, starts beside the others."""
        broker.configure(self._files, host=self._addresses.host, port=self._addresses.broker_port)
        parts = all_parts(self._addresses, node_is_ready=self._node_is_ready, with_worker=self._with_worker)
        for part in parts:
            self._launch(part)
            if part.name not in (MLFLOW, BACKGROUND):
                self._wait(part)
        for part in parts:
            if part.name in (MLFLOW, BACKGROUND):
                self._wait(part)
        self._record(phase="ready", ablations_url=self._ablations_url())
        self._report("ready", f"{time.monotonic() - self._started:.1f}")

    def _ablations_url(self) -> str:
        """Return the link to MLflow's list of ablations, or to its experiments if MLflow does not answer now."""
        try:
            experiment_id = prepare_experiment(self._addresses.mlflow_url, get_settings().mlflow_experiment)
        except httpx.HTTPError as error:
            self._report("note", f"MLflow does not show its list of ablations: {error}")
            experiment_id = None
        return links.of_ablations(self._addresses.mlflow_pages, experiment_id)

    def watch(self) -> None:
        """Keep the parts running, forever."""
        while True:
            for run in self._runs.values():
                run.update()
            if self._current_state() != self._state or self._unrecorded or not self._files.state.exists():
                self._record()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the worker, then the other parts, then every process with the mark, and remove the runtime files."""
        self._record(phase="stopping")
        worker = [run.process for name, run in self._runs.items() if name == WORKER]
        part_processes.end(worker, patience_s=_WORKER_PATIENCE_S, number=signal.SIGINT)
        part_processes.end([run.process for run in reversed(self._runs.values())], patience_s=_PARTS_PATIENCE_S)
        killed = part_processes.kill_members(self._state.stack_id)
        _log.info("ended; %d processes needed SIGKILL", killed)
        self._files.remove_runtime()

    def _launch(self, part: StackPart) -> None:
        pause_s = get_settings().restart_pause_s
        run = PartRun(part, self._files, stack_id=self._state.stack_id, pause_s=pause_s, add_finding=self._add_finding)
        run.start()
        self._runs[part.name] = run
        self._record()

    def _wait(self, part: StackPart) -> None:
        run, deadline = self._runs[part.name], time.monotonic() + part.patience_s
        while not part.answers():
            code = run.process.poll()
            if code is not None:
                self._check_port(run)  # it may have ended because of that
                raise PartFailed(part.name, f"ended with exit code {code} while it started", self._log_tail(part.name))
            if time.monotonic() > deadline:
                raise PartFailed(part.name, f"did not answer within {part.patience_s:.0f} s", self._log_tail(part.name))
            time.sleep(0.1)
        self._check_port(run)
        run.confirm()
        self._report("part", f"{part.name} {time.monotonic() - self._started:.1f}")

    def _check_port(self, run: PartRun) -> None:
        """Raise PortTaken if another process listens on the port of a part."""
        if run.lost_port():
            what = f"cannot use port {run.part.port}: another process took it after the check; start again"
            raise PortTaken(run.part.name, what, self._log_tail(run.part.name))

    def _node_is_ready(self) -> bool:
        """Return whether the worker has contacted the API since its process started."""
        if not is_ok(self._addresses.api_url, "/healthz"):  # a client would wait longer for a stopped API
            return False
        token = read_secret(self._files.home / "tokens" / "admin")
        worker_began = self._runs[WORKER].started_at
        own = HomeStack(stack_id=self._state.stack_id, api_url=self._addresses.api_url)
        with Client(own.api_url, token, stack=own) as client:
            try:
                return any(datetime.fromisoformat(node.seen_at) >= worker_began for node in client.nodes())
            except ClientError:
                return False

    def _add_finding(self, part: str, what: str, then: str) -> None:
        _log.error("%s %s; %s", part, what, then)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._findings = [*self._findings, StackFinding(part=part, at=at, what=what, then=then)][-_MAX_FINDINGS:]

    def _log_tail(self, name: str) -> str:
        lines = self._files.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _current_state(self) -> StackState:
        return self._state.model_copy(
            update={
                "pids": {name: run.pid for name, run in self._runs.items()},
                "parts": {name: run.state for name, run in self._runs.items()},
                "findings": tuple(self._findings),
            }
        )

    def _record(self, **changes: object) -> None:
        """Write stack.json. If that fails (a full disk), the stack goes on and retries."""
        self._state = self._current_state().model_copy(update=changes)
        try:
            write_state(self._files, self._state)
        except OSError as error:
            if not self._unrecorded:
                _log.error("%s cannot be written: %s", self._files.state, error)
            self._unrecorded = True
        else:
            self._unrecorded = False


def check_databases(files: StackFiles) -> None:
    """Raise StackError for a database that SQLite cannot read or finds damaged."""
    remedies = {
        files.database: "restore a file from `ablate admin backup`: ablate admin restore FILE",
        files.mlflow_database: f"remove {files.mlflow}, then run: ablate up, ablate admin mlflow rebuild",
    }
    for database, remedy in remedies.items():
        problem = _problem(database) if database.exists() else None
        if problem is not None:
            raise StackError(f"{database} cannot be used: {problem}; if it is damaged, {remedy}")


def _problem(database: Path) -> str | None:
    try:
        with closing(sqlite3.connect(database)) as connection:  # a killed server's journal needs a writer
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return str(error)
    return None if answer == "ok" else " ".join(str(answer).split())


_MLFLOW_API = "/api/2.0/mlflow/experiments"
_MLFLOW_ANSWER_S = 30.0
_MLFLOW_TRIES = 2
"""A background process may create the experiment at the same moment."""


def prepare_experiment(url: str, name: str) -> str | None:
    """Return the id of MLflow's experiment `name`, or None if it was deleted.

    Creates a missing experiment with its saved views. An existing one gets missing views, and new versions of unchanged
    ones. This uses HTTP, because the supervisor does not import mlflow.

    Raises:
        httpx.HTTPError: MLflow does not answer, or refuses.

    """
    with http_client(url + _MLFLOW_API, timeout=_MLFLOW_ANSWER_S) as server:
        for _ in range(_MLFLOW_TRIES):
            answer = server.get("/get-by-name", params={"experiment_name": name})
            if answer.status_code != httpx.codes.NOT_FOUND:
                return _update_views(server, answer.raise_for_status().json()["experiment"])
            tags = [{"key": key, "value": value} for key, value in experiment_tags().items()]
            created = server.post("/create", json={"name": name, "tags": tags})
            if created.is_success:
                return str(created.json()["experiment_id"])
        created.raise_for_status()
    return None


def _update_views(server: httpx.Client, experiment: dict[str, Any]) -> str | None:
    if experiment["lifecycle_stage"] != "active":
        return None
    current = {tag["key"]: tag["value"] for tag in experiment.get("tags", [])}
    for key, value in tags_to_set(current).items():
        tag = {"experiment_id": experiment["experiment_id"], "key": key, "value": value}
        server.post("/set-experiment-tag", json=tag).raise_for_status()
    return str(experiment["experiment_id"])


def _choose_ports(files: StackFiles, report: Report) -> Addresses:
    settings = get_settings()
    settings.check_address()
    first, host = settings.port, settings.host
    api = free_port(first, host=host)
    mlflow = free_port(first + 1, taken=frozenset({api}))
    chosen = [("API", first, api), ("MLflow", first + 1, mlflow)]
    broker_port = None
    if not settings.is_loopback:
        broker_port = free_port(first + 2, taken=frozenset({api, mlflow}), host=host)
        chosen.append(("broker", first + 2, broker_port))
    for name, preferred, port in chosen:
        if port != preferred:
            report("note", f"port {preferred} is in use; {name} uses {port}")
    return Addresses(
        files=files,
        api_port=api,
        mlflow_port=mlflow,
        host=host,
        broker_port=broker_port,
        public_url=settings.public_url,
        mlflow_public_url=settings.mlflow_public_url,
    )


def _stop_on_signals() -> None:
    def stop(_number: int, _frame: object) -> None:
        raise StopRequested

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _supervise_somewhere(files: StackFiles, *, with_worker: bool) -> None:
    """Supervise; begin again with other ports if another stack that starts now has taken one of them."""
    for left in reversed(range(_STARTS)):
        try:
            supervise(files, _report_to_parent, with_worker=with_worker)
        except PortTaken as error:
            if not left:
                raise
            _report_to_parent("note", f"another process took the port of {error.part}; starting again with other ports")
        else:
            return


def main() -> int:
    """Supervise the stack of $ABLATE_HOME; return the exit code."""
    accept_every_text()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        files = StackFiles(home=get_client_settings().home)
        _supervise_somewhere(files, with_worker=NO_WORKER not in sys.argv[1:])
    except StackBusy as error:
        _report_to_parent("busy", str(error))
        return 1
    except Exception as error:  # the process boundary: the parent gets the message, the log gets the traceback
        _log.exception("the stack did not start")
        _report_to_parent("failed", str(error))
        return 1
    return 0


def _report_to_parent(kind: str, text: str) -> None:
    """Write progress as JSON lines to the parent process, until the stack is ready."""
    try:
        sys.stdout.write(json.dumps({"kind": kind, "text": text}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the parent process ended; the stack goes on
        kind = "ready"
    if kind == "ready":
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
