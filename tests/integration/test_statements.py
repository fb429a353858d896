"""Connections of the store: writes outside the usual moves, replaced connections, and calls that wait."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Connection, create_engine, select, text
from sqlalchemy.engine import make_url

from ablate.service.store import session
from ablate.service.store.blocks.block_wire import plan_of
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.blocks.turns import raise_reached
from ablate.service.store.session import Store
from ablate.service.store.tables import turns
from tests.api_stack import Api, api_fixture, running_api
from tests.waiting import LIMIT_S, until

api = api_fixture()


def test_a_queue_keeps_the_latest_turn_that_it_reached(api: Api) -> None:
    chance, latest = random.Random(10), dict[tuple[str, int], int]()  # noqa: S311
    for _ in range(60):
        key = chance.choice(["a", "b", "c"]), chance.randrange(2)
        turn = chance.randrange(50)
        latest[key] = max(turn, latest.get(key, turn))
        with api.store.write() as connection:
            raise_reached(connection, *key, turn)
    with api.store.read() as connection:
        assert {(row.node_class, row.priority): row.turn for row in connection.execute(select(turns))} == latest


def test_a_change_of_an_ablation_without_an_event_is_written(api: Api) -> None:
    made = api.submit()["id"]
    with api.store.write() as connection:
        transitions = Transitions(connection, made, actor="tester")
        transitions.flush()
        transitions.set_columns(priority=7)
        transitions.flush()
    assert api.get(f"/v1/ablations/{made}").json()["priority"] == 7


def test_connections_that_the_server_ended_are_replaced_before_anybody_uses_them(tmp_path: Path) -> None:
    with running_api("postgresql", tmp_path) as api:
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(api.store.read())
        engine = create_engine(make_url(api.store.url).set(database="postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            ended = text("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = :name")
            name = make_url(api.store.url).database
            assert connection.execute(ended, {"name": name}).all()
        engine.dispose()
        assert [api.get("/v1/ablations").status_code for _ in range(30)] == [200] * 30


def test_calls_of_workers_run_few_at_a_time_and_hold_up_nobody_else(tmp_path: Path) -> None:
    with running_api("postgresql", tmp_path) as api:
        api.submit()
        nodes = [(api.worker_of(f"n{n}"), api.register(f"n{n}")) for n in range(3 * session.WORKERS_AT_ONCE)]
        answers, calls = [], ThreadPoolExecutor(len(nodes))
        with api.store.write() as connection:  # whoever wants its node waits
            connection.execute(text("SELECT id FROM nodes FOR UPDATE"))
            for headers, node in nodes:
                ask = {"headers": headers, "json": {"node_id": node}}
                answers.append(calls.submit(api.client.post, "/v1/blocks:claim", **ask))
            until(lambda: _waiting(api) == session.WORKERS_AT_ONCE, what="calls that wait")
            assert api.get("/v1/ablations").status_code == 200
            assert _waiting(api) == session.WORKERS_AT_ONCE
        responses = [answer.result(timeout=LIMIT_S) for answer in answers]
        calls.shutdown()
    blocks = [answer.json()["block_id"] for answer in responses if answer.status_code == 200]
    assert {answer.status_code for answer in responses} == {200, 204}
    assert len(blocks) == len(set(blocks)) == 6


def _waiting(api: Api) -> int:
    """Return how many connections to this database wait for a lock."""
    with api.store.read() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return int(connection.execute(text(query)).scalar_one())


class Patient(Store):
    """A store in which the reading of one plan lasts until it may end."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.slow = threading.local()
        self.reads, self.entered, self.leave = 0, threading.Event(), threading.Event()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        if getattr(self.slow, "is_mine", False):
            self.reads += 1
            self.entered.set()
            assert self.leave.wait(LIMIT_S)
        with super().read() as connection:
            yield connection

    def slowly(self, ablation_id: str) -> str:
        self.slow.is_mine = True
        return plan_of(self, ablation_id).node_class


def test_who_asks_for_a_plan_that_is_being_read_waits_for_it_and_nobody_else_does(api: Api) -> None:
    known, slow, new = (api.submit()["id"] for _ in range(3))
    store, pool = Patient(api.store.url), ThreadPoolExecutor(8)
    try:
        before = plan_of(store, known)
        answers = [pool.submit(store.slowly, slow)]
        assert store.entered.wait(LIMIT_S)
        answers += [pool.submit(store.slowly, slow) for _ in range(5)]
        assert pool.submit(plan_of, store, known).result(LIMIT_S) is before
        assert pool.submit(plan_of, store, new).result(LIMIT_S) == before
        assert not any(answer.done() for answer in answers)
        store.leave.set()
        assert [answer.result(LIMIT_S) for answer in answers] == ["cpu"] * 6
        assert store.reads == 1
    finally:
        store.leave.set()
        pool.shutdown()
        store.close()
