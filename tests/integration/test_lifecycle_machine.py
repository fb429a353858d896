"""Random histories of several workers over store and lifecycle, on both databases, against a model and the checker.

Every rule is something that a worker, a person or time does. The model knows who holds what; what the service answers
must follow from it. At the end of a history the independent checker of the chaos runs reads the database.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import func, select, update

from ablate.service.background.reconciler import Reconciler
from ablate.service.store.tables import ablations, attempts, blocks, db_now, receipts
from tests.api_stack import receipts_of, running_api
from tests.chaos.checker import problems
from tests.chaos.ledger import Ledger, books_of, settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS = 4
HISTORIES = {"sqlite": 15, "postgresql": 6}
"""The rules and the model are the same on both; a database of PostgreSQL takes several times as long."""
BREAKS = ("infra_node", "timeout", "invalid_measurement", "no_receipt", "preempted", "user_error")
EXACT: dict[str, Any] = {"design__seeds": [1], "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}}}
SHAPES: dict[str, dict[str, Any]] = {
    "two": {**EXACT, "design__blocks": {"count": 2}},
    "three": {**EXACT, "design__blocks": {"count": 3}},
    "looks": {**EXACT, "design__blocks": {"looks": [6, 7]}},
}
workers = some.integers(0, WORKERS - 1)


@dataclass
class Held:
    """A block in a worker's hands, or one that it lost."""

    block: dict[str, Any]
    node: str
    shape: dict[str, Any]
    report: dict[str, Any] | None = None
    """What it reported, once it did."""

    def receipts(self) -> list[dict[str, Any]]:
        """Return the receipts of the whole block."""
        return receipts_of(self.block, self.node, **self.shape)


@dataclass
class Model:
    """What must be true now."""

    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was submitted, by ablation."""
    held: dict[int, Held] = field(default_factory=dict)
    """By worker."""
    lost: dict[str, Held] = field(default_factory=dict)
    """Attempts whose lease ran out, by block, while nobody has claimed the block since."""
    over: list[Held] = field(default_factory=list)
    """Attempts that can never count any more."""
    done: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)


class Histories(RuleBasedStateMachine):
    """One history, on a database of its own of the kind that the test names."""

    kind: str

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-machine-")))
        self.api = self.stack.enter_context(running_api(self.kind, folder, node_breaks=0))
        self.nodes = [self.api.register(f"machine-{number}", devices=1) for number in range(WORKERS)]
        self.model, self.ledger = Model(), Ledger()

    @rule(shape=some.sampled_from(sorted(SHAPES)), priority=some.integers(0, 2))
    def submit(self, shape: str, priority: int) -> None:
        changes = {**SHAPES[shape], "limits": {"priority": 50 + priority}}
        self.model.shapes[self.api.submit(**changes)["id"]] = changes

    @rule(worker=workers)
    def claim(self, worker: int) -> None:
        if worker in self.model.held:
            self._claims_in_vain(worker)
            return
        waiting = self._claimable(self.nodes[worker])
        block = self.api.claim(self.nodes[worker])
        assert (block is None) == (not waiting)
        if block is None:
            return
        assert block["block_id"] in waiting
        lost = self.model.lost.pop(block["block_id"], None)
        if lost is not None:
            self.model.over.append(lost)
        shape = self.model.shapes[block["ablation_id"]]
        self.model.held[worker] = Held(block, self.nodes[worker], shape)

    def _claims_in_vain(self, worker: int) -> None:
        """Ask for a second block on a node with one device."""
        headers, body = self.api.worker_of(f"machine-{worker}"), {"node_id": self.nodes[worker]}
        assert self.api.client.post("/v1/blocks:claim", headers=headers, json=body).status_code == 409

    def _claimable(self, node: str) -> set[str]:
        ready = select(blocks.c.id).where(blocks.c.state == "queued", blocks.c.not_before <= db_now())
        ready = ready.where(func.coalesce(blocks.c.avoid_node_id, "") != node)
        with self.api.store.read() as connection:
            return set(connection.execute(ready).scalars())

    def _busy(self, data: some.DataObject) -> int:
        return data.draw(some.sampled_from(sorted(self.model.held)))

    @precondition(lambda self: self.model.held)
    @rule(data=some.data(), steps=some.integers(0, 5))
    def beat(self, data: some.DataObject, steps: int) -> None:
        held = self.model.held[self._busy(data)]
        progress = [{"trial_id": held.block["trials"][0]["trial_id"], "steps_done": steps, "steps_total": 5}]
        answer = self.api.attempt(held.block, "heartbeat", progress=progress)
        assert answer.status_code == 200, answer.text
        assert answer.json()["cancel"] == (held.block["ablation_id"] in self.model.cancelled)

    @precondition(lambda self: self.model.held)
    @rule(data=some.data(), twice=some.booleans())
    def report(self, data: some.DataObject, twice: bool) -> None:
        held = self.model.held.pop(self._busy(data))
        body = {"receipts": held.receipts()}
        for _ in range(1 + twice):
            answer = self.api.attempt(held.block, "report", **body)
            assert (answer.status_code, answer.json().get("block_state")) == (200, "done"), answer.text
        self.model.done.add(held.block["block_id"])
        held.report = body

    @precondition(lambda self: self.model.held)
    @rule(data=some.data(), failure=some.sampled_from(BREAKS), knows_arm=some.booleans(), receipts_too=some.booleans())
    def break_(self, data: some.DataObject, failure: str, knows_arm: bool, receipts_too: bool) -> None:
        held = self.model.held.pop(self._busy(data))
        arm = held.block["trials"][-1]["arm"] if knows_arm else None
        body = {"failure_class": failure, "message": "it broke", "arm": arm}
        answer = self.api.attempt(
            held.block, "report", **body, **({"receipts": held.receipts()} if receipts_too else {})
        )
        assert answer.status_code == 200, answer.text
        self._ended_without_result(held, answer.json()["block_state"])

    def _give_back(self, held: Held) -> None:
        answer = self.api.attempt(held.block, "report", failure_class="preempted", message="the node goes away")
        assert answer.status_code == 200, answer.text
        self._ended_without_result(held, answer.json()["block_state"])

    def _ended_without_result(self, held: Held, state: str) -> None:
        allowed = {"cancelled"} if held.block["ablation_id"] in self.model.cancelled else {"queued", "failed"}
        assert state in allowed
        self.model.over.append(held)

    @precondition(lambda self: self.model.held)
    @rule(data=some.data())
    def fall_silent(self, data: some.DataObject) -> None:
        held = self.model.held.pop(self._busy(data))
        block = held.block["block_id"]
        with self.api.store.write() as connection:
            connection.execute(update(blocks).where(blocks.c.id == block).values(lease_until=db_now() - 1))
        assert Reconciler(self.api.store).expire_leases() == 1
        self.model.lost[block] = held

    @precondition(lambda self: self.model.lost)
    @rule(data=some.data())
    def come_back_late(self, data: some.DataObject) -> None:
        """A whole result counts as long as the block waits and nobody else has claimed it."""
        block = data.draw(some.sampled_from(sorted(self.model.lost)))
        held = self.model.lost.pop(block)
        waits = self._state_of(block) == "queued"
        answer = self.api.attempt(held.block, "report", receipts=held.receipts())
        assert answer.status_code == (200 if waits else 409), answer.text
        if waits:
            self.model.done.add(block)
        else:
            self.model.over.append(held)

    def _state_of(self, block: str) -> str:
        with self.api.store.read() as connection:
            return str(connection.execute(select(blocks.c.state).where(blocks.c.id == block)).scalar_one())

    @precondition(lambda self: self.model.over)
    @rule(data=some.data(), verb=some.sampled_from(["heartbeat", "report"]))
    def try_again_for_nothing(self, data: some.DataObject, verb: str) -> None:
        held = data.draw(some.sampled_from(self.model.over))
        bodies: dict[str, dict[str, Any]] = {
            "heartbeat": {},
            "report": {"receipts": held.receipts()},
        }
        assert self.api.attempt(held.block, verb, **bodies[verb]).status_code == 409

    @precondition(lambda self: set(self.model.shapes) - self.model.cancelled)
    @rule(data=some.data())
    def cancel(self, data: some.DataObject) -> None:
        ablation = data.draw(some.sampled_from(sorted(set(self.model.shapes) - self.model.cancelled)))
        answer = self.api.cancel(ablation)
        assert answer.status_code in (202, 409), answer.text
        if answer.status_code == 202:
            self.model.cancelled.add(ablation)

    @rule()
    def time_passes(self) -> None:
        with self.api.store.write() as connection:
            connection.execute(update(blocks).values(not_before=0.0, avoid_node_id=None))
        Reconciler(self.api.store).expire_leases()

    @rule()
    def background_works(self) -> None:
        settle(self.api.store, self.ledger)

    @invariant()
    def who_holds_what(self) -> None:
        if not hasattr(self, "model"):
            return
        holders = {held.block["attempt_id"] for held in self.model.held.values()}
        with self.api.store.read() as connection:
            open_attempts = set(
                connection.execute(select(attempts.c.id).where(attempts.c.state == "running")).scalars()
            )
            running = select(blocks.c.attempt_id).where(blocks.c.state == "running")
            assert open_attempts == set(connection.execute(running).scalars()) == holders
            counted = select(receipts.c.ablation_id, func.count()).group_by(receipts.c.ablation_id)
            stored = {row[0]: row[1] for row in connection.execute(counted)}
            trials_done = {
                row.id: row.trials_done for row in connection.execute(select(ablations.c.id, ablations.c.trials_done))
            }
        assert stored == {name: count for name, count in trials_done.items() if count}

    def teardown(self) -> None:
        if hasattr(self, "model"):
            with self.stack:
                self._end()

    def _end(self) -> None:
        """End what goes on, and let the checker read the books."""
        for ablation in sorted(set(self.model.shapes) - self.model.cancelled):
            if self.api.cancel(ablation).status_code == 202:
                self.model.cancelled.add(ablation)
        for held in self.model.held.values():
            self._give_back(held)
        settle(self.api.store, self.ledger)
        books = books_of(self.api.store, self.ledger)
        books.cancelled = self.model.cancelled
        assert problems(books) == []


@pytest.mark.parametrize("store", HISTORIES)
def test_any_history_of_workers_people_and_time_leaves_true_books(store: str) -> None:
    class Here(Histories):
        kind = store

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    number = HISTORIES[store]
    few = settings(
        max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=checks, database=None
    )
    run_state_machine_as_test(Here, settings=few)
