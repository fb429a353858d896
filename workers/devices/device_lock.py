"""Locks that allow one block and one trainer per device of this machine, whatever the state folders of their workers.

A lock is the name of an abstract Unix socket. It lasts as long as any process has the socket open, and leaves no file
behind. A trainer takes a lock of its own, because a worker that dies may be gone before its trainer. Containers with a
network namespace of their own do not see each other's locks.
"""

import hashlib
import shlex
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ablate.experiments.system.processes import command_of, variable_of
from ablate.workers.errors import DeviceBusy

TRAINER_PATIENCE_S = 20.0
"""How long the trainer of a dead worker may take to end."""

_RETRY_S = 0.02
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64
_COMMAND_LIMIT = 120  # characters
_CONNECT_PATIENCE_S = 1.0
_SHARED = "or leave it part of the machine: docs/operate.md, 'A second worker on one machine'"


class DeviceLock:
    """The locks of one process, from `take` to `release` or to the end of the process."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "DeviceLock":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets of the locks: a process that inherits them has the locks, too."""
        return tuple(self._sockets)

    def take(self, *, patience_s: float = 0.0) -> None:
        """Take all locks or none. Raises DeviceBusy, with the holder, when one is not free within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while (busy := self._try()) is not None:
            holder = _holder(busy)
            if holder is not None and time.monotonic() >= deadline:  # None: it has become free
                raise DeviceBusy(_in_use(busy, holder))
            time.sleep(_RETRY_S)

    def release(self) -> None:
        """Release all locks."""
        for lock in self._sockets:
            lock.close()
        self._sockets.clear()

    def _try(self) -> str | None:
        """Take all locks, or take none and return the address of one that another process has."""
        for address in self._addresses:
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sockets.append(lock)
            try:
                lock.bind(address)
                lock.listen(_BACKLOG)  # a process that looks for the holder connects to it
            except OSError:  # EADDRINUSE: the only possible reason for an abstract name of this length
                self.release()
                return address
        return None


def lock_addresses(devices: Iterable[str], *, holder: str, scope: str) -> tuple[str, ...]:
    """Return the locks of `devices` for a kind of holder, as `Devices.locks`, in the lock set `scope`.

    They are in one order for all processes: of two that want the same devices, one gets all of them.
    """
    digest = hashlib.sha256(scope.encode()).hexdigest()[:16]
    return tuple(f"\0ablate:{digest}:{holder}:{device}" for device in sorted(devices))


def in_use(addresses: Iterable[str]) -> str | None:
    """Say which process has the first of these locks that is not free; None if all are. Takes none of them."""
    for address in addresses:
        pid = _holder(address)
        if pid is not None:
            return _in_use(address, pid)
    return None


def _holder(address: str) -> int | None:
    """Return the process that has a lock, 0 for an unknown one; None if the lock is free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_PATIENCE_S)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            return None
        except OSError:
            return 0
    return int(_CREDENTIALS.unpack(credentials)[0])


def _home_of(pid: int) -> Path | None:
    home = variable_of(pid, "ABLATE_HOME")
    return None if home is None else Path(home).resolve()


def _in_use(address: str, pid: int | None) -> str:
    """Say which process has a lock, and what to type."""
    device, home = address.split(":", 3)[3], _home_of(pid) if pid else None
    command = " ".join(command_of(pid).split())[:_COMMAND_LIMIT] if pid else ""
    holder = f"process {pid} ({command or 'of another container or user'})" if pid else "an unknown process"
    stop = "stop that process"
    if pid and home is not None and variable_of(pid, "ABLATE_STACK_ID"):
        stop = f"it is the worker of the stack in {home}: ABLATE_HOME={shlex.quote(str(home))} ablate down"
    return f"{device} of this machine is in use by {holder}; {stop}, {_SHARED}"
