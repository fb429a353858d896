"""An ablation on a fleet of a real Slurm while jobs are cancelled, warned, requeued and killed; then the books."""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from sqlalchemy import func, select

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import attempts, blocks, nodes, receipts, trials
from tests.api_stack import ADMIN, Api, served_api
from tests.cli import PROGRAM
from tests.fleet import cluster as slurm
from tests.fleet.cluster import Cluster
from tests.integration.worker_service import corpus, processes_of
from tests.waiting import until

TROUBLES = ("scancel", "warn", "requeue", "kill", *["scancel"] * 6)
"""In turn: SIGTERM to the whole job, the early signal, Slurm's requeue, and SIGKILL to every process of the worker."""
PAUSE_S = 3.0
"""Mean time between two troubles."""
_OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}


@dataclass
class Books:
    """What an ablation on the fleet came to."""

    blocks: int
    states: Counter[str] = field(default_factory=Counter)
    """Of the blocks."""
    attempts: Counter[str] = field(default_factory=Counter)
    """By state, and by failure class of those that broke."""
    receipts_of_trial: Counter[int] = field(default_factory=Counter)
    """Number of receipts that count -> trials."""
    most_jobs: int = 0
    """At one moment."""
    jobs_left: list[str] = field(default_factory=list)
    nodes_left: int = 0
    waiting: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    """Of the time of all workers since their registration: in attempts that count, in others, and without a block."""
    orphans: int = 0
    """Processes of workers after their jobs."""
    troubles: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def wrong(self) -> list[str]:
        """Return what must not be."""
        checks = {
            "a block did not end": self.states == {"done": self.blocks},
            "a block has no or two attempts that count": self.attempts["done"] == self.blocks,
            "a trial has no or two receipts": set(self.receipts_of_trial) == {1},
            "the queue is not empty": self.waiting == 0,
            "a job is left": not self.jobs_left,
            "a process is left": self.orphans == 0,
            "more nodes are left than workers were killed": self.nodes_left <= self.troubles["kill"],
        }
        return [what for what, is_right in checks.items() if not is_right]


def run(folder: Path, *, num_nodes: int, num_blocks: int, troubles: int, seed: int = 1) -> Books:
    """Run an ablation of `num_blocks` blocks on a cluster, with so many troubles of `TROUBLES` in turn."""
    books, began = Books(num_blocks), time.monotonic()
    with (
        slurm.running(folder, nodes=num_nodes, job_age_s=10) as cluster,
        served_api("sqlite", folder / "service", lease_s=15.0) as api,
    ):
        made = api.submit(
            workload__overrides={**_OVERRIDES, "corpus": str(corpus(folder / "corpus"))},
            workload__steps={"warmup": 1, "warmup_s": 0, "timed": 10, "val_rows": 2},
            variants={"psiv-on": {"gates": {"psiv_cache": True}}},
            design={"seeds": [1], "blocks": {"count": num_blocks}, "order_seed": 7},
            verdict__primary={"metric": "peak_allocated_gib", "margin": "1%"},
            limits={"device_minutes": 100_000, "trial": "10m"},
        )
        reconciler, drawn = Reconciler(api.store), random.Random(seed)  # noqa: S311 - the same seed draws the same troubles
        with _fleet(cluster, api, most=num_nodes):
            while _unfinished(api):
                reconciler.tick()
                books.most_jobs = max(books.most_jobs, len(cluster.jobs("RUNNING", "PENDING")))
                busy = cluster.jobs("RUNNING") if sum(books.troubles.values()) < troubles else []
                if busy and _works(api):
                    kind = TROUBLES[sum(books.troubles.values()) % len(TROUBLES)]
                    _trouble(cluster, drawn.choice(busy), kind)
                    books.troubles[kind] += 1
                time.sleep(drawn.uniform(0.5, 2 * PAUSE_S))
            until(lambda: not cluster.jobs(), what="the end of idle workers", pause_s=0.5)
        _count(books, api, cluster)
        handlers = OutboxHandlers(api.store)
        while handlers.run_due(OutboxKind.JUDGE):
            pass
        assert api.get(f"{made['links']['self']}/verdict").status_code == 200
    books.seconds = time.monotonic() - began
    return books


@contextmanager
def _fleet(cluster: Cluster, api: Api, *, most: int) -> Iterator[None]:
    """Run `ablate fleet slurm` as an operator does."""
    answer = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "cpu", "uses": 10_000})
    token = cluster.folder / "token"
    token.write_text(answer.json()["secret"])
    options = ["--max", most, "--work", "30s", "--time", "3h", "--signal", "2m", "--idle", "5s", "--every", "1s"]
    options += ["--logs", cluster.folder, "--set", "ABLATE_QUIET_S=0", "--set", "ABLATE_POLL_S=0.5"]
    options += ["--set", "ABLATE_DEVICE_LOCKS=home", "--set", f"ABLATE_CORPUS_DIRS={cluster.folder}"]
    command = [PROGRAM, "fleet", "slurm", "cpu", "--token-file", token, *options]
    variables = {**cluster.environment, "ABLATE_URL": str(api.client.base_url).rstrip("/"), "ABLATE_TOKEN": ADMIN}
    variables |= {"TMPDIR": str(cluster.folder / "tmp")}
    (cluster.folder / "tmp").mkdir()
    with (cluster.folder / "fleet.out").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), env=variables, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _unfinished(api: Api) -> int:
    with api.store.read() as connection:
        query = select(func.count()).where(blocks.c.state.in_(["queued", "running"]))
        return int(connection.execute(query).scalar_one())


def _works(api: Api) -> bool:
    """Return whether a block runs: troubles of idle workers prove little."""
    with api.store.read() as connection:
        return bool(connection.execute(select(func.count()).where(blocks.c.state == "running")).scalar_one())


def _trouble(cluster: Cluster, job: str, kind: str) -> None:
    if kind == "scancel":
        cluster.run("scancel", job)
    elif kind == "warn":
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    elif kind == "requeue":
        cluster.run("scontrol", "requeue", job)
    else:
        for process in _processes_of(job):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _processes_of(job: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") == job:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _count(books: Books, api: Api, cluster: Cluster) -> None:
    with api.store.read() as connection:
        rows = connection.execute(select(blocks.c.state, func.count()).group_by(blocks.c.state))
        books.states = Counter(dict(rows.all()))
        for state, failure, number in connection.execute(
            select(attempts.c.state, attempts.c.failure_class, func.count()).group_by(
                attempts.c.state, attempts.c.failure_class
            )
        ):
            books.attempts[state if failure is None else f"{state}, {failure}"] += number
        took = func.sum(attempts.c.ended_at - attempts.c.started_at)
        by_state = connection.execute(select(attempts.c.state == "done", took).group_by(attempts.c.state == "done"))
        seconds = {("counted" if is_done else "in vain"): total for is_done, total in by_state}
        there = func.sum(func.coalesce(nodes.c.left_at, nodes.c.seen_at) - nodes.c.registered_at)
        whole = connection.execute(select(there)).scalar_one()
        seconds["idle"] = whole - sum(seconds.values())
        books.shares = {name: round(one / whole, 4) for name, one in seconds.items()}
        counted = select(func.count(receipts.c.digest)).select_from(trials)
        counted = counted.outerjoin(blocks, blocks.c.id == trials.c.block_id)
        own = (receipts.c.trial_id == trials.c.id) & (receipts.c.attempt_id == blocks.c.attempt_id)
        for number in connection.execute(counted.outerjoin(receipts, own).group_by(trials.c.id)).scalars():
            books.receipts_of_trial[number] += 1
    books.waiting = len(api.get("/v1/waiting").json()["items"])
    books.jobs_left = cluster.jobs()
    books.nodes_left = len(api.get("/v1/nodes").json()["items"])
    books.orphans = sum(len(processes_of(home)) for home in (cluster.folder / "tmp").iterdir())
