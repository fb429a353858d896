"""Starts trials from a fork server that has torch imported: a fresh process without paying the import each time.

The server must be started from the main thread: the kernel ties a child's death signal to the thread that made it.
"""

import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from workers import trial
from workers.errors import PreloadError
from workers.result import TrialOrder

PRELOAD = "workers.preload"
_START_PATIENCE_S = 120.0
_DEATH_PATIENCE_S = 10.0
"""How long a killed fork server may take to end; only then does multiprocessing start another one."""
_LOOK_EVERY_S = 0.05


class ForkServer:
    """The one fork server of this worker; its processes run `target`."""

    def __init__(self, *, preload: str = PRELOAD, target: Callable[[TrialOrder], None] = trial.main) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._preload = preload
        self._target = target
        self._context.set_forkserver_preload([preload])

    def check(self) -> None:
        """Start the server and make sure that the preload really happened.

        multiprocessing ignores an ImportError of a preloaded module, and every trial would silently pay the import.

        Raises:
            PreloadError: the import failed, or the server did not come up.

        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_report_preload, args=(self._preload, theirs))
        try:
            process.start()
            theirs.close()
            if not ours.poll(_START_PATIENCE_S):
                raise PreloadError(f"the fork server did not start within {_START_PATIENCE_S:.0f} s")
            problem = ours.recv()
        except (EOFError, ConnectionError) as error:
            raise PreloadError("the fork server died while it started; see the worker's log") from error
        finally:
            ours.close()
        process.join()
        if problem is not None:
            raise PreloadError(f"the fork server could not import {self._preload}: {problem}")

    def start(self, order: TrialOrder) -> ForkServerProcess:
        """Start a trial; its process group has the number of its process.

        A server that was killed is replaced, once it has ended.
        """
        deadline = time.monotonic() + _DEATH_PATIENCE_S
        while True:
            process = self._context.Process(target=self._target, args=(order,), name=f"trial-{order.trial_id}")
            try:
                process.start()
            except (EOFError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_EVERY_S)
            else:
                return process


def _report_preload(module: str, pipe: Connection) -> None:
    if module in sys.modules:
        pipe.send(None)
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("it was not imported before the fork")
