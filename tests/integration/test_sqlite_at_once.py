"""API and background process open a new SQLite file at the same moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import text

from service.store.session import Store

OPENERS = 8


def test_stores_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    for number in range(10):
        together = threading.Barrier(OPENERS)
        stores = [Store(f"sqlite:///{tmp_path / f'{number}.db'}") for _ in range(OPENERS)]

        def mode(store: Store, together: threading.Barrier = together) -> str:
            together.wait()
            with store.read() as connection:
                return str(connection.execute(text("PRAGMA journal_mode")).scalar())

        with ThreadPoolExecutor(OPENERS) as pool:
            assert list(pool.map(mode, stores)) == ["wal"] * OPENERS
        for store in stores:
            store.close()
