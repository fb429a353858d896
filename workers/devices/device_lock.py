"""One worker and one trainer on a device of this machine at a time, whatever home they have, held by the kernel.

A lock is the name of an abstract Unix socket. It lasts as long as a process has the socket open, ends with the last of
them however that ended, and leaves no file behind. Trainers hold one of their own, because a worker that dies may be
gone before its trainer is. Containers with a network of their own do not see each other's locks.
"""

import hashlib
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from experiments.runtime.processes import command_of
from workers.errors import DeviceBusy

TRAINER_PATIENCE_S = 20.0
"""How long the trainer of a worker that has died may take to end."""

_LOOK_EVERY_S = 0.02
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64
_SHOWN = 120  # characters
_HOLDER_PATIENCE_S = 1.0
_WAY_OUT = "stop that process, or leave it part of the machine: docs/operate.md, 'Add a worker'"


class DeviceLock:
    """The locks of one process; they are held until `release` or the end of the process."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._held: list[socket.socket] = []

    def __enter__(self) -> "DeviceLock":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What is held: another process that gets these holds it as well."""
        return tuple(self._held)

    def take(self, *, patience_s: float = 0.0) -> None:
        """Take all locks, or none. Raises DeviceBusy, with the holder, when one is not free within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while (busy := self._try()) is not None:
            if time.monotonic() >= deadline:
                raise DeviceBusy(f"{_device(busy)} of this machine is held by {_holder(busy)}; {_WAY_OUT}")
            time.sleep(_LOOK_EVERY_S)

    def release(self) -> None:
        """Give all locks back."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _try(self) -> str | None:
        """Take all locks; return the address of one that somebody else has, and then hold none."""
        for address in self._addresses:
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._held.append(lock)
            try:
                lock.bind(address)
                lock.listen(_BACKLOG)  # who asks for the holder connects to it
            except OSError:  # EADDRINUSE: there is no other reason for an abstract name of this length
                self.release()
                return address
        return None


def lock_addresses(devices: Iterable[str], *, holder: str, scope: str) -> tuple[str, ...]:
    """Return the locks of `devices` for a kind of holder, "worker" or "trainer", in one set of locks."""
    digest = hashlib.sha256(scope.encode()).hexdigest()[:16]
    return tuple(f"\0ablate:{digest}:{holder}:{device}" for device in devices)


def _device(address: str) -> str:
    return address.split(":", 3)[3]


def _holder(address: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_HOLDER_PATIENCE_S)
        try:
            probe.connect(address)
            told = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return "a process that does not say which"
    pid, _user, _group = _CREDENTIALS.unpack(told)
    command = " ".join(command_of(pid).split())[:_SHOWN] or "of another container or user"
    return f"process {pid} ({command})"
