"""A full disk accepts changes of pages that are there, and nothing else: readiness must not call that working."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from service.store import leaders
from service.store.migrate import upgrade
from service.store.session import Store
from tests.chaos.databases import DATABASES
from tests.chaos.disks import SmallDisk
from tests.chaos.proxies import Proxies


@pytest.fixture(params=sorted(DATABASES))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SmallDisk, Store]]:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)  # PostgreSQL runs as another user
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("nothing may be mounted here")
    with Proxies() as proxies:
        database = DATABASES[request.param](disk, tmp_path, proxies, processes=1)
        database.create()
        store = Store(database.url)
        upgrade(store)
        yield disk, store
        store.close()
        if database.part is not None:
            database.part.stop(patience_s=10)
    disk.close()


def mark(store: Store, text: str) -> str | None:
    with store.write() as connection:
        leaders.write_mark(connection, text)
        return leaders.read_mark(connection)


def test_readiness_finds_a_full_disk(stored: tuple[SmallDisk, Store]) -> None:
    disk, store = stored
    assert mark(store, "before") == "before"
    with disk.full() as is_full:
        assert is_full
        with pytest.raises((OSError, OperationalError), match=r"No space left|disk is full|bytes are free"):
            mark(store, "full")
    assert mark(store, "after") == "after"
