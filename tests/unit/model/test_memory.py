from pathlib import Path

import pytest
import torch

from model import memory
from model.errors import MeasurementError
from model.memory import PeakMeter

CPU = torch.device("cpu")
MIB = 2**20


def touch(mib: int) -> None:
    """Take and give back `mib` MiB."""
    torch.ones(mib * MIB, dtype=torch.uint8)


def test_peak_meter_sees_memory_that_was_given_back() -> None:
    meter = PeakMeter(CPU)
    touch(96)
    peak = meter.read()
    assert 90 * MIB < peak.allocated_bytes < 130 * MIB
    assert peak.reserved_bytes > peak.allocated_bytes


def test_peak_meter_forgets_what_was_before_it() -> None:
    touch(192)
    peak = PeakMeter(CPU).read()
    assert peak.allocated_bytes < 64 * MIB


def test_peak_meter_says_when_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    with pytest.raises(MeasurementError, match=r"clear_refs failed \(No such file or directory\); it takes Linux"):
        PeakMeter(CPU)


def test_peak_meter_says_when_the_status_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meter = PeakMeter(CPU)
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    with pytest.raises(MeasurementError, match="status failed"):
        meter.read()


def test_peak_meter_says_when_the_field_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meter = PeakMeter(CPU)
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  10 kB\n")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    with pytest.raises(MeasurementError, match="has no field VmHWM"):
        meter.read()
