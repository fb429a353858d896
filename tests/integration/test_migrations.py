"""Migrations: a new database, one of today's revision, and those that this version rejects; on both databases."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fastapi.testclient import TestClient
from sqlalchemy import text

from ablate.service.app import create_app
from ablate.service.errors import ConfigurationError
from ablate.service.store import migrate
from ablate.service.store.session import Store
from ablate.service.store.tables import metadata
from tests.api_stack import database_url, settings_for

NEXT = '''"""A column more."""

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9000", "{newest}", None, None


def upgrade() -> None:
    op.add_column("leaders", sa.Column("more", sa.Integer()))
'''


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return database_url(request.param, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(url)
    yield opened
    opened.close()


def set_revision(store: Store, revision: str) -> None:
    with store.write() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))  # noqa: S608


def differences(store: Store) -> list[object]:
    with store.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))


def test_migrations_build_exactly_the_tables_of_the_code(store: Store) -> None:
    migrate.upgrade(store)
    migrate.upgrade(store)
    assert differences(store) == []
    assert migrate.current_revision(store) == migrate.newest_revision()


@pytest.mark.parametrize("revision", ["0015", "9999"])
def test_a_database_of_another_version_is_rejected_unchanged_with_what_to_do(
    url: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    revision: str,
) -> None:
    migrate.upgrade(store)
    set_revision(store, revision)
    with pytest.raises(ConfigurationError, match=f"revision '{revision}'.*backup"):
        migrate.upgrade(store)
    with (
        pytest.raises(ConfigurationError, match=revision),
        TestClient(create_app(settings_for(url, tmp_path / "home"), store)),
    ):
        pass
    monkeypatch.setattr(migrate, "get_settings", lambda: SimpleNamespace(sqlalchemy_url=url))
    monkeypatch.setattr("sys.argv", ["migrate", "--dry-run"])
    assert migrate.main() == 1
    assert "backup" in capsys.readouterr().err
    assert migrate.current_revision(store) == revision


def test_a_later_migration_is_listed_by_a_dry_run_and_then_applied(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    migrate.upgrade(store)
    folder = tmp_path / "migrations"
    shutil.copytree(migrate.FOLDER, folder)
    newest = migrate.newest_revision()
    (folder / "versions/9000_more.py").write_text(NEXT.replace("{newest}", newest))
    monkeypatch.setattr(migrate, "FOLDER", folder)
    monkeypatch.setattr(migrate, "get_settings", lambda: SimpleNamespace(sqlalchemy_url=url))

    def printed(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["migrate", *options])
        assert migrate.main() == 0
        return capsys.readouterr().out

    assert printed("--dry-run") == "9000: A column more.\n"
    assert migrate.current_revision(store) == newest
    assert printed() == "9000: A column more.\n"
    assert migrate.current_revision(store) == "9000"
    assert printed() == printed("--dry-run") == "no migration waits\n"
