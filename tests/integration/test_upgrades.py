"""A database of every earlier schema, with data in it, comes to the newest and loses nothing; a newer is refused."""

import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, insert, select, text
from sqlalchemy.types import BigInteger, Boolean, Double, Float, Integer, LargeBinary, Numeric

from service.background.outbox_handlers import OutboxHandlers
from service.errors import ConfigurationError
from service.lifecycle import OutboxKind
from service.store import migrate
from service.store.session import Store
from tests.api_stack import Api, database_url, running_api
from tests.integration.test_outbox import RecordingSink
from tests.projectors import projector

REVISIONS = sorted(script.revision for script in ScriptDirectory(str(migrate.FOLDER)).walk_revisions())
ROWS = 3
DRAWS: dict[Any, Callable[[random.Random, int], Any]] = {
    Boolean: lambda rng, _: rng.random() < 0.5,
    LargeBinary: lambda rng, _: rng.randbytes(20),
    (Integer, BigInteger): lambda rng, number: 1000 * number + rng.randrange(1000),
    (Double, Float, Numeric): lambda rng, _: float(rng.randrange(10**9)) / 8,
}
"""What fits a column of a type; the row's number makes whole numbers differ."""
REPLACED = {
    "tokens": {"digest"},
    "blocks": {"token", "turn", "priority"},
    "attempts": {"token"},
    "trials": {"attempt_id"},
}
"""Columns that 0006 replaced: a token has several secrets since, and an attempt's token is random text. That 0013
gave to the ablation: its turn, and the priority that it had already. And that 0014 leaves to the block: its attempt."""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return database_url(request.param, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(url)
    yield opened
    opened.close()


def moved(store: Store, revision: str, *, down: bool = False) -> None:
    """Bring the database to `revision`."""
    config = migrate._config()
    with store.write() as connection:
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)


def tables_of(connection: Connection) -> list[Table]:
    """Return the tables as the database has them, referred ones first."""
    found = MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if table.name != "alembic_version"]


def random_rows(rng: random.Random, table: Table, known: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return rows of random values that fit the table's types and foreign keys."""
    columns = list(table.columns)
    return [{one.name: random_value(rng, one, number, known) for one in columns} for number in range(ROWS)]


def random_value(rng: random.Random, column: Any, number: int, known: dict[str, list[dict[str, Any]]]) -> Any:
    for key in column.foreign_keys:
        return known[key.column.table.name][number][key.column.name]
    if column.nullable and rng.random() < 0.3:
        return None
    for kinds, draw in DRAWS.items():
        if isinstance(column.type, kinds):
            return draw(rng, number)
    length = min(getattr(column.type, "length", None) or 40, 40)
    return f"{number}" + "".join(rng.choices(string.ascii_letters + "äß'\"%", k=length - 1))


def contents(connection: Connection, tables: list[Table]) -> dict[str, list[dict[str, Any]]]:
    return {table.name: [dict(row._mapping) for row in connection.execute(select(table))] for table in tables}


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_no_value_of_an_earlier_schema_is_lost_or_changed(store: Store, revision: str) -> None:
    rng = random.Random(revision)  # noqa: S311
    moved(store, revision)
    with store.write() as connection:
        known: dict[str, list[dict[str, Any]]] = {}
        for table in tables_of(connection):
            known[table.name] = random_rows(rng, table, known)
            connection.execute(insert(table), known[table.name])
    migrate.upgrade(store)
    assert migrate.current_revision(store) == migrate.newest_revision()
    with store.read() as connection:
        now = contents(connection, tables_of(connection))
    for name, rows in known.items():
        kept = [column for column in rows[0] if column not in REPLACED.get(name, set())]
        assert {comparable(row, kept) for row in rows} == {comparable(row, kept) for row in now[name]}, name


def comparable(row: dict[str, Any], columns: list[str]) -> tuple[str, ...]:
    return tuple(str(bytes(row[name]) if isinstance(row[name], memoryview) else row[name]) for name in columns)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_an_ablation_that_was_judged_under_an_earlier_schema_is_served(
    tmp_path: Path, kind: str, revision: str
) -> None:
    with running_api(kind, tmp_path) as api:
        made = api.submit()
        api.finish(api.register())
        waiting = api.submit()
        handlers = OutboxHandlers(api.store)
        for step in (OutboxKind.JUDGE, OutboxKind.REPORT):
            assert handlers.run_due(step)
        told = shown(api, made)
        url = database_url(kind, tmp_path)
        written_earlier(api.store, url, revision)
    with running_api("sqlite", tmp_path, database_url=url) as api:
        assert migrate.current_revision(api.store) == migrate.newest_revision()
        assert shown(api, made) == told
        assert projector(api.store, RecordingSink()).run_due()
        assert api.finish(api.register("after-the-upgrade")) == 6
        assert api.get(waiting["links"]["self"]).json()["state"] == "completed"


def written_earlier(source: Store, url: str, revision: str) -> None:
    """Fill a new database of an earlier schema with what `source` holds: the columns that there were then."""
    store = Store(url)
    moved(store, revision)
    with source.read() as connection:
        known = contents(connection, tables_of(connection))
    attempts = {row["id"]: row["attempt_id"] for row in known["blocks"]}
    with store.write() as connection:
        for table in tables_of(connection):
            rows = [] if table.name.startswith("token") else known.get(table.name, [])
            if table.name == "blocks":
                rows = [{"priority": 50, "turn": row["index"], **row} for row in rows]
            if table.name == "trials":
                rows = [{"attempt_id": attempts[row["block_id"]], **row} for row in rows]
            if rows:
                connection.execute(insert(table), [{one.name: then(row, one) for one in table.columns} for row in rows])
        if connection.dialect.name == "postgresql":
            for name, key in (("events", "seq"), ("outbox", "id")):
                last = f"(SELECT max({key}) FROM {name})"  # noqa: S608
                connection.exec_driver_sql(f"SELECT setval(pg_get_serial_sequence('{name}', '{key}'), {last})")
    store.close()


def then(row: dict[str, Any], column: Any) -> Any:
    """Return a column's value in an earlier schema; tokens of attempts were small numbers once."""
    if column.name == "token" and isinstance(column.type, Integer | BigInteger):
        return 1
    return row[column.name]


def shown(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    trials = api.get(made["links"]["self"] + "/trials?limit=100").json()["items"]
    return {
        "state": api.get(made["links"]["self"]).json()["state"],
        "verdict": api.get(made["links"]["verdict"]).json()["digest"],
        "report": api.get(made["links"]["report"]).text,
        "receipts": [api.get(f"/v1/trials/{trial['id']}/receipt").json()["digest"] for trial in trials],
    }


def test_a_database_of_newer_code_is_refused_by_its_name(url: str, store: Store, tmp_path: Path) -> None:
    migrate.upgrade(store)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigurationError, match=r"schema '9999', which this code does not know \(it ends at"):
        migrate.upgrade(store)
    with store.read() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"


def test_the_migration_says_what_waits_and_changes_nothing_when_it_is_only_asked(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(migrate, "get_settings", lambda: SimpleNamespace(sqlalchemy_url=url))
    moved(store, REVISIONS[-3])

    def said(*options: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["migrate", *options])
        assert migrate.main() == 0
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]

    assert said("--dry-run") == REVISIONS[-2:]
    assert migrate.current_revision(store) == REVISIONS[-3]
    assert said() == REVISIONS[-2:]
    assert migrate.current_revision(store) == REVISIONS[-1]
    assert said("--dry-run") == said() == ["no migration waits"]


def test_every_migration_follows_another() -> None:
    walked = ScriptDirectory(str(migrate.FOLDER)).walk_revisions()
    scripts = {script.revision: script.down_revision for script in walked}
    heads = set(scripts) - {before for before in scripts.values() if isinstance(before, str)}
    assert len(heads) == 1
