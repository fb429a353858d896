"""Bring a database to the newest schema: at the API's start, or by `python -m service.store.migrate`.

With `--dry-run` it only says which migrations wait: while one does, older code must not run beside newer.
"""

import argparse
import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from service.errors import ConfigurationError
from service.settings import get_settings
from service.store.session import Store

FOLDER = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x41424C41


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    return config


def upgrade(store: Store) -> None:
    """Run every migration that the database lacks, in one transaction, one process at a time.

    Raises ConfigurationError when the database is of newer code.
    """
    config = _config()
    with store.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        _refuse_newer(MigrationContext.configure(connection).get_current_revision())
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def known_revisions() -> frozenset[str]:
    """Return the revisions that this code can bring to the newest one."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _refuse_newer(current: str | None) -> None:
    if current is not None and current not in known_revisions():
        raise ConfigurationError(
            f"the database is at schema {current!r}, which this code does not know (it ends at {newest_revision()!r}): "
            "newer code has migrated it; run that code, or restore the backup from before the upgrade"
        )


def newest_revision() -> str:
    """Return the revision that this code expects."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def current_revision(store: Store) -> str | None:
    """Return the database's revision, None for an empty database."""
    with store.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def waiting(store: Store) -> list[str]:
    """Return the migrations that the database lacks, oldest first, each with what it is about.

    Raises ConfigurationError when the database is of newer code.
    """
    current = current_revision(store)
    _refuse_newer(current)
    scripts = ScriptDirectory.from_config(_config()).iterate_revisions("head", current or "base")
    return [f"{script.revision}: {(script.doc or '').splitlines()[0]}" for script in scripts][::-1]


def main() -> int:
    """Print the migrations that wait, and run them; return 1 when that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m service.store.migrate", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only print them")
    dry_run = parser.parse_args().dry_run
    store = Store(get_settings().sqlalchemy_url)
    try:
        pending = waiting(store)
        if not dry_run:
            upgrade(store)
        sys.stdout.write("".join(f"{one}\n" for one in pending) or "no migration waits\n")
    except ConfigurationError as error:
        sys.stderr.write(f"cannot migrate: {error}\n")
        return 1
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
