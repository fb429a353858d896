"""Bring a database to the newest schema: at the API's start, or by `python -m service.store.migrate`."""

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


def main() -> int:
    """Migrate the configured database; return 1 when that is not possible."""
    store = Store(get_settings().sqlalchemy_url)
    try:
        upgrade(store)
    except ConfigurationError as error:
        sys.stderr.write(f"cannot migrate: {error}\n")
        return 1
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
