"""Database connections: one writer and several readers for SQLite, one pool for PostgreSQL, chosen by the URL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import ConnectionPoolEntry
from tenacity import retry, retry_if_exception_message, stop_after_delay, wait_fixed

from ablate.service.errors import ConfigurationError

# Requests of an API process that run at once, by kind. Each kind has threads of its own: long imports and plans never
# delay a worker's call or a read. Python runs one thread at a time, and at every statement a heartbeat waits up to 5 ms
# for each busy thread. So few threads compute, and a second API process serves more people.
WORKERS_AT_ONCE = 8
LONG_AT_ONCE = 1
"""Submissions, plans and imports: a large one takes seconds."""
OTHERS_AT_ONCE = 3
"""All other requests, which read."""
_EXTRA = 6
"""Connections for streams, token lookups, probes and wake-ups; each is in use for milliseconds."""

CONNECTIONS = WORKERS_AT_ONCE + LONG_AT_ONCE + OTHERS_AT_ONCE + _EXTRA
"""Most connections of a process: one for each running request, so that none waits for a connection."""
BUSY_TIMEOUT_MS = 15_000
POOL_TIMEOUT_S = 20.0
KEPT = 8
"""Open connections to PostgreSQL; further ones are closed after use. Each new connection starts a server process."""
_KEPT_READERS = 8
"""Open connections to SQLite; further ones are closed after use."""
ANSWER_S = 30.0
"""PostgreSQL's time for an answer. After that the connection is closed: its server or its network is silent."""
PING_S = 3.0
"""PostgreSQL's time for the ping of a pooled connection. The first silent one replaces all: nobody answers connections
to a database that moved, and clients wait for about 10 s."""
_LIMITS = {"statement_timeout": "25s", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "60s"}
"""Limits that PostgreSQL enforces, so that a lock does not outlive its client for long."""
_CONNECTING: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Seconds for libpq to connect, then its probes of a silent network, the last one in milliseconds."""
_READ_ONLY, _IDLE = "25006", "25P03"
"""PostgreSQL's error codes for a write in a read-only transaction, and for one that was idle for too long."""


class Store:
    """The database: `write` opens a transaction, `read` sees committed data."""

    def __init__(self, url: str) -> None:
        self.url = url
        backend = make_url(url).get_backend_name()
        if backend == "sqlite":
            self.writer, self.reader = _sqlite(url)
        elif backend == "postgresql":
            self.writer = _postgresql(url)
            self.reader = self.writer.execution_options(isolation_level="REPEATABLE READ")
        else:
            raise ConfigurationError(
                f"ABLATE_DATABASE_URL names {backend!r}; allowed: sqlite:///..., postgresql+psycopg://..."
            )
        self._closed = False
        for pool in {self.writer.pool, self.reader.pool}:
            event.listen(pool, "checkin", self._end_if_closed)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction: leaving commits it, an exception rolls it back. On SQLite writers wait for each other."""
        with self.writer.begin() as connection:
            yield connection

    @contextmanager
    def write_for_long(self) -> Iterator[Connection]:
        """Open a transaction whose statements may take any time, such as a migration."""
        with self.writer.begin() as connection:
            driver = connection.connection.driver_connection
            if not isinstance(driver, _Limited):
                yield connection
                return
            for name in _LIMITS:
                connection.exec_driver_sql(f"SET LOCAL {name} = 0")
            driver.answer_s = None
            try:
                yield connection
            finally:
                driver.answer_s = ANSWER_S

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a connection that only reads; all its statements see the data of one moment, that of the first."""
        with self.reader.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection; one in use is closed when its thread returns it."""
        self._closed = True
        self.reader.dispose()
        self.writer.dispose()

    def _end_if_closed(self, connection: object | None, record: ConnectionPoolEntry) -> None:
        if self._closed and connection is not None:
            record.invalidate()


class _Limited(psycopg.Connection[Any]):
    """A connection that closes itself when an answer takes longer than `answer_s`."""

    answer_s: float | None = ANSWER_S

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for an answer. Raises psycopg.OperationalError."""
        limit, began = self.answer_s if timeout is None else timeout, monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError as error:
            if limit is None or monotonic() - began < limit:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer from PostgreSQL for {limit:g} s") from error


def _connect(_dialect: object, _record: object, words: list[Any], options: dict[str, Any]) -> Any:
    """Connect with limits on every wait; the URL may set other limits for libpq."""
    connection = _Limited.connect(*words, **(_CONNECTING | options), autocommit=True)
    for name, limit in _LIMITS.items():
        connection.execute(f"SET {name} = '{limit}'")
    connection.autocommit = False
    return connection


def _postgresql(url: str) -> Engine:
    engine = create_engine(
        url, pool_size=KEPT, max_overflow=CONNECTIONS - KEPT, pool_pre_ping=True, pool_timeout=POOL_TIMEOUT_S
    )
    engine.dialect.do_ping = partial(_ping, engine.dialect.do_ping)  # type: ignore[method-assign]
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "handle_error", _replace_useless)
    return engine


def _ping(ping: Callable[[Any], bool], connection: Any) -> bool:
    connection.answer_s = PING_S
    try:
        return ping(connection)
    finally:
        connection.answer_s = ANSWER_S


def _sqlite(url: str) -> tuple[Engine, Engine]:
    path = make_url(url).database
    if not path or path == ":memory:":
        raise ConfigurationError("ABLATE_DATABASE_URL needs a file for SQLite: API and background process share it")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch(mode=0o600, exist_ok=True)  # SQLite gives its journals the same mode
    writer = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=POOL_TIMEOUT_S)
    more = CONNECTIONS - _KEPT_READERS
    reader = create_engine(url, pool_size=_KEPT_READERS, max_overflow=more, pool_timeout=POOL_TIMEOUT_S)
    event.listen(writer, "connect", partial(_prepare, ("synchronous=FULL", "foreign_keys=ON")))
    event.listen(writer, "begin", _begin_immediate)
    event.listen(writer, "handle_error", _replace_useless)
    event.listen(reader, "connect", partial(_prepare, ("query_only=ON",)))
    event.listen(reader, "begin", _begin)
    return writer, reader


def is_read_only(error: BaseException | None) -> bool:
    """Return whether a driver's error says that the database is read-only."""
    return getattr(error, "sqlstate", None) == _READ_ONLY or "readonly database" in str(error)


def is_cut_off(error: BaseException | None) -> bool:
    """Return whether PostgreSQL ended the connection because its transaction was idle for too long."""
    return getattr(error, "sqlstate", None) == _IDLE


def _replace_useless(context: ExceptionContext) -> None:
    """Replace the connections after a read-only error: one opened while the database was read-only stays read-only."""
    if is_read_only(context.original_exception) or is_cut_off(context.original_exception):
        context.is_disconnect = True


def _prepare(pragmas: tuple[str, ...], connection: Any, _record: object) -> None:
    connection.isolation_level = None
    _use_wal(connection)
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", *pragmas):
        connection.execute(f"PRAGMA {pragma}")


@retry(
    retry=retry_if_exception_message(message="database is locked"),
    wait=wait_fixed(0.02),
    stop=stop_after_delay(BUSY_TIMEOUT_MS / 1000),
    reraise=True,
)
def _use_wal(connection: Any) -> None:
    """Switch to write-ahead logging. On a new file SQLite does not wait for another process that does it too."""
    connection.execute("PRAGMA journal_mode=WAL")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
