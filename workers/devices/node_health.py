"""Reasons why this node must take no block now: its devices are not free, its disk is full, or no lane works."""

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ablate.experiments.design.gates import BACK_ENDS
from ablate.experiments.records.messages import DeviceHealth
from ablate.experiments.system.processes import is_alive
from ablate.kernels.backends import NodeClass
from ablate.model.measurements import GIB
from ablate.workers.devices.probe_types import Probe
from ablate.workers.errors import DeviceUnknown
from ablate.workers.lease import boot_time_s

_SLACK_BYTES = 64 * 2**20
_PATIENCE_S = 15.0
_RETRY_S = 0.2
_MIB = 2**20
_IDLE_CHECK_EVERY_S = 30.0
"""Time between two checks of idle devices that were free."""


class ReleaseProof:
    """Proof that trials have left nothing on this node's devices.

    It keeps the least memory that was ever in use on each device, and the processes that SIGKILL did not end.
    """

    def __init__(self, probe: Probe, expected: Iterable[int] = ()) -> None:
        """Check the devices of `probe`; those with an index in `expected` must always be present."""
        self._probe = probe
        self._expected = frozenset(expected)
        self._floor: dict[int, int] = {}
        self._survivors: set[int] = set()
        self.last: str | None = None
        """Why the devices were not free at the last check, None when they were."""

    def survived(self, pids: Sequence[int]) -> None:
        """Note processes of a trial that SIGKILL did not end."""
        self._survivors.update(pids)

    def problem(self, *, patience_s: float = _PATIENCE_S) -> str | None:
        """Wait at most `patience_s` for the devices to be free; return why they are not, None when they are."""
        deadline = time.monotonic() + patience_s
        while (problem := self._check()) is not None and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        self.last = problem
        return problem

    def _check(self) -> str | None:
        """Check once. A device whose driver does not answer counts as not free."""
        self._survivors = {pid for pid in self._survivors if is_alive(pid)}
        if self._survivors:
            return f"processes {sorted(self._survivors)} survived SIGKILL"
        try:
            used, users = self._probe.memory_used(), self._probe.users()
        except DeviceUnknown as error:
            return f"the driver does not say whether the device is free: {error}"
        missing = sorted(self._expected - used.keys())
        if missing:
            return f"device {missing[0]} is missing; present: {sorted(used) or 'none'}"
        if users:
            return f"processes {sorted(users)} are on the device, but no trial runs"
        return self._memory_in_use(used)

    def _memory_in_use(self, used: Mapping[int, int]) -> str | None:
        """Compare with the floor, which sinks with every check of an unused device."""
        self._floor = {index: min(now, self._floor.get(index, now)) for index, now in used.items()}
        excess = {index: now - self._floor[index] for index, now in used.items()}
        sentences = [
            f"device {index} still has {more / _MIB:.0f} MiB more in use than when it was free"
            for index, more in excess.items()
            if more > _SLACK_BYTES
        ]
        return "; ".join(sentences) or None


class NodeHealth:
    """Checks the node before every claim; a problem that has gone away is cleared by the next check."""

    def __init__(
        self,
        proof: ReleaseProof,
        node_class: NodeClass,
        *,
        lanes: Mapping[str, str | None] | None,
        folders: Sequence[Path],
        least_disk_gib: float,
    ) -> None:
        self._proof = proof
        self._node_class = node_class
        self.lanes = lanes
        """Result of each lane, as `NodeRegistration.lanes`."""
        self._folders = folders
        self._least_disk_gib = least_disk_gib
        self._next_check_at = 0.0

    def renew(self, lanes: Mapping[str, str | None] | None) -> None:
        """Take the results of lanes that were tested anew, and let the next check look at the devices, too."""
        self.lanes, self._next_check_at = lanes, 0.0

    def problem(self) -> str | None:
        """Return why this node must take no block now, None when it can."""
        return self._no_lane() or self._no_space() or self._not_released()

    def _no_lane(self) -> str | None:
        own = {str(lane) for lane in self._node_class.lanes}
        lanes = {lane: reason for lane, reason in (self.lanes or {}).items() if lane in own or lane not in BACK_ENDS}
        if not lanes or None in lanes.values():
            return None
        reasons = "; ".join(f"{lane}: {reason}" for lane, reason in lanes.items())
        return f"no lane of class '{self._node_class}' runs here ({reasons})"

    def _no_space(self) -> str | None:
        for folder in self._folders:
            free_gib = free_gib_at(folder)
            if free_gib < self._least_disk_gib:
                needed = f"needed: {self._least_disk_gib:g} (ABLATE_LEAST_DISK_GIB)"
                return f"{free_gib:.2f} GiB are free at {folder}, {needed}"
        return None

    def _not_released(self) -> str | None:
        was_free = self._proof.last is None
        if was_free and boot_time_s() < self._next_check_at:
            return None
        self._next_check_at = boot_time_s() + _IDLE_CHECK_EVERY_S
        return self._proof.problem() if was_free else self._proof.problem(patience_s=0.0)


def free_gib_at(folder: Path) -> float:
    """Return the free space in GiB of the disk that has `folder`, or that would have it."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / GIB


def device_state(problem: str | None) -> DeviceHealth:
    """Return the wire value for a problem."""
    return DeviceHealth.OK if problem is None else DeviceHealth.QUARANTINED
