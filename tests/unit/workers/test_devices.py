from pathlib import Path

import pytest

from kernels.backends import NodeClass
from workers import devices

_TWO = """0, NVIDIA H200, 1652823001234, 143771, 4, 570.124.06
1, NVIDIA H200, [N/A], 143771, 520, 570.124.06
"""


def test_parse_gpus_columns_and_missing_serial() -> None:
    first, second = devices.parse_gpus(_TWO)
    assert (first.index, first.name, first.serial, first.driver) == (0, "NVIDIA H200", "1652823001234", "570.124.06")
    assert first.memory_total_bytes == 143771 * 2**20
    assert (second.serial, second.memory_used_bytes) == (None, 520 * 2**20)


def _fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_probe_finds_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, f"cat <<'X'\n{_TWO}X")
    found = devices.probe()
    assert found.node_class is NodeClass.H200
    assert [device.index for device in found.devices] == [0, 1]
    assert found.driver == "570.124.06"


def test_probe_unknown_gpu_is_cpu_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, "echo '0, NVIDIA T4, 1, 15360, 0, 550.1'")
    found = devices.probe()
    assert found.node_class is NodeClass.CPU
    assert "NVIDIA T4" in found.lacks[0]


def test_probe_broken_nvidia_smi_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, "exit 9")
    found = devices.probe()
    assert found.node_class is NodeClass.CPU
    assert "nvidia-smi is installed but failed" in found.lacks[0]


def test_probe_cpu_override_on_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, f"cat <<'X'\n{_TWO}X")
    found = devices.probe(NodeClass.CPU)
    assert found.node_class is NodeClass.CPU
    assert found.first.name
    assert found.first.memory_bytes > 2**30


def test_memory_is_free_tells_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, f"cat <<'X'\n{_TWO}X")
    monkeypatch.setattr(devices, "_FREE_PATIENCE_S", 0.0)
    assert devices.memory_is_free({0: 4 * 2**20, 1: 500 * 2**20}) is None
    assert devices.memory_is_free({0: 4 * 2**20, 1: 0}) == "GPU 1 still holds 520 MiB more than before the trial"


def test_memory_is_free_without_gpus() -> None:
    assert devices.memory_is_free({}) is None
