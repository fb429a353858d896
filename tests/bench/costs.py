"""What one call of a worker costs a real API process, on a database with a long queue."""

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import insert, select

from experiments.ids import new_ids
from experiments.reporting.mlflow.sink import Sink
from service.background.outbox_handlers import OutboxHandlers
from service.lifecycle import OutboxKind
from service.store.ablations import results
from service.store.session import Store
from service.store.tables import ablations, blocks, trials
from tests import mlflow_server
from tests.api_stack import ADMIN, WORKER, Api, database_url, nobody_url, receipts_of
from tests.bench.processes import server
from tests.ports import free_port

CALLS = ("claim", "heartbeat", "report", "poll")
_SETTLED = 5
_ROWS = 5000


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Processor milliseconds by call, of the API and of the database's own processes, and what follows a block."""

    api_ms: dict[str, float]
    database_ms: dict[str, float]
    """0 where the database is part of the API's process."""
    settle_s: float
    """Verdict and report of one ablation, wall time."""
    project_s: float
    """Its projection into a real MLflow server, wall time."""
    block_bytes: float
    """Growth of the database by one reported block."""


def measure(kind: str, folder: Path, *, queued: int, calls: int) -> Costs:
    """Queue `queued` ablations and measure `calls` of each kind of call."""
    with ExitStack() as stack:
        url, port = database_url(kind, folder), free_port()
        environment = {
            "ABLATE_HOME": str(folder),
            "ABLATE_PORT": str(port),
            "ABLATE_DATABASE_URL": url,
            "ABLATE_ADMIN_TOKEN": ADMIN,
            "ABLATE_WORKER_TOKEN": WORKER,
            "ABLATE_BROKER_URL": "memory://",
            "ABLATE_MLFLOW_URL": nobody_url(),
            "ABLATE_CONTROL_EVERY": "0",
        }
        run = [sys.executable, "-m", "service.app"]
        process = stack.enter_context(server(run, port, environment=environment, ready="/healthz"))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60))
        store = Store(url)
        stack.callback(store.close)
        api = Api(client, store)
        first = api.submit()["id"]
        copies(store, first, queued - 1)
        meter = Meter(process.pid)
        node, names = api.register("meter"), itertools.count()
        idle = api.register("idle", "h200")
        before = size_of(store)
        found = dict.fromkeys(CALLS, (0.0, 0.0))
        for _ in range(calls):
            block = meter.of(found, "claim", lambda: api.claim(node))
            assert block is not None, "the queue is shorter than the measurement"
            step = {"trial_id": block["trials"][0]["trial_id"], "steps_done": next(names) % 9, "steps_total": 9}
            meter.of(
                found, "heartbeat", lambda block=block, step=step: api.attempt(block, "heartbeat", progress=[step])
            )
            body = receipts_of(block, node)
            meter.of(found, "report", lambda block=block, body=body: api.attempt(block, "report", receipts=body))
            meter.of(found, "poll", lambda: api.claim(idle))
        grown = (size_of(store) - before) / calls
        finish(api, node)
        settle_s, project_s = follow_up(store, folder, stack)
        return Costs(
            api_ms={call: 1000 * own / calls for call, (own, _) in found.items()},
            database_ms={call: 1000 * theirs / calls for call, (_, theirs) in found.items()},
            settle_s=settle_s,
            project_s=project_s,
            block_bytes=grown,
        )


class Meter:
    """Reads how much processor time the API and PostgreSQL have used."""

    def __init__(self, api_pid: int) -> None:
        self._api = psutil.Process(api_pid)

    def of(self, found: dict[str, tuple[float, float]], call: str, send: Callable[[], Any]) -> Any:
        """Send a call and add what it cost to `found`."""
        before = self._read()
        answer = send()
        after = self._read()
        found[call] = found[call][0] + after[0] - before[0], found[call][1] + after[1] - before[1]
        return answer

    def _read(self) -> tuple[float, float]:
        return used_s(self._api.pid), sum(used_s(pid) for pid in self._sessions())

    def _sessions(self) -> list[int]:
        """Return the PostgreSQL processes that serve connections: all of this user's tests share one server."""
        return [p.pid for p in psutil.process_iter(["name"]) if p.info["name"] == "postgres"]


def used_s(pid: int) -> float:
    """Return processor seconds to the nanosecond, which psutil's clock ticks do not give; 0 for the gone."""
    try:
        return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    except OSError:
        return 0.0


def copies(store: Store, ablation: str, times: int) -> list[str]:
    """Store `times` copies of a queued ablation, straight into the tables; return their ids."""
    with store.read() as connection:
        rows = {
            table: [dict(row._mapping) for row in connection.execute(select(table).where(where))]
            for table, where in (
                (ablations, ablations.c.id == ablation),
                (blocks, blocks.c.ablation_id == ablation),
                (trials, trials.c.ablation_id == ablation),
            )
        }
    fresh = new_ids("abl", times)
    with store.write() as connection:
        for table, templates in rows.items():
            made = [_copy(row, table.name, name) for name in fresh for row in templates]
            for start in range(0, len(made), _ROWS):
                connection.execute(insert(table), made[start : start + _ROWS])
    return fresh


def _copy(row: dict[str, Any], table: str, ablation: str) -> dict[str, Any]:
    """Return a row under other ids, which end as the ablation's does."""
    tail = ablation[-26:]
    if table == "ablations":
        return {**row, "id": ablation}
    number = row["index"] if table == "blocks" else row["block_index"]
    block = f"blk_{number:04d}{tail[4:]}"
    if table == "blocks":
        return {**row, "id": block, "ablation_id": ablation}
    trial = f"trl_{number:04d}{row['position']:02d}{tail[6:]}"
    return {**row, "id": trial, "block_id": block, "ablation_id": ablation}


def finish(api: Api, node: str) -> None:
    """Run some ablations to their end, before all that wait."""
    urgent = {"limits": {"priority": 100}}
    made = [api.submit(**urgent) for _ in range(_SETTLED + 1)]
    for _ in range(sum(one["plan"]["blocks"] for one in made)):
        block = api.claim(node)
        assert block is not None
        answer = api.attempt(block, "report", receipts=receipts_of(block, node, **urgent))
        assert answer.status_code == 200, answer.text


def size_of(store: Store) -> int:
    """Return the bytes of the database, its indices included."""
    with store.read() as connection:
        if connection.dialect.name == "postgresql":
            query = "SELECT pg_database_size(current_database())"
        else:
            query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        return int(connection.exec_driver_sql(query).scalar_one())


def follow_up(store: Store, folder: Path, stack: ExitStack) -> tuple[float, float]:
    """Return the mean wall seconds of verdict and report, and of the projection, of finished ablations."""
    (folder / "mlflow").mkdir()
    url = stack.enter_context(mlflow_server.running(folder / "mlflow"))
    handlers = OutboxHandlers(store)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):  # the first of each imports and draws for the first time
        handlers.run_due(kind)
    began = time.monotonic()
    for _ in range(_SETTLED):
        for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
            assert handlers.run_due(kind), "too few ablations were finished"
    settle_s = (time.monotonic() - began) / _SETTLED
    with store.read() as connection:
        done = select(ablations.c.id).where(ablations.c.report_html.is_not(None)).limit(_SETTLED)
        found = [
            (results.ablation_view(connection, name), results.read_report(connection, name))
            for name in connection.execute(done).scalars()
        ]
    sink = Sink(tracking_uri=url)
    sink.project(*found.pop())
    began = time.monotonic()
    for view, html in found:
        sink.project(view, html)
    return settle_s, (time.monotonic() - began) / len(found)
