"""Migrations: a new database, one of today's revision, and those that this version rejects; on both databases."""

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fastapi.testclient import TestClient
from sqlalchemy import text

from service.app import create_app
from service.errors import ConfigurationError
from service.store import migrate
from service.store.ablations.circumstances import family_of
from service.store.session import Store
from service.store.tables import metadata
from tests.api_stack import database_url, running_api, settings_for

FIRST = "0015"
"""The revision of databases that were migrated here before the first release: its schema never changes."""
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


def test_a_database_of_the_first_revision_goes_on(url: str, store: Store, tmp_path: Path) -> None:
    config = migrate._config()
    with store.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, FIRST)
        connection.execute(text("INSERT INTO leaders VALUES ('judge', 'somebody', 0)"))
    with running_api("sqlite", tmp_path, database_url=url) as api:
        api.submit()
        assert api.finish(api.register()) == 6
    with store.read() as connection:
        assert connection.execute(text("SELECT holder FROM leaders WHERE duty = 'judge'")).scalar_one() == "somebody"
    assert differences(store) == []


def test_questions_of_an_earlier_version_still_count(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migration = import_module("service.store.migrations.versions.0017_questions_by_content")
    migrate.upgrade(store)
    with running_api("sqlite", tmp_path, database_url=url) as api:
        first, unreadable, older, again = (api.submit() for _ in range(4))
    with store.write() as connection:
        connection.execute(text("UPDATE questions SET digest = 'sha256:as earlier'"))
        later = text("UPDATE ablations SET spec_text = 'x' WHERE id = :id")
        connection.execute(later, {"id": unreadable["id"]})
        connection.execute(text("UPDATE ablations SET plan = '{}' WHERE id = :id"), {"id": older["id"]})
        monkeypatch.setattr(migration.op, "get_bind", lambda: connection)
        migration.upgrade()
    with store.read() as connection:
        assert [one.ablation for one in family_of(connection, again["id"]).earlier] == [first["id"]]


def test_nodes_of_an_earlier_version_keep_the_results_of_their_back_ends(url: str, store: Store) -> None:
    config = migrate._config()
    lanes = {"cuda": None, "peer": "missing", "attention=fa4": "refused: no package", "loss=quack": None}
    registrations = {"tried": {"lanes": lanes}, "works": {"lanes": {"cuda": None}}, "untried": {"lanes": None}}
    with store.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0022")
        row = {"node_class": "h100", "registered_at": 0.0, "seen_at": 0.0, "draining": False}
        row |= {"resumed_at": 0.0, "num_devices": 1}
        columns = ", ".join(["id", "name", "registration", *row])
        values = ", ".join(f":{name}" for name in ["id", "name", "registration", *row])
        for name, registration in registrations.items():
            own = {"id": name, "name": name, "registration": json.dumps(registration), **row}
            connection.execute(text(f"INSERT INTO nodes ({columns}) VALUES ({values})"), own)  # noqa: S608
        command.upgrade(config, "0023")
    with store.read() as connection:
        failed = {row.id: row.failed_back_ends for row in connection.execute(text("SELECT * FROM nodes"))}
    reasons = {"peer": "missing", "attention=fa4": "refused: no package"}
    assert failed == {"tried": json.dumps(reasons), "works": None, "untried": None}


@pytest.mark.parametrize(("revision", "advice"), [("0014", "upgrades only from '0015'"), ("9999", "backup")])
def test_a_database_of_another_version_is_rejected_unchanged_with_what_to_do(
    url: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    revision: str,
    advice: str,
) -> None:
    migrate.upgrade(store)
    set_revision(store, revision)
    with pytest.raises(ConfigurationError, match=f"revision '{revision}'.*{advice}"):
        migrate.upgrade(store)
    with (
        pytest.raises(ConfigurationError, match=revision),
        TestClient(create_app(settings_for(url, tmp_path / "home"), store)),
    ):
        pass
    monkeypatch.setattr(migrate, "get_settings", lambda: SimpleNamespace(sqlalchemy_url=url))
    monkeypatch.setattr("sys.argv", ["migrate", "--dry-run"])
    assert migrate.main() == 1
    assert advice in capsys.readouterr().err
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
