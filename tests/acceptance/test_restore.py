"""A home is backed up while it works and restored after more was done: nothing but the later work is missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

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


def told(home: Home, ablation_id: str) -> dict[str, Any]:
    """Return what people read of an ablation."""
    return {
        "verdict": json.loads(home.run("verdict", ablation_id, "--json").stdout),
        "receipts": home.run("receipts", "get", ablation_id, "--json").stdout,
    }


def test_a_restored_home_says_the_same_shows_the_same_and_works_on(tmp_path: Path) -> None:
    home, backup = Home(tmp_path / "home"), tmp_path / "backups" / "ablate.backup"
    spec = tmp_path / "smallest.yaml"
    spec.write_text(EXACT)
    try:
        state = home.up()
        first = ran(home, spec)
        assert json.loads(home.run("mlflow", "rebuild", "--json").stdout) == {"projected": 1}
        before, shown = told(home, first), contents(state["mlflow_url"])
        assert len(shown) == 7, "one parent, two arms and four trials"
        assert home.run("backup", str(backup)).returncode == 0
        assert backup.stat().st_mode & 0o777 == 0o600
        assert home.run("backup", str(backup)).returncode == 5, "a backup is never overwritten"
        assert home.run("submit", str(spec)).returncode == 0
        later = str(listed(home)[0]["id"])
        refused = home.run("restore", str(backup))
        assert refused.returncode == 5
        assert "ablate down" in refused.stderr
        home.run("down")
        shutil.rmtree(home.files.mlflow)
        kept = json.loads(home.run("restore", str(backup), "--json").stdout)["kept"]
        assert Path(kept).is_file()
        state = home.up()
        assert [row["id"] for row in listed(home)] == [first]
        assert home.run("show", later).returncode == 5
        assert told(home, first) == before
        assert json.loads(home.run("mlflow", "rebuild", "--json").stdout) == {"projected": 1}
        assert contents(state["mlflow_url"]) == shown
        ran(home, spec)
        assert len(listed(home)) == 2, "the worker registered again and runs what comes"
    finally:
        home.run("down")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no file"), (b"text", "is not an Ablate backup"), (b"", "is not an Ablate backup")],
)
def test_what_is_no_backup_changes_nothing(tmp_path: Path, content: bytes | None, said: str) -> None:
    home, file = Home(tmp_path / "home"), tmp_path / "file"
    database = home.files.home / "ablate.db"
    database.parent.mkdir()
    database.write_bytes(b"as it was")
    if content is not None:
        file.write_bytes(content)
    done = home.run("restore", str(file))
    assert done.returncode == 5
    assert said in done.stderr
    assert database.read_bytes() == b"as it was"
