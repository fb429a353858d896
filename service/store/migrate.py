"""Bring a database to the newest schema: at the API's start, or by `python -m ablate.service.store.migrate`.

`--dry-run` only lists the migrations that wait. While one waits, older code must not run beside newer code.
"""

import argparse
import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from ablate.service.errors import ConfigurationError
from ablate.service.settings import get_settings
from ablate.service.store.session import Store

FOLDER = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x41424C41


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def upgrade(store: Store) -> None:
    """Run every migration that the database lacks, in one transaction, one process at a time.

    Raises ConfigurationError if this code cannot upgrade from the database's revision.
    """
    config = _config()
    with store.write_for_long() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        check_revision(MigrationContext.configure(connection).get_current_revision())
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def known_revisions() -> list[str]:
    """Return the revisions that this code can bring to the newest one, oldest first."""
    return [script.revision for script in _scripts().walk_revisions()][::-1]


def check_revision(current: str | None) -> None:
    """Raise ConfigurationError unless this code can upgrade from `current`; None is an empty database."""
    revisions = known_revisions()
    if current is None or current in revisions:
        return
    raise ConfigurationError(
        f"the database is at revision {current!r}, which this version does not know (its newest is {revisions[-1]!r}): "
        "another version has migrated it. Run that version, or restore the backup from before the upgrade"
    )


def newest_revision() -> str:
    """Return the revision that this code expects."""
    return known_revisions()[-1]


def current_revision(store: Store) -> str | None:
    """Return the database's revision, None for an empty database."""
    with store.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def waiting(store: Store) -> list[str]:
    """Return the migrations that the database lacks, oldest first, as "revision: subject".

    Raises ConfigurationError if this code cannot upgrade from the database's revision.
    """
    current = current_revision(store)
    check_revision(current)
    scripts = _scripts().iterate_revisions("head", current or "base")
    return [f"{script.revision}: {(script.doc or '').splitlines()[0]}" for script in scripts][::-1]


def main() -> int:
    """Run the waiting migrations and print them; return 1 if that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m ablate.service.store.migrate", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only print them")
    dry_run = parser.parse_args().dry_run
    try:
        store = Store(get_settings().sqlalchemy_url)
    except ConfigurationError as error:
        sys.stderr.write(f"cannot migrate: {error}\n")
        return 1
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
