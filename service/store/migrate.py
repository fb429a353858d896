"""Bring a database to the newest schema: at the API's start, or by `python -m service.store.migrate`."""

import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from service.settings import get_settings
from service.store.session import Store

FOLDER = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x41424C41


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    return config


def upgrade(store: Store) -> None:
    """Run every migration that the database lacks, in one transaction, one process at a time."""
    config = _config()
    with store.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def newest_revision() -> str:
    """Return the revision that this code expects."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def current_revision(store: Store) -> str | None:
    """Return the database's revision, None for an empty database."""
    with store.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def main() -> int:
    """Migrate the configured database."""
    store = Store(get_settings().sqlalchemy_url)
    upgrade(store)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
