"""NVIDIA GPUs as their driver reports them: all, or those that CUDA_VISIBLE_DEVICES assigns to this worker.

The driver's library NVML ignores that variable, but CUDA obeys it. Without this filter, two workers with one GPU each
would report each other's trainers as foreign processes. Slow-downs and memory errors are read with nvidia-smi: NVML
counts slow-downs for newer drivers only.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from ablate.experiments.records.messages import DeviceInfo
from ablate.workers.devices.probe_types import DeviceState, Probe, ProbeResult
from ablate.workers.environment_variables import VISIBLE_GPUS, visible_gpus
from ablate.workers.errors import DeviceUnknown

_STATE = ",".join(
    (
        "clocks_event_reasons_counters.sw_power_cap",
        "clocks_event_reasons_counters.sw_thermal_slowdown",
        "clocks_event_reasons_counters.hw_thermal_slowdown",
        "clocks_event_reasons_counters.hw_power_brake_slowdown",
        "ecc.errors.uncorrected.volatile.total",
    )
)
_SLOW_DOWNS = 4
_SMI_TIMEOUT_S = 20.0
_LEAST_UUID_CHARS = 8
_ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_NO_ANSWER = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
"""Errors of a query that this card, or its driver, does not answer."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a slice of one (MIG), while the driver's library is open."""

    index: int
    """In the driver's order, in which the slices of a GPU take its place."""
    card: int
    """Index of the whole GPU."""
    handle: Any
    uuid: str
    is_slice: bool

    def read(self, query: str, *arguments: Any) -> Any:
        """Return the answer to a query of NVML by the end of its name, None if this card gives none."""
        return answer(query, self.handle, *arguments)


class NvidiaProbe(Probe):
    """The GPUs of this worker."""

    def find(self) -> ProbeResult:
        """Return the GPUs in the order of CUDA_VISIBLE_DEVICES: a trial of one device uses the first."""
        try:
            with open_gpus() as gpus:
                lacks = [sentence for gpu in gpus for sentence in _blind_spots(gpu)]
                devices = tuple(_info(gpu) for gpu in gpus)
                driver = pynvml.nvmlSystemGetDriverVersion() if gpus else None
        except NoDriver as error:
            return ProbeResult(lacks=(str(error),) if shutil.which("nvidia-smi") else ())
        except DeviceUnknown as error:
            return ProbeResult(lacks=(str(error),))
        return ProbeResult(devices=devices, driver=driver, lacks=tuple(lacks))

    def memory_used(self) -> Mapping[int, int]:
        """Return the bytes in use by GPU index; 0 on a card that has no memory of its own.

        Raises DeviceUnknown when the driver does not answer.
        """
        with open_gpus() as gpus:
            sizes = {gpu.index: gpu.read("MemoryInfo") for gpu in gpus}
        return {index: 0 if size is None else size.used for index, size in sizes.items()}

    def users(self) -> tuple[int, ...]:
        """Return the processes that compute on any of the GPUs. Raises DeviceUnknown when the driver hides them."""
        with open_gpus() as gpus:
            tables = [gpu.read("ComputeRunningProcesses") for gpu in gpus]
        if None in tables:
            raise DeviceUnknown("the driver does not say which processes are on a GPU")
        pids = {row.pid for table in tables for row in table}
        if 0 in pids:
            raise DeviceUnknown("the driver hides the number of a process on a GPU")
        return tuple(sorted(pids))

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of GPU `index` and the processes on all GPUs of this worker."""
        counters, processes = None, None
        with suppress(DeviceUnknown), open_gpus() as gpus:
            counters = next((_counters(gpu.card) for gpu in gpus if gpu.index == index), None)
        with suppress(DeviceUnknown):
            processes = self.users()
        return None if counters is None and processes is None else parse_state(counters, processes)


class NoDriver(DeviceUnknown):
    """This machine has no driver of NVIDIA."""


@contextmanager
def open_gpus() -> Iterator[Sequence[Gpu]]:
    """Open the driver's library and give this worker's GPUs in CUDA's order.

    Raises NoDriver; and DeviceUnknown when the driver does not answer, or CUDA_VISIBLE_DEVICES names a missing GPU, or
    one twice, or two slices: CUDA would silently use fewer.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        kind = NoDriver if error.value in _ABSENT else DeviceUnknown
        raise kind(f"NVIDIA's driver does not answer: {error}") from error
    try:
        yield _visible(_present())
    except pynvml.NVMLError as error:
        raise DeviceUnknown(f"NVIDIA's driver does not answer: {error}") from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _present() -> list[Gpu]:
    gpus: list[Gpu] = []
    for card in range(pynvml.nvmlDeviceGetCount()):
        whole = pynvml.nvmlDeviceGetHandleByIndex(card)
        handles = list(_slices(whole)) or [whole]
        for handle in handles:
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            gpus.append(Gpu(index=len(gpus), card=card, handle=handle, uuid=uuid, is_slice=handle is not whole))
    return gpus


def _slices(card: Any) -> Iterator[Any]:
    """Yield the slices of a GPU; none unless they are turned on."""
    mode = answer("MigMode", card)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
        except pynvml.NVMLError_NotFound:
            continue


def _visible(gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    names = visible_gpus()
    if names is None:  # with slices, CUDA takes the first one alone
        return [gpu for gpu in gpus if gpu.is_slice][:1] or gpus
    chosen = [_named(name, gpus) for name in names]
    if len({gpu.index for gpu in chosen}) < len(chosen):
        raise DeviceUnknown(f"{VISIBLE_GPUS} names a GPU twice: {','.join(names)}")
    if len(chosen) > 1 and any(gpu.is_slice for gpu in chosen):
        raise DeviceUnknown(f"{VISIBLE_GPUS} names {','.join(names)}; CUDA opens one slice: start a worker for each")
    return chosen


def _named(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU with this index, or with a UUID that begins so; of a sliced GPU the first slice."""
    by_uuid = len(name) >= _LEAST_UUID_CHARS
    matches = [gpu for gpu in gpus if by_uuid and gpu.uuid.startswith(name)]
    matches = matches or [gpu for gpu in gpus if name == str(gpu.card)][:1]
    if len(matches) != 1:
        present = ", ".join(f"{gpu.card} ({gpu.uuid})" for gpu in gpus) or "none"
        raise DeviceUnknown(f"{VISIBLE_GPUS} names {name!r}; allowed: index or UUID of a present GPU: {present}")
    return matches[0]


def answer(query: str, *arguments: Any) -> Any:
    """Return NVML's answer to a query by the end of its name, None if the card or its driver gives none."""
    try:
        return getattr(pynvml, f"nvmlDeviceGet{query}")(*arguments)
    except pynvml.NVMLError as error:
        if error.value not in _NO_ANSWER:
            raise
        return None


def _info(gpu: Gpu) -> DeviceInfo:
    """Return what a worker says of a GPU. Without a serial number, as on consumer cards, its UUID stands for it."""
    name, memory, capability = gpu.read("Name"), gpu.read("MemoryInfo"), gpu.read("CudaComputeCapability")
    memory_bytes = psutil.virtual_memory().total if memory is None else memory.total
    if gpu.is_slice and "MIG" not in name:
        name = f"{name} MIG {memory_bytes >> 30}gb"
    return DeviceInfo(
        index=gpu.index,
        name=name,
        serial=(None if gpu.is_slice else gpu.read("Serial")) or gpu.uuid,
        memory_bytes=memory_bytes,
        capability=None if capability is None else ".".join(map(str, capability)),
    )


def _blind_spots(gpu: Gpu) -> Iterator[str]:
    """Yield sentences about what the guards cannot see on a GPU."""
    name = f"GPU {gpu.index}"
    if gpu.is_slice:
        yield f"{name} is a slice: work on the other slices of its card takes from the same clock and power, unseen"
    if gpu.read("DisplayActive"):
        yield f"{name} drives a display: its desktop takes time and memory, and no guard sees it"
    if gpu.read("MemoryInfo") is None:
        yield f"{name} has no memory of its own: nothing shows what a trial leaves in it"
    if gpu.read("ClockInfo", pynvml.NVML_CLOCK_SM) is None:
        yield f"{name} reports no clock"
    counters = _counters(gpu.card)
    if counters is None or None in [_number(cell) for cell in counters.split(",")[:_SLOW_DOWNS]]:
        yield f"{name} does not count its slow-downs: no guard sees that it was hot or throttled"


def _counters(card: int) -> str | None:
    """Return nvidia-smi's line of counters of a whole GPU as CSV without header and units; None when it gives none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, f"--query-gpu={_STATE}", f"--id={card}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None


def parse_state(counters: str | None, processes: Sequence[int] | None) -> DeviceState:
    """Read nvidia-smi's line of counters, without header and units; None stands for no answer."""
    cells = [None] * 5 if counters is None else [_number(cell) for cell in counters.split(",")]
    power_cap, sw_thermal, hw_thermal, power_brake, ecc = cells
    return DeviceState(
        sw_power_cap_us=power_cap,
        sw_thermal_slowdown_us=sw_thermal,
        hw_thermal_slowdown_us=hw_thermal,
        hw_power_brake_us=power_brake,
        ecc_uncorrected=ecc,
        processes=None if processes is None else tuple(processes),
    )


def _number(cell: str) -> int | None:
    return int(cell) if cell.strip().isdecimal() else None
