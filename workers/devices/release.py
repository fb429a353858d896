"""Proof that nothing of a trial is left on this node's devices. What cannot be told is not free."""

import time
from collections.abc import Iterable, Sequence

from experiments.runtime.processes import is_alive
from workers.devices.probe_types import Probe
from workers.errors import DeviceUnknown

_SLACK_BYTES = 64 * 2**20
_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.2
_MIB = 2**20


class ReleaseProof:
    """Knows the least memory that was ever in use on each device, and which processes would not die."""

    def __init__(self, probe: Probe, expected: Iterable[int] = ()) -> None:
        """Watch the devices that `probe` finds; those `expected`, by index, must always be among them."""
        self._probe = probe
        self._expected = frozenset(expected)
        self._floor: dict[int, int] = {}
        self._survivors: set[int] = set()
        self.last: str | None = None
        """Why the devices were not free at the last look, None when they were."""

    def survived(self, pids: Sequence[int]) -> None:
        """Note processes of a trial that even SIGKILL did not end."""
        self._survivors.update(pids)

    def problem(self, *, patience_s: float = _PATIENCE_S) -> str | None:
        """Look until the devices are free, at most `patience_s`; return why they are not, None when they are."""
        deadline = time.monotonic() + patience_s
        while (found := self._look()) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self.last = found
        return found

    def _look(self) -> str | None:
        self._survivors = {pid for pid in self._survivors if is_alive(pid)}
        if self._survivors:
            return f"processes {sorted(self._survivors)} survived SIGKILL"
        try:
            used, users = self._probe.memory_used(), self._probe.users()
        except DeviceUnknown as error:
            return f"whether the device is free cannot be told: {error}"
        gone = sorted(self._expected - used.keys())
        if gone:
            return f"device {gone[0]} is not there any more; found: {sorted(used) or 'none'}"
        if users:
            return f"processes {sorted(users)} are on the device, and no trial runs"
        return self._held(dict(used))

    def _held(self, used: dict[int, int]) -> str | None:
        """Compare with the floor, which sinks with every look at a device that nobody uses."""
        self._floor = {index: min(now, self._floor.get(index, now)) for index, now in used.items()}
        over = {index: now - self._floor[index] for index, now in used.items()}
        held = [
            f"device {index} still holds {more / _MIB:.0f} MiB more than when it was free"
            for index, more in over.items()
            if more > _SLACK_BYTES
        ]
        return "; ".join(held) or None
