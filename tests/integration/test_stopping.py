"""A bench that is told to stop leaves no server behind, and a process that is killed no database."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

PROGRAM = """
import signal, sys
from tests import api_stack
from tests.bench.processes import server
from tests.ports import free_port
from tests.stopping import leave_when_told
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
leave_when_told()
database = [api_stack._postgres().get_pid()] if sys.argv[1] == "postgresql" else []
port = free_port()
with server([sys.executable, "-m", "http.server", str(port)], port, environment={}, ready="/") as process:
    print("servers", *database, process.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(("number", "store"), [(signal.SIGTERM, "postgresql"), (signal.SIGHUP, "sqlite")])
def test_a_bench_that_is_told_to_stop_ends_its_servers(number: signal.Signals, store: str) -> None:
    command = [sys.executable, "-c", PROGRAM, store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as bench:
        assert bench.stdout is not None
        told = next(line for line in bench.stdout if line.startswith("servers"))
        servers = [psutil.Process(int(pid)) for pid in told.split()[1:]]
        try:
            assert len(servers) == {"postgresql": 2, "sqlite": 1}[store]
            bench.send_signal(number)
            assert bench.wait(60) == 128 + number
            assert psutil.wait_procs(servers, timeout=60)[1] == []
        finally:
            for process in servers:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_process_that_is_killed_leaves_no_database() -> None:
    program = (
        "import signal\nfrom tests import api_stack\nfound = api_stack._postgres()\n"
        "print('database', found.get_pid(), found.pgdata, flush=True)\nsignal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        told = next(line for line in killed.stdout if line.startswith("database")).split()
        database, folder = psutil.Process(int(told[1])), Path(told[2])
        try:
            assert folder.is_dir()
            killed.kill()
            assert psutil.wait_procs([database], timeout=60)[1] == []
            until(lambda: not folder.exists(), patience_s=60, what="the folder's end")
        finally:
            with suppress(psutil.NoSuchProcess):
                database.kill()
