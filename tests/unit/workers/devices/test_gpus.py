"""Any NVIDIA GPU: what its driver answers and what not, drawn, through the real client of the driver's library."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.experiments.node_classes import NODE_CLASSES
from ablate.workers.devices.inventory import find_devices
from ablate.workers.devices.nvidia_probe import NvidiaProbe
from ablate.workers.errors import DeviceMissing
from tests.nvidia_gpus import GIB, FakeGpu, put_driver, put_smi

MODELS = {
    "NVIDIA H200": ("h200", "9.0", 141),
    "NVIDIA H100 80GB HBM3": ("h100", "9.0", 80),
    "NVIDIA H100 PCIe": ("h100-pcie", "9.0", 80),
    "NVIDIA A100-SXM4-80GB": ("a100-80gb", "8.0", 80),
    "NVIDIA A100-PCIE-40GB": ("a100-pcie-40gb", "8.0", 40),
    "NVIDIA L40S": ("l40s", "8.9", 45),
    "NVIDIA GeForce RTX 4090": ("rtx-4090", "8.9", 24),
    "NVIDIA GeForce RTX 3090": ("rtx-3090", "8.6", 24),
    "NVIDIA RTX 6000 Ada Generation": ("rtx-6000-ada", "8.9", 48),
    "NVIDIA B200": ("b200", "10.0", 179),
    "NVIDIA GH200 480GB": ("gh200-480gb", "9.0", 95),
    "Tesla V100-SXM2-32GB": ("v100-32gb", "7.0", 32),
}
UNSEEN = ("Serial", "ClockInfo", "DisplayActive", "CudaComputeCapability", "MigMode")


def _counters(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    put_smi(folder, monkeypatch, f'echo "{line}"')


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_class_memory_and_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    node_class, capability, gib = MODELS[name]
    gpus = [
        FakeGpu(name=name, uuid=f"GPU-{number}", serial=f"7{number}", capability=capability, total=gib * GIB)
        for number in range(4)
    ]
    put_driver(tmp_path, monkeypatch, gpus)
    _counters(tmp_path, monkeypatch, "0, 0, 0, 0, 0")
    devices = find_devices()
    assert devices.node_class is NODE_CLASSES[node_class]
    assert [(one.index, one.serial, one.capability) for one in devices.devices] == [
        (number, f"7{number}", capability) for number in range(4)
    ]
    assert (devices.first.memory_bytes, devices.driver, devices.lacks) == (gib * GIB, "570.124.06", ())
    assert find_devices(node_class).node_class is devices.node_class
    if node_class not in ("h100", "h200"):
        sized = find_devices(f"{node_class}-{gib}gb")
        assert (sized.node_class.name, sized.devices) == (f"{node_class}-{gib}gb", devices.devices)
        with pytest.raises(DeviceMissing, match=f"its probe found {name}"):
            find_devices(f"{node_class}-{gib + 1}gb")
    with pytest.raises(DeviceMissing, match=f"its probe found {name}"):
        find_devices("a10")


def test_drawn_machines_say_what_their_guards_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(50)  # noqa: S311 - a seeded draw
    drawn = set()
    for _ in range(150):
        name = draw.choice(list(MODELS))
        node_class, capability, gib = MODELS[name]
        without = frozenset(draw.sample(UNSEEN, draw.randrange(4)))
        display, slow_downs = (
            draw.random() < 0.3,
            draw.choice(["0, 0, 0, 0, 0", "[N/A], 0, 0, 0, [N/A]", "0, 0, 0, 0, [N/A]"]),
        )
        slices = [
            FakeGpu(name=f"{name} MIG 1g.{gib // 8}gb", uuid=f"MIG-{number}0000000", total=gib * GIB // 8)
            for number in range(draw.choice([0, 0, 1, 3]))
        ]
        gpu = FakeGpu(
            name=name,
            uuid="GPU-1",
            serial="77",
            capability=capability,
            total=gib * GIB,
            display=display,
            slices=slices,
            without=without,
        )
        put_driver(tmp_path, monkeypatch, [gpu])
        _counters(tmp_path, monkeypatch, slow_downs)
        devices = find_devices()
        sliced = bool(slices) and "MigMode" not in without
        is_there = {
            "is a slice": sliced,
            "drives a display": display and not sliced and "DisplayActive" not in without,
            "reports no clock": not sliced and "ClockInfo" in without,
            "does not count its slow-downs": slow_downs.startswith("["),
        }
        drawn.add((sliced, *is_there.values()))
        assert {words for words in is_there if any(words in one for one in devices.lacks)} == {
            words for words, present in is_there.items() if present
        }
        assert len(devices.lacks) == sum(is_there.values())
        if sliced:
            assert devices.node_class.name.endswith(f"-mig-1g-{gib // 8}gb")
            assert (devices.node_class.offers, len(devices.devices)) == ((1,), 1)
            assert devices.first.serial == "MIG-00000000"
            assert devices.node_class.peak("bfloat16", 1) is None
        else:
            assert devices.node_class.name == node_class
            assert devices.first.serial == ("GPU-1" if "Serial" in without else "77")
            assert devices.first.capability == (None if "CudaComputeCapability" in without else capability)
    assert len(drawn) == 2**3 + 2  # of a slice only its slow-downs differ


def test_workers_of_two_slices_share_neither_lock_nor_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA A100-SXM4-80GB"
    slices = [FakeGpu(name=f"{name} MIG 3g.40gb", uuid=f"MIG-{letter}aaaaaaa", total=40 * GIB) for letter in "bc"]
    put_driver(tmp_path, monkeypatch, [FakeGpu(name=name, uuid="GPU-1", slices=slices)], apps=[(4711, slices[1].uuid)])
    locks = []
    for one, users in zip(slices, [(), (4711,)], strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", one.uuid)
        devices = find_devices("a100-80gb-mig-3g-40gb")
        locks.append(devices.locks("worker"))
        assert devices.probe.users() == users
        assert (devices.proof().problem(patience_s=0) is None) == (not users)
    assert not set(locks[0]) & set(locks[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(one.uuid for one in slices))
    with pytest.raises(DeviceMissing, match="CUDA opens one slice: start a worker for each"):
        find_devices("a100-80gb-mig-3g-40gb")


def test_a_slice_whose_name_does_not_say_so_is_no_whole_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeGpu(
        name="NVIDIA H200", uuid="GPU-1", slices=[FakeGpu(name="NVIDIA H200", uuid="MIG-1", total=18 * GIB)]
    )
    put_driver(tmp_path, monkeypatch, [whole])
    assert find_devices().node_class.name == "h200-mig-18gb"


def test_a_gpu_without_memory_of_its_own_has_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(name="NVIDIA GB10", uuid="GPU-1", without=frozenset({"MemoryInfo"}))
    put_driver(tmp_path, monkeypatch, [gpu])
    devices = find_devices()
    assert devices.node_class.name == "gb10"
    assert devices.first.memory_bytes > GIB
    assert any("no memory of its own" in one for one in devices.lacks)
    assert NvidiaProbe().memory_used() == {0: 0}
    put_driver(tmp_path, monkeypatch, [replace(gpu, without=frozenset())], apps=[(4711, "GPU-1")])
    assert "processes [4711] are on the device" in str(devices.proof().problem(patience_s=0))
