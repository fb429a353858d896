"""`python -m tests.bench.projectors`: 1, 2 and 3 background processes write ablations into one real MLflow server.

Every round has a fresh experiment and writes the same finished ablations; what it shows is compared, run by run, with
what one process alone wrote. In the last round one of three processes is killed in the middle. Projected ablations per
second are those of this machine; processor seconds of the processes and of MLflow's server say what they would be on
another.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import func, select, update

from service.background.outbox_handlers import OutboxHandlers
from service.lifecycle import OutboxKind
from service.store import outbox, projections
from service.store.blocks.completion import NOT_SHOWN
from service.store.session import Store
from service.store.tables import ablations
from service.store.tables import outbox as outbox_table
from tests import mlflow_server
from tests.api_stack import Api, database_url, running_api
from tests.bench.mlflow_shown import shown
from tests.bench.processes import say
from tests.stopping import leave_when_told

WARM_UP = 3
"""Ablations that are written before the clock runs: a process imports MLflow's client with its first."""
PATIENCE_S = 900.0
LEASE_S = 5


@dataclass(frozen=True)
class Place:
    """Where a round reads and writes."""

    store: Store
    home: Path
    mlflow: str


@dataclass(frozen=True)
class Round:
    """How long a round took: wall seconds, and processor seconds of all background processes and of MLflow."""

    wall_s: float
    own_s: float | None = None
    """None where a process was killed, whose seconds nobody counted."""
    mlflow_s: float | None = None

    def processor(self, count: int) -> str:
        """Return the processor seconds of one of `count` ablations, for people."""
        if self.own_s is None or self.mlflow_s is None:
            return "not counted, one was killed"
        return f"projectors {self.own_s / count:.2f}, MLflow's server {self.mlflow_s / count:.2f}"


def fill(api: Api, count: int) -> list[str]:
    """Submit, run and judge ablations; return their ids."""
    node = api.register()
    made = [api.submit()["id"] for _ in range(count)]
    api.finish(node)
    handlers = OutboxHandlers(api.store)
    while any(handlers.run_due(kind) for kind in (OutboxKind.JUDGE, OutboxKind.REPORT)):
        pass
    with api.store.write() as connection:
        connection.execute(outbox_table.delete())
    return made


@contextmanager
def backgrounds(place: Place, experiment: str, count: int) -> Iterator[list[psutil.Popen]]:
    """Run background processes until the block ends."""
    settings = {"ABLATE_HOME": str(place.home), "ABLATE_DATABASE_URL": place.store.url, "ABLATE_SENTINEL_DAYS": "0"}
    settings |= {"ABLATE_MLFLOW_URL": place.mlflow, "ABLATE_MLFLOW_EXPERIMENT": experiment}
    settings |= {"ABLATE_BROKER_URL": "memory://", "ABLATE_PROJECTOR_LEASE_S": str(LEASE_S)}
    command = [sys.executable, "-m", "service.background.main"]
    processes = []
    with (place.home / f"{experiment}.log").open("ab") as log:
        try:
            for _ in range(count):
                processes.append(psutil.Popen(command, env={**os.environ, **settings}, stderr=log))
            until(lambda: len(living(place.store)) == count or any(one.poll() is not None for one in processes))
            if any(one.poll() is not None for one in processes):
                raise RuntimeError(f"a background process ended: {Path(log.name).read_text()[-2000:]}")
            yield processes
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):  # it was killed
                    process.terminate()
            for process in processes:
                process.wait()


def living(store: Store) -> dict[str, float]:
    """Return the lags of the projectors that live."""
    with store.read() as connection:
        return projections.lags(connection)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def left(store: Store) -> int:
    """Return how many projections are asked for and not done."""
    with store.read() as connection:
        asked = select(func.count()).where(outbox_table.c.kind == OutboxKind.PROJECT)
        return int(connection.execute(asked).scalar_one())


def ask(store: Store, names: Sequence[str]) -> None:
    """Ask for projections, as a report does."""
    with store.write() as connection:
        for name in names:
            outbox.add(connection, OutboxKind.PROJECT, name)


def project(place: Place, experiment: str, names: Sequence[str], *, processes: int, kill: bool = False) -> Round:
    """Let `processes` write the ablations into an experiment; `kill` one of them when a third is done."""
    with place.store.write() as connection:
        connection.execute(update(ablations).values(**NOT_SHOWN))
    with backgrounds(place, experiment, processes) as running:
        ask(place.store, names[:WARM_UP])
        until(lambda: left(place.store) == 0)
        began, before = time.monotonic(), used(running)
        ask(place.store, names[WARM_UP:])
        if kill:
            until(lambda: left(place.store) <= 2 * len(names) // 3)
            running[0].send_signal(signal.SIGKILL)
            running[0].wait()
            until(lambda: left(place.store) == 0)
            return Round(time.monotonic() - began)
        until(lambda: left(place.store) == 0)
        wall_s, after = time.monotonic() - began, used(running)
        return Round(wall_s, after[0] - before[0], after[1] - before[1])


def used(running: Sequence[psutil.Popen]) -> tuple[float, float]:
    """Return processor seconds of the background processes, and of the other processes that this one started."""
    own = {process.pid for process in running}
    found = [0.0, 0.0]
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        found[child.pid not in own] += times.user + times.system
    return found[0], found[1]


def run(kind: str, count: int, processes: Sequence[int]) -> bool:
    """Run every round on one kind of database; return whether all of them show the same."""
    with tempfile.TemporaryDirectory(prefix="ablate-projectors-") as name:
        home = Path(name)
        (home / "mlflow").mkdir()
        url = database_url(kind, home)
        with running_api(kind, home, database_url=url) as api:
            names = fill(api, WARM_UP + count)
        with mlflow_server.running(home / "mlflow") as mlflow:
            place = Place(Store(url), home, mlflow)
            try:
                return rounds(place, kind, names, processes)
            finally:
                place.store.close()


def rounds(place: Place, kind: str, names: Sequence[str], processes: Sequence[int]) -> bool:
    """Run and compare the rounds."""
    count, same, alone = len(names) - WARM_UP, True, None
    for number, kill in [*((number, False) for number in processes), (max(processes), True)]:
        experiment = f"{kind}-{number}{'-killed' if kill else ''}"
        load = os.getloadavg()[0]
        took = project(place, experiment, names, processes=number, kill=kill)
        found = shown(place.home / "mlflow", experiment)
        alone = found if alone is None else alone
        same &= found == alone
        say(
            f"{experiment}: {count} ablations in {took.wall_s:.1f} s, {count / took.wall_s:.3f}/s; processor s an "
            f"ablation: {took.processor(count)}; load before {load:.1f}; "
            f"{len(found)} runs, {'as one alone' if found == alone else 'NOT as one alone'}"
        )
    return same


def main() -> int:
    """Run as the arguments say; return 1 where what is shown differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=12, help="ablations in every round")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 3], help="of each round, the first compared to"
    )
    parser.add_argument("--store", choices=["sqlite", "postgresql", "both"], default="both")
    given = parser.parse_args()
    leave_when_told()
    os.environ["ABLATE_CONTROL_EVERY"] = "0"  # no arm by chance
    stores = ["sqlite", "postgresql"] if given.store == "both" else [given.store]
    same = [run(store, given.count, given.processes) for store in stores]
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
