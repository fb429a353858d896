"""Ends the PostgreSQL server in a folder, and removes that, when the process that asked for it has ended.

However that ended: pytest-xdist kills its processes 10 s after their last test, and with them whatever they do at their
exit. Stopping a server took longer while another process started one, for which the wheel holds a lock of the machine.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

STOP_S = 60


def end_with_this_process(folder: Path) -> None:
    """Start the program below, which hears from a pipe that this process is gone."""
    heard, _held = os.pipe()  # the other end is never closed, and no other program inherits it
    command = [sys.executable, "-P", __file__, str(folder)]
    files = [(os.POSIX_SPAWN_DUP2, heard, 0), *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2))]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)  # Ctrl-C is not for it
    os.close(heard)


def main() -> None:
    """Wait for the end of the pipe; then end the server, which has nothing to keep."""
    folder = Path(sys.argv[1])
    sys.stdin.read()
    with suppress(FileNotFoundError, psutil.Error):  # it had never started, or has ended
        server = psutil.Process(int((folder / "postmaster.pid").read_text().split()[0]))
        if str(folder) in server.cmdline():
            server.send_signal(signal.SIGQUIT)
            server.wait(STOP_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
