"""Random interleavings of everything that the scheduler is asked, against an independent model; on both databases."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from ablate.experiments.outcomes import BlockState
from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.experiments.retries import retry_wait_s
from ablate.service.background.reconciler import Reconciler
from ablate.service.store.blocks.claims import BESIDE_TRIAL_S
from ablate.service.store.tables import ablations, attempts, blocks, db_now, events, nodes, receipts
from tests.api_stack import Api, receipts_of, running_api
from tests.integration.queue_model import MOST_BREAKS, NODE_BREAKS, Model, Node

LIMITS = {"device_minutes": 100_000}
NODES = ("one", "two", "three")
TAKES_S, LEFT_S, NEAR_S = (1_000.0, 9_000.0), (500.0, 3_000.0, 6_000.0, 20_000.0), 400.0
"""Times of blocks, times that workers have left, and the least distance of the two."""
FINAL = ("completed", "failed", "cancelled")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses last until the model lets time pass, however slow this machine is."""
    monkeypatch.setattr("ablate.service.store.blocks.attempts.retry_wait_s", lambda *why: 10_000 * retry_wait_s(*why))
    for module in ("blocks.attempts", "nodes.placement"):
        monkeypatch.setattr(f"ablate.service.store.{module}.ELSEWHERE_S", 1e7)
    may_run = (blocks.c.state == BlockState.QUEUED, blocks.c.not_before <= db_now())
    monkeypatch.setattr(
        "ablate.service.store.blocks.claims._MAY_RUN", may_run
    )  # such pauses look like a clock that was set


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path, patient: None) -> Iterator[Api]:
    with running_api(request.param, tmp_path, node_breaks=NODE_BREAKS, control_every=0) as running:
        yield running


class Run:
    """Draws what happens next, does it to service and model, and compares them."""

    def __init__(self, api: Api, seed: int) -> None:
        self._api = api
        self._rng = random.Random(seed)  # noqa: S311 - draws that repeat
        self.model = Model()
        self.model.limit_s = PREPARATION_LIMIT_S + 3 * (1200 + BESIDE_TRIAL_S)
        self._ids = {name: api.register(name) for name in NODES}
        for name in NODES:
            self.model.nodes[name] = Node(name)
        self._held: dict[str, dict[str, Any]] = {}
        self._late: list[tuple[dict[str, Any], str, int]] = []
        self.acts: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        acts = {
            self.submit: 2, self.claim: 14, self.report: 9, self.break_one: 7, self.expire: 2, self.late: 2,
            self.pass_time: 3, self.prioritise: 1, self.cancel: 1, self.drain: 1, self.resume: 3,
        }  # fmt: skip
        for _ in range(steps):
            act = self._rng.choices(list(acts), weights=list(acts.values()))[0]
            act()
            self.acts[act.__name__] += 1
        self.compare()

    def submit(self) -> None:
        if sum(state not in FINAL for state in self.model.states.values()) >= 5:
            return
        priority = self._rng.choice([50, 50, 50, 60])
        made = self._api.submit(limits={**LIMITS, "priority": priority})
        items = self._api.get(f"{made['links']['self']}/blocks").json()["items"]
        self.model.submit(made["id"], [item["id"] for item in items], priority)

    def claim(self) -> None:
        name = self._rng.choice(NODES)
        if name in self._held:
            return
        left_s = self._left_s()
        block = self._api.claim(self._ids[name], **({} if math.isinf(left_s) else {"left_s": left_s}))
        expected = self.model.claimable(name, left_s)
        self.acts["refused"] += expected != self.model.claimable(name)
        if block is None:
            assert expected == [], (name, expected)
            return
        assert block["block_id"] in expected, (name, block["block_id"], expected)
        takes_s = self._rng.choice(TAKES_S)
        with self._api.store.write() as connection:
            own = update(attempts).where(attempts.c.id == block["attempt_id"])
            connection.execute(own.values(started_at=db_now() - takes_s))
        self.model.claim(name, block["block_id"], left_s, takes_s=takes_s)
        self._held[name] = block

    def _left_s(self) -> float:
        """Draw the time left of a worker, unless it is near the time of a block, which runs on during this test."""
        left_s = self._rng.choice([math.inf, *LEFT_S])
        near = [abs(self.model.expected_s(one) - left_s) < NEAR_S for one in self.model.priorities]
        return math.inf if any(near) else left_s

    def _drawn(self) -> tuple[str, dict[str, Any]] | None:
        if not self._held:
            return None
        name = self._rng.choice(sorted(self._held))
        return name, self._held.pop(name)

    def report(self) -> None:
        if (drawn := self._drawn()) is None:
            return
        name, block = drawn
        body = receipts_of(block, self._ids[name], limits=self._limits(block))
        answer = self._api.attempt(block, "report", receipts=body)
        assert answer.status_code == 200, answer.text
        self.model.done(block["block_id"])
        self._settled(block)

    def _limits(self, block: dict[str, Any]) -> dict[str, Any]:
        with self._api.store.read() as connection:
            query = select(ablations.c.plan).where(ablations.c.id == block["ablation_id"])
            assert block["spec_digest"] in connection.execute(query).scalar_one()
        return {**LIMITS, "priority": self._first_priority(block["ablation_id"])}

    def _first_priority(self, ablation: str) -> int:
        for event, data in self._events_of_priority(ablation):
            if event == "ablation.priority":
                return int(data["reason"].split()[1])
        return self.model.priorities[ablation]

    def _events_of_priority(self, ablation: str) -> list[tuple[str, dict[str, Any]]]:
        with self._api.store.read() as connection:
            query = select(events.c.kind, events.c.reason).where(events.c.ablation_id == ablation)
            rows = connection.execute(query.order_by(events.c.seq)).all()
        return [(row.kind, {"reason": row.reason}) for row in rows]

    def break_one(self) -> None:
        if (drawn := self._drawn()) is None:
            return
        _, block = drawn
        failure = self._rng.choice(list(MOST_BREAKS))
        arm = self._rng.choice([None, *(trial["arm"] for trial in block["trials"])])
        answer = self._api.attempt(block, "report", failure_class=failure, arm=arm, message="x")
        assert answer.status_code == 200, answer.text
        assert answer.json()["block_state"] == self.model.broke(block["block_id"], failure, arm)
        self._settled(block)

    def _settled(self, block: dict[str, Any]) -> None:
        ablation = block["ablation_id"]
        assert self._api.get(f"/v1/ablations/{ablation}").json()["state"] == self.model.settle(ablation)

    def expire(self) -> None:
        if (drawn := self._drawn()) is None:
            return
        name, block = drawn
        with self._api.store.write() as connection:
            change = update(blocks).where(blocks.c.id == block["block_id"])
            connection.execute(change.values(lease_until=db_now() - 1))
        assert Reconciler(self._api.store, node_breaks=NODE_BREAKS).expire_leases() == 1
        number = len(self.model.blocks[block["block_id"]].attempts) - 1
        self.model.broke(block["block_id"], "infra_node", None)
        self._late.append((block, name, number))
        self._settled(block)

    def late(self) -> None:
        if not self._late:
            return
        block, name, number = self._late.pop(self._rng.randrange(len(self._late)))
        body = receipts_of(block, self._ids[name], limits=self._limits(block))
        answer = self._api.attempt(block, "report", receipts=body)
        taken = self.model.late(block["block_id"], number)
        assert answer.status_code == (200 if taken else 409), answer.text
        if taken:
            self._recount(name)
            self._settled(block)

    def _recount(self, name: str) -> None:
        """A late result may stand anywhere in a node's row: what is counted is read from the attempts again."""
        node = self.model.nodes[name]
        node.row = []
        with self._api.store.read() as connection:
            since = select(nodes.c.resumed_at).where(nodes.c.id == self._ids[name]).scalar_subquery()
            query = select(attempts).where(attempts.c.node_id == self._ids[name], attempts.c.ended_at > since)
            rows = connection.execute(query.order_by(attempts.c.started_at)).all()
        for row in rows:
            if row.state == "done":
                node.row = []
            elif row.failure_class in ("infra_node", "no_receipt"):
                source = "" if row.failure_class == "no_receipt" else row.arm or row.id
                node.row.append((row.failure_class, row.ablation_id, source))

    def pass_time(self) -> None:
        with self._api.store.write() as connection:
            connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))
        self.model.pass_time()

    def _open(self) -> str | None:
        names = [one for one, state in self.model.states.items() if state in ("queued", "running")]
        return self._rng.choice(names) if names else None

    def prioritise(self) -> None:
        if (ablation := self._open()) is None:
            return
        priority = self._rng.choice([50, 60])
        path = f"/v1/ablations/{ablation}"
        answer = self._api.client.patch(path, headers=self._api.admin, json={"priority": priority})
        assert answer.json()["priority"] == priority
        if self.model.priorities[ablation] != priority:
            self.model.priorities[ablation] = priority
            self.model.forget_pairs(ablation)

    def cancel(self) -> None:
        if (ablation := self._open()) is None or self._rng.random() < 0.5:
            return
        assert self._api.cancel(ablation).status_code == 202
        self.model.cancel(ablation)
        assert self._api.get(f"/v1/ablations/{ablation}").json()["state"] == self.model.settle(ablation)

    def drain(self) -> None:
        name = self._rng.choice(NODES)
        self._api.client.post(f"/v1/nodes/{name}:drain", headers=self._api.admin)
        self.model.nodes[name].drained = True

    def resume(self) -> None:
        name = self._rng.choice(NODES)
        self._api.client.post(f"/v1/nodes/{name}:resume", headers=self._api.admin)
        node = self.model.nodes[name]
        node.drained, node.quarantined, node.row = False, False, []

    def compare(self) -> None:
        """Blocks, ablations, nodes and counters of the service are those of the model."""
        with self._api.store.read() as connection:
            for row in connection.execute(select(blocks)):
                assert row.state == self.model.blocks[row.id].state, row.id
            for row in connection.execute(select(ablations)):
                assert row.state == self.model.states[row.id]
                own = Counter(one.state for one in self.model.blocks.values() if one.ablation == row.id)
                counted = {name: getattr(row, f"blocks_{name}") for name in (*own, "held", "queued", "running")}
                assert counted == {name: own[name] for name in counted}
                assert row.trials_done == 3 * own["done"]
                seconds = select(func.coalesce(func.sum(attempts.c.ended_at - attempts.c.started_at), 0.0))
                seconds = seconds.where(attempts.c.ablation_id == row.id)
                assert row.device_s == pytest.approx(connection.scalar(seconds), abs=1e-3)
                settled = seconds.where(attempts.c.state == "done")
                assert row.settled_s == pytest.approx(connection.scalar(settled), abs=1e-3)
            done = sum(one.state == "done" for one in self.model.blocks.values())
            assert connection.execute(select(func.count()).select_from(receipts)).scalar_one() == 3 * done
            for row in connection.execute(select(nodes)):
                node = self.model.nodes[row.name]
                assert (row.draining, row.quarantined_reason is not None) == (node.drained, node.quarantined), row.name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_interleaving_gives_what_the_model_says(api: Api, seed: int) -> None:
    run = Run(api, seed)
    for _ in range(5):
        run.run(60)
    assert min(run.acts[name] for name in ("submit", "claim", "report", "break_one", "expire", "resume", "refused")) > 5
