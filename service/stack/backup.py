"""Back up the database of an embedded stack to one file, while the stack runs, and restore it.

PostgreSQL has its own programs for this; docs/operate.md says how.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from ablate.service.errors import ConfigurationError, StackError
from ablate.service.stack import control
from ablate.service.stack.layout import StackFiles
from ablate.service.store.access import revocations
from ablate.service.store.access.revocations import Revocations
from ablate.service.store.migrate import check_revision

_PROBLEMS_SHOWN = 3


def back_up(url: str, target: Path) -> int:
    """Write a consistent copy of the database to the new file `target`, and return its size in bytes.

    Checks the database before and the copy after. Raises StackError if either is damaged, if the database is not SQLite
    or is missing, or if `target` exists. An incomplete copy is removed.
    """
    source = _sqlite_file(url)
    if not source.is_file():
        raise StackError(f"there is no database at {source}; no stack ever ran in this home")
    if target.exists():
        raise StackError(f"{target} exists; a backup never overwrites a file")
    _check_whole(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch(mode=0o600)
    try:
        with closing(sqlite3.connect(source)) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
        _check_whole(target)
    except (sqlite3.Error, StackError) as error:
        target.unlink()
        raise StackError(f"{target} was not written: {error}") from error
    return target.stat().st_size


class Restored(NamedTuple):
    """The result of a restore."""

    previous: Path | None
    """New path of the previous database; None if there was none."""
    revived: list[str] | None
    """What the backup knows as valid and the previous database had ended; None if nobody can read that one."""


def restore(url: str, backup: Path, files: StackFiles, *, keep_revocations: bool = False) -> Restored:
    """Replace the database with `backup`; `keep_revocations` ends what the previous database had ended.

    Checks the backup and its copy first. Raises StackError while a stack runs in the home, if this code cannot read the
    backup, if the backup or its copy is damaged, or if the revocations to keep cannot be read. Then the database stays
    as it was.
    """
    if control.running(files) is not None:
        raise StackError("a stack runs in this home; stop it first: ablate down")
    _check(backup)
    database = _sqlite_file(url)
    database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = _revocations(database)
    if keep_revocations and before is None:
        raise StackError(f"{database} cannot be read, so its revocations cannot be kept; restore without them")
    copy = database.with_name(database.name + ".new")
    try:
        shutil.copyfile(backup, copy)
        copy.chmod(0o600)
        _check(copy)
        revived = None if before is None else _end_again(copy, before, end=keep_revocations)
    except (OSError, StackError, SQLAlchemyError):
        copy.unlink(missing_ok=True)
        raise
    previous = _move_aside(database)
    copy.replace(database)
    return Restored(previous, revived)


def _revocations(database: Path) -> Revocations | None:
    """Return what has ended in a database; None if it cannot be read. A missing one has ended nothing."""
    if not database.exists():
        return Revocations(tokens={}, secrets={}, keys={})
    with _engine(database) as engine:
        try:
            with engine.connect() as connection:
                return revocations.read(connection)
        except SQLAlchemyError:
            return None


def _end_again(database: Path, before: Revocations, *, end: bool) -> list[str]:
    with _engine(database) as engine, engine.begin() as connection:
        return revocations.revived(connection, before, end=end)


@contextmanager
def _engine(database: Path) -> Iterator[Engine]:
    """Open a database that no stack uses, without a change of its journal."""
    engine = create_engine(f"sqlite:///{database}")
    try:
        yield engine
    finally:
        engine.dispose()


def _sqlite_file(url: str) -> Path:
    address = make_url(url)
    if address.get_backend_name() != "sqlite" or not address.database:
        raise StackError("this database is not SQLite; back it up with pg_dump -Fc, restore it with pg_restore")
    return Path(address.database)


def _check(backup: Path) -> None:
    if not backup.is_file():
        raise StackError(f"there is no file {backup}")
    try:
        with _opened(backup) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StackError(f"{backup} is not an Ablate backup: {error}") from error
    try:
        check_revision(revision)
    except ConfigurationError as error:
        raise StackError(f"{backup} cannot be restored: {error}") from error
    _check_whole(backup)


def _check_whole(database: Path) -> None:
    """Raise StackError if SQLite's own check finds the file damaged."""
    try:
        with _opened(database) as connection:
            problems = [row[0] for row in connection.execute(f"PRAGMA integrity_check({_PROBLEMS_SHOWN})")]
    except sqlite3.Error as error:
        problems = [str(error)]
    if problems != ["ok"]:
        raise StackError(f"{database} is damaged: {' '.join('; '.join(problems).split())}")


def _opened(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"file:{quote(str(database.absolute()))}?mode=ro", uri=True))


def _move_aside(database: Path) -> Path | None:
    """Rename a database and its write-ahead log: SQLite would apply the log to the new database."""
    if not database.exists():
        return None
    previous = database.with_name(f"{database.name}.until-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for suffix in ("-wal", "-shm", ""):
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.replace(previous.with_name(previous.name + suffix))
    return previous
