"""The books of an ablation on a fleet: whether each block counts once, and where the time of the workers went."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Row, func, select

from ablate.service.store.tables import attempts, blocks, nodes, receipts, trials
from tests.api_stack import Api
from tests.fleet.cluster import Cluster
from tests.integration.worker_service import processes_of

MOST_REPEATED, MOST_IDLE = 0.03, 0.01
"""Bars of a whole run, as shares of the time of all workers."""


class Trouble(NamedTuple):
    """What happened to a job."""

    at: float
    job: str
    kind: str


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
    """Of the time of all workers from their registrations to their ends: see `_shares`."""
    worker_minutes: float = 0.0
    job_minutes: float = 0.0
    """Of all jobs that ran while there was work, by looks at Slurm. The rest of them is the start of workers."""
    workers: int = 0
    orphans: int = 0
    """Processes of workers after their jobs."""
    log: list[Trouble] = field(default_factory=list, repr=False)
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
            "more nodes are left than workers were killed": self.nodes_left
            <= self.troubles["kill"] + self.troubles["down"],
        }
        return [what for what, is_right in checks.items() if not is_right]

    def missed_bars(self) -> list[str]:
        """Return the bars that a whole run has missed."""
        bars = {"repeated without a trouble": MOST_REPEATED, "idle": MOST_IDLE}
        return [
            f"{name}: {self.shares[name]:.2%} of the workers' time; the bar is {most:.0%}"
            for name, most in bars.items()
            if self.shares[name] >= most
        ]


def count(books: Books, api: Api, cluster: Cluster) -> None:
    """Fill in the books from the database, the service and the cluster."""
    with api.store.read() as connection:
        rows = connection.execute(select(blocks.c.state, func.count()).group_by(blocks.c.state))
        books.states = Counter(dict(rows.all()))
        runs = connection.execute(select(attempts).order_by(attempts.c.started_at)).all()
        there = connection.execute(select(nodes)).all()
        counted = select(func.count(receipts.c.digest)).select_from(trials)
        counted = counted.outerjoin(blocks, blocks.c.id == trials.c.block_id)
        own = (receipts.c.trial_id == trials.c.id) & (receipts.c.attempt_id == blocks.c.attempt_id)
        for number in connection.execute(counted.outerjoin(receipts, own).group_by(trials.c.id)).scalars():
            books.receipts_of_trial[number] += 1
    for run in runs:
        books.attempts[run.state if run.failure_class is None else f"{run.state}, {run.failure_class}"] += 1
    books.workers = len(there)
    seconds = _seconds(there, runs, books.log)
    whole = sum(seconds.values())
    books.worker_minutes = round(whole / 60, 1)
    books.shares = {name: round(seconds[name] / whole, 5) for name in _PARTS}
    books.troubles = Counter(trouble.kind for trouble in books.log)
    books.waiting = len(api.get("/v1/waiting").json()["items"])
    books.jobs_left = cluster.jobs()
    books.nodes_left = len(api.get("/v1/nodes").json()["items"])
    books.orphans = sum(len(processes_of(home)) for home in (cluster.folder / "tmp").iterdir())


_PARTS = ("counted", "hit by a trouble", "repeated without a trouble", "ending after a trouble", "idle")
"""The time of a worker: in attempts that count; in attempts in vain during which a trouble hit its job; in other
attempts in vain; without a block from a trouble to the worker's end; and all other time without a block, which is
before the first one, between two, and before the end of a worker that finds no more work."""


def _seconds(there: Sequence[Row[Any]], runs: Sequence[Row[Any]], log: Sequence[Trouble]) -> dict[str, float]:
    """Return the seconds of all workers by part. The time of a killed one ends with its last attempt's lease."""
    seconds = dict.fromkeys(_PARTS, 0.0)
    for node in there:
        hits = sorted(trouble.at for trouble in log if f"slurm-{trouble.job}" == node.allocation)
        own = [run for run in runs if run.node_id == node.id]
        end = max([node.left_at or node.seen_at, *(run.ended_at for run in own)])
        first_hit = next((hit for hit in hits if node.registered_at <= hit <= end), end)
        busy_before_hit = busy = 0.0
        for run in own:
            took = run.ended_at - run.started_at
            busy += took
            busy_before_hit += max(0.0, min(run.ended_at, first_hit) - run.started_at)
            if run.state == "done":
                seconds["counted"] += took
            elif any(run.started_at <= hit <= run.ended_at for hit in hits):
                seconds["hit by a trouble"] += took
            else:
                seconds["repeated without a trouble"] += took
        idle = first_hit - node.registered_at - busy_before_hit
        seconds["idle"] += idle
        seconds["ending after a trouble"] += end - node.registered_at - busy - idle
    return seconds
