"""Back up and restore the database of an embedded stack: one file, taken while everything runs.

A PostgreSQL database is backed up with PostgreSQL's own programs; docs/operate.md says how.
"""

import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy.engine import make_url

from service.errors import StackError
from service.stack import control
from service.stack.layout import StackFiles
from service.store.migrate import known_revisions


def back_up(url: str, target: Path) -> int:
    """Write a consistent copy of the database into the new file `target`; return its bytes.

    Raises StackError when the database is not SQLite's, is not there, or `target` exists.
    """
    source = _sqlite_file(url)
    if not source.is_file():
        raise StackError(f"there is no database at {source}; nothing was ever started in this home")
    if target.exists():
        raise StackError(f"{target} exists; a backup never overwrites one")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch(mode=0o600)
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("VACUUM INTO ?", (str(target),))
    return target.stat().st_size


def restore(url: str, backup: Path, files: StackFiles) -> Path | None:
    """Put `backup` in the database's place; return where the database that was there is now, None without one.

    Raises StackError while a stack runs in the home, or when the file is no database that this code can read.
    """
    if control.running(files) is not None:
        raise StackError("a stack runs in this home; stop it first: ablate down")
    _check(backup)
    place = _sqlite_file(url)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = _move_aside(place)
    fresh = place.with_name(place.name + ".new")
    shutil.copyfile(backup, fresh)
    fresh.chmod(0o600)
    fresh.replace(place)
    return kept


def _sqlite_file(url: str) -> Path:
    address = make_url(url)
    if address.get_backend_name() != "sqlite" or not address.database:
        raise StackError("this database is not SQLite's; back it up with pg_dump -Fc, restore it with pg_restore")
    return Path(address.database)


def _check(backup: Path) -> None:
    if not backup.is_file():
        raise StackError(f"there is no file {backup}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(backup.absolute()))}?mode=ro", uri=True)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StackError(f"{backup} is no backup of ours: {error}") from error
    if revision not in known_revisions():
        raise StackError(f"{backup} is at schema {revision!r}, which this code does not know")


def _move_aside(place: Path) -> Path | None:
    """Move a database away, with its write-ahead log: a log beside another database would be played into it."""
    if not place.exists():
        return None
    kept = place.with_name(f"{place.name}.until-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for suffix in ("-wal", "-shm", ""):
        part = place.with_name(place.name + suffix)
        if part.exists():
            part.replace(kept.with_name(kept.name + suffix))
    return kept
