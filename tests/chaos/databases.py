"""The databases under test."""

import os
import shutil
import sqlite3
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from ablate.service.store.session import CONNECTIONS
from tests.chaos.disks import SmallDisk
from tests.chaos.processes import Part
from tests.chaos.proxies import Proxies
from tests.ports import free_port
from tests.waiting import until

Rows = list[dict[str, Any]]

TABLES = (
    *("ablations", "blocks", "trials", "attempts", "receipts", "events", "outbox", "idempotency", "nodes"),
    "log_chunks",
)
_OTHERS = 10
"""Connections of the checker and of PostgreSQL's administrators."""
_PERSON = "pgserver"
"""System user for the wheel's PostgreSQL if we are root, because it refuses to run as root."""


class Sqlite:
    """A database file without a process of its own."""

    kind = "sqlite"

    def __init__(self, disk: SmallDisk, _logs: Path, _proxies: Proxies, *, processes: int) -> None:
        self.part: Part | None = None
        self._file = disk.folder / "ablate.db"
        self.url = f"sqlite:///{self._file}"

    def create(self) -> None:
        """Do nothing: the service creates the file."""

    def slow(self, _seconds: float) -> AbstractContextManager[None] | None:
        """Take the write lock from outside; None if another process has it."""
        holder = sqlite3.connect(self._file, timeout=0.2, isolation_level=None, check_same_thread=False)
        try:
            holder.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            holder.close()
            return None
        return _released(holder)

    def rows(self, table: str) -> Rows:
        """Return every row of a table."""
        reader = sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=30)
        reader.row_factory = sqlite3.Row
        rows = [dict(row) for row in reader.execute(f'SELECT * FROM "{table}"')]  # noqa: S608 - our own names
        reader.close()
        return rows


@contextmanager
def _released(holder: sqlite3.Connection) -> Iterator[None]:
    yield
    holder.rollback()
    holder.close()


class Postgres:
    """A server from the wheel `pgserver`, behind a proxy."""

    kind = "postgresql"

    def __init__(self, disk: SmallDisk, logs: Path, proxies: Proxies, *, processes: int) -> None:
        self._data, self._port = disk.folder / "data", free_port()
        self._proxy = proxies.between(self._port)
        self._user = _unprivileged(disk.folder)
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self._proxy.port}/ablate"
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": str(_connections(processes)),
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = [str(_binaries() / "postgres"), "-D", str(self._data), "-p", str(self._port), *words]
        self.part: Part | None = Part("database", command, {}, logs / "database.log", user=self._user)

    @property
    def proxy(self) -> Any:
        """Return the proxy between the service and the server."""
        return self._proxy

    def create(self) -> None:
        """Create and start the cluster, and create an empty database."""
        assert self.part is not None
        command = [str(_binaries() / "initdb"), "-D", str(self._data), "-A", "trust", "-U", "postgres", "-E", "utf8"]
        subprocess.run(command, check=True, capture_output=True, user=self._user, group=self._user, extra_groups=[])
        self.part.start()
        until(self._made, what="PostgreSQL")

    def slow(self, seconds: float) -> AbstractContextManager[None] | None:
        """Delay every message."""
        return self._proxy.slow(min(0.2, seconds / 10))  # type: ignore[no-any-return]

    def rows(self, table: str) -> Rows:
        """Return every row of a table, bypassing the proxy."""
        with self._connect("ablate") as connection, connection.cursor(row_factory=dict_row) as cursor:
            return list(cursor.execute(f'SELECT * FROM "{table}"'))  # noqa: S608 - our own names

    def _connect(self, database: str) -> "psycopg.Connection[Any]":
        deadline = time.monotonic() + 60
        while True:
            try:
                return psycopg.connect(
                    host="127.0.0.1", port=self._port, user="postgres", dbname=database, autocommit=True
                )
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _made(self) -> bool:
        try:
            with psycopg.connect(host="127.0.0.1", port=self._port, user="postgres", autocommit=True) as connection:
                connection.execute("CREATE DATABASE ablate")
        except psycopg.OperationalError:
            return False
        return True


def _connections(processes: int) -> int:
    """Return how many connections so many processes of the service may have, each beside one that was killed or frozen.

    The server ends connections of the dead when it notices; those of the frozen it keeps.
    """
    return 2 * processes * CONNECTIONS + _OTHERS


DATABASES = {"sqlite": Sqlite, "postgresql": Postgres}


def _binaries() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder of a desktop session when it is imported
        from pgserver._commands import POSTGRES_BIN_PATH
    return Path(POSTGRES_BIN_PATH)


def _unprivileged(folder: Path) -> str | None:
    """Return a user that PostgreSQL runs as, who owns `folder`, where we are root; else None."""
    if os.geteuid() != 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pgserver.utils import ensure_user_exists
    ensure_user_exists(_PERSON)
    shutil.chown(folder, _PERSON, _PERSON)
    return _PERSON
