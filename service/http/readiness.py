"""Readiness: whether the service reaches its dependencies. Each check runs in a thread of its own, with a time limit.

Anybody may ask without a token. All callers within two seconds share one answer, so their number costs nothing.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import httpx
from kombu.exceptions import OperationalError
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ablate.experiments.ids import new_id
from ablate.experiments.reporting import wording
from ablate.experiments.system.http_clients import http_client, reason, redirect_hint
from ablate.experiments.system.setting_values import without_credentials
from ablate.experiments.system.wake import celery_app
from ablate.service.lifecycle import PROJECTIONS
from ablate.service.schemas.public import DependencyCheck, Readiness
from ablate.service.settings import ServiceSettings
from ablate.service.store import leaders, outbox
from ablate.service.store.session import Store

FRESH_S = 2.0
PATIENCE_S = 3.0
_CONNECT_S = 2.0
_MOST = 500
"""Characters of a reason."""
_MLFLOW_PATH = "/api/2.0/mlflow/experiments/get-by-name"
"""Not /health: that answers even for host names that the server rejects everywhere else."""

_Answer = TypeVar("_Answer")


class SharedAnswer(Generic[_Answer]):
    """One answer for all callers, computed again when it is older than FRESH_S, never twice at once."""

    def __init__(self, compute: Callable[[], Awaitable[_Answer]]) -> None:
        self._compute = compute
        self._lock = asyncio.Lock()
        self._cached: tuple[float, _Answer] | None = None

    async def get(self) -> _Answer:
        """Return the cached answer, or compute it."""
        async with self._lock:
            if self._cached is None or time.monotonic() - self._cached[0] > FRESH_S:
                answer = await self._compute()
                self._cached = time.monotonic(), answer
            return self._cached[1]


class _Failed(Exception):
    """A check failed; the message says why."""


class DependencyProbe:
    """Checks one dependency. A check that hangs is never started twice and delays no other."""

    def __init__(self, name: str, ask: Callable[[], str]) -> None:
        self.name = name
        self._ask = ask
        self._answer: asyncio.Future[DependencyCheck] | None = None
        self._began_at = 0.0

    async def check(self) -> DependencyCheck:
        """Return the result, or for how long there has been no answer."""
        if self._answer is None or self._answer.done():
            self._answer, self._began_at = asyncio.get_running_loop().create_future(), time.monotonic()
            threading.Thread(target=self._run, args=(self._answer,), name=f"probe-{self.name}", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), PATIENCE_S)
        except TimeoutError:
            silent_s = time.monotonic() - self._began_at
            return DependencyCheck(ok=False, detail=f"no answer for {silent_s:.0f} s")

    def _run(self, answer: "asyncio.Future[DependencyCheck]") -> None:
        try:
            result = DependencyCheck(ok=True, detail=self._ask())
        except _Failed as error:
            result = DependencyCheck(ok=False, detail=str(error)[:500])
        except (SQLAlchemyError, OperationalError, httpx.HTTPError, OSError) as error:
            result = DependencyCheck(ok=False, detail=f"{type(error).__name__}: {error}"[:_MOST])
        except Exception as error:  # a thread's boundary: an unexpected error is a failed check, not silence
            result = DependencyCheck(ok=False, detail=f"unexpected {type(error).__name__}: {error}"[:_MOST])
        try:
            answer.get_loop().call_soon_threadsafe(_deliver, answer, result)
        except RuntimeError:  # the process is ending; nobody waits any more
            return


def _deliver(answer: "asyncio.Future[DependencyCheck]", result: DependencyCheck) -> None:
    if not answer.done():
        answer.set_result(result)


class ReadinessMonitor:
    """Answers `/readyz` for all callers, with at most one round of checks every two seconds."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._essential = DependencyProbe("database", lambda: _database(store))
        self._others = (
            DependencyProbe("writes", lambda: _writes(store)),
            DependencyProbe("background", lambda: _background(store, settings.projector_lease_s)),
            DependencyProbe("broker", lambda: _broker(settings.celery_url)),
            DependencyProbe("mlflow", lambda: _mlflow(settings.mlflow_url)),
            DependencyProbe("projection", lambda: _projection(store)),
        )
        self._shared = SharedAnswer(self._check_all)

    async def readiness(self) -> Readiness:
        """Return the result of checks that are at most two seconds old."""
        return await self._shared.get()

    async def _check_all(self) -> Readiness:
        probes = (self._essential, *self._others)
        results = await asyncio.gather(*(probe.check() for probe in probes))
        checks = {probe.name: check for probe, check in zip(probes, results, strict=True)}
        degraded = [probe.name for probe in self._others if not checks[probe.name].ok]
        return Readiness(ready=checks[self._essential.name].ok, degraded=degraded, checks=checks)


def _database(store: Store) -> str:
    with store.read() as connection:
        leaders.read_mark(connection)  # reads pages of the file, which SELECT 1 does not
    return store.writer.dialect.name


def _writes(store: Store) -> str:
    mark = new_id("x")
    try:
        stored = _stored(store, mark)
    except IntegrityError:  # another process wrote the first mark at this moment
        stored = _stored(store, mark)
    if stored != mark:
        raise _Failed(f"the database returned {stored!r} for the stored value {mark!r}")
    return "the database accepts changes"


def _stored(store: Store, mark: str) -> str | None:
    with store.write() as connection:
        leaders.write_mark(connection, mark)
        return leaders.read_mark(connection)


def _background(store: Store, lease_s: float) -> str:
    with store.read() as connection:
        leads = leaders.has_leader(connection, lease_s=lease_s)
    if not leads:
        raise _Failed("no background process leads; start `python -m ablate.service.background.main`, or read its log")
    return "a background process leads"


def _broker(url: str) -> str:
    app = celery_app(url, name="ablate-probe")
    timeout = {"socket_timeout": _CONNECT_S}  # a frozen broker accepts connections and answers nothing
    with app.connection_for_write(connect_timeout=_CONNECT_S, transport_options=timeout) as connection:
        connection.ensure_connection(
            max_retries=1, interval_start=0, timeout=_CONNECT_S, reraise_as_library_errors=True
        )
        return str(connection.as_uri())


def _mlflow(url: str) -> str:
    address = without_credentials(url)
    try:
        with http_client(url, timeout=_CONNECT_S) as client:
            answer = client.get(_MLFLOW_PATH, params={"experiment_name": "Default"})
    except httpx.HTTPError as error:
        raise _Failed(f"{address}: {reason(error, url)}") from error
    if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
        raise _Failed(f"{address} answers {answer.status_code}{redirect_hint(answer)}")
    return address


def _projection(store: Store) -> str:
    """Fail while MLflow lacks an ablation because a try failed, whoever can reach the server."""
    with store.read() as connection:
        failing = outbox.failing(connection, PROJECTIONS)
    if failing.count:
        raise _Failed(
            f"{wording.counted(failing.count, 'ablation')} not written to MLflow yet: {failing.error}"[:_MOST]
        )
    return "no ablation waits because of an error"
