"""Probes: how the devices of a machine are found and their state is read, one for each kind of driver.

Counters are read instead of the momentary state: a slow-down in the middle of a trial is seen, and nothing is asked
while a step is measured.
"""

import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil

from experiments.records.messages import DeviceInfo
from workers.devices.device_state import DeviceState
from workers.devices.nvidia_probe import NvidiaProbe
from workers.devices.probe_types import Found, Probe
from workers.devices.tpu_probes import LibtpuProbe, TpuProbe


class HostProbe:
    """The machine's own processors, as one device."""

    def find(self) -> Found:
        """Return the one device, which is always there."""
        return Found(devices=(DeviceInfo(index=0, name=_cpu_name(), serial=None, memory_bytes=memory_limit_bytes()),))

    def memory_used(self) -> Mapping[int, int]:
        """Return nothing: memory of processes that ended is free."""
        return {}

    def users(self) -> tuple[int, ...]:
        """Return nothing: everybody may use the host."""
        return ()

    def state(self, index: int) -> DeviceState | None:
        """Return None: there are no such counters."""
        return None


class XlaHostProbe(HostProbe):
    """The machine's own processors under XLA."""

    def find(self) -> Found:
        """Return the one device, where torch_xla is installed."""
        if find_spec("torch_xla") is None:
            return Found(lacks=("torch_xla is not installed in this environment; `make tpu` makes one that has it",))
        return super().find()


PROBES: dict[str, Probe] = {
    "nvidia": NvidiaProbe(),
    "tpu": TpuProbe(),
    "host": HostProbe(),
    "xla_host": XlaHostProbe(),
    "libtpu": LibtpuProbe(),
}
"""Every probe by the name that node classes give it. Asked in this order; the host is always found, so what comes after
it is only looked for when it is asked for by name."""


def memory_limit_bytes() -> int:
    """Return the memory that processes here may use: the machine's, or a smaller cgroup limit."""
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
