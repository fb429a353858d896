"""Calls that compute for long hold up others of their kind, and nobody who reads."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import threads
from service.routes import imports, submissions
from tests.api_stack import Api, running_api
from tests.bundles import make_bundle, make_file

CALLS = threads.OTHERS_AT_ONCE + 4


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


class Held:
    """A function that lasts until it may go on, and how often it was begun."""

    def __init__(self, call: Callable[..., Any], patch: pytest.MonkeyPatch, module: object) -> None:
        self.begun, self.go_on, self._lock = 0, threading.Event(), threading.Lock()

        @wraps(call)
        def waits(*given: Any, **named: Any) -> Any:
            with self._lock:
                self.begun += 1
            assert self.go_on.wait(120)
            return call(*given, **named)

        patch.setattr(module, call.__name__, waits)


def crowd(api: Api, held: Held, limit: str, most: int, call: Callable[[], httpx.Response]) -> list[int]:
    """Make many calls at once and read while they wait; return how they were answered in the end."""
    limiter = getattr(api.client.app.state.services.call_limits, limit)  # type: ignore[attr-defined]  # a test client
    with ThreadPoolExecutor(CALLS + 1) as pool:
        try:
            calls: list[Future[httpx.Response]] = [pool.submit(call) for _ in range(CALLS)]
            deadline = time.monotonic() + 60
            while held.begun < most or limiter.statistics().tasks_waiting < CALLS - most:
                assert time.monotonic() < deadline, f"{held.begun} began, {limiter.statistics()}"
                time.sleep(0.02)
            read = pool.submit(api.get, "/v1/ablations").result(60)
            assert (read.status_code, held.begun) == (200, most)
        finally:
            held.go_on.set()
        return [one.result(60).status_code for one in calls]


def test_many_imports_at_once_hold_up_nobody_who_reads(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(imports._verified, monkeypatch, imports)
    files = {path: data.decode() for path, data in make_bundle(make_file()).items()}
    body = {"bundles": [{"files": files}], "unsigned": True}

    def send() -> httpx.Response:
        return api.client.post("/v1/ablations:import", headers=api.admin, json=body)

    assert crowd(api, held, "imports", threads.IMPORTS_AT_ONCE, send) == [200] * CALLS
    assert len(api.get("/v1/ablations").json()["items"]) == 1


def test_many_large_plans_at_once_hold_up_nobody_who_reads(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(submissions.make_plan, monkeypatch, submissions)
    most = threads.SUBMISSIONS_AT_ONCE
    assert crowd(api, held, "submissions", most, lambda: httpx.Response(202, json=api.submit())) == [202] * CALLS
    assert len(api.get("/v1/ablations").json()["items"]) == CALLS


def test_every_request_that_runs_has_a_connection_and_more_wait_for_one(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [threads.WORKERS_AT_ONCE, threads.IMPORTS_AT_ONCE, threads.SUBMISSIONS_AT_ONCE, threads.OTHERS_AT_ONCE]
    store = api.store
    monkeypatch.setattr(store.reader.pool, "_timeout", 1.0)
    with ExitStack() as held:
        for _ in range(sum(requests)):
            held.enter_context(store.read())
        assert api.get("/v1/ablations").status_code == 200  # and somebody beside them finds one, too
        for _ in range(threads.CONNECTIONS - sum(requests)):
            held.enter_context(store.read())
        assert api.get("/v1/ablations").status_code == 503
    assert api.get("/v1/ablations").status_code == 200
