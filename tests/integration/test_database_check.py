"""A start reads every page of a database only if the last stack left its journal behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.service.errors import StackError
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.supervisor import check_databases
from ablate.service.store import migrate
from ablate.service.store.session import Store
from tests.acceptance.test_restore import damaged

DIES = """
import os, signal, sys
from ablate.service.store.session import Store
from sqlalchemy import text
with Store(sys.argv[1]).write() as connection:
    connection.execute(text("INSERT INTO leaders VALUES ('other', 'holder', 1)"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def files(tmp_path: Path) -> StackFiles:
    made = StackFiles(home=tmp_path)
    made.make_folders()
    return made


def test_a_database_that_was_closed_is_not_read_whole(files: StackFiles) -> None:
    damaged(files.database)
    check_databases(files)


def test_every_page_is_read_after_a_kill(files: StackFiles) -> None:
    damaged(files.database)
    killed = subprocess.run([sys.executable, "-c", DIES, f"sqlite:///{files.database}"], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(StackError, match=r"on page .*ablate restore FILE"):
        check_databases(files)


def test_a_sound_database_starts_after_a_kill(files: StackFiles) -> None:
    store = Store(f"sqlite:///{files.database}")
    migrate.upgrade(store)
    store.close()
    assert subprocess.run([sys.executable, "-c", DIES, store.url], check=False).returncode == -signal.SIGKILL
    check_databases(files)
    assert not files.database.with_name("ablate.db-wal").exists()


@pytest.mark.parametrize("name", ["database", "mlflow_database"])
@pytest.mark.parametrize("journal", ["wal", "journal", None])
def test_something_else_in_its_place_is_always_refused(files: StackFiles, name: str, journal: str | None) -> None:
    database: Path = getattr(files, name)
    database.parent.mkdir(exist_ok=True)
    database.write_bytes(b"no database" * 1000)
    if journal is not None:
        database.with_name(f"{database.name}-{journal}").touch()
    with pytest.raises(StackError, match="file is not a database"):
        check_databases(files)
