"""A home is backed up while it works and restored after more was done: nothing but the later work is missing."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ablate.service.errors import StackError
from ablate.service.stack.backup import back_up, restore
from ablate.service.stack.layout import StackFiles
from ablate.service.store import migrate
from ablate.service.store.session import Store
from tests.acceptance.test_stack import EXACT, Home
from tests.mlflow_contents import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ran(home: Home, spec: Path) -> str:
    """Run the spec to its end; return the new ablation's id."""
    done = home.run("run", str(spec))
    assert done.returncode == 0, done.stderr
    return str(listed(home)[0]["id"])


def listed(home: Home) -> list[dict[str, Any]]:
    return list(json.loads(home.run("list", "--json").stdout))


def verdict_and_receipts(home: Home, ablation_id: str) -> dict[str, Any]:
    """Return what people read of an ablation."""
    return {
        "verdict": json.loads(home.run("verdict", ablation_id, "--json").stdout),
        "receipts": home.run("offline", "receipts", ablation_id, "--json").stdout,
    }


def test_a_restored_home_says_the_same_shows_the_same_and_works_on(tmp_path: Path) -> None:
    home, backup = Home(tmp_path / "home"), tmp_path / "backups" / "ablate.backup"
    spec = tmp_path / "smallest.yaml"
    spec.write_text(EXACT)
    try:
        home.up()
        first = ran(home, spec)
        assert json.loads(home.run("admin", "mlflow", "rebuild", "--json").stdout) == {"projected": 1}
        before, shown = verdict_and_receipts(home, first), contents(home.mlflow())
        assert len(shown) == 7, "one parent, two arms and four trials"
        assert home.run("admin", "backup", str(backup)).returncode == 0
        assert backup.stat().st_mode & 0o777 == 0o600
        assert home.run("admin", "backup", str(backup)).returncode == 5, "a backup is never overwritten"
        assert home.run("run", str(spec), "--detach").returncode == 0
        later = str(listed(home)[0]["id"])
        refused = home.run("admin", "restore", str(backup))
        assert refused.returncode == 5
        assert "ablate down" in refused.stderr
        home.run("down")
        shutil.rmtree(home.files.mlflow)
        kept = json.loads(home.run("admin", "restore", str(backup), "--json").stdout)["kept"]
        assert Path(kept).is_file()
        home.up()
        assert [row["id"] for row in listed(home)] == [first]
        assert home.run("show", later).returncode == 5
        assert verdict_and_receipts(home, first) == before
        assert json.loads(home.run("admin", "mlflow", "rebuild", "--json").stdout) == {"projected": 1}
        assert contents(home.mlflow()) == shown
        ran(home, spec)
        assert len(listed(home)) == 2, "the worker registered again and runs what comes"
    finally:
        home.run("down")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), (b"text", "is not an Ablate backup"), (b"", "is not an Ablate backup")],
)
def test_what_is_no_backup_changes_nothing(tmp_path: Path, content: bytes | None, message: str) -> None:
    home, file = Home(tmp_path / "home"), tmp_path / "file"
    database = home.files.home / "ablate.db"
    database.parent.mkdir()
    database.write_bytes(b"as it was")
    if content is not None:
        file.write_bytes(content)
    done = home.run("admin", "restore", str(file))
    assert done.returncode == 5
    assert message in done.stderr
    assert database.read_bytes() == b"as it was"


def damaged(file: Path) -> None:
    """Write a database of this version whose index lacks a row of its table."""
    store = Store(f"sqlite:///{file}")
    migrate.upgrade(store)
    store.close()
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("INSERT INTO leaders VALUES ('duty', 'holder', 1)")
        connection.execute("CREATE INDEX by_holder ON leaders (holder)")
        page = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'by_holder'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with file.open("r+b") as raw:  # an index page without entries
        raw.seek((page - 1) * size + 3)
        raw.write(bytes(2))


def test_a_damaged_database_is_neither_backed_up_nor_restored(tmp_path: Path) -> None:
    file, copy = tmp_path / "damaged.db", tmp_path / "backup.db"
    damaged(file)
    with pytest.raises(StackError, match=r"damaged\.db is damaged: .*by_holder"):
        back_up(f"sqlite:///{file}", copy)
    assert not copy.exists()
    home = StackFiles(home=tmp_path / "home")
    database = home.home / "ablate.db"
    database.parent.mkdir()
    database.write_bytes(b"as it was")
    with pytest.raises(StackError, match=r"damaged\.db is damaged: .*by_holder"):
        restore(f"sqlite:///{database}", file, home)
    assert [(path.name, path.read_bytes()) for path in database.parent.iterdir()] == [("ablate.db", b"as it was")]


def test_a_copy_that_fails_leaves_the_database_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, database = tmp_path / "backup.db", tmp_path / "home" / "ablate.db"
    store = Store(f"sqlite:///{file}")
    migrate.upgrade(store)
    store.close()
    database.parent.mkdir()
    database.write_bytes(b"as it was")

    def fills_the_disk(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:5000])
        raise OSError(28, "No space left on device")

    for copies, problem in (
        (fills_the_disk, "No space"),
        (lambda _from, to: to.write_bytes(b"x"), "not an Ablate backup"),
    ):
        monkeypatch.setattr("ablate.service.stack.backup.shutil.copyfile", copies)
        with pytest.raises((OSError, StackError), match=problem):
            restore(f"sqlite:///{database}", file, StackFiles(home=database.parent))
        assert [path.name for path in database.parent.iterdir()] == ["ablate.db"]
        assert database.read_bytes() == b"as it was"
