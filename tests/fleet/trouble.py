"""An ablation on a fleet of a real Slurm while jobs are cancelled, warned, requeued and killed, and nodes fail.

Its programs wait and compute nothing, so that many workers share few cores without slowing each other down.
"""

import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import func, select

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import blocks, nodes
from tests.api_stack import ADMIN, Api, served_api
from tests.cli import PROGRAM
from tests.factories import command_values
from tests.fleet import cluster as slurm
from tests.fleet.books import Books, Trouble, count
from tests.fleet.cluster import Cluster
from tests.waiting import until

TROUBLES = ("scancel", "warn", "requeue", "kill", "scancel", "down", "scancel", "warn", "scancel", "requeue")
"""In turn: SIGTERM to the whole job; the early signal; Slurm's requeue; SIGKILL to every process of the worker; and the
failure of a node: the same, and Slurm holds it for down."""
_DOWN_S = 10.0
"""A node that failed is back after this."""
_LOOK_S = 0.5
_MOST_ATTEMPTS = 6


def run(
    folder: Path, *, num_nodes: int, num_blocks: int, troubles: int, every_s: float, trial_s: float, seed: int = 1
) -> Books:
    """Run an ablation of `num_blocks` blocks on a cluster, with so many troubles of `TROUBLES` in turn.

    A trouble comes every `every_s` seconds on average. A block has trials of two arms and of a control, each of which
    waits for `trial_s`.
    """
    books, began = Books(num_blocks), time.monotonic()
    with (
        slurm.running(folder, nodes=num_nodes, job_age_s=10) as cluster,
        served_api("sqlite", folder / "service", lease_s=15.0) as api,
    ):
        answer = api.post_spec(_spec(num_blocks, trial_s))
        assert answer.status_code == 202, answer.text
        reconciler = Reconciler(api.store)
        with _fleet(cluster, api, most=num_nodes):
            trouble = _Troubles(cluster, books.log, troubles, every_s=every_s, seed=seed)
            looked = time.monotonic()
            while _number_of(api, "queued", "running"):
                reconciler.tick()
                jobs, before = cluster.jobs("RUNNING"), looked
                looked = time.monotonic()
                books.job_minutes += len(jobs) * (looked - before) / 60
                books.most_jobs = max(books.most_jobs, len(jobs) + len(cluster.jobs("PENDING")))
                if _number_of(api, "running"):  # troubles of idle workers prove little
                    spared = _tried_often(api)
                    trouble.make([job for job in jobs if f"slurm-{job}" not in spared])
                time.sleep(_LOOK_S)
            until(lambda: not cluster.jobs(), what="the end of idle workers", pause_s=0.5)
        count(books, api, cluster)
        handlers = OutboxHandlers(api.store)
        while handlers.run_due(OutboxKind.JUDGE):
            pass
        assert api.get(f"{answer.json()['links']['self']}/verdict").status_code == 200
    books.seconds = time.monotonic() - began
    return books


def _spec(num_blocks: int, trial_s: float) -> dict[str, Any]:
    wait = "import sys, time; time.sleep(float(sys.argv[1]))"
    return command_values(
        workload={"command": ["python", "-c", wait, str(trial_s)], "steps": {"warmup": 0, "timed": 1}},
        variants={"marked": {"env": {"MARK": "1"}}},
        placement={"node_class": "cpu", "max_foreign_load": "99.99%"},
        design={"seeds": [1], "blocks": {"count": num_blocks}, "order_seed": 7},
        verdict__primary={"metric": "process_s", "margin": "5%"},
        limits={"device_minutes": 100_000, "trial": f"{60 + 2 * trial_s:.0f}s"},
    )


class _Troubles:
    """Makes a number of troubles, one after another."""

    def __init__(self, cluster: Cluster, log: list[Trouble], number: int, *, every_s: float, seed: int) -> None:
        self._cluster, self._log, self._number, self._every_s = cluster, log, number, every_s
        self._drawn = random.Random(seed)  # noqa: S311 - the same seed draws the same troubles
        self._down: dict[str, float] = {}
        """When a node is back."""
        self._due = time.monotonic() + every_s

    def make(self, jobs: Sequence[str]) -> None:
        """Make the next trouble, of one of these jobs, if it is due, and bring failed nodes back."""
        now = time.monotonic()
        for node in [node for node, back in self._down.items() if back <= now]:
            del self._down[node]
            self._cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        if now < self._due or len(self._log) >= self._number or not jobs:
            return
        job, kind = self._drawn.choice(jobs), TROUBLES[len(self._log) % len(TROUBLES)]
        self._log.append(Trouble(time.time(), job, kind))
        self._due = now + self._every_s * self._drawn.uniform(0.5, 1.5)
        if kind == "down":
            node = self._cluster.node_of(job)
            self._down[node] = now + _DOWN_S
            _trouble(self._cluster, job, "kill")
            self._cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=trouble")
        else:
            _trouble(self._cluster, job, kind)


@contextmanager
def _fleet(cluster: Cluster, api: Api, *, most: int) -> Iterator[None]:
    """Run `ablate fleet slurm` as an operator does."""
    answer = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "cpu", "uses": 10_000})
    token = cluster.folder / "token"
    token.write_text(answer.json()["secret"])
    options = ["--max", most, "--work", "1s", "--time", "3h", "--signal", "2m", "--idle", "3s", "--every", "1s"]
    options += ["--logs", cluster.folder, "--set", "ABLATE_QUIET_S=0", "--set", "ABLATE_POLL_S=0.5"]
    options += ["--set", "ABLATE_DEVICE_LOCKS=home", "--set", "ABLATE_ACCEPT_CODE=true"]
    command = [PROGRAM, "fleet", "slurm", "cpu", "--token-file", token, *options]
    variables = {**cluster.environment, "ABLATE_URL": str(api.client.base_url).rstrip("/"), "ABLATE_TOKEN": ADMIN}
    variables |= {"TMPDIR": str(cluster.folder / "tmp")}
    (cluster.folder / "tmp").mkdir()
    with (cluster.folder / "fleet.out").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), env=variables, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()  # a shell may let its background processes ignore SIGINT
        process.wait()


def _tried_often(api: Api) -> set[str]:
    """Return the allocations that run a block with many attempts, which has to be left alone.

    By its rule a block fails when it was preempted ten times, or five nodes with it were lost.
    """
    with api.store.read() as connection:
        query = select(nodes.c.allocation).join(blocks, blocks.c.node_id == nodes.c.id)
        rows = connection.execute(query.where(blocks.c.state == "running", blocks.c.attempt_no >= _MOST_ATTEMPTS))
        return set(rows.scalars())


def _number_of(api: Api, *states: str) -> int:
    with api.store.read() as connection:
        query = select(func.count()).where(blocks.c.state.in_(states))
        return int(connection.execute(query).scalar_one())


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
