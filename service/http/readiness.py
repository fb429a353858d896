"""What the service needs and whether it is there: each thing is asked in a thread of its own and given up in time."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from kombu.exceptions import OperationalError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from experiments.runtime.wake import celery_app
from service.http.shared_answer import SharedAnswer
from service.schemas.health import DependencyCheck, Readiness
from service.settings import ServiceSettings
from service.store import leaders
from service.store.session import Store

FRESH_S = 2.0
"""Everybody who asks within this time hears the same."""
PATIENCE_S = 3.0
_CONNECT_S = 2.0
_MLFLOW_PATH = "/api/2.0/mlflow/experiments/get-by-name"
"""Not /health: that answers even to host names which the server refuses everywhere else."""


class _Failed(Exception):
    """A check found what it looks for missing."""


@dataclass(frozen=True, kw_only=True)
class _Finished:
    at: float
    check: DependencyCheck


class DependencyProbe:
    """Asks for one thing; a question that hangs is never asked twice, and holds up nobody."""

    def __init__(self, name: str, ask: Callable[[], str]) -> None:
        self.name = name
        self._ask = ask
        self._answer: asyncio.Future[DependencyCheck] | None = None
        self._asked_at = 0.0

    async def check(self) -> DependencyCheck:
        """Return what was found, or for how long nothing has been heard."""
        if self._answer is None or self._answer.done():
            self._answer, self._asked_at = asyncio.get_running_loop().create_future(), time.monotonic()
            threading.Thread(target=self._run, args=(self._answer,), name=f"probe-{self.name}", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), PATIENCE_S)
        except TimeoutError:
            silent_s = time.monotonic() - self._asked_at
            return DependencyCheck(ok=False, detail=f"no answer for {silent_s:.0f} s")

    def _run(self, answer: "asyncio.Future[DependencyCheck]") -> None:
        try:
            found = DependencyCheck(ok=True, detail=self._ask())
        except (_Failed, SQLAlchemyError, OperationalError, httpx.HTTPError, OSError) as error:
            said = str(error) if isinstance(error, _Failed) else f"{type(error).__name__}: {error}"
            found = DependencyCheck(ok=False, detail=said[:500])
        except Exception as error:  # a thread's boundary: what nobody expected is a failed check, not silence
            found = DependencyCheck(ok=False, detail=f"unexpected {type(error).__name__}: {error}"[:500])
        loop = answer.get_loop()
        try:
            loop.call_soon_threadsafe(_tell, answer, found)
        except RuntimeError:  # the process ends; nobody waits any more
            return


def _tell(answer: "asyncio.Future[DependencyCheck]", found: DependencyCheck) -> None:
    if not answer.done():
        answer.set_result(found)


class ReadinessMonitor:
    """Answers `/readyz` for everybody who asks, with one round of checks every two seconds at most."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._essential = DependencyProbe("database", lambda: _database(store))
        self._others = (
            DependencyProbe("writes", lambda: _writes(store)),
            DependencyProbe("background", lambda: _background(store)),
            DependencyProbe("broker", lambda: _broker(settings.celery_url)),
            DependencyProbe("mlflow", lambda: _mlflow(settings.mlflow_url)),
        )
        self._shared = SharedAnswer(self._ask_all, fresh_s=FRESH_S)

    async def readiness(self) -> Readiness:
        """Return what was found at most two seconds ago."""
        return await self._shared.get()

    async def _ask_all(self) -> Readiness:
        probes = (self._essential, *self._others)
        found = await asyncio.gather(*(probe.check() for probe in probes))
        checks = {probe.name: check for probe, check in zip(probes, found, strict=True)}
        degraded = [probe.name for probe in self._others if not checks[probe.name].ok]
        return Readiness(ready=checks[self._essential.name].ok, degraded=degraded, checks=checks)


def _database(store: Store) -> str:
    with store.read() as connection:
        connection.execute(text("SELECT 1"))
    return store.writer.dialect.name


def _writes(store: Store) -> str:
    with store.write() as connection:
        leaders.touch_nothing(connection)
    return "the database takes changes"


def _background(store: Store) -> str:
    with store.read() as connection:
        silent = leaders.lapsed_duties(connection)
    if silent:
        raise _Failed(f"nobody does: {', '.join(silent)}; start `python -m service.background.main`, or read its log")
    return "every duty is held"


def _broker(url: str) -> str:
    app = celery_app(url, name="ablate-probe")
    patience = {"socket_timeout": _CONNECT_S}  # a frozen broker takes connections and answers nothing
    with app.connection_for_write(connect_timeout=_CONNECT_S, transport_options=patience) as connection:
        connection.ensure_connection(
            max_retries=1, interval_start=0, timeout=_CONNECT_S, reraise_as_library_errors=True
        )
        return str(connection.as_uri())


def _mlflow(url: str) -> str:
    answer = httpx.get(
        url.rstrip("/") + _MLFLOW_PATH, params={"experiment_name": "Default"}, timeout=_CONNECT_S, trust_env=False
    )
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
    return url
