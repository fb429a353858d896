"""AMD GPUs as their driver reports them, through AMD's library (package amdsmi, of the version of the node's ROCm)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ablate.experiments.records.messages import DeviceInfo
from ablate.workers.devices.probe_types import DeviceState, Probe, ProbeResult
from ablate.workers.environment_variables import VISIBLE_GPUS, hidden_by, visible_gpus
from ablate.workers.errors import DeviceUnknown

DRIVER = Path("/dev/kfd")
"""Exists where AMD's driver for computing is loaded. The library is imported only there, as it fails without one."""
_MIB = 2**20
_WHOLE = "SPX"
"""Partition mode of a GPU that is one device."""
_BLIND_SPOTS = "no clock, slow-down or memory error of an AMD GPU is read: no guard sees them"


class AmdProbe(Probe):
    """The GPUs of this worker."""

    def find(self) -> ProbeResult:
        """Return the GPUs in the order of CUDA_VISIBLE_DEVICES, which ROCm obeys, too."""
        if not DRIVER.exists():
            return ProbeResult()
        try:
            with _open_gpus() as (smi, gpus):
                devices = tuple(_info(smi, index, gpu) for index, gpu in gpus.items())
                driver = [smi.amdsmi_get_gpu_driver_info(gpu)["driver_version"] for gpu in gpus.values()][:1]
        except DeviceUnknown as error:
            return ProbeResult(lacks=(str(error),))
        return ProbeResult(devices=devices, driver=next(iter(driver), None), lacks=(_BLIND_SPOTS,) if devices else ())

    def memory_used(self) -> Mapping[int, int]:
        """Return the bytes in use by GPU index. Raises DeviceUnknown when the driver does not report them."""
        with _open_gpus() as (smi, gpus):
            return {index: smi.amdsmi_get_gpu_vram_usage(gpu)["vram_used"] * _MIB for index, gpu in gpus.items()}

    def users(self) -> tuple[int, ...]:
        """Return the processes on any of the GPUs. Raises DeviceUnknown when the driver does not report them."""
        with _open_gpus() as (smi, gpus):
            rows = [row for gpu in gpus.values() for row in smi.amdsmi_get_gpu_process_list(gpu)]
        return tuple(sorted({row["pid"] for row in rows}))

    def state(self, index: int) -> DeviceState | None:
        """Return the processes on all GPUs of this worker."""
        del index
        with suppress(DeviceUnknown):
            return DeviceState(processes=self.users())
        return None


@contextmanager
def _open_gpus() -> Iterator[tuple[Any, Mapping[int, Any]]]:
    """Open AMD's library; give it and the handles of this worker's GPUs by index. Raises DeviceUnknown."""
    try:
        smi = import_module("amdsmi")
    except (ImportError, KeyError, AttributeError, OSError) as error:  # AttributeError, KeyError: of another ROCm
        why = "AMD's library does not load; install the amdsmi of this ROCm (/opt/rocm/share/amd_smi)"
        raise DeviceUnknown(f"{why}: {error!r}") from error
    try:
        smi.amdsmi_init()
        try:
            yield smi, _visible(smi.amdsmi_get_processor_handles())
        finally:
            smi.amdsmi_shut_down()
    except smi.AmdSmiException as error:
        raise DeviceUnknown(f"AMD's driver does not answer: {' '.join(str(error).split())}") from error


def _visible(gpus: Sequence[Any]) -> Mapping[int, Any]:
    if (other := hidden_by()) is not None:
        raise DeviceUnknown(f"{other} hides GPUs from trials and not from this worker; use {VISIBLE_GPUS}")
    names = visible_gpus()
    if names is None:
        return dict(enumerate(gpus))
    unknown = [name for name in names if not name.isdecimal() or int(name) >= len(gpus)]
    if unknown or len(set(names)) < len(names):
        wrong = unknown[0] if unknown else ",".join(names)
        allowed = f"each index of a present GPU once: {', '.join(map(str, range(len(gpus)))) or 'none'}"
        raise DeviceUnknown(f"{VISIBLE_GPUS} names {wrong!r}; allowed: {allowed}")
    return {int(name): gpus[int(name)] for name in names}


def _info(smi: Any, index: int, gpu: Any) -> DeviceInfo:
    chip = smi.amdsmi_get_gpu_asic_info(gpu)
    partition = _WHOLE
    with suppress(smi.AmdSmiException):  # a card that cannot be divided
        partition = smi.amdsmi_get_gpu_compute_partition(gpu)
    name = chip["market_name"] if partition == _WHOLE else f"{chip['market_name']} MIG {partition}"
    return DeviceInfo(
        index=index,
        name=name,
        serial=smi.amdsmi_get_gpu_device_uuid(gpu),
        memory_bytes=smi.amdsmi_get_gpu_vram_usage(gpu)["vram_total"] * _MIB,
        capability=chip["target_graphics_version"],
    )
