"""Why this node must take no block now: its devices are not free, its disk is full, or nothing runs on it."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.design.metrics import GIB
from experiments.records.messages import DeviceHealth
from kernels.backends import NodeClass
from workers.devices.release import ReleaseProof
from workers.lease import boot_time_s

_LOOK_EVERY_S = 30.0
"""Between two looks at idle devices that were free."""


class NodeHealth:
    """Looks again before every claim, and finds by itself that a trouble is over."""

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
        """What really ran on each lane, as `NodeRegistration.lanes`."""
        self._folders = folders
        self._least_disk_gib = least_disk_gib
        self._look_at = 0.0

    def problem(self) -> str | None:
        """Return why this node must take no block now, None when it can."""
        return self._no_lane() or self._no_space() or self._held()

    def _no_lane(self) -> str | None:
        if self.lanes is None or None in self.lanes.values():
            return None
        reasons = "; ".join(f"{lane}: {reason}" for lane, reason in self.lanes.items())
        return f"no lane of class '{self._node_class}' runs here ({reasons})"

    def _no_space(self) -> str | None:
        for folder in self._folders:
            free_gib = free_gib_at(folder)
            if free_gib < self._least_disk_gib:
                needed = f"needed: {self._least_disk_gib:g} (ABLATE_LEAST_DISK_GIB)"
                return f"{free_gib:.2f} GiB are free at {folder}, {needed}"
        return None

    def _held(self) -> str | None:
        known = self._proof.last
        if known is None and boot_time_s() < self._look_at:
            return None
        self._look_at = boot_time_s() + _LOOK_EVERY_S
        return self._proof.problem() if known is None else self._proof.problem(patience_s=0.0)


def free_gib_at(folder: Path) -> float:
    """Return the free space where a folder is, or would be made."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / GIB


def device_state(problem: str | None) -> DeviceHealth:
    """Return the word on the wire for a problem."""
    return DeviceHealth.OK if problem is None else DeviceHealth.QUARANTINED
