"""`python -m tests.bench.scale`: pages and submissions of one API process with 100,000 trials in its database.

First 50 users read pages and lists with pauses, 50 workers claim, beat and give back, and 50 event streams are open.
Then 8 clients submit for 20 s without a pause, and at last 50 users do so, one in ten of them large ablations, while 50
workers go on. The bars: no page, list or call has a median above 300 ms, no block is run by two workers at once, the
memory is bounded, the process accepts 100 submissions per second, and beside submissions heartbeats have a p99 and
claims a median below 1 s.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil

from ablate.service.http.openapi import JSON_EXAMPLE
from ablate.service.store.session import Store
from ablate.service.web.sessions import COOKIE
from tests.api_stack import ADMIN, WORKER, Api, database_url, nobody_url, signed
from tests.bench.plain_client import PlainClient
from tests.bench.processes import say, server
from tests.bench.streams import Streams
from tests.chaos.ledger import Ledger, settle
from tests.factories import spec_values
from tests.ports import free_port
from tests.stopping import leave_when_told
from tests.web_pages import Person

MEDIAN_MS, MEMORY_MIB, SUBMISSIONS_PER_S = 300.0, 1024, 100.0
BESIDE_SUBMISSIONS_MS = 1000.0
"""Bar of the heartbeats' p99 and the claims' median while users submit."""
ARMS_IN_LARGE, LARGE_BLOCKS = 50, 2000
FINISHED = 20
THINK_S = 5.0
"""Mean seconds from an answer to a user's next request."""
BLOCK_S = 20.0
"""Mean seconds for which a worker has a block."""
HEARTBEAT_S = 1.0
SUBMITTERS, SUBMITTING_S = 8, 20.0
SUBMITTED = {key: value for key, value in JSON_EXAMPLE.items() if key != "labels"}
LARGE_SHARE, LARGER_BLOCKS = 0.1, 20
"""Share of the users' submissions that have as many arms as the large ablation, and their blocks."""


@dataclass
class Times:
    """Latencies in milliseconds by kind of request, and the spans for which workers had each block."""

    by_verb: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self, client: PlainClient, verb: str, method: str, path: str, headers: dict[str, str], body: Any = None
    ) -> tuple[int, bytes]:
        """Send a request and store its latency; return its status and body."""
        began = time.perf_counter()
        status, answer = client.send(method, path, headers, body)
        took = 1000 * (time.perf_counter() - began)
        with self.lock:
            self.by_verb[verb].append(took)
            if status >= 400:
                self.failures.append(f"{verb}: {status} {answer[:120]!r}")
        return status, answer

    def double_claims(self) -> int:
        """Return the number of blocks that two workers had at the same time."""
        return sum(
            any(later[0] < earlier[1] for earlier, later in zip(sorted(spans), sorted(spans)[1:], strict=False))
            for spans in self.spans.values()
        )


def fill(api: Api) -> tuple[str, list[str]]:
    """Store a queued ablation of 100,000 trials and some finished, judged ones; return their ids."""
    node = api.register("filler")
    finished = []
    for _ in range(FINISHED):
        finished.append(api.submit()["id"])
        api.finish(node)
    settle(api.store, Ledger())
    large = api.submit(**large_changes(LARGE_BLOCKS))
    assert large["plan"]["trials"] == ARMS_IN_LARGE * LARGE_BLOCKS
    return large["id"], finished


def large_changes(blocks: int) -> dict[str, Any]:
    """Return the changes that make the tests' spec the large one."""
    variants = {f"v{n}": {"gates": gates} for n, gates in zip(range(ARMS_IN_LARGE - 1), _gates(), strict=False)}
    return {"variants": variants, "design": {"seeds": [1], "blocks": {"count": blocks}}}


def _gates() -> list[dict[str, Any]]:
    sizes, rows = (8, 32, 64, 128, 256), (2, 4, 8, 16, 32)  # a loss in chunks needs two rows of tokens or more
    return [
        {"chunk_size": size, "loss": loss, "micro_batch": row}
        for size in sizes
        for loss in ("dense", "chunked")
        for row in rows
    ]


def read(api: Api, times: Times, pages: Sequence[tuple[str, str]], cookie: str, until: float) -> None:
    """Be one user: read this and that, with pauses."""
    chance = random.Random()  # noqa: S311 - which page comes next is no secret
    headers = {**api.admin, "Cookie": cookie, "Accept-Encoding": "gzip"}
    with PlainClient(port_of(api)) as client:
        while (pause_s := chance.uniform(0, 2 * THINK_S)) < until - time.monotonic():
            time.sleep(pause_s)
            verb, path = chance.choice(pages)
            times.ask(client, verb, "GET", path, headers)


def pages_of(large: str, finished: Sequence[str]) -> list[tuple[str, str]]:
    """Return every HTML page and list by name, of the large ablation and of a finished one."""
    done = finished[0]
    return [
        ("page: overview", "/"),
        ("page: overview, live part", "/live"),
        ("page: large ablation", f"/a/{large}"),
        ("page: large ablation, live part", f"/a/{large}/live"),
        ("page: finished ablation", f"/a/{done}"),
        ("page: history", "/history/hybrid-tiny/psiv_cache"),
        ("list: ablations", "/v1/ablations?limit=50"),
        ("list: blocks", f"/v1/ablations/{large}/blocks?limit=100"),
        ("list: trials", f"/v1/ablations/{large}/trials?limit=100"),
        ("list: nodes", "/v1/nodes"),
        ("list: calibrations", "/v1/calibrations"),
        ("show: large ablation", f"/v1/ablations/{large}"),
        ("show: verdict", f"/v1/ablations/{done}/verdict"),
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
            block_s = random.uniform(0, 2 * BLOCK_S)  # noqa: S311 - blocks do not end together
            while time.monotonic() - began < block_s and time.monotonic() < until:
                time.sleep(HEARTBEAT_S)
                times.ask(client, "heartbeat", "POST", f"{path}:heartbeat", headers, token)
            times.spans[block["block_id"]].append((began, time.monotonic()))
            body = {**token, "failure_class": "preempted", "message": "the bench goes on"}
            times.ask(client, "report", "POST", f"{path}:report", headers, signed(block, body))


def submit(api: Api, times: Times, until: float, large_share: float = 0.0) -> None:
    """Submit one ablation after another, some of them large."""
    chance = random.Random()  # noqa: S311 - which one is large is no secret
    large = spec_values(**large_changes(LARGER_BLOCKS))
    with PlainClient(port_of(api)) as client:
        while time.monotonic() < until:
            headers = {**api.admin, "Idempotency-Key": uuid4().hex}
            verb, spec = ("submit: large", large) if chance.random() < large_share else ("submit", SUBMITTED)
            times.ask(client, verb, "POST", "/v1/ablations", headers, spec)


@contextmanager
def served(kind: str) -> Iterator[tuple[Api, psutil.Process]]:
    """Run one API process on a fresh database; yield its client and the process."""
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
        command = [sys.executable, "-m", "ablate.service.app"]
        process = stack.enter_context(server(command, port, environment=environment, ready="/healthz"))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        base = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=base, trust_env=False, timeout=60, limits=limits))
        client.headers.update({"Authorization": f"Bearer {ADMIN}"})
        store = Store(url)
        stack.callback(store.close)
        yield Api(client, store), psutil.Process(process.pid)


def in_threads(calls: Sequence[tuple[Any, ...]], process: psutil.Process) -> int:
    """Run every (function, *arguments) in a thread of its own; return the peak memory of `process` in bytes."""
    threads = [threading.Thread(target=call, args=arguments, daemon=True) for call, *arguments in calls]
    for thread in threads:
        thread.start()
    peak = 0
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.2)
    return peak


def run(kind: str, *, users: int, workers: int, streams: int, seconds: float) -> bool:
    """Fill a database, load one API process and print the numbers; return whether every bar is met."""
    with served(kind) as (api, process):
        began = time.monotonic()
        large, finished = fill(api)
        say(f"{kind}: {ARMS_IN_LARGE * LARGE_BLOCKS:,} trials are stored after {time.monotonic() - began:.0f} s")
        times, pages = Times(), pages_of(large, finished)
        cookies = [f"{COOKIE}={Person.signed_in(api).secret}" for _ in range(users)]
        until = time.monotonic() + seconds
        with Streams(port_of(api), ADMIN, [large] * streams) as watched:
            calls: list[tuple[Any, ...]] = [(read, api, times, pages, cookie, until) for cookie in cookies]
            calls += [(work, api, times, f"w{n}", until) for n in range(workers)]
            peak = in_threads(calls, process)
            say(f"{kind}: {watched.open} streams open, {watched.events} events")
        submissions, began = Times(), time.monotonic()
        peak = max(peak, in_threads([(submit, api, submissions, began + SUBMITTING_S)] * SUBMITTERS, process))
        rate = len(submissions.by_verb["submit"]) / (time.monotonic() - began)
        beside, until = Times(), time.monotonic() + seconds
        calls = [(submit, api, beside, until, LARGE_SHARE)] * users
        peak = max(peak, in_threads([*calls, *((work, api, beside, f"w{n}", until) for n in range(workers))], process))
    has_medians = [_medians_are_good(kind, one) for one in (times, submissions)]
    has_medians.append(_workers_come_first(kind, beside))
    failures, peak_mib = [*times.failures, *submissions.failures, *beside.failures], peak / 2**20
    doubles = times.double_claims() + beside.double_claims()
    say(f"{kind}: {rate:.0f} submissions per second; peak memory {peak_mib:.0f} MiB")
    say(f"{kind}: {len(times.spans)} blocks claimed, {doubles} by two workers at once; failures {failures[:5]}")
    is_met = all(has_medians) and rate >= SUBMISSIONS_PER_S and not (failures or doubles) and peak_mib < MEMORY_MIB
    bars = f"median {MEDIAN_MS:.0f} ms, {SUBMISSIONS_PER_S:.0f} submissions/s, {MEMORY_MIB} MiB"
    say(f"{kind}: {bars}: {'met' if is_met else 'MISSED'}")
    return is_met


def _medians_are_good(kind: str, times: Times) -> bool:
    return max(median for median, _ in _quantiles(f"{kind} ", times).values()) <= MEDIAN_MS


def _workers_come_first(kind: str, times: Times) -> bool:
    quantiles = _quantiles(f"{kind} beside submissions, ", times)
    return max(quantiles["heartbeat"][1], quantiles["claim"][0]) <= BESIDE_SUBMISSIONS_MS


def _quantiles(title: str, times: Times) -> dict[str, tuple[float, float]]:
    """Print and return the median and the p99 of each kind of request, in milliseconds."""
    quantiles = {}
    for verb, latencies in sorted(times.by_verb.items()):
        latencies.sort()
        median, late, worst = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))], latencies[-1]
        quantiles[verb] = median, late
        say(f"{title}{verb}: {len(latencies)} times, ms: median {median:.1f}, p99 {late:.1f}, worst {worst:.1f}")
    return quantiles


def main() -> int:
    """Run as the arguments say; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    leave_when_told()
    is_met = run(
        options.store,
        users=options.users,
        workers=options.workers,
        streams=options.streams,
        seconds=options.seconds,
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
