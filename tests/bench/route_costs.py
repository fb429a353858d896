"""`python -m tests.bench.route_costs`: what one call of each route of the scale bench costs, one call at a time.

The API runs in a thread of this process, on the database and with the held blocks of the scale bench. Processor time
does not count who waits for whom, so that two states of the code can be compared on a machine that others use.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from sqlalchemy import event, text

from service.store.session import Store
from tests.api_stack import ADMIN, Api, served_api
from tests.bench import machine
from tests.bench.api import say
from tests.bench.costs import used_s
from tests.bench.plain_http import PlainClient
from tests.bench.scale import fill, pages_of, port_of
from tests.bench.streams import Streams
from tests.stopping import leave_when_told

WORKERS = 50
TOLD_S = 1.5
"""All open streams are told of news within this time."""
_TURNS = 5


@dataclass
class Cost:
    """What calls of one kind cost in all."""

    calls: int = 0
    api_s: float = 0.0
    database_s: float = 0.0
    statements: int = 0

    def __str__(self) -> str:
        api_ms, database_ms = (1000 * spent / self.calls for spent in (self.api_s, self.database_s))
        return f"API {api_ms:.2f} ms, database {database_ms:.2f} ms, {self.statements / self.calls:.1f} statements"


class Meter:
    """Measures what the threads of the API and its sessions of the database do during a call."""

    def __init__(self, store: Store) -> None:
        self.found: dict[str, Cost] = {}
        self._statements = 0
        self._sessions = _sessions(store)
        for engine in {store.writer} if self._sessions else {store.writer, store.reader}:
            event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, *_: Any) -> None:
        self._statements += 1

    @contextmanager
    def call(self, name: str, *, calls: int = 1) -> Iterator[None]:
        """Add what happens meanwhile outside of this thread."""
        before = self._read()
        yield
        api_s, database_s, statements = (now - then for now, then in zip(self._read(), before, strict=True))
        cost = self.found.setdefault(name, Cost())
        cost.calls += calls
        cost.api_s += api_s
        cost.database_s += database_s
        cost.statements += int(statements)

    def take(self) -> dict[str, Cost]:
        """Return what was measured since the last time."""
        found, self.found = self.found, {}
        return found

    def _read(self) -> tuple[float, float, int]:
        return time.process_time() - time.thread_time(), sum(map(used_s, self._sessions)), self._statements


def _sessions(store: Store) -> list[int]:
    """Return the processes of PostgreSQL that serve this database."""
    if store.writer.dialect.name != "postgresql":
        return []
    store.warm()
    with store.read() as connection:
        query = text("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        return list(connection.execute(query).scalars())


@dataclass
class Fleet:
    """Workers that hold a block each."""

    api: Api
    client: PlainClient
    nodes: dict[str, str]
    held: dict[str, Any] = field(default_factory=dict)

    def claim(self, name: str) -> None:
        """Give the worker a block."""
        body = {"node_id": self.nodes[name]}
        status, answer = self.client.send("POST", "/v1/blocks:claim", self.api.worker_of(name), body)
        assert status == 200, answer
        self.held[name] = json.loads(answer)

    def tell(self, name: str, verb: str, **more: str) -> None:
        """Send what is about the block that the worker holds."""
        block = self.held[name]
        path, body = f"/v1/attempts/{block['attempt_id']}:{verb}", {"token": block["token"], **more}
        status, answer = self.client.send("POST", path, self.api.worker_of(name), body)
        assert status == 200, answer

    def release(self, name: str) -> None:
        """Give the worker's block back."""
        self.tell(name, "release", failure_class="preempted", message="the bench goes on")


def measure(kind: str, folder: Path, *, calls: int, streams: int) -> Iterator[dict[str, Cost]]:
    """Fill a database and measure about `calls` of each kind; then what streams cost."""
    with ExitStack() as stack:
        api = stack.enter_context(served_api(kind, folder, broker_url="memory://", control_every=0))
        large, finished = fill(api)
        client = stack.enter_context(PlainClient(port_of(api)))
        fleet = Fleet(api, client, {f"w{n}": api.register(f"w{n}") for n in range(WORKERS)})
        for name in fleet.nodes:
            fleet.claim(name)
        meter = Meter(api.store)
        for verb, path in pages_of(large, finished):
            kind = "show finished" if verb == "show" and large not in path else verb
            for _ in range(max(1, calls // len(finished))):
                with meter.call(kind):
                    assert client.send("GET", path, api.admin)[0] == 200
        for name in islice(cycle(fleet.nodes), calls):
            with meter.call("heartbeat"):
                fleet.tell(name, "heartbeat")
            with meter.call("release"):
                fleet.release(name)
            with meter.call("claim"):
                fleet.claim(name)
        yield meter.take()
        watch(fleet, meter, stack.enter_context(closing(Streams(port_of(api), ADMIN, [large] * streams))))
        yield meter.take()


def watch(fleet: Fleet, meter: Meter, watched: Streams) -> None:
    """Measure what streams cost while nothing happens, and when all of them are told of a release and a claim."""
    for turn, name in enumerate(islice(cycle(fleet.nodes), 2 * _TURNS)):
        read_for(watched, TOLD_S)
        kind = "told" if turn % 2 else "idle"
        with meter.call(f"{TOLD_S:g} s of {watched.open} streams, {kind}"):
            if kind == "told":
                with PlainClient(port_of(fleet.api)) as fleet.client:  # nobody keeps a connection that is silent
                    fleet.release(name)
                    fleet.claim(name)
            read_for(watched, TOLD_S)
    assert watched.events >= watched.open * _TURNS * 2


def read_for(streams: Streams, seconds: float) -> None:
    """Read what comes in this time."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        streams.read(patience_s=left)


def main() -> int:
    """Print the costs on the machine as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--streams", type=int, default=500)
    given = parser.parse_args()
    leave_when_told()
    say(f"machine: {machine.speed()}")
    with tempfile.TemporaryDirectory(prefix="ablate-costs-") as folder:
        for found in measure(given.store, Path(folder), calls=given.calls, streams=given.streams):
            for name, cost in found.items():
                say(f"{given.store} {name}: {cost}")
    say(f"machine: {machine.speed()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
