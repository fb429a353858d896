import mmap
from pathlib import Path

import pytest
import torch

from ablate.kernels.backends import NODE_CLASSES
from ablate.model.errors import MeasurementError
from ablate.model.training import measurement
from ablate.model.training.measurement import MEASURED_DEVICES, PeakMeter

CPU = torch.device("cpu")
MIB = 2**20


def touch(mib: int) -> None:
    """Take and give back `mib` MiB."""
    torch.ones(mib * MIB, dtype=torch.uint8)


def take_pages(mib: int) -> None:
    """Take and give back `mib` MiB of new pages; a tensor may be given free ones that the process still holds."""
    with mmap.mmap(-1, mib * MIB) as pages:
        pages[:: mmap.PAGESIZE] = bytes(mib * MIB // mmap.PAGESIZE)


def reserved(meter: PeakMeter) -> int:
    return meter.read(lambda: touch(1), state_bytes=0).reserved_bytes


@pytest.fixture(autouse=True, scope="module")
def loaded_profiler() -> None:
    """Use torch's profiler once: what it takes at its first use stays with the process."""
    measurement.profiled_peak_bytes(lambda: touch(1))


def test_peak_meter_sees_memory_that_was_given_back() -> None:
    before = reserved(PeakMeter(CPU))
    meter = PeakMeter(CPU)
    take_pages(96)
    assert 64 * MIB < reserved(meter) - before < 130 * MIB


def test_peak_meter_forgets_what_was_before_it() -> None:
    meter = PeakMeter(CPU)
    take_pages(192)
    earlier = reserved(meter)
    assert reserved(PeakMeter(CPU)) < earlier - 100 * MIB


def test_peak_meter_adds_what_the_pass_takes_to_what_is_held() -> None:
    peak = PeakMeter(CPU).read(lambda: touch(7), state_bytes=5 * MIB)
    assert peak.allocated_bytes == 12 * MIB


def test_watched_peak_is_the_highest_sum_alive_at_once() -> None:
    def two_then_one() -> None:
        kept = torch.ones(3 * MIB, dtype=torch.uint8)
        touch(2)
        touch(4)
        del kept

    assert measurement.profiled_peak_bytes(two_then_one) == 7 * MIB
    assert measurement.profiled_peak_bytes(two_then_one) == 7 * MIB


def test_watched_peak_refuses_to_report_nothing() -> None:
    with pytest.raises(MeasurementError, match="reported no allocation"):
        measurement.profiled_peak_bytes(lambda: None)


def test_peak_meter_says_when_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measurement, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    with pytest.raises(MeasurementError, match=r"clear_refs failed \(No such file or directory\); it takes Linux"):
        PeakMeter(CPU)


def test_peak_meter_says_when_the_status_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meter = PeakMeter(CPU)
    monkeypatch.setattr(measurement, "_STATUS", tmp_path / "status")
    with pytest.raises(MeasurementError, match="status failed"):
        meter.read(lambda: touch(1), state_bytes=0)


def test_peak_meter_says_when_the_field_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meter = PeakMeter(CPU)
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  10 kB\n")
    monkeypatch.setattr(measurement, "_STATUS", tmp_path / "status")
    with pytest.raises(MeasurementError, match="has no field VmHWM"):
        meter.read(lambda: touch(1), state_bytes=0)


def test_peak_meter_refuses_devices_that_it_would_measure_as_a_cpu() -> None:
    with pytest.raises(MeasurementError, match="on devices of type 'meta'; known: cpu, cuda"):
        PeakMeter(torch.device("meta"))


def test_devices_of_every_node_class_that_trains_can_be_read() -> None:
    assert {entry.device_type for entry in NODE_CLASSES.values() if entry.lanes} <= set(MEASURED_DEVICES)
