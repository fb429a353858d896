"""The stack's supervisor: starts the parts in order, keeps them running, holds the home's lock, ends them all.

`python -m service.stack.supervisor` is it in the background; it tells its starter how the start goes.

A part that fails during the start ends the whole stack. One that ends later is recorded as a finding in stack.json and
in the supervisor's log, and is started again, with growing pauses and a limit: `ablate status` shows both.
"""

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx

from experiments.reporting.mlflow.views import experiment_tags, tags_to_set
from service.client.api import Client, ClientError
from service.client.settings import get_client_settings
from service.errors import PartFailed, StackBusy
from service.http import mlflow_links
from service.settings import get_settings
from service.stack import broker, part_processes
from service.stack.layout import StackFiles
from service.stack.part_processes import PartRun
from service.stack.parts import BACKGROUND, MLFLOW, WORKER, Addresses, StackPart, all_parts, free_port, is_ok
from service.stack.state import StackFinding, StackState, exclusive, write_state

_API = "/api/2.0/mlflow/experiments"
_ANSWER_S = 30.0
_TRIES = 2
"""A background process may make it at the same moment."""


def make_experiment(url: str, name: str) -> str | None:
    """Return the id of the experiment `name` of the server at `url`, made where there is none; None if it was deleted.

    One that is there gets the views that it lacks, and today's in place of older ones that nobody has changed.

    Raises:
        httpx.HTTPError: MLflow does not answer, or refuses.

    """
    with httpx.Client(base_url=url.rstrip("/") + _API, timeout=_ANSWER_S, trust_env=False) as server:
        for _ in range(_TRIES):
            found = server.get("/get-by-name", params={"experiment_name": name})
            if found.status_code != httpx.codes.NOT_FOUND:
                return _brought_up_to_date(server, found.raise_for_status().json()["experiment"])
            tags = [{"key": key, "value": value} for key, value in experiment_tags().items()]
            made = server.post("/create", json={"name": name, "tags": tags})
            if made.is_success:
                return str(made.json()["experiment_id"])
        made.raise_for_status()
    return None


def _brought_up_to_date(server: httpx.Client, experiment: dict[str, Any]) -> str | None:
    if experiment["lifecycle_stage"] != "active":
        return None
    there = {tag["key"]: tag["value"] for tag in experiment.get("tags", [])}
    for key, value in tags_to_set(there).items():
        wanted = {"experiment_id": experiment["experiment_id"], "key": key, "value": value}
        server.post("/set-experiment-tag", json=wanted).raise_for_status()
    return str(experiment["experiment_id"])


Report = Callable[[str, str], None]
"""Receives (kind, text) while the stack starts; kinds: note, part, ready."""

_log = logging.getLogger(__name__)

_LOG_TAIL_LINES = 15
_LOOK_EVERY_S = 0.25
_FINDINGS_KEPT = 50
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
    os.umask(0o077)  # database, logs and sockets are this user's alone, whichever part makes them
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
        self._runs: dict[str, PartRun] = {}
        self._started, self._started_at = time.monotonic(), datetime.now(UTC)
        self._where = _choose_ports(files, report)
        self._findings: list[StackFinding] = []
        self._unrecorded = False
        self._state = StackState(
            stack_id=uuid.uuid4().hex,
            phase="starting",
            api_url=self._where.api_url,
            mlflow_url=self._where.mlflow_url,
            ablations_url=mlflow_links.of_ablations(self._mlflow_for_people, None),
            broker_url=files.broker_url,
            broker_port=self._where.broker_port,
            supervisor_pid=os.getpid(),
            started_at=self._started_at.isoformat(timespec="seconds"),
        )
        self._record()

    def start(self) -> None:
        """Start all parts; MLflow, the slowest, gets ready beside the others."""
        broker.configure(self._files, host=self._where.host, port=self._where.broker_port)
        parts = all_parts(self._where, node_is_ready=self._node_is_ready)
        for part in parts:
            self._launch(part)
            if part.name not in (MLFLOW, BACKGROUND):
                self._wait(part)
        for part in parts:
            if part.name in (MLFLOW, BACKGROUND):
                self._wait(part)
        self._record(phase="ready", ablations_url=self._ablations_url())
        self._report("ready", f"{time.monotonic() - self._started:.1f}")

    @property
    def _mlflow_for_people(self) -> str:
        return get_settings().mlflow_public_url or self._where.mlflow_url

    def _ablations_url(self) -> str:
        """Return where MLflow lists the ablations; where it cannot tell now, its list of experiments."""
        try:
            experiment_id = make_experiment(self._where.mlflow_url, get_settings().mlflow_experiment)
        except httpx.HTTPError as error:
            self._report("note", f"MLflow does not tell where ablations are listed: {error}")
            experiment_id = None
        return mlflow_links.of_ablations(self._mlflow_for_people, experiment_id)

    def watch(self) -> None:
        """Keep the parts running, for ever."""
        while True:
            for run in self._runs.values():
                run.look()
            if self._as_it_is() != self._state or self._unrecorded:
                self._record()
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """End the worker first, then the rest, then whatever carries the mark; leave no runtime file."""
        self._record(phase="stopping")
        worker = [run.process for name, run in self._runs.items() if name == WORKER]
        part_processes.end(worker, patience_s=_WORKER_PATIENCE_S, number=signal.SIGINT)
        part_processes.end([run.process for run in reversed(self._runs.values())], patience_s=_PARTS_PATIENCE_S)
        killed = part_processes.kill_members(self._state.stack_id)
        _log.info("ended; %d processes had to be killed", killed)
        self._files.remove_runtime()

    def _launch(self, part: StackPart) -> None:
        pause_s = get_settings().restart_pause_s
        run = PartRun(part, self._files, stack_id=self._state.stack_id, pause_s=pause_s, tell=self._found)
        run.start()
        self._runs[part.name] = run
        self._record()

    def _wait(self, part: StackPart) -> None:
        run, deadline = self._runs[part.name], time.monotonic() + part.patience_s
        while not part.answers():
            code = run.process.poll()
            if code is not None:
                raise PartFailed(part.name, f"ended with exit code {code} while it started", self._log_tail(part.name))
            if time.monotonic() > deadline:
                raise PartFailed(part.name, f"did not answer within {part.patience_s:.0f} s", self._log_tail(part.name))
            time.sleep(0.1)
        if not run.owns_port():
            what = f"cannot have port {part.port}: another process took it after it was found free; start again"
            raise PartFailed(part.name, what, self._log_tail(part.name))
        run.confirm()
        self._report("part", f"{part.name} {time.monotonic() - self._started:.1f}")

    def _node_is_ready(self) -> bool:
        """Tell whether the worker registered or spoke after its process started."""
        if not is_ok(self._where.api_url, "/healthz"):  # it waits less long for an API that is stopped than a client
            return False
        token = (self._files.home / "tokens" / "admin").read_text().strip()
        began = self._runs[WORKER].started_at
        with Client(self._where.api_url, token) as client:
            try:
                return any(datetime.fromisoformat(node.seen_at) >= began for node in client.nodes())
            except ClientError:
                return False

    def _found(self, part: str, what: str, then: str) -> None:
        _log.error("%s %s; %s", part, what, then)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._findings = [*self._findings, StackFinding(part=part, at=at, what=what, then=then)][-_FINDINGS_KEPT:]

    def _log_tail(self, name: str) -> str:
        lines = self._files.log(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _as_it_is(self) -> StackState:
        return self._state.model_copy(
            update={
                "pids": {name: run.pid for name, run in self._runs.items()},
                "parts": {name: run.state for name, run in self._runs.items()},
                "findings": tuple(self._findings),
            }
        )

    def _record(self, **changes: object) -> None:
        """Write stack.json; where that fails (a full disk), it is tried again, and the stack goes on."""
        self._state = self._as_it_is().model_copy(update=changes)
        try:
            write_state(self._files, self._state)
        except OSError as error:
            if not self._unrecorded:
                _log.error("%s cannot be written: %s", self._files.state, error)
            self._unrecorded = True
        else:
            self._unrecorded = False


def _choose_ports(files: StackFiles, report: Report) -> Addresses:
    settings = get_settings()
    wanted, host = settings.port, settings.host
    api = free_port(wanted, host=host)
    mlflow = free_port(wanted + 1, taken=frozenset({api}))
    chosen = [("API", wanted, api), ("MLflow", wanted + 1, mlflow)]
    broker_port = None
    if not settings.is_loopback:
        broker_port = free_port(wanted + 2, taken=frozenset({api, mlflow}), host=host)
        chosen.append(("broker", wanted + 2, broker_port))
    for name, asked, got in chosen:
        if got != asked:
            report("note", f"port {asked} is taken; {name} uses {got}")
    return Addresses(files=files, api_port=api, mlflow_port=mlflow, host=host, broker_port=broker_port)


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
