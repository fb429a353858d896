"""Connections: one writer and several readers for SQLite, one pool for PostgreSQL. Only the URL chooses."""

import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry
from tenacity import retry, retry_if_exception_message, stop_after_delay, wait_fixed

from service.errors import ConfigurationError
from service.threads import CONNECTIONS

BUSY_TIMEOUT_MS = 15_000
POOL_TIMEOUT_S = 20.0
KEPT = 12
"""Connections to PostgreSQL that are kept: each new one is a process that first reads the catalogue. More end with
their use."""
_KEPT_READERS = 8
"""Connections to SQLite that are kept."""
_READ_ONLY = "25006"
"""PostgreSQL: the transaction may only read."""


class Store:
    """The database behind two verbs: `write` is one transaction, `read` sees committed data."""

    def __init__(self, url: str) -> None:
        self.url = url
        backend = make_url(url).get_backend_name()
        if backend == "sqlite":
            self.writer, self.reader = _sqlite(url)
        elif backend == "postgresql":
            self.writer = _postgresql(url)
            self.reader = self.writer.execution_options(isolation_level="AUTOCOMMIT")
        else:
            raise ConfigurationError(
                f"ABLATE_DATABASE_URL names {backend!r}; allowed: sqlite:///..., postgresql+psycopg://..."
            )
        self._closed = False
        for pool in {self.writer.pool, self.reader.pool}:
            event.listen(pool, "checkin", self._end_if_closed)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction; leaving commits it, an exception rolls it back. On SQLite writers queue here."""
        with self.writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a connection that only reads; every statement sees what is committed by then."""
        with self.reader.connect() as connection:
            yield connection

    def warm(self) -> None:
        """Open the connections that are kept, so that those who come first do not wait for them."""
        engine = self.writer if self.writer.dialect.name == "postgresql" else self.reader
        with ExitStack() as held:
            for _ in range(min(KEPT, engine.pool.size())):  # type: ignore[attr-defined]  # a queue's
                held.enter_context(engine.connect())

    def close(self) -> None:
        """Close every connection; one that a thread still holds is closed when it comes back."""
        self._closed = True
        self.reader.dispose()
        self.writer.dispose()

    def _end_if_closed(self, connection: object | None, record: ConnectionPoolEntry) -> None:
        if self._closed and connection is not None:
            record.invalidate()


def _postgresql(url: str) -> Engine:
    """Return the engine; what was used last is used first, for its process has the statements prepared."""
    engine = create_engine(
        url, pool_size=KEPT, max_overflow=CONNECTIONS - KEPT, pool_use_lifo=True, pool_timeout=POOL_TIMEOUT_S
    )
    event.listen(engine, "handle_error", _forget_read_only)
    event.listen(engine, "checkout", partial(_check_open, engine))
    return engine


def _check_open(engine: Engine, driver: Any, _record: object, _proxy: object) -> None:
    """Replace a connection that ended while nobody used it. Only where something has arrived the server is asked."""
    arrived = select.poll()
    arrived.register(driver.fileno(), select.POLLIN)
    if not arrived.poll(0):
        return
    try:
        engine.dialect.do_ping(driver)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _sqlite(url: str) -> tuple[Engine, Engine]:
    path = make_url(url).database
    if not path or path == ":memory:":
        raise ConfigurationError("ABLATE_DATABASE_URL needs a file for SQLite: API and background process share it")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch(mode=0o600, exist_ok=True)  # its journals get the same mode
    writer = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=POOL_TIMEOUT_S)
    more = CONNECTIONS - _KEPT_READERS
    reader = create_engine(url, pool_size=_KEPT_READERS, max_overflow=more, pool_timeout=POOL_TIMEOUT_S)
    event.listen(writer, "connect", _prepare_writer)
    event.listen(writer, "begin", _begin_immediate)
    event.listen(writer, "handle_error", _forget_read_only)
    event.listen(reader, "connect", _prepare_reader)
    return writer, reader


def is_read_only(error: BaseException | None) -> bool:
    """Tell whether a driver's error says that the database takes no changes."""
    return getattr(error, "sqlstate", None) == _READ_ONLY or "readonly database" in str(error)


def _forget_read_only(context: ExceptionContext) -> None:
    """Open the connections anew: one that was opened while the database only read stays so for ever."""
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def _prepare_writer(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    _use_wal(connection)
    for pragma in ("synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _prepare_reader(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    _use_wal(connection)
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "query_only=ON"):
        connection.execute(f"PRAGMA {pragma}")


@retry(
    retry=retry_if_exception_message(message="database is locked"),
    wait=wait_fixed(0.02),
    stop=stop_after_delay(BUSY_TIMEOUT_MS / 1000),
    reraise=True,
)
def _use_wal(connection: Any) -> None:
    """Switch to write-ahead logging; on a new file SQLite does not wait for another process that does the same."""
    connection.execute("PRAGMA journal_mode=WAL")


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
