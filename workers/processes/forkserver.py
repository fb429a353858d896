"""Starts trials from a fork server that has torch imported, so that a fresh process does not pay for the import.

The main thread must start the server, because the kernel ties a child's death signal to the thread that started it.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, TypeVar

from ablate.experiments.system.processes import MAX_FOLDER_BYTES, end_all, group_members, socket_folder
from ablate.workers.errors import PreloadError
from ablate.workers.isolation.environment import hide_secrets
from ablate.workers.processes import trial
from ablate.workers.trials.result import TrialOrder

PRELOAD = "ablate.workers.processes.preload"
_START_PATIENCE_S = 120.0
_DEATH_PATIENCE_S = 10.0
"""Time that a killed fork server may take to end; only then does multiprocessing start another one."""
_RETRY_S = 0.05
_END_PATIENCE_S = 2.0
_OWN_FILES = "/proc/self/fd"
_ADDRESS = "_forkserver_address"
"""Attribute of multiprocessing's server object."""

_T = TypeVar("_T")


class ForkServer:
    """The one fork server of this worker; its processes run `target`."""

    def __init__(self, *, preload: str = PRELOAD, target: Callable[[TrialOrder], None] = trial.main) -> None:
        _shorten_sockets()
        hide_secrets()  # before any process starts: they all inherit the environment, and trials run foreign code
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._preload = preload
        self._target = target
        self._socket: int | None = None
        """The server's socket, which has no other name."""
        self._context.set_forkserver_preload([preload])

    @property
    def pid(self) -> int | None:
        """The server's process number, None before its start."""
        return getattr(forkserver._forkserver, "_forkserver_pid", None)

    @property
    def tracker_pid(self) -> int | None:
        """The process of multiprocessing that removes what others leave."""
        return getattr(resource_tracker._resource_tracker, "_pid", None)

    def check(self) -> None:
        """Start the server and verify its preload.

        multiprocessing ignores an ImportError of a preloaded module: every trial would silently pay for the import.

        Raises:
            PreloadError: the import failed, or the server did not start.

        """
        problem = self.call(_preload_problem, self._preload, patience_s=_START_PATIENCE_S)
        if problem is not None:
            raise PreloadError(f"the fork server could not import {self._preload}: {problem}")

    def call(self, target: Callable[..., _T], *arguments: Any, patience_s: float) -> _T:
        """Return the value of `target(*arguments)` from a process of its own, all of which has ended by then.

        Raises:
            PreloadError: it died, or gave no answer within `patience_s`.

        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(theirs, target, arguments))
        try:
            self._ensure_running()
            process.start()
            theirs.close()  # the pipe then ends together with the process
            if not ours.poll(patience_s):
                raise PreloadError(f"the fork server gave no answer within {patience_s:.0f} s")
            answer: _T = ours.recv()
        except (EOFError, ConnectionError) as error:
            raise PreloadError("the fork server or its process died before it answered; see the log") from error
        finally:
            ours.close()
            theirs.close()
            _end(process)
        return answer

    def _ensure_running(self) -> None:
        """Start the server if it does not run, and remove its socket from the file system.

        Who connects to the socket runs any code in a process that is not isolated. This process keeps the only path.
        """
        forkserver.ensure_running()
        address = str(getattr(forkserver._forkserver, _ADDRESS))
        if address.startswith(_OWN_FILES):
            return
        if self._socket is not None:
            os.close(self._socket)
        self._socket = os.open(address, os.O_PATH | os.O_CLOEXEC)
        Path(address).unlink()
        setattr(forkserver._forkserver, _ADDRESS, f"{_OWN_FILES}/{self._socket}")

    def start(self, order: TrialOrder) -> ForkServerProcess:
        """Start a trial; its process group has the number of its process.

        When the server was killed, multiprocessing starts another one as soon as the old one has ended.
        """
        deadline = time.monotonic() + _DEATH_PATIENCE_S
        while True:
            process = self._context.Process(target=self._target, args=(order,), name=f"trial-{order.trial_id}")
            try:
                self._ensure_running()
                process.start()
            except (EOFError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
            else:
                return process


def _shorten_sockets() -> None:
    """Let multiprocessing make its sockets below a short folder if TMPDIR is too long for them."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > MAX_FOLDER_BYTES:
        tempfile.tempdir = str(socket_folder())
        try:
            get_temp_dir()  # remembers its folder for this process and its children
        finally:
            tempfile.tempdir = usual


def _answer(pipe: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    pipe.send(target(*arguments))


def _end(process: ForkServerProcess) -> None:
    pid = process.pid
    if pid is None:  # it was never started
        return
    process.join(_END_PATIENCE_S)
    end_all(lambda: sorted({*([pid] if process.is_alive() else []), *group_members(pid)}), grace_s=0)


def _preload_problem(module: str) -> str | None:
    if module in sys.modules:
        return None
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "it was not imported before the fork"
