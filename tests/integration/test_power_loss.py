"""What was promised is on the disk when the machine loses its power: rows of SQLite, spooled reports, a node's key."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from ablate.experiments.outcomes import FailureClass
from ablate.service.store.migrate import upgrade
from ablate.service.store.session import Store
from ablate.service.store.tables import tokens
from ablate.workers.leases.spool import Spool
from ablate.workers.node import node_signer
from tests.chaos.disks import SmallDisk

ROOT = Path(__file__).parents[2]
NAMES = """
import sys
from pathlib import Path
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.identity import BlockReport
from ablate.service.store.access import tokens
from ablate.service.store.session import Store
from ablate.workers.node import node_signer
from ablate.workers.leases.spool import Spool
from sqlalchemy import event
folder = Path(sys.argv[1])
store = Store(f"sqlite:///{folder / 'ablate.db'}")
"""
ROW = """
with store.write() as connection:
    tokens.create(connection, tokens.node_token("node-a", None), by="admin")
"""
CARELESS = """
event.listen(store.writer, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
"""
REPORT = """
report = BlockReport(token="x" * 22, failure_class=FailureClass.TIMEOUT, message="it broke")
Spool(folder / "spool").keep("att_1", report)
"""
KEY = """
print(node_signer(folder / "keys" / "node").key)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path / "disk")
    if not made.mounted:
        pytest.skip("nothing may be mounted here")
    store = Store(f"sqlite:///{made.folder / 'ablate.db'}")
    upgrade(store)
    store.close()
    os.sync()
    yield made
    made.close()


def done_before_a_power_loss(disk: SmallDisk, code: str) -> str:
    """Run code in a process of its own, which is killed when it is done; return what it printed."""
    script = f"{NAMES}{code}\nprint('done', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", script, str(disk.folder)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = []
        while (line := process.stdout.readline()) not in ("done\n", ""):
            printed.append(line)
        assert line, "the process ended early"
        process.kill()
    disk.lose_power()
    return "".join(printed).strip()


def stored_tokens(disk: SmallDisk) -> list[str]:
    store = Store(f"sqlite:///{disk.folder / 'ablate.db'}")
    with store.read() as connection:
        names = list(connection.execute(select(tokens.c.name)).scalars())
    store.close()
    return names


def test_committed_row_survives(disk: SmallDisk) -> None:
    done_before_a_power_loss(disk, ROW)
    assert stored_tokens(disk) == ["node/node-a"]


def test_row_of_a_careless_connection_is_lost(disk: SmallDisk) -> None:
    done_before_a_power_loss(disk, CARELESS + ROW)
    assert stored_tokens(disk) == []


def test_spooled_report_survives(disk: SmallDisk) -> None:
    done_before_a_power_loss(disk, REPORT)
    sent = []
    Spool(disk.folder / "spool").send_all(lambda attempt, report: sent.append((attempt, report.failure_class)))
    assert sent == [("att_1", FailureClass.TIMEOUT)]


def test_key_that_a_node_signed_with_survives(disk: SmallDisk) -> None:
    key = done_before_a_power_loss(disk, KEY)
    assert node_signer(disk.folder / "keys" / "node").key == key
