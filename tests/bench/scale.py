"""`python -m tests.bench.scale`: 100,000 trials in one database, 200 clients, 50 workers, 500 event streams.

One API process serves it all on this machine, beside this. People read with pauses, workers claim, beat and give
back. The bars: no reading and no claim has a median above 100 ms or takes longer than 1 s, no block is held by two
workers at once, and the memory of the API is bounded. How fast the machine itself is, is told before and after.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.store.session import Store
from tests.api_stack import ADMIN, WORKER, Api, database_url, nobody_url
from tests.bench import machine
from tests.bench.api import free_port, say, server
from tests.bench.plain_http import PlainClient
from tests.bench.streams import Streams
from tests.chaos.ledger import Ledger, settle
from tests.stopping import leave_when_told

MEDIAN_MS, WORST_MS, MEMORY_MIB = 100.0, 1000.0, 1024
ARMS_IN_LARGE, LARGE_BLOCKS = 50, 2000
FINISHED = 20
THINK_S = 5.0
"""Mean seconds from an answer to a person's next request."""
CLAIM_HELD_S = 20.0
HEARTBEAT_S = 1.0


@dataclass
class Times:
    """Latencies in milliseconds by what was asked, and who held which block from when until when."""

    by_verb: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self, client: PlainClient, verb: str, method: str, path: str, headers: dict[str, str], body: Any = None
    ) -> tuple[int, bytes]:
        """Send a request and note how long its answer took; return its status and body."""
        began = time.perf_counter()
        status, answer = client.send(method, path, headers, body)
        took = 1000 * (time.perf_counter() - began)
        with self.lock:
            self.by_verb[verb].append(took)
            if status >= 400:
                self.failures.append(f"{verb}: {status} {answer[:120]!r}")
        return status, answer

    def double_claims(self) -> int:
        """Return how many blocks two workers held at the same time."""
        return sum(
            any(later[0] < earlier[1] for earlier, later in zip(sorted(spans), sorted(spans)[1:], strict=False))
            for spans in self.held.values()
        )


def fill(api: Api) -> tuple[str, list[str]]:
    """Store one ablation of 100,000 trials that waits, and some that are finished and judged; return their ids."""
    node = api.register("filler")
    finished = []
    for _ in range(FINISHED):
        finished.append(api.submit()["id"])
        api.finish(node)
    settle(api.store, Ledger())
    large = api.submit(**large_changes())
    assert large["plan"]["trials"] == ARMS_IN_LARGE * LARGE_BLOCKS
    return large["id"], finished


def large_changes() -> dict[str, Any]:
    """Return what makes the tests' spec the large one."""
    variants = {f"v{n}": {"gates": gates} for n, gates in zip(range(ARMS_IN_LARGE - 1), _gates(), strict=False)}
    return {"variants": variants, "design": {"seeds": [1], "blocks": {"count": LARGE_BLOCKS}}}


def _gates() -> list[dict[str, Any]]:
    sizes, rows = (8, 32, 64, 128, 256), (2, 4, 8, 16, 32)  # a loss in chunks needs two rows of tokens or more
    return [
        {"chunk_size": size, "loss": loss, "micro_batch": row}
        for size in sizes
        for loss in ("dense", "chunked")
        for row in rows
    ]


def read(api: Api, times: Times, pages: Sequence[tuple[str, str]], until: float) -> None:
    """Be one person: look at this and that, with pauses."""
    chance = random.Random()  # noqa: S311 - which page comes next is no secret
    with PlainClient(port_of(api)) as client:
        while (pause_s := chance.uniform(0, 2 * THINK_S)) < until - time.monotonic():
            time.sleep(pause_s)
            verb, path = chance.choice(pages)
            times.ask(client, verb, "GET", path, api.admin)


def pages_of(large: str, finished: Sequence[str]) -> list[tuple[str, str]]:
    """Return what people look at: the list, the large ablation and finished ones, each as often."""
    return [
        *[("list", "/v1/ablations?limit=50"), ("show", f"/v1/ablations/{large}")] * len(finished),
        *[("blocks", f"/v1/ablations/{large}/blocks?limit=100")] * len(finished),
        *[("trials", f"/v1/ablations/{large}/trials?limit=100")] * len(finished),
        *(("show", f"/v1/ablations/{done}") for done in finished),
        *(("compare", f"/v1/ablations/{done}/verdict") for done in finished),
    ]


def port_of(api: Api) -> int:
    """Return the port of the API."""
    return api.client.base_url.port or 0


def work(api: Api, times: Times, node: str, until: float) -> None:
    """Be one worker: claim, beat, give back."""
    headers = api.worker_of(node)
    node_id = api.register(node)
    with PlainClient(port_of(api)) as client:
        time.sleep(random.uniform(0, HEARTBEAT_S))  # noqa: S311 - workers do not beat together
        while time.monotonic() < until:
            status, answer = times.ask(client, "claim", "POST", "/v1/blocks:claim", headers, {"node_id": node_id})
            if status != 200:
                time.sleep(HEARTBEAT_S)
                continue
            began, block = time.monotonic(), json.loads(answer)
            path, token = f"/v1/attempts/{block['attempt_id']}", {"token": block["token"]}
            held_s = random.uniform(0, 2 * CLAIM_HELD_S)  # noqa: S311 - blocks do not end together
            while time.monotonic() - began < held_s and time.monotonic() < until:
                time.sleep(HEARTBEAT_S)
                times.ask(client, "heartbeat", "POST", f"{path}:heartbeat", headers, token)
            times.held[block["block_id"]].append((began, time.monotonic()))
            body = {**token, "failure_class": "preempted", "message": "the bench goes on"}
            times.ask(client, "release", "POST", f"{path}:release", headers, body)


def run(kind: str, *, clients: int, workers: int, streams: int, seconds: float) -> bool:
    """Fill a database, load one API process and tell; return whether every bar was held."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-scale-")))
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
        command = [sys.executable, "-m", "service.app"]
        process = stack.enter_context(server(command, port, environment=environment, ready="/healthz"))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        base = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=base, trust_env=False, timeout=60, limits=limits))
        client.headers.update({"Authorization": f"Bearer {ADMIN}"})
        store = Store(url)
        stack.callback(store.close)
        api = Api(client, store)
        began = time.monotonic()
        large, finished = fill(api)
        say(f"{kind}: {ARMS_IN_LARGE * LARGE_BLOCKS:,} trials are stored after {time.monotonic() - began:.0f} s")
        memory = psutil.Process(process.pid)
        before = memory.memory_info().rss
        times, until, pages = Times(), time.monotonic() + seconds, pages_of(large, finished)
        watched = stack.enter_context(Streams(port, ADMIN, [large] * streams))
        calls = [(read, (api, times, pages, until))] * clients
        calls += [(work, (api, times, f"w{n}", until)) for n in range(workers)]
        threads = [threading.Thread(target=call, args=given, daemon=True) for call, given in calls]
        for thread in threads:
            thread.start()
        peak = before
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, memory.memory_info().rss)
            time.sleep(0.2)
        return tell(kind, times, watched, before=before, peak=peak)


def tell(kind: str, times: Times, watched: Streams, *, before: int, peak: int) -> bool:
    """Print what was found; return whether every bar was held."""
    held = True
    for verb, found in sorted(times.by_verb.items()):
        found.sort()
        median, late, worst = found[len(found) // 2], found[int(0.99 * len(found))], found[-1]
        held &= median < MEDIAN_MS and worst < WORST_MS
        say(f"{kind} {verb}: {len(found)} times, ms: median {median:.1f}, p99 {late:.1f}, worst {worst:.1f}")
    claims = sum(map(len, times.held.values()))
    mib = {"before": before / 2**20, "peak": peak / 2**20}
    say(f"{kind}: {watched.open} streams open, {watched.events} events; memory MiB {json.dumps(mib)}")
    say(f"{kind}: {claims} blocks held, {times.double_claims()} by two workers at once; failures {times.failures[:5]}")
    held &= not times.failures and not times.double_claims() and mib["peak"] < MEMORY_MIB
    say(f"{kind}: median {MEDIAN_MS:.0f} ms, worst {WORST_MS:.0f} ms, {MEMORY_MIB} MiB: {'held' if held else 'MISSED'}")
    return held


def main() -> int:
    """Run as the arguments say; return 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    leave_when_told()
    say(f"machine before: {machine.speed()}")
    held = run(given.store, clients=given.clients, workers=given.workers, streams=given.streams, seconds=given.seconds)
    say(f"machine after: {machine.speed()}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
