"""Long calls delay others of their kind, but neither workers nor readers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from typing import Any

import httpx
import pytest

from ablate.service import submitting
from ablate.service.routes import imports
from ablate.service.store import session
from tests.api_stack import Api, api_fixture
from tests.bundles import archive_of, make_bundle, make_file
from tests.waiting import LIMIT_S, until

CALLS = session.OTHERS_AT_ONCE + 4


api = api_fixture()


class Held:
    """A function that lasts until it may go on, and how often it was begun."""

    def __init__(self, call: Callable[..., Any], patch: pytest.MonkeyPatch, module: object) -> None:
        self.begun, self.go_on, self._lock = 0, threading.Event(), threading.Lock()

        @wraps(call)
        def waits(*given: Any, **named: Any) -> Any:
            with self._lock:
                self.begun += 1
            assert self.go_on.wait(LIMIT_S)
            return call(*given, **named)

        patch.setattr(module, call.__name__, waits)


def crowd(api: Api, held: Held, call: Callable[[], httpx.Response]) -> list[int]:
    """Make many long calls at once; read and claim while they wait. Return the statuses of the calls."""
    limiter = api.client.app.state.services.long_threads  # type: ignore[attr-defined]  # a test client
    node = api.register()
    with ThreadPoolExecutor(CALLS + 2) as pool:
        try:
            calls: list[Future[httpx.Response]] = [pool.submit(call) for _ in range(CALLS)]
            until(lambda: held.begun + limiter.statistics().tasks_waiting == CALLS)
            assert pool.submit(api.get, "/v1/ablations").result(LIMIT_S).status_code == 200
            assert pool.submit(api.claim, node).result(LIMIT_S) is None
            assert held.begun == session.LONG_AT_ONCE
        finally:
            held.go_on.set()
        return [one.result(LIMIT_S).status_code for one in calls]


def test_many_imports_at_once_delay_neither_readers_nor_workers(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(imports._verified, monkeypatch, imports)
    headers, body = {**api.admin, "Content-Type": "application/x-tar"}, archive_of(make_bundle(make_file()))

    def send() -> httpx.Response:
        return api.client.post("/v1/ablations:import?unsigned=true", headers=headers, content=body)

    assert crowd(api, held, send) == [200] * CALLS
    assert len(api.get("/v1/ablations").json()["items"]) == 1


def test_many_large_plans_at_once_delay_neither_readers_nor_workers(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(submitting.planned, monkeypatch, submitting)
    assert crowd(api, held, lambda: httpx.Response(202, json=api.submit())) == [202] * CALLS
    assert len(api.get("/v1/ablations").json()["items"]) == CALLS


def test_every_request_that_runs_has_a_connection_and_more_wait_for_one(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [session.WORKERS_AT_ONCE, session.LONG_AT_ONCE, session.OTHERS_AT_ONCE]
    store = api.store
    monkeypatch.setattr(store.reader.pool, "_timeout", 1.0)
    with ExitStack() as held:
        for _ in range(sum(requests)):
            held.enter_context(store.read())
        assert api.get("/v1/ablations").status_code == 200  # and somebody beside them finds one, too
        for _ in range(session.CONNECTIONS - sum(requests)):
            held.enter_context(store.read())
        assert api.get("/v1/ablations").status_code == 503
    assert api.get("/v1/ablations").status_code == 200
