"""A stand-in for the service's side of the worker protocol, over real HTTP, and a real worker process against it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from ablate.experiments.design import gates
from ablate.experiments.design.arms import arm_digest
from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.records.identity import ClaimedBlock, ClaimedTrial
from ablate.experiments.records.messages import PROBLEM_TYPES
from ablate.experiments.system.isolation import short_link
from ablate.model.config import DataConfig, HybridConfig, MambaConfig, StepsConfig
from ablate.workers.lease import boot_time_s
from ablate.workers.processes.lanes import FILE as LANES
from tests.waiting import LIMIT_S, until

TOKEN = "test-worker-key-of-a-worker"
IDENTITY = {"name": "node/tester", "scope": "worker", "node": "tester"}

_lanes: list[bytes] = []
"""The lane file of the first worker: code, versions and devices are the same for all."""


class Service:
    """A service that hands out `blocks` and records every call; the other fields control its answers."""

    def __init__(self, *, port: int = 0) -> None:
        self.blocks: list[ClaimedBlock] = []
        self.calls: list[tuple[str, dict[str, Any], float]] = []
        self.cancel = False
        self.stale = False
        self.forgotten = False
        """The node is unknown until it registers again."""
        self.away = False
        self._refusals, self._lock = 0, threading.Lock()
        self.lease_s = 60.0
        self._registrations = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def bodies(self, verb: str) -> list[dict[str, Any]]:
        return [body for path, body, _at in list(self.calls) if path.endswith(verb)]

    def times(self, verb: str) -> list[float]:
        return [at for path, _body, at in list(self.calls) if path.endswith(verb)]

    def steps_done(self) -> bool:
        """Whether any trial has reported a step."""
        return any(trial["steps_done"] for body in self.bodies(":heartbeat") for trial in body["progress"])

    def log_of(self, trial_id: str) -> str:
        """The log as the service would have stored it; fails on a gap."""
        text = b""
        for body in [*self.bodies(":heartbeat"), *self.bodies(":report")]:
            for chunk in body["logs"]:
                if chunk["trial_id"] != trial_id or chunk["offset"] < len(text):
                    continue
                assert chunk["offset"] == len(text)
                text += chunk["text"].encode()
        return text.decode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append((path, body, boot_time_s()))
        if self.away or (path.endswith(":report") and self._refuses_report()):
            return 503, problem("unavailable", "away")
        if path == "/v1/identity" or path.startswith("/v1/nodes/"):
            return (200, IDENTITY) if path == "/v1/identity" else self._register()
        if path == "/v1/blocks:claim":
            return self._claim(body)
        if self.stale:
            return 409, problem("stale-token", "token 1 is stale")
        if path.endswith(":heartbeat"):
            return 200, {"lease_s": self.lease_s, "cancel": self.cancel}
        return 200, {"attempt_id": path.rpartition("/")[2].partition(":")[0]}

    def _register(self) -> tuple[int, Any]:
        self._registrations += 1
        self.forgotten = False
        return 200, {"node_id": f"nod_{self._registrations}", "claim_poll_s": 5.0}

    def _claim(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.forgotten:
            return 404, problem("not-found", f"node {body['node_id']!r} is not registered")
        if not self.blocks or body["device_state"] != "ok":
            return 204, None
        return 200, self.blocks.pop(0).model_dump(mode="json")

    @property
    def reports_refused(self) -> int:
        """Number of reports to answer with 503 from now on."""
        return self._refusals

    @reports_refused.setter
    def reports_refused(self, number: int) -> None:
        with self._lock:  # a report that is refused at this moment counts down
            self._refusals = number

    def _refuses_report(self) -> bool:
        with self._lock:
            self._refusals -= 1
            return self._refusals >= 0

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    status, answer = 401, problem("unauthorized", "unknown key")
                else:
                    status, answer = service.answer(self.path, json.loads(raw or b"{}"))
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _serve

            def log_message(self, *_arguments: Any) -> None:
                return

        return Handler


def problem(kind: str, detail: str) -> dict[str, str]:
    """Return a problem document as the service writes it."""
    return {"type": PROBLEM_TYPES + kind, "title": "no", "detail": detail}


def corpus(folder: Path) -> Path:
    """Write a small corpus of distinct files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        lines = (f"int f{number}_{line}(int a) {{ return a * {line} + {number}; }}\n" for line in range(60))
        (folder / f"source_{number}.h").write_text("".join(lines))
    return folder


def built_in_arm(folder: Path, **changes: Any) -> BuiltInArm:
    """A tiny configuration. Its window has enough pauses that busy cores do not make most of them long."""
    fields: dict[str, Any] = {
        "model": HybridConfig(
            vocab_size=512, d_model=32, pattern="MFA", mamba=MambaConfig(headdim=16, d_state=16, mimo_rank=2)
        ),
        "data": DataConfig(corpus=str(folder), seq_len=32),
        "steps": StepsConfig(warmup=1, timed=12, val_rows=2, val_every=2),
        "micro_batch": 2,
        "threads": 1,
        "seed": 5,
    }
    return BuiltInArm(**{**fields, **changes})


def block(configs: list[BuiltInArm], *, attempt: str, timeout_s: float = 60.0, lease_s: float = 60.0) -> ClaimedBlock:
    """A claimed block with one arm for each configuration, all gates at their defaults but rows and devices."""
    defaults = {name: gate.default for name, gate in gates.GATES.items()}
    requested = [{**defaults, "micro_batch": configs[0].micro_batch, "devices": config.devices} for config in configs]
    trials = tuple(
        ClaimedTrial(
            trial_id=f"trl_{attempt}_{position}",
            arm=f"arm-{position}",
            role="variant" if position else "baseline",
            position=position,
            arm_digest=arm_digest(own, config),
            gates=own,
            config=config,
            timeout_s=timeout_s,
        )
        for position, (own, config) in enumerate(zip(requested, configs, strict=True))
    )
    return ClaimedBlock(
        attempt_id=f"att_{attempt}",
        token="t" * 22,
        attempt_no=1,
        lease_s=lease_s,
        heartbeat_s=0.2,
        ablation_id="abl_1",
        ablation_name="demo",
        block_id=f"blk_{attempt}",
        block_index=0,
        seed=5,
        timed=True,
        max_foreign_load=0.99,
        cold_caches=False,
        spec_digest="sha256:spec",
        rule_digest="sha256:rule",
        trials=trials,
    )


@contextmanager
def worker(
    home: Path, url: str, *, command: list[str] | None = None, reuse_lanes: bool = True, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m ablate.workers.app`; its output goes to worker.log in `home`, that of another command beside it.

    It starts with the lane file of an earlier worker, unless `reuse_lanes` is False.
    """
    variables = {
        "ABLATE_HOME": str(home),
        "ABLATE_URL": url,
        "ABLATE_WORKER_TOKEN": TOKEN,
        "ABLATE_NODE_NAME": "tester",
        "ABLATE_NODE_CLASS": "cpu",
        "ABLATE_POLL_S": "0.1",
        "ABLATE_GRACE_S": "1",
        "OMP_NUM_THREADS": "1",
        "ABLATE_CORPUS_DIRS": tempfile.gettempdir(),
    }
    if "ABLATE_ENROLMENT_TOKEN" in environment:
        del variables["ABLATE_WORKER_TOKEN"]
    home.mkdir(parents=True, exist_ok=True)
    if reuse_lanes and _lanes:
        (home / LANES).write_bytes(_lanes[0])
    path = home / "worker.log" if command is None else home.with_suffix(".log")
    with path.open("ab") as log:
        process = subprocess.Popen(
            command or [sys.executable, "-m", "ablate.workers.app"],
            env={**os.environ, **variables, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # gives a running block back at once
            process.send_signal(signal.SIGCONT)  # in case a test has stopped it
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not _lanes and (home / LANES).exists():
            _lanes.append((home / LANES).read_bytes())


def links_into(folder: Path) -> list[Path]:
    """Return the short names of trials' temporary folders below `folder`, also of those that are gone."""
    links = []
    for link in short_link(0).parent.glob("ablate-*"):
        with suppress(OSError):  # no link, or removed meanwhile
            links += [link] if link.readlink().is_relative_to(folder) else []
    return links


def processes_of(home: Path) -> dict[int, str]:
    """Living processes that were started with this state folder in their environment, by command line."""
    mark = f"ABLATE_HOME={home}".encode()
    commands = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return commands


def children_of(pid: int) -> list[psutil.Process]:
    """Children of a process; none where it has ended since it was found."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, whether or not its parent has noticed."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Rig:
    """A worker and its stand-in service."""

    def __init__(self, service: Service, home: Path, pid: int) -> None:
        self.service, self.home, self.pid = service, home, pid
        self.corpus = corpus(home / "corpus")

    def config(self, **changes: Any) -> BuiltInArm:
        return built_in_arm(self.corpus, **changes)

    def servers(self) -> list[int]:
        """Fork servers; their trainers have the same command line."""
        return self.processes("multiprocessing.forkserver")

    def trainers(self) -> list[int]:
        """Living children of the fork servers, in the order of their start."""
        children = [child for server in self.servers() for child in children_of(server) if not is_gone(child.pid)]
        return [child.pid for child in sorted(children, key=lambda child: child.create_time())]

    def processes(self, word: str) -> list[int]:
        """Processes with `word` in their command line, without trainers."""
        return [pid for pid, command in processes_of(self.home).items() if word in command and not _is_trainer(pid)]

    def fresh(self) -> None:
        """Forget the calls of earlier tests, and answer as at the start."""
        self.service.calls.clear()
        self.service.cancel = self.service.stale = self.service.away = False
        self.service.lease_s, self.service.reports_refused = 60.0, 0


def _is_trainer(pid: int) -> bool:
    try:
        return "multiprocessing.forkserver" in " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline())
    except psutil.NoSuchProcess:
        return True


@contextmanager
def rig_in(home: Path) -> Iterator[Rig]:
    """Run a worker with its stand-in service; stopped processes run again at the end."""
    service = Service()
    with worker(home, f"http://127.0.0.1:{service.port}") as process:
        until(lambda: service.bodies(":claim"))
        try:
            yield Rig(service, home, process.pid)
        finally:
            resume_all(home)
    service.close()


def resume_all(home: Path) -> None:
    """Let stopped processes run again."""
    for pid in processes_of(home):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGCONT)
