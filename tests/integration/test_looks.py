"""Blocks beyond a look are held, and run only if it did not decide; on SQLite and on PostgreSQL."""

import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import func, select, update

from ablate.experiments.outcomes import FailureClass
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OVER, OutboxKind
from ablate.service.store import outbox
from ablate.service.store.tables import attempts, blocks, db_now, events, receipts, trials
from tests.api_stack import Api, api_fixture, receipts_of

LOOKS = {"looks": [6, 8, 12]}


api = api_fixture()


def look(api: Api) -> bool:
    """Do what the background process does when a look is asked for."""
    return OutboxHandlers(api.store).run_due(OutboxKind.LOOK)


def states(api: Api, made: dict[str, Any]) -> str:
    """The first letter of every block's state, in order."""
    items = api.get(f"{made['links']['self']}/blocks?limit=100").json()["items"]
    return "".join(item["state"][0] for item in items)


def finish(api: Api, node: str, *, noisy: bool) -> int:
    """Report every block that waits, of equal arms, or of some that differ now one way and now the other."""
    count = 0
    while block := api.claim(node):
        speed = 5000 * (1 + 0.004 * (-1) ** block["block_index"]) if noisy else 5000.0
        changed = {arm: {"tokens_per_s": speed} for arm in ("psiv-on", "chunk-32")}
        body = receipts_of(block, node, changed=changed, design__blocks=LOOKS)
        assert api.attempt(block, "report", receipts=body).status_code == 200
        count += 1
    return count


def state_of(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    return dict(api.get(made["links"]["self"]).json())


def test_blocks_beyond_the_first_look_wait_until_it_has_decided(api: Api) -> None:
    made = api.submit(design__blocks=LOOKS)
    node = api.register()
    assert states(api, made) == "q" * 6 + "h" * 6
    assert finish(api, node, noisy=True) == 6
    assert state_of(api, made)["state"] == "running"
    assert states(api, made) == "d" * 6 + "h" * 6
    assert look(api)
    assert states(api, made) == "d" * 6 + "qq" + "h" * 4
    assert not look(api)
    assert finish(api, node, noisy=True) == 2
    assert look(api)
    assert finish(api, node, noisy=True) == 4
    assert not look(api)
    assert (states(api, made), state_of(api, made)["state"]) == ("d" * 12, "completed")


def test_what_a_look_decided_is_not_run_and_says_why(api: Api) -> None:
    made = api.submit(design__blocks=LOOKS)
    finish(api, api.register(), noisy=False)
    assert look(api)
    shown = state_of(api, made)
    assert (shown["state"], shown["blocks"]["done"], shown["blocks"]["planned"]) == ("completed", 6, 12)
    assert states(api, made) == "d" * 6 + "c" * 6
    with api.store.read() as connection:
        query = select(events.c.reason).where(events.c.ablation_id == made["id"], events.c.new == "cancelled")
        reasons = set(connection.execute(query).scalars())
    assert reasons == {"not needed: after 6 blocks: 'psiv-on' same, 'chunk-32' same"}
    handlers = OutboxHandlers(api.store)
    assert handlers.run_due(OutboxKind.JUDGE)
    verdict = api.get(made["links"]["verdict"]).json()
    assert {variant["measured"] for variant in verdict["variants"]} == {"same"}
    assert (verdict["blocks_counted"], verdict["blocks_planned"]) == (6, 12)


def test_a_look_that_is_asked_for_twice_or_too_early_changes_nothing(api: Api) -> None:
    made = api.submit(design__blocks=LOOKS)
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.LOOK, made["id"])
    assert look(api)
    assert states(api, made) == "q" * 6 + "h" * 6
    finish(api, api.register(), noisy=True)
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.LOOK, made["id"])
    while look(api):  # asked for twice: by the last report, and here
        pass
    assert states(api, made) == "d" * 6 + "qq" + "h" * 4


def test_cancel_and_a_spent_budget_end_held_blocks_too(api: Api) -> None:
    made = api.submit(design__blocks=LOOKS)
    finish(api, api.register(), noisy=True)
    assert api.cancel(made["id"]).json()["state"] == "cancelled"
    assert states(api, made) == "d" * 6 + "c" * 6
    assert look(api)
    assert states(api, made) == "d" * 6 + "c" * 6
    limits = {"device_minutes": 1e-7}
    spent = api.submit(design__blocks=LOOKS, limits=limits)
    node = api.register()
    block = api.claimed(node)
    body = receipts_of(block, node, design__blocks=LOOKS, limits=limits)
    assert api.attempt(block, "report", receipts=body).status_code == 200
    assert (states(api, spent), state_of(api, spent)["state"]) == ("d" + "c" * 11, "completed")


def test_cancel_that_comes_after_everything_was_measured_leaves_the_verdict(api: Api) -> None:
    made = api.submit()
    node = api.register()
    for _ in range(5):
        block = api.claimed(node)
        api.attempt(block, "report", receipts=receipts_of(block, node))
    last = api.claimed(node)
    assert api.cancel(made["id"]).json()["state"] == "cancelling"
    assert api.attempt(last, "report", receipts=receipts_of(last, node)).status_code == 200
    assert (states(api, made), state_of(api, made)["state"]) == ("dddddd", "completed")
    assert OutboxHandlers(api.store).run_due(OutboxKind.JUDGE)
    assert api.get(made["links"]["verdict"]).json()["blocks_counted"] == 6


class Chaos:
    """Draws what two workers, a person, the background process and time do next, until every ablation is over."""

    def __init__(self, api: Api, seed: int) -> None:
        self._api = api
        self._rng = random.Random(seed)  # noqa: S311 - draws that repeat
        self._nodes = [api.register(f"node-{number}") for number in range(2)]
        self._held: dict[str, dict[str, Any]] = {}
        self.made = [api.submit(design__blocks=LOOKS) for _ in range(2)]

    def run(self) -> None:
        acts = [self._work] * 12 + [self._expire, self._look, self._look] + [self._cancel] * (self._rng.random() < 0.3)
        for _ in range(2000):
            if all(state_of(self._api, made)["state"] in OVER for made in self.made):
                return
            self._rng.choice(acts)()
            self._check()
        raise AssertionError([states(self._api, made) for made in self.made])

    def _work(self) -> None:
        node = self._rng.choice(self._nodes)
        block = self._held.pop(node, None)
        if block is None:
            block = self._api.claim(node)
            if block is not None:
                self._held[node] = block
            return
        drawn = self._rng.random()
        arm = self._rng.choice([None, *(trial["arm"] for trial in block["trials"])])
        if drawn < 0.7:
            body = receipts_of(block, node, design__blocks=LOOKS, changed=self._speeds())
            answer = self._api.attempt(block, "report", receipts=body)
        elif drawn < 0.9:
            failure = self._rng.choice(list(FailureClass))
            answer = self._api.attempt(block, "report", failure_class=failure, arm=arm, message="x")
        else:
            answer = self._api.attempt(block, "report", failure_class="preempted", message="x")
        assert answer.status_code in (200, 409), answer.text

    def _speeds(self) -> dict[str, dict[str, Any]]:
        return {arm: {"tokens_per_s": self._rng.gauss(5000, 18)} for arm in ("psiv-on", "chunk-32")}

    def _expire(self) -> None:
        with self._api.store.write() as connection:
            running = update(blocks).where(blocks.c.state == "running")
            connection.execute(running.values(lease_until=db_now() - 1))
            connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))
        Reconciler(self._api.store).expire_leases()

    def _look(self) -> None:
        with self._api.store.write() as connection:
            connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))
        look(self._api)

    def _cancel(self) -> None:
        if self._rng.random() < 0.1:
            self._api.cancel(self._rng.choice(self.made)["id"])

    def _check(self) -> None:
        """No block runs before its look, and every state that is shown is one that the rows bear out."""
        for made in self.made:
            letters = states(self._api, made)
            for end in (6, 8):
                assert set(letters[end:]) <= set("hc") or not set(letters[:end]) & set("qrh"), letters
        with self._api.store.read() as connection:
            done = connection.execute(select(func.count()).where(blocks.c.state == "done")).scalar_one()
            kept = connection.execute(select(func.count()).select_from(receipts)).scalar_one()
            running = connection.execute(select(blocks.c.attempt_id).where(blocks.c.state == "running")).scalars().all()
            busy = connection.execute(select(attempts.c.id).where(attempts.c.state == "running")).scalars().all()
        assert kept == 3 * done
        assert Counter(running) == Counter(busy)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_work_faults_looks_and_cancels_ends_with_books_that_balance(api: Api, seed: int) -> None:
    chaos = Chaos(api, seed)
    chaos.run()
    with api.store.read() as connection:
        left = connection.execute(select(blocks.c.state).where(blocks.c.state.in_(["held", "queued", "running"]))).all()
        open_trials = select(trials.c.state).where(trials.c.state.in_(["queued", "running"]))
        assert (left, connection.execute(open_trials).all()) == ([], [])
    for made in chaos.made:
        shown, letters = state_of(api, made), states(api, made)
        assert (shown["blocks"]["done"], shown["blocks"]["failed"]) == (letters.count("d"), letters.count("f"))
        if shown["state"] == "completed":
            assert "d" in letters
