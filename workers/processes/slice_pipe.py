"""The pipe between a worker and a trainer that runs in slices: one waits while the other acts, and neither spins.

The trainer says that it waits; the worker says that it may go on. Each word is one byte, so nothing is ever left over.
"""

import os
from contextlib import suppress
from multiprocessing.connection import Connection

from workers.processes.failures import TOO_LATE

_WORD = b"."


def yield_to_others(worker: Connection) -> None:
    """Say that this trainer waits, and block until it may go on; without a worker it ends."""
    try:
        worker.send_bytes(_WORD)
        worker.recv_bytes()
    except (EOFError, OSError):
        os._exit(TOO_LATE)


def let_go_on(trainer: Connection) -> None:
    """Tell a trainer that waits to go on; one that has died meanwhile shows by its end."""
    with suppress(OSError):
        trainer.send_bytes(_WORD)


def waits(trainer: Connection) -> bool:
    """Take what a trainer has said, if anything: that it waits again. False when it is gone, or said nothing."""
    try:
        return trainer.poll() and bool(trainer.recv_bytes())
    except (EOFError, OSError):
        return False
